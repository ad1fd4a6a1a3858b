"""Texts into rows of tokens: how long they may be, how they are cut, how they are filled up."""

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

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.models.multimodal_language_model.preprocessing.vocabulary import check_vocabulary, table_size
from cornstarch.models.multimodal_language_model.unwrap import accepts, unwrap
from cornstarch.train.config import DataConfig
from cornstarch.train.data.sample import Content, Sample, SampleError, SampleTooLongError


@dataclass(frozen=True)
class PreparedText:
    """One sample as tokens."""

    id: str
    inputs: Mapping[str, Tensor]
    """By name of the model's argument, [S] each."""
    labels: Tensor
    """[T] labels of tokens, -100 where nothing is learned; or one of the sample, []."""


class TextReader:
    """Makes tokens of texts.

    Args:
        tokenizer: The model's.
        data: The limit, and what to do with longer texts.
        model: The model, which has a limit of its own and may not want all that the tokenizer makes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, model: nn.Module) -> None:
        self.tokenizer, self.data = tokenizer, data
        self.limit, self._limited_by = _longest(tokenizer, data, model)
        check_vocabulary(tokenizer, unwrap(model))
        self.table = table_size(unwrap(model))
        wanted = dict.fromkeys(("input_ids", "attention_mask", *tokenizer.model_input_names))
        self._names = [name for name in wanted if accepts(model, name)]
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad = next(token for token in pads if token is not None)

    def read(self, text: str, sample_id: str) -> dict[str, Tensor]:
        """Return what the model takes of a text: `input_ids` and whatever else the tokenizer makes."""
        encoded = self.tokenizer(text, verbose=False)
        if len(encoded["input_ids"]) > self.limit:
            self._refuse_or_cut(len(encoded["input_ids"]), sample_id)
            encoded = self.tokenizer(text, truncation=True, max_length=self.limit, verbose=False)
        self._check(encoded["input_ids"])
        names = [name for name in self._names if name in encoded and name != "attention_mask"]
        return {name: torch.tensor(encoded[name], dtype=torch.long) for name in names}

    def read_target(self, text: str, sample_id: str) -> Tensor:
        """Return the tokens of a text that the model is to write, which end with the end token."""
        ids = self.tokenizer(text_target=text, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        added = [end] if end is not None and ids[-1:] != [end] else []
        if len(ids) + len(added) > self.limit:
            self._refuse_or_cut(len(ids) + len(added), sample_id)
            room = self.limit - len(added)
            ids = self.tokenizer(text_target=text, truncation=True, max_length=room, verbose=False)["input_ids"]
        self._check(ids)
        return torch.tensor([*ids, *added], dtype=torch.long)

    def _refuse_or_cut(self, length: int, sample_id: str) -> None:
        if self.data.too_long == "cut":
            return
        said = f"has {length} tokens, {self._limited_by} {self.limit}"
        if self.data.too_long == "skip":
            raise SampleTooLongError(said)
        raise ConfigError(
            f"{sample_id}: {said}. Raise the limit if the model can do more, shorten it, or set `data.too_long` to "
            "skip or cut."
        )

    def _check(self, ids: Sequence[int]) -> None:
        if self.table is not None and ids and max(ids) >= self.table:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise ConfigError(
                f"The tokenizer has the token {token!r} with number {max(ids)}, the model's table has {self.table} "
                "rows: they do not belong together. Give the model's own tokenizer, `model.whole.tokenizer`."
            )

    def padded(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return rows filled up at their ends to one length, with their mask."""
        fills = {"input_ids": self.pad, "token_type_ids": self.tokenizer.pad_token_type_id}
        inputs = {
            name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fills.get(name, 0))
            for name in rows[0]
        }
        if "attention_mask" in self._names:
            ones = [torch.ones_like(row["input_ids"]) for row in rows]
            inputs["attention_mask"] = pad_sequence(ones, batch_first=True)
        return inputs


def padded_labels(rows: Sequence[Tensor]) -> Tensor:
    """Return labels filled up to one length with what does not count."""
    return pad_sequence(list(rows), batch_first=True, padding_value=IGNORED)


def _longest(tokenizer: PreTrainedTokenizerBase, data: DataConfig, model: nn.Module) -> tuple[int, str]:
    """Return the most tokens of a text, and what sets that limit."""
    limits = [(data.max_length, "max_length is"), (tokenizer.model_max_length, "the tokenizer's limit is")]
    limits += [(positions, "the model's limit is") for positions in _positions(model)]
    return min(limits, key=lambda limit: limit[0])


def _positions(model: nn.Module) -> list[int]:
    """Return how many positions a model can tell apart; nothing if it counts distances instead."""
    inner: Any = unwrap(model)
    stated = getattr(inner.config, "max_position_embeddings", None)
    found = [stated] if isinstance(stated, int) and stated > 0 else []
    for name, module in inner.named_modules():
        # Such a table begins after its padding row, as in RoBERTa.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            found.append(module.num_embeddings - module.padding_idx - 1)
    return found


def numbers_of(text: str) -> list[int]:
    """Return numbers that stand for a text, the same in every process: seeds of what is drawn for it."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u4").tolist()


def plain_text(content: Content) -> str:
    """Return content that must be text only."""
    for part in content:
        if not isinstance(part, str):
            raise SampleError(f"has an {part.kind}, but this model takes text only")
    return "".join(part for part in content if isinstance(part, str))


def text_of(sample: Sample) -> str:
    """Return the text of a row: its `text` (or `source`), or the document that it is."""
    if sample.media:
        plain_text(tuple(sample.media))  # says what is wrong
    given = next((sample.fields[name] for name in ("text", "source") if name in sample.fields), None)
    if given is None:
        given = plain_text(sample.document)
    if not isinstance(given, str):
        raise SampleError(f"has a {type(given).__name__} as `text`, expected a string")
    if not given.strip():
        has = f", it has {sorted(map(str, sample.fields))}" if sample.fields and "text" not in sample.fields else ""
        raise SampleError(f"`text` is empty{has}")
    return given
