"""The error text when ranks differ. test_process_group.py has the exchange."""

from __future__ import annotations

from typing import Any

import pytest

from cornstarch.launch.process_group import agree, describe_differences

LONG = "/a/very/long/path/that/goes/on/and/on/and/on/and/on/and/on/until/the/very/end/of/the/line/"

CASES: list[tuple[str, list[Any], list[str]]] = [
    ("one differs", [{"a": 1}, {"a": 2}, {"a": 1}], ["  a: 1 on ranks 0, 2; 2 on rank 1"]),
    (
        "deep",
        [{"a": {"b": [1, {"c": "x"}]}}, {"a": {"b": [1, {"c": "y"}]}}],
        ['  a.b[1].c: "x" on rank 0; "y" on rank 1'],
    ),
    ("absent", [{"a": 1, "b": None}, {"a": 1}], ["  b: null on rank 0; nothing on rank 1"]),
    (
        "other kind",
        [{"a": 1}, {"a": [1]}],
        ["  a: 1 on rank 0; nothing on rank 1", "  a[0]: nothing on rank 0; 1 on rank 1"],
    ),
    ("all differ", [1, 2, 3], ["  value: 1 on rank 0; 2 on rank 1; 3 on rank 2"]),
    (
        "long values, where they differ",
        [{"a": LONG + "one"}, {"a": LONG + "two"}],
        ['  a: …ery/end/of/the/line/one" on rank 0; …ery/end/of/the/line/two" on rank 1'],
    ),
    (
        "many",
        [{"x": 0, **{str(key): 0 for key in range(15)}}, {"x": 0}],
        [*[f"  {key}: 0 on rank 0; nothing on rank 1" for key in range(10)], "  … and 5 more"],
    ),
]


@pytest.mark.parametrize(("configs", "lines"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_differences_are_named_with_ranks(configs: list[Any], lines: list[str]) -> None:
    statements = [{"config": config, "versions": {"torch": "2.13.0"}} for config in configs]
    said = describe_differences(statements, ["host"] * len(configs)).splitlines()
    assert said[0] == "The processes of this run differ:"
    assert said[1:-1] == lines
    assert "same config file" in said[-1]


def test_versions_come_first_with_host_names() -> None:
    statements = [{"config": {"a": rank}, "versions": {"torch": f"2.1{rank // 2}.0"}} for rank in range(4)]
    assert describe_differences(statements, ["one", "one", "two", "three"]).splitlines() == [
        "The processes of this run differ:",
        "  version of torch: 2.10.0 on ranks 0-1 (one); 2.11.0 on ranks 2-3 (three, two)",
        "  a: 0 on rank 0 (one); 1 on rank 1 (one); 2 on rank 2 (two); 3 on rank 3 (three)",
        "Install the same versions on every machine.",
    ]


def test_a_single_process_agrees_with_itself() -> None:
    agree({"a": 1})
