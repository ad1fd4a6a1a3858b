"""Experts over ranks: the cells of every family of models with a mixture of experts, and their section of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import fill
from unittest import mock

from cornstarch.verify.twin_trial import TOLERANCE
from tests.parity.cell import Deviation, Matrix, Mismatch
from tests.parity.columns import COLUMNS, Column
from tests.parity.rows import APART, EXPERTS
from tests.versions import versions_of

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

# With cp attention rounds differently, and a token between two experts of Mixtral would go to the other one.
OTHERS = {"ep2_cp2": "qwen3_moe", "ep4_cp2": "qwen3_moe", "ep2_tp2": "gpt_oss", "ep2_pp2_fsdp2": "deepseek_v3"}
"""By layout, the family that it is tried with; the others with Mixtral."""
BESIDE = {"frozen_experts": "ep2_dp2", "lora_experts": "ep2_fsdp2", "packed_experts": "ep2_dp2"}
"""Rows with an encoder, each with its layout."""
_OF_EVERY_FAMILY = ("ep2_dp4", "ep2_fsdp2", "ep2_pp2")
LOAD = "mixed"
ROUNDING = 1e-8
"""What may be left of a difference in float64."""


def list_cells() -> Iterator[tuple[str, str]]:
    """Yield rows with layouts: every family with some, every layout with one family."""
    found = dict.fromkeys((family, layout) for family in EXPERTS for layout in _OF_EVERY_FAMILY)
    found |= dict.fromkeys((OTHERS.get(layout, "mixtral"), layout) for layout in LAYOUTS)
    yield from dict.fromkeys((*found, *BESIDE.items()))


def run_cell(matrix: Matrix, row: str, layout: str) -> Deviation:
    """Return how far one cell is from one process."""
    with mock.patch.dict(COLUMNS, LAYOUTS):
        found = matrix.cell(row, layout, LOAD)
    if isinstance(found, str):
        raise Mismatch(found)
    return found


def build_section(experts: Mapping[tuple[str, str], str]) -> str:
    """Return the section of the page, given the figure of each cell."""
    about = (
        "Language models with a mixture of experts, whose experts are shared out over ranks "
        "([Expert parallelism](experts.md)): every family with some layouts, every layout with one family, in mixed "
        f"batches ({versions_of('torch', 'transformers')}). An empty cell was not run. A cell of more than "
        f"{TOLERANCE:g} was computed once more in float64, where at most {ROUNDING:g} is left: Granite MoE "
        "rounds much, and in fp32 one process alone is 5e-04 from itself in float64."
    )
    columns = [name for name in LAYOUTS if any(layout == name for _, layout in experts)]
    heads = " | ".join(LAYOUTS[name].title for name in columns)
    lines = [fill(about, 120), "", f"| | {heads} |", "|---" * (len(columns) + 1) + "|"]
    for row in dict.fromkeys(row for row, _ in experts):
        shown = " | ".join(experts.get((row, name), "") for name in columns)
        lines.append(f"| {APART[row].title} | {shown} |")
    return "\n".join(lines)
