"""Experts shared out over ranks: losses, every gradient and every weight are those of one process."""

from __future__ import annotations

import pytest

from tests.parity.cell import Deviation, Matrix
from tests.parity.columns import COLUMNS, Column
from tests.parity.rows import EXPERTS

LAYOUTS: dict[str, Column] = {
    "ep2_dp4": Column("ep 2, ddp 4", 4, last={"ep": 2}),
    "ep2_dp2": Column("ep 2, ddp 2", 2, last={"ep": 2}),
    "ep4": Column("ep 4, ddp 4", 4, last={"ep": 4}),
    "ep2_fsdp2": Column("ep 2, fsdp2 over 4", 4, {"kind": "fsdp2"}, last={"ep": 2}),
    "ep4_zero3": Column("ep 4, zero3 over 4", 4, {"kind": "zero3"}, last={"ep": 4}),
    "ep2_hsdp": Column("ep 2, hsdp 2 × 2", 4, {"kind": "hsdp", "replicate": 2}, last={"ep": 2}),
    "ep2_again": Column(
        "ep 2, fsdp2, activations computed again",
        2,
        {"kind": "fsdp2"},
        module={"activation_checkpointing": True},
        last={"ep": 2},
    ),
    "ep2_zero1": Column("ep 2, zero1 over 4", 4, {"kind": "zero1"}, last={"ep": 2}),
    "ep2_pp2": Column("ep 2, pp 2 × dp 2", 2, last={"stages": 2, "ep": 2}),
    "ep2_pp2_zero1": Column("ep 2, pp 2 × zero1 2", 2, {"kind": "zero1"}, last={"stages": 2, "ep": 2}),
    "ep2_pp2_fsdp2": Column("ep 2, pp 2 × fsdp2 2", 2, {"kind": "fsdp2"}, last={"stages": 2, "ep": 2}),
    "ep2_interleaved": Column(
        "ep 2, pp 2 × 2 × dp 2, interleaved",
        2,
        last={"stages": 2, "virtual_stages": 2, "ep": 2},
        schedule="interleaved",
    ),
    "ep2_tp2": Column("ep 2, ddp 2 × tp 2", 2, module={"tp": 2}, last={"ep": 2}),
    "ep2_tp2_fsdp2": Column("ep 2, fsdp2 4 × tp 2", 4, {"kind": "fsdp2"}, module={"tp": 2}, last={"ep": 2}),
    "ep2_tp2_zero1": Column("ep 2, zero1 4 × tp 2", 4, {"kind": "zero1"}, module={"tp": 2}, last={"ep": 2}),
    "ep2_tp2_pp2": Column("ep 2, pp 2 × dp 2 × tp 2", 2, module={"tp": 2}, last={"stages": 2, "ep": 2}),
    "ep2_cp2": Column("ep 2, cp 2", 1, module={"cp": 2}, last={"ep": 2}),
    "ep4_cp2": Column("ep 4, dp 2 × cp 2", 2, {"kind": "fsdp2"}, module={"cp": 2}, last={"ep": 4}),
}


def check(matrix: Matrix, monkeypatch: pytest.MonkeyPatch, row: str, layout: str, load: str) -> None:
    monkeypatch.setitem(COLUMNS, layout, LAYOUTS[layout])
    matrix.workers.renew()
    deviation = matrix.cell(row, layout, load)
    assert isinstance(deviation, Deviation) and deviation.is_rounding, deviation


@pytest.mark.parametrize("family", EXPERTS)
def test_families_over_four_ranks(matrix: Matrix, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    check(matrix, monkeypatch, family, "ep2_dp4", "mixed")


# With cp attention rounds differently, and a token between two experts of Mixtral would go to the other one.
OTHERS = {"ep2_cp2": "qwen3_moe", "ep4_cp2": "qwen3_moe", "ep2_tp2": "gpt_oss", "ep2_pp2_fsdp2": "deepseek_v3"}


@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layouts(matrix: Matrix, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    check(matrix, monkeypatch, OTHERS.get(layout, "mixtral"), layout, "mixed")


@pytest.mark.parametrize(
    ("row", "layout"),
    [("frozen_experts", "ep2_dp2"), ("lora_experts", "ep2_fsdp2"), ("packed_experts", "ep2_dp2")],
)
def test_experts_beside_encoders(matrix: Matrix, monkeypatch: pytest.MonkeyPatch, row: str, layout: str) -> None:
    check(matrix, monkeypatch, row, layout, "mixed")
