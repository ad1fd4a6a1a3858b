"""Random cases are the same for the same seed, plain JSON, and of all kinds."""

from __future__ import annotations

import json
from collections import Counter

from tests.fuzz.generate import dumps, generate

MANY = [generate(1, index) for index in range(400)]


def test_same_seed_same_cases() -> None:
    assert [generate(1, index) for index in range(20)] == MANY[:20]
    assert generate(2, 0) != MANY[0]
    assert json.loads(dumps(MANY[0])) == MANY[0]


def test_all_kinds_are_drawn() -> None:
    worlds = Counter(case["world"] for case in MANY)
    kinds = Counter(case["parallel"]["data"]["kind"] for case in MANY)
    schedules = Counter(case["parallel"].get("schedule") for case in MANY)
    ranks = Counter(case["parallel"].get("ranks") for case in MANY)
    assert set(worlds) == {2, 3, 4, 5, 6}
    assert set(kinds) == {"ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp"}
    assert set(schedules) >= {"1f1b", "gpipe", "zero_bubble", "interleaved", "naive"}
    assert set(ranks) >= {"auto", "own", "colocated", "first_stage", "shared"}
    for key in ("then", "booster", "evaluated", "features", "precision", "compile"):
        assert any(key in case for case in MANY), key
    assert any(case["data"].get("balance_encoders") for case in MANY)
    shared = [one for case in MANY for one in case["parallel"].get("modules", {}).values() if one.get("ep", 1) > 1]
    assert {one["ep"] for one in shared} == {2, 4}
    assert any("stages" in one for one in shared) and any(one.get("tp", 1) > 1 for one in shared)
    assert any(not answer for case in MANY for *_, answer in case["kinds"])


def test_batches_fit_the_replicas() -> None:
    for case in MANY:
        assert case["batch_size"] % case["accumulation"] == 0, case
        assert any(answer for *_, answer in case["kinds"]), case
