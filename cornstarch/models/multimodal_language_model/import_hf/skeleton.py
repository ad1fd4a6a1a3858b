"""Run the methods of a Hugging Face model without its parts.

A *skeleton* of a module has its methods and its config, but no weights and no children. Parts are attached to it for a
call; a missing part is replaced by a `PlaceholderModule`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import UnsupportedModelError

Module = TypeVar("Module", bound=nn.Module)


def copy_skeleton(module: Module) -> Module:
    """Return a copy of `module` with its methods and plain attributes, but no weights, children or hooks."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name in ("_modules", "_parameters", "_buffers") or name.endswith("_hooks"):
            copy.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) else {}
    copy.__dict__["_non_persistent_buffers_set"] = set()
    copy.__dict__.pop("forward", None)  # set by libraries that place layers on devices; it runs the old module
    return copy


class PlaceholderModule:
    """Replaces a part while the model's own forward runs without it; reading its attributes works, calling raises."""

    def __init__(self, name: str, part: nn.Module) -> None:
        self.name, self.part = name, copy_skeleton(part)
        self.device: Any = None
        self.dtype: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run."""
        raise UnsupportedModelError(f"it uses {self.name} outside the method that computes features")

    def __getattr__(self, name: str) -> Any:
        if name == "part":  # during copy.copy
            raise AttributeError(name)
        return getattr(self.part, name)


class _LanguageModelCallError(Exception):
    """Ends a forward at its language model: an exception is the only way out of the middle of a forward."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class _CallRecorder:
    """Replaces the language model, and ends the forward when it is called."""

    def __init__(self, text_model: nn.Module, embeds: Tensor) -> None:
        self._text_model, self._embeds = text_model, embeds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _LanguageModelCallError(kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._text_model, name)
        return self.get_input_embeddings() if isinstance(value, nn.Embedding) else value

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """Return a function in place of the embedding table."""
        return lambda input_ids: self._embeds


def record_language_model_call(
    inner: PreTrainedModel,
    text_name: str,
    text_model: nn.Module,
    embeds: Tensor,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a skeleton's own forward up to its language model, and return the arguments of that call.

    Args:
        inner: The skeleton. State that its forward keeps (rope deltas) stays on it.
        text_name: The name of the language model in it.
        text_model: The language model, of which only attributes are read.
        embeds: The result of looking up the token ids.
        inputs: The arguments of the forward.
        outputs: By method name, the result to return instead of running the method, or a function to run instead.
    """
    recorder = _CallRecorder(text_model, embeds)
    attached: dict[str, Any] = {text_name: recorder, "get_input_embeddings": recorder.get_input_embeddings}
    for name, output in (outputs or {}).items():
        attached[name] = output if callable(output) else lambda *_, _output=output, **__: _output
    for part in inner.__dict__.values():
        if isinstance(part, PlaceholderModule):
            part.device, part.dtype = embeds.device, embeds.dtype
    inner.__dict__.update(attached)
    inner._parameters["attached"] = embeds  # type: ignore[assignment]  # models read device and dtype from weights
    try:
        type(inner).forward(inner, **inputs)
    except _LanguageModelCallError as call:
        return {name: value for name, value in call.inputs.items() if value is not None}
    finally:
        del inner._parameters["attached"]
        for name in attached:
            del inner.__dict__[name]
    raise UnsupportedModelError("it never calls its language model")
