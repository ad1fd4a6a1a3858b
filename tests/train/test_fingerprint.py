"""Fingerprints: every value counts, in every type, and a sharded tensor has that of the whole one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cornstarch.train import fingerprint as module
from cornstarch.train.checkpoint.pieces import Box, Sharded, interval_boxes
from cornstarch.train.fingerprint import fingerprint, join_fingerprints, partial_fingerprints

TYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randint(2**7, shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_value_counts(dtype: torch.dtype) -> None:
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


def test_the_place_of_a_value_counts() -> None:
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
    held = [Sharded(tensor.shape, flat[a:b], a) for a, b in zip(ends, ends[1:], strict=False)]
    parts = [part for one in held for part in partial_fingerprints(one)]
    assert len(parts) == sum(len(interval_boxes(shape, a, b)) for a, b in zip(ends, ends[1:], strict=False))
    assert join_fingerprints([*parts, *parts[:2]]) == fingerprint(tensor)  # two boxes are in two processes
    monkeypatch.setattr(module, "_AT_ONCE", 7)
    assert fingerprint(tensor) == join_fingerprints(parts)


def test_columns_have_the_fingerprint_of_the_whole() -> None:
    tensor = values((64, 72))
    parts = []
    for start, end in ((0, 30), (30, 72)):
        box = Box((0, start), (64, end - start))
        whole = (slice(0, 64), slice(0, end - start))
        parts += partial_fingerprints(Sharded(tensor.shape, tensor[:, start:end], boxes=((box, whole),)))
    assert join_fingerprints(parts) == fingerprint(tensor)
