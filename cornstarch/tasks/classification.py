"""Trains a classifier, or a regression, of texts or images."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, PreTrainedConfig

from cornstarch.config import DataConfig, RunConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.data_report import SampleInspector, SampleStats
from cornstarch.data.formats import DataSource, open_sources
from cornstarch.data.media import load_image
from cornstarch.data.sample import Media, Sample, SampleError, as_sample_errors
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument
from cornstarch.tasks import task as tasks
from cornstarch.tasks.build_model import WHERE, get_whole_model, load_whole_config, load_whole_model
from cornstarch.tasks.task import Measures, TaskInputs, WholeModelTask, load_tokenizer, refuse_unused
from cornstarch.tasks.text import PreparedText, TextReader, get_text

SEQUENCE, IMAGE = "sequence-classification", "image-classification"
MOST_LABELS = 10_000
_UNNAMED = re.compile(r"LABEL_\d+")
_SHOWN = 5


def build_sequence_classification_task(config: RunConfig, inputs: TaskInputs | None = None) -> ClassificationTask:
    refuse_unused(config.data, SEQUENCE)
    tokenizer = load_tokenizer(WHERE, get_whole_model(config))
    model_config: Any = load_whole_config(config)
    if getattr(model_config, "pad_token_id", None) is None:  # decoders find the end of a text by its padding
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        model_config.pad_token_id = next((token for token in known if isinstance(token, int)), None)
    model, labels = _load_classifier(config, model_config, SEQUENCE, AutoModelForSequenceClassification, inputs)
    collator = ClassificationCollator(TextItems(TextReader(tokenizer, config.data, model)), labels)
    return ClassificationTask(SEQUENCE, model, collator, [tokenizer])


def build_image_classification_task(config: RunConfig, inputs: TaskInputs | None = None) -> ClassificationTask:
    refuse_unused(config.data, IMAGE)
    processor = tasks.load_item_processor(WHERE, get_whole_model(config))
    model_config = load_whole_config(config)
    model, labels = _load_classifier(config, model_config, IMAGE, AutoModelForImageClassification, inputs)
    collator = ClassificationCollator(ImageItems(processor, config.data, model), labels)
    return ClassificationTask(IMAGE, model, collator, [processor])


def _load_classifier(
    config: RunConfig, model_config: PreTrainedConfig, task: str, auto_class: Any, inputs: TaskInputs | None
) -> tuple[nn.Module, Labels]:
    """Return the model, with a new head if the stored one does not fit the labels, and the labels."""
    stored_labels = model_config.num_labels
    has_head = get_whole_model(config).path is not None and tasks.is_stored_as(model_config, task)
    labels = find_labels(config, model_config, has_head, inputs or TaskInputs())
    labels.describe(model_config)
    new_head = not has_head or model_config.num_labels != stored_labels
    return load_whole_model(config, model_config, auto_class, new_head=new_head, trains_head=True), labels


class TextItems:
    """Turns texts into the inputs of a classifier; `ImageItems` does so with images."""

    kind = ""  # the modality that items are counted as

    def __init__(self, reader: TextReader) -> None:
        self.reader, self.data = reader, reader.data

    def read(self, sample: Sample) -> Mapping[str, Tensor]:
        return self.reader.read(get_text(sample), sample.id)

    def join(self, rows: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> dict[str, Tensor]:
        return self.reader.pad(rows)

    def tokens(self, row: Mapping[str, Tensor]) -> int:
        return len(row["input_ids"])

    def show(self, row: Mapping[str, Tensor]) -> str:
        return self.reader.decode(row["input_ids"].tolist())


class ImageItems:
    """Images, which all have one size once they are processed."""

    kind = "image"

    def __init__(self, processor: Any, data: DataConfig, model: nn.Module) -> None:
        self.processor, self.data = processor, data
        self._wanted = {name for name in processor.model_input_names if accepts_argument(model, name)}
        if not self._wanted:
            raise ConfigError(
                f"{WHERE}: {type(processor).__name__} makes {processor.model_input_names}, none of which "
                f"{type(model).__name__} takes. Give the model's own, `processor: <folder>`."
            )

    def read(self, sample: Sample) -> Mapping[str, Tensor]:
        fields = [value for value in (sample.fields.get("image"), sample.fields.get("images")) if value is not None]
        images = [one for value in fields for one in (value if isinstance(value, list | tuple) else [value])]
        images = images or [media for media in sample.media if media.kind == "image"]
        if len(images) != 1:
            raise SampleError(f"has {len(images)} images, expected one")
        media = images[0] if isinstance(images[0], Media) else Media("image", images[0])
        image = load_image(media, self.data.max_pixels)
        with as_sample_errors():
            processed = self.processor(images=image, return_tensors="pt")
        return {name: value[0] for name, value in processed.items() if name in self._wanted}

    def join(self, rows: Sequence[Mapping[str, Tensor]], sample_ids: Sequence[str]) -> dict[str, Tensor]:
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
        return 1

    def show(self, row: Mapping[str, Tensor]) -> str:
        return f"<{self.kind}>"


class ClassificationCollator:
    def __init__(self, items: TextItems | ImageItems, labels: Labels) -> None:
        self.items, self.labels, self.data = items, labels, items.data

    def prepare(self, sample: Sample) -> PreparedText:
        dtype = torch.float32 if self.labels.is_regression else torch.long
        label = torch.tensor(self.labels.number(get_label(sample)), dtype=dtype)  # first: cheaper than an image
        return PreparedText(sample.id, self.items.read(sample), label)

    def join(self, samples: Sequence[PreparedText]) -> CollatedBatch:
        """Return the batch of prepared samples; the loss is a mean over them."""
        ids = [sample.id for sample in samples]
        inputs = self.items.join([sample.inputs for sample in samples], ids)
        inputs["labels"] = torch.stack([sample.labels for sample in samples])
        tokens = sum(self.items.tokens(sample.inputs) for sample in samples)
        counted = {self.items.kind: len(samples)} if self.items.kind else {}
        return CollatedBatch(dict(inputs), ids, tokens, len(samples), counted)


@dataclass
class ClassificationTask(WholeModelTask):
    collator: ClassificationCollator

    @property
    def labels(self) -> Labels:
        return self.collator.labels

    def measure(self, batch: CollatedBatch) -> Measures:
        output = self._outputs(batch.inputs)
        count = batch.trained_tokens
        sums: dict[str, tuple[float, float]] = {"loss": (output.loss.item() * count, count)}
        if not self.labels.is_regression:
            sums["accuracy"] = (int((output.logits.argmax(-1) == batch.inputs["labels"]).sum()), count)
        return Measures(sums)

    @torch.no_grad()
    def answer(self, samples: Sequence[Sample]) -> list[str]:
        items, answers = self.collator.items, []
        for sample in samples:
            logits = self.model(**self._to_device(items.join([items.read(sample)], [sample.id]))).logits[0]
            answers.append(self.labels.word(logits[0].item() if self.labels.is_regression else int(logits.argmax())))
        return answers

    def truth(self, sample: Sample) -> str:
        try:
            label = get_label(sample)
        except SampleError:
            return ""
        try:
            return self.labels.word(self.labels.number(label))
        except SampleError:  # a row of another run
            return format_label(label)

    def preview(self) -> SampleInspector:
        """Return a function that shows items with their labels, each batched with the first as in a run."""
        collator, items, first = self.collator, self.collator.items, list[PreparedText]()

        def show(sample: Sample) -> SampleStats:
            prepared = collator.prepare(sample)
            if not first:
                first.append(prepared)
            collator.join([first[0], prepared])
            counted = {items.kind: 1} if items.kind else {}
            word = self.labels.word(prepared.labels.item())
            pieces = ((items.show(prepared.inputs), False), (" → ", False), (word, True))
            return SampleStats(items.tokens(prepared.inputs), None, counted, pieces)

        return SampleInspector("images" if items.kind else "tokens", show)


@dataclass(frozen=True)
class Labels:
    """The names of classes, by number; without names, labels are numbers and the task is a regression."""

    names: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        return not self.names

    def number(self, label: Any) -> int | float:
        """Return the number of a class, or the label itself in a regression."""
        if self.is_regression:
            if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
                raise SampleError(f"has the label {label!r}, expected a number")
            return float(label)
        word = format_label(label)
        if word in self._numbers:
            return self._numbers[word]
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.names):
            return label
        raise SampleError(f"has the label {label!r}, expected one of {_list_names(self.names)}")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        # Of equal names the first counts.
        return {name: number for number, name in reversed(list(enumerate(self.names)))}

    def word(self, number: float) -> str:
        """Return the name of a class, or a regression value in a few digits."""
        return f"{number:.4g}" if self.is_regression else self.names[int(number)]

    def describe(self, config: PreTrainedConfig) -> None:
        config.id2label = dict(enumerate(self.names)) or {0: "LABEL_0"}
        config.label2id = {name: number for number, name in config.id2label.items()}
        config.problem_type = "regression" if self.is_regression else "single_label_classification"


def get_label(sample: Sample) -> Any:
    """Return the label of a row as given."""
    found = next((sample.fields[name] for name in ("label", "target") if sample.fields.get(name) is not None), None)
    if found is None:
        raise SampleError(f"has the fields {sorted(map(str, sample.fields))}, expected a `label`")
    if not isinstance(found, str | int | float):
        raise SampleError(f"has a {type(found).__name__} as label, expected a text or a number")
    return found


def format_label(label: Any) -> str:
    return str(label).lower() if isinstance(label, bool) else str(label)


def find_labels(run: RunConfig, config: PreTrainedConfig, has_head: bool, inputs: TaskInputs) -> Labels:
    """Return the labels: given, of a trained head, whose numbers must keep their meaning, or of the training rows."""
    names: dict[Any, str] = dict(config.id2label or {})
    own = tuple(names[number] for number in sorted(names))
    is_named = bool(own) and not any(_UNNAMED.fullmatch(name) for name in own)
    if (given := get_whole_model(run).labels) is not None:
        # The same names in another order: the model's numbers keep their meaning.
        return Labels(own if set(own) == set(given) else tuple(given))
    if config.problem_type == "regression" or (has_head and len(own) == 1):
        return Labels()
    train = open_sources(run.data.train) if inputs.train is None else inputs.train
    if is_named:
        # Refuse data with other labels than the model's at the start, rather than row by row.
        for name, label in islice(_read_labels(train), 1):
            try:
                Labels(own).number(label)
            except SampleError as error:
                raise ConfigError(
                    f"{name} {error}, which are the model's. Name the column of the labels, or list your own `labels`: "
                    "the model gets a new head for them."
                ) from error
        return Labels(own)
    found = _read_all(train)
    if has_head:  # a head without names: its numbers still have a meaning
        numbered = tuple(map(str, range(len(own))))
        fitting = [names for names in (numbered, own) if found.names and set(found.names) <= set(names)]
        found = Labels(fitting[0]) if fitting else found
    evaluation = open_sources(run.data.evaluation) if inputs.evaluation is None else inputs.evaluation
    known = set(found.names)
    for name, label in _read_labels(evaluation) if known else ():
        if format_label(label) not in known:
            raise ConfigError(
                f"{name} of the evaluation data has the label {label!r}, which no row of the training data has "
                f"({_list_names(found.names)}). Correct it, or list all `labels`."
            )
    return found


def _read_all(source: DataSource) -> Labels:
    """Return the labels of all rows, sorted, integers by size."""
    found: dict[Any, str] = {}  # with the first row that has the label
    for name, label in _read_labels(source):
        found.setdefault(format_label(label) if isinstance(label, str | bool) else label, name)
        if len(found) > MOST_LABELS and not any(isinstance(label, float) for label in found):
            raise ConfigError(
                f"The training data have more than {MOST_LABELS:,} different labels ({_list_names(list(found))}). Is "
                "`label` a text to be written? That is `task: seq2seq-lm`. Else give all `labels` yourself."
            )
    if not found:
        raise ConfigError("No row of the training data has a `label`. Name its column: `columns: {label: <column>}`.")
    if any(isinstance(label, float) for label in found):
        words = [label for label in found if isinstance(label, str)]
        if words:
            raise ConfigError(
                f"The training data have numbers with a fraction as labels, and the word {words[0]!r} "
                f"({found[words[0]]}): give words only, or numbers only."
            )
        return Labels()
    if len(found) == 1:
        ((label, name),) = found.items()
        raise ConfigError(
            f"All rows of the training data have the label {label!r} ({name} is the first): there is nothing to "
            "distinguish. List all `labels` if there are others."
        )
    numbers = sorted(label for label in found if isinstance(label, int))
    words = sorted(label for label in found if isinstance(label, str))
    return Labels(tuple(dict.fromkeys([*map(str, numbers), *words])))


def _read_labels(source: DataSource) -> Iterator[tuple[str, Any]]:
    """Yield the name of each row and its label; unreadable rows are reported when they are trained on."""
    for index in range(len(source)):
        try:
            label = get_label(source[index])
        except SampleError:
            continue
        yield source.name(index), label


def _list_names(names: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown}, … ({len(names):,} in all)" if len(names) > _SHOWN else shown
