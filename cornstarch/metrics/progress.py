"""Shows the progress of a run: a bar in a terminal, else one plain line per line of metrics. Does not import torch."""

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
_REMEMBERED = 60  # moments, at least a second apart, from which the remaining time is estimated
_GAP = "  "
_BAR_WIDTHS = (8, 40)
_ITEMS = {"vision": "images"}
_SHOWN_DATA_WAIT = 0.02  # the fraction of a step spent waiting for data from which on it is shown
_FLOPS = (("PFLOP/s", 5), ("TFLOP/s", 4), ("GFLOP/s", 3))


class Progress:
    """Shows the progress of a run: in mode auto, by a bar if the console is a terminal, else by lines.

    `total` are the steps of the run, if known, and `done` those done before; `clock` returns monotonic seconds.
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
        self._total, self._step, self._clock = total, done, clock
        self._record: Mapping[str, Any] = {}
        self._live: Live | None = None
        self._start_clock()

    def __enter__(self) -> Progress:
        self._start_clock()
        if self.mode == "bar":
            self._live = Live(self, console=self.console, refresh_per_second=_REFRESHES)
            self._live.start(refresh=True)
        return self

    def _start_clock(self) -> None:
        self._last = (self._clock(), self._step)
        self._moments = deque([self._last], maxlen=_REMEMBERED)

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, step: int) -> None:
        """Count a step; the bar refreshes itself."""
        self._step = step
        self._last = (self._clock(), step)
        if self._last[0] - self._moments[-1][0] >= 1:  # one moment per second is enough
            self._moments.append(self._last)

    def metrics(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self._step = record.get("step", self._step)
        if self.mode == "lines":
            self._print(_GAP.join([self._steps(), *self._facts()]))

    def log(self, text: str) -> None:
        if self.mode != "none":
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        self.console.file.flush()

    def _steps(self) -> str:
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
        if (seconds := _number(record.get("step_time"))) is not None:
            waits = (_number(record.get("data_wait")) or 0.0) / seconds if seconds else 0.0
            yield f"{_step_time(seconds)}/step" + (f" ({waits:.0%} for data)" if waits >= _SHOWN_DATA_WAIT else "")
        if (mfu := _number(record.get("mfu"))) is not None:
            yield f"{mfu:.1%} MFU"
        if (rate := _number(record.get("flops_per_second"))) is not None:
            unit, size = next(((name, 1e3**power) for name, power in _FLOPS if rate >= 1e3**power), ("MFLOP/s", 1e6))
            yield f"{rate / size:.3g} {unit}"
        items = record.get("items_per_second")
        for name, value in items.items() if isinstance(items, Mapping) else ():
            if (rate := _number(value)) is not None:
                yield f"{_rate(rate)} {_ITEMS.get(name, name)}/s"
        if (memory := _number(record.get("memory"))) is not None:
            yield f"{memory / 1e9:.1f} GB"
        (start, first), (end, last) = self._moments[0], self._last
        if self._total is not None and last > first:
            left = (end - start) / (last - first) * max(self._total - self._step, 0)
            minutes, seconds = divmod(round(left), 60)
            hours, minutes = divmod(minutes, 60)
            yield f"eta {hours}:{minutes:02}:{seconds:02}" if hours else f"eta {minutes}:{seconds:02}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the bar as one line: if the terminal is narrow, the least important facts go first, then the bar."""
        width = options.max_width - 1  # some terminals wrap a full line
        steps, total = self._steps(), self._total
        narrowest, widest = _BAR_WIDTHS
        reserved = 0 if total is None else len(_GAP) + narrowest
        text = _GAP.join(["", *_fit(list(self._facts()), width - len(steps) - reserved)])
        line = Text(steps, no_wrap=True, overflow="crop", end="")
        room = min(width - len(steps) - len(text) - len(_GAP), widest)
        if total is not None and room >= narrowest:
            done = room * min(self._step, total) // max(total, 1)
            full, empty = "#-" if options.ascii_only else "━─"
            line.append(_GAP).append(full * done, "bar.complete").append(empty * (room - done), "bar.back")
        line.append(text).truncate(max(width, 1))
        yield line


def _fit(facts: list[str], width: int) -> list[str]:
    """Return the facts that fit, in order. The last one, the remaining time, has the second highest priority."""
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


def _step_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
