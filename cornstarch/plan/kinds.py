"""The words that a plan and a config are written with: every literal type once, and what each kind implies."""

from __future__ import annotations

from typing import Literal, get_args

Precision = Literal["fp32", "bf16", "fp16"]
CpMode = Literal["ring_attn", "all_to_all", "gather"]
CpDistribution = Literal["uniform", "zigzag", "makespan_min", "auto"]
DataKind = Literal["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "local_sgd", "diloco", "async", "gossip"]
RankPlacement = Literal["auto", "shared", "own", "colocated", "first_stage"]
CompressionKind = Literal["none", "bf16", "fp16", "topk", "randomk", "quantize", "powersgd"]
GossipGraph = Literal["ring", "torus", "exponential", "random_pairs"]

CP_MODES: tuple[CpMode, ...] = get_args(CpMode)
CP_DISTRIBUTIONS: tuple[CpDistribution, ...] = get_args(CpDistribution)
DATA_KINDS: tuple[DataKind, ...] = get_args(DataKind)

ZERO_KINDS: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3")
"""The kind of each ZeRO stage."""
REPLICATED: tuple[DataKind, ...] = ("ddp", "zero1")
"""Kinds that keep full parameters on every rank: torch's DistributedDataParallel."""
UNSYNCHRONIZED: tuple[DataKind, ...] = ("local_sgd", "diloco", "async", "gossip")
"""Kinds whose ranks keep full parameters of their own: a backward pass communicates nothing."""
COMPRESSIBLE: tuple[DataKind, ...] = (*REPLICATED, "hsdp", "local_sgd", "diloco")
"""Kinds that can compress what they communicate."""
SHARDED: tuple[DataKind, ...] = ("fsdp1", "fsdp2", "zero2", "zero3", "hsdp")
"""Kinds that shard the parameters."""
FULLY_SHARD: tuple[DataKind, ...] = ("fsdp2", "zero2", "zero3", "hsdp")
"""Kinds that torch's `fully_shard` implements."""
SPLIT_BACKWARD: tuple[str, ...] = ("zero_bubble", "auto")
"""Schedules that may compute the gradients of inputs and of weights at different times."""

REGISTERED: dict[str, set[str]] = {key: set() for key in ("cp_mode", "compression", "tracker", "task", "data_format")}
"""Names that `register_…` functions have added to the literal types of a config (docs/extending.md)."""

LANGUAGE_MODEL = "language_model"
"""The module at which all encoders meet."""
WHOLE_MODEL = "model"
"""The module of a model that is not split into encoders and a language model."""
