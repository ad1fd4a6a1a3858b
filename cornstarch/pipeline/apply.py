"""One process of a model whose stages stand on different ranks: its own stages, and the runtime that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cornstarch.attention.verify import evaluating
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import processes
from cornstarch.parallel.apply import must_attend_through_masks
from cornstarch.parallel.averaging import average_gradients
from cornstarch.parallel.context import expect_layers, tokens_are_cut, whole_rows
from cornstarch.parallel.data import apply_data_parallel, reshard
from cornstarch.pipeline.copies import give_up_parameters, list_parameters, shared_copy
from cornstarch.pipeline.generation import generate
from cornstarch.pipeline.holes import Elsewhere
from cornstarch.pipeline.naming import remember_names
from cornstarch.pipeline.programs import (
    Call,
    EncoderProgram,
    Inputs,
    LanguageProgram,
    ModelProgram,
    StageProgram,
    encoder_inputs,
    moved,
)
from cornstarch.pipeline.runtime import Event, Finish, Runtime
from cornstarch.pipeline.split import StagePart, cut, survey
from cornstarch.pipeline.staging import StageGroups, Staging
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.pipeline.ties import find_ties, gradients_added_up
from cornstarch.pipeline.transfer import Edge, Post, Route
from cornstarch.pipeline.unready import attend, spread_in_part
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.plan.stages import places_of
from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.policies import make_schedule


class Pipeline:
    """This process's part of a model that is cut into stages.

    All processes must make it, with the same weights; the model is changed in place: what other stages own is given up.
    Make the optimizer afterwards. Losses are scaled as everywhere: averaged over replicas and parts of tokens.

    Args:
        model: The whole model. What other stages own may be without memory, on the meta device (`leave_elsewhere`).
        layout: Who holds what.
        device: Where this process computes.
        microbatches: Of a step; a step that has fewer may need another schedule.
        templates: By module, which modules each stage has. Default: stages that weigh the same.
        computing: Makes the context in which forward passes run.
        packed: Whether rows may have several documents, which do not see one another.
        groups: Those of the layout, if there are some already: modules must be cut over the same ones.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        microbatches: int = 1,
        templates: Mapping[str, PipelineTemplate | None] | None = None,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        packed: bool = False,
        groups: StageGroups | None = None,
    ) -> None:
        self.model, self.layout, self.device, self._computing = model, layout, device, computing
        self._staging = staging = Staging(model, layout, templates)
        self.place_of_rank, self.place = staging.place_of_rank, staging.place
        self.templates, self.graph = staging.templates, staging.graph
        make_schedule(self.graph, microbatches, layout.plan.schedule)  # if they do not fit, this is the time to say so
        groups = groups or StageGroups(layout, device)
        self.post, self.meshes = Post(groups.replica, device), groups.meshes
        self._packed = packed
        self._spread_inside()
        self._choose_attention(model)  # which runs it: adapters must be cut as the matrices are that they belong to
        self.programs = self._make_programs()
        self._check_there()
        self._shard()
        tied = self._tied_names()
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        remember_names(model, {own[id(parameter)]: name for name, parameter in tied.items()})
        self._ties = find_ties(tied, layout)
        self.post.others += [tie.group for tie in self._ties]
        self.post.others += [self.data_group] if self.meshes.data.size() > 1 else []
        self._edges = self._make_edges(staging.ranks)
        self.microbatches = microbatches
        self._runtimes: dict[int, Runtime] = {}
        if isinstance(model, MultimodalModel):
            model.generate_by(partial(generate, self))
        self.events: list[Event] = []
        """What this process did in the last step, and when."""

    # -------------------------------------------------------------------------------------------- making it

    def _choose_attention(self, model: nn.Module) -> None:
        """Let the language model attend through masks, if it will have to: cut into stages it cannot be changed."""
        is_here = any(map(self._staging.is_last, self.place_of_rank.modules))
        if is_here and isinstance(model, MultimodalModel) and must_attend_through_masks(model, self._packed):
            attend(model.language_model, self.device)

    def _spread_inside(self) -> None:
        """Cut matrices and tokens of this process's modules, while the model is whole: that is when it is verified."""
        for _, module, plan in self._staging.here():
            spread_in_part(module, plan, self.meshes, self.device)

    def _check_there(self) -> None:
        """Make sure that nothing was given up that a stage here has."""
        lost = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        if lost:
            raise RuntimeError(f"{lost[0]} belongs to this process's stages, but has no weights.")

    def _make_programs(self) -> dict[int, StageProgram]:
        own = self._staging.own()
        modules = [self.graph.nodes[number].module for number in own]
        if len(set(modules)) == len(modules):
            programs = {number: self._program(number, self.model) for number in own}
            self._give_up_modules(self.model, set(modules), programs.values())
            return programs
        # Several stages of one module: each has a copy of the model, of which only the parameters are the same.
        programs = {}
        for number, name in zip(own, modules, strict=True):
            copy = shared_copy(self.model, self.meshes)
            self._choose_attention(copy)
            programs[number] = self._program(number, copy)
            self._give_up_modules(copy, {name}, [programs[number]])
        give_up_parameters(self.model, programs.values())
        return programs

    def _program(self, number: int, model: nn.Module) -> StageProgram:
        node = self.graph.nodes[number]
        template, module = self.templates[node.module], self._staging.module(node.module, model)
        program: StageProgram | None = None

        def call(model: nn.Module, inputs: Inputs) -> Any:
            assert program is not None
            return program.run(model, inputs)

        part: StagePart | None = None if template is None else cut(module, template, node.index, call=call)
        if part is not None and tokens_are_cut(module):
            expect_layers(module, _own_layers(module, template, node.index))
        if not isinstance(model, MultimodalModel):
            program = ModelProgram(model, part or _whole_part(model, call))
        elif not self._staging.is_last(node.module):
            program = EncoderProgram(model, node.module, part)
        else:
            sources = {s: self.graph.nodes[s].module for s in self.graph.predecessors(number)}
            runs_encoders = node.index == 0 and bool(self._staging.inside())
            program = LanguageProgram(model, part, sources, runs_encoders=runs_encoders)
        program.computing = self._computing
        return program

    def _give_up_modules(self, model: nn.Module, own: set[str], programs: Iterable[StageProgram]) -> None:
        """Let nothing be left of the modules whose stages are all elsewhere."""
        if not isinstance(model, MultimodalModel):
            return
        runs_encoders = any(isinstance(one, LanguageProgram) and one.runs_encoders for one in programs)
        for name, encoder in model.encoders.items():
            if name not in own and not runs_encoders:
                setattr(model, f"{name}_encoder", Elsewhere(encoder, f"{name}_encoder", lambda: self.device))
        if not any(map(self._staging.is_last, own)):
            model.language_model = Elsewhere(model.language_model, LANGUAGE_MODEL, lambda: self.device)

    # -------------------------------------------------------------------------------------------- what stages share

    def _tied_names(self) -> dict[str, nn.Parameter]:
        """Return this process's parameters that several stages have, by the name that the whole model has for them."""
        found: dict[str, nn.Parameter] = {}
        for number, program in self.programs.items():
            prefix, part = self._prefix(self.graph.nodes[number].module), program.part
            if isinstance(part, StagePart):
                found |= {f"{prefix}{name}": part.model.get_parameter(own) for own, name in part.tied.items()}
        return found

    def _prefix(self, module: str) -> str:
        """Return what stands before the names of a module's parameters in the whole model."""
        if not isinstance(self.model, MultimodalModel):
            return ""
        return "language_model." if self._staging.is_last(module) else f"{module}_encoder."

    def _shard(self) -> None:
        """Shard the parameters of this process's stages over those that hold the same."""
        plan = self.layout.plan.data
        if plan.kind in ("ddp", "zero1") or self.meshes.data.size() == 1:
            return
        for program in self.programs.values():
            apply_data_parallel(program, self.meshes.data, plan)
        list_parameters(self.model, self.programs.values())

    def _make_edges(self, ranks: Sequence[Any]) -> dict[tuple[int, int], Edge]:
        edges: dict[tuple[int, int], Edge] = {}
        for number, (source, target) in enumerate(self.graph.edges):
            a, b = self.graph.nodes[source], self.graph.nodes[target]
            if a.place != b.place and self.place in (a.place, b.place):
                route = Route.between(ranks[a.place], ranks[b.place], a.module == b.module)
                edges[source, target] = Edge.at(processes.rank(), route, self.post, number, str(a))
        return edges

    # -------------------------------------------------------------------------------------------- running it

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is in this process."""
        return self.graph.sink in self.programs

    def set_call(self, call: Call | None) -> None:
        """Say what the model is run for: a function of model and batch, that returns a loss, say."""
        for program in self.programs.values():
            program.call = call

    @contextmanager
    def called_for(self, call: Call) -> Iterator[None]:
        """Run a block in which the model is run for something else."""
        before = [(program, program.call) for program in self.programs.values()]
        self.set_call(call)
        try:
            yield
        finally:
            for program, one in before:
                program.call = one

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run a block with all stages in eval mode, and whole sequences in every process."""
        with ExitStack() as stack:
            for program in self.programs.values():
                stack.callback(reshard, program)
                stack.enter_context(evaluating(program))
                stack.enter_context(whole_rows(program))
            yield

    def moved(self, inputs: Inputs) -> dict[str, Any]:
        """Return inputs with their tensors on this process's device."""
        return moved(inputs, self.device)

    def train(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        """Do forward and backward of all microbatches, and bring gradients together.

        Args:
            microbatches: The same in all processes of a replica.
            finish: On the last stage: takes the number of a microbatch and its result, returns the scaled loss.
        """
        runtime = self._runtime(len(microbatches))
        with ExitStack() as meeting:
            meeting.enter_context(self.gradients_meet())
            runtime.train(microbatches, finish)
            # What other replicas, or other stages, fail with must be heard here, too, instead of waiting for them.
            runtime.guarded(meeting.pop_all().close)
        self.events = runtime.events

    @contextmanager
    def gradients_meet(self) -> Iterator[None]:
        """Run a block that computes gradients, and bring them together: over replicas, and over stages that share some.

        What is sharded is brought together with the last backward pass, by FSDP.
        """
        with gradients_added_up(self._ties):
            yield
            if self.layout.plan.data.kind in ("ddp", "zero1") and self.meshes.data.size() > 1:
                average_gradients(self.own_parameters(), self.data_group, self.layout.plan.data.bucket_mb)

    def forward(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        """Do forward alone."""
        self._runtime(max(1, len(microbatches))).forward(microbatches, finish)

    def _runtime(self, microbatches: int) -> Runtime:
        if microbatches not in self._runtimes:
            schedule = self._schedule(microbatches)
            self._runtimes[microbatches] = Runtime(
                schedule,
                self.place,
                self.programs,
                self._edges,
                self.post,
                self._takes_part,
                self._before_backward,
                self._by_value(),
            )
        return self._runtimes[microbatches]

    def _schedule(self, microbatches: int) -> Schedule:
        try:
            return make_schedule(self.graph, microbatches, self.layout.plan.schedule)
        except ConfigError:
            if microbatches == self.microbatches:
                raise
            return make_schedule(self.graph, microbatches, "1f1b")  # the last step of an epoch may have fewer

    def _by_value(self) -> tuple[str, ...]:
        """Return the inputs that decide how many tokens a rank has, where tokens are dealt out by their work."""
        plans = self.layout.plan.modules.values()
        if not any(plan.cp > 1 and plan.cp_distribution in ("auto", "makespan_min") for plan in plans):
            return ()
        is_causal = not isinstance(self.model, MultimodalModel) or all(
            encoder.attention == "causal" for encoder in self.model.encoders.values()
        )
        return ("attention_mask", "documents") if is_causal else ("attention_mask", "documents", "input_ids")

    def _takes_part(self, stage: int, inputs: Inputs) -> bool:
        name = self.graph.nodes[stage].module
        if not isinstance(self.model, MultimodalModel) or self._staging.is_last(name):
            return True
        return self.model.stand_in(name, self.device) is not None or name in encoder_inputs(self.model, inputs)

    def _before_backward(self, stage: int, is_last: bool) -> None:
        program = self.programs[stage]
        if isinstance(program, FSDPModule):
            program.set_is_last_backward(is_last)
            program.set_requires_gradient_sync(is_last)

    # -------------------------------------------------------------------------------------------- what is here

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The processes that hold the same parameters."""
        return self.meshes.data.get_group()

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this process's stages."""
        return list(self.model.parameters())

    def copies(self) -> list[nn.Parameter]:
        """Return the parameters that an earlier stage has, too: they count there."""
        return [tie.parameter for tie in self._ties if not tie.is_first]

    @property
    def holders(self) -> int:
        """So many processes work on the same stages, in all replicas."""
        return self.meshes.data.size() * (1 if self.meshes.tensor is None else self.meshes.tensor.size())

    @property
    def rank_with_loss(self) -> int:
        """The first rank of the last stage, in this process's replica."""
        return int(places_of(self.layout, self.place_of_rank.dp)[self.graph.nodes[self.graph.sink].place].flat[0])

    def close(self) -> None:
        """Cut the lines to the other stages."""
        self.post.close()


def _own_layers(module: nn.Module, template: PipelineTemplate | None, stage: int) -> int:
    """Return how many layers a stage has."""
    assert template is not None
    known = survey(module)
    starts = [*template.starts(module, known), len(known.layers)]
    return max(0, min(starts[stage + 1], len(known.layers)) - starts[stage])


def _whole_part(model: nn.Module, call: Callable[[nn.Module, Inputs], Any]) -> Any:
    """Return what runs a model that is all on one stage."""
    return lambda inputs, received: call(model, inputs)


__all__ = ["Pipeline"]
