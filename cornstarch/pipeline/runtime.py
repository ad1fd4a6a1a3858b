"""Execution of a schedule: the actions of this process's place, in order, against the other places.

Two places never negotiate. The schedule fixes the order of the actions, and the shapes of the tensors between stages
follow from the inputs of a microbatch, which all processes of a replica have.

Deadlocks are avoided by three rules. Sends never block. Receives are posted ahead of the action that needs them, in the
order of the actions, so that messages along one edge match in order. A process that fails wakes all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.compat import backward_of_inputs, backward_of_weights
from cornstarch.errors import ConfigError
from cornstarch.parallel.activity import here
from cornstarch.pipeline.message import Payload, PayloadSpec, flatten_payload, unflatten_payload
from cornstarch.pipeline.p2p import P2PChannel, PendingReceive, StageEdge, compute_shape_signature
from cornstarch.schedule.actions import Action, Kind, Schedule

_MAX_SENT = 4  # payloads in flight from stages to which nothing is sent back
# Receives are posted for the next `_MIN_AHEAD` actions, and in bursts for up to `_MAX_AHEAD` of them, because gloo
# notifies the sender once for a burst; the buffers of a burst are limited to `_MAX_BUFFER_BYTES`.
_MIN_AHEAD = 3
_MAX_AHEAD = 16
_MAX_BUFFER_BYTES = 2**25
_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward of inputs", Kind.W: "backward of weights"}

Inputs = Mapping[str, Any]
Finish = Callable[[int, Any], "Tensor | None"]
"""Takes the index of a microbatch and the output of the last stage; returns the loss, from which backward starts."""

# The forward of a stage: takes inputs and received payloads; returns a payload, or on the last stage any output.
StageFunction = Callable[[Inputs, Mapping[int, Payload]], Any]


class StageError(RuntimeError):
    """A stage failed, in this process or in another one."""


@dataclass(slots=True)
class ActionEvent:
    """The times of one action."""

    action: Action
    begin: float  # seconds since the beginning of the step
    end: float
    waited: float  # seconds of it that were spent waiting for other places


@dataclass(slots=True)
class _MicrobatchState:
    """The tensors that a stage keeps of a microbatch between forward and backward."""

    leaves: dict[int, tuple[PayloadSpec, list[Tensor]]] = field(default_factory=dict)
    """By source stage: the spec of the received payload, and its tensors that require a gradient."""
    outputs: list[Tensor] = field(default_factory=list)  # the sent tensors that require a gradient
    spec: PayloadSpec | None = None
    loss: Tensor | None = None
    weight_backward: Any = None  # the graph that is left between the gradients of inputs and those of weights


class Runtime:
    """Runs the stages of one place.

    `is_active` says whether a stage computes anything for a microbatch (default: always); all processes of a replica
    must give the same answer for all stages.
    """

    def __init__(
        self,
        schedule: Schedule,
        place: int,
        programs: Mapping[int, StageFunction],  # the stages of this process's place, by number
        edges: Mapping[tuple[int, int], StageEdge],  # to and from other places, by (source, target)
        channel: P2PChannel | None,
        is_active: Callable[[int, Inputs], bool] | None = None,
        before_backward: Callable[[int, bool], None] | None = None,  # stage, and whether it is its last of the step
        by_value: Collection[str] = (),  # see `compute_shape_signature`
    ) -> None:
        self.schedule, self.graph, self.by_value = schedule, schedule.graph, by_value
        self.place, self.programs, self.edges, self.channel = place, dict(programs), dict(edges), channel
        self.is_active, self.before_backward = is_active, before_backward
        self.events: list[ActionEvent] = []  # the actions of the last step, with their times
        self._actions = schedule.actions[place]
        backwards = [(n, action.stage) for n, action in enumerate(self._actions) if action.kind is not Kind.F]
        self.last_backward = {stage: number for number, stage in backwards}
        self.acknowledged = self._find_acknowledged_gradients()

    def _find_acknowledged_gradients(self) -> dict[tuple[int, int], list[int]]:
        """Return, by (source stage, microbatch), the gradients that the source has when it sends the microbatch."""
        # They can be released when its payload arrives, without a message that says so.
        found: dict[tuple[int, int], list[int]] = {}
        for source in {source for source, target in self.edges if target in self.programs}:
            needed: list[int] = []
            for action in self.schedule.actions[self.graph.nodes[source].place]:
                if action.stage == source and action.kind is Kind.F:
                    found[source, action.microbatch], needed = needed, []
                elif action.stage == source:
                    needed.append(action.microbatch)
        return found

    def train(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        """Run forward and backward of all microbatches; gradients are accumulated in the parameters."""
        if len(microbatches) != self.schedule.microbatches:
            raise ConfigError(
                f"The schedule is for {self.schedule.microbatches} microbatches; {len(microbatches)} were given."
            )
        self._run(self._actions, microbatches, finish)

    def forward(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        """Run forward only, without keeping anything for backward."""
        actions = [Action(Kind.F, s, m) for m in range(len(microbatches)) for s in sorted(self.programs)]
        with torch.no_grad():
            self._run(actions, microbatches, finish)

    def _run(self, actions: Sequence[Action], microbatches: Sequence[Inputs], finish: Finish) -> None:
        step = StepExecution(self, actions, microbatches, finish)
        self.events = step.events
        self.run_guarded(step.run, step)

    def run_guarded(self, work: Callable[[], object], step: StepExecution | None = None) -> None:
        """Call a function that communicates with other places; if any process fails, all raise the first failure."""
        channel = self.channel
        if channel is not None and channel.failure is not None:
            raise StageError(f"The pipeline has stopped: {channel.failure}")
        try:
            with nullcontext() if channel is None else channel.failure_signal.watch():
                work()
                if channel is not None:
                    channel.limit_in_flight(0)
        except BaseException as error:
            rank = dist.get_rank() if dist.is_initialized() else 0
            nodes, at = self.graph.nodes, None if step is None else step.current
            where = "" if at is None else f", stage {at.stage} ({nodes[at.stage]}), microbatch {at.microbatch}"
            what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            message = f"rank {rank}{where}: {what}"
            if channel is not None and channel.failure is not None and _is_connection_error(error):
                message = channel.failure  # aborted from another thread, for that reason
                channel.close()
            elif channel is not None:
                # Report before aborting: the aborted processes look for the reason, and an echo is not one.
                message = channel.failure_signal.report(message, is_echo=_is_connection_error(error))
                channel.abort(message)
                channel.close()
            if isinstance(error, KeyboardInterrupt) or message == str(error):
                raise
            raise StageError(message) from (None if _is_connection_error(error) else error)


def _is_connection_error(error: BaseException) -> bool:
    message = str(error).lower()
    closed = ("connection closed", "connection reset", "connection refused", "socket closed", "application timeout")
    return isinstance(error, RuntimeError) and any(one in message for one in (*closed, "read error", "write error"))


class StepExecution:
    """One pass through a list of actions. Warm-up, steady state and cool-down follow from the order of the schedule."""

    def __init__(
        self, runtime: Runtime, actions: Sequence[Action], microbatches: Sequence[Inputs], finish: Finish
    ) -> None:
        self.runtime, self.graph = runtime, runtime.graph
        self.actions, self.microbatches, self.finish = actions, microbatches, finish
        training = any(isinstance(p, nn.Module) and p.training for p in runtime.programs.values())
        self._keys: list[Hashable] = [compute_shape_signature(one, training, runtime.by_value) for one in microbatches]
        self._states: dict[tuple[int, int], _MicrobatchState] = {}
        # By (source, target, microbatch): between stages of this place, and receives that were posted.
        self._local: dict[tuple[int, int, int], tuple[PayloadSpec, list[Tensor]]] = {}
        self._local_gradients: dict[tuple[int, int, int], list[Tensor]] = {}
        self._payloads: dict[tuple[int, int, int], PendingReceive] = {}
        self._gradients: dict[tuple[int, int, int], list[PendingReceive]] = {}
        # By stage and microbatch: encoders may have nothing to do.
        is_active = runtime.is_active
        stages = range(len(self.graph.nodes))
        self._active = [[is_active is None or is_active(s, inputs) for inputs in microbatches] for s in stages]
        # A place to which nothing is ever sent back, as that of frozen first stages, would send all payloads at once.
        has_backward = any(self.graph.backward(stage) != "none" for stage in runtime.programs)
        self._limits_sends = not (has_backward and torch.is_grad_enabled())
        self.events: list[ActionEvent] = []
        self.current: Action | None = None
        self._waited = 0.0
        self._pending_bytes = 0

    def run(self) -> None:
        start = time.perf_counter()
        posted = 0  # the receives of all actions before this one are posted
        for number, action in enumerate(self.actions):
            self.current = action
            if posted < number + _MIN_AHEAD:
                posted = max(posted, number)
                # Posting stops at the first action whose spec is unknown: a later receive on the same edge would
                # otherwise match its message.
                while posted < min(len(self.actions), number + _MAX_AHEAD):
                    is_full = posted >= number + _MIN_AHEAD and self._pending_bytes > _MAX_BUFFER_BYTES
                    if is_full or not self._post_receives_of(self.actions[posted]):
                        break
                    posted += 1
            if not self._active[action.stage][action.microbatch]:
                continue
            here.begin_action(_WORDS[action.kind], action.stage, action.microbatch)
            begin, self._waited = time.perf_counter(), 0.0
            if action.kind is Kind.F:
                self._forward(action.stage, action.microbatch)
            else:
                if self.runtime.before_backward is not None:
                    is_last = self.runtime.last_backward[action.stage] == number
                    self.runtime.before_backward(action.stage, is_last)
                self._backward(action)
            self.events.append(ActionEvent(action, begin - start, time.perf_counter() - start, self._waited))
        self.current = None

    @contextmanager
    def _measure_wait(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    def _post_receives_of(self, action: Action) -> bool:
        """Post the receives of an action; return False if their spec is not known yet."""
        stage, m = action.stage, action.microbatch
        if not self._active[stage][m]:
            return True
        if action.kind is Kind.F:
            for source in self.graph.predecessors(stage):
                key, edge = (source, stage, m), self.runtime.edges.get((source, stage))
                if edge is None or not self._active[source][m] or key in self._payloads:
                    continue
                if (pending := edge.post_receive(self._keys[m])) is None:
                    return False
                self._payloads[key] = pending
                self._pending_bytes += pending.spec.num_bytes
        elif not self._is_second_half(action):
            state = self._states.get((stage, m))
            for target in self.graph.successors(stage):
                edge = self.runtime.edges.get((stage, target))
                if edge is None or (stage, target, m) in self._gradients:
                    continue
                spec = edge.specs.get(self._keys[m]) if state is None else state.spec
                if spec is None:
                    return False  # the forward comes first
                self._gradients[stage, target, m] = edge.post_gradient_receives(spec)
                self._pending_bytes += spec.gradients.num_bytes
        return True

    def _is_second_half(self, action: Action) -> bool:
        """Whether the action continues the split backward that its `I` began, and so receives nothing."""
        return action.kind is Kind.W and self.graph.backward(action.stage) == "both"

    def _receive(self, source: int, stage: int, m: int) -> tuple[PayloadSpec, list[Tensor]]:
        if (key := (source, stage, m)) in self._local:
            return self._local.pop(key)
        edge = self.runtime.edges[source, stage]
        with self._measure_wait():
            if (pending := self._payloads.pop(key, None)) is not None:
                self._pending_bytes -= pending.spec.num_bytes
            received = edge.receive(self._keys[m], pending)
            for earlier in self.runtime.acknowledged.get((source, m), ()):
                edge.release_gradients(earlier)
        return received

    def _forward(self, stage: int, m: int) -> None:
        state, received = _MicrobatchState(), {}
        keeps_graph = torch.is_grad_enabled()
        if self._limits_sends and self.runtime.channel is not None:
            with self._measure_wait():
                self.runtime.channel.limit_in_flight(_MAX_SENT)
        for source in self.graph.predecessors(stage):
            if not self._active[source][m]:
                continue
            spec, tensors = self._receive(source, stage, m)
            if keeps_graph:
                # Received tensors are the leaves of this stage's graph: backward stops there, and sends their `grad`.
                for one, tensor in zip(spec.tensors, tensors, strict=True):
                    tensor.requires_grad_(one.requires_grad)
                state.leaves[source] = spec, [tensor for tensor in tensors if tensor.requires_grad]
            received[source] = unflatten_payload(spec, tensors)
        output = self.runtime.programs[stage](self.microbatches[m], received)
        if stage == self.graph.sink:
            state.loss = self.finish(m, output)
        else:
            self._send(stage, m, output, state)
        if keeps_graph and self.graph.backward(stage) != "none":
            self._states[stage, m] = state

    def _send(self, stage: int, m: int, output: Payload, state: _MicrobatchState) -> None:
        state.spec, tensors = flatten_payload(output)
        if not self.graph.wants_gradient(stage):  # the target must not wait for, or compute, a gradient nobody wants
            state.spec, tensors = state.spec.detach(), [tensor.detach() for tensor in tensors]
        state.outputs = [tensor for tensor in tensors if tensor.requires_grad]
        for target in self.graph.successors(stage):
            edge = self.runtime.edges.get((stage, target))
            if edge is None:  # at the same place
                self._local[stage, target, m] = state.spec, [tensor.detach() for tensor in tensors]
            else:
                state.spec = edge.send(self._keys[m], state.spec, tensors, m)

    def _backward(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        if self._is_second_half(action):
            state = self._states.pop((stage, m))
            if state.weight_backward is not None:
                backward_of_weights(self._get_weights(stage), state.weight_backward)
            return
        is_split = action.kind is Kind.I and self.graph.backward(stage) == "both"
        state = self._states[stage, m] if is_split else self._states.pop((stage, m))
        # Backward starts at the loss, or at the outputs with the gradients that all targets send back.
        roots, gradients = state.outputs, None
        if stage == self.graph.sink:
            roots = [state.loss] if state.loss is not None and state.loss.requires_grad else []
        for target in self.graph.successors(stage):
            found = self._receive_gradients(stage, target, m, state)
            gradients = found if gradients is None else [a + b for a, b in zip(gradients, found, strict=True)]
        leaves = [leaf for _, one in state.leaves.values() for leaf in one]
        if roots and is_split and leaves and not uses_weight_twice(roots, leaves):
            state.weight_backward = backward_of_inputs(roots, gradients, leaves, self._get_weights(stage))
        elif roots:
            torch.autograd.backward(roots, gradients)
        state.outputs, state.loss = [], None
        for source, (spec, inputs) in state.leaves.items():
            # A zero where there is no gradient: the other end has posted a receive for every tensor of the spec.
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
            edge = self.runtime.edges.get((source, stage))
            if edge is None:
                self._local_gradients[source, stage, m] = found
            else:
                edge.send_gradients(spec, found, m)
            for leaf in inputs:
                leaf.grad = None
        state.leaves = {}

    def _receive_gradients(self, stage: int, target: int, m: int, state: _MicrobatchState) -> list[Tensor]:
        if (key := (stage, target, m)) in self._local_gradients:
            return self._local_gradients.pop(key)
        edge = self.runtime.edges[stage, target]
        assert state.spec is not None
        with self._measure_wait():
            if (pending := self._gradients.pop(key, None)) is None:
                pending = edge.post_gradient_receives(state.spec)
            else:
                self._pending_bytes -= state.spec.gradients.num_bytes
            received = [one.wait() for one in pending]
            edge.release_payload(m)  # gradients for it are here, so it has arrived
        if len(received) == 1:
            return received[0]
        return [torch.stack(parts).mean(0) for parts in zip(*received, strict=True)]  # one from each cp rank

    def _get_weights(self, stage: int) -> list[nn.Parameter]:
        program: Any = self.runtime.programs[stage]
        return [parameter for parameter in program.parameters() if parameter.requires_grad]


def uses_weight_twice(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return whether a weight occurs several times in a graph, as a tied embedding does in a stage with both ends."""
    # The gradient of such a weight cannot be deferred: the graph between its occurrences would be traversed twice.
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, weights, received = set(nodes), set(), set(map(id, inputs))
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None:
                continue
            if (leaf := getattr(node, "variable", None)) is not None:
                if node in weights and id(leaf) not in received:
                    return True
                weights.add(node)
            elif node not in seen:
                seen.add(node)
                nodes.append(node)
    return False
