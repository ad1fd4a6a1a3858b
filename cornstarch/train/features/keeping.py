"""Keeping what frozen encoders make, while a run trains."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from cornstarch.models.multimodal_language_model.items import fresh_lengths
from cornstarch.train.config import RunConfig
from cornstarch.train.features.key import encoder_key, key_digest
from cornstarch.train.features.lookup import FeatureLookup
from cornstarch.train.features.refusal import check_task, try_encoder
from cornstarch.train.features.space import Space
from cornstarch.train.features.store import FeatureStore
from cornstarch.train.precision import Placement
from cornstarch.train.tasks.conversation import ConversationTask
from cornstarch.train.tasks.task import Task

FOLDER = "feature_cache"
"""Where features are kept by default, beside the run's folder."""
_MOST_WAITING = 1 << 30  # bytes that wait to be written before training waits, too


def features_folder(config: RunConfig) -> Path:
    """Return where a run keeps features."""
    return config.features.folder or config.folder.absolute().parent / FOLDER


@contextmanager
def kept_features(task: Task, config: RunConfig, placement: Placement) -> Iterator[KeptFeatures | None]:
    """Keep what a task's encoders make, if the run asks for it; at the end of the block all of it is written."""
    if not config.features.cache:
        yield None
        return
    kept = KeptFeatures(check_task(task), config, placement)
    try:
        yield kept
    finally:
        kept.close()


class KeptFeatures:
    """The features of a run's encoders: where they are, how many were found, and what writes the others.

    The model's encoders and the collator are told of it. Make it when the model is where it computes, in the precision
    in which it computes, and before it is sharded.
    """

    def __init__(self, task: ConversationTask, config: RunConfig, placement: Placement) -> None:
        self.folder = features_folder(config)
        self._space = Space(self.folder, config.features.limit_bytes)
        self._task = task
        self._writer = _Writer()
        stores: dict[str, FeatureStore] = {}
        # What an item is refused for when it is read must be the same for one that is not read.
        reading = {"max_pixels": config.data.max_pixels, "too_long": config.data.too_long}
        for name, encoder in task.model.encoders.items():
            try_encoder(task, name, placement)
            processor = task.collator.processor.encoder_processors[name]
            key = encoder_key(encoder.module, processor, reading, placement)
            stores[name] = FeatureStore(self._space, key_digest(key))
        self._keepers = {name: _Keeper(store, self._writer, placement) for name, store in stores.items()}
        for name, encoder in task.model.encoders.items():
            encoder.keep = self._keepers[name]
        task.collator.features = FeatureLookup(stores)

    @property
    def hits(self) -> int:
        """Items whose features were there."""
        return sum(keeper.hits for keeper in self._keepers.values())

    @property
    def misses(self) -> int:
        """Items that were encoded."""
        return sum(keeper.misses for keeper in self._keepers.values())

    @property
    def used(self) -> int:
        """Bytes of all files in the folder."""
        return self._space.used

    @property
    def problem(self) -> str | None:
        """Why features are no longer written, if so: a full disk, say. Training goes on without them."""
        return self._writer.problem

    def told(self) -> dict[str, Any]:
        """Return what a run says about it: its items since it was started, and the folder as it is now."""
        return {
            "folder": str(self.folder),
            "hits": self.hits,
            "misses": self.misses,
            "bytes": self.used,
            "limit": self._space.limit,
            "problem": self.problem,
        }

    def wait(self) -> None:
        """Wait until everything is written that was encoded so far."""
        self._writer.wait()

    def rest(self) -> None:
        """Look nothing up any more: from now on all items are encoded."""
        self._task.collator.features = None

    def close(self) -> None:
        """Write what is left, and leave the model and the collator as they were."""
        self.rest()
        for encoder in self._task.model.encoders.values():
            encoder.keep = None
        self._writer.close()


class _Keeper:
    """What an encoder tells of its items."""

    def __init__(self, store: FeatureStore, writer: _Writer, placement: Placement) -> None:
        self._store, self._writer = store, writer
        # A projector begins with a matrix, for which autocast rounds tokens: rounded before, they come out the same.
        self._dtype = None if placement.precision == "fp32" else placement.dtype
        self.hits = self.misses = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> _Keeper:
        return self  # files and a thread are not copied with a model

    def __call__(self, known: Mapping[str, Any], fresh: Tensor | None) -> None:
        """Count the items, and have those written that were encoded."""
        hits = sum(known["is_known"])
        self.hits += hits
        self.misses += len(known["is_known"]) - hits
        if fresh is None:
            return
        digests = [d for d, is_known in zip(known["digests"], known["is_known"], strict=True) if not is_known]
        tokens = fresh.detach() if self._dtype is None else fresh.detach().to(self._dtype)
        ready = _copied(tokens)
        lengths = fresh_lengths(known)

        def write() -> None:
            for digest, item in zip(digests, ready().split(lengths), strict=True):
                self._store.save(digest, item)

        self._writer.add(write, tokens.nbytes)


def _copied(tokens: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; return what waits for it."""
    if tokens.device.type != "cuda":
        # It is the encoder's own output, which nothing changes later but something might.
        copy = tokens.cpu().clone()
        return lambda: copy
    copy = tokens.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return copy

    return wait


class _Writer:
    """A thread that writes; what it cannot write is left out, and the reason is remembered."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._waiting = self._bytes = 0
        self._thread: threading.Thread | None = None
        self.problem: str | None = None

    def add(self, write: Callable[[], None], size: int) -> None:
        """Have something written; wait first if too much waits already."""
        if self.problem is not None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="features", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes or self._bytes + size <= _MOST_WAITING)
            self._waiting += 1
            self._bytes += size
        self._tasks.put((write, size))

    def wait(self) -> None:
        """Wait until all is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self._thread is None:
            return
        atexit.unregister(self.close)
        self._tasks.put(None)
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            write, size = task
            try:
                if self.problem is None:
                    write()
            except Exception as error:  # a full disk, say: training goes on without it
                self.problem = f"{type(error).__name__}: {error}"
            finally:
                with self._changed:
                    self._waiting -= 1
                    self._bytes -= size
                    self._changed.notify_all()
