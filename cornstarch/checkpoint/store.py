"""The checkpoints of a run: `CheckpointStore` saves, keeps and finds them, on one rank or on all ranks together."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.reader import Checkpoint, Form, read_checkpoint
from cornstarch.checkpoint.save import CheckpointWriter
from cornstarch.checkpoint.shards import FOLDER_NAME, LEFTOVER_NAME, Tensorlike, TensorShard, read_part
from cornstarch.checkpoint.storage import resolve_storage
from cornstarch.errors import ConfigError
from cornstarch.files import own_digest

if TYPE_CHECKING:
    from cornstarch.checkpoint.peer_memory import PeerMemory

Checkpoints = list[Checkpoint]
Problems = list[str]


class CheckpointStore:
    """The checkpoints of a run: the newest `keep`, and the best one.

    In a process group every rank has a store of the same folder, and all of them call `save`, `latest`, `best` and
    `verify` together; results and errors are then the same everywhere.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int, better: Literal["lower", "higher"] = "lower") -> None:
        if keep < 1:
            raise ConfigError(f"keep = {keep}; at least 1 checkpoint has to be kept.")
        self.storage, self.folder = resolve_storage(folder)
        self.keep = keep
        self.better = better
        self.problems: Problems = []
        """Why the last `list`, `latest` or `best` skipped checkpoints."""
        self.stager = Stager()
        self.memory: PeerMemory | None = None
        """The copies of the run's state in memory, if it keeps any."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._thread_coordinator: Coordinator | None = None
        self._claim: ExitStack | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensorlike],
        data: Mapping[str, Any],
        *,
        metric: float | None = None,
        form: Form = "sharded",
        wait: bool = True,
    ) -> Path:
        """Save a checkpoint, then remove those that need not be kept; until then the old ones are safe.

        Args:
            step: The step of the checkpoint.
            tensors: By name: whole tensors, DTensors, or `Sharded` ones. Replicas are written once, by the lowest rank.
            data: JSON with strings as keys. Ranks must agree on the values of a key, except under "per_rank", where
                each has its own.
            metric: Decides which checkpoint is the best one.
            form: sharded: each rank writes its shards. full: rank 0 writes everything, one tensor at a time.
                local: each rank writes all that it has, and only the same layout can load it.
            wait: False: copy the tensors to the CPU and write them in the background. Call `check` in each step, and
                `wait` before the process group ends.
        """
        self.wait()
        writer = CheckpointWriter(self.storage, self.folder, Coordinator.default(), step, tensors, data)
        earlier: Checkpoints = []

        def prepare(resources: ExitStack, step: int) -> tuple[Path, int]:
            self.storage.make_folder(self.folder)
            if self._claim is None:
                resources.enter_context(self.storage.lock(self.folder))
            for name in self.storage.list_names(self.folder):
                if LEFTOVER_NAME.fullmatch(name):  # of an interrupted save or removal
                    self._remove(self.folder / name)
            earlier.extend(self.list())
            name, revision = f"step_{step:08d}", 0
            while self.storage.exists(self.folder / name):
                revision += 1
                name = f"step_{step:08d}.{revision}"
            temporary = self.folder / f"{name}.tmp.{secrets.token_hex(4)}"  # the name before `.tmp.` is the final one
            self.storage.make_folder(temporary)
            return temporary, max((one.sequence for one in earlier), default=0) + 1

        def prune(target: Path) -> None:
            self._prune([*earlier, read_checkpoint(target, self.storage)])

        writer.plan(metric, form, prepare)
        if wait:
            return writer.finish(prune)
        writer.stage(self.stager.stage)
        if self._thread_coordinator is None or not self._thread_coordinator.is_current:
            self._thread_coordinator = Coordinator.with_own_group()
        writer.coordinator = self._thread_coordinator

        def run() -> None:
            try:
                writer.finish(prune)
            except BaseException as error:
                self._failure = error
                atexit.register(self.print_failure)

        # No daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=run, name="cornstarch checkpoint")
        self._thread.start()
        return writer.target

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keep other processes from saving here, also between two saves, until the block ends; rank 0 calls it."""
        with ExitStack() as stack:
            self.storage.make_folder(self.folder)
            stack.enter_context(self.storage.lock(self.folder))
            self._claim = stack
            try:
                yield
            finally:
                self._claim = None

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being saved in the background."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the failure of a background save, if there is one."""
        if not self.is_saving:
            self.wait()

    def wait(self) -> None:
        """Wait for the end of a background save; raise its failure, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            atexit.unregister(self.print_failure)
            raise failure

    def print_failure(self) -> None:
        """At the end of the process: print a failure that nothing has raised."""
        if self._failure is not None:
            print(f"{type(self._failure).__name__}: {self._failure}", file=sys.stderr)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is intact on all ranks; None if none was ever saved.

        Damaged ones are skipped and described in `problems`. If all are damaged this is an error: only the user can
        decide to start again from the first step.
        """
        found = self._first_intact(lambda: list(reversed(self.list())))
        if found is None and self.problems:
            raise ConfigError(
                f"None of the checkpoints in {self.folder} can be used:\n  "
                + "\n  ".join(self.problems)
                + "\nRestore one from a copy, or move the folder away to start from the first step."
            )
        return found

    def best(self) -> Checkpoint | None:
        """Return the intact checkpoint with the best metric; None if none has a metric."""
        return self._first_intact(lambda: self._sort_by_metric(self.list()))

    def verify(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step after checking every byte of it."""
        self.wait()
        coordinator = Coordinator.default()

        def find() -> str:
            checkpoints = self.list()
            found = [one.folder.name for one in checkpoints if one.step == step]
            if not found:
                damaged = [problem for problem in self.problems if f"step_{step:08d}" in problem]
                steps = ", ".join(str(one.step) for one in checkpoints) or "none"
                raise ConfigError(damaged[0] if damaged else f"{self.folder} has no step {step}; it has {steps}.")
            return found[-1]

        return self._verify_together(coordinator, coordinator.run_on_first(find))

    def list(self) -> Checkpoints:
        """Return the checkpoints in the order of saving; only their manifests are checked."""
        self.problems = []
        try:
            names = sorted(filter(FOLDER_NAME.fullmatch, self.storage.list_names(self.folder)))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be read ({error.strerror or error}).") from error
        found = []
        for name in names:
            try:
                found.append(read_checkpoint(self.folder / name, self.storage))
            except ConfigError as error:
                self.problems.append(str(error))
        return sorted(found, key=lambda one: one.sequence)

    def _first_intact(self, candidates: Callable[[], Checkpoints]) -> Checkpoint | None:
        self.wait()
        coordinator = Coordinator.default()
        names, self.problems = coordinator.run_on_first(
            lambda: ([one.folder.name for one in candidates()], self.problems)
        )
        for name in names:
            try:
                return self._verify_together(coordinator, name)
            except ConfigError as error:
                self.problems.append(str(error))
        return None

    def _verify_together(self, coordinator: Coordinator, name: str) -> Checkpoint:
        """Return a checkpoint after each rank has read and checked some of the files."""
        found: Checkpoints = []

        def work() -> str:
            one = read_checkpoint(self.folder / name, self.storage)
            by_size = sorted(one.files, key=lambda file: (-one.files[file]["size"], file))
            one.verify(by_size[coordinator.rank :: coordinator.size])
            found.append(one)
            return own_digest(one.files)

        def compare(seen: Sequence[str]) -> None:
            others = [rank for rank, digest in enumerate(seen) if digest != seen[0]]
            if others:
                raise ConfigError(
                    f"{self.folder / name} is another checkpoint for rank {others[0]} than for rank 0. All processes "
                    "need one folder: use a file system that all machines share."
                )

        coordinator.reduce(work, compare)
        return found[0]

    def _sort_by_metric(self, checkpoints: Checkpoints) -> Checkpoints:
        """Return the checkpoints with a metric, the best first; of equal ones the earlier first."""
        sign = 1 if self.better == "lower" else -1
        measured = [(sign * one.metric, one.sequence, one) for one in checkpoints if one.metric is not None]
        return [one for *_, one in sorted(measured, key=lambda entry: entry[:2])]

    def _prune(self, checkpoints: Checkpoints) -> None:
        newest = checkpoints[-1]
        # The same step saved again replaces the first, which may be kept as the best only.
        others = [one for one in checkpoints[:-1] if one.step != newest.step]
        kept = {newest.folder, *(one.folder for one in others[max(0, len(others) - self.keep + 1) :])}
        kept |= {one.folder for one in self._sort_by_metric(checkpoints)[:1]}
        for one in checkpoints:
            if one.folder not in kept:
                self._remove(one.folder)

    def _remove(self, folder: Path) -> None:
        try:
            self.storage.remove(folder)
        except OSError as error:
            warnings.warn(f"{folder}, which is not needed any more, could not be removed: {error}", stacklevel=4)


class Stager:
    """Copies shards to the CPU, always into the same memory: allocating pinned memory takes longer than copying."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, str, torch.dtype], Tensor] = {}

    def stage(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """Return copies of the shards, which later changes of the tensors do not reach."""
        buffers: dict[tuple[str, str, torch.dtype], Tensor] = {}
        result: list[TensorShard] = []
        for shard in shards:
            source = shard.read(shard.box).detach()
            key = (shard.name, str(shard.box), shard.dtype)
            buffer = self.buffers.get(key)
            if buffer is None or buffer.is_pinned() != source.is_cuda:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffers[key] = buffer.copy_(source, non_blocking=True)
            result.append(replace(shard, read=partial(read_part, buffer, shard.box)))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.buffers = buffers
        return result
