"""One process of a model whose stages stand on different ranks: its own stages, and the runtime that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import distributed
from cornstarch.parallel.context import has_sharded_tokens, set_expected_layers, use_whole_rows
from cornstarch.parallel.ddp_fsdp import apply_data_parallel, reshard
from cornstarch.parallel.expert import find_expert_replicas
from cornstarch.parallel.flat_shards import find_shard
from cornstarch.parallel.gradients import average_gradients
from cornstarch.parallel.zero1 import Zero1
from cornstarch.pipeline import stage_program
from cornstarch.pipeline import stages as stage_assignment
from cornstarch.pipeline.p2p import P2PChannel, Route, StageEdge
from cornstarch.pipeline.remote_module import RemoteModule, free_parameters, replace_parameters
from cornstarch.pipeline.runtime import ActionEvent, Finish, Runtime
from cornstarch.pipeline.split import analyze_model, cut
from cornstarch.pipeline.stage import StageModule
from cornstarch.pipeline.stage_program import Call, Inputs, LanguageProgram, StageProgram
from cornstarch.pipeline.stages import StageAssignment, StageGroups, TiedParameter
from cornstarch.plan.data_options import REPLICATED, keeps_gathered
from cornstarch.plan.plan import LANGUAGE_MODEL, DataPlan
from cornstarch.schedule.policies import make_schedule

_GENERATE_OPTIONS = {"max_new_tokens", "eos_token_id", "pad_token_id", "do_sample"}
_MAX_NEW_TOKENS = 20  # the default of transformers


class Pipeline:
    """This rank's stages of a model, and the runtime that executes their schedule.

    Built in three steps by `engine.parallelize`, because data parallelism comes between the last two: the constructor
    assigns stages and opens the process groups, `split` cuts the model, `connect` links the stages.

    `microbatches` are those of a step; a step with fewer may use another schedule. `forward_context` makes the context
    of forward passes (autocast).
    """

    def __init__(
        self,
        stages: StageAssignment,
        groups: StageGroups,
        device: torch.device,
        microbatches: int = 1,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.stages, self.model, self.layout, self.device = stages, stages.model, stages.layout, device
        self._forward_context, self.microbatches = forward_context, microbatches
        self.place_of_rank, self.place = stages.place_of_rank, stages.place
        self.templates, self.graph = stages.templates, stages.graph
        # Refuse a number of microbatches that the schedule cannot run before any weight changes.
        make_schedule(self.graph, microbatches, self.layout.plan.schedule)
        self.channel, self.meshes = P2PChannel(groups.replica, device), groups.meshes
        self.programs: dict[int, StageProgram] = {}  # this rank's stages, by their number in the graph
        self._ties: list[TiedParameter] = []
        self.edges: dict[tuple[int, int], StageEdge] = {}
        self._runtimes: dict[int, Runtime] = {}
        self._keeps_gathered = False
        self.zero1: Zero1 | None = None  # set when the optimizer is built
        self.events: list[ActionEvent] = []  # what this process did in the last step, and when

    def split(self, prepare_copy: Callable[[nn.Module], None]) -> None:
        """Cut the model, in place, to this rank's stages; `prepare_copy` is applied to each copy of it."""
        own = self.graph.at(self.place)
        modules = [self.graph.nodes[number].module for number in own]
        if len(set(modules)) == len(modules):
            self.programs = {number: self._program(number, self.model) for number in own}
            self._give_up_modules(self.model, set(modules), self.programs.values())
        else:
            # Several stages of one module: each runs a copy of the model that shares its parameters. Routed attention
            # masks cannot be copied, so `prepare_copy` routes them afterwards.
            for number, name in zip(own, modules, strict=True):
                copy = stage_program.copy_with_shared_parameters(self.model, self.meshes)
                prepare_copy(copy)
                self.programs[number] = self._program(number, copy)
                self._give_up_modules(copy, {name}, [self.programs[number]])
            # The model itself is not run: it lists only the parameters of this process's stages.
            kept = {id(parameter) for program in self.programs.values() for parameter in program.parameters()}
            replace_parameters(self.model.modules(), lambda one: one if id(one) in kept else None)
        if lost := [name for name, parameter in self.model.named_parameters() if parameter.is_meta]:
            raise RuntimeError(f"{lost[0]} belongs to this process's stages, but has no weights.")

    def shard(self, plan: DataPlan) -> None:
        """Shard the parameters of this rank's stages with FSDP; ddp and zero1 keep them whole."""
        if plan.kind in REPLICATED or self.meshes.data.size() == 1:
            return
        if keeps_gathered(plan.kind, plan.reshard_after_forward, is_pipeline=True):
            plan, self._keeps_gathered = replace(plan, reshard_after_forward=False), True
        for program in self.programs.values():
            apply_data_parallel(program, self.meshes.data, plan)
        stage_program.register_stage_parameters(self.model, self.programs.values())

    def connect(self) -> None:
        """Open what stages share: tied weights, and the edges along which activations and gradients travel."""
        # This rank's parameters that several stages have, by the name that the whole model has for them.
        tied: dict[str, nn.Parameter] = {}
        for number, program in self.programs.items():
            module, part, prefix = self.graph.nodes[number].module, program.part, ""
            if isinstance(self.model, MultimodalModel):
                prefix = "language_model." if self.stages.is_last(module) else f"{module}_encoder."
            if isinstance(part, StageModule):
                tied |= {f"{prefix}{name}": part.model.get_parameter(own) for own, name in part.tied.items()}
        own = {id(parameter): name for name, parameter in self.model.named_parameters()}
        originals = {own[id(parameter)]: name for name, parameter in tied.items()}
        self.model.__dict__[stage_assignment.ORIGINAL_NAMES] = originals
        self._ties = stage_assignment.find_tied_parameters(tied, self.layout)
        self.channel.other_groups += [tie.group for tie in self._ties]
        self.channel.other_groups += [self.data_group] if self.meshes.data.size() > 1 else []
        for number, (source, target) in enumerate(self.graph.edges):
            a, b = self.graph.nodes[source], self.graph.nodes[target]
            if a.place != b.place and self.place in (a.place, b.place):
                ranks = self.stages.ranks
                route = Route.between(ranks[a.place], ranks[b.place], a.module == b.module)
                edge = StageEdge(distributed.rank(), route, self.channel, number, str(a))
                self.edges[source, target] = edge
        if isinstance(self.model, MultimodalModel):
            self.model.set_generate_function(partial(_generate, self))

    def _program(self, number: int, model: nn.Module) -> StageProgram:
        node = self.graph.nodes[number]
        template, module = self.templates[node.module], self.stages.module(node.module, model)
        part: StageModule | None = None
        if template is not None:
            part = cut(module, template, node.index)
            if has_sharded_tokens(module):
                known = analyze_model(module)
                starts = [*template.starts(module, known), len(known.layers)]
                layers = min(starts[node.index + 1], len(known.layers)) - starts[node.index]
                set_expected_layers(module, max(0, layers))
        if not isinstance(model, MultimodalModel):
            program = StageProgram(model, part)
        elif not self.stages.is_last(node.module):
            program = stage_program.EncoderProgram(model, node.module, part)
        else:
            sources = {s: self.graph.nodes[s].module for s in self.graph.predecessors(number)}
            runs_encoders = node.index == 0 and bool(self.stages.inside())
            program = LanguageProgram(model, part, sources, runs_encoders=runs_encoders)
        program.forward_context = self._forward_context
        if part is not None:
            part.call = program.run
        return program

    def _give_up_modules(self, model: nn.Module, own: set[str], programs: Iterable[StageProgram]) -> None:
        """Replace the modules whose stages are all elsewhere."""

        def replace(module: nn.Module, name: str) -> RemoteModule:
            free_parameters(module)
            return RemoteModule(module, name, lambda: self.device)

        if not isinstance(model, MultimodalModel):
            return
        runs_encoders = any(isinstance(one, LanguageProgram) and one.runs_encoders for one in programs)
        for name, encoder in model.encoders.items():
            if name not in own and not runs_encoders:
                setattr(model, f"{name}_encoder", replace(encoder, f"{name}_encoder"))
        if not any(map(self.stages.is_last, own)):
            model.language_model = replace(model.language_model, LANGUAGE_MODEL)

    @property
    def has_loss(self) -> bool:
        return self.graph.sink in self.programs

    @property
    def models(self) -> list[nn.Module]:
        """The models that run here: the model itself, or one copy for each of several stages of a module."""
        programs = self.programs.values()
        found = [one.whole if isinstance(one, stage_program.EncoderProgram) else one.model for one in programs]
        return list({id(model): model for model in found}.values())

    def set_call(self, call: Call | None) -> None:
        """Say what the model is run for: a function of model and batch, that returns a loss, say."""
        for program in self.programs.values():
            program.call = call

    @contextmanager
    def use_call(self, call: Call) -> Iterator[None]:
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

    def train(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        """Do forward and backward of all microbatches, the same in all processes of a replica, and reduce gradients.

        `finish` is called on the last stage: it takes the number of a microbatch and its result, and returns the loss.
        """
        runtime = self._runtime(len(microbatches))
        with ExitStack() as meeting:
            meeting.enter_context(self.gradients_meet())
            runtime.train(microbatches, finish)
            # What other replicas, or other stages, fail with must be heard here, too, instead of waiting for them.
            runtime.run_guarded(meeting.pop_all().close)
        for program in self.programs.values():
            reshard(program)  # of a stage without a backward pass, too
        self.events = runtime.events

    @contextmanager
    def gradients_meet(self) -> Iterator[None]:
        """Run a block that computes gradients, then reduce them over replicas, and over stages with tied weights."""
        # FSDP reduces those of sharded parameters itself, with the last backward pass.
        with stage_assignment.sum_tied_gradients(self._ties):
            yield
            if self.zero1 is None and self.layout.plan.data.kind in REPLICATED and self.meshes.data.size() > 1:
                fewer, of_group = find_expert_replicas(self.model), dict[Any, list[nn.Parameter]]()
                for parameter in self.model.parameters():
                    of_group.setdefault(fewer.get(id(parameter), self.data_group), []).append(parameter)
                for group, parameters in of_group.items():
                    average_gradients(parameters, group, self.layout.plan.data.bucket_mb)
        if self.zero1 is not None:  # after the sum over stages: from here on a rank has shards of gradients only
            self.zero1.reduce_gradients()

    def forward(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        self._runtime(max(1, len(microbatches))).forward(microbatches, finish)

    def _runtime(self, microbatches: int) -> Runtime:
        if microbatches not in self._runtimes:
            try:
                schedule = make_schedule(self.graph, microbatches, self.layout.plan.schedule)
            except ConfigError:
                if microbatches == self.microbatches:
                    raise
                schedule = make_schedule(self.graph, microbatches, "1f1b")  # the last step of an epoch may have fewer
            local = self.place, self.programs, self.edges, self.channel
            hooks = self._takes_part, self._before_backward, self._list_inputs_by_value()
            self._runtimes[microbatches] = Runtime(schedule, *local, *hooks)
        return self._runtimes[microbatches]

    def _list_inputs_by_value(self) -> tuple[str, ...]:
        """Return the inputs that decide how many tokens a rank has, where tokens are dealt out by their work."""
        plans = self.layout.plan.modules.values()
        if not any(plan.cp > 1 and plan.cp_distribution in ("auto", "makespan_min") for plan in plans):
            return ()
        encoders = self.model.encoders.values() if isinstance(self.model, MultimodalModel) else ()
        is_causal = all(encoder.attention == "causal" for encoder in encoders)
        return ("attention_mask", "documents") if is_causal else ("attention_mask", "documents", "input_ids")

    def _takes_part(self, stage: int, inputs: Inputs) -> bool:
        name = self.graph.nodes[stage].module
        if not isinstance(self.model, MultimodalModel) or self.stages.is_last(name):
            return True
        has_stand_in = self.model.stand_in(name, self.device) is not None
        return has_stand_in or name in stage_program.split_encoder_inputs(self.model, inputs)

    def _before_backward(self, stage: int, is_last: bool) -> None:
        program = self.programs[stage]
        if isinstance(program, FSDPModule):
            if self._keeps_gathered:  # until all microbatches are done: else each of them would gather
                program.set_reshard_after_backward(is_last)
            program.set_is_last_backward(is_last)
            program.set_requires_gradient_sync(is_last)

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.meshes.data.get_group()

    def copies(self) -> list[nn.Parameter]:
        """Return what other stages count: parameters that they have, too; with ZeRO-1 this rank's shards of them."""
        copies = [tie.parameter for tie in self._ties if not tie.is_first]
        return [shard.stepped if (shard := find_shard(one)) is not None else one for one in copies]

    @property
    def tied_parameters(self) -> list[nn.Parameter]:
        return [tie.parameter for tie in self._ties]

    @property
    def holders(self) -> int:
        """The number of processes that work on the same stages, in all replicas."""
        return self.meshes.data.size() * (1 if self.meshes.tensor is None else self.meshes.tensor.size())

    def close(self) -> None:
        self.channel.close()


# Greedy decoding.


@torch.no_grad()
def _generate(pipeline: Pipeline, input_ids: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Continue left-padded prompts with the most likely tokens; the result includes the prompts."""
    # All processes of a replica must call it, and all get the result. There is no KV cache: each token costs a forward
    # pass of the whole sequence. To generate much, load a checkpoint in one process, or export it.
    batch = {name: value for name, value in options.items() if isinstance(value, Tensor | dict)}
    settings = {name: value for name, value in options.items() if name not in batch and value is not None}
    unknown = sorted(settings.keys() - _GENERATE_OPTIONS)
    if unknown or settings.get("do_sample"):
        raise ConfigError(
            f"generate({(unknown or ['do_sample'])[0]}=…): a model that is cut into stages only takes the likeliest "
            "token. Load a checkpoint in one process to generate otherwise."
        )
    eos = settings.get("eos_token_id")
    ends = [] if eos is None else [int(one) for one in (eos if isinstance(eos, list | tuple) else [eos])]
    padding = settings.get("pad_token_id", min(ends, default=0))
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    prompt = input_ids.shape[1]
    for _ in range(settings.get("max_new_tokens", _MAX_NEW_TOKENS)):
        inputs = {"input_ids": input_ids, "attention_mask": mask, **batch}
        new = _compute_next_token(pipeline, inputs, prompt).to(input_ids.device)
        new = torch.where(ended, torch.full_like(new, padding), new)
        input_ids = torch.cat([input_ids, new[:, None]], 1)
        mask = torch.cat([mask, (~ended).to(mask)[:, None]], 1)
        for end in ends:
            ended |= new == end
        if bool(ended.all()):
            break
    return input_ids


def _compute_next_token(pipeline: Pipeline, inputs: Inputs, prompt: int) -> Tensor:
    """Return the most likely next token of each row, on every process; the first `prompt` tokens were given."""
    found = torch.zeros(len(inputs["input_ids"]), dtype=torch.int64, device=pipeline.device)

    def finish(_: int, logits: Tensor) -> None:
        found.copy_(logits.argmax(-1))

    with ExitStack() as stack:
        move = partial(stage_program.move_to_device, device=pipeline.device)
        stack.enter_context(pipeline.use_call(lambda model, given: model(**move(given)).logits[:, -1]))
        for program in pipeline.programs.values():
            if isinstance(program.model, MultimodalModel):
                stack.enter_context(program.model.use_prompt_length(prompt))
        pipeline.forward([inputs], finish)
    last = pipeline.stages.ranks[pipeline.graph.nodes[pipeline.graph.sink].place].flat[0]
    dist.broadcast(found, int(last), group=pipeline.channel.group)
    return found
