"""What stands in a stage where the model has modules that other stages own.

The model's own forward runs on every stage, on the same batch. A layer of an earlier stage is a *hole* that returns
what was received; embeddings and the like become *stubs* that return the right shapes, full of NaN, so that whatever
should not have been read is heard of; the last layer of a stage ends the forward. Modules whose results are read by
several stages are recorded where they run and replayed where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.tensor.sequence import CALLED
from cornstarch.parallel.tensor.vocabulary import VocabularyEmbedding
from cornstarch.trees import leaves, map_tensors, tensors_in

Made = dict[str, list[Any]]
ENTRY = "the input of the first layer"
"""By the name of a layer or another module: what its calls returned."""


class StageDone(Exception):
    """Ends the forward of a model when all layers of a stage have run; carries what goes on to the next stage.

    It is no error, but torch calls hooks that must always be called for classes of `Exception` only.
    """

    def __init__(self, payload: dict[str, Any]) -> None:
        super().__init__("the stage is done")
        self.payload = payload


class Passage:
    """What one forward of a stage was given, and what it has to hand on.

    Outside a forward of the stage it is closed, and nothing is recorded or replayed: activations may then be computed
    again, for a backward pass of any microbatch.

    Args:
        start: The first segment of the stage.
        end: The segment behind its last one; None for the last stage.
        layers: The names of the model's layers.
        live: For each name, the last segment that reads its result.
        written: The names whose results are changed in place.
        is_entered: Whether the stage before has embeddings alone: this one begins with what the first layer is given.
    """

    def __init__(
        self,
        start: int,
        end: int | None,
        layers: Sequence[str],
        live: Mapping[str, int],
        written: frozenset[str],
        is_entered: bool = False,
    ) -> None:
        self.start, self.end, self.is_entered = start, end, is_entered
        self.live, self.written = live, written
        self.segment = 0
        self.is_open = False
        self._entrance = layers[start - 1] if start else ""
        self._close()

    def _close(self) -> None:
        self.is_open = False
        self._received: Made = {}
        self._made: Made = {}
        self._precisions: dict[str, str] = {}
        self._replayed: dict[str, int] = {}
        self._unread: Any = None

    @contextmanager
    def open(self, received: Mapping[str, Any] | None) -> Iterator[None]:
        """Be open for one forward."""
        assert not self.is_open, "a stage runs one microbatch at a time"
        if (received is None) != self.is_first:
            raise ConfigError(
                "The first stage receives nothing; every other stage receives what the one before it returned."
            )
        if received is not None:
            self._received, self._precisions = dict(received["results"]), dict(received["precisions"])
        self._made = {name: list(results) for name, results in self._received.items() if self._goes_on(name)}
        self.segment, self.is_open = 0, True
        try:
            yield
        finally:
            self._close()

    def _goes_on(self, name: str) -> bool:
        return self.end is not None and self.live.get(name, 0) >= self.end

    @property
    def is_first(self) -> bool:
        """Whether the stage receives nothing."""
        return self.start == 0 and not self.is_entered

    @property
    def is_here(self) -> bool:
        """Whether the forward has come to what this stage owns."""
        return self.segment >= self.start

    def record(self, name: str, result: Any) -> None:
        """Keep a result for the next stage if it is needed there, and its precision in any case."""
        if not self.is_here:
            return
        if self._goes_on(name):
            kept = map_tensors(Tensor.clone, result) if name in self.written else result
            self._made.setdefault(name, []).append(kept)
        elif name not in self._precisions and _precisions(result):
            self._precisions[name] = str(_precisions(result)[0]).removeprefix("torch.")

    def has(self, name: str) -> bool:
        """Say whether results of a module were received."""
        return name in self._received

    def replay(self, name: str) -> Any:
        """Return what the next call of a module returned on the stage that owns it."""
        number = self._replayed.get(name, 0)
        self._replayed[name] = number + 1
        results = self._received.get(name, [])
        if number >= len(results):
            raise ConfigError(f"{name} is called more often on this stage than on the one that owns it.")
        return map_tensors(Tensor.clone, results[number]) if name in self.written else results[number]

    def unread_layer(self) -> Any:
        """Return something of the form of a layer's result that nothing can be computed from unnoticed."""
        if self._unread is None:
            self._unread = map_tensors(_nan_like, self._received[self._entrance][0])
        return self._unread

    def precision(self, name: str) -> torch.dtype | None:
        """Return the precision of what a module returned on the stage that owns it."""
        return getattr(torch, self._precisions[name]) if name in self._precisions else None

    def enter(self, given: Tensor) -> StageDone:
        """Return what ends the forward of embeddings alone: what the first layer is given goes on."""
        self._made[ENTRY] = [given]
        return self.done()

    def done(self) -> StageDone:
        """Return what ends the forward."""
        return StageDone({"results": dict(self._made), "precisions": dict(self._precisions)})


def _precisions(result: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(result) if tensor.is_floating_point()]


def _nan_like(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, requires_grad=False)


class Elsewhere(nn.Module):
    """Stands for a module that another stage owns: no parameters, but its attributes can be read.

    Args:
        original: The module; it gives up the memory of its parameters.
        name: Its name in the model.
        device: Says where the stage computes.
        frees: Whether the memory is given up now; False if that is done later.
    """

    def __init__(self, original: nn.Module, name: str, device: Callable[[], torch.device], frees: bool = True) -> None:
        super().__init__()
        if frees:
            without_storage(original)
        self.__dict__["original"] = original  # not a child: it has no parameters here, no state and no place in FSDP
        self.__dict__["name"] = name
        self.__dict__["device_of_stage"] = device
        self.training = original.training

    def __getattr__(self, name: str) -> Any:
        """Look at the original; a parameter has its shape and precision, and says that it is where the stage is."""
        if "original" not in self.__dict__:  # it is being copied
            raise AttributeError(name)
        value = getattr(self.__dict__["original"], name)
        if isinstance(value, Tensor) and value.is_meta:
            return torch.zeros((), dtype=value.dtype, device=self.device_of_stage()).expand(value.shape)
        if isinstance(value, torch.device) and value.type == "meta":
            return self.device_of_stage()
        if isinstance(value, nn.Module):
            return Elsewhere(value, f"{self.name}.{name}", self.device_of_stage, frees=False)
        return value

    def extra_repr(self) -> str:
        """Say what it stands for."""
        return type(self.__dict__["original"]).__name__

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse: what is owned by a later stage is never called."""
        raise ConfigError(
            f"{self.name} was called, but belongs to another stage. Were layers left out (layerdrop), or was the "
            "stage called in another way than by StagePart?"
        )


class Exit(Elsewhere):
    """Stands for the first layer, where a stage has embeddings alone: calling it ends the forward."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Hand on what the layer is given."""
        given = next((value for value in (*inputs, *options.values()) if _is_activation(value)), None)
        if given is None:
            raise ConfigError(f"{self.name} is called without activations: a stage needs a layer here.")
        raise self.passage.enter(given)


class Hole(Elsewhere):
    """Stands for a layer of an earlier stage."""

    def __init__(self, original: nn.Module, name: str, number: int, passage: Passage, **rest: Any) -> None:
        super().__init__(original, name, **rest)
        self.__dict__.update(number=number, passage=passage)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the layer returned on its stage, or the same full of NaN if nobody reads it here."""
        passage: Passage = self.passage
        if (called := self.original.__dict__.get(CALLED)) is not None:
            called(*inputs, **options)
        passage.segment = self.number + 1
        return passage.replay(self.name) if passage.has(self.name) else passage.unread_layer()


class Replayed(Elsewhere):
    """Stands for a module of an earlier stage whose results are read here, too."""

    def __init__(self, original: nn.Module, name: str, passage: Passage, **rest: Any) -> None:
        super().__init__(original, name, **rest)
        self.__dict__["passage"] = passage

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return what the module returned on its stage."""
        return self.passage.replay(self.name)


class Stub(Elsewhere):
    """Stands for a module of an earlier stage whose results nobody reads here: only their shapes matter."""

    _MOST = 64  # shapes that are remembered

    def __init__(self, original: nn.Module, name: str, passage: Passage, **rest: Any) -> None:
        super().__init__(original, name, **rest)
        self.__dict__["passage"] = passage
        self.__dict__["known"] = {}

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the right shapes, full of NaN."""
        device = next((tensor.device for tensor in tensors_in((inputs, options))), self.device_of_stage())
        return self._filled(self._shapes(inputs, options, device), device)

    def _shapes(self, inputs: tuple[Any, ...], options: dict[str, Any], device: torch.device) -> Any:
        """Return results on the meta device; they are remembered where shapes alone decide about them."""
        original: nn.Module = self.original
        if isinstance(original, VocabularyEmbedding):  # it would ask other processes
            weight = original.weight
            return torch.empty((*inputs[0].shape, original.embedding_dim), dtype=weight.dtype, device="meta")
        key = _signature((inputs, options))
        if key is not None and key in self.known:
            return self.known[key]
        with torch.no_grad():
            try:
                meta = map_tensors(lambda tensor: tensor.to("meta"), (inputs, options))
                shapes = _called_with(original, torch.device("meta"), *meta)
            except (RuntimeError, NotImplementedError):  # numbers decide about shapes: compute with zeros
                output = _called_with(original, device, inputs, options)
                return map_tensors(lambda tensor: tensor.to("meta"), output)
        if key is not None and len(self.known) < self._MOST:
            self.known[key] = shapes
        return shapes

    def _filled(self, shapes: Any, device: torch.device) -> Any:
        # Mixed precision is the business of the stage that owns the module: the precision is what it was there.
        own, there = next(iter(_precisions(shapes)), None), self.passage.precision(self.name)

        def fill(shape: Tensor) -> Tensor:
            if not shape.is_floating_point():
                return torch.zeros(shape.shape, dtype=shape.dtype, device=device)
            dtype = there if there is not None and shape.dtype == own else shape.dtype
            return torch.full(shape.shape, torch.nan, dtype=dtype, device=device)

        return map_tensors(fill, shapes)


def _called_with(module: nn.Module, device: torch.device, inputs: Any, options: Any) -> Any:
    state: dict[str, Tensor] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta and device.type != "meta":
            state[name] = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        else:
            state[name] = tensor.detach().to(device)
    return torch.func.functional_call(module, state, inputs, options)


def _signature(value: Any) -> tuple[Any, ...] | None:
    """Return what the shapes of results depend on, or None if it cannot be told."""
    found: list[Any] = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found.append((tuple(leaf.shape), leaf.dtype))
        elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
            found.append(leaf)
        else:
            return None
    return tuple(found)


def without_storage(module: nn.Module, kept: Collection[int] = ()) -> None:
    """Give up the memory of a module's parameters; buffers stay, and so do modules that are kept, by `id`."""
    for part in module.modules():
        if id(part) in kept:
            continue
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)


def record_calls(module: nn.Module, name: str, passage: Passage) -> None:
    """Record what a module returns where it runs, and replay it where another stage has run it before."""

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        if not passage.is_open:
            return None
        if not passage.is_here and passage.has(name):
            return passage.replay(name)
        passage.record(name, output)
        return None

    module.register_forward_hook(leave)


def replace_input(layer: nn.Module, passage: Passage) -> None:
    """Let the first layer compute with what a stage of embeddings alone has handed on."""
    kind = type(layer)

    def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        if passage.is_open:
            place = next((number for number, value in enumerate(inputs) if _is_activation(value)), None)
            if place is not None:
                inputs = (*inputs[:place], passage.replay(ENTRY), *inputs[place + 1 :])
            else:
                name = next(name for name, value in options.items() if _is_activation(value))
                options = {**options, name: passage.replay(ENTRY)}
        return kind.__call__(self, *inputs, **options)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    layer.__class__ = type(kind.__name__, (kind,), {**names, "__call__": call})


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def record_layer(layer: nn.Module, name: str, passage: Passage, ends_stage: bool) -> None:
    """Record what a layer returns; the last layer of a stage ends the forward.

    This is done by the layer's class, not by a hook: hooks run inside activation checkpointing, and before FSDP's own.
    """
    kind = type(layer)

    def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        output = kind.__call__(self, *inputs, **options)
        if passage.is_open:
            passage.record(name, output)
            if ends_stage:
                raise passage.done()
        return output

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    layer.__class__ = type(kind.__name__, (kind,), {**names, "__call__": call})


__all__ = [
    "Elsewhere",
    "Exit",
    "Hole",
    "Made",
    "Passage",
    "Replayed",
    "StageDone",
    "Stub",
    "record_calls",
    "record_layer",
    "replace_input",
    "without_storage",
]
