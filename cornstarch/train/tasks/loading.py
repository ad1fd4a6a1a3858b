"""One Hugging Face model as it is: what it does, how it is loaded, and how it is written to a folder."""

from __future__ import annotations

import copy
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from cornstarch.errors import ConfigError
from cornstarch.files import sync
from cornstarch.models.multimodal_language_model.unwrap import is_peft, unwrap, without_cache
from cornstarch.train.build import adapted, load_part, part_config
from cornstarch.train.config import DataConfig, RunConfig, WholeModelConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.formats import SampleSource, open_sources
from cornstarch.train.data.loader import Collator
from cornstarch.train.data.sample import Media, MediaKind, Sample, SampleError
from cornstarch.train.tasks.task import Measures

WHERE = "model.whole"
_LOOKED_AT = 20  # rows from which the task is told, where the model does not say

# For each task: what transformers calls it in the names of its lists of classes.
_LISTS = {
    "seq2seq-lm": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "sequence-classification": ("SEQUENCE_CLASSIFICATION",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "masked-lm": ("MASKED_LM",),
    # Language models that listen are in the first and the last one only, the latter beside encoder-decoders.
    "multimodal": ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM"),
    "causal-lm": ("CAUSAL_LM",),
}


# ------------------------------------------------------------------------------------------------ the task


def task_of(config: PreTrainedConfig, data: DataConfig, source: SampleSource | None = None) -> str:
    """Return what a model is trained for, as its config says; where it can do several things, as the data says.

    A model of masked words, or one without any head, learns to classify if the rows have labels.

    Args:
        config: The model's.
        data: Where the rows are.
        source: The rows, if they are open already.
    """
    classes = list(config.architectures or [])
    able = {name for name in _LISTS if config.model_type in _classes(name)}
    if not config.is_encoder_decoder:
        able.discard("seq2seq-lm")  # sounds to text, through a language model
    said = next((name for name in _LISTS if name in able and is_a(config, name)), None)
    if said not in (None, "masked-lm"):
        return said
    if "seq2seq-lm" in able:
        return "seq2seq-lm"
    rows = _first_fields(open_sources(data.train) if source is None else source)
    if "image" in rows and "label" in rows and "image-classification" in able:
        return "image-classification"
    if "label" in rows and "sequence-classification" in able and (said or "masked-lm" in able):
        return "sequence-classification"
    if said is not None:
        return said
    for name in ("multimodal", "masked-lm", "causal-lm"):
        if name in able:
            return name
    raise ConfigError(
        f"{WHERE}: it cannot be told what a {config.model_type!r} model ({', '.join(classes) or 'no architecture'}) is "
        f"trained for with rows of {sorted(rows)}. Give its `task`: {', '.join(_LISTS)}."
    )


def _classes(task: str) -> Mapping[str, Any]:
    """Return the names of the classes for a task, by type of model; of several lists the first one that has it."""
    lists = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in _LISTS[task]]
    return {kind: names for listed in reversed(lists) for kind, names in listed.items()}


def is_a(config: PreTrainedConfig, task: str) -> bool:
    """Whether a model was stored as one for a task, its head included."""
    names = _classes(task).get(config.model_type, ())
    return bool(set(config.architectures or []) & ({names} if isinstance(names, str) else set(names)))


def _first_fields(source: SampleSource) -> set[str]:
    """Return the fields of the first row that can be read."""
    for index in range(min(len(source), _LOOKED_AT)):
        try:
            sample = source[index]
        except SampleError:
            continue
        return {name for name, value in sample.fields.items() if value is not None}
    return set()


# ------------------------------------------------------------------------------------------------ loading


def whole_of(config: RunConfig) -> WholeModelConfig:
    """Return the description of a whole model."""
    if config.model.whole is None:
        raise ConfigError("model describes no `whole` model.")
    return config.model.whole


def whole_config(config: RunConfig) -> PreTrainedConfig:
    """Return the config that transformers has for the whole model of a run."""
    return part_config(WHERE, whole_of(config))


def load_whole(
    config: RunConfig,
    model_config: PreTrainedConfig,
    auto_class: Any,
    new_head: bool = False,
    trains_head: bool = False,
) -> nn.Module:
    """Return the whole model of a run, with adapters or frozen as it says.

    Args:
        config: The run.
        model_config: The model's config, which the task may have changed.
        auto_class: The Auto class of transformers for the task.
        new_head: The head's size is not the one that is stored.
        trains_head: With adapters, the head is trained itself: it is new.
    """
    part = whole_of(config)
    model = load_part(WHERE, part, config=model_config, auto_class=auto_class, new_head=new_head)
    if part.train == "frozen":
        return model.requires_grad_(False)
    return adapted(WHERE, part, model, _head(model) if trains_head else ())


def _head(model: nn.Module) -> list[str]:
    """Return the names of what stands beside a model's body."""
    body = getattr(model, "base_model_prefix", "")
    return [name for name, child in model.named_children() if name != body and any(True for _ in child.parameters())]


def refuse_unused(data: DataConfig, task: str, *names: str) -> None:
    """Refuse settings of `data` that a task has no use for, rather than pass over them."""
    for name in names:
        value, default = getattr(data, name), type(data).model_fields[name].default
        if value != default:
            raise ConfigError(
                f"data.{name} = {value}\n  A {task} run has no use for it. Leave it out (its default is {default})."
            )


# ------------------------------------------------------------------------------------------------ running


@dataclass
class WholeTask(ABC):
    """What the tasks of whole models share."""

    name: str
    model: nn.Module
    collator: Collator
    companions: Sequence[Any]
    """The tokenizer or image processor, stored beside the model."""
    wrapped: nn.Module | None = field(default=None, init=False, repr=False)
    """What is called instead of the model, where several processes train it together."""

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the model's own loss: the mean over the batch's `trained_tokens`."""
        return self._outputs(inputs).loss

    def _outputs(self, inputs: Mapping[str, Any]) -> Any:
        return (self.wrapped or self.model)(**without_cache(self.model, inputs))

    @abstractmethod
    def measure(self, batch: CollatedBatch) -> Measures:
        """Return loss and scores of a batch."""

    def modalities(self) -> dict[str, MediaKind]:
        """Return nothing: no text asks about images or sounds."""
        return {}

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return nothing: such a model says nothing."""
        return []

    def truth(self, sample: Sample) -> str:
        """Return nothing."""
        return ""

    def save(self, folder: Path) -> None:
        """Write the model, adapters merged, and what belongs to it, so that transformers loads the folder."""
        with new_folder(folder) as fresh:
            merged(self.model).save_pretrained(fresh)
            for companion in self.companions:
                companion.save_pretrained(fresh)

    def load(self, folder: Path) -> nn.Module:
        """Return the model of a folder."""
        kind: Any = type(unwrap(self.model))
        return kind.from_pretrained(folder, dtype="auto")

    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the logits; of rows of tokens, those that are trained on."""
        logits: Tensor = model(**inputs).logits
        labels = inputs["labels"]
        return logits[labels != -100] if labels.dim() == 2 else logits

    def _placed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs where the model is."""
        device = next(self.model.parameters()).device
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def merged(model: nn.Module) -> Any:
    """Return a model whose adapters are part of its weights; the given one is left as it is."""
    if not is_peft(model):
        return unwrap(model)
    with torch.no_grad():
        return copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Have a block write a folder, which appears under its name when it is complete, or not at all."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already. Give a new folder.")
    fresh = folder.with_name(f"{folder.name}.tmp.{uuid.uuid4().hex[:8]}")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        sync(fresh)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


# ------------------------------------------------------------------------------------------------ samples


def one_image(sample: Sample) -> Media:
    """Return the image of a sample that must have exactly one."""
    given = [value for value in (sample.fields.get("image"), sample.fields.get("images")) if value is not None]
    flat = [one for value in given for one in (value if isinstance(value, list | tuple) else [value])]
    images = flat or [media for media in sample.media if media.kind == "image"]
    if len(images) != 1:
        raise SampleError(f"has {len(images)} images, expected one")
    return images[0] if isinstance(images[0], Media) else Media("image", images[0])
