"""What looks at the steps of a run beside the lines that it writes: a profile, a timeline, what is held in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.table import Table

from cornstarch.train.data.loader import StepBatch
from cornstarch.train.footprint import MemoryWatch
from cornstarch.train.profiling import StepProfiler
from cornstarch.train.timeline import TimelineRecorder


class Observers:
    """Those that a run has. All processes must call its methods at the same steps.

    Args:
        memory: Compares what is held with what was estimated.
        recorder: Of a pipeline: when its stages did what.
        profiler: Where the time goes, if that was asked for.
        note: Tells the user something.
    """

    def __init__(
        self,
        memory: MemoryWatch,
        recorder: TimelineRecorder | None,
        profiler: StepProfiler | None,
        note: Callable[[str], None],
    ) -> None:
        self._memory, self._recorder, self._profiler, self._note = memory, recorder, profiler, note

    def over(self, batches: Iterable[StepBatch]) -> Iterable[StepBatch]:
        """Return the batches; the wait for one is part of its step in a profile."""
        return batches if self._profiler is None else self._profiler.over(batches)

    @property
    def want_single_steps(self) -> bool:
        """Whether each step is to draw its own batch, and no other."""
        return self._profiler is not None and not self._profiler.is_done

    def begins(self) -> None:
        """Note that the passes of a step begin."""
        if self._recorder is not None:
            self._recorder.begins()

    def stepped(self, step: int, portions: int, is_logged: bool) -> None:
        """Note that a step was done and told."""
        if self._profiler is not None:
            self._profiler.stepped(step)
        if self._recorder is not None:
            self._recorder.stepped(step, portions, is_logged)
        if (held := self._memory.line()) is not None:
            self._note(held)

    def interrupt(self) -> None:
        """Note that something comes that is no step."""
        if self._profiler is not None:
            self._profiler.interrupt()

    def finish(self) -> Table | None:
        """Write down what was seen; return where the time went, if that was asked for."""
        if self._recorder is not None:
            self._recorder.finish()
        return None if self._profiler is None else self._profiler.finish()


__all__ = ["Observers"]
