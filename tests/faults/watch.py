"""Watches one case after the other, and counts what comes of them: what is executed, unpickled or written elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cornstarch.data.sample import SampleError
from cornstarch.errors import ConfigError

SECONDS = 30.0  # of a case, after which it hangs


class Hang(BaseException):
    """A case took too long; no handler of errors must take it for one."""


class Harm(Exception):
    """A case did what it must not."""


@dataclass
class Tally:
    """What came of the cases of one kind."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """What must not be: something executed or written outside, a traceback, a hang."""

    def line(self) -> str:
        shown = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return f"{self.cases} cases: {shown}"


# ------------------------------------------------------------------------------------------------ what is watched

_RUN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn")
_UNPICKLED = "pickle.find_class"
_MOVED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Notes what is executed, unpickled or written outside of a folder. An audit hook stays as long as its process."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in _RUN or event == "socket.connect":
            self.seen.append(f"{event} {arguments!r:.200}")
        elif event == _UNPICKLED and not str(arguments[0]).startswith(("numpy", "torch", "collections", "_codecs")):
            self.seen.append(f"unpickled {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            self._check_path(event, arguments[0])
        elif event in _MOVED:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                self._check_path(event, path)

    def _check_path(self, event: str, path: Any) -> None:
        if isinstance(path, bytes | str | os.PathLike):
            whole = os.path.abspath(os.fsdecode(path))
            # The bytecode of an installed module that is imported for the first time is written by Python itself.
            own = whole.startswith(sys.prefix) and "__pycache__" in Path(whole).parts
            if not own and not whole.startswith((f"{self.folder}", "/dev/", "/proc/")):
                self.seen.append(f"{event} {whole:.200}")

    @contextlib.contextmanager
    def over(self, folder: Path) -> Iterator[None]:
        """Watch one case, which may write into `folder` only; raise Harm for what it did, and Hang after a while."""

        def end(number: int, frame: Any) -> None:
            raise Hang

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        self.folder, self.seen = folder, []
        try:
            yield
        finally:
            self.folder = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if self.seen:
            raise Harm("; ".join(self.seen[:3]))


def judge(tally: Tally, watch: Watch, folder: Path, what: str, case: Callable[[], str]) -> None:
    """Run a case, which returns how it ended, and count what came of it."""
    tally.cases += 1
    try:
        with watch.over(folder), contextlib.redirect_stdout(io.StringIO()):
            outcome = case()
    except (ConfigError, SampleError) as error:
        text = str(error)
        outcome = "refused" if text.strip() and len(text) < 100_000 else "refused without a word"
        if outcome != "refused":
            tally.problems.append(f"{what}: {outcome}")
    except Hang:
        outcome = "hangs"
        tally.problems.append(f"{what}: more than {SECONDS:g} s")
    except Exception as error:
        outcome = "harm" if isinstance(error, Harm) else "tracebacks"
        last = "".join(traceback.format_exception(error)[-5:])
        tally.problems.append(f"{what}: {last:.2500}")
    if watch.seen and outcome == "refused":
        outcome = "harm"
        tally.problems.append(f"{what}: {watch.seen[0]}")
    if list(folder.parent.rglob("executed")):
        outcome = "harm"
        tally.problems.append(f"{what}: its code was executed")
        for path in folder.parent.rglob("executed"):
            path.unlink()
    tally.outcomes[outcome] += 1
