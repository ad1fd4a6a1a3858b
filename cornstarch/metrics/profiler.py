"""Profiles a few steps of a run with torch's profiler: a trace, and a table of time by part of the model.

While those steps run, and only then, named ranges are recorded: around the forwards of encoders, projectors and the
language model, and around the work of the training loop.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from cornstarch.config.run_folder import RunFolder
from cornstarch.errors import ConfigError
from cornstarch.metrics.attribution import HEAD, MERGING, RANGE, STEP, WINDOW, attribute
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel import distributed
from cornstarch.report import time_breakdown
from cornstarch.report.time_breakdown import ProfileBreakdown, format_milliseconds

WARM_UP, STEPS = 3, 3  # steps since the start of the run

Batch = TypeVar("Batch")
Result = TypeVar("Result")
Given = ParamSpec("Given")
_is_recording = False


def record_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that is a range of the profile; it does nothing when no profile is recorded."""
    return record_function(RANGE + name) if _is_recording else nullcontext()


def record_calls(name: str, function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a function whose calls are ranges of the profile."""

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with record_range(name):
            return function(*args, **kwargs)

    return call


def record_waits(name: str, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches; the time to get each is a range of the profile."""
    iterator = iter(batches)
    while True:
        with record_range(name):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def trace_name(rank: int, ranks: int) -> str:
    return "profile-trace.json.gz" if ranks == 1 else f"profile-trace-{rank}.json.gz"


class StepProfiler:
    """Profiles some steps of a run. All ranks must call its methods at the same steps.

    These are the fourth to the sixth step since the start: before them kernels are loaded, layers compiled and memory
    allocated. A shorter run profiles its last steps. An evaluation or a checkpoint ends the recording.
    """

    def __init__(self, trainer: Any) -> None:
        self._pause, self._log = trainer.logger.pause, trainer.logger.log
        self._folder: RunFolder = trainer.folder
        self._device = trainer.placement.device
        self._modules = _list_parts(trainer)
        self._steps_done, left = trainer.position.step, trainer.total_steps - trainer.position.step
        self._first = self._steps_done + min(WARM_UP + 1, left)
        self._last = self._steps_done + min(WARM_UP + STEPS, left)
        self._notes: list[str] = []
        if left <= WARM_UP:
            self._notes.append(f"The run has {left} steps: these times include the one-time work at its start.")
        self._profile: profile | None = None
        self._is_in_window = False
        self._contexts = ExitStack()
        self._step: record_function | None = None
        self._steps: list[int] = []
        self.spending: ProfileBreakdown | None = None
        """The result, on rank 0."""

    def start_step(self) -> None:
        """Start the range of a step, before its batch is drawn; it lasts until `end_step`."""
        step = self._steps_done + 1
        if self.is_done or self._step is not None:
            return
        if self._profile is None and step >= self._first - 1:
            # One step early: starting the profiler takes time, and the GPU must be busy when the first step begins.
            self._start()
        if self._profile is not None:
            if not self._is_in_window and step >= self._first:
                self._contexts.enter_context(record_function(RANGE + WINDOW))
                self._is_in_window = True
            self._step = record_function(f"{RANGE}{STEP} {step}")
            self._step.__enter__()

    @property
    def is_done(self) -> bool:
        return self._profile is None and bool(self._steps)

    def end_step(self, step: int) -> None:
        """End the range of a step, after it was logged."""
        self._steps_done = step
        if self._step is None:
            return
        self._close_step()
        if self._is_in_window:
            self._steps.append(step)
            if step >= self._last:
                self._stop()

    def interrupt(self) -> None:
        """End the recording, if there is one, before work that belongs to no step."""
        if self._profile is not None and self._steps:
            self._stop()
        else:
            self.close()

    def finish(self) -> Table | None:
        """Return the table of time; None if no step was recorded, and on all ranks but 0."""
        self.interrupt()
        if not self._steps:
            self._log("--profile: there was no step to profile.")
        return None if self.spending is None else build_time_table(self.spending)

    def close(self) -> None:
        """Stop the profiler and discard the recording."""
        self._close_step()
        self._contexts.close()
        self._profile, self._is_in_window = None, False

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or Kineto prints when it starts and stops
        self._synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        self._contexts.callback(self._profile.stop)
        self._contexts.enter_context(_record_forwards(self._modules))

    def _close_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _stop(self) -> None:
        self._synchronize()
        recorded = self._profile
        assert recorded is not None
        self.close()
        with self._pause():
            self._write(recorded)

    def _write(self, recorded: profile) -> None:
        """Write this rank's trace; rank 0 writes the times of all ranks."""
        ranks = distributed.world_size()
        found = [one for one in distributed.all_gather_json(self._write_trace(recorded)) if one is not None]
        if not found or distributed.rank() != 0:
            return
        missing = [f"{ranks - len(found)} processes could not write their traces."] if len(found) < ranks else []
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "the CPU"
        data = {"version": 1, "steps": self._steps, "device": device, "notes": self._notes + missing, "ranks": found}
        try:
            self._folder.write(time_breakdown.PROFILE, json.dumps(data, indent=1) + "\n")
        except ConfigError as error:  # a full disk, say, must not stop the run
            self._log(f"The profile could not be written: {error}")
        self.spending = time_breakdown.read_time_breakdown(data)
        self._log(f"profiled: {self._folder / trace_name(0, ranks)}, for chrome://tracing and Perfetto")

    def _write_trace(self, recorded: profile) -> dict[str, Any] | None:
        """Write this rank's trace; return where its time went, or None if the trace could not be written."""
        rank = distributed.rank()
        unfinished = self._folder / f".profile-{rank}.unfinished.json"
        try:
            try:
                recorded.export_chrome_trace(str(unfinished))
                content = unfinished.read_bytes()
            finally:
                unfinished.unlink(missing_ok=True)
            self._folder.write(trace_name(rank, distributed.world_size()), gzip.compress(content, 5))
        except (ConfigError, OSError) as error:
            self._log(f"The trace of the profile could not be written: {error}")
            return None
        parts = list(dict.fromkeys(name for name, _ in self._modules))
        return {"rank": rank, **attribute(json.loads(content), parts, len(self._steps))}


def _list_parts(trainer: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules whose forwards are ranges, each with the name of its part, in the order of the table."""
    models: list[nn.Module] = [trainer.model]
    if trainer.pipeline is not None:  # a rank with several stages has a copy of the model for each
        models += [program.model for program in trainer.pipeline.programs.values()]
    found: list[tuple[str, nn.Module]] = []
    for model in models:
        for name, encoder in model.encoders.items() if isinstance(model, MultimodalModel) else ():
            found += [(f"{name} encoder", encoder), (f"{name} encoder", unwrap(encoder.module))]
            if encoder.projector is not None:
                found.append((f"{name} projector", unwrap(encoder.projector)))
    found += [pair for model in models for pair in _body_and_head(model)]
    first_names: dict[nn.Module, str] = {}
    for name, module in found:
        first_names.setdefault(module, name)
    return [(name, module) for module, name in first_names.items()]


def _body_and_head(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, ModalEncoderModule):
        return  # listed with the multimodal model that it belongs to
    name = "model"
    if isinstance(model, MultimodalModel):
        if model.encoders:
            yield MERGING, model
        model, name = model.language_model, "language model"
    whole = unwrap(model)
    body = getattr(whole, "base_model", None)  # of a transformers model: the model without its head
    if isinstance(body, nn.Module) and body is not whole:
        yield name, body
        yield HEAD, whole
    else:
        yield name, whole


@contextmanager
def _record_forwards(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Make the forwards of modules ranges, and enable `record_range`, while a block runs."""
    # Forwards are replaced rather than hooked, because adapters call a model's forward past its hooks.
    global _is_recording
    with ExitStack() as restore:
        for name, module in modules:
            own = {key: value for key, value in vars(module).items() if key == "forward"}
            restore.callback(vars(module).update, own)
            restore.callback(vars(module).pop, "forward")  # runs before the update: callbacks are last in, first out
            vars(module)["forward"] = record_calls(name, module.forward)
        _is_recording = True
        try:
            yield
        finally:
            _is_recording = False


def build_time_table(read: ProfileBreakdown) -> Table:
    """Return a table of where the time goes."""
    several = len(read.ranks) > 1
    hidden = time_breakdown.describe_hidden_communication(read)
    notes = "\n".join(note for note in (*read.notes, hidden) if note)
    title = f"where the time goes: {read.title()}"
    table = Table(title=title, title_justify="left", caption=notes or None, caption_justify="left")
    table.add_column("ms per step", no_wrap=True)
    for name in ("forward", "backward", "total", "share", *(("least", "most") if several else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for row in read.rows():
        extremes = [format_milliseconds(one) or "0" for one in read.extremes(row.name)] if several else []
        times = map(format_milliseconds, (row.forward, row.backward, row.seconds))
        table.add_row(row.name, *times, f"{row.seconds / read.seconds:.1%}", *extremes)
        for kind in row.kinds.values():
            times = map(format_milliseconds, (kind.forward, kind.backward, kind.seconds))
            table.add_row(f"  {kind.name}", *times, style="dim")
    table.add_section()
    table.add_row("a step", "", "", format_milliseconds(read.seconds), "")
    return table
