"""Collective decisions of the ranks that save and load together: all of them go on, or all of them raise.

Everything goes through rank 0, as JSON. Rank 0 notices a rank that has died and informs the others; with torch's
collectives they would learn of it from their neighbours, one after the other, without its number. The group is a gloo
group of our own, so that messages never mix with those of the training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cornstarch.checkpoint.shards import Box
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed

T = TypeVar("T")

_TIMEOUT = timedelta(hours=1)  # for a rank that writes to a slow disk; a dead one is noticed at once
_STOP = -1


class Coordinator:
    """One rank's connection to the others; a single process without a process group is its own coordinator."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._group = rank, size, group
        self._world = _find_world()

    @property
    def is_current(self) -> bool:
        """Whether the process group that it was made in is still that of the run."""
        return self._world is _find_world()

    @classmethod
    def default(cls) -> Coordinator:
        """Return the coordinator of this run. The first call in a run is collective."""
        global _default
        if _default is None or not _default.is_current:
            _default = cls.with_own_group()
        return _default

    @classmethod
    def with_own_group(cls) -> Coordinator:
        """Return a coordinator with a new process group, for a thread that works beside the main one."""
        if distributed.is_single_process():
            return cls()
        return cls(distributed.rank(), distributed.world_size(), dist.new_group(backend="gloo", timeout=_TIMEOUT))

    def reduce(self, work: Callable[[], T], join: Callable[[list[T]], Any]) -> Any:
        """Run `work` on every rank and `join` on rank 0; return its result everywhere. All values are JSON."""
        # A failure anywhere is raised on all ranks, with the number of the rank that failed.
        if self.size == 1:
            return join([work()])
        failure: BaseException | None = None
        value: Any = None
        try:
            value = work()
        except BaseException as error:
            failure = error
        if self.rank == 0:
            outcomes = [_encode_outcome(value, failure), *map(self._receive_outcome, range(1, self.size))]
            failures = [outcome["failure"] for outcome in outcomes]
            verdict = {"failure": failures[0]}
            if any(one != failures[0] for one in failures):
                named = [f"Rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
                verdict = {"failure": "\n".join(named)}
            if verdict["failure"] is None:
                try:
                    verdict = {"value": join([outcome["value"] for outcome in outcomes]), "failure": None}
                except BaseException as error:
                    failure = error
                    verdict = {"failure": f"Rank 0: {_describe_error(error)}"}
            for rank in range(1, self.size):
                with suppress(RuntimeError):  # the rank has died since
                    self._send(verdict, rank)
        else:
            try:
                self._send(_encode_outcome(value, failure), 0)
                verdict = self._receive(0)
            except RuntimeError as error:
                verdict = {"failure": f"Rank 0 has ended or cannot be reached ({_first_line(error)})."}
        if verdict["failure"] is not None:
            if failure is not None and not isinstance(failure, (ConfigError, OSError)):
                raise failure
            raise ConfigError(verdict["failure"]) from failure
        return verdict["value"]

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its local result if no rank has failed."""
        results: list[T] = []
        self.reduce(lambda: results.append(work()), lambda _: None)
        return results[0]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result, which is JSON, on all ranks."""
        result: T = self.reduce(lambda: None, lambda _: work())
        return result

    def fetch(self, rank: int, number: int, dtype: torch.dtype, box: Box) -> Tensor:
        """On rank 0: receive a shard, the values of `box`, from a rank that runs `serve`."""
        into = torch.empty(box.sizes, dtype=dtype)
        with _explain_lost_rank(rank):
            dist.send(torch.tensor([number]), rank, group=self._group)
            answer = self._receive(rank)
            if answer is not None:
                raise ConfigError(f"Rank {rank}: {answer}")
            if into.numel():
                dist.recv(into.reshape(-1).view(torch.uint8), rank, group=self._group)
        return into

    def serve(self, tensors: Sequence[Callable[[], Tensor]]) -> None:
        """On the other ranks: send tensors by number until rank 0 calls `stop_serving`."""
        number = torch.zeros(1, dtype=torch.int64)
        with _explain_lost_rank(0):
            while True:
                dist.recv(number, 0, group=self._group)
                if int(number) == _STOP:
                    return
                try:
                    content = tensors[int(number)]().cpu().contiguous().reshape(-1).view(torch.uint8)
                except Exception as error:
                    self._send(_describe_error(error), 0)
                    continue
                self._send(None, 0)
                if content.numel():
                    dist.send(content, 0, group=self._group)

    def stop_serving(self) -> None:
        """On rank 0: end `serve` on the other ranks."""
        for rank in range(1, self.size):
            with suppress(RuntimeError):
                dist.send(torch.tensor([_STOP]), rank, group=self._group)

    def swap(self, value: Any, contents: Sequence[Tensor], to: int, source: int) -> tuple[Any, list[Tensor]]:
        """Send JSON and bytes to one rank and receive those of another, while all ranks do so."""
        sizes = [content.numel() for content in contents]
        head = torch.frombuffer(bytearray(json.dumps([value, sizes]).encode()), dtype=torch.uint8)
        with _explain_lost_rank(source):
            sent = [torch.tensor([head.numel()]), head, *(content for content in contents if content.numel())]
            works = [dist.isend(one, to, group=self._group) for one in sent]
            theirs, counts = self._receive(source)
            received = [torch.empty(count, dtype=torch.uint8) for count in counts]
            for one in received:
                if one.numel():
                    dist.recv(one, source, group=self._group)
            for work in works:
                if work is not None:
                    work.wait()
        return theirs, received

    def send_bytes(self, content: Tensor, rank: int) -> None:
        """Send bytes to a rank that calls `receive_bytes`."""
        with _explain_lost_rank(rank):
            dist.send(torch.tensor([content.numel()]), rank, group=self._group)
            if content.numel():
                dist.send(content, rank, group=self._group)

    def receive_bytes(self, rank: int) -> Tensor:
        """Receive bytes from a rank that calls `send_bytes`."""
        size = torch.zeros(1, dtype=torch.int64)
        with _explain_lost_rank(rank):
            dist.recv(size, rank, group=self._group)
            content = torch.empty(int(size), dtype=torch.uint8)
            if content.numel():
                dist.recv(content, rank, group=self._group)
        return content

    def _receive_outcome(self, rank: int) -> dict[str, Any]:
        try:
            return dict(self._receive(rank))
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


_default: Coordinator | None = None


def _find_world() -> dist.ProcessGroup | None:
    return None if distributed.is_single_process() else dist.group.WORLD


@contextmanager
def _explain_lost_rank(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(f"Rank {rank} has ended or cannot be reached ({_first_line(error)}).") from error


def _encode_outcome(value: Any, failure: BaseException | None) -> dict[str, Any]:
    return {"value": value, "failure": None} if failure is None else {"failure": _describe_error(failure)}


def _describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
