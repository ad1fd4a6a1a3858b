"""Boxes, against brute force over numbered tensors; and the files and the JSON that many processes make together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cornstarch.errors import ConfigError
from cornstarch.train.checkpoint import files
from cornstarch.train.checkpoint.files import open_pieces, write_pieces
from cornstarch.train.checkpoint.pieces import Box, Piece, Sharded, copy_parts, interval_boxes, parts_of, tile
from cornstarch.train.checkpoint.planning import describe, joined_data, writers
from cornstarch.train.checkpoint.reading import TensorReader

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


@st.composite
def boxes(draw: st.DrawFn, shape: list[int]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size - 1), st.integers(1, size)))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(max(1, b - a) for a, b in ends))


def numbers_in(box: Box, shape: list[int]) -> set[int]:
    return set(np.arange(math.prod(shape)).reshape(shape)[box.within(Box.whole(shape))].ravel().tolist())


@given(st.data(), SHAPES)
def test_what_two_boxes_have(data: st.DataObject, shape: list[int]) -> None:
    first, second = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = first.meet(second)
    expected = numbers_in(first, shape) & numbers_in(second, shape)
    assert (set() if common is None else numbers_in(common, shape)) == expected
    if common is not None:
        numbered = torch.arange(math.prod(shape)).reshape(shape)
        own = numbered[first.within(Box.whole(shape))]
        assert set(own[common.within(first)].reshape(-1).tolist()) == expected


@given(st.data(), SHAPES)
def test_intervals_are_boxes_in_order(data: st.DataObject, shape: list[int]) -> None:
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, numbered.numel())] * 2)))
    found = [numbered[box.within(Box.whole(shape))].reshape(-1) for box in interval_boxes(shape, start, end)]
    assert torch.cat([*found, torch.empty(0, dtype=torch.int64)]).tolist() == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape))


@given(st.data(), SHAPES)
def test_cuts_of_a_flat_tensor_fill_it(data: st.DataObject, shape: list[int]) -> None:
    total = math.prod(shape)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    cut = [box for a, b in zip(cuts, cuts[1:], strict=False) for box in interval_boxes(shape, a, b)]
    assert tile(shape, cut)
    if len(cut) > 1:
        left_out = data.draw(st.integers(0, len(cut) - 1))
        assert not tile(shape, cut[:left_out] + cut[left_out + 1 :])
        assert not tile(shape, [*cut, cut[left_out]])


@pytest.mark.parametrize(
    ("shape", "cut", "fills"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], True),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))], True),
        ((4, 4), [((0, 0), (3, 4)), ((2, 0), (2, 4))], False),  # overlap
        ((4, 4), [((0, 0), (1, 4)), ((2, 0), (2, 4))], False),  # hole
        ((4, 4), [((0, 0), (2, 2)), ((0, 3), (2, 1)), ((2, 0), (2, 4))], False),
        ((4, 4), [((0, 0), (5, 4))], False),
        ((4, 4), [], False),
        ((), [((), ())], True),
        ((0, 3), [((0, 0), (0, 3))], True),
    ],
)
def test_what_fills_a_tensor(shape: tuple[int, ...], cut: list[Any], fills: bool) -> None:
    assert tile(shape, [Box(*box) for box in cut]) is fills


def cut_in_two(tensor: torch.Tensor, at: int) -> list[Sharded]:
    flat = tensor.reshape(-1)
    return [Sharded(tensor.shape, flat[:at], 0), Sharded(tensor.shape, flat[at:], at)]


@settings(deadline=None, max_examples=30)
@given(st.data(), SHAPES.filter(bool))
def test_any_cut_is_read_by_any_other(data: st.DataObject, shape: list[int]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    first, second = data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda _: None)
        reader = through_files([{"w": one} for one in cut_in_two(tensor, first)])
    for target in cut_in_two(torch.full_like(tensor, -1), second):
        reader.copy_into("w", target)
        assert target.local.tolist() == list(range(target.start, target.start + target.local.numel()))
    assert torch.equal(reader["w"], tensor)


def through_files(of_ranks: list[dict[str, Any]]) -> TensorReader:
    import tempfile
    from contextlib import ExitStack

    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rank, tensors in enumerate(of_ranks):
            pieces = [
                Piece(name, tuple(t.shape), t.dtype, box, lambda part=part: part)
                for name, t in tensors.items()
                for box, part in parts_of(t)
            ]
            write_pieces(Path(folder), f"rank-{rank}", pieces)
        for file in sorted(Path(folder).iterdir()):
            for piece in open_pieces(file, ExitStack().enter_context):
                found.setdefault(piece.name, []).append(piece)
    return TensorReader(found)


def test_a_part_gives_way_to_a_tensor_of_the_same_name() -> None:
    half = cut_in_two(torch.arange(4.0), 2)
    reader = through_files([{"w": half[0], "w[0:2]": torch.tensor([9.0])}, {"w": half[1]}])
    assert reader["w"].tolist() == [0, 1, 2, 3] and reader["w[0:2]"].tolist() == [9.0]


def test_only_what_is_needed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = through_files([{"w": one} for one in cut_in_two(torch.arange(1000.0).reshape(10, 100), 600)])
    seen: list[Box] = []
    read = files.StoredPiece.read
    monkeypatch.setattr(files.StoredPiece, "read", lambda piece, box: (seen.append(box), read(piece, box))[1])
    reader.copy_into("w", Sharded(torch.Size([10, 100]), torch.empty(50), 575))
    assert [box.numel for box in seen] == [25, 25]


def test_in_memory_parts_of_the_same_layout() -> None:
    source, target = (cut_in_two(value, 3)[1] for value in (torch.arange(6.0), torch.zeros(6)))
    copy_parts(source, target)
    assert target.local.tolist() == [3, 4, 5]
    with pytest.raises(AssertionError, match="1 of 4 numbers are in other processes"):
        copy_parts(source, cut_in_two(torch.zeros(6), 2)[1])


# ---------------------------------------------------------------------------------------------------- putting together


def described(tensors: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    return describe(1, tensors, data, None, "sharded")


def test_who_writes_what() -> None:
    half = cut_in_two(torch.arange(6.0).reshape(2, 3), 4)
    found = writers(
        [
            described({"same": torch.ones(2), "cut": half[0]}, {}),
            described({"same": torch.ones(2), "cut": half[1], "mine": torch.ones(3)}, {}),
            described({"cut": half[1], "mine": torch.ones(3)}, {}),
        ]
    )
    assert {name: [part[0] for part in entry["parts"]] for name, entry in found.items()} == {
        "same": [0], "cut": [0, 0, 1], "mine": [1],
    }  # fmt: skip


def test_tensors_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match=r"w is F32 \[3\] on rank 1, but F32 \[2\] on a lower one"):
        writers([described({"w": torch.ones(2)}, {}), described({"w": torch.ones(3)}, {})])
    with pytest.raises(ConfigError, match=r"w \[2, 3\] cannot be saved: the parts that the 2 processes have"):
        half = cut_in_two(torch.arange(6.0).reshape(2, 3), 4)
        writers([described({"w": half[0]}, {}), described({"w": half[0]}, {})])


def test_data_of_many() -> None:
    nan = float("nan")
    first = {"a": {"x": 1, "y": [1, {"z": nan}]}, "per_rank": {"seen": 3}}
    second = {"a": {"x": 1, "w": None, "y": [1, {"z": nan}]}, "b": 2, "per_rank": {"seen": 4}}
    joined = joined_data([described({}, first), described({}, second)])
    assert str(joined) == str(
        {"a": {"x": 1, "y": [1, {"z": nan}], "w": None}, "b": 2, "per_rank": {"0": {"seen": 3}, "1": {"seen": 4}}}
    )
    with pytest.raises(ConfigError, match=r"data.a.x is 1 on rank 0, 2 on rank 1. What differs belongs under .*per_ra"):
        joined_data([described({}, first), described({}, {"a": {"x": 2}})])
