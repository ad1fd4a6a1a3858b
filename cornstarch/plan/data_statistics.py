"""Statistics of a run's data that planning needs: sizes of samples, from `cornstarch inspect-data`; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cornstarch.errors import ConfigError

_TABLES = ("items", "item_tokens", "straggler")


@dataclass(frozen=True)
class DataStatistics:
    """Sizes of the samples of a run."""

    tokens: float
    """Mean tokens of a sample in the language model, including those of images and audio."""
    items: Mapping[str, float] = field(default_factory=dict)
    """By encoder: mean images, or audio clips, of a sample."""
    item_tokens: Mapping[str, float] = field(default_factory=dict)
    """By encoder: mean tokens that the language model gets for one item."""
    largest_tokens: int = 0
    """Tokens of the longest sample that is trained on."""
    straggler: Mapping[int, float] = field(default_factory=dict)
    """By number of replicas: the work of the slowest, padding included, over the mean work without padding. 1: nothing
    is padded and no replica waits."""

    def __post_init__(self) -> None:
        for name in _TABLES:
            object.__setattr__(self, name, dict(getattr(self, name)))
        for one in fields(self):
            value, least = getattr(self, one.name), 1.0 if one.name == "straggler" else 0.0
            for key, number in (value if isinstance(value, dict) else {"": value}).items():
                if not least <= number < math.inf:
                    where = f"{one.name}.{key}" if key != "" else one.name
                    raise ConfigError(f"{where} = {number}: expected a number of at least {least:g}.")

    def straggler_factor(self, replicas: int) -> float:
        """Return `straggler` for a number of replicas, interpolated between known numbers; 1 if nothing is known."""
        return interpolate(sorted(self.straggler.items()), replicas)

    @classmethod
    def from_data(cls, data: Any) -> DataStatistics:
        """Build from plain data."""
        names = [one.name for one in fields(cls)]
        if not isinstance(data, Mapping) or "tokens" not in data or set(data) - set(names):
            found = ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ConfigError(f"expected {', '.join(names)}, of which `tokens` is needed; found {found or 'nothing'}.")
        for name, value in data.items():
            is_table = name in _TABLES
            values = value.values() if isinstance(value, Mapping) else [value]
            are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
            if (is_table and not isinstance(value, Mapping)) or not are_numbers:
                raise ConfigError(f"{name} = {value!r}: expected {'names with numbers' if is_table else 'a number'}.")
            if name == "straggler" and not all(isinstance(key, int) and key >= 1 for key in value):
                raise ConfigError(f"straggler = {value!r}: expected numbers of replicas, with a number each.")
        return cls(**data)


def interpolate(known: Sequence[tuple[int, float]], replicas: int) -> float:
    """Return the value for a number of replicas, from ascending pairs, logarithmic between them; 1 without pairs."""
    for (few, low), (many, high) in zip(known, known[1:], strict=False):
        if few <= replicas <= many:
            return low + (high - low) * math.log(replicas / few) / math.log(many / few)
    return 1.0 if not known else known[0][1] if replicas < known[0][0] else known[-1][1]


def read_data_statistics(path: Path) -> DataStatistics:
    """Read a file that `cornstarch inspect-data` has written."""
    data = load_yaml(path, "inspect-data")
    try:
        return DataStatistics.from_data(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_data_statistics(path: Path, statistics: DataStatistics) -> None:
    """Write a file that `read_data_statistics` reads."""
    import yaml

    write_text(path, yaml.safe_dump(asdict(statistics), sort_keys=False))


def load_yaml(path: str | Path, command: str) -> Any:
    """Return the content of a YAML file that a command of the CLI has written."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. To write it: cornstarch {command} CONFIG --output {path}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: this is not YAML: {str(error).splitlines()[0]}.") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a file; ConfigError if that is impossible."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
