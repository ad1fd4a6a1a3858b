"""Trains any module with a loss: built by a function that the config names, or given in Python."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from cornstarch.config import DataConfig, FactoryConfig, RunConfig
from cornstarch.config.user_code import import_named
from cornstarch.data.collate import CollatedBatch
from cornstarch.data.data_report import SampleInspector, SampleStats
from cornstarch.data.media import load_audio, load_image
from cornstarch.data.sample import Media, Sample, SampleError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import disable_cache, unwrap
from cornstarch.parallel.device import is_out_of_memory
from cornstarch.pipeline.remote_module import StageDone
from cornstarch.tasks.task import Measures, Task, TaskInputs, create_folder, refuse_unused
from cornstarch.tasks.text import hash_to_seeds

NAME = "module"
LossFunction = Callable[[nn.Module, Mapping[str, Any]], Any]
"""Takes the module and a batch, and returns the mean loss over its samples, or means by name including `loss`."""
CollateFunction = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
"""Makes a batch of rows; their images are RGB images of Pillow, their sounds float32 arrays."""

_WEIGHTS, _FACTORY = "model.safetensors", "factory.json"
_LABELS = ("label", "labels")
_SHOWN = 60  # characters of a field


def build_factory_task(config: RunConfig, inputs: TaskInputs | None = None) -> ModuleTask:
    factory = config.model.factory
    if factory is None:
        raise ConfigError("model describes no `factory`.")
    module, loss = _call_factory(factory)
    if factory.loss is not None:
        if loss is not None:
            raise ConfigError(
                f"model.factory.loss = {factory.loss}\n  {factory.function} returns a loss as well. Leave out one of "
                "them."
            )
        loss = _import_function("model.factory.loss", factory.loss)
    collate = None if factory.collate is None else _import_function("model.factory.collate", factory.collate)
    task = build_module_task(module, loss, collate, config.data, config.seed)
    task.factory = factory
    return task


def build_module_task(
    module: nn.Module,
    loss: LossFunction | None = None,
    collate: CollateFunction | None = None,
    data: DataConfig | None = None,
    seed: int = 0,
) -> ModuleTask:
    """Return the task of a given module; without `loss`, it returns one itself; without `collate`, rows are stacked."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"The module is a {type(module).__name__}, expected a torch.nn.Module.")
    for name, function in (("loss", loss), ("collate", collate)):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} is a {type(function).__name__}, expected a function.")
    if data is None:
        data = DataConfig.model_validate({"train": "rows given in Python"})
    refuse_unused(data, NAME)
    return ModuleTask(module, RowCollator(data, seed, collate), loss)


@dataclass(frozen=True)
class NamedFunction:
    """A function with its name in the config, for messages."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def _import_function(where: str, path: str) -> NamedFunction:
    found = import_named(f"{where} = {path}", path)
    if not callable(found):
        raise ConfigError(f"{where} = {path}\n  It is a {type(found).__name__}, expected a function.")
    return NamedFunction(path, found)


def _call_factory(factory: FactoryConfig) -> tuple[nn.Module, LossFunction | None]:
    where = f"model.factory.function = {factory.function}\n  "
    function = _import_function("model.factory.function", factory.function).function
    try:
        built = function(**factory.arguments)
    except Exception as error:
        raise ConfigError(f"{where}It failed: {type(error).__name__}: {error}.") from error
    module, loss = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        kinds = [type(one).__name__ for one in (built if isinstance(built, tuple) else [built])]
        raise ConfigError(f"{where}It returned {', '.join(kinds)}; expected a torch.nn.Module, or (module, loss).")
    return module, None if loss is None else NamedFunction(f"the loss of {factory.function}", loss)


@dataclass
class ModuleTask(Task):
    """A module with a loss, which is a mean over samples."""

    model: nn.Module
    collator: RowCollator
    loss_function: LossFunction | None = None
    factory: FactoryConfig | None = field(default=None, repr=False)
    name: str = NAME

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        loss: Tensor = self._means(self.wrapped or self.model, inputs)["loss"]
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                f"{self._loss_name} gave a loss that does not depend on any trained weight: was it detached, or is the "
                "module frozen?"
            )
        return loss

    def _means(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss, and other results of the loss function."""
        try:
            if self.loss_function is not None:
                given = self.loss_function(model, inputs)
            else:
                output = model(**disable_cache(self.model, inputs))
                has_key = isinstance(output, Mapping) and "loss" in output
                given = output["loss"] if has_key else getattr(output, "loss", None)
        except Exception as error:
            if isinstance(error, ConfigError | StageDone) or is_out_of_memory(error):
                raise
            batch = ", ".join(f"{name}: {_describe(value)}" for name, value in inputs.items())
            raise ConfigError(
                f"{self._loss_name} failed: {type(error).__name__}: {error}\n  The batch has {batch}."
            ) from error
        means = dict(given) if isinstance(given, Mapping) else {"loss": given}
        loss = means.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise ConfigError(
                f"{self._loss_name} gave {_describe(loss)} as loss; expected one number as a tensor, the mean over the "
                "samples of the batch."
            )
        return {**means, "loss": loss.reshape(())}

    @property
    def _loss_name(self) -> str:
        if self.loss_function is None:
            return f"{type(unwrap(self.model)).__name__}, called with the batch,"
        return str(getattr(self.loss_function, "name", getattr(self.loss_function, "__name__", "The loss")))

    def measure(self, batch: CollatedBatch) -> Measures:
        count = batch.trained_tokens
        means = self._means(self.wrapped or self.model, batch.inputs)
        try:
            return Measures({name: (float(value) * count, count) for name, value in means.items()})
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = ", ".join(f"{name}: {_describe(value)}" for name, value in means.items())
            raise ConfigError(f"{self._loss_name} gave {kinds}; expected one number by each name.") from error

    def preview(self) -> SampleInspector:
        """Return a function that shows decoded rows, each batched with the first as in a run."""
        first: list[PreparedRow] = []

        def show(sample: Sample) -> SampleStats:
            prepared = self.collator.prepare(sample)
            if not first:
                first.append(prepared)
            self.collator.join([first[0], prepared])
            fields = []
            for name, value in prepared.fields.items():
                is_array = isinstance(value, Tensor) and value.dim()
                text = _describe(value) if is_array else str(value.item() if isinstance(value, Tensor) else value)
                fields.append(f"{name}: {text if is_array or len(text) <= _SHOWN else f'{text[:_SHOWN]}…'}")
            return SampleStats(1, None, prepared.items, ((", ".join(fields), False),))

        return SampleInspector("rows", show)

    def save(self, folder: Path) -> None:
        """Write the weights, and the config of the function that builds the module."""
        with create_folder(folder) as fresh:
            save_model(unwrap(self.model), str(fresh / _WEIGHTS))
            if self.factory is not None:
                text = json.dumps(self.factory.model_dump(mode="json"), indent=2)
                (fresh / _FACTORY).write_text(text + "\n", encoding="utf-8")

    def load(self, folder: Path) -> nn.Module:
        if self.factory is None:
            module = copy.deepcopy(unwrap(self.model))
        else:
            stored = json.loads((folder / _FACTORY).read_text(encoding="utf-8"))
            module, _ = _call_factory(FactoryConfig.model_validate(stored))
        load_model(module, str(folder / _WEIGHTS))
        return module

    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss: a module's outputs may be anything."""
        return self._means(model, inputs)["loss"].detach().reshape(1)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype(value)} {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"


# ------------------------------------------------------------------------------------------------ batches of rows


class PreparedRow(NamedTuple):
    id: str
    epoch: int
    fields: Mapping[str, Any]
    items: Mapping[str, int]  # the number of images and sounds


class RowCollator:
    """Makes batches of rows: with `collate`, whose random numbers depend on seed, samples and epoch, or by stacking."""

    def __init__(self, data: DataConfig, seed: int, collate: CollateFunction | None = None) -> None:
        self.data, self.seed, self.collate = data, seed, collate

    def prepare(self, sample: Sample) -> PreparedRow:
        if not sample.fields:
            raise SampleError("has no fields")
        if all(isinstance(value, Tensor) and not value.requires_grad for value in sample.fields.values()):
            return PreparedRow(sample.id, sample.epoch, sample.fields, {})  # nothing to decode
        items: dict[str, int] = {}
        fields = {name: self._decode(value, items) for name, value in sample.fields.items()}
        if self.collate is None:
            fields = {name: _to_tensor(name, value) for name, value in fields.items()}
        return PreparedRow(sample.id, sample.epoch, fields, items)

    def _decode(self, value: Any, items: dict[str, int]) -> Any:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list | tuple) and any(isinstance(one, Media) for one in value):
            return [self._decode(one, items) for one in value]
        if isinstance(value, Image.Image):
            value = Media("image", value)
        if not isinstance(value, Media):
            return value
        items[value.kind] = items.get(value.kind, 0) + 1
        source = value.source
        is_image = value.kind == "image"
        if isinstance(source, Tensor) or (is_image and isinstance(source, np.ndarray) and source.dtype != np.uint8):
            return source  # the numbers that a model takes
        return load_image(value, self.data.max_pixels) if is_image else load_audio(value, None)

    def join(self, samples: Sequence[PreparedRow]) -> CollatedBatch:
        """Return the batch of prepared rows; the loss is a mean over them."""
        ids = [sample.id for sample in samples]
        inputs = stack_rows(samples) if self.collate is None else self._call(self.collate, samples)
        items = sum((Counter(sample.items) for sample in samples), Counter[str]())
        return CollatedBatch(inputs, ids, len(ids), len(ids), dict(items))

    def _call(self, collate: CollateFunction, samples: Sequence[PreparedRow]) -> dict[str, Any]:
        name = str(getattr(collate, "name", getattr(collate, "__name__", "collate")))
        key = "\0".join([str(self.seed), str(samples[0].epoch), *(sample.id for sample in samples)])
        try:
            with _use_random_seed(key):
                batch = collate([dict(sample.fields) for sample in samples])
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{name} failed with {samples[0].id} and {len(samples) - 1} more rows: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(batch, Mapping) or not all(isinstance(key, str) for key in batch):
            raise ConfigError(f"{name} returned a {type(batch).__name__}, expected a dict with names as keys.")
        return dict(batch)


@contextmanager
def _use_random_seed(key: str) -> Iterator[None]:
    """Seed all random numbers of a block with a text; their states are restored afterwards."""
    before = random.getstate(), np.random.get_state()
    first, *words = hash_to_seeds(key)
    try:
        random.seed(first)
        np.random.seed(words)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(first)  # torch.manual_seed would seed the GPU too
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _to_tensor(name: str, value: Any) -> Any:
    """Return numbers, images and sounds as tensors, and other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach()
    if name in _LABELS and isinstance(value, str):
        raise ConfigError(
            f"`{name}` is {value!r}: a word has no number. Write numbers into the rows, or give a function `collate` "
            "that turns words into numbers."
        )
    if value is None:
        raise SampleError(f"`{name}` is empty")
    if isinstance(value, Image.Image):
        return torch.from_numpy(np.array(value)).permute(2, 0, 1).float() / 255
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value, np.float32 if value.dtype == np.float64 else None)
        try:
            return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
        except TypeError as error:
            raise SampleError(f"`{name}` is an array of {array.dtype}, expected numbers") from error
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else torch.long)
    if isinstance(value, list | tuple) and value:
        return _stack_list(name, list(value))
    return value


def _stack_list(name: str, values: list[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return values
    if any(isinstance(value, Image.Image | np.ndarray | Tensor) for value in values):
        parts = [_to_tensor(name, value) for value in values]
        if len({part.shape for part in parts}) > 1:
            sizes = ", ".join(str(list(part.shape)) for part in parts)
            raise SampleError(f"`{name}` has parts of the sizes {sizes}, expected one size")
        return torch.stack(parts)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise SampleError(f"`{name}` is a list that is no table of numbers: {error}") from error
    if array.dtype.kind not in "biuf":
        return values
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def stack_rows(samples: Sequence[PreparedRow]) -> dict[str, Any]:
    """Return the fields of all rows: tensors stacked along a new first dimension, other values as lists."""
    first = samples[0]
    for sample in samples:
        if first.fields.keys() != sample.fields.keys():
            missing = sorted(map(str, first.fields.keys() ^ sample.fields.keys()))
            raise ConfigError(f"Only one of {first.id} and {sample.id} has {missing}; expected the same in all rows.")
    batch: dict[str, Any] = {}
    for name in first.fields:
        values = [sample.fields[name] for sample in samples]
        if not any(isinstance(value, Tensor) for value in values):
            batch[name] = values
            continue
        try:
            batch[name] = torch.stack(values)
        except (TypeError, RuntimeError):
            _check_alike(name, samples)
            raise
        if any(value.dtype != batch[name].dtype for value in values):  # torch has promoted them to a common dtype
            _check_alike(name, samples)
    return batch


def _check_alike(name: str, samples: Sequence[PreparedRow]) -> None:
    """Raise ConfigError with the names of two rows that cannot be stacked, if there are such rows."""
    first, a = samples[0], samples[0].fields[name]
    for other in samples[1:]:
        b = other.fields[name]
        advice = "Give a function `collate` that makes them alike."
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            found = f"{type(a).__name__} in {first.id} and {type(b).__name__} in {other.id}"
        elif a.shape != b.shape:
            found = f"{list(a.shape)} in {first.id} and {list(b.shape)} in {other.id}"
        elif a.dtype != b.dtype:
            found = f"of {_dtype(a)} in {first.id} and of {_dtype(b)} in {other.id}"
            advice = "Write all in one way: 1.0 instead of 1 where others have fractions."
        else:
            continue
        raise ConfigError(f"`{name}` is {found}: they cannot be stacked. {advice}")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
