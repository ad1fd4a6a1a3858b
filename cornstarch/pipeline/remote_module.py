"""Placeholders for the modules of a stage's model that other stages own.

Every stage runs the model's own forward on the same batch. A layer of an earlier stage is a placeholder that returns
the received result. Embeddings and the like become placeholders that return the right shapes, filled with NaN, so that
a result that is read by mistake shows up in the loss. The last layer of a stage ends the forward. A module whose result
is read by several stages is recorded where it runs, and replayed on the stages after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.tensor.sequence import CALLED
from cornstarch.parallel.tensor.vocabulary import VocabularyEmbedding
from cornstarch.pipeline.model_analysis import ModelAnalysis
from cornstarch.trees import leaves, map_tensors, tensors_in

_ENTRY = "the input of the first layer"
_CallResults = dict[str, list[Any]]  # by the name of a layer or another module: the results of its calls


class StageDone(Exception):
    """Ends the forward of a model when all layers of a stage have run; carries the payload for the next stage."""

    # Not an error, but torch runs its `always_call` hooks only for subclasses of `Exception`.

    def __init__(self, payload: dict[str, Any]) -> None:
        super().__init__("the stage is done")
        self.payload = payload


class StageForward:
    """The received and recorded results of one forward of a stage.

    Between forwards it is closed, and nothing is recorded or replayed: activation checkpointing may then recompute the
    layers of any microbatch.
    """

    def __init__(self, analysis: ModelAnalysis, start: int, end: int | None, is_first: bool) -> None:
        self.start, self.end, self.is_first = start, end, is_first  # segments; no end on the last stage
        self._last_reader, self._modified = analysis.last_reader, analysis.modified
        self._last_remote_layer = analysis.layers[start - 1] if start else ""
        self.segment = 0
        self._reset()

    def _reset(self) -> None:
        self.is_open = False
        self.received: _CallResults = {}
        self._recorded: _CallResults = {}
        self.precisions: dict[str, str] = {}  # by module, the dtype of its result on the stage that owns it
        self._replayed: dict[str, int] = {}
        self._unread: Any = None

    @contextmanager
    def open(self, received: Mapping[str, Any] | None) -> Iterator[None]:
        assert not self.is_open, "a stage runs one microbatch at a time"
        check_received(received, self.is_first)
        if received is not None:
            self.received, self.precisions = dict(received["results"]), dict(received["precisions"])
        # Results that later stages read are passed on, whether or not this stage reads them.
        self._recorded = {name: list(one) for name, one in self.received.items() if self._is_read_later(name)}
        self.segment, self.is_open = 0, True
        try:
            yield
        finally:
            self._reset()

    def _is_read_later(self, name: str) -> bool:
        return self.end is not None and self._last_reader.get(name, 0) >= self.end

    def _copy_if_modified(self, name: str, result: Any) -> Any:
        return map_tensors(Tensor.clone, result) if name in self._modified else result

    @property
    def has_started(self) -> bool:
        return self.segment >= self.start

    def record(self, name: str, result: Any) -> None:
        if not self.has_started:
            return
        if self._is_read_later(name):
            self._recorded.setdefault(name, []).append(self._copy_if_modified(name, result))
        elif name not in self.precisions and (dtypes := _get_float_dtypes(result)):
            self.precisions[name] = str(dtypes[0]).removeprefix("torch.")

    def replay(self, name: str) -> Any:
        """Return the result of the next call of a module on the stage that owns it."""
        number = self._replayed.get(name, 0)
        self._replayed[name] = number + 1
        results = self.received.get(name, [])
        if number >= len(results):
            raise ConfigError(f"{name} is called more often on this stage than on the one that owns it.")
        return self._copy_if_modified(name, results[number])

    def get_unread_result(self) -> Any:
        """Return a layer's result filled with NaN, for a layer whose result nobody reads here."""
        if self._unread is None:
            layer = self.received[self._last_remote_layer][0]
            self._unread = map_tensors(lambda t: torch.full_like(t, torch.nan if t.is_floating_point() else 0), layer)
        return self._unread

    def finish(self, entry: Tensor | None = None) -> StageDone:
        """Return the exception that ends the forward; `entry` is the input of the first layer, behind embeddings."""
        if entry is not None:
            self._recorded[_ENTRY] = [entry]
        return StageDone({"results": dict(self._recorded), "precisions": dict(self.precisions)})


def check_received(received: Any, is_first: bool) -> None:
    if is_first != (received is None):
        raise ConfigError(
            "The first stage receives nothing; every other stage receives what the one before it returned."
        )


def _get_float_dtypes(result: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(result) if tensor.is_floating_point()]


class RemoteModule(nn.Module):
    """Placeholder for a module that another stage owns: it has no parameters, but its attributes can be read.

    `device` returns the device on which the stage computes, which is known only when the weights are loaded. `state` is
    what subclasses need.
    """

    def __init__(self, original: nn.Module, name: str, device: Callable[[], torch.device], **state: Any) -> None:
        super().__init__()
        # Not a child module: the original must not show up in parameters, state dicts or FSDP units.
        self.__dict__.update(original=original, name=name, device_of_stage=device, **state)
        self.training = original.training

    def __getattr__(self, name: str) -> Any:
        # Parameters keep their shape and dtype, and appear on the stage's device.
        if "original" not in self.__dict__:  # during copy.deepcopy
            raise AttributeError(name)
        value = getattr(self.__dict__["original"], name)
        if isinstance(value, Tensor) and value.is_meta:
            return torch.zeros((), dtype=value.dtype, device=self.device_of_stage()).expand(value.shape)
        if isinstance(value, torch.device) and value.type == "meta":
            return self.device_of_stage()
        if isinstance(value, nn.Module):
            return RemoteModule(value, f"{self.name}.{name}", self.device_of_stage)
        return value

    def extra_repr(self) -> str:
        return type(self.__dict__["original"]).__name__

    def forward(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"{self.name} was called, but belongs to another stage. Were layers left out (layerdrop), or was the "
            "stage called in another way than by StageModule?"
        )


class StageExit(RemoteModule):
    """Placeholder for the first layer on a stage of embeddings only: calling it ends the forward."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        entry = next((value for value in (*inputs, *options.values()) if _is_activation(value)), None)
        if entry is None:
            raise ConfigError(f"{self.name} is called without activations: a stage needs a layer here.")
        raise self.stage_forward.finish(entry)


class LayerPlaceholder(RemoteModule):
    """Placeholder for a layer of an earlier stage."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the layer's result on its stage; the same filled with NaN if nobody reads it here."""
        forward: StageForward = self.stage_forward
        if (called := self.original.__dict__.get(CALLED)) is not None:
            called(*inputs, **options)
        forward.segment = self.number + 1
        return forward.replay(self.name) if self.name in forward.received else forward.get_unread_result()


class ReplayedModule(RemoteModule):
    """Placeholder for a module of an earlier stage whose results are also read here."""

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.stage_forward.replay(self.name)


class ShapePlaceholder(RemoteModule):
    """Placeholder for a module of an earlier stage whose results nobody reads here: only their shapes matter."""

    _MAX_SHAPES = 64

    def forward(self, *inputs: Any, **options: Any) -> Any:
        device = next((tensor.device for tensor in tensors_in((inputs, options))), self.device_of_stage())
        shapes = self._infer_shapes(inputs, options, device)
        # Autocast applies on the stage that owns the module, so its dtype is the one that was recorded there.
        own = next(iter(_get_float_dtypes(shapes)), None)
        recorded = self.stage_forward.precisions.get(self.name)

        def fill(shape: Tensor) -> Tensor:
            if not shape.is_floating_point():
                return torch.zeros(shape.shape, dtype=shape.dtype, device=device)
            dtype = getattr(torch, recorded) if recorded is not None and shape.dtype == own else shape.dtype
            return torch.full(shape.shape, torch.nan, dtype=dtype, device=device)

        return map_tensors(fill, shapes)

    def _infer_shapes(self, inputs: tuple[Any, ...], options: dict[str, Any], device: torch.device) -> Any:
        """Return results on the meta device, from memory where the shapes of the inputs determine them."""
        original: nn.Module = self.original
        if isinstance(original, VocabularyEmbedding):  # its forward would communicate with other processes
            weight = original.weight
            return torch.empty((*inputs[0].shape, original.embedding_dim), dtype=weight.dtype, device="meta")
        key = _get_shape_key((inputs, options))
        if key is not None and key in self.known_shapes:
            return self.known_shapes[key]
        with torch.no_grad():
            try:
                meta = map_tensors(lambda tensor: tensor.to("meta"), (inputs, options))
                shapes = _call_without_weights(original, torch.device("meta"), *meta)
            except (RuntimeError, NotImplementedError):  # the shapes depend on values: compute with zeros as weights
                output = _call_without_weights(original, device, inputs, options)
                return map_tensors(lambda tensor: tensor.to("meta"), output)
        if key is not None and len(self.known_shapes) < self._MAX_SHAPES:
            self.known_shapes[key] = shapes
        return shapes


def _call_without_weights(module: nn.Module, device: torch.device, inputs: Any, options: Any) -> Any:
    def move(tensor: Tensor) -> Tensor:
        if tensor.is_meta and device.type != "meta":
            return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        return tensor.detach().to(device)

    state = {name: move(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return torch.func.functional_call(module, state, inputs, options)


def _get_shape_key(value: Any) -> tuple[Any, ...] | None:
    """Return everything that the shapes of results depend on, or None if that is unknown."""
    plain = bool | int | float | str | torch.dtype | torch.device | None
    found = [(tuple(one.shape), one.dtype) if isinstance(one, Tensor) else one for one in leaves(value)]
    return tuple(found) if all(isinstance(one, tuple | plain) for one in found) else None


def replace_parameters(modules: Iterable[nn.Module], replace: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
    """Replace the parameters that these modules have themselves."""
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replace(parameter)


def free_parameters(module: nn.Module, kept: Collection[int] = ()) -> None:
    """Move a module's parameters to the meta device, except for submodules whose `id` is in `kept`. Buffers stay."""
    freed = (part for part in module.modules() if id(part) not in kept)
    replace_parameters(freed, lambda one: nn.Parameter(one.detach().to("meta"), requires_grad=False))


def record_calls(module: nn.Module, name: str, forward: StageForward) -> None:
    """Record a side module's results where it runs, and replay them where an earlier stage has run it."""

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        if forward.is_open and not forward.has_started and name in forward.received:
            return forward.replay(name)
        if forward.is_open:
            forward.record(name, output)
        return None

    module.register_forward_hook(leave)


def replace_input(layer: nn.Module, forward: StageForward) -> None:
    """Let the first layer compute with the input that a stage of embeddings only has sent."""
    original_call = type(layer).__call__

    def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if forward.is_open:
            named: dict[Any, Any] = {**dict(enumerate(inputs)), **options}
            place = next(place for place, value in named.items() if _is_activation(value))
            named[place] = forward.replay(_ENTRY)
            inputs = tuple(named.pop(number) for number in range(len(inputs)))
            options = named
        return original_call(self, *inputs, **options)

    override_class(layer, __call__=call)  # not a hook: hooks run inside activation checkpointing, before FSDP's own


def record_layer(layer: nn.Module, name: str, forward: StageForward, ends_stage: bool) -> None:
    original_call = type(layer).__call__

    def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        output = original_call(self, *inputs, **options)
        if forward.is_open:
            forward.record(name, output)
            if ends_stage:
                raise forward.finish()
        return output

    override_class(layer, __call__=call)  # not a hook: hooks run inside activation checkpointing, before FSDP's own


def override_class(module: nn.Module, **attributes: Any) -> None:
    """Give a module attributes of its class that differ from those of other modules of that class."""
    kind = type(module)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (kind,), {**names, **attributes})


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
