"""A few steps of a run under torch's profiler: a trace to look at, and a table of where the time goes, part by part.

Ranges with the names of parts are entered while those steps run, and only then: around the forwards of encoders,
projectors and the language model, and around what the loop itself does.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import processes
from cornstarch.report.spending import PROFILE, Row, Spending, hidden_note, milliseconds, read_spending
from cornstarch.train.attribution import HEAD, MERGING, RANGE, STEP, WINDOW, attribute
from cornstarch.train.runs import RunFolder

if TYPE_CHECKING:
    from cornstarch.train.trainer import Trainer

WARM_UP, STEPS = 3, 3  # steps since the start of the run
_LANGUAGE_MODEL, _WHOLE = "language model", "model"

Batch = TypeVar("Batch")
Result = TypeVar("Result")
Given = ParamSpec("Given")
_is_recording = False


def ranged(name: str) -> AbstractContextManager[Any]:
    """Return the context in which the loop does something: a range of the profile, nothing if there is none."""
    return record_function(RANGE + name) if _is_recording else nullcontext()


def as_range(name: str, function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a function whose calls are ranges of the profile."""

    @functools.wraps(function)
    def in_range(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with ranged(name):
            return function(*args, **kwargs)

    return in_range


def ranged_over(name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield what is given; the time that each takes to come is a range of the profile."""
    coming = iter(batches)
    while True:
        with ranged(name):
            batch = next(coming, None)
        if batch is None:
            return
        yield batch


def trace_name(rank: int, ranks: int) -> str:
    """Return the file that a process writes its trace to."""
    return "profile-trace.json.gz" if ranks == 1 else f"profile-trace-{rank}.json.gz"


class StepProfiler:
    """Profiles some steps of a run. All processes must call its methods at the same steps.

    They are the fourth to the sixth since the start: before them kernels are loaded, layers compiled and memory taken.
    In a shorter run they are its last ones. An evaluation or a checkpoint ends the recording.

    Args:
        trainer: What is profiled, ready for its first step.
        pause: Leaves a block out of the speed of the run.
        note: Says something.
    """

    def __init__(
        self, trainer: Trainer, pause: Callable[[], AbstractContextManager[None]], note: Callable[[str], None]
    ) -> None:
        self._pause, self._note = pause, note
        self._folder: RunFolder = trainer.folder
        self._device = trainer.placement.device
        self._ranges = list(_ranges(trainer))
        self._at, left = trainer.position.step, trainer.total_steps - trainer.position.step
        self._first = self._at + min(WARM_UP + 1, left)
        self._last = self._at + min(WARM_UP + STEPS, left)
        self._notes: list[str] = []
        if left <= WARM_UP:
            self._notes.append(f"The run has {left} steps: what is done once, at its start, is in these times.")
        self._profile: profile | None = None
        self._is_counted = False
        self._held = ExitStack()
        self._step: record_function | None = None
        self._steps: list[int] = []
        self.spending: Spending | None = None
        """What was found, in the first process."""

    # ------------------------------------------------------------------ the steps

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches; a step lasts from when its batch is asked for until `stepped`."""
        coming = iter(batches)
        while True:
            self._begins(self._at + 1)
            batch = next(coming, None)
            if batch is None:
                return
            yield batch

    def _begins(self, step: int) -> None:
        if self.is_done or self._step is not None:
            return
        if self._profile is None and step >= self._first - 1:
            # A step before them leads in: the profiler takes its time at its start, and a GPU has to have work to do.
            self._start()
        if self._profile is not None and not self._is_counted and step >= self._first:
            self._held.enter_context(record_function(RANGE + WINDOW))
            self._is_counted = True
        if self._profile is not None:
            self._step = record_function(f"{RANGE}{STEP} {step}")
            self._step.__enter__()

    @property
    def is_done(self) -> bool:
        """Whether no step will be recorded any more."""
        return self._profile is None and bool(self._steps)

    def stepped(self, step: int) -> None:
        """Note that a step was done and told."""
        self._at = step
        if self._step is None:
            return
        self._end_step()
        if self._is_counted:
            self._steps.append(step)
            if step >= self._last:
                self._end()

    def interrupt(self) -> None:
        """End the recording, if there is one: something comes that is no step."""
        if self._profile is not None and self._steps:
            self._end()
        else:
            self.close()

    def finish(self) -> Table | None:
        """Return where the time goes; None if no step was recorded, or another process tells it."""
        self.interrupt()
        if not self._steps:
            self._note("--profile: there was no step to profile.")
        return None if self.spending is None else spending_table(self.spending)

    def close(self) -> None:
        """Leave no profiler running, and forget what it has recorded."""
        if self._step is not None:
            self._end_step()
        self._held.close()
        self._profile, self._is_counted = None, False

    # ------------------------------------------------------------------ the profiler

    def _start(self) -> None:
        """Begin to record, with nothing left to do from before."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints when it begins and ends
        self._wait()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        self._held.callback(self._profile.stop)
        self._held.enter_context(_recording(self._ranges))

    def _end_step(self) -> None:
        assert self._step is not None
        self._step.__exit__(None, None, None)
        self._step = None

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _end(self) -> None:
        """Wait until all is done that was recorded, and write it down."""
        self._wait()
        recorded = self._profile
        assert recorded is not None
        self.close()
        with self._pause():
            self._write(recorded)

    # ------------------------------------------------------------------ the files

    def _write(self, recorded: profile) -> None:
        """Write this process's trace; the first process writes where the time of all of them goes."""
        found = [one for one in processes.gather_data(self._own(recorded)) if one is not None]
        if not found or processes.rank() != 0:
            return
        notes = [*self._notes]
        if len(found) < processes.size():
            notes.append(f"{processes.size() - len(found)} processes could not write their traces.")
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "the CPU"
        data = {"version": 1, "steps": self._steps, "device": device, "notes": notes, "ranks": found}
        try:
            self._folder.write(PROFILE, json.dumps(data, indent=1) + "\n")
        except ConfigError as error:  # a full disk, say: no reason to stop a run
            self._note(f"The profile could not be written: {error}")
        self.spending = read_spending(data)
        self._note(f"profiled: {self._folder / trace_name(0, processes.size())}, for chrome://tracing and Perfetto")

    def _own(self, recorded: profile) -> dict[str, Any] | None:
        """Write what this process did; return where its time went, None if that could not be."""
        rank = processes.rank()
        unfinished = self._folder / f".profile-{rank}.unfinished.json"
        try:
            try:
                recorded.export_chrome_trace(str(unfinished))
                content = unfinished.read_bytes()
            finally:
                unfinished.unlink(missing_ok=True)
            self._folder.write(trace_name(rank, processes.size()), gzip.compress(content, 5))
        except (ConfigError, OSError) as error:
            self._note(f"The trace of the profile could not be written: {error}")
            return None
        parts = list(dict.fromkeys(name for name, _ in self._ranges))
        return {"rank": rank, **attribute(json.loads(content), parts, len(self._steps))}


# ---------------------------------------------------------------------------------------------------- ranges


def _ranges(trainer: Trainer) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose forwards are ranges, each with the name of its part, in the order of the table."""
    models: list[nn.Module] = [trainer.model]
    if trainer.pipeline is not None:  # stages have copies of it, where one process has several
        models += [program.model for program in trainer.pipeline.programs.values()]
    encoders = [(name, one) for model in models if isinstance(model, MultimodalModel) for name, one in _encoders(model)]
    seen: set[int] = set()
    for name, module in [*encoders, *(pair for model in models for pair in _inside(model))]:
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _encoders(model: MultimodalModel) -> Iterator[tuple[str, nn.Module]]:
    for name, encoder in model.encoders.items():
        yield f"{name} encoder", encoder
        yield f"{name} encoder", unwrap(encoder.module)
        if encoder.projector is not None:
            yield f"{name} projector", unwrap(encoder.projector)


def _inside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, ModalEncoderModule):
        return  # of the multimodal model that it belongs to
    name = _WHOLE
    if isinstance(model, MultimodalModel):
        if model.encoders:
            yield MERGING, model
        model, name = model.language_model, _LANGUAGE_MODEL
    whole = unwrap(model)
    body = getattr(whole, "base_model", None)  # of a transformers model: what is under its head
    if isinstance(body, nn.Module) and body is not whole:
        yield name, body
        yield HEAD, whole
    else:
        yield name, whole


@contextmanager
def _recording(ranges: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Run a block in which the forwards of modules are ranges, and `ranged` gives such."""
    global _is_recording
    with ExitStack() as changed:
        for name, module in ranges:
            changed.enter_context(_forward_ranged(name, module))
        _is_recording = True
        try:
            yield
        finally:
            _is_recording = False


@contextmanager
def _forward_ranged(name: str, module: nn.Module) -> Iterator[None]:
    """Run a block in which a module's forward is a range. No hook: adapters call a model's forward past its hooks."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = as_range(name, module.forward)
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if own is not None:
            module.__dict__["forward"] = own


# ---------------------------------------------------------------------------------------------------- the table


def spending_table(read: Spending) -> Table:
    """Return where the time goes, to be printed."""
    several = len(read.ranks) > 1
    notes = "\n".join(note for note in (*read.notes, hidden_note(read)) if note)
    title = f"where the time goes: {read.title()}"
    table = Table(title=title, title_justify="left", caption=notes or None, caption_justify="left")
    table.add_column("ms per step", no_wrap=True)
    for name in ("forward", "backward", "total", "share", *(("least", "most") if several else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in read.rows():
        extremes = [milliseconds(one) or "0" for one in read.extremes(row.name)] if several else []
        table.add_row(row.name, *_cells(row), f"{row.seconds / read.seconds:.1%}", *extremes)
        for kind in row.kinds.values():
            table.add_row(f"  {kind.name}", *_cells(kind), style="dim")
    table.add_section()
    table.add_row("a step", "", "", milliseconds(read.seconds), "")
    return table


def _cells(row: Row) -> list[str]:
    return [milliseconds(one) for one in (row.forward, row.backward, row.seconds)]


__all__ = ["StepProfiler", "as_range", "ranged", "ranged_over", "spending_table", "trace_name"]
