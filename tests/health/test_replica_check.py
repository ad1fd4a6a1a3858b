"""A bit that flips in a replica's weights is found, before a checkpoint has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cornstarch.health.comparison_group import ComparisonGroup
from cornstarch.health.replica_check import ReplicaCheck, sum_bits
from cornstarch.parallel import distributed
from tests.health.faulty_runs import flip_bit, run_ranks
from tests.parity.pool import pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_flipped_bit_changes_the_sum(dtype: torch.dtype, size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    before = int(sum_bits(values))
    content = values.view(torch.uint8)
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            assert int(sum_bits(values)) != before
            content[place] ^= 1 << bit
    assert int(sum_bits(values)) == before
    assert int(sum_bits(torch.cat([values[:1], values])[1:])) == before  # where its memory begins does not matter


def compare(wrong: list[int], other_place: int | None, states: bool) -> tuple[str | None, bool]:
    """Check a module in several processes, some of which hold a flipped bit."""
    rank = distributed.rank()
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if rank in wrong:
        with torch.no_grad():
            changed = optimizer.state[module.bias]["exp_avg"] if states else module.bias
            changed.view(torch.int32)[1] ^= 1
    check = ReplicaCheck(ComparisonGroup(), {"": module}, "other" if rank == other_place else "")
    return check.check(7, optimizer), check.has_replicas


@pytest.mark.parametrize("states", [False, True])
def test_of_three_the_odd_one_is_named(states: bool) -> None:
    found = pool().run(3, compare, [1], None, states)
    assert len({said for said, _ in found}) == 1
    said = found[0][0]
    what = "optimizer states" if states else "weights"
    assert said.startswith(f"Rank 1 holds other {what} after step 7 than the 2 ranks with the same: bias")


def test_of_two_both_are_named() -> None:
    (said, _), (other, _) = pool().run(2, compare, [1], None, False)
    assert said == other and said.startswith("Ranks 0, 1 should hold the same weights after step 7 and do not")


def test_equal_ranks_and_ranks_at_other_places_are_fine() -> None:
    assert pool().run(3, compare, [], None, False) == [(None, True)] * 3
    assert pool().run(2, compare, [1], 1, False) == [(None, False)] * 2


@pytest.mark.parametrize(
    ("ranks", "check", "sections", "said"),
    [
        (3, 1, {}, "Rank 1 holds other weights after step"),
        (2, "auto", {}, "Ranks 0, 1 should hold the same weights after step 6"),
        (2, "auto", {"parallel": {"data": {"kind": "zero1"}}}, "Ranks 0, 1 should hold the same weights after step 6"),
        (2, "off", {}, None),
    ],
)
def test_no_checkpoint_is_written_of_a_flipped_bit(
    ranks: int, check: Any, sections: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    loop = {"check_replicas": check, "batch_size": 12}
    ended = run_ranks(
        tmp_path, ranks, {1: flip_bit}, ("end", 7), 9, loop={**loop, "steps": 9}, checkpoint={"every": 6}, **sections
    )
    saved = sorted(one.name for one in (tmp_path / "run/checkpoints").glob("step_*"))
    if said is None:
        assert [one.code for one in ended] == [0] * ranks and len(saved) == 2
        return
    assert [one.code for one in ended] == [3] * ranks, ended
    assert {one.error for one in ended} == {ended[0].error} and said in ended[0].error
    assert saved == []
