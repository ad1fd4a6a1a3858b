"""Tasks: a model with its collator, loss, measures and export; and the loading of tokenizers and processors."""

from __future__ import annotations

import copy
import json
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto
from transformers.utils import cached_file

from cornstarch.config import DataConfig, EncoderConfig, LanguageModelConfig, ModelConfig, RunConfig, WholeModelConfig
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.data_report import SampleInspector
from cornstarch.data.formats import DataSource
from cornstarch.data.loader import Collator
from cornstarch.data.sample import MediaKind, Sample
from cornstarch.errors import ConfigError
from cornstarch.files import as_config_errors, sync
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.models.multimodal_language_model.preprocessing.modality_processors import find_processor_class
from cornstarch.models.multimodal_language_model.preprocessing.tokenization import check_tokenizer
from cornstarch.models.multimodal_language_model.unwrap import disable_cache, is_peft, unwrap
from cornstarch.parallel.tensor import is_sharded
from cornstarch.plan.data_options import REGISTERED
from cornstarch.tasks.build_model import GetPartShard, get_language_model, load_part


@dataclass(frozen=True)
class Measures:
    """Sums by name, each with its divisor, so that microbatches, sources and ranks add up exactly."""

    sums: Mapping[str, tuple[float, float]]

    def __add__(self, other: Measures) -> Measures:
        sums = dict(self.sums)
        for name, (total, count) in other.sums.items():
            own_total, own_count = sums.get(name, (0.0, 0.0))
            sums[name] = own_total + total, own_count + count
        return Measures(sums)

    def means(self) -> dict[str, float]:
        """Return the means; those with nothing counted are left out."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}


class Task(ABC):
    """What is trained, and how. Subclass it, and register a function that builds it with `register_task`."""

    name: str
    """A registered name: `multimodal`, `causal-lm`, `seq2seq-lm`, `masked-lm`, `sequence-classification`,
    `image-classification` or `module`."""
    model: nn.Module
    collator: Collator
    wrapped: nn.Module | None = None
    """Called instead of the model, where several ranks train it together."""

    @abstractmethod
    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean loss over the batch's `trained_tokens`."""

    @abstractmethod
    def measure(self, batch: CollatedBatch) -> Measures:
        """Return loss and scores of a batch, whose inputs are on the model's device. Called in eval mode."""

    @abstractmethod
    def preview(self) -> SampleInspector:
        """Return a function that shows samples as the model gets them."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model, with its tokenizer and processors, to a new folder that its library loads."""

    @abstractmethod
    def load(self, folder: Path) -> nn.Module: ...

    @abstractmethod
    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the outputs that two models are compared by."""

    def modalities(self) -> dict[str, MediaKind]:
        """Return the media kind of each modality that texts refer to."""
        return {}

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return the model's answers to samples, without showing it theirs; empty if the model gives none."""
        return []

    def truth(self, sample: Sample) -> str:
        """Return the expected answer; empty if there is none."""
        return ""


class TaskInputs(NamedTuple):
    """What a task may be built with, besides its config."""

    train: DataSource | None = None  # the training data, if open already; labels may be read from it
    evaluation: DataSource | None = None
    get_shard: GetPartShard | None = None  # which shard of each part this rank reads; None: all parts whole


class TaskKind(NamedTuple):
    build: Callable[[RunConfig, TaskInputs], Task]
    model_lists: tuple[str, ...]
    """The lists of transformers, `MODEL_FOR_<name>_MAPPING_NAMES`, that name the task's model classes."""
    auto_class: Any  # the Auto class of transformers; None if a config does not determine the class


TASKS: dict[str, TaskKind] = {}  # all tasks by name, in the order in which detection tries them


def register_task(
    name: str, build: Callable[[RunConfig, TaskInputs], Task], model_lists: tuple[str, ...] = (), auto_class: Any = None
) -> None:
    """Make a task available as `model.whole.task`, and for models whose class is in one of the lists."""
    TASKS[name] = TaskKind(build, model_lists, auto_class)
    REGISTERED["task"].add(name)


def get_model_classes(task: str) -> dict[str, Any]:
    """Return the names of a task's model classes by model type; the first of several lists has precedence."""
    lists = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in TASKS[task].model_lists]
    return {kind: names for listed in reversed(lists) for kind, names in listed.items()}


def is_stored_as(config: PreTrainedConfig, task: str) -> bool:
    """Whether a model was stored as one for a task, including its head."""
    names = get_model_classes(task).get(config.model_type, ())
    return bool(set(config.architectures or []) & ({names} if isinstance(names, str) else set(names)))


@dataclass
class WholeModelTask(Task):
    """The common part of tasks that train one Hugging Face model."""

    name: str
    model: nn.Module
    collator: Collator
    companions: Sequence[Any]  # the tokenizer or image processor, stored beside the model

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        return self._outputs(inputs).loss

    def _outputs(self, inputs: Mapping[str, Any]) -> Any:
        return (self.wrapped or self.model)(**disable_cache(self.model, inputs))

    def save(self, folder: Path) -> None:
        """Write the model, adapters merged, and its companions, so that transformers loads the folder."""
        model: Any = unwrap(self.model)
        if is_peft(self.model):
            with torch.no_grad():
                model = copy.deepcopy(self.model).merge_and_unload()  # type: ignore[operator]
        with create_folder(folder) as fresh:
            model.save_pretrained(fresh)
            for companion in self.companions:
                companion.save_pretrained(fresh)

    def load(self, folder: Path) -> nn.Module:
        model_class: Any = type(unwrap(self.model))
        return model_class.from_pretrained(folder, dtype="auto")

    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the logits; of rows of tokens, those at trained tokens."""
        logits: Tensor = model(**inputs).logits
        labels = inputs["labels"]
        return logits[labels != -100] if labels.dim() == 2 else logits

    def _to_device(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        device = next(self.model.parameters()).device
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


def refuse_unused(data: DataConfig, task: str, but: str = "") -> None:
    """Refuse settings of `data` for conversations that a task does not use, rather than ignore them."""
    for name in ("packing", "chat_template", "train_on", "system"):
        value, default = getattr(data, name), type(data).model_fields[name].default
        if value != default and name != but:
            raise ConfigError(
                f"data.{name} = {value}\n  A {task} run has no use for it. Leave it out (its default is {default})."
            )


@contextmanager
def create_folder(folder: Path) -> Iterator[Path]:
    """Let a block write a folder that appears under its name only when it is complete."""
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


# The files in which transformers stores the settings of processors, and the keys for their class.
_FILES = ("preprocessor_config.json", "processor_config.json")
_CLASS_KEYS = ("image_processor_type", "feature_extractor_type")


def build_processor(config: ModelConfig, model: MultimodalModel) -> MultimodalProcessor:
    """Build the processor of a composed model, and set the model's placeholder tokens."""
    processors = {name: load_item_processor(f"model.encoders.{name}", e) for name, e in config.encoders.items()}
    # The processor runs encoders to learn their output sizes: whole ones without weights in place of sharded ones.
    sharded = {name: encoder.module for name, encoder in model.encoders.items() if is_sharded(encoder.module)}
    for name, module in sharded.items():
        skeleton = load_part(f"model.encoders.{name}", config.encoders[name], weights=False)
        for key, buffer in unwrap(module).named_buffers():  # positions and the like need real values
            owner, _, leaf = key.rpartition(".")
            skeleton.get_submodule(owner)._buffers[leaf] = buffer
        model.encoders[name].module = skeleton
    try:
        return MultimodalProcessor(
            encoder_processors=processors,
            llm_tokenizer=load_tokenizer("model.language_model", get_language_model(config)),
            model=model,
            predefined_tokens={name: e.token for name, e in config.encoders.items() if e.token is not None},
        )
    finally:
        for name, module in sharded.items():
            model.encoders[name].module = module


def load_tokenizer(where: str, part: LanguageModelConfig | WholeModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, after checking that it can encode text."""
    name = part.tokenizer or part.path
    if name is None:
        raise ConfigError(f"{where} has no `path`: say where its tokenizer is, `tokenizer: <folder>`.")
    start = f"{where}.tokenizer = {name}\n  "
    try:
        with as_config_errors(start):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                name, trust_remote_code=part.may_run_code(name)
            )
        with as_config_errors(""):
            check_tokenizer(tokenizer)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(start) else f"{start}{text}") from error
    return tokenizer


def load_item_processor(where: str, part: EncoderConfig | WholeModelConfig) -> Any:
    if part.processor_config is not None:
        settings = dict(part.processor_config)
        kind = _get_processor_class(where, str(settings.pop("class_name", None)))
        with as_config_errors(f"{where}.processor_config: "):
            return kind(**settings)
    source = part.processor or part.path
    if source is None:
        raise ConfigError(f"{where} has no `path`: give `processor: <folder>` or a `processor_config`.")
    # Not AutoImageProcessor: some versions of it require torchvision.
    found = _get_processor_class(where, _read_class_name(where, source))
    with as_config_errors(f"{where}.processor = {source}\n  "):
        return found.from_pretrained(source)


def _get_processor_class(where: str, name: str) -> Any:
    for candidate in (name, name.removesuffix("Fast")):
        found = find_processor_class(candidate)
        if found is not None:
            return found
    raise ConfigError(
        f"{where}: transformers and Cornstarch have no processor {name!r}; give `processor_config.class_name`."
    )


def _read_class_name(where: str, source: str) -> str:
    """Return the class of the processor that a folder, or a model on the hub, is stored with."""
    found: dict[str, str] = {}
    for file in _FILES:
        try:
            path = str(Path(source) / file) if Path(source).is_dir() else cached_file(source, file)
            content = json.loads(Path(str(path)).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        inner = content.values() if isinstance(content, dict) else ()
        for settings in (one for one in (content, *inner) if isinstance(one, dict)):
            found = {**{key: str(settings[key]) for key in _CLASS_KEYS if key in settings}, **found}
    if not found:
        raise ConfigError(
            f"{where}: {source} has no settings of an image processor or feature extractor ({', '.join(_FILES)}). Give "
            "`processor: <folder>` or a `processor_config`."
        )
    return next(iter(found.values()))
