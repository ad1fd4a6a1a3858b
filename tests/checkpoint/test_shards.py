"""Boxes against brute force, shards through files, save plans of several ranks, and fingerprints."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cornstarch.checkpoint import LocalStorage
from cornstarch.checkpoint.fingerprints import fingerprint_shards, join_fingerprints
from cornstarch.checkpoint.reader import TensorReader
from cornstarch.checkpoint.save import assign_writers, describe_save, merge_data
from cornstarch.checkpoint.shards import (
    Box,
    Sharded,
    interval_boxes,
    is_partition,
    list_shards,
    local_shards,
    open_shards,
    write_shards,
)
from cornstarch.errors import ConfigError

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


def fingerprint(tensor: Tensor) -> str:
    return join_fingerprints(fingerprint_shards(tensor))


@st.composite
def boxes(draw: st.DrawFn, shape: list[int]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, size - 1), st.integers(1, size)))) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(max(1, b - a) for a, b in ends))


def numbers_in(box: Box, shape: list[int]) -> set[int]:
    return set(np.arange(math.prod(shape)).reshape(shape)[box.slices_in(Box.whole(shape))].ravel().tolist())


@given(st.data(), SHAPES)
def test_boxes_intersect_as_index_sets_do(data: st.DataObject, shape: list[int]) -> None:
    first, second = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = first.intersect(second)
    expected = numbers_in(first, shape) & numbers_in(second, shape)
    assert (set() if common is None else numbers_in(common, shape)) == expected
    if common is not None:
        numbered = torch.arange(math.prod(shape)).reshape(shape)
        own = numbered[first.slices_in(Box.whole(shape))]
        assert set(own[common.slices_in(first)].reshape(-1).tolist()) == expected


@given(st.data(), SHAPES)
def test_intervals_are_boxes_in_order(data: st.DataObject, shape: list[int]) -> None:
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, numbered.numel())] * 2)))
    found = [numbered[box.slices_in(Box.whole(shape))].reshape(-1) for box in interval_boxes(shape, start, end)]
    assert torch.cat([*found, torch.empty(0, dtype=torch.int64)]).tolist() == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape))


@given(st.data(), SHAPES)
def test_intervals_partition_a_tensor(data: st.DataObject, shape: list[int]) -> None:
    total = math.prod(shape)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    cut = [box for a, b in zip(cuts, cuts[1:], strict=False) for box in interval_boxes(shape, a, b)]
    assert is_partition(shape, cut)
    if len(cut) > 1:
        left_out = data.draw(st.integers(0, len(cut) - 1))
        assert not is_partition(shape, cut[:left_out] + cut[left_out + 1 :])
        assert not is_partition(shape, [*cut, cut[left_out]])


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
def test_partitions_have_no_gap_and_no_overlap(shape: tuple[int, ...], cut: list[Any], fills: bool) -> None:
    assert is_partition(shape, [Box(*box) for box in cut]) is fills


def cut_in_two(tensor: torch.Tensor, at: int) -> list[Sharded]:
    flat = tensor.reshape(-1)
    return [Sharded(tensor.shape, flat[:at], 0), Sharded(tensor.shape, flat[at:], at)]


@settings(deadline=None, max_examples=30)
@given(st.data(), SHAPES.filter(bool))
def test_any_sharding_reads_any_other(data: st.DataObject, shape: list[int]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    first, second = data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        reader = through_files([{"w": one} for one in cut_in_two(tensor, first)])
    for target in cut_in_two(torch.full_like(tensor, -1), second):
        reader.copy_into("w", target)
        assert target.local.tolist() == list(range(target.start, target.start + target.local.numel()))
    assert torch.equal(reader["w"], tensor)


def through_files(of_ranks: list[dict[str, Any]]) -> TensorReader:
    import tempfile
    from contextlib import ExitStack

    found: dict[str, list[Any]] = {}
    storage = LocalStorage()
    with tempfile.TemporaryDirectory() as folder:
        for rank, tensors in enumerate(of_ranks):
            pieces = [piece for name, t in tensors.items() if local_shards(t) for piece in list_shards(name, t)]
            write_shards(storage, Path(folder), f"rank-{rank}", pieces)
        for file in sorted(Path(folder).iterdir()):
            for piece in open_shards(storage, file, ExitStack()):
                found.setdefault(piece.name, []).append(piece)
    return TensorReader(found)


def test_a_shard_key_does_not_collide_with_a_tensor_name() -> None:
    half = cut_in_two(torch.arange(4.0), 2)
    reader = through_files([{"w": half[0], "w[0:2]": torch.tensor([9.0])}, {"w": half[1]}])
    assert reader["w"].tolist() == [0, 1, 2, 3] and reader["w[0:2]"].tolist() == [9.0]


def test_only_what_is_needed_is_read() -> None:
    reader = through_files([{"w": one} for one in cut_in_two(torch.arange(1000.0).reshape(10, 100), 600)])
    seen: list[Box] = []
    noted = [
        replace(piece, read=lambda box, read=piece.read: (seen.append(box), read(box))[1])  # type: ignore[misc]
        for piece in reader._shards["w"]
    ]
    reader = TensorReader({"w": noted})
    reader.copy_into("w", Sharded(torch.Size([10, 100]), torch.empty(50), 575))
    assert [box.numel for box in seen] == [25, 25]


def test_shards_are_copied_in_memory() -> None:
    source, target = (cut_in_two(value, 3)[1] for value in (torch.arange(6.0), torch.zeros(6)))
    TensorReader.of({"w": source}).copy_into("w", target)
    assert target.local.tolist() == [3, 4, 5]
    with pytest.raises(AssertionError, match="1 of 4 values are on other ranks"):
        TensorReader.of({"w": source}).copy_into("w", cut_in_two(torch.zeros(6), 2)[1])


# ---------------------------------------------------------------------------------------------------- putting together


def describe_checkpoint(tensors: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    return describe_save(1, tensors, data, None, "sharded")


def test_the_lowest_rank_writes_a_replicated_shard() -> None:
    half = cut_in_two(torch.arange(6.0).reshape(2, 3), 4)
    found = assign_writers(
        [
            describe_checkpoint({"same": torch.ones(2), "cut": half[0]}, {}),
            describe_checkpoint({"same": torch.ones(2), "cut": half[1], "mine": torch.ones(3)}, {}),
            describe_checkpoint({"cut": half[1], "mine": torch.ones(3)}, {}),
        ]
    )
    assert {name: [part[0] for part in entry["parts"]] for name, entry in found.items()} == {
        "same": [0], "cut": [0, 0, 1], "mine": [1],
    }  # fmt: skip


def test_tensors_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"w is F32 \[3\] on rank 1, but F32 \[2\] on a lower one"):
        assign_writers([describe_checkpoint({"w": torch.ones(2)}, {}), describe_checkpoint({"w": torch.ones(3)}, {})])
    with pytest.raises(ConfigError, match=r"w \[2, 3\] cannot be saved: the parts that the 2 processes have"):
        half = cut_in_two(torch.arange(6.0).reshape(2, 3), 4)
        assign_writers([describe_checkpoint({"w": half[0]}, {}), describe_checkpoint({"w": half[0]}, {})])


def test_data_of_all_ranks_is_merged() -> None:
    nan = float("nan")
    first = {"a": {"x": 1, "y": [1, {"z": nan}]}, "per_rank": {"seen": 3}}
    second = {"a": {"x": 1, "w": None, "y": [1, {"z": nan}]}, "b": 2, "per_rank": {"seen": 4}}
    joined = merge_data([describe_checkpoint({}, first), describe_checkpoint({}, second)])
    assert str(joined) == str(
        {"a": {"x": 1, "y": [1, {"z": nan}], "w": None}, "b": 2, "per_rank": {"0": {"seen": 3}, "1": {"seen": 4}}}
    )
    with pytest.raises(ConfigError, match=r"data.a.x is 1 on rank 0, 2 on rank 1. What differs belongs under .*per_ra"):
        merge_data([describe_checkpoint({}, first), describe_checkpoint({}, {"a": {"x": 2}})])


# ---------------------------------------------------------------------------------------------------- fingerprints

TYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randint(2**7, shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_value_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = values((6, 5), dtype)
    prints = {fingerprint(tensor)}
    for row in range(6):
        for column in range(5):
            other = tensor.clone()
            other[row, column] = (
                torch.tensor(3 if tensor[row, column] != 3 else 5, dtype=dtype)
                if dtype is not torch.bool
                else ~tensor[row, column]
            )
            prints.add(fingerprint(other))
    assert len(prints) == 31


def test_the_position_of_a_value_changes_the_fingerprint() -> None:
    tensor = values((8, 8))
    assert len({fingerprint(t) for t in (tensor, tensor.T, tensor.flip(0), tensor.flip(1), tensor.reshape(-1))}) == 5
    ones = torch.ones(4, 4)
    swapped = [
        torch.zeros(4, 4).index_put((torch.tensor(r), torch.tensor(c)), torch.tensor(1.0))
        for r in range(4)
        for c in range(4)
    ]
    assert len({fingerprint(one) for one in (ones, *swapped)}) == 17


@pytest.mark.parametrize("shape", [(), (1,), (9,), (64, 72), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("shards", [1, 3, 5])
def test_shards_have_the_fingerprint_of_the_whole(
    shape: tuple[int, ...], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = values(shape)
    ends = [tensor.numel() * n // shards for n in range(shards + 1)]
    flat = tensor.reshape(-1)
    pieces = [Sharded(tensor.shape, flat[a:b], a) for a, b in zip(ends, ends[1:], strict=False)]
    parts = [part for one in pieces for part in fingerprint_shards(one)]
    assert len(parts) == sum(len(interval_boxes(shape, a, b)) for a, b in zip(ends, ends[1:], strict=False))
    assert join_fingerprints([*parts, *parts[:2]]) == fingerprint(tensor)  # two boxes are on two ranks
    monkeypatch.setattr("cornstarch.checkpoint.fingerprints.FINGERPRINT_CHUNK", 7)
    assert fingerprint(tensor) == join_fingerprints(parts)


def test_columns_have_the_fingerprint_of_the_whole() -> None:
    tensor = values((64, 72))
    parts = []
    for start, end in ((0, 30), (30, 72)):
        box = Box((0, start), (64, end - start))
        whole = (slice(0, 64), slice(0, end - start))
        parts += fingerprint_shards(Sharded(tensor.shape, tensor[:, start:end], boxes=((box, whole),)))
    assert join_fingerprints(parts) == fingerprint(tensor)
