"""The checkpoints of a run: saved, kept, found again, by one process or by all processes of a run together."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from cornstarch.errors import ConfigError
from cornstarch.files import own_digest, sync
from cornstarch.train.checkpoint.background import Background, Stager
from cornstarch.train.checkpoint.files import FOLDER_NAME, LEFTOVER_NAME
from cornstarch.train.checkpoint.pieces import Tensorlike
from cornstarch.train.checkpoint.ranks import Ranks
from cornstarch.train.checkpoint.reading import Checkpoint, Form, read_checkpoint
from cornstarch.train.checkpoint.saving import Save

__all__ = ["CheckpointStore"]

Checkpoints = list[Checkpoint]
Problems = list[str]


class CheckpointStore:
    """The checkpoints of a run: the newest so many, and the best one.

    In a process group every process has a store of the same folder, and all of them call `save`, `latest`, `best` and
    `verify` together; what they return, or raise, is then the same everywhere.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int, better: Literal["lower", "higher"] = "lower") -> None:
        if keep < 1:
            raise ConfigError(f"keep = {keep}; at least 1 checkpoint has to be kept.")
        self.folder = Path(folder)
        self.keep = keep
        self.better = better
        self.problems: Problems = []
        """Why the last `list`, `latest` or `best` passed over checkpoints."""
        self._background = Background()
        self._stager = Stager()
        self._apart: tuple[Any, Ranks] | None = None

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
        """Save a checkpoint, then remove what need not be kept; the folders that were there are safe until then.

        Args:
            step: The step it belongs to.
            tensors: By name: whole tensors, DTensors, or `Sharded` ones. What several processes have alike is written
                once, by the lowest of them.
            data: What JSON can hold, with words as keys. What processes have under the same key must be equal, except
                under the key "per_rank", where each keeps its own.
            metric: Decides which checkpoint is the best one.
            form: sharded: each process writes what it holds. full: rank 0 writes everything, one tensor at a time.
                local: each process writes all that it has, and only the same layout can load it.
            wait: False: copy the tensors to the CPU and write them while this process goes on. Call `check` in each
                step, and `wait` before the process group ends.
        """
        self.wait()
        save = Save(self.folder, Ranks.here(), step, tensors, data)
        earlier: Checkpoints = []

        def prepare(held: ExitStack, step: int) -> tuple[Path, int]:
            held.enter_context(self._alone())
            self._remove_leftovers()
            earlier.extend(self.list())
            fresh = self._new_name(step)
            fresh.mkdir()
            return fresh, max((one.sequence for one in earlier), default=0) + 1

        def committed(target: Path) -> None:
            self._prune([*earlier, read_checkpoint(target)])

        save.begin(metric, form, prepare)
        if wait:
            return save.finish(committed)
        save.stage(self._stager.staged)
        save.ranks = self._beside()
        self._background.start(lambda: save.finish(committed))
        return save.target

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being saved in the background."""
        return self._background.is_running

    def check(self) -> None:
        """Raise what has failed in the background, if something has."""
        self._background.check()

    def wait(self) -> None:
        """Wait until what is saved in the background is there."""
        self._background.wait()

    def _beside(self) -> Ranks:
        """Return the processes with a group for the thread that saves, which the run's own traffic does not meet."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._apart is None or self._apart[0] is not world:
            self._apart = (world, Ranks.apart())
        return self._apart[1]

    # ------------------------------------------------------------------ finding

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, for all processes; None if none was ever saved.

        Damaged ones are passed over and told in `problems`. If all are damaged this is an error: to start again from
        the first step is for the user to decide.
        """
        found = self._first_whole(lambda: list(reversed(self.list())))
        if found is None and self.problems:
            raise ConfigError(
                f"None of the checkpoints in {self.folder} can be used:\n  "
                + "\n  ".join(self.problems)
                + "\nRestore one from a copy, or move the folder away to start from the first step."
            )
        return found

    def best(self) -> Checkpoint | None:
        """Return the whole checkpoint with the best metric; None if there is none with a metric."""
        return self._first_whole(lambda: self._by_metric(self.list()))

    def verify(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step if every byte of it is as it was saved."""
        self.wait()
        ranks = Ranks.here()
        return self._verified(ranks, ranks.first(lambda: self._named(step)))

    def _named(self, step: int) -> str:
        found = [one for one in self.list() if one.step == step]
        if not found:
            damaged = [problem for problem in self.problems if f"step_{step:08d}" in problem]
            steps = ", ".join(str(one.step) for one in self.list()) or "none"
            raise ConfigError(damaged[0] if damaged else f"{self.folder} has no step {step}; it has {steps}.")
        return found[-1].folder.name

    def list(self) -> Checkpoints:
        """Return the checkpoints in the order in which they were saved; only their descriptions are checked."""
        self.problems = []
        found = []
        for folder in self._folders():
            try:
                found.append(read_checkpoint(folder))
            except ConfigError as error:
                self.problems.append(str(error))
        return sorted(found, key=lambda one: one.sequence)

    def _folders(self) -> Sequence[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if FOLDER_NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be read ({error.strerror}).") from error

    def _first_whole(self, candidates: Callable[[], Checkpoints]) -> Checkpoint | None:
        """Return the first that is whole for all processes; which ones there are, rank 0 says."""
        self.wait()
        ranks = Ranks.here()
        names, self.problems = ranks.first(lambda: ([one.folder.name for one in candidates()], self.problems))
        for name in names:
            try:
                return self._verified(ranks, name)
            except ConfigError as error:
                self.problems.append(str(error))
        return None

    def _verified(self, ranks: Ranks, name: str) -> Checkpoint:
        """Return a checkpoint of which every process has read and checked a share of the files."""
        found: Checkpoints = []

        def work() -> str:
            one = read_checkpoint(self.folder / name)
            by_size = sorted(one.files, key=lambda file: (-one.files[file]["size"], file))
            one.verify(by_size[ranks.rank :: ranks.size])
            found.append(one)
            return own_digest(one.files)

        def compare(seen: Sequence[str]) -> None:
            others = [rank for rank, digest in enumerate(seen) if digest != seen[0]]
            if others:
                raise ConfigError(
                    f"{self.folder / name} is another checkpoint for rank {others[0]} than for rank 0. All processes "
                    "need one folder: use a file system that all machines share."
                )

        ranks.reduced(work, compare)
        return found[0]

    def _by_metric(self, checkpoints: Checkpoints) -> Checkpoints:
        """Return those with a metric, the best first; of equal ones the earlier first."""
        sign = 1 if self.better == "lower" else -1
        measured = [(sign * one.metric, one.sequence, one) for one in checkpoints if one.metric is not None]
        return [one for *_, one in sorted(measured, key=lambda entry: entry[:2])]

    # ------------------------------------------------------------------ the folder, on rank 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Make the folder, and keep other processes from saving in it until the block ends or this process dies."""
        _make_folder(self.folder)
        with open(self.folder / ".lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"Another process is saving checkpoints in {self.folder}. Give each run a folder of its own."
                ) from error
            except OSError:
                pass  # a file system without locks: then it is the user who must not start two runs in one folder
            yield

    def _new_name(self, step: int) -> Path:
        """Return where to write; what is before `.tmp.` is the name that it gets in the end."""
        name, revision = f"step_{step:08d}", 0
        while os.path.lexists(self.folder / name):
            revision += 1
            name = f"step_{step:08d}.{revision}"
        return self.folder / f"{name}.tmp.{secrets.token_hex(4)}"

    def _remove_leftovers(self) -> None:
        """Remove what interrupted saves and removals left."""
        for path in self.folder.iterdir():
            if LEFTOVER_NAME.fullmatch(path.name):
                _remove(path)

    def _prune(self, checkpoints: Checkpoints) -> None:
        newest = checkpoints[-1]
        # The same step once more takes the place of the first; it may be kept as the best only.
        others = [one for one in checkpoints[:-1] if one.step != newest.step]
        kept = {newest.folder, *(one.folder for one in others[max(0, len(others) - self.keep + 1) :])}
        kept |= {one.folder for one in self._by_metric(checkpoints)[:1]}
        for one in checkpoints:
            if one.folder not in kept:
                _remove(one.folder)


def _remove(folder: Path) -> None:
    try:
        # Renamed first, so that no one finds it half there; what a crash leaves goes with the next save.
        doomed = folder.with_name(f"{folder.name.partition('.tmp.')[0]}.tmp.{secrets.token_hex(4)}")
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        warnings.warn(f"{folder}, which is not needed any more, could not be removed: {error}", stacklevel=4)


def _make_folder(folder: Path) -> None:
    """Make a folder, and the folders above it, so that they are still there after a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
