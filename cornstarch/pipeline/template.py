"""Which modules of a model each pipeline stage has, and where to split so that all stages cost the same."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.errors import ConfigError
from cornstarch.pipeline.model_analysis import ModelAnalysis, WrappedModel, count_parameters, find_wrapped_model
from cornstarch.pipeline.split import analyze_model, check_embedding_stage
from cornstarch.plan.stage_graph import best_cut

BALANCE_METHODS = ("parameters", "flops", "time", "uniform")
_TIMED_PASSES = 3  # the fastest counts


@dataclass(repr=False)
class PipelineTemplate:
    """The modules of each stage of a model, by name.

        modules = PipelineTemplate.get_modules(model)
        PipelineTemplate(PipelineTemplate.get_model_name(model), [modules[:17], modules[17:]])

    Args:
        model_name: The class of the model, as `get_model_name` returns it.
        modules_per_stage: The names of the modules of each stage; together they are those of `get_modules`, in order.
    """

    model_name: str
    modules_per_stage: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        if not self.modules_per_stage or isinstance(self.modules_per_stage, str):
            raise ConfigError("A pipeline template has no stages: give the names of the modules of each.")
        for number, names in enumerate(self.modules_per_stage):
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ConfigError(f"modules_per_stage[{number}] = {names!r}: expected a list of names of modules.")
            if not names:
                raise ConfigError(f"modules_per_stage[{number}] is empty: every stage needs a module.")
        self.modules_per_stage = [list(names) for names in self.modules_per_stage]

    @property
    def num_stages(self) -> int:
        return len(self.modules_per_stage)

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.modules_per_stage))

    def __repr__(self) -> str:
        return f"PipelineTemplate({self.model_name}, {self.num_stages} stages)"

    def __hash__(self) -> int:
        return hash((self.model_name, tuple(map(tuple, self.modules_per_stage))))

    @staticmethod
    def get_model_name(model: nn.Module) -> str:
        """Return the qualified class name of a model; of a `ModalEncoderModule`, that of its encoder."""
        return find_wrapped_model(model).class_name

    @staticmethod
    def get_modules(model: nn.Module, survey: ModelAnalysis | None = None) -> list[str]:
        """Return the names of a model's modules that have parameters, in the order of its forward pass.

        Those of a `ModalEncoderModule` begin with `module.`, and its projector comes last. The prefixes of PEFT are
        left out, so that a template is the same with adapters and without. For a module of your own, give its `survey`.
        """
        return find_wrapped_model(model).list_template_names(survey or analyze_model(model))

    @staticmethod
    def find_pipeline_template(
        pipeline_templates: Sequence[PipelineTemplate], num_stages: int
    ) -> PipelineTemplate | None:
        """Return the first template with a number of stages, or None."""
        return next((template for template in pipeline_templates if template.num_stages == num_stages), None)

    @classmethod
    def split(
        cls,
        model: nn.Module,
        num_stages: int,
        by: str = "parameters",
        *,
        inputs: Mapping[str, Any] | None = None,
        trained_upstream: bool = False,
        survey: ModelAnalysis | None = None,
    ) -> PipelineTemplate:
        """Split a model into stages whose costs differ as little as possible.

        A frozen module costs a forward pass, and a backward pass if something before it is trained; a trained module
        costs three times its forward pass. Freeze the model first.

        Args:
            model: The model.
            num_stages: The number of stages.
            by: "parameters": by the number of parameters; "flops": by the multiplications for one token; "time": by the
                time of a forward pass of `inputs`; "uniform": by the number of layers.
            inputs: The batch for "time".
            trained_upstream: Whether a module is trained whose output goes into this model, such as a projector.
            survey: The analysis of the model, if it is known already.
        """
        analysis = survey or analyze_model(model)
        costs = _compute_segment_costs(model, analysis, by, inputs, trained_upstream)
        name = type(find_wrapped_model(model).inner).__name__
        return cls._from_starts(model, analysis, balance_stages(costs, analysis.boundaries, num_stages, name))

    @classmethod
    def of_layers(cls, model: nn.Module, layers: Sequence[int]) -> PipelineTemplate:
        """Split a model into stages with given numbers of layers.

        Modules before the first layer belong to it. Modules behind the last layer, the head of a language model or a
        projector, count as a layer if a stage may begin with them. Layers that cannot be separated count as one.
        """
        analysis, name = analyze_model(model), type(find_wrapped_model(model).inner).__name__
        places = [0, *analysis.boundaries]
        if sum(layers) != len(places) or min(layers) < 1:
            raise ConfigError(
                f"layers = {', '.join(map(str, layers))}: they add up to {sum(layers)}; {name} has {len(places)}, what "
                "follows the last one included. Every stage has one at least."
            )
        starts = [places[sum(layers[:stage])] for stage in range(len(layers))]
        return cls._from_starts(model, analysis, starts)

    @classmethod
    def _from_starts(cls, model: nn.Module, analysis: ModelAnalysis, starts: Sequence[int]) -> PipelineTemplate:
        listed = find_wrapped_model(model).list_template_names(analysis)
        segments = [analysis.segment_of(name) for name in analysis.modules]
        stages = [
            [name for name, segment in zip(listed, segments, strict=True) if start <= segment < end]
            for start, end in pairwise([*starts, len(analysis.layers) + 1])
        ]
        return cls(cls.get_model_name(model), stages)

    def check(self, model: nn.Module) -> None:
        """Raise `ConfigError` unless this template fits the model, and the model can be split this way."""
        self.starts(model, analyze_model(model))

    def starts(self, model: nn.Module, known: ModelAnalysis) -> list[int]:
        """Return the segment with which each stage begins; see `model_analysis`."""
        wrapped = find_wrapped_model(model)
        if self.model_name != (name := wrapped.class_name):
            raise ConfigError(f"{self!r} is not for {name}. Make one of its modules: PipelineTemplate.get_modules.")
        # Modules without parameters (dropout, rotary embeddings) are on every stage, wherever they are listed.
        free = {wrapped.get_template_name(n) for n, one in known.side_modules.items() if not one.has_parameters}
        stages = [[name for name in names if name not in free] for names in self.modules_per_stage]
        self._check_names(stages, wrapped.list_template_names(known))
        return self._find_starts(stages, known, wrapped)

    def _check_names(self, stages: Sequence[Sequence[str]], expected: Sequence[str]) -> None:
        places = [(name, stage) for stage, names in enumerate(stages) for name in names]
        seen: dict[str, int] = {}
        for name, stage in places:
            if name not in expected:
                raise ConfigError(
                    f"{self!r}: stage {stage} has {name}, which is none of the model's modules ({_shorten(expected)})."
                )
            if name in seen:
                raise ConfigError(f"{self!r}: {name} is there twice, in stage {seen[name]} and in stage {stage}.")
            seen[name] = stage
        if missing := [name for name in expected if name not in seen]:
            before = expected[: expected.index(missing[0])]
            where = f"behind {before[-1]} in stage {seen[before[-1]]}" if before else "at the beginning of stage 0"
            raise ConfigError(f"{self!r}: {_shorten(missing)} missing; {missing[0]} belongs {where}.")
        for (name, stage), right in zip(places, expected, strict=True):
            if name != right:
                raise ConfigError(
                    f"{self!r}: stage {stage} has {name} where {right} belongs; modules are listed in the order of the "
                    "forward pass, as by PipelineTemplate.get_modules."
                )

    def _find_starts(self, stages: Sequence[Sequence[str]], known: ModelAnalysis, wrapped: WrappedModel) -> list[int]:
        segments = {wrapped.get_template_name(name): known.segment_of(name) for name in known.modules}
        layers = [wrapped.get_template_name(name) for name in known.layers]
        if not all(stages):
            raise ConfigError(f"{self!r}: stage {[*map(bool, stages)].index(False)} has no module with parameters.")
        starts = [0]
        for number, (before, names) in enumerate(pairwise(stages), 1):
            last, first = before[-1], names[0]
            start = segments[first]
            if number == 1 and first == layers[0]:  # the first stage has embeddings only
                check_embedding_stage(wrapped.inner)
                starts.append(0)
                continue
            if segments[last] == start or last not in layers:
                raise ConfigError(
                    f"{self!r}: stage {number} begins with {first}, but stages end behind a layer, and {last} is none. "
                    f"Let it begin behind {layers[min(start, len(layers) - 1)]}, for example."
                )
            if start in known.barred:
                raise ConfigError(f"{self!r}: cannot be cut before {first}: {known.barred[start]}.")
            starts.append(start)
        return starts


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _compute_segment_costs(
    model: nn.Module, analysis: ModelAnalysis, by: str, inputs: Mapping[str, Any] | None, trained_upstream: bool
) -> list[float]:
    """Return the cost of each segment, forward and backward; `requires_grad` flags say what is trained."""
    if by not in BALANCE_METHODS:
        raise ConfigError(f"by = {by!r}: expected one of {', '.join(BALANCE_METHODS)}.")
    if by == "time" and inputs is None:
        raise ConfigError('by = "time": say what a forward pass is timed on (inputs).')
    names = analysis.modules
    if by == "uniform":
        forward = {name: float(name in analysis.layers) for name in names}
    elif by == "time":
        forward = _time_modules(model, names, inputs or {})
    else:
        count = _count_flops if by == "flops" else count_parameters
        forward = {name: float(count(model.get_submodule(name))) for name in names}
    total = [0.0] * (len(analysis.layers) + 1)
    for name in names:
        module, cost = model.get_submodule(name), forward[name]
        parameters = count_parameters(module)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad) / parameters if parameters else 0.0
        input_gradient = cost if trained_upstream or trained else 0.0  # gradients pass through it, or begin inside it
        total[analysis.segment_of(name)] += cost + input_gradient + trained * cost
        trained_upstream = trained_upstream or trained > 0
    return total


def _count_flops(module: nn.Module) -> float:
    """Return the floating-point operations for one token: two for each parameter that is multiplied."""
    # Embeddings are looked up, not multiplied; of experts that are stacked in one tensor, only the chosen ones are
    # read.
    total = 0.0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        chosen = getattr(getattr(part, "config", None), "num_experts_per_tok", None) or getattr(part, "top_k", None)
        for parameter in part.parameters(recurse=False):
            experts = parameter.shape[0] if parameter.dim() == 3 else 0
            fraction = chosen / experts if experts and isinstance(chosen, int) and chosen <= experts else 1.0
            total += 2.0 * parameter.numel() * fraction
    return total


def _time_modules(model: nn.Module, names: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that each module takes in the fastest of a few forward passes."""
    best = dict.fromkeys(names, float("inf"))
    started: dict[str, float] = {}
    spent: dict[str, float] = {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise ConfigError('by = "time": the model is on the meta device and cannot be run. Use by="flops".')

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def enter(name: str, *_: Any) -> None:
        started[name] = now()

    def leave(name: str, *_: Any) -> None:
        spent[name] = spent.get(name, 0.0) + now() - started[name]

    with ExitStack() as stack, use_eval_mode(model), torch.no_grad():
        for name in names:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(module.register_forward_hook(partial(leave, name)).remove)
        for _ in range(_TIMED_PASSES):
            spent.clear()
            model(inputs["input"]) if isinstance(model, nn.Sequential) else model(**inputs)
            for name in names:
                best[name] = min(best[name], spent.get(name, 0.0))
    return best


def balance_stages(costs: Sequence[float], boundaries: Sequence[int], stages: int, name: str) -> list[int]:
    """Return the first segment of each stage so that the most expensive stage is as cheap as possible.

    A stage may begin with the first segment or one of `boundaries`; `name` is for error messages.
    """
    places = [0, *boundaries]
    if not isinstance(stages, int) or stages < 1:
        raise ConfigError(f"{stages!r} stages: expected a number from 1.")
    if stages > len(places):
        raise ConfigError(f"{name} can be cut into at most {len(places)} stages; {stages} were asked for.")
    pieces = [sum(costs[start:end]) for start, end in pairwise([*places, len(costs)])]
    return [places[first] for first in best_cut(pieces, stages)]
