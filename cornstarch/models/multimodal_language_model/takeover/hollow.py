"""Running the methods of a Hugging Face model without its parts (see `dismantle`).

A *hollow* copy of a module has its methods and its config, but no weights and no children. Parts are lent to it for a
call; where a part is not at hand, something stands in for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import UnsupportedModelError

Module = TypeVar("Module", bound=nn.Module)


def hollow(module: Module) -> Module:
    """Return a copy of `module` with its methods and plain attributes, but no weights, children or hooks."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name in ("_modules", "_parameters", "_buffers") or name.endswith("_hooks"):
            copy.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) else {}
    copy.__dict__["_non_persistent_buffers_set"] = set()
    copy.__dict__.pop("forward", None)  # put there by libraries that place layers on devices; runs the old module
    return copy


class StandIn:
    """Stands where a part stands while the model's own forward runs without it."""

    def __init__(self, name: str, part: nn.Module) -> None:
        self.name, self.part = name, hollow(part)
        self.device: Any = None
        self.dtype: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be run: the part is elsewhere."""
        raise UnsupportedModelError(f"it uses {self.name} outside the method that computes features")

    def __getattr__(self, name: str) -> Any:
        if name == "part":  # while this is being copied
            raise AttributeError(name)
        return getattr(self.part, name)


class _Listener:
    """Stands where the language model stands, and ends the forward there."""

    def __init__(self, text_model: nn.Module, embeds: Tensor) -> None:
        self._text_model, self._embeds = text_model, embeds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _HandoverError(kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._text_model, name)
        return self.get_input_embeddings() if isinstance(value, nn.Embedding) else value

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        """Return something that looks like an embedding table."""
        return lambda input_ids: self._embeds


class _HandoverError(Exception):
    """A forward has come to its language model: not an error, but the only way out of the middle of a forward."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


def _returning(output: Any) -> Callable[..., Any]:
    return output if callable(output) else lambda *args, **kwargs: output


def listen(
    inner: PreTrainedModel,
    text_name: str,
    text_model: nn.Module,
    embeds: Tensor,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a hollow model's own forward up to its language model and return what that would be called with.

    Args:
        inner: The hollow model. State that its forward keeps (rope deltas) stays on it.
        text_name: The name of the language model in it.
        text_model: The language model, asked for its attributes only.
        embeds: What looking up the token ids gives.
        inputs: The arguments of the forward.
        outputs: What methods of the model return instead of being run (or functions in their place), by name.
    """
    listener = _Listener(text_model, embeds)
    lent: dict[str, Any] = {name: _returning(output) for name, output in (outputs or {}).items()}
    lent |= {text_name: listener, "get_input_embeddings": listener.get_input_embeddings}
    for part in inner.__dict__.values():
        if isinstance(part, StandIn):
            part.device, part.dtype = embeds.device, embeds.dtype
    inner.__dict__.update(lent)
    inner._parameters["lent"] = embeds  # type: ignore[assignment]  # a model asks its weights for device and dtype
    try:
        type(inner).forward(inner, **inputs)
    except _HandoverError as handover:
        return {name: value for name, value in handover.inputs.items() if value is not None}
    finally:
        del inner._parameters["lent"]
        for name in lent:
            del inner.__dict__[name]
    raise UnsupportedModelError("it never calls its language model")
