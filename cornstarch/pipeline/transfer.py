"""Tensors between the processes of two stages, whose tp and cp may differ; each process moves only what it needs.

Forward, a process of the later stage takes its payload from one process of the earlier one: its counterpart where both
belong to one module, which is cut alike; else what an encoder hands on is the same in all of its processes, and any of
them will do. Backward, the gradient of a process's output comes from its counterpart; or, from a language model whose
tokens are cut, from one process of each part, and is their mean: gradients are averaged over the processes of a module.

The form of a payload travels in front of it only when it is new: both ends know from the inputs of a microbatch, which
they both have, which form to expect.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.pipeline.payload import Form, Payload, TensorForm, take_apart

_REMEMBERED = 4096  # forms of one edge
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


def signature(inputs: Mapping[str, Any], training: bool) -> Hashable:
    """Return what the shapes between stages depend on: the shapes of the inputs, and whole numbers that tell sizes."""
    ids = inputs.get("input_ids")
    tokens = tuple(ids.shape) if isinstance(ids, Tensor) else None
    return training, torch.is_grad_enabled(), _signature(inputs, tokens)


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


@dataclass
class Arrival:
    """Tensors on their way to this process."""

    tensors: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        """Return them when they are there."""
        for work in self.works:
            work.wait()
        self.works = []
        return self.tensors


class Post:
    """Sends and receives in the background, over a process group that nothing else uses.

    What is sent is held until it has left. Close it when something has gone wrong: whoever waits for this process then
    learns at once that it will wait in vain.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.broken: str | None = None
        """Why the lines were cut, if they were."""
        self._sent: queue.SimpleQueue[tuple[list[Any], list[Tensor]] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._pending = 0
        self._less = threading.Condition()
        self._thread = threading.Thread(target=self._wait_for_sends, name="pipeline-sends", daemon=True)
        self._thread.start()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> None:
        """Begin to send tensors; they must not be changed before they have left."""
        held = [tensor.detach().contiguous() for tensor in tensors]
        works = [dist.isend(one, rank, group=self.group, tag=tag) for one in held if one.numel()]
        if works:
            with self._less:
                self._pending += 1
            self._sent.put((works, held))

    def receive(self, forms: Sequence[TensorForm], rank: int, tag: int) -> Arrival:
        """Begin to receive tensors of known forms."""
        tensors = [form.empty(self.device) for form in forms]
        works = [dist.irecv(one, rank, group=self.group, tag=tag) for one in tensors if one.numel()]
        return Arrival(tensors, works)

    def wait_for_room(self, most: int) -> None:
        """Wait until no more than so many payloads are on their way."""
        with self._less:
            self._less.wait_for(lambda: self._pending <= most or self._failure is not None)

    def flush(self) -> None:
        """Wait until everything has left; raise what went wrong with it."""
        with self._less:
            self._less.wait_for(lambda: not self._pending)
        if self._failure is not None:
            raise self._failure

    def _wait_for_sends(self) -> None:
        while (item := self._sent.get()) is not None:
            works, _ = item
            try:
                for work in works:
                    work.wait()
            except BaseException as error:
                self._failure = self._failure or error
            del works, item, _
            with self._less:
                self._pending -= 1
                self._less.notify_all()

    def close(self, because: str = "it was closed") -> None:
        """Cut the lines to all others."""
        self.broken = because
        self._sent.put(None)
        group = self.group
        del self.group  # the sockets close with the last that knows it
        dist.destroy_process_group(group)


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

    def send(self, key: Hashable, payload: Payload) -> tuple[Form, list[Tensor]]:
        """Send a payload on; return its form and its tensors."""
        form, tensors = take_apart(payload)
        known = self._forms.get(key)
        if known is None:
            self._remember(key, form)
            content = torch.frombuffer(bytearray(form.encoded()), dtype=torch.uint8).to(self.post.device)
            length = torch.tensor([content.numel()], device=self.post.device)
            for rank in self.forward_to:
                self.post.send([length, content], rank, self._tag(_HEADER))
        elif known != form:
            raise ConfigError(
                f"What {self.name} hands on has another form ({_difference(form, known)}) for a microbatch whose "
                "inputs have the same shapes: the sizes depend on values, and the next stage cannot know them. "
                "Give such sizes as whole numbers among the inputs, or keep the two stages together."
            )
        for rank in self.forward_to:
            self.post.send(tensors, rank, self._tag(_FORWARD))
        return form, tensors

    def expect(self, key: Hashable) -> Arrival | None:
        """Begin to receive the next payload, if its form is known."""
        form = self._forms.get(key)
        if form is None or self.forward_from is None:
            return None
        return self.post.receive(form.tensors, self.forward_from, self._tag(_FORWARD))

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
        (length,) = self.post.receive([TensorForm(torch.int64, (1,), False)], self.forward_from, tag).wait()
        forms = [TensorForm(torch.uint8, (int(length),), False)]
        (content,) = self.post.receive(forms, self.forward_from, tag).wait()
        return Form.decoded(bytes(content.cpu().numpy()))

    def _remember(self, key: Hashable, form: Form) -> None:
        if len(self._forms) >= _REMEMBERED:  # the oldest goes, at both ends at the same time
            self._forms.pop(next(iter(self._forms)))
        self._forms[key] = form

    # -------------------------------------------------------------------------------------------- backward

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Send back the gradients of the tensors that take them."""
        for rank in self.backward_to:
            self.post.send(gradients, rank, self._tag(_BACKWARD))

    def expect_gradients(self, form: Form) -> list[Arrival]:
        """Begin to receive the gradients of a payload that was sent."""
        forms = [one for one in form.tensors if one.takes_gradient]
        return [self.post.receive(forms, rank, self._tag(_BACKWARD)) for rank in self.backward_from]

    @staticmethod
    def gradients(arrivals: Sequence[Arrival]) -> list[Tensor]:
        """Return the gradients when they are there: the mean of what several processes have."""
        found = [arrival.wait() for arrival in arrivals]
        if len(found) == 1:
            return found[0]
        return [torch.stack(parts).mean(0) for parts in zip(*found, strict=True)]


def _difference(found: Form, known: Form) -> str:
    shapes = [(list(a.shape), list(b.shape)) for a, b in zip(found.tensors, known.tensors, strict=False) if a != b]
    return f"{shapes[0][0]} instead of {shapes[0][1]}" if shapes else "other parts"


__all__ = ["Arrival", "Edge", "Post", "Route", "signature"]
