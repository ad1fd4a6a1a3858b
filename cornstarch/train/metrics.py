"""What is measured while training, one JSON object per line; and how fast it goes. No torch.

The file is strict JSON, which knows no NaN and no infinity: they are written as the texts "NaN", "Infinity" and
"-Infinity", and `read_metrics` returns them as numbers.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsFloat

from cornstarch.errors import ConfigError
from cornstarch.files import sync

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAYBE_NOT_FINITE = (b'"NaN"', b'Infinity"')


class MetricsFile:
    """The file of a run's metrics; every line is with the system as soon as `append` returns."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file: int | None = None
        try:
            self._file = self._opened()
            self._end_torn_line()
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it can be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, whole or not at all."""
        assert self._file is not None, "the file is closed"
        line = _written(record)
        start = os.fstat(self._file).st_size
        try:
            done = 0
            while done < len(line):  # a disk that is nearly full takes a part first
                done += os.write(self._file, line[done:])
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, start)
            raise self._failure(error) from error

    def rewind(self, step: int) -> None:
        """Drop what was logged after a step, for a run that goes on from there: then each step is there once."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _is_until(line, step)]
            if len(kept) < len(lines):
                self._replace(b"".join(kept))
        except OSError as error:
            raise self._failure(error) from error

    def _opened(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _end_torn_line(self) -> None:
        """Cut off a line that a run which was killed has left unfinished: the next would be glued to it."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if not size or os.pread(self._file, 1, size - 1) == b"\n":
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if _parsed(content[whole:]) is None:
            os.ftruncate(self._file, whole)
        else:
            os.write(self._file, b"\n")

    def _replace(self, content: bytes) -> None:
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync(self.path.parent)
        self.close()
        self._file = self._opened()

    def _failure(self, error: OSError) -> ConfigError:
        try:
            left = f" ({shutil.disk_usage(self.path.parent).free / 1e6:,.0f} MB are free there)"
        except OSError:
            left = ""
        return ConfigError(
            f"{self.path} cannot be written: {error.strerror}{left}.\n"
            "  Make room, or let the run go on in another folder: output=<folder>."
        )


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return all lines; what is no JSON object, like a last line that was cut off, is left out."""
    try:
        with open(path, "rb") as file:
            return [record for line in file if (record := _parsed(line)) is not None]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def parse_line(line: bytes) -> dict[str, Any]:
    """Return one line as an object with numbers that may be NaN or infinite; ValueError if it is none."""
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, expected an object")
    if any(text in line for text in _MAYBE_NOT_FINITE):
        return {key: value if key == "text" else _as_number(value) for key, value in record.items()}
    return record


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        return parse_line(line)
    except ValueError:
        return None


def _is_until(line: bytes, step: int) -> bool:
    record = _parsed(line)
    return record is not None and line.endswith(b"\n") and not _after(record.get("step"), step)


def _after(found: object, step: int) -> bool:
    return isinstance(found, int | float) and found > step


def _written(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:  # a number that is not finite: rare, so that it is looked for only now
        text = json.dumps(_as_text(record), allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    """Return a number of numpy or torch as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _as_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_text(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(inner) for inner in value]
    if value is None or isinstance(value, str | int):
        return value
    number = value if isinstance(value, float) else _plain(value)
    if not isinstance(number, float) or math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _as_number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_number(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_number(inner) for inner in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------ speed


class Throughput:
    """Adds up what steps do, and says how fast it went since it was last asked.

    Args:
        clock: Returns seconds; it must never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pauses = 0
        self.start()

    def start(self, seconds: float = 0.0, tokens: int = 0) -> None:
        """Begin to count now; a resumed run says how far it was."""
        self.tokens = tokens
        self._seconds = seconds
        self._since = self._clock()
        self._begin_window(seconds)

    def _begin_window(self, seconds: float) -> None:
        self._window_start = seconds
        self._samples = self._tokens = self._trained = 0
        self.steps, self._waited, self._flops = 0, 0.0, 0.0
        self._losses: list[SupportsFloat] = []
        self._items: dict[str, int] = {}

    @property
    def seconds(self) -> float:
        """Time spent training, without pauses."""
        return self._seconds if self._pauses else self._seconds + self._clock() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that something else than training takes."""
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
        """Count one step.

        Args:
            samples: In the step.
            tokens: All, trained on or not.
            trained_tokens: Those that the loss is over.
            loss: The sum over the trained tokens. A tensor must be detached; it is not read before `line`, so that a
                GPU need not be waited for.
            items: By modality, images or sounds.
            waited: Seconds for the step's data.
            flops: What the model multiplied; 0 if that is not counted.
        """
        self.steps += 1
        self._waited += waited
        self._flops += flops
        self._samples += samples
        self._tokens += tokens
        self._trained += trained_tokens
        self._losses.append(loss)
        for name, count in items.items():
            self._items[name] = self._items.get(name, 0) + count

    def line(self) -> dict[str, Any]:
        """Return what is said about the steps since the last line: their loss and speed, and all tokens and seconds."""
        total = sum(map(float, self._losses))
        seconds = self.seconds  # read after the losses: until they are there, the steps are not done
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
        self._begin_window(seconds)
        return line


__all__ = ["MetricsFile", "Throughput", "parse_line", "read_metrics"]
