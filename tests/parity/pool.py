"""Worker processes that stay, because importing torch and transformers takes seconds; each job has its own group."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch.distributed as dist

MOST = 4
_START = 240.0  # seconds; busy machines import slowly
_QUIET = 60.0  # that a process waits for another one in a collective, before it says that they are out of step
_WORDS = 150.0  # that a job may take
# Imported once, in the process that the workers are forked from; nothing of it starts threads.
_IMPORTED = [
    "torch.distributed.fsdp",
    "transformers",
    "peft",
    "cornstarch.train.trainer",
    "cornstarch.train.tasks.build",
]


class Failed(Exception):
    """A job failed in a worker; the text has its traceback."""


class Pool:
    """Up to four processes that run the same function together, in a gloo group made for each call."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)
        self._workers: list[tuple[Any, Connection]] = []
        # The parent keeps the store, so that there is one port for the whole session and nobody races for it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = _WORDS) -> list[Any]:
        """Call `function(*arguments)` in so many processes and return their results by rank."""
        self._start(ranks)
        self._jobs += 1
        for rank in range(ranks):
            self._workers[rank][1].send((self._jobs, rank, ranks, function, arguments))
        try:
            results = self._results(ranks, seconds)
        except BaseException:  # a test that has run out of time: its answers must not be taken for those of the next
            self.close()
            raise
        failures = [text for is_good, text in results.values() if not is_good]
        if failures:
            self.close()  # whoever waits for the one that failed would wait for ever
            raise Failed("\n".join(failures))
        return [results[rank][1] for rank in range(ranks)]

    def _start(self, ranks: int) -> None:
        """Start the workers that are missing, and wait until they are ready: a group must not time out over that."""
        assert ranks <= MOST
        fresh = range(len(self._workers), ranks)
        for _ in fresh:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_work, args=(there, self._store.port), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        for rank in fresh:
            if not self._workers[rank][1].poll(_START):
                self.close()
                raise Failed(f"worker {rank} was not ready in {_START:.0f} s")
            self._workers[rank][1].recv()

    def _results(self, ranks: int, seconds: float) -> dict[int, tuple[bool, Any]]:
        """Return what each worker says; once one has failed, the others, who may wait for it, are not waited for."""
        waiting = {self._workers[rank][1]: rank for rank in range(ranks)}
        results: dict[int, tuple[bool, Any]] = {}
        end = monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(end - monotonic(), 0.0))
            for connection in ready:
                assert isinstance(connection, Connection)
                results[rank] = self._received(connection, rank := waiting.pop(connection))
            if waiting and (not ready or any(not is_good for is_good, _ in results.values())):
                end = min(end, monotonic() + 1.0)
                if not ready:
                    rest = ", ".join(map(str, waiting.values()))
                    return {**results, -1: (False, f"no word from rank {rest}: they wait, or compute too long")}
        return results

    def _received(self, connection: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return connection.recv()
        except EOFError:
            self._workers[rank][0].join(1)
            return False, f"rank {rank} died with {self._workers[rank][0].exitcode}"

    def close(self) -> None:
        """End the workers."""
        for process, _ in self._workers:
            process.kill()
        for process, connection in self._workers:
            process.join()
            connection.close()
        self._workers = []


def _work(connection: Connection, port: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    connection.send("ready")
    with suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            number, rank, ranks, function, arguments = connection.recv()
            connection.send(_done(dist.PrefixStore(f"job {number}", store), rank, ranks, function, arguments))


def _done(store: dist.Store, rank: int, ranks: int, function: Callable[..., Any], arguments: Any) -> tuple[bool, Any]:
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_QUIET))
        dist.barrier()  # one that ends at once would close its connections while others still make theirs
        return True, function(*arguments)
    except BaseException:
        return False, f"rank {rank}:\n{traceback.format_exc()}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_pool: Pool | None = None


def pool() -> Pool:
    """Return the one pool of this process."""
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool
