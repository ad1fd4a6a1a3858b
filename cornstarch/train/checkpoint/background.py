"""Saving beside the training: tensors are copied, and written while the next steps run."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cornstarch.train.checkpoint.pieces import Piece


class Background:
    """One piece of work at a time, in a thread; its failure is kept until someone asks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._watched = False

    def start(self, work: Callable[[], object]) -> None:
        """Begin; the work before must have ended."""
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        if not self._watched:
            atexit.register(self._last_words)
            self._watched = True
        # No daemon: at its end the interpreter waits for it.
        self._thread = threading.Thread(target=run, name="cornstarch checkpoint")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what failed; come back at once."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            self._thread = None
        if self._thread is None and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Wait for the end of the work, and raise what failed."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _last_words(self) -> None:
        if self._failure is not None:  # nobody asked any more
            print(f"{type(self._failure).__name__}: {self._failure}", file=sys.stderr)


class Stager:
    """Copies tensors to the CPU, always into the same memory: allocating it pinned takes longer than copying."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, torch.dtype], Tensor] = {}

    def staged(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces as they are now, whatever becomes of the tensors."""
        buffers: dict[tuple[str, str, torch.dtype], Tensor] = {}
        result: list[Piece] = []
        for piece in pieces:
            source = piece.load().detach()
            key = (piece.name, str(piece.box), piece.dtype)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.is_pinned() != source.is_cuda:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=True)
            buffers[key] = buffer
            result.append(replace(piece, load=_giving(buffer)))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._buffers = buffers
        return result


def _giving(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor
