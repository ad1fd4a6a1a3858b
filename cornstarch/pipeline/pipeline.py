"""One process of a model whose stages stand on different ranks: its own stages, and the runtime that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import distributed
from cornstarch.parallel.context import has_sharded_tokens, set_expected_layers, use_whole_rows
from cornstarch.parallel.data import apply_data_parallel, reshard
from cornstarch.parallel.gradients import average_gradients
from cornstarch.pipeline.greedy_decoding import generate
from cornstarch.pipeline.p2p import P2PChannel, Route, StageEdge
from cornstarch.pipeline.remote_module import RemoteModule
from cornstarch.pipeline.runtime import ActionEvent, Finish, Runtime
from cornstarch.pipeline.split import cut, survey
from cornstarch.pipeline.stage import StageModule
from cornstarch.pipeline.stage_program import (
    Call,
    EncoderProgram,
    Inputs,
    LanguageProgram,
    ModelProgram,
    StageProgram,
    copy_with_shared_parameters,
    drop_remote_parameters,
    move_to_device,
    register_stage_parameters,
    split_encoder_inputs,
)
from cornstarch.pipeline.stages import StageAssignment, StageGroups
from cornstarch.pipeline.template import PipelineTemplate
from cornstarch.pipeline.tied_weights import TiedParameter, find_tied_parameters, set_original_names, sum_tied_gradients
from cornstarch.plan.plan import LANGUAGE_MODEL, DataPlan
from cornstarch.plan.stages import places_of
from cornstarch.schedule.actions import Schedule
from cornstarch.schedule.policies import make_schedule


class Pipeline:
    """This rank's stages of a model, and the runtime that executes their schedule.

    Built in three steps by `engine.parallelize`, because data parallelism comes between the last two: the constructor
    assigns stages and opens the process groups, `split` cuts the model, `connect` links the stages.

    Args:
        stages: Which stages belong to which rank.
        groups: The process groups of this replica.
        device: Where this rank computes.
        microbatches: Per step; a step with fewer may use another schedule.
        computing: Makes the context in which forward passes run, for autocast.
    """

    def __init__(
        self,
        stages: StageAssignment,
        groups: StageGroups,
        device: torch.device,
        microbatches: int = 1,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._stages, self.model, self.layout, self.device = stages, stages.model, stages.layout, device
        self._computing, self.microbatches = computing, microbatches
        self.place_of_rank, self.place = stages.place_of_rank, stages.place
        self.templates, self.graph = stages.templates, stages.graph
        # Refuse a number of microbatches that the schedule cannot run before any weight changes.
        make_schedule(self.graph, microbatches, self.layout.plan.schedule)
        self.channel, self.meshes = P2PChannel(groups.replica, device), groups.meshes
        self.programs: dict[int, StageProgram] = {}
        """This rank's stages, by their number in the graph."""
        self._ties: list[TiedParameter] = []
        self.edges: dict[tuple[int, int], StageEdge] = {}
        self._runtimes: dict[int, Runtime] = {}
        self.events: list[ActionEvent] = []
        """What this process did in the last step, and when."""

    # -------------------------------------------------------------------------------------------- building it

    def split(self, prepare_copy: Callable[[nn.Module], None]) -> None:
        """Cut the model, in place, to this rank's stages.

        Args:
            prepare_copy: Applied to each copy of the model where a rank has several stages of one module; a copy is
                made before attention masks are routed, which cannot be copied.
        """
        own = self._stages.own()
        modules = [self.graph.nodes[number].module for number in own]
        if len(set(modules)) == len(modules):
            self.programs = {number: self._program(number, self.model) for number in own}
            self._give_up_modules(self.model, set(modules), self.programs.values())
        else:
            # Several stages of one module: each runs a copy of the model that shares its parameters.
            for number, name in zip(own, modules, strict=True):
                copy = copy_with_shared_parameters(self.model, self.meshes)
                prepare_copy(copy)
                self.programs[number] = self._program(number, copy)
                self._give_up_modules(copy, {name}, [self.programs[number]])
            drop_remote_parameters(self.model, self.programs.values())
        self._check_there()

    def shard(self, plan: DataPlan) -> None:
        """Shard the parameters of this rank's stages with FSDP; ddp and zero1 keep them whole."""
        if plan.kind in ("ddp", "zero1") or self.meshes.data.size() == 1:
            return
        for program in self.programs.values():
            apply_data_parallel(program, self.meshes.data, plan)
        register_stage_parameters(self.model, self.programs.values())

    def connect(self) -> None:
        """Open what stages share: tied weights, and the edges along which activations and gradients travel."""
        tied = self._tied_names()
        own = {id(parameter): name for name, parameter in self.model.named_parameters()}
        set_original_names(self.model, {own[id(parameter)]: name for name, parameter in tied.items()})
        self._ties = find_tied_parameters(tied, self.layout)
        self.channel.other_groups += [tie.group for tie in self._ties]
        self.channel.other_groups += [self.data_group] if self.meshes.data.size() > 1 else []
        self.edges = self._make_edges(self._stages.ranks)
        if isinstance(self.model, MultimodalModel):
            self.model.set_generate_function(partial(generate, self))

    def _check_there(self) -> None:
        """Make sure that nothing was given up that a stage here has."""
        lost = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        if lost:
            raise RuntimeError(f"{lost[0]} belongs to this process's stages, but has no weights.")

    def _program(self, number: int, model: nn.Module) -> StageProgram:
        node = self.graph.nodes[number]
        template, module = self.templates[node.module], self._stages.module(node.module, model)
        program: StageProgram | None = None

        def call(model: nn.Module, inputs: Inputs) -> Any:
            assert program is not None
            return program.run(model, inputs)

        part: StageModule | None = None if template is None else cut(module, template, node.index, call=call)
        if part is not None and has_sharded_tokens(module):
            set_expected_layers(module, _own_layers(module, template, node.index))
        if not isinstance(model, MultimodalModel):
            program = ModelProgram(model, part or _whole_part(model, call))
        elif not self._stages.is_last(node.module):
            program = EncoderProgram(model, node.module, part)
        else:
            sources = {s: self.graph.nodes[s].module for s in self.graph.predecessors(number)}
            runs_encoders = node.index == 0 and bool(self._stages.inside())
            program = LanguageProgram(model, part, sources, runs_encoders=runs_encoders)
        program.forward_context = self._computing
        return program

    def _give_up_modules(self, model: nn.Module, own: set[str], programs: Iterable[StageProgram]) -> None:
        """Let nothing be left of the modules whose stages are all elsewhere."""
        if not isinstance(model, MultimodalModel):
            return
        runs_encoders = any(isinstance(one, LanguageProgram) and one.runs_encoders for one in programs)
        for name, encoder in model.encoders.items():
            if name not in own and not runs_encoders:
                setattr(model, f"{name}_encoder", RemoteModule(encoder, f"{name}_encoder", lambda: self.device))
        if not any(map(self._stages.is_last, own)):
            model.language_model = RemoteModule(model.language_model, LANGUAGE_MODEL, lambda: self.device)

    # -------------------------------------------------------------------------------------------- what stages share

    def _tied_names(self) -> dict[str, nn.Parameter]:
        """Return this process's parameters that several stages have, by the name that the whole model has for them."""
        found: dict[str, nn.Parameter] = {}
        for number, program in self.programs.items():
            prefix, part = self._prefix(self.graph.nodes[number].module), program.part
            if isinstance(part, StageModule):
                found |= {f"{prefix}{name}": part.model.get_parameter(own) for own, name in part.tied.items()}
        return found

    def _prefix(self, module: str) -> str:
        """Return what stands before the names of a module's parameters in the whole model."""
        if not isinstance(self.model, MultimodalModel):
            return ""
        return "language_model." if self._stages.is_last(module) else f"{module}_encoder."

    def _make_edges(self, ranks: Sequence[Any]) -> dict[tuple[int, int], StageEdge]:
        edges: dict[tuple[int, int], StageEdge] = {}
        for number, (source, target) in enumerate(self.graph.edges):
            a, b = self.graph.nodes[source], self.graph.nodes[target]
            if a.place != b.place and self.place in (a.place, b.place):
                route = Route.between(ranks[a.place], ranks[b.place], a.module == b.module)
                edges[source, target] = StageEdge.for_rank(distributed.rank(), route, self.channel, number, str(a))
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
    def use_call(self, call: Call) -> Iterator[None]:
        """Run a block in which the model is run for something else."""
        before = [(program, program.call) for program in self.programs.values()]
        self.set_call(call)
        try:
            yield
        finally:
            for program, one in before:
                program.call = one

    @contextmanager
    def use_eval_mode(self) -> Iterator[None]:
        """Run a block with all stages in eval mode, and whole sequences in every process."""
        with ExitStack() as stack:
            for program in self.programs.values():
                stack.callback(reshard, program)
                stack.enter_context(use_eval_mode(program))
                stack.enter_context(use_whole_rows(program))
            yield

    def move_batch(self, inputs: Inputs) -> dict[str, Any]:
        """Return inputs with their tensors on this process's device."""
        return move_to_device(inputs, self.device)

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
            runtime.run_guarded(meeting.pop_all().close)
        self.events = runtime.events

    @contextmanager
    def gradients_meet(self) -> Iterator[None]:
        """Run a block that computes gradients, and bring them together: over replicas, and over stages that share some.

        What is sharded is brought together with the last backward pass, by FSDP.
        """
        with sum_tied_gradients(self._ties):
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
                self.edges,
                self.channel,
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
        if not isinstance(self.model, MultimodalModel) or self._stages.is_last(name):
            return True
        return self.model.stand_in(name, self.device) is not None or name in split_encoder_inputs(self.model, inputs)

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
        self.channel.close()


def _own_layers(module: nn.Module, template: PipelineTemplate | None, stage: int) -> int:
    """Return how many layers a stage has."""
    assert template is not None
    known = survey(module)
    starts = [*template.starts(module, known), len(known.layers)]
    return max(0, min(starts[stage + 1], len(known.layers)) - starts[stage])


def _whole_part(model: nn.Module, call: Callable[[nn.Module, Inputs], Any]) -> Any:
    """Return what runs a model that is all on one stage."""
    return lambda inputs, received: call(model, inputs)
