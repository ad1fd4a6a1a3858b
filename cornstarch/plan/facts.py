"""What is known of a run's data before it runs: sizes of samples, as a planner needs them; no torch.

cornstarch inspect-data run.yaml --output facts.yaml

facts = read_facts(Path("facts.yaml"))
facts.tokens, facts.items["vision"], facts.straggling(64)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cornstarch.errors import ConfigError


@dataclass(frozen=True)
class DataFacts:
    """Sizes of the samples of a run."""

    tokens: float
    """Tokens of a sample in the language model, those of its images and sounds among them; the mean."""
    items: Mapping[str, float] = field(default_factory=dict)
    """By encoder: images, or sounds, of a sample; the mean."""
    item_tokens: Mapping[str, float] = field(default_factory=dict)
    """By encoder: tokens that the language model gets for one of them; the mean."""
    largest_tokens: int = 0
    """Those of the longest sample that is trained on."""
    straggler: Mapping[int, float] = field(default_factory=dict)
    """By number of replicas: the work of the slowest, padding included, over an even share of what the samples need. 1:
    nothing is padded, and nobody waits."""

    def __post_init__(self) -> None:
        for name in ("items", "item_tokens", "straggler"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        least = {"tokens": 0.0, "largest_tokens": 0.0, "items": 0.0, "item_tokens": 0.0, "straggler": 1.0}
        for name, bound in least.items():
            value = getattr(self, name)
            for key, number in (value if isinstance(value, dict) else {"": value}).items():
                if not bound <= number < math.inf:
                    where = f"{name}.{key}" if key != "" else name
                    raise ConfigError(f"{where} = {number}: expected a number of at least {bound:g}.")

    def straggling(self, replicas: int) -> float:
        """Return what `straggler` has for a number of replicas, 1 if it has nothing.

        Between two known numbers it grows with their logarithm; before the first and beyond the last it stays.
        """
        return between(sorted(self.straggler.items()), replicas)

    def to_data(self) -> dict[str, Any]:
        """Return plain data, as YAML has it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Any) -> DataFacts:
        """Return what plain data says."""
        names = [one.name for one in fields(cls)]
        if not isinstance(data, Mapping) or "tokens" not in data or set(data) - set(names):
            found = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ConfigError(f"expected {', '.join(names)}, of which `tokens` is needed; found {found or 'nothing'}.")
        for name, value in data.items():
            is_table = name in ("items", "item_tokens", "straggler")
            if is_table and not isinstance(value, Mapping) or not all(map(_is_number, _values(value))):
                raise ConfigError(f"{name} = {value!r}: expected {'names with numbers' if is_table else 'a number'}.")
            if name == "straggler" and not all(isinstance(key, int) and key >= 1 for key in value):
                raise ConfigError(f"straggler = {value!r}: expected numbers of replicas, with a number each.")
        return cls(**data)


def between(known: Sequence[tuple[int, float]], replicas: int) -> float:
    """Return what `DataFacts.straggling` says, from pairs in ascending order."""
    for (few, low), (many, high) in zip(known, known[1:], strict=False):
        if few <= replicas <= many:
            return low + (high - low) * math.log(replicas / few) / math.log(many / few)
    return 1.0 if not known else known[0][1] if replicas < known[0][0] else known[-1][1]


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_facts(path: Path) -> DataFacts:
    """Return what a file says that `cornstarch inspect-data` has written."""
    import yaml

    try:
        return DataFacts.from_data(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. To write it: cornstarch inspect-data CONFIG --output {path}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: this is not YAML: {str(error).splitlines()[0]}.") from error


def write_facts(path: Path, facts: DataFacts) -> None:
    """Write a file that `read_facts` reads."""
    import yaml

    try:
        path.write_text(yaml.safe_dump(facts.to_data(), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


__all__ = ["DataFacts", "read_facts", "write_facts"]
