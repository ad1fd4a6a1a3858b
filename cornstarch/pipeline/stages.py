"""Assigns the stages of a model to ranks: which layers and parameters are local. Needs no weights and no groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import distributed
from cornstarch.parallel.distributed import get_device_backend
from cornstarch.parallel.mesh import StageMeshes
from cornstarch.pipeline.split import analyze_model
from cornstarch.pipeline.stage import get_first_stage, map_parameters_to_stages
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL, ModulePlan
from cornstarch.plan.stages import places_of, stage_graph
from cornstarch.schedule.graph import StageGraph


class StageAssignment:
    """The stages of a model, and which of them belong to this rank.

    Building one changes nothing and asks no other rank, so it also works on a model on the meta device. `bind` carries
    the assignment over to the real model, so that the balancing of layers over stages happens once.

    Args:
        model: The whole model, with its `requires_grad` flags set; parameters may be on the meta device.
        layout: Which rank holds what.
        templates: By module name, the layers of each stage. By default stages are balanced by cost.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, templates: Mapping[str, PipelineTemplate | None] | None = None
    ) -> None:
        self.layout = layout
        self.model = model
        _check_taken_apart(model, layout.plan.schedule)
        self.place_of_rank = layout.place(distributed.rank())
        self.templates = {
            name: self._template(name, plan, templates or {}) for name, plan in layout.plan.modules.items()
        }
        self.graph = self._build_graph()
        self.ranks = places_of(layout, self.place_of_rank.dp)
        """The ranks of every place in this rank's replica."""
        self.place = next(number for number, one in enumerate(self.ranks) if distributed.rank() in one)

    def bind(self, model: nn.Module) -> StageAssignment:
        """Return the same assignment for the real model, after it was made on one without weights."""
        bound = copy(self)
        bound.model = model
        for name, template in self.templates.items():
            if template is not None:
                template.check(bound.module(name))
        # Adapters may have been added since, so which stages train is read again.
        bound.graph = bound._build_graph()
        return bound

    def _build_graph(self) -> StageGraph:
        plans = self.layout.plan.modules
        trains = {name: _trains(self.module(name), self.templates[name]) for name in plans}
        for encoder in self.inside().values():
            trains[list(plans)[-1]][0] |= any(parameter.requires_grad for parameter in encoder.parameters())
        return stage_graph(self.layout, trains)

    def module(self, name: str, model: nn.Module | None = None) -> nn.Module:
        """Return a module of the plan, in the model or in a copy of it."""
        model = self.model if model is None else model
        if not isinstance(model, MultimodalModel):
            return model
        if self.is_last(name):
            return model.language_model
        if name not in model.encoders:
            known = ", ".join([*model.encoders, LANGUAGE_MODEL])
            raise ConfigError(f"parallel.modules.{name}: the model has no such part; it has {known}.")
        return model.encoders[name]

    def is_last(self, name: str) -> bool:
        """Whether it is what all encoders meet at, or the whole model."""
        return name == list(self.layout.plan.modules)[-1]

    def inside(self) -> dict[str, ModalEncoderModule]:
        """Return the encoders that run inside the first stage: those that the plan puts there, or does not name."""
        if not isinstance(self.model, MultimodalModel):
            return {}
        plan = self.layout.plan
        inside = {*plan.modules} if plan.ranks in ("first_stage", "shared") else set()
        return {n: one for n, one in self.model.encoders.items() if n in inside or n not in plan.modules}

    def here(self) -> Iterator[tuple[str, nn.Module, ModulePlan]]:
        """Yield the modules of which this process has something: their names in the model, and their plans."""
        plans = self.layout.plan.modules
        for name in self.place_of_rank.modules:
            yield self._name(name), self.module(name), plans[name]
        if self.place_of_rank.stage == 0 and any(map(self.is_last, self.place_of_rank.modules)):
            for name, encoder in self.inside().items():
                if name not in plans:
                    yield name, encoder, list(plans.values())[-1]

    def _name(self, name: str) -> str:
        """Return what a multimodal model calls a module of the plan."""
        return LANGUAGE_MODEL if isinstance(self.model, MultimodalModel) and self.is_last(name) else name

    def own(self) -> list[int]:
        """Return the numbers of this process's stages."""
        return [number for number, node in enumerate(self.graph.nodes) if node.place == self.place]

    def local_parameters(self) -> set[int]:
        """Return the parameters that this process's stages have, by `id`: all others may do without memory here."""
        found: set[int] = set()
        inside = False
        for number in self.own():
            node = self.graph.nodes[number]
            module, template = self.module(node.module), self.templates[node.module]
            if template is None:
                found.update(map(id, module.parameters()))
            else:
                known = analyze_model(module)
                stages = map_parameters_to_stages(module, known, template.starts(module, known))
                found |= {parameter for parameter, having in stages.items() if node.index in having}
            inside |= self.is_last(node.module) and node.index == 0 and bool(self.inside())
        if isinstance(self.model, MultimodalModel):
            encoders = list(self.model.encoders.values())
            parts = {id(p) for part in (*encoders, self.model.language_model) for p in part.parameters()}
            found |= {id(parameter) for parameter in self.model.parameters()} - parts
            if inside:
                found.update(id(parameter) for encoder in encoders for parameter in encoder.parameters())
        return found

    def _template(
        self, name: str, plan: ModulePlan, given: Mapping[str, PipelineTemplate | None]
    ) -> PipelineTemplate | None:
        stages = plan.stages * plan.virtual_stages
        template = given.get(name)
        if template is None:
            if stages == 1:
                return None
            if plan.layers is not None:
                return _cut(name, self.module(name), plan.layers)
            encoders = self.model.encoders.values() if isinstance(self.model, MultimodalModel) else ()
            upstream = self.is_last(name) and any(p.requires_grad for one in encoders for p in one.parameters())
            return PipelineTemplate.split(self.module(name), stages, trained_upstream=upstream)
        template.check(self.module(name))
        if template.num_stages != stages:
            raise ConfigError(f"{name}: the template has {template.num_stages} stages, the plan {stages}.")
        return template


class StageGroups:
    """The process groups of a pipeline as one of its processes sees them. All processes must make them.

    Groups get their names from how many a process has: first the one that all processes of a replica make.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        ranks = places_of(layout, layout.place(distributed.rank()).dp)
        replica = sorted(int(rank) for one in ranks for rank in one.ravel())
        backend = "nccl" if device.type == "cuda" and get_device_backend(None, "cuda") != "gloo" else "gloo"
        self.replica = dist.new_group(replica, backend=backend, use_local_synchronization=True)
        """All processes of this replica, for what goes from stage to stage."""
        self.meshes = StageMeshes(layout, device.type)


def _check_taken_apart(model: nn.Module, schedule: str) -> None:
    """Refuse to take the backward pass of a model apart where torch would lose gradients."""
    config = getattr(unwrap(model.language_model if isinstance(model, MultimodalModel) else model), "config", None)
    if schedule in ("zero_bubble", "auto") and getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"parallel.schedule = {schedule}: the layers of an encoder-decoder share a bias, of which torch loses "
            "gradients when the backward pass is taken apart. Use 1f1b or gpipe."
        )


def release_remote_parameters(model: nn.Module, held: set[int]) -> None:
    """Move all parameters except the local ones (given by `id`) to the meta device, in place.

    Ties and `requires_grad` flags survive. Buffers are small and stay.
    """
    bare: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in held or parameter.is_meta:
                continue
            if id(parameter) not in bare:
                bare[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            module._parameters[name] = bare[id(parameter)]


def _cut(name: str, module: nn.Module, layers: Sequence[int]) -> PipelineTemplate:
    try:
        return PipelineTemplate.of_layers(module, layers)
    except ConfigError as error:
        raise ConfigError(f"parallel.modules.{name}.{error}") from None


def _trains(module: nn.Module, template: PipelineTemplate | None) -> list[bool]:
    """Return whether each stage of a module has something that is trained."""
    if template is None:
        return [any(parameter.requires_grad for parameter in module.parameters())]
    known = analyze_model(module)
    starts = template.starts(module, known)
    found = [False] * len(starts)
    for name in known.modules:
        stage = get_first_stage(name, known, starts)
        found[stage] |= any(parameter.requires_grad for parameter in module.get_submodule(name).parameters())
    return found
