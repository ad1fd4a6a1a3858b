"""The columns of the matrix: how it is trained. To add one, add an entry to `COLUMNS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.parity.rows import Row


@dataclass(frozen=True)
class Column:
    """A way to spread a run over processes."""

    title: str
    ranks: int
    data: Mapping[str, Any] = field(default_factory=dict)
    """The section `parallel.data` of a `RunConfig`."""
    module: Mapping[str, Any] = field(default_factory=dict)
    """What `parallel.modules` says about every module: tp, cp, stages."""
    unused_are_zero: bool = False
    """Whether a trained parameter that the loss does not depend on has a gradient of zeros, where one process has none."""
    refused: str | None = None
    """What the code answers, if it cannot do this at all."""
    refused_rows: Mapping[str, str] = field(default_factory=dict)
    """By row: what the code answers, if it cannot do this row."""

    def parallel(self, row: Row) -> dict[str, Any]:
        """Return the section `parallel` of a run."""
        modules = {name: dict(self.module) for name in row.modules} if self.module else {}
        return {"data": dict(self.data), "modules": modules}

    def refusal(self, row: str) -> str | None:
        """Return what the code answers to a row, if it cannot do it."""
        return self.refused or self.refused_rows.get(row)


@dataclass(frozen=True)
class Load:
    """What a step is made of."""

    title: str
    batch_size: int
    accumulation: int
    about: str
    mixed: bool = False


COLUMNS: dict[str, Column] = {
    "ddp": Column("ddp", 2, {"kind": "ddp"}),
    "fsdp1": Column("fsdp1", 2, {"kind": "fsdp1"}, unused_are_zero=True),
    "fsdp2": Column("fsdp2", 2, {"kind": "fsdp2"}),
    "zero1": Column("zero1", 2, {"kind": "zero1"}),
    "zero2": Column("zero2", 2, {"kind": "zero2"}),
    "zero3": Column("zero3", 2, {"kind": "zero3"}),
    "hsdp": Column("hsdp 2 × 2", 4, {"kind": "hsdp", "replicate": 2}),
    "tp": Column("tp 2", 2, module={"tp": 2}, refused="tensor parallelism cannot be run yet"),
    "cp": Column("cp 2", 2, module={"cp": 2}, refused="context parallelism cannot be run yet"),
    "pp": Column("pp 2", 2, module={"stages": 2}, refused="pipeline parallelism cannot be run yet"),
}

LOADS: dict[str, Load] = {
    "plain": Load("Plain batches", 8, 1, "Steps of 8 samples, each with one item of every kind."),
    "accumulation": Load("Accumulation × 4", 16, 4, "Steps of 16 samples in 4 portions, each with one item of every kind."),
    "mixed": Load(
        "Mixed batches",
        16,
        2,
        "Steps of 16 samples in 2 portions: text alone, several images, sounds, texts of ragged length, broken samples. "
        "In the first step one process has no item at all while another has several, in the second no process has any, "
        "in the third some have not a single sample.",
        mixed=True,
    ),
}  # fmt: skip
