"""One label for a text or an image; or one quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import accepts
from cornstarch.train.build import item_processor, tokenizer_of
from cornstarch.train.config import DataConfig, RunConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.formats import SampleSource, open_sources
from cornstarch.train.data.media import load_image
from cornstarch.train.data.sample import Sample, SampleError
from cornstarch.train.tasks.labels import Labels, find_labels, label_of, label_word
from cornstarch.train.tasks.loading import (
    WHERE,
    WholeTask,
    is_a,
    load_whole,
    one_image,
    refuse_unused,
    whole_config,
    whole_of,
)
from cornstarch.train.tasks.task import Measures
from cornstarch.train.tasks.text import TextReader, text_of

SEQUENCE, IMAGE = "sequence-classification", "image-classification"
_UNUSED = ("packing", "chat_template", "train_on", "system")


def sequence_classification_task(
    config: RunConfig, train: SampleSource | None = None, evaluation: SampleSource | None = None
) -> ClassificationTask:
    """Return the task of a run that trains a model to label texts.

    Args:
        config: The run.
        train: The training rows, if they are open already: their labels may have to be read.
        evaluation: The evaluation rows, likewise.
    """
    refuse_unused(config.data, SEQUENCE, *_UNUSED)
    tokenizer = tokenizer_of(WHERE, whole_of(config))
    model_config: Any = whole_config(config)
    if getattr(model_config, "pad_token_id", None) is None:  # decoders find the end of a text by it
        model_config.pad_token_id = _padding(tokenizer)
    labels, has_head = _labels(config, model_config, SEQUENCE, train, evaluation)
    model = load_whole(
        config, model_config, AutoModelForSequenceClassification, new_head=not has_head, trains_head=True
    )
    collator = ClassificationCollator(TextItems(TextReader(tokenizer, config.data, model)), labels)
    return ClassificationTask(SEQUENCE, model, collator, [tokenizer])


def image_classification_task(
    config: RunConfig, train: SampleSource | None = None, evaluation: SampleSource | None = None
) -> ClassificationTask:
    """Return the task of a run that trains a model to label images.

    Args:
        config: The run.
        train: The training rows, if they are open already: their labels may have to be read.
        evaluation: The evaluation rows, likewise.
    """
    refuse_unused(config.data, IMAGE, *_UNUSED)
    processor = item_processor(WHERE, whole_of(config))
    model_config = whole_config(config)
    labels, has_head = _labels(config, model_config, IMAGE, train, evaluation)
    model = load_whole(config, model_config, AutoModelForImageClassification, new_head=not has_head, trains_head=True)
    collator = ClassificationCollator(ImageItems(processor, config.data, model), labels)
    return ClassificationTask(IMAGE, model, collator, [processor])


def _labels(
    config: RunConfig,
    model_config: PreTrainedConfig,
    task: str,
    train: SampleSource | None,
    evaluation: SampleSource | None,
) -> tuple[Labels, bool]:
    """Return the labels, told to the model's config, and whether the stored model has a head of that size."""
    whole, data = whole_of(config), config.data
    has_head, before = whole.path is not None and is_a(model_config, task), model_config.num_labels
    labels = find_labels(
        whole.labels,
        model_config,
        has_head,
        lambda: open_sources(data.train) if train is None else train,
        lambda: open_sources(data.evaluation) if evaluation is None else evaluation,
    )
    labels.describe(model_config)
    return labels, has_head and model_config.num_labels == before


def _padding(tokenizer: PreTrainedTokenizerBase) -> int | None:
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in known if isinstance(token, int)), None)


# ------------------------------------------------------------------------------------------------ what is labelled


class Items(Protocol):
    """Makes a model's inputs of what is to be labelled."""

    data: DataConfig
    kind: str
    """What it is counted as; empty if it is text."""

    def read(self, sample: Sample) -> Mapping[str, Tensor]:
        """Return the inputs of one sample, without a dimension for samples."""
        ...

    def join(self, rows: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> dict[str, Tensor]:
        """Return the inputs of several samples."""
        ...

    def tokens(self, row: Mapping[str, Tensor]) -> int:
        """Return how much it is."""
        ...


class TextItems:
    """Texts."""

    kind = ""

    def __init__(self, reader: TextReader) -> None:
        self.reader, self.data = reader, reader.data

    def read(self, sample: Sample) -> Mapping[str, Tensor]:
        """Return the tokens of the text."""
        return self.reader.read(text_of(sample), sample.id)

    def join(self, rows: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> dict[str, Tensor]:
        """Return rows filled up."""
        return self.reader.padded(rows)

    def tokens(self, row: Mapping[str, Tensor]) -> int:
        """Return the number of tokens."""
        return len(row["input_ids"])


class ImageItems:
    """Images, all of one size once they are processed."""

    kind = "image"

    def __init__(self, processor: Any, data: DataConfig, model: nn.Module) -> None:
        self.processor, self.data = processor, data
        self._wanted = {name for name in processor.model_input_names if accepts(model, name)}
        if not self._wanted:
            raise ConfigError(
                f"{WHERE}: {type(processor).__name__} makes {processor.model_input_names}, none of which "
                f"{type(model).__name__} takes. Give the model's own, `processor: <folder>`."
            )

    def read(self, sample: Sample) -> Mapping[str, Tensor]:
        """Decode and process the image."""
        image = load_image(one_image(sample), self.data.max_pixels)
        try:
            made = self.processor(images=image, return_tensors="pt")
        except Exception as error:  # whatever a processor stumbles over
            raise SampleError(f"cannot be processed: {type(error).__name__}: {error}") from error
        return {name: value[0] for name, value in made.items() if name in self._wanted}

    def join(self, rows: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> dict[str, Tensor]:
        """Stack the images."""
        for name, first in rows[0].items():
            for row, id in zip(rows, sample_ids, strict=True):
                if row[name].shape != first.shape:
                    raise ConfigError(
                        f"The image of {sample_ids[0]} is {list(first.shape)} and that of {id} {list(row[name].shape)} "
                        "once they are processed. Use an image processor that makes images of one size (`size`, "
                        "`do_resize`, `do_center_crop`)."
                    )
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def tokens(self, row: Mapping[str, Tensor]) -> int:
        """Count an image as one."""
        return 1


# ------------------------------------------------------------------------------------------------ the task


@dataclass(frozen=True)
class PreparedItem:
    """One sample, ready to be joined with others."""

    id: str
    inputs: Mapping[str, Tensor]
    label: int | float


class ClassificationCollator:
    """Makes batches of items with their labels."""

    def __init__(self, items: Items, labels: Labels) -> None:
        self.items, self.labels, self.data = items, labels, items.data

    def prepare(self, sample: Sample) -> PreparedItem:
        """Read one sample."""
        label = self.labels.number(label_of(sample))
        return PreparedItem(sample.id, self.items.read(sample), label)

    def join(self, samples: Sequence[PreparedItem]) -> CollatedBatch:
        """Return the batch of prepared samples; the loss is a mean over them."""
        ids = [sample.id for sample in samples]
        inputs = self.items.join([sample.inputs for sample in samples], ids)
        dtype = torch.float32 if self.labels.is_regression else torch.long
        inputs["labels"] = torch.tensor([sample.label for sample in samples], dtype=dtype)
        tokens = sum(self.items.tokens(sample.inputs) for sample in samples)
        counted = {self.items.kind: len(samples)} if self.items.kind else {}
        return CollatedBatch(dict(inputs), ids, tokens, len(samples), counted)


@dataclass
class ClassificationTask(WholeTask):
    """A model that gives one label, or one quantity."""

    collator: ClassificationCollator

    @property
    def labels(self) -> Labels:
        """What it tells apart."""
        return self.collator.labels

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss, and the share of samples that get their label."""
        output = self._outputs(batch.inputs)
        count = batch.trained_tokens
        sums: dict[str, tuple[float, float]] = {"loss": (output.loss.item() * count, count)}
        if not self.labels.is_regression:
            sums["accuracy"] = (int((output.logits.argmax(-1) == batch.inputs["labels"]).sum()), count)
        return Measures(sums)

    @torch.no_grad()
    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return the label, or the quantity, that the model gives to each sample."""
        return [self._label(sample) for sample in samples]

    def _label(self, sample: Sample) -> str:
        items = self.collator.items
        inputs = self._placed(items.join([items.read(sample)], [sample.id]))
        logits = self.model(**inputs).logits[0]
        return self.labels.word(logits[0].item() if self.labels.is_regression else int(logits.argmax()))

    def truth(self, sample: Sample) -> str:
        """Return the label; nothing if there is none."""
        try:
            label = label_of(sample)
        except SampleError:
            return ""
        try:
            return self.labels.word(self.labels.number(label))
        except SampleError:  # of another run's rows
            return label_word(label)


__all__ = ["ClassificationTask", "Labels", "image_classification_task", "sequence_classification_task"]
