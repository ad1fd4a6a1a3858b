"""What one rank fails with, all ranks fail with: nobody waits for a rank that has refused to go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from cornstarch.compat import process_groups
from cornstarch.errors import ConfigError
from cornstarch.launch.world import record_failure
from cornstarch.parallel import processes
from cornstarch.pipeline.alarm import Alarm, cut

_CUT = ("connection closed", "connection reset", "connection refused", "socket closed", "timeout", "timed out", "abort")


class SharedFailure:
    """Lets all ranks of a run fail with the same words.

    A rank that raises says why in the store that all ranks share, and cuts its lines to the others. Whoever waits for
    it is woken by that, or by a thread that looks into the store, and raises the same. All ranks must make theirs at
    the same point of the run.
    """

    def __init__(self) -> None:
        self._alarm = None if processes.is_alone() else Alarm(self._wake)
        self._is_inside = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Run a block that all ranks run; one inside another is the same block."""
        if self._alarm is None or self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self._alarm.listening():
                yield
            said = self._alarm.heard()
        except Exception as error:
            own, is_echo = _encode(error), _is_line_cut(error)
            if not is_echo:
                record_failure(error)  # before others fail because of it: the launcher shows the first
            said = self._alarm.sound(own, is_echo)
            self._wake(said)
            if said == own:
                raise
            raise _decode(said) from None
        finally:
            self._is_inside = False
        if said is not None:  # there was nothing left to wait for
            raise _decode(said)

    def _wake(self, words: str) -> None:
        """End all waiting: here, and in ranks that wait for this one."""
        for group in process_groups():
            cut(group)


def _encode(error: BaseException) -> str:
    what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return json.dumps([isinstance(error, ConfigError), what, processes.rank()])


def _decode(said: str) -> Exception:
    is_refusal, what, rank = json.loads(said)
    return ConfigError(what) if is_refusal else RuntimeError(f"Rank {rank} has failed. {what}")


def _is_line_cut(error: BaseException) -> bool:
    words = str(error).lower()
    return isinstance(error, RuntimeError) and not isinstance(error, ConfigError) and any(one in words for one in _CUT)


__all__ = ["SharedFailure"]
