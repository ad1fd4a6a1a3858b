"""Worker processes that stay, because importing torch and transformers takes seconds; each job has its own group.

On a GPU they all share the first one, and talk through gloo: NCCL wants a GPU for each.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

import torch.distributed as dist

from cornstarch.launch.process_group import GLOO_FOR_ALL
from tests import forked

MOST = 8
_START = 240.0  # seconds; busy machines import slowly
# That a process waits for another one in a collective, before it says that they are out of step. For a GPU kernels are
# compiled, by one process later than by another.
QUIET = {"cpu": 60.0, "cuda": 300.0}
_WORDS = {"cpu": 150.0, "cuda": 600.0}  # that a job may take


class Failed(Exception):
    """A job failed in a worker; the text has its traceback.

    Args:
        text: What the workers say that failed.
        results: By rank, what the others returned before that.
    """

    def __init__(self, text: str, results: Mapping[int, Any] | None = None) -> None:
        super().__init__(text)
        self.results = dict(results or {})


class Pool:
    """Up to `MOST` processes that run the same function together, in a gloo group made for each call.

    Args:
        device: What they compute on: cpu, or cuda.
        quiet: Seconds that a process waits for another one in a collective. Default: by device.
    """

    def __init__(self, device: str = "cpu", quiet: float | None = None) -> None:
        self.device, self._quiet = device, QUIET[device] if quiet is None else quiet
        self._workers: list[tuple[Any, Connection]] = []
        # The parent keeps the store, so that there is one port for the whole session and nobody races for it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0
        self._to_renew: set[int] = set()

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float | None = None,
        apart: float = float("inf"),
    ) -> list[Any]:
        """Call `function(*arguments)` in so many processes and return their results by rank.

        Args:
            ranks: The number of processes.
            function: Called in each of them.
            arguments: Its arguments.
            seconds: That it may take. Default: by device.
            apart: Seconds that may pass between the first process that returns and the last.
        """
        seconds = _WORDS[self.device] if seconds is None else seconds
        self._start(ranks)
        self._jobs += 1
        for rank in range(ranks):
            self._workers[rank][1].send((self._jobs, rank, ranks, rank in self._to_renew, function, arguments))
        self._to_renew -= set(range(ranks))
        try:
            results = self._results(ranks, seconds, apart)
        except BaseException:  # a test that has run out of time: its answers must not be taken for those of the next
            self.close()
            raise
        failures = [text for is_good, text in results.values() if not is_good]
        if failures:
            self.close()  # whoever waits for the one that failed would wait for ever
            raise Failed("\n".join(failures), {rank: value for rank, (is_good, value) in results.items() if is_good})
        return [results[rank][1] for rank in range(ranks)]

    def _start(self, ranks: int) -> None:
        """Start the workers that are missing, and wait until they are ready: a group must not time out over that."""
        assert ranks <= MOST
        fresh = range(len(self._workers), ranks)
        for _ in fresh:
            here, there = Pipe()
            process = self._process(there)
            process.start()
            there.close()
            self._workers.append((process, here))
        for rank in fresh:
            if not self._workers[rank][1].poll(_START):
                self.close()
                raise Failed(f"worker {rank} was not ready in {_START:.0f} s")
            self._workers[rank][1].recv()

    def _process(self, connection: Connection) -> BaseProcess:
        arguments = (connection, self._store.port, self.device, self._quiet)
        if self.device == "cpu":
            return forked.process(_work, *arguments, daemon=True)
        # What is imported beforehand may ask for GPUs, and a process in which that was done cannot be forked.
        return multiprocessing.get_context("spawn").Process(target=_work, args=arguments, daemon=True)

    def _results(self, ranks: int, seconds: float, apart: float) -> dict[int, tuple[bool, Any]]:
        """Return what each worker says; once one has failed, the others, who may wait for it, are not waited for."""
        waiting = {self._workers[rank][1]: rank for rank in range(ranks)}
        results: dict[int, tuple[bool, Any]] = {}
        end = monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(end - monotonic(), 0.0))
            for connection in ready:
                assert isinstance(connection, Connection)
                results[rank] = self._received(connection, rank := waiting.pop(connection))
            if ready and len(results) == len(ready):
                end = min(end, monotonic() + apart)
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
            self._workers[rank][0].join(60)
            return False, f"rank {rank} died with {self._workers[rank][0].exitcode}"

    def renew(self) -> None:
        """Let workers forget the meshes of earlier jobs before the next: torch takes one for another that equals it.

        What it remembers of a mesh are groups that have ended. On machines with a GPU, where torch may be of another
        version than the one whose memory is known here, there are new workers.
        """
        if self.device == "cpu":
            self._to_renew = set(range(len(self._workers)))
        else:
            self.close()

    def close(self) -> None:
        """End the workers."""
        for process, _ in self._workers:
            process.kill()
        for process, connection in self._workers:
            process.join()
            connection.close()
        self._workers, self._to_renew = [], set()


def _work(connection: Connection, port: int, device: str, quiet: float) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    torch.set_num_threads(1)
    if device == "cuda":
        _prepare_gpu()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    connection.send("ready")
    with suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            number, rank, ranks, is_renewed, function, arguments = connection.recv()
            if is_renewed:
                _forget_meshes()
            job = dist.PrefixStore(f"job {number}", store)
            connection.send(_done(job, rank, ranks, device, quiet, function, arguments))


def _forget_meshes() -> None:
    """Empty what DTensor keeps by mesh; it has no public way to."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

    debug._clear_sharding_prop_cache()
    for kept in (
        _sharding_prop.ShardingPropagator._propagate_tensor_meta_cached,
        _redistribute._gen_transform_infos,
        _collective_utils.MeshTopoInfo.build_from_mesh,
    ):
        kept.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def _prepare_gpu() -> None:
    """Let this process compute on the first GPU, exactly: no TensorFloat-32, and the same numbers each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    warnings.filterwarnings("ignore", message=".*deterministic")


def _done(
    store: dist.Store, rank: int, ranks: int, device: str, quiet: float, function: Callable[..., Any], arguments: Any
) -> tuple[bool, Any]:
    backend = GLOO_FOR_ALL if device == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=quiet))
        dist.barrier()  # one that ends at once would close its connections while others still make theirs
        return True, function(*arguments)
    except BaseException:
        return False, f"rank {rank}:\n{traceback.format_exc()}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_pools: dict[str, Pool] = {}


def pool(device: str = "cpu") -> Pool:
    """Return the one pool of this process for a device."""
    if device not in _pools:
        _pools[device] = Pool(device)
        atexit.register(_pools[device].close)
    return _pools[device]
