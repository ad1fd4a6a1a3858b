"""One stage of a model: the model itself, without the modules that other stages own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.pipeline.message import Payload
from cornstarch.pipeline.model_analysis import ModelAnalysis, SideModule, WrappedModel, has_parameters
from cornstarch.pipeline.remote_module import (
    LayerPlaceholder,
    RemoteModule,
    ReplayedModule,
    ShapePlaceholder,
    StageDone,
    StageExit,
    StageForward,
    free_parameters,
    record_calls,
    record_layer,
    replace_input,
)
from cornstarch.trees import map_tensors

Call = Callable[[nn.Module, Mapping[str, Any]], Any]
"""Runs a model on a batch."""

# Outputs that would have to be collected from the layers of several stages.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


def call_with_names(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a model on a batch of named inputs."""
    return model(**inputs)


class StageModule(nn.Module):
    """One stage of a model; `model` is the model itself, and its parameters keep their names.

    Every stage runs the model's own forward on the same batch. The last stage returns the output of the model; every
    other stage returns a payload, which the next stage takes as `received`.

    Random numbers that are drawn before the layers must be the same on all stages: seed each microbatch.
    """

    def __init__(self, model: nn.Module, stage_forward: StageForward, tied: Mapping[str, str], call: Call) -> None:
        super().__init__()
        self.model = model
        self.first, self.last = stage_forward.is_first, stage_forward.end is None
        self.tied = dict(tied)
        """Parameters of this stage that other stages also have, by the name under which the model lists them. The
        gradients of all parameters with the same listed name must be summed."""
        self.stage_forward, self.call = stage_forward, call

    def forward(self, inputs: Mapping[str, Any], received: Payload | None = None) -> Payload | Any:
        """Run the stage on one microbatch.

        Args:
            inputs: The batch, as the whole model takes it.
            received: The payload of the previous stage; None on the first stage.
        """
        with self.stage_forward.open(received):
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
        return f"segments {self.stage_forward.start} to {self.stage_forward.end or 'the last'}"


# ---------------------------------------------------------------------------------------------------- which stage


@dataclass(frozen=True)
class StageRanges:
    """The stages of a model, as ranges of segments."""

    starts: tuple[int, ...]
    """The first segment of each stage."""
    layers: int

    def segments(self, stage: int) -> range:
        """Return the segments of a stage; none, if it has embeddings only."""
        ends = (*self.starts[1:], self.layers + 1)
        return range(self.starts[stage], ends[stage])

    @property
    def has_embedding_stage(self) -> bool:
        """Whether the first stage has embeddings only."""
        return self.starts[1:2] == (0,)

    def stages_of_side_module(self, module: SideModule) -> set[int]:
        """Return the stages that have a module beside the layers."""
        if not self.has_embedding_stage or module.in_layer or 0 not in module.uses:
            return self.stages_of(module.uses)
        later = module.uses - {0}
        return {0} | (self.stages_of(later) if later else set())

    def stages_of(self, segments: frozenset[int]) -> set[int]:
        """Return the stages that have one of these segments; all stages, if it is unknown where a module is used."""
        found = {stage for stage in range(len(self.starts)) if segments & set(self.segments(stage))}
        return found or set(range(len(self.starts)))

    def stages_by_module(self, analysis: ModelAnalysis) -> dict[str, set[int]]:
        """Return the stages that have each layer and each side module."""
        stages = {name: self.stages_of(frozenset({number})) for number, name in enumerate(analysis.layers)}
        return stages | {name: self.stages_of_side_module(one) for name, one in analysis.side_modules.items()}


def add_wrapper_names(analysis: ModelAnalysis, wrapped: WrappedModel) -> ModelAnalysis:
    """Return an analysis with the names of the outer module, and with the modules around the model."""
    end, path = len(analysis.layers), wrapped.path
    side_modules = {name: SideModule(frozenset({0}), True) for name in wrapped.before}
    side_modules |= {f"{path}{name}": one for name, one in analysis.side_modules.items()}
    side_modules |= {name: SideModule(frozenset({end}), True) for name in wrapped.after}
    return replace(
        analysis,
        layers=tuple(f"{path}{name}" for name in analysis.layers),
        side_modules=side_modules,
        last_reader={f"{path}{name}": last for name, last in analysis.last_reader.items()},
        modified=frozenset(f"{path}{name}" for name in analysis.modified),
    )


def get_first_stage(name: str, analysis: ModelAnalysis, starts: Sequence[int]) -> int:
    """Return the first stage that has a listed module."""
    if starts[1:2] == [0] and analysis.is_before_layers(name):
        return 0
    return bisect_right(starts, analysis.segment_of(name)) - 1


def map_parameters_to_stages(model: nn.Module, analysis: ModelAnalysis, starts: Sequence[int]) -> dict[int, set[int]]:
    """Return the stages that have each parameter of a whole model, by the `id` of the parameter."""
    stages = StageRanges(tuple(starts), len(analysis.layers)).stages_by_module(analysis)
    found: dict[int, set[int]] = {}
    for _, parameter, owners in _find_owners(model, stages, set(range(len(starts)))):
        found.setdefault(id(parameter), set()).update(owners)
    return found


def find_tied_names(
    model: nn.Module, stages: Mapping[str, set[int]], stage: int, everywhere: set[int]
) -> dict[str, str]:
    """Return the parameters of a stage that other stages also have, with the names under which the model lists them.

    `stages` says which stages have each module; parameters outside these modules are on the stages `everywhere`.
    """
    listed = {id(parameter): name for name, parameter in model.named_parameters()}
    own: dict[str, str] = {}  # one name for each parameter, also if it has several on this stage
    owners_of: dict[str, set[int]] = {}
    for name, parameter, owners in _find_owners(model, stages, everywhere):
        canonical = listed[id(parameter)]
        owners_of.setdefault(canonical, set()).update(owners)
        if stage in owners and canonical not in own:
            own[canonical] = name
    return {name: canonical for canonical, name in own.items() if len(owners_of[canonical]) > 1}


def _find_owners(
    model: nn.Module, stages: Mapping[str, set[int]], everywhere: set[int]
) -> Iterator[tuple[str, nn.Parameter, set[int]]]:
    """Yield every name of a parameter, the parameter, and the stages that have it under this name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        prefix = name
        while prefix and prefix not in stages:
            prefix = prefix.rpartition(".")[0]
        yield name, parameter, stages[prefix] if prefix else everywhere


# ---------------------------------------------------------------------------------------------------- building


def build_stage(
    model: nn.Module, analysis: ModelAnalysis, starts: Sequence[int], stage: int, call: Call = call_with_names
) -> StageModule:
    """Turn a model into one of its stages, in place: the parameters of other stages are freed."""
    ranges = StageRanges(tuple(starts), len(analysis.layers))
    stages = ranges.stages_by_module(analysis)
    tied = find_tied_names(model, stages, stage, set(range(len(starts))))
    here = ranges.segments(stage)
    # A stage of embeddings only also sends the results that are read behind the first layer.
    end = None if stage == len(starts) - 1 else max(1, here.stop)
    follows_embeddings = ranges.has_embedding_stage and stage == 1
    forward = StageForward(
        here.start, end, analysis.layers, analysis.last_reader, analysis.modified, follows_embeddings
    )
    if len(starts) > 1:
        has_embeddings_only = ranges.has_embedding_stage and stage == 0
        own = {name for name, owners in stages.items() if stage in owners}
        _replace_remote_modules(model, analysis, here, forward, own, has_embeddings_only)
        _forget_remote_ties(model)
        _keep_dtype_and_device(model)
        _refuse_collected_outputs(model)
        _refuse_other_attention(model)
    return StageModule(model, forward, tied, call)


def _replace_remote_modules(
    model: nn.Module,
    analysis: ModelAnalysis,
    here: range,
    forward: StageForward,
    own: set[str],
    has_embeddings_only: bool,
) -> None:
    """Put placeholders where the modules of other stages are, and record the results of the stage's own modules."""

    def get_device() -> torch.device:
        tensors = (*model.parameters(), *model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    originals = {name: model.get_submodule(name) for name in (*analysis.layers, *analysis.side_modules)}
    placeholders: dict[str, RemoteModule] = {}
    for number, name in enumerate(analysis.layers):
        layer = originals[name]
        if number < here.start:
            placeholders[name] = LayerPlaceholder(layer, name, get_device, forward, number=number)
        elif number >= here.stop:
            is_exit = has_embeddings_only and number == 0
            placeholders[name] = (
                StageExit(layer, name, get_device, forward)
                if is_exit
                else RemoteModule(layer, name, get_device, frees=False)
            )
        else:
            if number == 0 and not forward.is_first:
                replace_input(layer, forward)
            ends_stage = forward.end == number + 1
            if ends_stage or analysis.last_reader.get(name, 0) > number + 1:
                record_layer(layer, name, forward, ends_stage)
    for name, side in analysis.side_modules.items():
        module = originals[name]
        if name in own:
            if not side.in_layer:
                record_calls(module, name, forward)
        elif min(side.uses) >= here.stop:  # a later stage runs it
            if has_parameters(module):
                placeholders[name] = RemoteModule(module, name, get_device, frees=False)
        elif analysis.last_reader.get(name, 0) >= max(1, here.start):
            placeholders[name] = ReplayedModule(module, name, get_device, forward)
        elif has_parameters(module):
            placeholders[name] = ShapePlaceholder(module, name, get_device, forward)

    # By identity: a module may occur under several names.
    by_id = {id(originals[name]): placeholder for name, placeholder in placeholders.items()}
    for part in list(model.modules()):
        for key, child in list(part._modules.items()):
            if id(child) in by_id:
                part._modules[key] = by_id[id(child)]
    # Freed last: a submodule of a replaced module may also be a part of this stage.
    kept = {id(part) for part in model.modules()}
    for name in placeholders:
        free_parameters(originals[name], kept)


def _forget_remote_ties(model: nn.Module) -> None:
    """Let transformers tie only parameters that are here: it would put a placeholder's weight into a head."""
    for part in model.modules():
        keys = getattr(part, "all_tied_weights_keys", None)
        if isinstance(part, PreTrainedModel) and keys:
            here = dict(part.named_parameters(remove_duplicate=False))
            part.all_tied_weights_keys = {a: b for a, b in keys.items() if a in here and b in here}


def _keep_dtype_and_device(model: nn.Module) -> None:
    """Let models inside the model keep a dtype and a device when they have no parameters left."""

    def get_first() -> Any:
        return next(parameter for parameter in model.parameters() if parameter.is_floating_point())

    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not has_parameters(part):
            kind = type(part)
            answers = {"dtype": property(lambda _: get_first().dtype), "device": property(lambda _: get_first().device)}
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            part.__class__ = type(kind.__name__, (kind,), {**names, **answers})


def _refuse_collected_outputs(model: nn.Module) -> None:
    """Refuse outputs that would have to be collected from the layers of other stages."""

    def check(module: nn.Module, _: Any, options: dict[str, Any]) -> None:
        config = getattr(module, "config", None)
        for name in _COLLECTED:
            if options.get(name) or (options.get(name) is None and getattr(config, name, False)):
                raise ConfigError(f"{name} = True: {type(module).__name__} is cut into stages; no stage has them all.")

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.register_forward_pre_hook(check, with_kwargs=True)


def _refuse_other_attention(model: nn.Module) -> None:
    """Refuse another attention implementation: its masks are verified by running the model, and a stage cannot run."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(
            "it was cut into stages before. Choose its attention (attend_through_masks, for packed documents and spans "
            "that see both ways) before it is cut"
        )

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation = refuse  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------- nn.Sequential


class FunctionLayer(nn.Module):
    """A function among layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the function."""
        return self.function(*inputs, **options)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


class SequentialStage(StageModule):
    """One stage of an `nn.Sequential`; `model` is an `nn.Sequential` of its own layers."""

    def __init__(self, model: nn.Module, first: bool, last: bool, tied: Mapping[str, str], call: Call | None) -> None:
        nn.Module.__init__(self)
        self.model, self.first, self.last = model, first, last
        self.tied = dict(tied)
        self.call = call or call_with_single_input

    def forward(self, inputs: Mapping[str, Any], received: Payload | None = None) -> Payload | Any:
        """Run the layers of the stage on the batch, or on the output of the previous stage."""
        if self.first != (received is None):
            raise ConfigError(
                "The first stage receives nothing; every other stage receives what the one before it returned."
            )
        if self.first:
            return self.call(self.model, inputs)
        # Received tensors are leaves that require a gradient: autograd forbids to modify them in place.
        writes = any(getattr(layer, "inplace", False) for layer in self.model.modules())
        return self.model(map_tensors(Tensor.clone, received) if writes else received)

    def extra_repr(self) -> str:
        return ""


def call_with_single_input(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a model on the entry `input` of a batch, or on its only entry."""
    if "input" in inputs:
        return model(inputs["input"])
    if len(inputs) != 1:
        raise ConfigError(
            f"A chain of layers takes one input; the batch has {', '.join(inputs) or 'none'}. Call it `input`, or say "
            "how the first layer is called (call)."
        )
    return model(next(iter(inputs.values())))


def build_sequential_stage(model: nn.Module, starts: Sequence[int], stage: int, call: Call | None) -> SequentialStage:
    """Turn an `nn.Sequential` into one of its stages, in place."""
    names = list(model._modules)
    ends = [*starts[1:], len(names)]
    stages = {name: {s for s, end in enumerate(ends) if starts[s] <= n < end} for n, name in enumerate(names)}
    tied = find_tied_names(model, stages, stage, set(range(len(starts))))
    for name in names:
        if stage not in stages[name]:
            del model._modules[name]
    return SequentialStage(model, stage == 0, stage == len(starts) - 1, tied, call)
