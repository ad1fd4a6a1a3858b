"""Tensors between the processes of two stages, whose tp and cp may differ; each process moves only what it needs.

Forward, a process of the later stage takes its payload from one process of the earlier one: its counterpart where both
belong to one module, which is cut alike; else what an encoder hands on is the same in all of its processes, and any of
them will do. Backward, the gradient of a process's output comes from its counterpart; or, from a language model whose
tokens are cut, from one process of each part, and is their mean: gradients are averaged over the processes of a module.

The form of a payload travels in front of it only when it is new: both ends know from the inputs of a microbatch, which
they both have, which form to expect.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.compat import default_store
from cornstarch.errors import ConfigError
from cornstarch.parallel.carriage import Carriage
from cornstarch.pipeline.alarm import Alarm, Line, cut
from cornstarch.pipeline.payload import Form, TensorForm

_REMEMBERED = 4096  # forms of one edge
_CONNECTING = timedelta(minutes=30)  # as all groups; also what a receive takes at most
_HEADER, _FORWARD, _BACKWARD, _TAGS = 0, 1, 2, 3


@dataclass(frozen=True)
class Route:
    """The processes at the ends of an edge, and who hands what to whom."""

    forward: tuple[tuple[int, int], ...]
    """(from, to), ranks."""
    backward: tuple[tuple[int, int], ...]

    @classmethod
    def between(cls, source: np.ndarray, target: np.ndarray, is_same_module: bool) -> Route:
        """Return the route between two stages, each given by its ranks [cp, tp]."""
        if is_same_module:
            pairs = tuple(zip(source.ravel().tolist(), target.ravel().tolist(), strict=True))
            return cls(pairs, tuple((b, a) for a, b in pairs))
        sources, targets = source.ravel().tolist(), target.ravel().tolist()
        forward = [(sources[j * len(sources) // len(targets)], one) for j, one in enumerate(targets)]
        cp, tp = target.shape
        backward = [(int(target[c, a * tp // len(sources)]), one) for a, one in enumerate(sources) for c in range(cp)]
        return cls(tuple(forward), tuple(backward))


def signature(inputs: Mapping[str, Any], training: bool, by_value: Collection[str] = ()) -> Hashable:
    """Return what the shapes between stages depend on: the shapes of the inputs, and whole numbers that tell sizes.

    Args:
        inputs: Of a microbatch.
        training: Whether it is trained on.
        by_value: Names of inputs with one number per token that tell sizes, too.
    """
    ids = inputs.get("input_ids")
    tokens = tuple(ids.shape) if isinstance(ids, Tensor) else None
    told = tuple(_signature(inputs.get(name), None) for name in by_value)
    return training, torch.is_grad_enabled(), _signature(inputs, tokens), told


def _signature(value: Any, tokens: tuple[int, ...] | None) -> Hashable:
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if value.is_floating_point() or shape == tokens:
            return shape, str(value.dtype)
        return shape, str(value.dtype), zlib.crc32(value.detach().cpu().contiguous().numpy().data)
    if isinstance(value, Mapping):
        return tuple((key, _signature(value[key], tokens)) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(_signature(one, tokens) for one in value)
    return value if isinstance(value, Hashable) else str(type(value))


# ---------------------------------------------------------------------------------------------------- messages


class Arrival:
    """Tensors on their way to this process."""

    def __init__(self, post: Post, form: Form, rank: int, tag: int) -> None:
        self.form = form
        line, number = post.line(rank, sends=False)
        alone, together, size = form.parcels
        shared = {one for one, _, _ in together}
        self._carriage = post.carriage
        self.tensors: list[Any] = [
            None if i in shared else self._carriage.room(one.shape, one.dtype) for i, one in enumerate(form.tensors)
        ]
        self.works = [line.recv([self.tensors[one]], number, tag) for one in alone]
        self.shared: Tensor | None = None
        if together:
            self.shared = self._carriage.room((size,), torch.uint8)
            self.works.append(line.recv([self.shared], number, tag))

    def wait(self) -> list[Tensor]:
        """Return them when they are there."""
        for work in self.works:
            work.wait()
        self.works = []
        self.tensors = [None if one is None else self._carriage.arrived(one) for one in self.tensors]
        if self.shared is not None:
            shared = self._carriage.arrived(self.shared)
            for number, begin, end in self.form.parcels.together:
                one = self.form.tensors[number]
                # A copy: a view would count as changed when a layer writes on another tensor of the same message.
                self.tensors[number] = shared[begin:end].view(one.dtype).view(one.shape).clone()
        self.shared = None
        return self.tensors


class Post:
    """Sends and receives in the background, over a process group that nothing else uses.

    What is sent is held until it is known to have left; no thread waits for that, since waking one costs as much as a
    message: the runtime lets go of what must have left, because an answer to it is there. All processes of a replica
    must make it together.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.carriage = Carriage.of(group, device)
        self.broken: str | None = None
        """Why nothing travels any more, if so."""
        self.others: list[dist.ProcessGroup] = []
        """Further groups in which this process may wait for others: they are cut with the lines."""
        self.alarm = Alarm(self.cut)
        self._lines: dict[bool, Line] = {True: group, False: self._twin()}
        self._known_lines: dict[tuple[int, bool], tuple[Line, int]] = {}
        self._left: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}
        self._cutting = threading.Lock()

    def _twin(self) -> Line:
        """Return a second line over the same processes, so that data between any two flow one way only on each.

        A thread of gloo spins as long as something arrives on a line on which the process is just writing.
        """
        if dist.get_backend(self.group) != "gloo":
            return self.group
        # Not by `new_group`: what it calls a group depends on how many others this process has made.
        ranks = "-".join(map(str, dist.get_process_group_ranks(self.group)))
        store = dist.PrefixStore(f"cornstarch/pipeline/lines/{self.alarm.number}/{ranks}", default_store())
        twin: Any = dist.ProcessGroupGloo(store, self.group.rank(), self.group.size(), _CONNECTING)
        line: Line = twin
        return line

    def line(self, rank: int, sends: bool) -> tuple[Line, int]:
        """Return the group over which messages to a rank, or from it, travel, and the number of the rank in it."""
        if (rank, sends) not in self._known_lines:
            number = dist.get_group_rank(self.group, rank)
            is_up = (number > self.group.rank()) == sends
            self._known_lines[rank, sends] = self._lines[is_up], number
        return self._known_lines[rank, sends]

    def send(self, form: Form, tensors: Sequence[Tensor], rank: int, tag: int, microbatch: int) -> None:
        """Begin to send tensors of a form; they must not be changed before they have left."""
        alone, together, _ = form.parcels
        messages = [self.carriage.outgoing(tensors[one].detach()) for one in alone]
        if together:
            messages.append(self._packed(form, tensors))
        if messages:
            line, number = self.line(rank, sends=True)
            held = self._left.setdefault((tag, microbatch), [])
            held += [(line.send([message], number, tag), message) for message in messages]

    def _packed(self, form: Form, tensors: Sequence[Tensor]) -> Tensor:
        shared = self.carriage.room((form.parcels.size,), torch.uint8)
        for number, begin, end in form.parcels.together:
            one = form.tensors[number]
            shared[begin:end].view(one.dtype).view(one.shape).copy_(tensors[number].detach())
        return shared

    def receive(self, form: Form, rank: int, tag: int) -> Arrival:
        """Begin to receive tensors of a known form."""
        return Arrival(self, form, rank, tag)

    def let_go(self, tag: int, microbatch: int) -> None:
        """Hold what was sent of a microbatch no more: it has left, or is waited for."""
        for work, _ in self._left.pop((tag, microbatch), ()):
            work.wait()

    def wait_for_room(self, most: int) -> None:
        """Wait until no more than so many payloads are on their way."""
        while len(self._left) > most:
            self.let_go(*next(iter(self._left)))

    def flush(self) -> None:
        """Wait until everything has left."""
        self.wait_for_room(0)

    def cut(self, because: str) -> None:
        """End all waiting for other processes, and theirs for this one: something has gone wrong."""
        with self._cutting:
            if self.broken is None:
                self.broken = because
                for group in (*self._lines.values(), *self.others):
                    cut(group)

    def close(self) -> None:
        """Give up the lines to all others."""
        self.alarm.end()
        self.broken = self.broken or "it was closed"
        self._left.clear()
        # The group itself stays known to torch: it names groups by how many there are, and one less would let the next
        # pipeline's have the name of one that is still there.
        with self._cutting:
            self._lines, self._known_lines = {}, {}  # the sockets close with the last that knows them


# ---------------------------------------------------------------------------------------------------- edges


@dataclass
class Edge:
    """One edge of the graph of stages, as a process at one of its ends sees it."""

    post: Post
    number: int
    """Of the edge, the same in all processes."""
    name: str
    forward_to: list[int] = field(default_factory=list)
    forward_from: int | None = None
    backward_to: list[int] = field(default_factory=list)
    backward_from: list[int] = field(default_factory=list)
    _forms: dict[Hashable, Form] = field(default_factory=dict)

    @classmethod
    def at(cls, rank: int, route: Route, post: Post, number: int, name: str) -> Edge:
        """Return an edge as a rank sees it."""
        froms = [a for a, b in route.forward if b == rank]
        return cls(
            post,
            number,
            name,
            [b for a, b in route.forward if a == rank],
            froms[0] if froms else None,
            [b for a, b in route.backward if a == rank],
            [a for a, b in route.backward if b == rank],
        )

    def _tag(self, kind: int) -> int:
        return self.number * _TAGS + kind

    # -------------------------------------------------------------------------------------------- forward

    def known_form(self, key: Hashable) -> Form | None:
        """Return the form of a payload, if one like it has travelled before."""
        return self._forms.get(key)

    def send(self, key: Hashable, form: Form, tensors: Sequence[Tensor], microbatch: int) -> Form:
        """Send a payload on; return its form, the one that was known already if it was."""
        known = self._forms.get(key)
        if known is None:
            self._remember(key, form)
            self._send_form(form, microbatch)
        elif known != form:
            raise ConfigError(
                f"What {self.name} hands on has another form ({_difference(form, known)}) for a microbatch whose "
                "inputs have the same shapes: the sizes depend on values, and the next stage cannot know them. "
                "Give such sizes as whole numbers among the inputs, or keep the two stages together."
            )
        form = known or form
        for rank in self.forward_to:
            self.post.send(form, tensors, rank, self._tag(_FORWARD), microbatch)
        return form

    def _send_form(self, form: Form, microbatch: int) -> None:
        content = torch.frombuffer(bytearray(form.encoded()), dtype=torch.uint8).to(self.post.device)
        length = torch.tensor([content.numel()], device=self.post.device)
        for rank in self.forward_to:
            for one in (length, content):
                self.post.send(_plain(one.dtype, len(one)), [one], rank, self._tag(_HEADER), microbatch)

    def has_arrived(self, microbatch: int) -> None:
        """Let go of a payload that the other end has received."""
        self.post.let_go(self._tag(_HEADER), microbatch)
        self.post.let_go(self._tag(_FORWARD), microbatch)

    def expect(self, key: Hashable) -> Arrival | None:
        """Begin to receive the next payload, if its form is known."""
        form = self._forms.get(key)
        if form is None or self.forward_from is None:
            return None
        return self.post.receive(form, self.forward_from, self._tag(_FORWARD))

    def receive(self, key: Hashable, arrival: Arrival | None) -> tuple[Form, list[Tensor]]:
        """Return the next payload's form and tensors."""
        assert self.forward_from is not None
        if arrival is None and key not in self._forms:
            self._remember(key, self._received_form())
        arrival = arrival or self.expect(key)
        assert arrival is not None
        return self._forms[key], arrival.wait()

    def _received_form(self) -> Form:
        assert self.forward_from is not None
        tag = self._tag(_HEADER)
        (length,) = self.post.receive(_plain(torch.int64, 1), self.forward_from, tag).wait()
        (content,) = self.post.receive(_plain(torch.uint8, int(length)), self.forward_from, tag).wait()
        return Form.decoded(bytes(content.cpu().numpy()))

    def _remember(self, key: Hashable, form: Form) -> None:
        if len(self._forms) >= _REMEMBERED:  # the oldest goes, at both ends at the same time
            self._forms.pop(next(iter(self._forms)))
        self._forms[key] = form

    # -------------------------------------------------------------------------------------------- backward

    def send_gradients(self, form: Form, gradients: Sequence[Tensor], microbatch: int) -> None:
        """Send back the gradients of those tensors of a payload that take them."""
        for rank in self.backward_to:
            self.post.send(form.gradients, gradients, rank, self._tag(_BACKWARD), microbatch)

    def gradients_have_arrived(self, microbatch: int) -> None:
        """Let go of gradients that the other end has received."""
        self.post.let_go(self._tag(_BACKWARD), microbatch)

    def expect_gradients(self, form: Form) -> list[Arrival]:
        """Begin to receive the gradients of a payload that was sent."""
        return [self.post.receive(form.gradients, rank, self._tag(_BACKWARD)) for rank in self.backward_from]

    @staticmethod
    def gradients(arrivals: Sequence[Arrival]) -> list[Tensor]:
        """Return the gradients when they are there: the mean of what several processes have."""
        found = [arrival.wait() for arrival in arrivals]
        if len(found) == 1:
            return found[0]
        return [torch.stack(parts).mean(0) for parts in zip(*found, strict=True)]


def _plain(dtype: torch.dtype, length: int) -> Form:
    """Return the form of a row of numbers."""
    return Form(None, (TensorForm(dtype, (length,), False),))


def _difference(found: Form, known: Form) -> str:
    shapes = [(list(a.shape), list(b.shape)) for a, b in zip(found.tensors, known.tensors, strict=False) if a != b]
    return f"{shapes[0][0]} instead of {shapes[0][1]}" if shapes else "other parts"


__all__ = ["Arrival", "Edge", "Post", "Route", "signature"]
