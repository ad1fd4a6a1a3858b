"""What the processes of a group decide together: each does its part, and all go on or all stop.

Everything goes through rank 0, as JSON. A process that has died is noticed by rank 0, which then tells the others; with
torch's collectives they would learn of it from their neighbours, one after the other, without its number. The group is
one of our own, over gloo, so that the run's own traffic is never met.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.errors import ConfigError

__all__ = ["Ranks", "own_rank", "world_size"]

T = TypeVar("T")

_PATIENCE = timedelta(hours=1)  # for one that writes to a slow disk; a dead one is noticed at once
_STOP = -1


class Ranks:
    """The processes that save and load together, as one of them sees them; alone if there is no process group."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def here(cls) -> Ranks:
        """Return the processes of this run. The first time in a run, all of them have to ask."""
        global _known
        if world_size() == 1:
            return cls()
        world = dist.group.WORLD
        if _known is None or _known[0] is not world:
            _known = (world, cls.apart())
        return _known[1]

    @classmethod
    def apart(cls) -> Ranks:
        """Return them with a way of their own to talk, for a thread that works beside the others."""
        if world_size() == 1:
            return cls()
        return cls(own_rank(), world_size(), dist.new_group(backend="gloo", timeout=_PATIENCE))

    # ------------------------------------------------------------------ deciding together

    def reduced(self, work: Callable[[], T], join: Callable[[list[T]], Any]) -> Any:
        """Have every rank work and rank 0 join the results, which are JSON, into one that all get.

        If anything fails anywhere, all ranks raise, and the message names the rank.
        """
        if self.size == 1:
            return join([work()])
        failure: BaseException | None = None
        value: Any = None
        try:
            value = work()
        except BaseException as error:
            failure = error
        if self.rank == 0:
            outcomes = [_outcome(value, failure), *(self._from(rank) for rank in range(1, self.size))]
            verdict = {"failure": _told(outcomes)}
            if verdict["failure"] is None:
                try:
                    verdict = {"value": join([outcome["value"] for outcome in outcomes]), "failure": None}
                except BaseException as error:
                    failure = error
                    verdict = {"failure": f"Rank 0: {_message(error)}"}
            for rank in range(1, self.size):
                with suppress(RuntimeError):  # it has died since
                    self._send(verdict, rank)
        else:
            try:
                self._send(_outcome(value, failure), 0)
                verdict = self._receive(0)
            except RuntimeError as error:
                verdict = {"failure": f"Rank 0 has ended or cannot be reached ({_first_line(error)})."}
        if verdict["failure"] is not None:
            if failure is not None and not isinstance(failure, (ConfigError, OSError)):
                raise failure
            raise ConfigError(verdict["failure"]) from failure
        return verdict["value"]

    def agreed(self, work: Callable[[], T]) -> T:
        """Have every rank work, and return this one's result if no rank has failed."""
        results: list[T] = []
        self.reduced(lambda: results.append(work()), lambda _: None)
        return results[0]

    def first(self, work: Callable[[], T]) -> T:
        """Have rank 0 work, and return its result, which is JSON, to all."""
        result: T = self.reduced(lambda: None, lambda _: work())
        return result

    # ------------------------------------------------------------------ tensors for rank 0

    def ask(self, rank: int, number: int, into: Tensor) -> None:
        """On rank 0: get a tensor from a rank that is serving."""
        try:
            dist.send(torch.tensor([number]), rank, group=self._group)
            answer = self._receive(rank)
            if answer is not None:
                raise ConfigError(f"Rank {rank}: {answer}")
            if into.numel():
                dist.recv(into.reshape(-1).view(torch.uint8), rank, group=self._group)
        except RuntimeError as error:
            raise ConfigError(f"Rank {rank} has ended or cannot be reached ({_first_line(error)}).") from error

    def serve(self, tensors: Sequence[Callable[[], Tensor]]) -> None:
        """On the others: give tensors by their number, until rank 0 needs no more."""
        try:
            while (number := self._asked()) != _STOP:
                try:
                    content = tensors[number]().cpu().contiguous().reshape(-1).view(torch.uint8)
                except Exception as error:
                    self._send(_message(error), 0)
                    continue
                self._send(None, 0)
                if content.numel():
                    dist.send(content, 0, group=self._group)
        except RuntimeError as error:
            raise ConfigError(f"Rank 0 has ended or cannot be reached ({_first_line(error)}).") from error

    def _asked(self) -> int:
        number = torch.zeros(1, dtype=torch.int64)
        dist.recv(number, 0, group=self._group)
        return int(number)

    def dismiss(self) -> None:
        """On rank 0: need no more tensors."""
        for rank in range(1, self.size):
            with suppress(RuntimeError):
                dist.send(torch.tensor([_STOP]), rank, group=self._group)

    # ------------------------------------------------------------------ messages

    def _from(self, rank: int) -> dict[str, Any]:
        try:
            outcome: dict[str, Any] = self._receive(rank)
            return outcome
        except RuntimeError as error:
            return {"failure": f"it has ended or cannot be reached ({_first_line(error)})."}

    def _send(self, value: Any, rank: int) -> None:
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([content.numel()]), rank, group=self._group)
        dist.send(content, rank, group=self._group)

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._group)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, rank, group=self._group)
        return json.loads(content.numpy().tobytes())


_known: tuple[Any, Ranks] | None = None
"""The process group of the run, and the ranks in it."""


def own_rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if world_size() > 1 else 0


def world_size() -> int:
    """Return the number of processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _outcome(value: Any, failure: BaseException | None) -> dict[str, Any]:
    return {"value": value, "failure": None} if failure is None else {"failure": _message(failure)}


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _told(outcomes: Sequence[dict[str, Any]]) -> str | None:
    """Return what failed where; None if nothing did."""
    failures = [outcome["failure"] for outcome in outcomes]
    if all(failure == failures[0] for failure in failures):
        return failures[0]
    return "\n".join(f"Rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None)
