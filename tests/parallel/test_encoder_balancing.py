"""Replicas that lend images to one another have the features, and the gradients, that they would have alone."""

from __future__ import annotations

import pytest

from tests.parallel import balanced_encoders as lent
from tests.parity.pool import Pool

CASES = [
    ("clip", (6, 1, 1), True),
    ("siglip", (0, 5, 1), True),
    ("siglip", (0, 5, 1), False),
    ("qwen2_vl", (6, 0, 0), True),
    ("qwen2_vl", (1, 5, 0), False),
    ("pixtral", (0, 1, 6), True),
    ("siglip2", (0, 6, 2), True),
    ("qwen3_vl", (5, 0, 1), True),
    ("whisper", (0, 0, 4), True),
]
# Items, or patches in one row, that each rank encodes alone and then lent. Of grids the first has 16 patches, the
# second 8, and so on.
ENCODED = {
    ("clip", (6, 1, 1)): ((6, 3), (1, 3), (1, 2)),
    ("siglip", (0, 5, 1)): ((1, 2), (5, 2), (1, 2)),
    ("qwen2_vl", (6, 0, 0)): ((72, 24), (16, 24), (16, 24)),
    ("whisper", (0, 0, 4)): ((1, 1), (1, 1), (4, 2)),
}


def test_balanced_features_and_gradients_equal_unbalanced_ones(workers: Pool) -> None:
    found = workers.run(3, lent.every, CASES)
    for number, (name, counts, _) in enumerate(CASES):
        differences, seen = zip(*(of_rank[number] for of_rank in found), strict=True)
        assert differences == ("", "", ""), name
        own = [of_rank[0] for of_rank in seen]
        assert max(of_rank[1] for of_rank in seen) < max(own), name  # the slowest has less to do
        if (name, counts) in ENCODED:
            assert tuple(map(tuple, seen)) == ENCODED[name, counts], name


def test_items_stay_where_moving_gains_nothing(workers: Pool) -> None:
    cases = [("clip", (2, 2), True), ("clip", (1, 0), True), ("clip", (0, 0), True)]
    for of_rank, owns in zip(workers.run(2, lent.every, cases), ([2, 1, 1], [2, 1, 1]), strict=True):
        assert of_rank == [("", [own, own]) for own in owns]


def test_error_on_one_rank_raises_on_all(workers: Pool) -> None:
    first, second = workers.run(2, lent.collect_refusal)
    for found in (first, second):
        assert found["fine"] == found["fine again"] == found["frozen"] == ""
        assert "depend on which items are together" in found["mixes"]
        assert "mesh of one axis" in found["mesh"]
        assert "takes means over all items" in found["batch norm"] and "data.balance_encoders" in found["batch norm"]
    assert "'sizes' of shape [3] beside 6 items" in first["unknown input"]
    assert "'names', a list" in first["list"] and "'sizes' is trained" in first["trained input"]
    for case in ("unknown input", "list", "trained input"):
        assert "was given something on another rank" in second[case]
    assert second["raises"] == "no memory" and "has failed on another rank" in first["raises"]
    assert "put out a tensor of shape [2, 4]" in second["merges"]
    assert "put out a tensor on another rank" in first["merges"]
    assert first["outside"] == ""


def test_items_move_only_among_ranks_with_equal_shapes(workers: Pool) -> None:
    for (seen, warned), own in zip(workers.run(3, lent.differently_shaped), ([2], [8], [2]), strict=True):
        assert seen == own * 2
        assert len(warned) == 1 and "do not have the same shape on all replicas" in warned[0]


@pytest.mark.parametrize("counts", [(150, 2), (61, 63)])
def test_more_items_than_fit_in_one_message_are_balanced(workers: Pool, counts: tuple[int, int]) -> None:
    found = [seen[0] for seen in workers.run(2, lent.many, counts)]
    assert found == ([76, 76] if counts == (150, 2) else [61, 63])
