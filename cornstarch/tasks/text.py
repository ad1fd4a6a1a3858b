"""Tokenizes texts: length limits, truncation, padding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from cornstarch.config import DataConfig
from cornstarch.data.sample import Content, Sample, SampleError, SampleTooLongError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.models.multimodal_language_model.preprocessing.tokenization import (
    check_vocabulary,
    count_embedding_rows,
)
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument, unwrap


@dataclass(frozen=True)
class PreparedText:
    """One tokenized sample."""

    id: str
    inputs: Mapping[str, Tensor]
    """By the name of the model's argument, [S] each."""
    labels: Tensor
    """[T] labels of tokens, -100 where nothing is learned; or one label of the sample, []."""


class TextReader:
    """Tokenizes texts for a model.

    Args:
        tokenizer: The model's tokenizer.
        data: The length limit, and what happens to longer texts.
        model: The model, which may have a lower limit and may not take all outputs of the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, model: nn.Module) -> None:
        self.tokenizer, self.data = tokenizer, data
        limits = [(data.max_length, "max_length is"), (tokenizer.model_max_length, "the tokenizer's limit is")]
        limits += [(positions, "the model's limit is") for positions in _position_limits(model)]
        self.limit, self._limited_by = min(limits, key=lambda limit: limit[0])
        check_vocabulary(tokenizer, unwrap(model))
        self.table = count_embedding_rows(unwrap(model))
        wanted = dict.fromkeys(("input_ids", "attention_mask", *tokenizer.model_input_names))
        self._names = [name for name in wanted if accepts_argument(model, name)]
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_token = next(token for token in pads if token is not None)

    def read(self, text: str, sample_id: str) -> dict[str, Tensor]:
        """Return the model's inputs for a text: `input_ids`, and other outputs of the tokenizer."""
        encoded = self.tokenizer(text, verbose=False)
        if len(encoded["input_ids"]) > self.limit:
            self._check_too_long(len(encoded["input_ids"]), sample_id)
            encoded = self.tokenizer(text, truncation=True, max_length=self.limit, verbose=False)
        self._check_table(encoded["input_ids"])
        names = [name for name in self._names if name in encoded and name != "attention_mask"]
        return {name: torch.tensor(encoded[name], dtype=torch.long) for name in names}

    def read_target(self, text: str, sample_id: str) -> Tensor:
        """Return the tokens of a text that the model generates, ending with the end token."""
        ids = self.tokenizer(text_target=text, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        added = [end] if end is not None and ids[-1:] != [end] else []
        if len(ids) + len(added) > self.limit:
            self._check_too_long(len(ids) + len(added), sample_id)
            room = self.limit - len(added)
            ids = self.tokenizer(text_target=text, truncation=True, max_length=room, verbose=False)["input_ids"]
        self._check_table(ids)
        return torch.tensor([*ids, *added], dtype=torch.long)

    def _check_too_long(self, length: int, sample_id: str) -> None:
        if self.data.too_long == "cut":
            return
        reason = f"has {length} tokens, {self._limited_by} {self.limit}"
        if self.data.too_long == "skip":
            raise SampleTooLongError(reason)
        raise ConfigError(
            f"{sample_id}: {reason}. Raise the limit if the model can do more, shorten it, or set `data.too_long` to "
            "skip or cut."
        )

    def _check_table(self, ids: Sequence[int]) -> None:
        if self.table is not None and ids and max(ids) >= self.table:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise ConfigError(
                f"The tokenizer has the token {token!r} with number {max(ids)}, the model's table has {self.table} "
                "rows: they do not belong together. Give the model's own tokenizer, `model.whole.tokenizer`."
            )

    def pad(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return rows padded at their ends to one length, with the attention mask."""
        fills = {"input_ids": self.pad_token, "token_type_ids": self.tokenizer.pad_token_type_id}
        inputs = {
            name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fills.get(name, 0))
            for name in rows[0]
        }
        if "attention_mask" in self._names:
            ones = [torch.ones_like(row["input_ids"]) for row in rows]
            inputs["attention_mask"] = pad_sequence(ones, batch_first=True)
        return inputs

    def join(self, samples: Sequence[PreparedText]) -> dict[str, Any]:
        """Return the inputs of a batch, padded, with `labels`."""
        labels = pad_sequence([sample.labels for sample in samples], batch_first=True, padding_value=IGNORE_INDEX)
        return {**self.pad([sample.inputs for sample in samples]), "labels": labels}

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, special tokens included."""
        return str(self.tokenizer.decode(list(ids)))


def _position_limits(model: nn.Module) -> list[int]:
    """Return the number of positions of a model; nothing if its positions are relative."""
    inner: Any = unwrap(model)
    stated = getattr(inner.config, "max_position_embeddings", None)
    found = [stated] if isinstance(stated, int) and stated > 0 else []
    for name, module in inner.named_modules():
        # A table with a padding row, as in RoBERTa, counts positions from the row after it.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            found.append(module.num_embeddings - module.padding_idx - 1)
    return found


def hash_to_seeds(text: str) -> list[int]:
    """Return seeds for random draws that depend on a text alone, equal in every process."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u4").tolist()


def require_text(content: Content) -> str:
    """Return content as text; raise SampleError if it has media."""
    for part in content:
        if not isinstance(part, str):
            raise SampleError(f"has an {part.kind}, but this model takes text only")
    return "".join(part for part in content if isinstance(part, str))


def get_text(sample: Sample) -> str:
    """Return the text of a row: its `text` or `source` field, or its document."""
    if sample.media:
        require_text(tuple(sample.media))  # raises
    given = next((sample.fields[name] for name in ("text", "source") if name in sample.fields), None)
    if given is None:
        given = require_text(sample.document)
    if not isinstance(given, str):
        raise SampleError(f"has a {type(given).__name__} as `text`, expected a string")
    if not given.strip():
        has = f", it has {sorted(map(str, sample.fields))}" if sample.fields and "text" not in sample.fields else ""
        raise SampleError(f"`text` is empty{has}")
    return given
