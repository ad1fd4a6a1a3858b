"""Trains a masked language model, such as BERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from cornstarch.config import RunConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.data_report import SampleStats
from cornstarch.data.sample import Sample, SampleError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.tasks.build_model import WHERE, get_whole_model, load_whole_config, load_whole_model
from cornstarch.tasks.processors import load_tokenizer
from cornstarch.tasks.task import Measures, SamplePreview, TaskInputs, WholeModelTask, refuse_unused
from cornstarch.tasks.text import PreparedText, TextReader, get_text, hash_to_seeds

NAME = "masked-lm"
HIDDEN = 0.15
"""The fraction of a text's tokens that are predicted."""
_MASKED, _REPLACED = 0.8, 0.9  # of the hidden: below the first masked, below the second replaced, else unchanged


def build_masked_lm_task(config: RunConfig, inputs: TaskInputs | None = None) -> MaskedLMTask:
    """Return the task of a run that trains a masked language model."""
    refuse_unused(config.data, NAME, "packing", "chat_template", "train_on", "system")
    tokenizer = load_tokenizer(WHERE, get_whole_model(config))
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            f"{WHERE}.task = {NAME}\n  The tokenizer has no mask token, so no token can be masked. Give that of a "
            "masked language model, `tokenizer: <folder>`, or another `task`."
        )
    model = load_whole_model(config, load_whole_config(config), AutoModelForMaskedLM)
    collator = MaskedLMCollator(TextReader(tokenizer, config.data, model), config.seed)
    return MaskedLMTask(NAME, model, collator, [tokenizer])


class MaskedLMCollator:
    """Makes batches of texts with hidden tokens.

    The hidden tokens depend on the run's seed, the sample and the epoch alone: they differ in every epoch, and are the
    same after resuming and with any number of workers.
    """

    def __init__(self, reader: TextReader, seed: int) -> None:
        self.reader, self.data, self.seed = reader, reader.data, seed
        tokenizer = reader.tokenizer
        self._special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        known = np.arange(len(tokenizer) if reader.table is None else min(len(tokenizer), reader.table))
        self._replacements = np.setdiff1d(known, self._special)
        mask = tokenizer.mask_token_id
        assert isinstance(mask, int)  # build_masked_lm_task
        self._mask = mask

    def prepare(self, sample: Sample) -> PreparedText:
        """Tokenize one sample and hide some of its tokens."""
        inputs = self.reader.read(get_text(sample), sample.id)
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

    def join(self, samples: Sequence[PreparedText]) -> CollatedBatch:
        """Return the batch of prepared samples."""
        inputs = self.reader.join(samples)
        tokens = sum(len(sample.labels) for sample in samples)
        trained = int((inputs["labels"] != IGNORE_INDEX).sum())
        return CollatedBatch(inputs, [sample.id for sample in samples], tokens, trained, {})


@dataclass
class MaskedLMTask(WholeModelTask):
    """A model that predicts hidden tokens."""

    collator: MaskedLMCollator

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss and the fraction of hidden tokens that are predicted."""
        output = self._outputs(batch.inputs)
        labels: Tensor = batch.inputs["labels"]
        right = int((output.logits.argmax(-1) == labels).sum())  # no token has the number of IGNORED
        count = batch.trained_tokens
        return Measures({"loss": (output.loss.item() * count, count), "accuracy": (right, count)})

    def preview(self) -> SamplePreview:
        """Return a function that shows texts with their hidden tokens marked."""
        return SamplePreview("tokens", self._show)

    def _show(self, sample: Sample) -> SampleStats:
        prepared = self.collator.prepare(sample)
        pairs = zip(prepared.inputs["input_ids"].tolist(), prepared.labels.tolist(), strict=True)
        words = [(token if label == IGNORE_INDEX else label, label != IGNORE_INDEX) for token, label in pairs]
        runs = [([token for token, _ in run], hidden) for hidden, run in groupby(words, lambda pair: pair[1])]
        decode = self.collator.reader.decode
        pieces = [piece for run, hidden in runs for piece in ((decode(run), hidden), (" ", False))]
        return SampleStats(len(words), sum(hidden for _, hidden in words), {}, tuple(pieces[:-1]))
