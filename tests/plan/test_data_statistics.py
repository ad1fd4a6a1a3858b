"""What is known of data, as a file and for any number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.data_statistics import DataStatistics, read_data_statistics, write_data_statistics

FACTS = DataStatistics(812.5, {"vision": 1.25}, {"vision": 256.0}, 4096, {1: 1.0, 4: 1.2, 16: 1.6})


def test_a_written_file_reads_as_the_same_statistics(tmp_path: Path) -> None:
    write_data_statistics(tmp_path / "facts.yaml", FACTS)
    assert read_data_statistics(tmp_path / "facts.yaml") == FACTS


@pytest.mark.parametrize(("replicas", "expected"), [(1, 1.0), (2, 1.1), (4, 1.2), (8, 1.4), (16, 1.6), (1024, 1.6)])
def test_straggler_factor_is_interpolated(replicas: int, expected: float) -> None:
    assert FACTS.straggler_factor(replicas) == pytest.approx(expected)


def test_straggler_factor_without_data_is_one() -> None:
    assert DataStatistics(10.0).straggler_factor(64) == 1.0
    assert DataStatistics(10.0, straggler={8: 1.5}).straggler_factor(2) == 1.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "expected tokens"),
        ("items: {vision: 1}", "`tokens` is needed"),
        ("tokens: 5\nimages: 3", "found tokens, images"),
        ("tokens: many", "tokens = 'many': expected a number"),
        ("tokens: -1", "tokens = -1: expected a number of at least 0"),
        ("tokens: 5\nitems: 3\n", "items = 3: expected names with numbers"),
        ("tokens: 5\nstraggler: {2: 0.5}", "straggler.2 = 0.5: expected a number of at least 1"),
        ("tokens: 5\nstraggler: {two: 1.5}", "expected numbers of replicas"),
        ("tokens: [", "this is not YAML"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_path(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "facts.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_data_statistics(path)
    assert str(path) in str(caught.value)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cornstarch inspect-data CONFIG --output"):
        read_data_statistics(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_data_statistics(tmp_path / "none/facts.yaml", FACTS)
