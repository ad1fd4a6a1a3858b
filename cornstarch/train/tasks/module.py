"""Any module with a loss: made by a function that the description names, or given in Python."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import unwrap, without_cache
from cornstarch.pipeline.holes import StageDone
from cornstarch.train.config import DataConfig, FactoryConfig, RunConfig
from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.sample import MediaKind, Sample
from cornstarch.train.failure import is_out_of_memory
from cornstarch.train.tasks.loading import new_folder, refuse_unused
from cornstarch.train.tasks.stacking import CollateFunction, RowCollator
from cornstarch.train.tasks.task import Measures

NAME = "module"
LossFunction = Callable[[nn.Module, Mapping[str, Any]], Any]
"""Of the module and a batch: the mean loss over its samples, or means by name, `loss` among them."""

_WEIGHTS, _MAKER = "model.safetensors", "factory.json"
_UNUSED = ("packing", "chat_template", "train_on", "system")


def factory_task(config: RunConfig) -> ModuleTask:
    """Return the task of a run whose model a Python function makes."""
    factory = config.model.factory
    if factory is None:
        raise ConfigError("model describes no `factory`.")
    module, loss = _made(factory)
    if factory.loss is not None:
        if loss is not None:
            raise ConfigError(
                f"model.factory.loss = {factory.loss}\n  {factory.function} returns a loss as well. Leave out one of "
                "them."
            )
        loss = Named(factory.loss, imported("model.factory.loss", factory.loss))
    collate = None
    if factory.collate is not None:
        collate = Named(factory.collate, imported("model.factory.collate", factory.collate))
    made = module_task(module, loss, collate, config.data, config.seed)
    made.factory = factory
    return made


def module_task(
    module: nn.Module,
    loss: LossFunction | None = None,
    collate: CollateFunction | None = None,
    data: DataConfig | None = None,
    seed: int = 0,
) -> ModuleTask:
    """Return the task of a module that is there already.

    Args:
        module: What is trained.
        loss: A function of (module, batch). Without one, `module(**batch)` must return something with a `loss`.
        collate: A function that makes a batch of a list of rows, whose images and sounds are decoded. Without one,
            numbers, arrays and images are stacked.
        data: Limits of images and rows.
        seed: Of the random numbers that `collate` meets: the same for the same samples in the same epoch.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"The module is a {type(module).__name__}, expected a torch.nn.Module.")
    for name, function in (("loss", loss), ("collate", collate)):
        if function is not None and not callable(function):
            raise ConfigError(f"{name} is a {type(function).__name__}, expected a function.")
    if data is None:
        data = DataConfig.model_validate({"train": "rows given in Python"})
    refuse_unused(data, NAME, *_UNUSED)
    return ModuleTask(module, RowCollator(data, seed, collate), loss)


# ------------------------------------------------------------------------------------------------ functions by name


@dataclass(frozen=True)
class Named:
    """A function with the name that it was given by."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __str__(self) -> str:
        return self.name


def imported(where: str, path: str) -> Callable[..., Any]:
    """Return the function `package.module:function`."""
    module, _, name = path.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(f"{where} = {path}\n  It cannot be imported: {type(error).__name__}: {error}.") from error
    if not callable(found):
        raise ConfigError(f"{where} = {path}\n  It is a {type(found).__name__}, expected a function.")
    return found


def _made(factory: FactoryConfig) -> tuple[nn.Module, LossFunction | None]:
    """Call the function that makes the model."""
    where = f"model.factory.function = {factory.function}\n  "
    function = imported("model.factory.function", factory.function)
    try:
        made = partial(function, **factory.arguments)()
    except Exception as error:
        raise ConfigError(f"{where}It failed: {type(error).__name__}: {error}.") from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        kinds = [type(one).__name__ for one in (made if isinstance(made, tuple) else [made])]
        raise ConfigError(f"{where}It returned {', '.join(kinds)}; expected a torch.nn.Module, or (module, loss).")
    return module, None if loss is None else Named(f"the loss of {factory.function}", loss)


# ------------------------------------------------------------------------------------------------ the task


@dataclass
class ModuleTask:
    """A module with a loss; what the loss is a mean over, and counted by, is samples."""

    model: nn.Module
    collator: RowCollator
    loss_function: LossFunction | None = None
    factory: FactoryConfig | None = field(default=None, repr=False)
    name: str = NAME
    wrapped: nn.Module | None = field(default=None, init=False, repr=False)
    """What is called instead of the model, where several processes train it together."""

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean loss over the samples."""
        loss: Tensor = self._means(self.wrapped or self.model, inputs)["loss"]
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                f"{self._loss_name} gave a loss that does not depend on any trained weight: was it detached, or is the "
                "module frozen?"
            )
        return loss

    def _means(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the loss, and what else the loss function tells."""
        try:
            given = self._called(model, inputs)
        except Exception as error:
            if isinstance(error, ConfigError | StageDone) or is_out_of_memory(error):
                raise
            batch = ", ".join(f"{name}: {_kind(value)}" for name, value in inputs.items())
            raise ConfigError(
                f"{self._loss_name} failed: {type(error).__name__}: {error}\n  The batch has {batch}."
            ) from error
        means = dict(given) if isinstance(given, Mapping) else {"loss": given}
        loss = means.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise ConfigError(
                f"{self._loss_name} gave {_kind(loss)} as loss; expected one number as a tensor, the mean over the "
                "samples of the batch."
            )
        return {**means, "loss": loss.reshape(())}

    def _called(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        if self.loss_function is not None:
            return self.loss_function(model, inputs)
        output = model(**without_cache(self.model, inputs))
        return output["loss"] if isinstance(output, Mapping) and "loss" in output else getattr(output, "loss", None)

    @property
    def _loss_name(self) -> str:
        if self.loss_function is None:
            return f"{type(unwrap(self.model)).__name__}, called with the batch,"
        return str(getattr(self.loss_function, "name", getattr(self.loss_function, "__name__", "The loss")))

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return the loss and whatever else the loss function measures."""
        count = batch.trained_tokens
        means = self._means(self.wrapped or self.model, batch.inputs)
        try:
            return Measures({name: (float(value) * count, count) for name, value in means.items()})
        except (TypeError, ValueError, RuntimeError) as error:
            kinds = ", ".join(f"{name}: {_kind(value)}" for name, value in means.items())
            raise ConfigError(f"{self._loss_name} gave {kinds}; expected one number by each name.") from error

    def modalities(self) -> dict[str, MediaKind]:
        """Return nothing: no text asks about images or sounds."""
        return {}

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return nothing: what a module says is known to its owner."""
        return []

    def truth(self, sample: Sample) -> str:
        """Return nothing."""
        return ""

    def save(self, folder: Path) -> None:
        """Write the weights, and the description of the function that makes the module."""
        with new_folder(folder) as fresh:
            save_model(unwrap(self.model), str(fresh / _WEIGHTS))
            if self.factory is not None:
                text = json.dumps(self.factory.model_dump(mode="json"), indent=2)
                (fresh / _MAKER).write_text(text + "\n", encoding="utf-8")

    def load(self, folder: Path) -> nn.Module:
        """Return the module, made anew, with the weights of a folder."""
        if self.factory is None:
            module = copy.deepcopy(unwrap(self.model))
        else:
            stored = json.loads((folder / _MAKER).read_text(encoding="utf-8"))
            module, _ = _made(FactoryConfig.model_validate(stored))
        load_model(module, str(folder / _WEIGHTS))
        return module

    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss: a module's outputs may be anything."""
        return self._means(model, inputs)["loss"].detach().reshape(1)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"


__all__ = ["LossFunction", "ModuleTask", "factory_task", "module_task"]
