"""The tested table: what came of cutting each architecture in two, against one process.

It is made by sweeps over every model that transformers builds tiny, and ships with the package (tested.json), so that a
run knows whether it is the first to cut a model. One entry for each way to cut, so that another way is another key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter

PATH = Path(__file__).with_name("tested.json")
PASSED, REFUSED, WRONG, NOT_BUILT = "passed", "refused", "wrong", "not built"


@dataclass(frozen=True)
class Verdict:
    """What came of cutting one model."""

    status: str
    """passed: loss and every gradient are those of one process. refused: it was said why not. wrong: neither. not
    built: there is no small working model to try."""
    reason: str = ""
    whole: tuple[str, ...] = ()  # what was left whole by a plan that passed, and why


@dataclass(frozen=True)
class Sweep:
    """What one way to cut came to."""

    versions: Mapping[str, str]  # of torch and transformers, in the sweep
    groups: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    """By kind of model (language models, encoders), by the name of its class."""

    @property
    def verdicts(self) -> dict[str, Verdict]:
        return {name: verdict for group in self.groups.values() for name, verdict in group.items()}


def read_table(path: Path = PATH) -> dict[str, Sweep]:
    """Return the table: by the way to cut, as a plan calls it (tp, cp)."""
    return TypeAdapter(dict[str, Sweep]).validate_json(path.read_bytes()) if path.exists() else {}


read_shipped_table = lru_cache(maxsize=1)(read_table)


def is_tested(model_class: str, axis: str, transformers_version: str) -> bool:
    """Whether a class was cut this way and did what one process does, with a release of transformers like this one."""
    # Between releases (5.22 and 5.23) models are rewritten; between 5.22.1 and 5.22.2 they are not.
    sweep = read_shipped_table().get(axis)
    if sweep is None or sweep.versions["transformers"].split(".")[:2] != transformers_version.split(".")[:2]:
        return False
    verdict = sweep.verdicts.get(model_class)
    return verdict is not None and verdict.status == PASSED


__all__ = ["Sweep", "Verdict", "is_tested", "read_shipped_table", "read_table"]
