"""The results of steps and runs, metrics.jsonl, and the measurement of throughput and step times.

metrics.jsonl has one JSON object per line. JSON has no NaN and no infinity: they are written as the strings "NaN",
"Infinity" and "-Infinity", and `read_metrics` returns them as numbers. Importing this module does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsFloat

from cornstarch.errors import ConfigError
from cornstarch.files import open_regular, replace_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Status = Literal["finished", "stopped"]
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAYBE_NOT_FINITE = (b'"NaN"', b'Infinity"')


@dataclass
class Position:
    """The progress of a run; a checkpoint stores it beside weights and states."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    batch: int = 0
    """The next batch of the epoch."""
    tokens: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Time spent training, over all starts."""
    broken: int = 0
    too_long: int = 0
    best: float | None = None
    best_step: int | None = None
    evaluations_without_improvement: int = 0
    ended: bool = False
    """Whether the run is complete."""
    losses: tuple[float, ...] = ()
    """Of the last steps, if spikes are looked for (`loop.on_bad_loss`)."""

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Position:
        """Return the position that a checkpoint has; TypeError if a value is of another kind. Unknown keys are left."""
        found = {key: value for key, value in stored.items() if hasattr(cls, key)}
        for key, value in found.items():
            default = getattr(cls, key)
            kinds = (int, float, NoneType) if default is None else list if default == () else type(default)
            if not isinstance(value, kinds) and not (isinstance(default, float) and type(value) is int):
                raise TypeError(f"position.{key} is {value!r:.40}")
        return cls(**{**found, "losses": tuple(map(float, found.get("losses", ())))})

    def assign(self, other: Position) -> None:
        """Become equal to another position."""
        vars(self).update(vars(other))


@dataclass(frozen=True)
class StepTotals:
    """The counts of a step, summed over all ranks: `items` by modality, `broken` and `too_long` samples skipped."""

    trained_tokens: int
    tokens: int
    samples: int
    items: Mapping[str, int]
    broken: int
    too_long: int
    stop: bool
    """Whether a rank received a stop signal."""
    flops: int = 0
    """FLOPs of forward and backward; 0 if they are not counted."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step."""

    step: int
    """Counted from 1."""
    loss: Tensor
    """The mean over all trained tokens of the step, on the device; with several ranks, this rank's summand of it."""
    learning_rate: float
    grad_norm: Tensor | None
    """Before clipping; None if gradients are not clipped."""
    totals: StepTotals
    waited: float = 0.0
    """Seconds that this rank waited for the batch."""
    is_left_out: bool = False
    """Whether the loss was bad and the step does not count (`loop.on_bad_loss`: skip, rewind)."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    status: Status
    """finished, or stopped by a signal (the same call resumes)."""
    step: int
    evaluation: dict[str, Any] | None
    """The measures of the last evaluation."""
    exchanged: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By modality: the measures with its items shuffled between samples."""
    folder: Path = Path()
    report: Path | None = None


# ------------------------------------------------------------------------------------------------ metrics.jsonl


class MetricsFile:
    """The metrics file of a run. The operating system has each line as soon as `append` returns."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file: int | None = None
        try:
            self._open()
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, whole or not at all."""
        assert self._file is not None, "the file is closed"
        line = _encode(record)
        start = os.fstat(self._file).st_size
        try:
            done = 0
            while done < len(line):  # a nearly full disk accepts only a part at first
                done += os.write(self._file, line[done:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, start)
            raise self._failure(error) from error

    def rewind(self, step: int) -> None:
        """Drop the lines after a step, so that a run resumed there logs each step once."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = []
            for line in lines:
                record = _parse_or_none(line)
                at = math.inf if record is None else record.get("step")
                if line.endswith(b"\n") and not (isinstance(at, int | float) and at > step):
                    kept.append(line)
            if len(kept) < len(lines):
                replace_file(self.path, b"".join(kept))
                self.close()
                self._open()
        except OSError as error:
            raise self._failure(error) from error

    def _open(self) -> None:
        """Open the file, and remove a line that a killed run left unfinished: the next one would be appended to it."""
        self._file = open_regular(self.path, os.O_RDWR | os.O_APPEND)
        size = os.fstat(self._file).st_size
        if not size or os.pread(self._file, 1, size - 1) == b"\n":
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if _parse_or_none(content[whole:]) is None:
            os.ftruncate(self._file, whole)
        else:
            os.write(self._file, b"\n")

    def _failure(self, error: OSError) -> ConfigError:
        try:
            free = f" ({shutil.disk_usage(self.path.parent).free / 1e6:,.0f} MB are free there)"
        except OSError:
            free = ""
        return ConfigError(
            f"{self.path} cannot be written: {error.strerror}{free}.\n"
            "  Free some space, or resume the run in another folder: output=<folder>."
        )


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return all lines. Lines that are not JSON objects, such as a truncated last one, are left out."""
    try:
        with open(path, "rb") as file:
            return [record for line in file if (record := _parse_or_none(line)) is not None]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def parse_line(line: bytes) -> dict[str, Any]:
    """Return one line as a dict, with NaN and infinity as numbers. Raise ValueError if it is not a JSON object."""
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, expected an object")
    if any(text in line for text in _MAYBE_NOT_FINITE):
        return {key: value if key == "text" else _map_leaves(_as_number, value) for key, value in record.items()}
    return record


def _parse_or_none(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        return parse_line(line)
    return None


def _encode(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False, default=_as_python)
    except ValueError:  # a number is not finite: rare, so that only now the record is searched for it
        text = json.dumps(_map_leaves(_as_text, record), allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"


def _as_python(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_leaves(function, inner) for key, inner in value.items()}
    return [_map_leaves(function, inner) for inner in value] if isinstance(value, list | tuple) else function(value)


def _as_text(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    number = value if isinstance(value, float) else _as_python(value)
    if not isinstance(number, float) or math.isfinite(number):
        return number
    return next((text for text, known in _NOT_FINITE.items() if known == number), "NaN")


def _as_number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------ throughput


class Throughput:
    """Accumulates steps and reports their loss and speed since the last report; `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pauses = 0
        self.start()

    def start(self, seconds: float = 0.0, tokens: int = 0) -> None:
        """Start counting; a resumed run passes its totals so far."""
        self.tokens = tokens
        self._seconds = seconds
        self._since = self._clock()
        self._start_window(seconds)

    def _start_window(self, seconds: float) -> None:
        self._window_start = seconds
        self._samples = self._tokens = self._trained = 0
        self.steps, self._waited, self._flops = 0, 0.0, 0.0
        self._losses: list[SupportsFloat] = []
        self._items: Counter[str] = Counter()

    @property
    def seconds(self) -> float:
        """Time spent training, without pauses."""
        return self._seconds if self._pauses else self._seconds + self._clock() - self._since

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude a block, such as an evaluation, from the training time. Pauses may be nested."""
        if not self._pauses:
            self._seconds = self.seconds
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._since = self._clock()

    def add(
        self,
        samples: int,
        tokens: int,
        trained_tokens: int,
        loss: SupportsFloat,
        items: Mapping[str, int],
        waited: float = 0.0,
        flops: float = 0.0,
    ) -> None:
        """Count one step: items by modality, seconds that it waited for data, FLOPs, the loss summed over tokens."""
        # A loss that is a tensor must be detached. It is read in `line`: here the CPU must not wait for the GPU.
        self.steps += 1
        self._waited += waited
        self._flops += flops
        self._samples += samples
        self._tokens += tokens
        self._trained += trained_tokens
        self._losses.append(loss)
        self._items.update(items)

    def line(self) -> dict[str, Any]:
        """Return loss and speed of the steps since the last call, and the total of tokens and seconds."""
        total = sum(map(float, self._losses))
        seconds = self.seconds  # read after the losses: reading them waits until the GPU has done the steps
        elapsed = seconds - self._window_start

        def rate(count: float) -> float:
            return count / elapsed if elapsed > 0 else 0.0

        self.tokens += self._tokens
        line = {
            "loss": total / self._trained if self._trained else math.nan,
            "tokens": self.tokens,
            "tokens_per_second": rate(self._tokens),
            "samples_per_second": rate(self._samples),
            "items_per_second": {name: rate(count) for name, count in self._items.items()},
            "seconds": seconds,
            "step_time": elapsed / self.steps if self.steps else 0.0,
            "data_wait": self._waited / self.steps if self.steps else 0.0,
        }
        if self._flops:
            line["flops_per_second"] = rate(self._flops)
        self._start_window(seconds)
        return line


# ------------------------------------------------------------------------------------------------ step times


class StepTimes(NamedTuple):
    """Sums over steps, measured on the device."""

    steps: int
    seconds: float
    """From the end of the previous step to the end of each step."""
    waited: float
    """The part of `seconds` in which the device was idle because a batch was missing."""


class StepClock:
    """Times steps by events on the device's stream, which are read once the GPU has passed them: nothing waits."""

    # The CPU's clock would show when steps were enqueued, not how long they took. `record` records an event; None:
    # steps run on the CPU, whose own clock is exact.
    def __init__(self, record: Callable[[], torch.cuda.Event] | None) -> None:
        self._record = record
        self._previous_end: torch.cuda.Event | None = None
        self._start: torch.cuda.Event | None = None
        # The end of the previous step (None after a pause), start, end, seconds that the process waited for the batch.
        self._pending: deque[tuple[torch.cuda.Event | None, torch.cuda.Event, torch.cuda.Event, float]] = deque()
        self._times = StepTimes(0, 0.0, 0.0)

    @classmethod
    def for_device(cls, device: torch.device) -> StepClock:
        if device.type != "cuda":
            return cls(None)
        import torch

        def record() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(record)

    def start_step(self) -> None:
        """Record that a step is enqueued from here on."""
        self._start = None if self._record is None else self._record()

    def end_step(self, waited: float) -> None:
        """Record that a step was enqueued, and how many seconds the process waited for its batch."""
        if self._record is None or self._start is None:
            return
        end = self._record()
        self._pending.append((self._previous_end, self._start, end, waited))
        self._previous_end, self._start = end, None
        self._collect()

    def pause(self) -> None:
        """Exclude the device's work until the next step."""
        self._previous_end = None

    def read(self) -> StepTimes | None:
        """Return the times of the steps that finished since the last call; None on a CPU."""
        if self._record is None:
            return None
        self._collect()
        times, self._times = self._times, StepTimes(0, 0.0, 0.0)
        return times

    def _collect(self) -> None:
        while self._pending and self._pending[0][2].query():
            (previous_end, start, end, waited), times = self._pending.popleft(), self._times
            # Between two steps the device waits for the batch, and for whatever else the process does.
            idle = waited if previous_end is None else previous_end.elapsed_time(start) / 1000
            seconds = idle + start.elapsed_time(end) / 1000
            self._times = StepTimes(times.steps + 1, times.seconds + seconds, times.waited + min(waited, idle))
