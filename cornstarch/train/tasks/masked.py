"""Hidden words to be guessed: BERT and its kin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.packing import IGNORED
from cornstarch.train.build import tokenizer_of
from cornstarch.train.config import RunConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.sample import Sample, SampleError
from cornstarch.train.tasks.loading import WHERE, WholeTask, load_whole, refuse_unused, whole_config, whole_of
from cornstarch.train.tasks.task import Measures
from cornstarch.train.tasks.text import PreparedText, TextReader, numbers_of, padded_labels, text_of

NAME = "masked-lm"
HIDDEN = 0.15
"""The share of a text's tokens that are to be guessed."""
_MASKED, _REPLACED = 0.8, 0.9  # of these: below the first masked, below the second another token, else left


def masked_task(config: RunConfig) -> MaskedTask:
    """Return the task of a run that trains a model to guess hidden words."""
    refuse_unused(config.data, NAME, "packing", "chat_template", "train_on", "system")
    tokenizer = tokenizer_of(WHERE, whole_of(config))
    if tokenizer.mask_token_id is None:
        raise ConfigError(
            f"{WHERE}.task = {NAME}\n  The tokenizer has no mask token, so nothing can be hidden. Give that of a model "
            "of this kind, `tokenizer: <folder>`, or another `task`."
        )
    model = load_whole(config, whole_config(config), AutoModelForMaskedLM)
    return MaskedTask(NAME, model, MaskedCollator(TextReader(tokenizer, config.data, model), config.seed), [tokenizer])


class MaskedCollator:
    """Makes batches of texts with hidden tokens.

    What is hidden is drawn from the run's seed, the sample and the epoch alone: anew in every epoch, the same after
    resuming and with any number of workers.
    """

    def __init__(self, reader: TextReader, seed: int) -> None:
        self.reader, self.data, self.seed = reader, reader.data, seed
        tokenizer = reader.tokenizer
        self._special = np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)
        known = np.arange(len(tokenizer) if reader.table is None else min(len(tokenizer), reader.table))
        self._others = np.setdiff1d(known, self._special)
        mask = tokenizer.mask_token_id
        assert isinstance(mask, int)  # masked_task
        self._mask = mask

    def prepare(self, sample: Sample) -> PreparedText:
        """Tokenize one sample and hide some of its tokens."""
        inputs = self.reader.read(text_of(sample), sample.id)
        ids, labels = self._hidden(inputs["input_ids"].numpy(), sample)
        return PreparedText(sample.id, {**inputs, "input_ids": torch.from_numpy(ids)}, torch.from_numpy(labels))

    def _hidden(self, ids: np.ndarray, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens, some of them hidden, and what those were."""
        places = np.flatnonzero(~np.isin(ids, self._special))
        if not len(places):
            raise SampleError(f"has no token that can be hidden ({len(ids)} tokens, all special or unknown)")
        draws = np.random.default_rng([self.seed, sample.epoch, *numbers_of(sample.id)])
        chosen = places[draws.random(len(places)) < HIDDEN]
        if not len(chosen):
            chosen = draws.choice(places, 1)
        fate = draws.random(len(chosen))
        others = draws.choice(self._others, len(chosen))
        labels = np.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        shown = ids.copy()
        shown[chosen] = np.where(fate < _MASKED, self._mask, np.where(fate < _REPLACED, others, ids[chosen]))
        return shown, labels

    def join(self, samples: Sequence[PreparedText]) -> CollatedBatch:
        """Return the batch of prepared samples."""
        inputs: dict[str, Any] = self.reader.padded([sample.inputs for sample in samples])
        inputs["labels"] = padded_labels([sample.labels for sample in samples])
        tokens = sum(len(sample.labels) for sample in samples)
        trained = int((inputs["labels"] != IGNORED).sum())
        return CollatedBatch(inputs, [sample.id for sample in samples], tokens, trained, {})


class MaskedTask(WholeTask):
    """A model that guesses hidden words."""

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss and the share of hidden tokens that are guessed."""
        output = self._outputs(batch.inputs)
        labels: Tensor = batch.inputs["labels"]
        right = int((output.logits.argmax(-1) == labels).sum())  # no token has the number that stands for "ignored"
        count = batch.trained_tokens
        return Measures({"loss": (output.loss.item() * count, count), "accuracy": (right, count)})


__all__ = ["MaskedCollator", "MaskedTask", "masked_task"]
