"""Carries out a schedule: the actions of this process's place, with its own stages, against the other places.

Everything that two places do together was decided before: the order of the actions is the schedule's, and which
tensors travel follows from the inputs of a microbatch, which all processes of a replica have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.compat import backward_of_inputs, backward_of_weights
from cornstarch.errors import ConfigError
from cornstarch.pipeline.payload import Form, Payload, put_together, take_apart
from cornstarch.pipeline.transfer import Arrival, Edge, Post, signature
from cornstarch.schedule.actions import Action, Kind, Schedule

_MOST_SENT = 4  # payloads of frozen stages that are on their way
_SOON = 3  # computations whose receives have begun,
_AHEAD = 16  # and up to so many when there are less: the other end is told of all of them at once,
_AWAITED = 2**25  # unless their buffers take more bytes than this

Inputs = Mapping[str, Any]
Finish = Callable[[int, Any], "Tensor | None"]
"""Takes the number of a microbatch and what the last stage made of it; returns the loss to send gradients back from."""


class Program(Protocol):
    """What a stage computes."""

    def __call__(self, inputs: Inputs, received: Mapping[int, Payload]) -> Any:
        """Return what the stage hands on, or, of the last, what the loss is made of."""
        ...


class StageError(RuntimeError):
    """Something went wrong in a stage, here or in another process."""


@dataclass(slots=True)
class Event:
    """One action, as it was in time."""

    action: Action
    begin: float
    """Seconds since the step began."""
    end: float
    waited: float
    """Of it, seconds spent waiting for other places."""


@dataclass(slots=True)
class _Held:
    """What a stage keeps of a microbatch between forward and backward."""

    leaves: dict[int, tuple[Form, list[Tensor]]] = field(default_factory=dict)
    """By the stage they come from: the form of what was received, and those of it that take a gradient."""
    outputs: list[Tensor] = field(default_factory=list)
    """What takes a gradient of what was handed on."""
    form: Form | None = None
    loss: Tensor | None = None
    weights_left: Any = None
    """Between the gradients of the inputs and those of the weights."""


class Runtime:
    """Runs the stages of one place.

    Args:
        schedule: What all places do.
        place: This process's.
        programs: Its stages, by number.
        edges: The edges between a stage here and one elsewhere, by (source, target).
        post: What carries their messages.
        takes_part: Whether a stage has anything to do with a microbatch; all processes of a replica must think the
            same of all stages. Default: it has.
        before_backward: Called with a stage and whether it is its last backward of the step.
        by_value: Names of inputs with one number per token that sizes between stages follow from.
    """

    def __init__(
        self,
        schedule: Schedule,
        place: int,
        programs: Mapping[int, Program],
        edges: Mapping[tuple[int, int], Edge],
        post: Post | None,
        takes_part: Callable[[int, Inputs], bool] | None = None,
        before_backward: Callable[[int, bool], None] | None = None,
        by_value: Collection[str] = (),
    ) -> None:
        self.by_value = by_value
        self.graph = schedule.graph
        self.place, self.programs, self.edges, self.post = place, dict(programs), dict(edges), post
        self._takes_part, self._before_backward = takes_part, before_backward
        self.events: list[Event] = []
        """What the last step did when."""
        self.use(schedule)

    def use(self, schedule: Schedule) -> None:
        """Take another schedule over the same stages, for another number of microbatches."""
        assert schedule.graph == self.graph
        self.schedule = schedule
        self._actions = schedule.actions[self.place]
        self._last_backward: dict[int, int] = {}
        for number, action in enumerate(self._actions):
            if action.kind in (Kind.B, Kind.W, Kind.I):
                self._last_backward[action.stage] = number
        self._returned = self._gradients_before()

    def _gradients_before(self) -> dict[tuple[int, int], list[int]]:
        """Return, by stage elsewhere and microbatch: whose gradients it needs between the forward before and this one.

        Once its payload is here, what was sent back to it for those has arrived.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for source in {source for source, target in self.edges if target in self.programs}:
            needed: list[int] = []
            for action in self.schedule.actions[self.graph.nodes[source].place]:
                if action.stage == source and action.kind is Kind.F:
                    found[source, action.microbatch], needed = needed, []
                elif action.stage == source:
                    needed.append(action.microbatch)
        return found

    # -------------------------------------------------------------------------------------------- a step

    def train(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        """Do forward and backward of all microbatches; gradients are left in the parameters."""
        if len(microbatches) != self.schedule.microbatches:
            raise ConfigError(
                f"The schedule is for {self.schedule.microbatches} microbatches; {len(microbatches)} were given."
            )
        self._run(self._actions, microbatches, finish)

    def forward(self, microbatches: Sequence[Inputs], finish: Finish) -> None:
        """Do forward alone, without keeping anything for a backward."""
        stages = sorted(self.programs)
        actions = [Action(Kind.F, s, m) for m in range(len(microbatches)) for s in stages]
        with torch.no_grad():
            self._run(actions, microbatches, finish)

    def _run(self, actions: Sequence[Action], microbatches: Sequence[Inputs], finish: Finish) -> None:
        run = Run(self, actions, microbatches, finish)
        self.events = run.events
        self.guarded(run.all, run)

    # -------------------------------------------------------------------------------------------- failures

    def guarded(self, work: Callable[[], object], run: Run | None = None) -> None:
        """Do something with the other places; if it fails, let them know, and say what went wrong first, anywhere."""
        lines = self.post
        if lines is not None and lines.broken is not None:
            raise StageError(f"The pipeline has stopped: {lines.broken}")
        try:
            with nullcontext() if lines is None else lines.alarm.listening():
                work()
                if lines is not None:
                    lines.flush()
        except BaseException as error:
            said = self._stop(error, None if run is None else run.at)
            if isinstance(error, KeyboardInterrupt) or said == str(error):
                raise
            raise StageError(said) from (None if _is_line_cut(error) else error)

    def _stop(self, error: BaseException, at: Action | None) -> str:
        """Let all others know, and return what went wrong first, here or elsewhere."""
        told = self._told(error, at)
        if self.post is None:
            return told
        # Whoever comes first has said it; what follows from it is no news.
        said = self.post.alarm.sound(told, is_echo=_is_line_cut(error))
        self.post.cut(because=said)
        self.post.close()
        return said

    def _told(self, error: BaseException, at: Action | None) -> str:
        rank = dist.get_rank() if dist.is_initialized() else 0
        where = "" if at is None else f", stage {at.stage} ({self.graph.nodes[at.stage]}), microbatch {at.microbatch}"
        what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return f"rank {rank}{where}: {what}"


def _is_line_cut(error: BaseException) -> bool:
    words = str(error).lower()
    lines = ("connection closed", "connection reset", "connection refused", "socket closed", "application timeout")
    return isinstance(error, RuntimeError) and any(line in words for line in (*lines, "read error", "write error"))


class Run:
    """One pass through a list of actions."""

    def __init__(
        self, runtime: Runtime, actions: Sequence[Action], microbatches: Sequence[Inputs], finish: Finish
    ) -> None:
        self.runtime, self.graph = runtime, runtime.graph
        self.actions, self.microbatches, self.finish = actions, microbatches, finish
        training = any(isinstance(p, nn.Module) and p.training for p in runtime.programs.values())
        self.keys: list[Hashable] = [signature(inputs, training, runtime.by_value) for inputs in microbatches]
        self.held: dict[tuple[int, int], _Held] = {}
        self.local: dict[tuple[int, int, int], tuple[Form, list[Tensor]]] = {}
        self.local_gradients: dict[tuple[int, int, int], list[Tensor]] = {}
        self.payloads: dict[tuple[int, int, int], Arrival] = {}
        self.gradients: dict[tuple[int, int, int], list[Arrival]] = {}
        self.parts = self._parts()
        # Where nothing ever comes back, as in stages that are frozen from the first, all would be sent at once.
        returns = [stage for stage in runtime.programs if self.graph.backward(stage) != "none"]
        self.runs_ahead = not (returns and torch.is_grad_enabled())
        self.events: list[Event] = []
        self.at: Action | None = None
        self.waited = 0.0
        self.awaited = 0  # bytes

    def _parts(self) -> list[tuple[bool, ...]]:
        """Return, by stage, in which microbatches it takes part: encoders may have nothing to do."""
        asked = self.runtime._takes_part
        return [
            tuple(asked is None or asked(stage, inputs) for inputs in self.microbatches)
            for stage in range(len(self.graph.nodes))
        ]

    def takes_part(self, stage: int, microbatch: int) -> bool:
        return self.parts[stage][microbatch]

    def all(self) -> None:
        began = time.perf_counter()
        expected = 0
        for number, action in enumerate(self.actions):
            self.at = action
            if expected < number + _SOON:
                expected = self._expect_from(max(expected, number), number)
            if not self.takes_part(action.stage, action.microbatch):
                continue
            begin, self.waited = time.perf_counter(), 0.0
            match action.kind:
                case Kind.F:
                    self._forward(action.stage, action.microbatch)
                case Kind.B | Kind.I | Kind.W:
                    if self.runtime._before_backward is not None:
                        is_last = self.runtime._last_backward[action.stage] == number
                        self.runtime._before_backward(action.stage, is_last)
                    self._backward(action)
            self.events.append(Event(action, begin - began, time.perf_counter() - began, self.waited))
        self.at = None

    # -------------------------------------------------------------------------------------------- receiving

    def _expect_from(self, expected: int, number: int) -> int:
        """Begin receives of the actions that follow; return the first whose receives have not begun."""
        while expected < min(len(self.actions), number + _AHEAD):
            is_far = expected >= number + _SOON and self.awaited > _AWAITED
            if is_far or not self._expect(self.actions[expected]):
                break
            expected += 1
        return expected

    def _expect(self, action: Action) -> bool:
        """Begin the receives of an action; return False if not even their form is known yet."""
        stage, m = action.stage, action.microbatch
        if not self.takes_part(stage, m):
            return True
        if action.kind is Kind.F:
            for source in self.graph.predecessors(stage):
                place = (source, stage, m)
                edge = self.runtime.edges.get((source, stage))
                if edge is None or not self.takes_part(source, m) or place in self.payloads:
                    continue
                if (arrival := edge.expect(self.keys[m])) is None:
                    return False
                self.payloads[place] = arrival
                self.awaited += arrival.form.bytes
        elif action.kind is Kind.W and self.graph.backward(stage) == "both":
            return True  # it goes on from what its inputs' gradients have left
        else:
            held = self.held.get((stage, m))
            for target in self.graph.successors(stage):
                edge = self.runtime.edges.get((stage, target))
                if edge is None or (stage, target, m) in self.gradients:
                    continue
                form = edge.known_form(self.keys[m]) if held is None else held.form
                if form is None:
                    return False  # its forward comes first
                self.gradients[stage, target, m] = edge.expect_gradients(form)
                self.awaited += form.gradients.bytes
        return True

    def _received(self, source: int, stage: int, m: int) -> tuple[Form, list[Tensor]]:
        if (place := (source, stage, m)) in self.local:
            return self.local.pop(place)
        began, edge = time.perf_counter(), self.runtime.edges[source, stage]
        if (arrival := self.payloads.pop(place, None)) is not None:
            self.awaited -= arrival.form.bytes
        found = edge.receive(self.keys[m], arrival)
        for earlier in self.runtime._returned.get((source, m), ()):
            edge.gradients_have_arrived(earlier)
        self.waited += time.perf_counter() - began
        return found

    # -------------------------------------------------------------------------------------------- forward

    def _forward(self, stage: int, m: int) -> None:
        held, received = _Held(), {}
        keeps = torch.is_grad_enabled()
        if self.runs_ahead and self.runtime.post is not None:
            began = time.perf_counter()
            self.runtime.post.wait_for_room(_MOST_SENT)
            self.waited += time.perf_counter() - began
        for source in self.graph.predecessors(stage):
            if not self.takes_part(source, m):
                continue
            form, tensors = self._received(source, stage, m)
            if keeps:
                for one, tensor in zip(form.tensors, tensors, strict=True):
                    tensor.requires_grad_(one.takes_gradient)
                held.leaves[source] = form, [tensor for tensor in tensors if tensor.requires_grad]
            received[source] = put_together(form, tensors)
        made = self.runtime.programs[stage](self.microbatches[m], received)
        if stage == self.graph.sink:
            held.loss = self.finish(m, made)
        else:
            self._hand_on(stage, m, made, held)
        if keeps and self.graph.backward(stage) != "none":
            self.held[stage, m] = held

    def _hand_on(self, stage: int, m: int, made: Payload, held: _Held) -> None:
        held.form, tensors = take_apart(made)
        if not self.graph.wants_gradient(stage):
            held.form, tensors = held.form.without_gradient(), [tensor.detach() for tensor in tensors]
        held.outputs = [tensor for tensor in tensors if tensor.requires_grad]
        for target in self.graph.successors(stage):
            edge = self.runtime.edges.get((stage, target))
            if edge is None:  # at the same place
                self.local[stage, target, m] = held.form, [tensor.detach() for tensor in tensors]
            else:
                held.form = edge.send(self.keys[m], held.form, tensors, m)

    # -------------------------------------------------------------------------------------------- backward

    def _backward(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        if action.kind is Kind.W and self.graph.backward(stage) == "both":
            held = self.held.pop((stage, m))
            if held.weights_left is not None:
                backward_of_weights(self._weights(stage), held.weights_left)
            return
        is_split = action.kind is Kind.I and self.graph.backward(stage) == "both"
        held = self.held[stage, m] if is_split else self.held.pop((stage, m))
        roots, gradients = self._roots(stage, m, held)
        leaves = [leaf for _, one in held.leaves.values() for leaf in one]
        if roots and is_split and leaves and not _uses_a_weight_twice(roots, leaves):
            held.weights_left = backward_of_inputs(roots, gradients, leaves, self._weights(stage))
        elif roots and is_split:
            held.weights_left = None
            torch.autograd.backward(roots, gradients)
        elif roots:
            torch.autograd.backward(roots, gradients)
        held.outputs, held.loss = [], None
        for source, (form, inputs) in held.leaves.items():
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs]
            edge = self.runtime.edges.get((source, stage))
            if edge is None:
                self.local_gradients[source, stage, m] = found
            else:
                edge.send_gradients(form, found, m)
            for leaf in inputs:
                leaf.grad = None
        held.leaves = {}

    def _roots(self, stage: int, m: int, held: _Held) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return where the backward of a stage begins, and with which gradients."""
        if stage == self.graph.sink:
            loss = held.loss
            return ([loss] if loss is not None and loss.requires_grad else []), None
        total: list[Tensor] | None = None
        for target in self.graph.successors(stage):
            found = self._gradients(stage, target, m, held)
            total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
        return held.outputs, total

    def _gradients(self, stage: int, target: int, m: int, held: _Held) -> list[Tensor]:
        if (place := (stage, target, m)) in self.local_gradients:
            return self.local_gradients.pop(place)
        edge = self.runtime.edges[stage, target]
        assert held.form is not None
        began = time.perf_counter()
        if (arrivals := self.gradients.pop(place, None)) is None:
            arrivals = edge.expect_gradients(held.form)
        else:
            self.awaited -= held.form.gradients.bytes
        found = edge.gradients(arrivals)
        edge.has_arrived(m)
        self.waited += time.perf_counter() - began
        return found

    def _weights(self, stage: int) -> list[nn.Parameter]:
        program = self.runtime.programs[stage]
        assert isinstance(program, nn.Module)
        return [parameter for parameter in program.parameters() if parameter.requires_grad]


def _uses_a_weight_twice(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Say whether a weight takes part in several places of a graph, as tied embeddings do in a stage with both ends.

    The gradients of such a weight cannot be left for later: the graph between its places would be gone through twice.
    """
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


__all__ = ["Event", "Finish", "Program", "Run", "Runtime", "StageError"]
