"""One stage of a model: the model itself, without what other stages own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.pipeline.anatomy import Frame, weighs
from cornstarch.pipeline.findings import Survey, Unit
from cornstarch.pipeline.holes import (
    Elsewhere,
    Exit,
    Hole,
    Passage,
    Replayed,
    StageDone,
    Stub,
    record_calls,
    record_layer,
    replace_input,
    without_storage,
)
from cornstarch.pipeline.payload import Payload

Call = Callable[[nn.Module, Mapping[str, Any]], Any]
"""Runs a model on a batch."""

# What would have to be collected from layers of several stages.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


def call_with_names(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a model on a batch of named inputs."""
    return model(**inputs)


class StagePart(nn.Module):
    """One stage of one model; `model` is the model itself, and its parameters keep their names.

    Every stage runs the model's own forward on the same batch. A stage that is not the last returns what the next one
    must be given as `received`; the last returns what the model returns.

    Random numbers that are drawn before the layers must be the same on all stages: seed each microbatch.
    """

    def __init__(self, model: nn.Module, passage: Passage, tied: Mapping[str, str], call: Call) -> None:
        super().__init__()
        self.model = model
        self.first, self.last = passage.is_first, passage.end is None
        self.tied = dict(tied)
        """Parameters of this stage that others have, too, by the name that the model lists them under: gradients of
        all that have the same one must be added up."""
        self.passage, self.call = passage, call

    def forward(self, inputs: Mapping[str, Any], received: Payload | None = None) -> Payload | Any:
        """Run the stage on one microbatch.

        Args:
            inputs: The batch, as the whole model takes it.
            received: What the stage before returned; None on the first stage.
        """
        with self.passage.open(received):
            try:
                output = self.call(self.model, inputs)
            except StageDone as done:
                return done.payload
        if not self.last:
            raise ConfigError(
                f"The forward of {type(self.model).__name__} ended before the last layer of its stage was called: "
                "was it left out (layerdrop)?"
            )
        return output

    def extra_repr(self) -> str:
        """Say which segments it has."""
        return f"segments {self.passage.start} to {self.passage.end or 'the last'}"


@dataclass(frozen=True)
class Cuts:
    """The stages of a model, as runs of segments."""

    starts: tuple[int, ...]
    """The first segment of each stage."""
    layers: int

    def segments(self, stage: int) -> range:
        """Return the segments of a stage; none, if it has embeddings alone."""
        ends = (*self.starts[1:], self.layers + 1)
        return range(self.starts[stage], ends[stage])

    @property
    def has_entry(self) -> bool:
        """Whether the first stage has embeddings alone."""
        return self.starts[1:2] == (0,)

    def stages_of_unit(self, unit: Unit) -> set[int]:
        """Return the stages that have a module beside the layers."""
        if not self.has_entry or unit.inside or 0 not in unit.uses:
            return self.stages_of(unit.uses)
        later = unit.uses - {0}
        return {0} | (self.stages_of(later) if later else set())

    def stages_of(self, uses: frozenset[int]) -> set[int]:
        """Return the stages that have one of these segments; all of them, if nobody knows where it is used."""
        found = {stage for stage in range(len(self.starts)) if uses & set(self.segments(stage))}
        return found or set(range(len(self.starts)))


def placed(survey: Survey, frame: Frame) -> Survey:
    """Return a survey under the names of the module that was given, with what stands around the model."""
    end = len(survey.layers)
    units = {name: Unit(frozenset({0}), True) for name in frame.before}
    units |= {f"{frame.path}{name}": unit for name, unit in survey.units.items()}
    units |= {name: Unit(frozenset({end}), True) for name in frame.behind}
    return replace(
        survey,
        layers=tuple(f"{frame.path}{name}" for name in survey.layers),
        units=units,
        live={f"{frame.path}{name}": last for name, last in survey.live.items()},
        written=frozenset(f"{frame.path}{name}" for name in survey.written),
    )


def make_part(
    model: nn.Module, survey: Survey, starts: Sequence[int], stage: int, call: Call = call_with_names
) -> StagePart:
    """Make a stage out of a model, in place: what other stages own is given up.

    Args:
        model: The model.
        survey: How it is made; with the names that its modules have in `model`.
        starts: The first segment of each stage; 0 first.
        stage: Which of the stages to make.
        call: Runs the model on a batch.
    """
    cuts = Cuts(tuple(starts), len(survey.layers))
    tied = _tied(model, survey, cuts, stage)
    here = cuts.segments(stage)
    is_entry, is_entered = cuts.has_entry and stage == 0, cuts.has_entry and stage == 1
    end = None if stage == len(starts) - 1 else max(1, here.stop)  # what is read behind the first layer goes on
    passage = Passage(here.start, end, survey.layers, survey.live, survey.written, is_entered)
    if len(starts) > 1:
        own = {name for name, unit in survey.units.items() if stage in cuts.stages_of_unit(unit)}
        _Cutter(model, survey, here, passage, own, is_entry).cut()
        _forget_ties(model)
        _keep_precision(model)
        _refuse_collected(model)
        _refuse_other_attention(model)
    return StagePart(model, passage, tied, call)


class _Cutter:
    """Puts holes and stubs where the modules of other stages are."""

    def __init__(
        self, model: nn.Module, survey: Survey, here: range, passage: Passage, own: set[str], is_entry: bool
    ) -> None:
        self.model, self.survey, self.here, self.passage = model, survey, here, passage
        self.own, self.is_entry = own, is_entry
        self.originals = {name: model.get_submodule(name) for name in (*survey.layers, *survey.units)}

    def cut(self) -> None:
        stand_ins = {**self._layers(), **self._units()}
        gone = {id(self.originals[name]): stand_in for name, stand_in in stand_ins.items()}
        _put(self.model, gone)
        kept = {id(part) for part in self.model.modules()}
        for name in stand_ins:
            without_storage(self.originals[name], kept)

    def _layers(self) -> dict[str, Elsewhere]:
        found: dict[str, Elsewhere] = {}
        for number, name in enumerate(self.survey.layers):
            layer = self.originals[name]
            if number < self.here.start:
                found[name] = Hole(layer, name, number, self.passage, device=self._device, frees=False)
            elif number >= self.here.stop:
                stand_in = Exit if self.is_entry and number == 0 else Elsewhere
                found[name] = stand_in(layer, name, self._device, frees=False)
                found[name].__dict__["passage"] = self.passage
            else:
                if number == 0 and not self.passage.is_first:
                    replace_input(layer, self.passage)
                ends = self.passage.end == number + 1
                if ends or self.survey.live.get(name, 0) > number + 1:
                    record_layer(layer, name, self.passage, ends)
        return found

    def _units(self) -> dict[str, Elsewhere]:
        found: dict[str, Elsewhere] = {}
        for name, unit in self.survey.units.items():
            module = self.originals[name]
            if name in self.own:
                if not unit.inside:
                    record_calls(module, name, self.passage)
            elif min(unit.uses) >= self.here.stop:
                if weighs(module):
                    found[name] = Elsewhere(module, name, self._device, frees=False)
            elif self.survey.live.get(name, 0) >= max(1, self.here.start):
                found[name] = Replayed(module, name, self.passage, device=self._device, frees=False)
            elif weighs(module):
                found[name] = Stub(module, name, self.passage, device=self._device, frees=False)
        return found

    def _device(self) -> torch.device:
        """Return where the stage computes."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")


def _put(model: nn.Module, stand_ins: Mapping[int, nn.Module]) -> None:
    """Put something in the place of modules, by `id`, wherever the model has them."""
    for part in list(model.modules()):
        for key, child in list(part._modules.items()):
            if id(child) in stand_ins:
                part._modules[key] = stand_ins[id(child)]


def _tied(model: nn.Module, survey: Survey, cuts: Cuts, stage: int) -> dict[str, str]:
    return shared_parameters(model, _stages_by_module(survey, cuts), stage, set(range(len(cuts.starts))))


def _stages_by_module(survey: Survey, cuts: Cuts) -> dict[str, set[int]]:
    stages = {name: cuts.stages_of(frozenset({number})) for number, name in enumerate(survey.layers)}
    return stages | {name: cuts.stages_of_unit(unit) for name, unit in survey.units.items()}


def first_stage_of(name: str, survey: Survey, starts: Sequence[int]) -> int:
    """Return the first stage that has a listed module."""
    if starts[1:2] == [0] and survey.precedes_layers(name):
        return 0
    return bisect_right(starts, survey.segment_of(name)) - 1


def stages_of_parameters(model: nn.Module, survey: Survey, starts: Sequence[int]) -> dict[int, set[int]]:
    """Return which stages have each parameter of a model, by its `id`.

    Args:
        model: The whole model.
        survey: How it is made; with the names that its modules have in `model`.
        starts: The first segment of each stage; 0 first.
    """
    by_module = _stages_by_module(survey, Cuts(tuple(starts), len(survey.layers)))
    found: dict[int, set[int]] = {}
    for _, parameter, home in _homes(model, by_module, set(range(len(starts)))):
        found.setdefault(id(parameter), set()).update(home)
    return found


def shared_parameters(
    model: nn.Module, stages: Mapping[str, set[int]], stage: int, everywhere: set[int]
) -> dict[str, str]:
    """Return the parameters that a stage has and others have, too, by the name that the model lists them under.

    Args:
        model: The whole model.
        stages: Which stages have each module.
        stage: The stage that is asked for.
        everywhere: The stages that have what is in none of these modules.
    """
    listed = {id(parameter): name for name, parameter in model.named_parameters()}
    own: dict[str, str] = {}
    holders: dict[str, set[int]] = {}
    for name, parameter, home in _homes(model, stages, everywhere):
        canonical = listed[id(parameter)]
        holders.setdefault(canonical, set()).update(home)
        if stage in home:
            own[name] = canonical
    shared = {name: canonical for name, canonical in own.items() if len(holders[canonical]) > 1}
    # Of several names that a parameter has on this stage itself, one is enough.
    return {name: canonical for name, canonical in shared.items() if name == _first(shared, canonical)}


def _homes(
    model: nn.Module, stages: Mapping[str, set[int]], everywhere: set[int]
) -> Iterator[tuple[str, nn.Parameter, set[int]]]:
    """Yield every name of a parameter, the parameter, and the stages that have it under this name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, next((stages[prefix] for prefix in _prefixes(name) if prefix in stages), everywhere)


def _first(names: Mapping[str, str], canonical: str) -> str:
    return next(name for name, other in names.items() if other == canonical)


def _prefixes(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _forget_ties(model: nn.Module) -> None:
    """Let transformers tie only what is still there: it would put a stand-in's weight into a head."""
    for part in model.modules():
        keys = getattr(part, "all_tied_weights_keys", None)
        if isinstance(part, PreTrainedModel) and keys:
            there = dict(part.named_parameters(remove_duplicate=False))
            part.all_tied_weights_keys = {a: b for a, b in keys.items() if a in there and b in there}


def _keep_precision(model: nn.Module) -> None:
    """Let models inside the model that have no parameters left go on telling a precision and a device."""

    def first(self: nn.Module) -> Any:
        return next(parameter for parameter in model.parameters() if parameter.is_floating_point())

    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not weighs(part):
            kind = type(part)
            answers = {"dtype": property(lambda self: first(self).dtype), "device": property(lambda s: first(s).device)}
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            part.__class__ = type(kind.__name__, (kind,), {**names, **answers})


def _refuse_collected(model: nn.Module) -> None:
    """Refuse to return what would have to be collected from the layers of other stages."""

    def check(module: nn.Module, _: Any, options: dict[str, Any]) -> None:
        config = getattr(module, "config", None)
        for name in _COLLECTED:
            if options.get(name) or (options.get(name) is None and getattr(config, name, False)):
                raise ConfigError(f"{name} = True: {type(module).__name__} is cut into stages; no stage has them all.")

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.register_forward_pre_hook(check, with_kwargs=True)


def _refuse_other_attention(model: nn.Module) -> None:
    """Refuse another attention implementation: a model is run to see whether it obeys masks, and a stage cannot be."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(
            "it was cut into stages before. Choose its attention (attend_through_masks, for packed documents and spans "
            "that see both ways) before it is cut"
        )

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation = refuse  # type: ignore[method-assign]


__all__ = [
    "Call",
    "Cuts",
    "StagePart",
    "call_with_names",
    "make_part",
    "placed",
    "shared_parameters",
    "stages_of_parameters",
]
