"""Tasks of texts alone: encoder-decoders (T5, BART) and masked language models (BERT), and the reading of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from cornstarch.config import DataConfig, RunConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.data_report import SampleInspector, SampleStats
from cornstarch.data.sample import Content, Message, Sample, SampleError, SampleTooLongError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.models.multimodal_language_model.preprocessing import tokenization
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument, unwrap
from cornstarch.tasks.build_model import WHERE, get_whole_model, load_whole_config, load_whole_model
from cornstarch.tasks.task import Measures, TaskInputs, WholeModelTask, load_tokenizer, refuse_unused


@dataclass(frozen=True)
class PreparedText:
    """One sample, ready for a batch: tokens, or the inputs of an image."""

    id: str
    inputs: Mapping[str, Tensor]  # by the name of the model's argument, [S] each
    labels: Tensor  # [T] labels of tokens, -100 where nothing is learned; or one label of the sample, []


class TextReader:
    """Tokenizes texts for a model, which may have a lower limit than `data` and may not take all outputs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, model: nn.Module) -> None:
        self.tokenizer, self.data = tokenizer, data
        limits = [(data.max_length, "max_length is"), (tokenizer.model_max_length, "the tokenizer's limit is")]
        inner: Any = unwrap(model)
        stated = getattr(inner.config, "max_position_embeddings", None)  # None if positions are relative
        if isinstance(stated, int) and stated > 0:
            limits.append((stated, "the model's limit is"))
        for name, table in inner.named_modules():
            # A table with a padding row, as in RoBERTa, counts positions from the row after it.
            if (
                name.endswith("position_embeddings")
                and isinstance(table, nn.Embedding)
                and table.padding_idx is not None
            ):
                limits.append((table.num_embeddings - table.padding_idx - 1, "the model's limit is"))
        self.limit, self._limited_by = min(limits, key=lambda limit: limit[0])
        tokenization.check_vocabulary(tokenizer, inner)
        self.table = tokenization.count_embedding_rows(inner)
        wanted = dict.fromkeys(("input_ids", "attention_mask", *tokenizer.model_input_names))
        self._names = [name for name in wanted if accepts_argument(model, name)]
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_token = next(token for token in pads if token is not None)

    def read(self, text: str, sample_id: str) -> dict[str, Tensor]:
        """Return the model's inputs for a text: `input_ids`, and other outputs of the tokenizer."""
        encoded, _ = self._encode(sample_id, None, text=text)
        names = [name for name in self._names if name in encoded and name != "attention_mask"]
        return {name: torch.tensor(encoded[name], dtype=torch.long) for name in names}

    def read_target(self, text: str, sample_id: str) -> Tensor:
        """Return the tokens of a text that the model generates, ending with the end token."""
        encoded, added = self._encode(sample_id, self.tokenizer.eos_token_id, text_target=text)
        return torch.tensor([*encoded["input_ids"], *added], dtype=torch.long)

    def _encode(self, sample_id: str, end: Any, **text: str) -> tuple[Any, list[int]]:
        """Return the tokenizer's outputs, cut to the limit, and `end` if they lack it; refuse too long texts."""
        encoded: Any = self.tokenizer(**text, verbose=False)
        added = [end] if end is not None and encoded["input_ids"][-1:] != [end] else []
        length = len(encoded["input_ids"]) + len(added)
        if length > self.limit:
            reason = f"has {length} tokens, {self._limited_by} {self.limit}"
            if self.data.too_long == "skip":
                raise SampleTooLongError(reason)
            if self.data.too_long == "error":
                raise ConfigError(
                    f"{sample_id}: {reason}. Raise the limit if the model can do more, shorten it, or set "
                    "`data.too_long` to skip or cut."
                )
            room = self.limit - len(added)
            encoded = self.tokenizer(**text, truncation=True, max_length=room, verbose=False)
        ids = encoded["input_ids"]
        if self.table is not None and ids and max(ids) >= self.table:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise ConfigError(
                f"The tokenizer has the token {token!r} with number {max(ids)}, the model's table has {self.table} "
                "rows: they do not belong together. Give the model's own tokenizer, `model.whole.tokenizer`."
            )
        return encoded, added

    def pad(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return rows padded at their ends to one length, with the attention mask."""
        fills = {"input_ids": self.pad_token, "token_type_ids": self.tokenizer.pad_token_type_id}
        inputs = {}
        for name in rows[0]:
            fill = fills.get(name, 0)
            inputs[name] = pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        if "attention_mask" in self._names:
            ones = [torch.ones_like(row["input_ids"]) for row in rows]
            inputs["attention_mask"] = pad_sequence(ones, batch_first=True)
        return inputs

    def join(self, samples: Sequence[PreparedText]) -> CollatedBatch:
        labels = pad_sequence([sample.labels for sample in samples], batch_first=True, padding_value=IGNORE_INDEX)
        inputs = {**self.pad([sample.inputs for sample in samples]), "labels": labels}
        tokens = sum(len(sample.inputs["input_ids"]) for sample in samples)
        return CollatedBatch(inputs, [sample.id for sample in samples], tokens, int((labels != IGNORE_INDEX).sum()), {})

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))


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


SEQ2SEQ = "seq2seq-lm"
_MAX_ANSWER = 256  # tokens


def build_seq2seq_task(config: RunConfig, inputs: TaskInputs | None = None) -> Seq2SeqTask:
    refuse_unused(config.data, SEQ2SEQ, but="system")
    model_config: Any = load_whole_config(config)
    if not model_config.is_encoder_decoder:
        raise ConfigError(
            f"{WHERE}.task = {SEQ2SEQ}\n  A {model_config.model_type!r} model has no encoder and decoder. Expected T5, "
            "BART, …; a plain language model is trained with `task: causal-lm`."
        )
    tokenizer = load_tokenizer(WHERE, get_whole_model(config))
    if getattr(model_config, "decoder_start_token_id", None) is None:  # a config made from sizes: as T5 does
        model_config.decoder_start_token_id = model_config.pad_token_id
    model = load_whole_model(config, model_config, AutoModelForSeq2SeqLM)
    return Seq2SeqTask(SEQ2SEQ, model, Seq2SeqCollator(tokenizer, config.data, model), [tokenizer])


class Seq2SeqCollator(TextReader):
    def prepare(self, sample: Sample) -> PreparedText:
        question, target = _split_turns(sample)
        if target is None:
            raise SampleError("has no answer to learn; expected `source` and `target`, or a conversation")
        if not target.strip():
            raise SampleError("`target` is empty")
        return PreparedText(sample.id, self.question(sample, question), self.read_target(target, sample.id))

    def question(self, sample: Sample, turns: Sequence[Message] | None = None) -> dict[str, Tensor]:
        """Return the source as one text: the system prompt first, then the turns, with roles if there are several."""
        turns = _split_turns(sample)[0] if turns is None else turns
        prompts = [require_text(turn.content) for turn in turns if turn.role == "system"]
        if not prompts and self.data.system is not None:
            prompts = [self.data.system]
        spoken = [turn for turn in turns if turn.role != "system"]
        roles = [f"{turn.role}: " if len(spoken) > 1 else "" for turn in spoken]
        lines = [f"{role}{require_text(turn.content)}" for role, turn in zip(roles, spoken, strict=True)]
        if not any(line.strip() for line in lines):
            raise SampleError("`source` is empty")
        return self.read("\n".join([*prompts, *lines]), sample.id)

    def join(self, samples: Sequence[PreparedText]) -> CollatedBatch:
        """Return the batch of prepared samples; the model derives its decoder's inputs from the labels."""
        batch = super().join(samples)
        return replace(batch, tokens=batch.tokens + batch.trained_tokens)


def _split_turns(sample: Sample) -> tuple[tuple[Message, ...], str | None]:
    """Return the turns before the last answer, and the answer."""
    places = [number for number, message in enumerate(sample.messages) if message.role == "assistant"]
    if places:
        return sample.messages[: places[-1]], require_text(sample.messages[places[-1]].content)
    if "source" in sample.fields:  # a sample made in Python
        target = sample.fields.get("target")
        return (Message("user", (str(sample.fields["source"]),)),), None if target is None else str(target)
    return sample.messages, None


@dataclass
class Seq2SeqTask(WholeModelTask):
    collator: Seq2SeqCollator

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss, the fraction of correct tokens, and the fraction of samples with only correct tokens."""
        output = self._outputs(batch.inputs)
        labels = batch.inputs["labels"]
        wrong = (labels != IGNORE_INDEX) & (output.logits.argmax(-1) != labels)
        count, rows = batch.trained_tokens, len(labels)
        return Measures(
            {
                "loss": (output.loss.item() * count, count),
                "token_accuracy": (count - int(wrong.sum()), count),
                "accuracy": (rows - int(wrong.any(dim=1).sum()), rows),
            }
        )

    @torch.no_grad()
    def answer(self, samples: Sequence[Sample]) -> list[str]:
        reader, model = self.collator, self.model
        options = {"max_new_tokens": min(_MAX_ANSWER, reader.limit), "do_sample": False, "num_beams": 1}
        answers = []
        for sample in samples:
            inputs = self._to_device(reader.pad([reader.question(sample)]))
            ids = model.generate(**inputs, **options)[0]  # type: ignore[operator]
            answers.append(str(reader.tokenizer.decode(ids, skip_special_tokens=True)).strip())
        return answers

    def truth(self, sample: Sample) -> str:
        return (_split_turns(sample)[1] or "").strip()

    def preview(self) -> SampleInspector:
        return SampleInspector("tokens", self._show)

    def _show(self, sample: Sample) -> SampleStats:
        prepared = self.collator.prepare(sample)
        source, target = prepared.inputs["input_ids"].tolist(), prepared.labels.tolist()
        decode = self.collator.decode
        pieces = ((decode(source), False), (" → ", False), (decode(target), True))
        return SampleStats(len(source) + len(target), len(target), {}, pieces)


MASKED_LM = "masked-lm"
HIDDEN = 0.15  # the fraction of a text's tokens that are predicted
_MASKED, _REPLACED = 0.8, 0.9  # of the hidden: below the first masked, below the second replaced, else unchanged


def build_masked_lm_task(config: RunConfig, inputs: TaskInputs | None = None) -> MaskedLMTask:
    refuse_unused(config.data, MASKED_LM)
    tokenizer = load_tokenizer(WHERE, get_whole_model(config))
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            f"{WHERE}.task = {MASKED_LM}\n  The tokenizer has no mask token, so no token can be masked. Give that of a "
            "masked language model, `tokenizer: <folder>`, or another `task`."
        )
    model = load_whole_model(config, load_whole_config(config), AutoModelForMaskedLM)
    collator = MaskedLMCollator(tokenizer, config.data, model, config.seed)
    return MaskedLMTask(MASKED_LM, model, collator, [tokenizer])


class MaskedLMCollator(TextReader):
    """Makes batches of texts; the hidden tokens depend on the run's seed, the sample and the epoch alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, model: nn.Module, seed: int) -> None:
        super().__init__(tokenizer, data, model)
        self.seed = seed
        self._special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        known = np.arange(len(tokenizer) if self.table is None else min(len(tokenizer), self.table))
        self._replacements = np.setdiff1d(known, self._special)
        mask = tokenizer.mask_token_id
        assert isinstance(mask, int)  # build_masked_lm_task
        self._mask = mask

    def prepare(self, sample: Sample) -> PreparedText:
        inputs = self.read(get_text(sample), sample.id)
        ids = inputs["input_ids"].numpy()
        places = np.flatnonzero(~np.isin(ids, self._special))
        if not len(places):
            raise SampleError(f"has no token that can be hidden ({len(ids)} tokens, all special or unknown)")
        draws = np.random.default_rng([self.seed, sample.epoch, *hash_to_seeds(sample.id)])
        chosen = places[draws.random(len(places)) < HIDDEN]
        if not len(chosen):
            chosen = draws.choice(places, 1)
        fate = draws.random(len(chosen))
        others = draws.choice(self._replacements, len(chosen))
        labels = np.full_like(ids, IGNORE_INDEX)
        labels[chosen] = ids[chosen]
        shown = ids.copy()
        shown[chosen] = np.where(fate < _MASKED, self._mask, np.where(fate < _REPLACED, others, ids[chosen]))
        return PreparedText(sample.id, {**inputs, "input_ids": torch.from_numpy(shown)}, torch.from_numpy(labels))


@dataclass
class MaskedLMTask(WholeModelTask):
    collator: MaskedLMCollator

    def measure(self, batch: CollatedBatch) -> Measures:
        output = self._outputs(batch.inputs)
        labels: Tensor = batch.inputs["labels"]
        right = int((output.logits.argmax(-1) == labels).sum())  # no token has the number of IGNORED
        count = batch.trained_tokens
        return Measures({"loss": (output.loss.item() * count, count), "accuracy": (right, count)})

    def preview(self) -> SampleInspector:
        return SampleInspector("tokens", self._show)

    def _show(self, sample: Sample) -> SampleStats:
        prepared = self.collator.prepare(sample)
        pairs = zip(prepared.inputs["input_ids"].tolist(), prepared.labels.tolist(), strict=True)
        words = [(token if label == IGNORE_INDEX else label, label != IGNORE_INDEX) for token, label in pairs]
        runs = [([token for token, _ in run], hidden) for hidden, run in groupby(words, lambda pair: pair[1])]
        decode = self.collator.decode
        pieces = [piece for run, hidden in runs for piece in ((decode(run), hidden), (" ", False))]
        return SampleStats(len(words), sum(hidden for _, hidden in words), {}, tuple(pieces[:-1]))
