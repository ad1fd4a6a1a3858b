"""The columns of the matrix: how it is trained. To add one, add an entry to `COLUMNS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cornstarch.plan import Plan
from tests.parity.rows import Row

MOST = 4
"""Processes."""


@dataclass(frozen=True)
class Column:
    """A way to spread a run over processes."""

    title: str
    replicas: int
    """Of the model, which may be sharded over them."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The section `parallel.data` of a `RunConfig`."""
    module: Mapping[str, Any] = field(default_factory=dict)
    """What `parallel.modules` says about every module: tp, cp."""
    last: Mapping[str, Any] = field(default_factory=dict)
    """What it says about the language model, or the whole model, besides: stages."""
    ranks_of: str = "auto"
    """Whether modules share their ranks; those of different sizes do only if it is said."""
    schedule: str = "1f1b"
    """Of the stages of a pipeline."""
    encoders_only: bool = False
    """Whether it says nothing about a model without encoders."""
    unused_are_zero: bool = False
    """Whether a trained parameter that the loss does not depend on has a gradient of zeros; one process has none."""
    refused: str | None = None
    """What the code answers, if it cannot do this at all."""
    refused_rows: Mapping[str, str] = field(default_factory=dict)
    """By row: what the code answers, if it cannot do this row."""

    def parallel(self, row: Row) -> dict[str, Any]:
        """Return the section `parallel` of a run."""
        modules = {name: dict(self.module) for name in row.modules}
        modules[row.modules[-1]].update(self.last)
        modules = modules if self.module or self.last or self.ranks_of == "own" else {}
        return {"data": dict(self.data), "modules": modules, "ranks": self.ranks_of, "schedule": self.schedule}

    def loads(self, row: str) -> list[str]:
        """Return what it is tried with: what is refused, once; what is cut, in microbatches only when it is mixed."""
        if self.refusal(row):  # one microbatch cannot be interleaved, whatever it is of
            return ["accumulation" if self.schedule == "interleaved" else "plain"]
        if self.is_pipeline:  # microbatches are its microbatches
            return ["accumulation", "mixed"]
        return ["plain", "mixed"] if self.module or self.last else list(LOADS)

    @property
    def is_pipeline(self) -> bool:
        """Whether stages work one after the other."""
        return "stages" in self.last or self.ranks_of == "own"

    @property
    def is_cut(self) -> bool:
        """Whether matrices are cut over processes."""
        return max(self.module.get("tp", 1), self.last.get("tp", 1)) > 1

    def fits(self, row: Row) -> bool:
        """Whether it says something about a row, and four processes are enough for it."""
        return (len(row.modules) > 1 or not self.encoders_only) and self.ranks(row) <= MOST

    def ranks(self, row: Row) -> int:
        """Return how many processes it takes."""
        plan = {name: value for name, value in self.parallel(row).items() if value}
        return self.replicas * Plan.from_data(plan).replica

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


# What cannot be cut inside its layers, and what cannot be cut along its tokens.
UNCUT = {"mlp": "Perceptron has no layer that tensor parallelism knows how to cut"}
IN_ONE_PIECE = {
    "mlp": "Perceptron is not a transformers model: its tokens cannot be cut",
    "t5": "its forward takes no position_ids, so each rank would count its tokens from 0",
}
BOTH = {**IN_ONE_PIECE, **UNCUT}
ONE_LIST = {**UNCUT, "lora": "self_attn has adapters", "t5": "it has an encoder and a decoder"}
FEW_HEADS = {**UNCUT, "fused": "it has 2 key and value heads"}
OWN_LOSS = {**UNCUT, "t5": "it computes its loss itself, from all logits"}

COLUMNS: dict[str, Column] = {
    "ddp": Column("ddp", 2, {"kind": "ddp"}),
    "fsdp1": Column("fsdp1", 2, {"kind": "fsdp1"}, unused_are_zero=True),
    "fsdp2": Column("fsdp2", 2, {"kind": "fsdp2"}),
    "zero1": Column("zero1", 2, {"kind": "zero1"}),
    "zero2": Column("zero2", 2, {"kind": "zero2"}),
    "zero3": Column("zero3", 2, {"kind": "zero3"}),
    "hsdp": Column("hsdp 2 × 2", 4, {"kind": "hsdp", "replicate": 2}),
    "tp": Column("tp 2", 1, module={"tp": 2}, refused_rows=UNCUT),
    "tp_sequence": Column("tp 2, sequence", 1, module={"tp": 2}, last={"tp_sequence": True}, refused_rows=ONE_LIST),
    "tp_vocabulary": Column(
        "tp 2, vocabulary", 1, module={"tp": 2}, last={"tp_vocabulary": True}, refused_rows=OWN_LOSS
    ),
    "tp4": Column("tp 4", 1, module={"tp": 4}, refused_rows=FEW_HEADS),
    "dp_tp": Column("dp 2 × tp 2", 2, module={"tp": 2}, refused_rows=UNCUT),
    "zero3_tp": Column("zero3 2 × tp 2", 2, {"kind": "zero3"}, module={"tp": 2}, refused_rows=UNCUT),
    "zero1_tp": Column("zero1 2 × tp 2", 2, {"kind": "zero1"}, module={"tp": 2}, refused_rows=UNCUT),
    "encoder_tp": Column(
        "encoders tp 2, LLM tp 1", 1, module={"tp": 2}, last={"tp": 1}, ranks_of="shared", encoders_only=True
    ),
    "llm_tp": Column(
        "encoders tp 1, LLM tp 2", 1, module={"tp": 1}, last={"tp": 2}, ranks_of="shared", encoders_only=True
    ),
    "ring": Column("cp 2, ring", 1, module={"cp": 2, "cp_mode": "ring_attn"}, refused_rows=IN_ONE_PIECE),
    "gather": Column("cp 2, gather", 1, module={"cp": 2, "cp_mode": "gather"}, refused_rows=IN_ONE_PIECE),
    "ulysses": Column("cp 2, all to all", 1, module={"cp": 2, "cp_mode": "all_to_all"}, refused_rows=IN_ONE_PIECE),
    "ring3": Column("cp 3, ring", 1, module={"cp": 3, "cp_mode": "ring_attn"}, refused_rows=IN_ONE_PIECE),
    "encoder_cp": Column(
        "encoders cp 2, LLM cp 1", 1, module={"cp": 2}, last={"cp": 1}, ranks_of="shared", encoders_only=True
    ),
    "tp_cp": Column("tp 2 × cp 2", 1, module={"tp": 2, "cp": 2}, refused_rows=BOTH),
    "dp_cp": Column("dp 2 × cp 2", 2, module={"cp": 2}, refused_rows=IN_ONE_PIECE),
    "zero1_cp": Column("zero1 × cp 2", 1, {"kind": "zero1"}, module={"cp": 2}, refused_rows=IN_ONE_PIECE),
    "zero2_cp": Column("zero2 2 × cp 2", 2, {"kind": "zero2"}, module={"cp": 2}, refused_rows=IN_ONE_PIECE),
    "pp": Column("pp 2, encoders on ranks of their own", 1, last={"stages": 2}),
    "pp_first": Column("pp 2, encoders in the first stage", 1, last={"stages": 2}, ranks_of="first_stage"),
    "pp_colocated": Column("pp 2, encoders colocated", 1, last={"stages": 2}, ranks_of="colocated", encoders_only=True),
    "pp4": Column("pp 4", 1, last={"stages": 4}, ranks_of="first_stage"),
    "pp_gpipe": Column("pp 2, gpipe", 1, last={"stages": 2}, schedule="gpipe"),
    "pp_zero_bubble": Column(
        "pp 2, zero-bubble",
        1,
        last={"stages": 2},
        schedule="zero_bubble",
        refused_rows={"t5": "the layers of an encoder-decoder share a bias"},
    ),
    "pp_interleaved": Column(
        "pp 2 × 2, interleaved",
        1,
        last={"stages": 2, "virtual_stages": 2},
        ranks_of="first_stage",
        schedule="interleaved",
    ),
    "pp_tp": Column("pp 2 × tp 2", 1, module={"tp": 2}, last={"stages": 2}, ranks_of="first_stage", refused_rows=UNCUT),
    "pp_cp": Column(
        "pp 2 × cp 2", 1, module={"cp": 2}, last={"stages": 2}, ranks_of="first_stage", refused_rows=IN_ONE_PIECE
    ),
    "pp_dp": Column("pp 2 × dp 2", 2, last={"stages": 2}, ranks_of="first_stage"),
    "pp_zero1": Column("pp 2 × zero1", 2, {"kind": "zero1"}, last={"stages": 2}, ranks_of="first_stage"),
    "pp_zero1_cp": Column(
        "pp 2 × cp 2, zero1",
        1,
        {"kind": "zero1"},
        module={"cp": 2},
        last={"stages": 2},
        ranks_of="first_stage",
        refused_rows=IN_ONE_PIECE,
    ),
    "pp_zero2": Column("pp 2 × zero2", 2, {"kind": "zero2"}, last={"stages": 2}, ranks_of="first_stage"),
    "pp_fsdp2": Column("pp 2 × fsdp2", 2, {"kind": "fsdp2"}, last={"stages": 2}, ranks_of="first_stage"),
    "pp_interleaved_tp": Column(
        "pp 2 × 2, interleaved, tp 2",
        1,
        module={"tp": 2},
        last={"stages": 2, "virtual_stages": 2},
        ranks_of="first_stage",
        schedule="interleaved",
        refused_rows=UNCUT,
    ),
    "pp_interleaved_cp": Column(
        "pp 2 × 2, interleaved, cp 2",
        1,
        module={"cp": 2},
        last={"stages": 2, "virtual_stages": 2},
        ranks_of="first_stage",
        schedule="interleaved",
        refused_rows=IN_ONE_PIECE,
    ),
    "pp_interleaved_zero2": Column(
        "pp 2 × 2, interleaved, zero2",
        2,
        {"kind": "zero2"},
        last={"stages": 2, "virtual_stages": 2},
        ranks_of="first_stage",
        schedule="interleaved",
        refused_rows={"t5": "shared.weight is in two of the stages that one process holds"},
    ),
    "tp_again": Column(
        "tp 2, activations computed again", 1, module={"tp": 2, "activation_checkpointing": True}, refused_rows=UNCUT
    ),
    "pp_again": Column(
        "pp 2, activations computed again",
        1,
        module={"activation_checkpointing": True},
        last={"stages": 2},
    ),
    "own": Column("encoders and LLM apart, dp 2", 2, ranks_of="own", encoders_only=True),
    "own_zero2": Column("encoders and LLM apart, zero2", 2, {"kind": "zero2"}, ranks_of="own", encoders_only=True),
    "tp2_tp1": Column(
        "encoders tp 2, LLM pp 2", 1, module={"tp": 2}, last={"tp": 1, "stages": 2}, ranks_of="own", encoders_only=True
    ),
    "tp1_tp2": Column(
        "encoders tp 1, LLM tp 2, apart", 1, module={"tp": 1}, last={"tp": 2}, ranks_of="own", encoders_only=True
    ),
    "cp2_cp2": Column("encoders cp 2, LLM cp 2, apart", 1, module={"cp": 2}, ranks_of="own", encoders_only=True),
    "cp1_cp2": Column(
        "encoders cp 1, LLM cp 2, apart", 1, module={"cp": 1}, last={"cp": 2}, ranks_of="own", encoders_only=True
    ),
}

LOADS: dict[str, Load] = {
    "plain": Load("Plain batches", 8, 1, "Steps of 8 samples, each with one item of every kind."),
    "accumulation": Load(
        "Accumulation × 4", 16, 4, "Steps of 16 samples in 4 microbatches, each sample with one item of every kind."
    ),
    "mixed": Load(
        "Mixed batches",
        16,
        2,
        "Steps of 16 samples in 2 microbatches: text only, several images, audio, different lengths, broken samples. "
        "In the first step, one process has no item while another has several. In the second, no process has any. In "
        "the third, some processes have no sample.",
        mixed=True,
    ),
}
