"""How far a run is, on the screen: a bar in a terminal, else a plain line for each line of metrics. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

Mode = Literal["auto", "bar", "lines", "none"]

_REFRESHES = 5  # per second
_REMEMBERED = 60  # moments, a second or more apart, from which the time that is left is told
_GAP = "  "
_BAR = (8, 40)  # the narrowest and the widest
_ITEMS = {"vision": "images"}
_NOTEWORTHY = 0.02  # the share of a step that is waited for data
_FLOPS = (("PFLOP/s", 5), ("TFLOP/s", 4), ("GFLOP/s", 3))


class Progress:
    """Shows how far a run is.

    Args:
        mode: auto: a bar if the console is a terminal, else lines.
        total: Steps of the run, if they are known.
        done: Steps that were done before.
        console: Default: standard output.
        clock: Returns seconds; it must never go back.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        total: int | None = None,
        done: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console if console is not None else Console()
        is_screen = self.console.is_terminal and not self.console.is_dumb_terminal
        self.mode: Mode = mode if mode != "auto" else ("bar" if is_screen else "lines")
        self._total, self._step = total, done
        self._record: Mapping[str, Any] = {}
        self._pace = _Pace(done, clock)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._pace.begin(self._step)
        if self.mode == "bar":
            self._live = Live(_Line(self), console=self.console, refresh_per_second=_REFRESHES)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, step: int) -> None:
        """Note that a step is done; what is shown follows by itself."""
        self._step = step
        self._pace.add(step)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Show a line of metrics."""
        self._record = record
        self._step = record.get("step", self._step)
        if self.mode == "lines":
            self._print(_GAP.join([self._place(), *self._facts()]))

    def note(self, text: str) -> None:
        """Say something else, above the bar."""
        if self.mode != "none":
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        self.console.file.flush()

    # ------------------------------------------------------------------ what is shown

    def _place(self) -> str:
        return f"step {self._step:,}" if self._total is None else f"step {self._step:,}/{self._total:,}"

    def _facts(self) -> Iterator[str]:
        """Yield what is known, the most important first."""
        record = self._record
        if (loss := _number(record.get("loss"))) is not None:
            yield f"loss {loss:.4f}" if abs(loss) < 1e4 else f"loss {loss:.3g}"
        if (rate := _number(record.get("learning_rate"))) is not None:
            yield f"lr {rate:.3g}"
        if (rate := _number(record.get("tokens_per_second"))) is not None:
            yield f"{_rate(rate)} tokens/s"
        if (lasts := _number(record.get("step_time"))) is not None:
            waits = (_number(record.get("data_wait")) or 0.0) / lasts if lasts else 0.0
            yield f"{_lasting(lasts)}/step" + (f" ({waits:.0%} for data)" if waits >= _NOTEWORTHY else "")
        if (share := _number(record.get("mfu"))) is not None:
            yield f"{share:.1%} MFU"
        if (rate := _number(record.get("flops_per_second"))) is not None:
            yield _flops(rate)
        items = record.get("items_per_second")
        for name, value in items.items() if isinstance(items, Mapping) else ():
            if (rate := _number(value)) is not None:
                yield f"{_rate(rate)} {_ITEMS.get(name, name)}/s"
        if (memory := _number(record.get("memory"))) is not None:
            yield f"{memory / 1e9:.1f} GB"
        if (left := self._left()) is not None:
            yield f"eta {_duration(left)}"

    def _left(self) -> float | None:
        if self._total is None or (pace := self._pace.seconds_per_step()) is None:
            return None
        return pace * max(self._total - self._step, 0)


class _Pace:
    """How long steps have taken lately, with everything that came between them."""

    def __init__(self, step: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self.begin(step)

    def begin(self, step: int) -> None:
        """Count from now."""
        self._seen.clear()
        self._last = (self._clock(), step)
        self._seen.append(self._last)

    def add(self, step: int) -> None:
        """Note when a step was done; of every second only one is remembered."""
        self._last = (self._clock(), step)
        if self._last[0] - self._seen[-1][0] >= 1:
            self._seen.append(self._last)

    def seconds_per_step(self) -> float | None:
        """Return the mean over the last minute, or the last steps if they are longer; None before the first."""
        (start, first), (end, last) = self._seen[0], self._last
        return (end - start) / (last - first) if last > first else None


class _Line:
    """The one line of the bar, cut to the width there is: what matters least is left out, then the bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._progress
        width = options.max_width - 1  # a full line would make some terminals go to the next
        place, total = shown._place(), shown._total
        least = 0 if total is None else len(_GAP) + _BAR[0]
        text = _GAP.join(["", *_fitting(list(shown._facts()), width - len(place) - least)])
        line = Text(place, no_wrap=True, overflow="crop", end="")
        room = min(width - len(place) - len(text) - len(_GAP), _BAR[1])
        if total is not None and room >= _BAR[0]:
            done = room * min(shown._step, total) // max(total, 1)
            full, empty = "#-" if options.ascii_only else "━─"
            line.append(_GAP).append(full * done, "bar.complete").append(empty * (room - done), "bar.back")
        line.append(text).truncate(max(width, 1))
        yield line


def _fitting(facts: list[str], width: int) -> list[str]:
    """Return the facts that fit, in their order; the last, the time that is left, is the second to be let in."""
    kept: set[int] = set()
    for number in dict.fromkeys([0, len(facts) - 1, *range(len(facts))]) if facts else ():
        width -= len(_GAP) + len(facts[number])
        if width < 0:
            break
        kept.add(number)
    return [fact for number, fact in enumerate(facts) if number in kept]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def _lasting(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


def _flops(rate: float) -> str:
    unit, size = next(((name, 1e3**power) for name, power in _FLOPS if rate >= 1e3**power), ("MFLOP/s", 1e6))
    return f"{rate / size:.3g} {unit}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


__all__ = ["Progress"]
