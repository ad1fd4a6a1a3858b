"""What is known of data, as a file and for any number of replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.plan.facts import DataFacts, read_facts, write_facts

FACTS = DataFacts(812.5, {"vision": 1.25}, {"vision": 256.0}, 4096, {1: 1.0, 4: 1.2, 16: 1.6})


def test_a_file_and_back(tmp_path: Path) -> None:
    write_facts(tmp_path / "facts.yaml", FACTS)
    assert read_facts(tmp_path / "facts.yaml") == FACTS


@pytest.mark.parametrize(("replicas", "expected"), [(1, 1.0), (2, 1.1), (4, 1.2), (8, 1.4), (16, 1.6), (1024, 1.6)])
def test_between_known_numbers_of_replicas(replicas: int, expected: float) -> None:
    assert FACTS.straggling(replicas) == pytest.approx(expected)


def test_nothing_known() -> None:
    assert DataFacts(10.0).straggling(64) == 1.0
    assert DataFacts(10.0, straggler={8: 1.5}).straggling(2) == 1.5


@pytest.mark.parametrize(
    ("text", "told"),
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
def test_files_that_are_wrong(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "facts.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_facts(path)
    assert str(path) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cornstarch inspect-data CONFIG --output"):
        read_facts(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_facts(tmp_path / "none/facts.yaml", FACTS)
