"""Assigns the stages of a model to ranks: which layers and parameters are local, and which of them are tied.

The assignment needs no weights and no groups. Tied weights, such as tied embeddings, are parameters that several stages
have; each stage has a copy. The gradients of all copies are summed after the last backward of a step, and not in
between: each stage contributes only its own use of the weight, and all copies must get the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import distributed
from cornstarch.parallel.mesh import StageMeshes
from cornstarch.pipeline.remote_module import replace_parameters
from cornstarch.pipeline.split import analyze_model
from cornstarch.pipeline.stage import find_parameters, map_modules_to_stages
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL, ModulePlan
from cornstarch.plan.stage_graph import places_of, stage_graph
from cornstarch.schedule.graph import StageGraph

# The attribute of a model with the names of tied parameters in the whole model, by local name, if it has any: a tied
# head is the table of embeddings there.
ORIGINAL_NAMES = "_cornstarch_whole_names"


class StageAssignment:
    """The stages of a model, and which of them belong to this rank.

    Building one changes nothing and asks no other rank, so it also works on a model on the meta device; `bind` carries
    it over to the real model. The `requires_grad` flags are set. Without a template, stages are balanced by cost.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, templates: Mapping[str, PipelineTemplate | None] | None = None
    ) -> None:
        self.layout, self.model = layout, model
        config = getattr(unwrap(model.language_model if isinstance(model, MultimodalModel) else model), "config", None)
        schedule = layout.plan.schedule
        if schedule in ("zero_bubble", "auto") and getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"parallel.schedule = {schedule}: the layers of an encoder-decoder share a bias, of which torch loses "
                "gradients when the backward pass is taken apart. Use 1f1b or gpipe."
            )
        self.place_of_rank = layout.place(distributed.rank())
        given, plans = templates or {}, layout.plan.modules.items()
        self.templates = {name: self._template(name, plan, given.get(name)) for name, plan in plans}
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
        """Whether it is the module at which all encoders meet, or the whole model."""
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
            is_language_model = isinstance(self.model, MultimodalModel) and self.is_last(name)
            yield LANGUAGE_MODEL if is_language_model else name, self.module(name), plans[name]
        if self.place_of_rank.stage == 0 and any(map(self.is_last, self.place_of_rank.modules)):
            for name, encoder in self.inside().items():
                if name not in plans:
                    yield name, encoder, list(plans.values())[-1]

    def local_parameters(self) -> set[int]:
        """Return the parameters that this process's stages have, by `id`: all others may do without memory here."""
        found: set[int] = set()
        inside = False
        for node in (self.graph.nodes[number] for number in self.graph.at(self.place)):
            module, template = self.module(node.module), self.templates[node.module]
            if template is None:
                found.update(map(id, module.parameters()))
            else:
                known = analyze_model(module)
                found |= find_parameters(module, known, template.starts(module, known), node.index)
            inside |= self.is_last(node.module) and node.index == 0 and bool(self.inside())
        if isinstance(self.model, MultimodalModel):
            encoders = list(self.model.encoders.values())
            parts = {id(p) for part in (*encoders, self.model.language_model) for p in part.parameters()}
            found |= {id(parameter) for parameter in self.model.parameters()} - parts
            if inside:
                found.update(id(parameter) for encoder in encoders for parameter in encoder.parameters())
        return found

    def _template(self, name: str, plan: ModulePlan, template: PipelineTemplate | None) -> PipelineTemplate | None:
        stages = plan.stages * plan.virtual_stages
        if template is not None:
            template.check(self.module(name))
            if template.num_stages != stages:
                raise ConfigError(f"{name}: the template has {template.num_stages} stages, the plan {stages}.")
            return template
        if stages == 1:
            return None
        if plan.layers is not None:
            try:
                return PipelineTemplate.of_layers(self.module(name), plan.layers)
            except ConfigError as error:
                raise ConfigError(f"parallel.modules.{name}.{error}") from None
        encoders = self.model.encoders.values() if isinstance(self.model, MultimodalModel) else ()
        upstream = self.is_last(name) and any(p.requires_grad for one in encoders for p in one.parameters())
        return PipelineTemplate.split(self.module(name), stages, trained_upstream=upstream)


class StageGroups:
    """The process groups of a pipeline as one of its processes sees them. All processes must make them.

    Groups get their names from how many a process has: first the one that all processes of a replica make.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        ranks = places_of(layout, layout.place(distributed.rank()).dp)
        replica = sorted(int(rank) for one in ranks for rank in one.ravel())
        backend = "nccl" if device.type == "cuda" and distributed.get_device_backend(None, "cuda") != "gloo" else "gloo"
        self.replica = dist.new_group(replica, backend=backend, use_local_synchronization=True)
        """All processes of this replica, for what goes from stage to stage."""
        self.meshes = StageMeshes(layout, device.type)


def release_remote_parameters(model: nn.Module, held: set[int]) -> None:
    """Move all parameters except those in `held` (by `id`) to the meta device, with their ties and `requires_grad`."""
    released = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in model.parameters()
        if id(parameter) not in held and not parameter.is_meta
    }
    replace_parameters(model.modules(), lambda parameter: released.get(id(parameter), parameter))


def _trains(module: nn.Module, template: PipelineTemplate | None) -> list[bool]:
    """Return whether each stage of a module has something that is trained."""
    if template is None:
        return [any(parameter.requires_grad for parameter in module.parameters())]
    known = analyze_model(module)
    starts = template.starts(module, known)
    found = [False] * len(starts)
    for name, owners in map_modules_to_stages(known, starts).items():
        is_unused = name in known.side_modules and not known.side_modules[name].uses
        first = len(starts) - 1 if is_unused else min(owners)
        found[first] |= any(parameter.requires_grad for parameter in module.get_submodule(name).parameters())
    return found


@dataclass(frozen=True)
class TiedParameter:
    """A parameter of this process that other stages also have."""

    parameter: nn.Parameter
    group: dist.ProcessGroup  # the processes that have the same shard of it
    is_first: bool  # whether this process counts it, for norms and sizes; the other processes of the group do not


def find_tied_parameters(named: Mapping[str, nn.Parameter], layout: Layout) -> list[TiedParameter]:
    """Find the processes that share each parameter; all processes must call it together."""

    def get_coordinates(rank: int) -> tuple[object, ...]:
        place = layout.place(rank)
        return layout.span(place.modules[-1]), place.dp, place.cp, place.tp  # all but the stage

    found = []
    gathered = distributed.all_gather_json(sorted(named))
    here = get_coordinates(distributed.rank())
    # The same order of names everywhere: creating a group is a collective operation of its members.
    for name in sorted({name for names in gathered for name in names}):
        ranks = [rank for rank, names in enumerate(gathered) if name in names and get_coordinates(rank) == here]
        if name in named and len(ranks) > 1:
            group = dist.new_group(ranks, use_local_synchronization=True)
            found.append(TiedParameter(named[name], group, ranks[0] == distributed.rank()))
    return found


@contextmanager
def sum_tied_gradients(ties: Sequence[TiedParameter]) -> Iterator[None]:
    """Run a block that computes gradients, and sum those of tied parameters over the stages that have them."""
    # Gradients from before the block were summed already; they are set aside, so that they are not summed again.
    trained = [tie for tie in ties if tie.parameter.requires_grad]
    earlier = [tie.parameter.grad for tie in trained]
    for tie in trained:
        tie.parameter.grad = None
    yield
    for tie, before in zip(trained, earlier, strict=True):
        parameter = tie.parameter
        if parameter.grad is None:  # this stage did not use it, but all processes of the group must take part
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(distributed.to_local_tensor(parameter.grad), group=tie.group)
        if before is not None:
            parameter.grad = parameter.grad + before
