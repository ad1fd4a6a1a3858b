"""Bytes per rank: the textbook's formulas, shards against brute force, what frozen parts and odd sizes change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cornstarch.errors import ConfigError
from cornstarch.plan import DataKind, DataPlan
from cornstarch.plan.cluster import DEVICES, device
from cornstarch.plan.memory import Memory, ModelSize, ParameterSize, StateSize, memory_of, textbook

ROOT = Path(__file__).resolve().parents[2]
ADAM = {4: StateSize(8), 2: StateSize(4)}
KINDS: tuple[DataKind, ...] = get_args(DataKind)
WHOLE = ("ddp", "zero1", "local_sgd", "diloco", "async", "gossip")


def model(
    shapes: Sequence[tuple[int, ...]], units: Sequence[int | None] = (), frozen: Sequence[int] = (), itemsize: int = 4
) -> ModelSize:
    """Return a model of parameters of these shapes; the optimizer is Adam without counters."""
    units = units or [None] * len(shapes)
    parameters = tuple(
        ParameterSize(shape, itemsize, n not in frozen, unit)
        for n, (shape, unit) in enumerate(zip(shapes, units, strict=True))
    )
    states = {(size, several): state for size, state in ADAM.items() for several in (False, True)}
    return ModelSize(parameters, states=states)


# ---------------------------------------------------------------------------------------------------- formulas


def test_textbook_equals_published_figures() -> None:
    # Ψ = 7 · 10^9, Adam in mixed precision, K = 12.
    assert textbook(7_000_000_000, 1)["ddp"] == 16 * 7e9 == 112e9
    found = textbook(7_500_000_000, 64)  # the example of the paper on ZeRO: 120, 31.4, 16.6 and 1.9 GB
    assert {kind: round(size / 1e9, 1) for kind, size in found.items()} == {
        "ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9,
    }  # fmt: skip
    assert textbook(1000, 4, weight=4, gradient=4, states=8) == {"ddp": 16e3, "zero1": 10e3, "zero2": 7e3, "zero3": 4e3}


EVEN = model([(64, 8)] * 8, [None, None, 0, 0, 1, 1, 2, 2])
PSI = 8 * 64 * 8


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_shards_equal_the_textbook(ranks: int) -> None:
    expected = textbook(PSI, ranks, weight=4, gradient=4, states=8)
    for kind in ("ddp", "zero1", "zero3"):
        assert memory_of(EVEN, DataPlan(kind), ranks).persistent == expected[kind]
    for kind in ("fsdp1", "fsdp2"):
        assert memory_of(EVEN, DataPlan(kind), ranks).persistent == expected["zero3"]
    # Our zero2 gathers whole parameters beside its shards, but from forward to backward only.
    zero2 = memory_of(EVEN, DataPlan("zero2"), ranks)
    assert zero2.persistent == expected["zero3"] and zero2.persistent + 4 * PSI == expected["zero2"] + 4 * PSI / ranks
    assert zero2.gathered >= 4 * PSI


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_has_everything_and_gathers_nothing(kind: DataKind) -> None:
    found = memory_of(EVEN, DataPlan(kind), 1)
    assert found == Memory(4 * PSI, 4 * PSI, 8 * PSI)
    assert found.persistent == found.peak() == 16 * PSI


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_have_neither_gradients_nor_states(kind: DataKind) -> None:
    size = model([(64, 8)] * 6, [None, 0, 1, 1, 1, 1], frozen=[0, 1])
    found = memory_of(size, DataPlan(kind), 4)
    shards = 1 if kind in WHOLE else 4
    assert found.parameters * shards == 6 * 4 * 512
    assert found.gradients * shards == 4 * 4 * 512
    assert found.optimizer * (1 if kind in WHOLE and kind != "zero1" else 4) == 4 * 8 * 512


def test_fsdp1_has_gradients_for_all_of_a_unit() -> None:
    size = model([(64, 8), (64, 8)], frozen=[0])
    assert memory_of(size, DataPlan("fsdp1"), 4).gradients == 2 * 4 * 512 / 4
    assert memory_of(size, DataPlan("fsdp2"), 4).gradients == 4 * 512 / 4


# ---------------------------------------------------------------------------------------------------- shards


def test_fsdp2_pads_uneven_shards() -> None:
    size = model([(10, 3)])  # rows: 3, 3, 3 and 1
    for rank, rows in enumerate((3, 3, 3, 1)):
        found = memory_of(size, DataPlan("fsdp2"), 4, rank)
        assert found.parameters == found.gradients == 4 * 3 * 3  # in memory of one size
        assert found.optimizer == 8 * rows * 3
    assert memory_of(size, DataPlan("fsdp2"), 4) == memory_of(size, DataPlan("fsdp2"), 4, 0)
    assert memory_of(model([(2,)]), DataPlan("fsdp2"), 4, 3).optimizer == 0


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(2, 5),
    st.data(),
)
def test_fsdp1_equals_brute_force(shapes: list[tuple[int, ...]], ranks: int, data: Any) -> None:
    units = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=len(shapes), max_size=len(shapes)))
    size = model(shapes, units)
    expected = [0] * ranks
    parameters = 0
    for unit in {*units}:
        string: list[bool] = []  # a number of a parameter, or filling
        for parameter in size.parameters:
            if parameter.unit == unit:
                string += [True] * parameter.numel
                string += [False] * (-len(string) % 4)
        string += [False] * (-len(string) % ranks)
        shard = len(string) // ranks
        parameters += 4 * shard
        for rank in range(ranks):
            expected[rank] += 8 * sum(string[rank * shard : (rank + 1) * shard])
    for rank in range(ranks):
        found = memory_of(size, DataPlan("fsdp1"), ranks, rank)
        assert (found.parameters, found.gradients, found.optimizer) == (parameters, parameters, expected[rank])


def test_zero1_has_an_even_share_of_the_states() -> None:
    size = model([(7,), (5,), (4,), (3,)])
    found = memory_of(size, DataPlan("zero1"), 2)
    assert found.optimizer == 8 * 19 // 2
    assert found.parameters == found.gradients == 4 * 19 and not found.buckets
    assert memory_of(size, DataPlan("zero1"), 5).optimizer == -(-8 * 19 // 5)  # more ranks than parameters


def test_hsdp_is_fsdp2_within_a_copy() -> None:
    size = model([(10, 3), (7,)])
    for rank in range(8):
        assert memory_of(size, DataPlan("hsdp"), 8, rank, copies=2) == memory_of(size, DataPlan("fsdp2"), 4, rank % 4)


def test_averages_are_float32_and_buffers_whole() -> None:
    size = replace(model([(64, 8)], itemsize=2), averaged=True, buffers=100)
    for kind, ranks in (("ddp", 1), ("zero3", 4), ("fsdp1", 4)):
        found = memory_of(size, DataPlan(kind), 4)  # type: ignore[arg-type]
        assert found.averages * ranks == 4 * 512  # in float32, beside weights of 2 bytes
        assert found.buffers == 100
        assert found.optimizer * ranks == 4 * 512


def test_state_sizes_follow_the_shape() -> None:
    factored = StateSize(per_row=4, per_column=2, constant=1)
    assert factored.of((6, 10)) == 4 * 6 + 2 * 10 + 1
    assert factored.of((3, 6, 10)) == 4 * 18 + 2 * 30 + 1
    assert StateSize(8, constant=4).of((5,)) == 44
    assert StateSize(8).of(()) == 8
    assert StateSize(per_row=4, per_column=4).of((0, 10)) == 40  # an empty slice of a matrix


# ---------------------------------------------------------------------------------------------------- the peak


def test_peak_overlaps_gradients_and_activations() -> None:
    alone = memory_of(EVEN, DataPlan("ddp"), 1)  # parameters 4, gradients 4, states 8
    assert alone.peak(3 * PSI) == 16 * PSI and alone.peak(5 * PSI) == 17 * PSI
    assert alone.peak(5 * PSI, accumulated=True) == 21 * PSI
    assert alone.peak(3 * PSI, last=2 * PSI) == 18 * PSI and alone.peak(7 * PSI, last=2 * PSI) == 19 * PSI
    views = memory_of(EVEN, DataPlan("ddp"), 2)  # gradients lie in buckets, which stay
    assert views.peak(5 * PSI) == 21 * PSI
    copies = memory_of(EVEN, DataPlan("ddp", gradient_as_bucket_view=False), 2)
    assert copies.persistent == 16 * PSI and copies.peak() == 20 * PSI


LAYERS = model([(16,), (64,), (64,), (64,)], [None, 0, 1, 2])  # bytes: 64, and 256 for each layer
ROOT_BYTES = 64 + 64  # with its gradients
GATHERED = [
    # A layer, the next one, and the gradients of one, twice.
    (DataPlan("zero3"), ROOT_BYTES + 4 * 256),
    (DataPlan("fsdp2", prefetch=1), ROOT_BYTES + 5 * 256),
    (DataPlan("zero2"), ROOT_BYTES + 4 * 256 + 2 * 256),
    (DataPlan("fsdp2", reshard_after_forward=False), ROOT_BYTES + 4 * 256 + 2 * 256),
    (DataPlan("fsdp1", param_dtype="bf16"), (ROOT_BYTES + 4 * 256) // 2),
    (DataPlan("fsdp2", param_dtype="bf16", reduce_dtype="fp32"), (ROOT_BYTES + 3 * 256) // 2 + 256),
    (DataPlan("ddp"), 0),
]


@pytest.mark.parametrize(("data", "gathered"), GATHERED)
def test_gathered_bytes_by_kind(data: DataPlan, gathered: int) -> None:
    assert memory_of(LAYERS, data, 4).gathered == gathered


def test_frozen_units_have_no_gradients_to_reduce() -> None:
    assert memory_of(model([(64,)] * 3, [0, 1, 2], frozen=[0, 1, 2]), DataPlan("zero3"), 4).gathered == 2 * 256


def test_offloading_leaves_gathered_parameters() -> None:
    found = memory_of(LAYERS, DataPlan("fsdp2", offload=True), 4)
    assert found.peak() == found.gathered and found.peak(1000) == found.gathered + 1000
    assert found.persistent == memory_of(LAYERS, DataPlan("fsdp2"), 4).persistent  # in the CPU's memory


# ---------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("name", "found"),
    [("h100", "H100"), ("NVIDIA H100 80GB HBM3", "H100"), ("A100 40GB", "A100-40"),
     ("NVIDIA A100-SXM4-80GB", "A100-80"), ("rtx 4090", "RTX-4090"), ("NVIDIA GeForce RTX 4090", "RTX-4090"),
     ("4090", "RTX-4090"), ("L40S", "L40S"), ("H200", "H200"), ("B200", "B200"), ("CPU", "cpu")],
)  # fmt: skip
def test_device_accepts_any_spelling(name: str, found: str) -> None:
    assert device(name).name == found


@pytest.mark.parametrize(
    ("name", "said"),
    [("A100", "Did you mean A100-80 or A100-40?"), ("H10", "Did you mean H100?"), ("H1000", "Did you mean H100?"),
     ("abacus", "Known are B200, H200"), ("", "Known are B200")],
)  # fmt: skip
def test_unknown_devices_are_refused_with_advice(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        device(name)
    assert said in str(error.value)


def test_catalogue_memory_is_below_the_advertised_one() -> None:
    sold = {"H100": 80, "A100-80": 80, "A100-40": 40, "L40S": 48, "RTX-4090": 24, "V100-32": 32, "T4": 16}
    for name, size in sold.items():
        found = DEVICES[name]
        assert 0.85 * size * 2**30 < found.usable < found.memory < size * 2**30


def test_memory_imports_no_torch() -> None:
    code = "import sys, cornstarch.plan.memory, cornstarch.plan.cluster; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "False", ran.stderr
