"""One stage of a model: the model itself, without the modules that other stages own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.pipeline import remote_module
from cornstarch.pipeline.message import Payload
from cornstarch.pipeline.model_analysis import ModelAnalysis, has_parameters
from cornstarch.pipeline.remote_module import RemoteModule, StageDone, StageForward
from cornstarch.trees import map_tensors

Call = Callable[[nn.Module, Mapping[str, Any]], Any]  # runs a model on a batch

# Outputs that would have to be collected from the layers of several stages.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


def call_with_names(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    return model(**inputs)


class StageModule(nn.Module):
    """One stage of a model; `model` is the model itself, and its parameters keep their names.

    Every stage runs the model's own forward on the same batch. The last stage returns the output of the model; every
    other stage returns a payload, which the next stage takes as `received`.

    Random numbers that are drawn before the layers must be the same on all stages: seed each microbatch.
    """

    stage_forward: StageForward  # not of a `SequentialStage`

    def __init__(self, model: nn.Module, first: bool, last: bool, tied: Mapping[str, str], call: Call) -> None:
        super().__init__()
        self.model, self.first, self.last, self.call = model, first, last, call
        self.tied = dict(tied)
        """Parameters of this stage that other stages also have, by the name under which the model lists them. The
        gradients of all parameters with the same listed name must be summed."""

    def forward(self, inputs: Mapping[str, Any], received: Payload | None = None) -> Payload | Any:
        """Run the stage on a microbatch, as the whole model takes it, and on the payload of the previous stage."""
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
        forward = self.__dict__.get("stage_forward")
        return "" if forward is None else f"segments {forward.start} to {forward.end or 'the last'}"


def _list_segments(starts: Sequence[int], layers: int) -> list[range]:
    """Return the segments of each stage; none, if it has embeddings only."""
    return [range(start, end) for start, end in pairwise([*starts, layers + 1])]


def map_modules_to_stages(analysis: ModelAnalysis, starts: Sequence[int]) -> dict[str, set[int]]:
    """Return the stages that have each layer and each side module; `starts` has the first segment of each stage."""
    segments = _list_segments(starts, len(analysis.layers))

    def find_stages(uses: Set[int]) -> set[int]:
        found = {stage for stage, own in enumerate(segments) if not uses.isdisjoint(own)}
        return found or set(range(len(starts)))  # all stages, if it is unknown where a module is used

    stages = {name: find_stages({number}) for number, name in enumerate(analysis.layers)}
    for name, side in analysis.side_modules.items():
        if not segments[0] and 0 in side.uses and not side.in_layer:  # the first stage has embeddings only
            later = side.uses - {0}
            stages[name] = {0} | (find_stages(later) if later else set())
        else:
            stages[name] = find_stages(side.uses)
    return stages


def find_parameters(model: nn.Module, analysis: ModelAnalysis, starts: Sequence[int], stage: int) -> set[int]:
    """Return the parameters of a whole model that a stage has, by `id`."""
    found = _find_owners(model, map_modules_to_stages(analysis, starts), set(range(len(starts))))
    return {id(parameter) for _, parameter, owners in found if stage in owners}


def _find_shared_parameters(
    model: nn.Module, stages: Mapping[str, set[int]], stage: int, everywhere: set[int]
) -> dict[str, str]:
    """Return the parameters of a stage that other stages also have, with the names under which the model lists them."""
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
    """Yield every name of a parameter, the parameter, and the stages that have it: those of its module in `stages`."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        prefix = name
        while prefix and prefix not in stages:
            prefix = prefix.rpartition(".")[0]
        yield name, parameter, stages[prefix] if prefix else everywhere


def build_stage(
    model: nn.Module, analysis: ModelAnalysis, starts: Sequence[int], stage: int, call: Call = call_with_names
) -> StageModule:
    """Turn a model into one of its stages, in place: the parameters of other stages are freed."""
    stages = map_modules_to_stages(analysis, starts)
    here = _list_segments(starts, len(analysis.layers))[stage]
    # A stage of embeddings only also sends the results that are read behind the first layer.
    end = None if stage == len(starts) - 1 else max(1, here.stop)
    forward = StageForward(analysis, here.start, end, is_first=stage == 0)
    tied = _find_shared_parameters(model, stages, stage, set(range(len(starts))))
    if len(starts) > 1:
        own = {name for name, owners in stages.items() if stage in owners}
        _replace_remote_modules(model, analysis, here, forward, own)
        _adapt_pretrained_models(model)
    built = StageModule(model, stage == 0, end is None, tied, call)
    built.stage_forward = forward
    return built


def _replace_remote_modules(
    model: nn.Module, analysis: ModelAnalysis, here: range, forward: StageForward, own: set[str]
) -> None:
    """Put placeholders where the modules of other stages are, and record the results of the stage's own modules."""

    def get_device() -> torch.device:
        tensors = (*model.parameters(), *model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")

    originals = {name: model.get_submodule(name) for name in (*analysis.layers, *analysis.side_modules)}
    placeholders: dict[str, RemoteModule] = {}

    def replace(kind: type[RemoteModule], name: str, **state: Any) -> None:
        placeholders[name] = kind(originals[name], name, get_device, stage_forward=forward, **state)

    for number, name in enumerate(analysis.layers):
        if number < here.start:
            replace(remote_module.LayerPlaceholder, name, number=number)
        elif number >= here.stop:
            # On a stage of embeddings only, which has no segment, calling the first layer ends the forward.
            replace(RemoteModule if number or here else remote_module.StageExit, name)
        else:
            if number == 0 and not forward.is_first:
                remote_module.replace_input(originals[name], forward)
            ends_stage = forward.end == number + 1
            if ends_stage or analysis.last_reader.get(name, 0) > number + 1:
                remote_module.record_layer(originals[name], name, forward, ends_stage)
    for name, side in analysis.side_modules.items():
        module = originals[name]
        if name in own:
            if not side.in_layer:
                remote_module.record_calls(module, name, forward)
        elif min(side.uses) >= here.stop:  # a later stage runs it
            if has_parameters(module):
                replace(RemoteModule, name)
        elif analysis.last_reader.get(name, 0) >= max(1, here.start):
            replace(remote_module.ReplayedModule, name)
        elif has_parameters(module):
            replace(remote_module.ShapePlaceholder, name, known_shapes={})

    # By identity: a module may occur under several names.
    by_id = {id(originals[name]): placeholder for name, placeholder in placeholders.items()}
    for part in list(model.modules()):
        for key, child in list(part._modules.items()):
            if id(child) in by_id:
                part._modules[key] = by_id[id(child)]
    # Freed last: a submodule of a replaced module may also be a part of this stage.
    kept = {id(part) for part in model.modules()}
    for name in placeholders:
        remote_module.free_parameters(originals[name], kept)


def _adapt_pretrained_models(model: nn.Module) -> None:
    """Let the transformers models inside a stage do without what other stages own, or refuse what they cannot do."""

    def refuse_collected_outputs(module: nn.Module, _: Any, options: dict[str, Any]) -> None:
        config = getattr(module, "config", None)
        for name in _COLLECTED:
            if options.get(name) or (options.get(name) is None and getattr(config, name, False)):
                raise ConfigError(f"{name} = True: {type(module).__name__} is cut into stages; no stage has them all.")

    def refuse_attention(*_: Any, **__: Any) -> None:
        raise ConfigError(
            "it was cut into stages before. Choose its attention (attend_through_masks, for packed documents and spans "
            "that see both ways) before it is cut"
        )

    def read_first(name: str) -> property:
        return property(lambda _: getattr(next(p for p in model.parameters() if p.is_floating_point()), name))

    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        part.register_forward_pre_hook(refuse_collected_outputs, with_kwargs=True)
        # The masks of another attention are verified by running the model, and a stage cannot run.
        part.set_attn_implementation = refuse_attention  # type: ignore[method-assign]
        if keys := getattr(part, "all_tied_weights_keys", None):
            # Tie only parameters that are here: transformers would put a placeholder's weight into a head.
            here = dict(part.named_parameters(remove_duplicate=False))
            part.all_tied_weights_keys = {a: b for a, b in keys.items() if a in here and b in here}
        if not has_parameters(part):  # dtype and device are read from parameters
            remote_module.override_class(part, dtype=read_first("dtype"), device=read_first("device"))


class FunctionLayer(nn.Module):
    """A function among layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(*inputs, **options)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


class SequentialStage(StageModule):
    """One stage of an `nn.Sequential`; `model` is an `nn.Sequential` of its own layers."""

    @classmethod
    def of(cls, model: nn.Module, starts: Sequence[int], stage: int, call: Call | None) -> SequentialStage:
        """Turn an `nn.Sequential` into one of its stages, in place."""
        names = list(model._modules)
        segments = _list_segments(starts, len(names) - 1)
        stages = {name: {s for s, own in enumerate(segments) if n in own} for n, name in enumerate(names)}
        tied = _find_shared_parameters(model, stages, stage, set(range(len(starts))))
        for name in names:
            if stage not in stages[name]:
                del model._modules[name]
        return cls(model, stage == 0, stage == len(starts) - 1, tied, call or call_with_single_input)

    def forward(self, inputs: Mapping[str, Any], received: Payload | None = None) -> Payload | Any:
        """Run the layers of the stage on the batch, or on the output of the previous stage."""
        remote_module.check_received(received, self.first)
        if self.first:
            return self.call(self.model, inputs)
        # Received tensors are leaves that require a gradient: autograd forbids to modify them in place.
        writes = any(getattr(layer, "inplace", False) for layer in self.model.modules())
        return self.model(map_tensors(Tensor.clone, received) if writes else received)


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
