"""How a run is spread over processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cornstarch.plan.plan import Plan
from cornstarch.train.config.values import AboveZero, NotNegative, Positive, Precision, Rate, Section


class ModuleParallelConfig(Section):
    """How one module is spread: an encoder with its projector, the language model, or a whole model."""

    tp: Positive = 1
    """Ranks that each matrix is cut over (tensor parallelism)."""
    cp: Positive = 1
    """Ranks that each sequence is cut over (context parallelism)."""
    cp_mode: Literal["ring_attn", "all_to_all", "gather"] = "ring_attn"
    """How attention sees the tokens of the other ranks."""
    cp_distribution: Literal["uniform", "zigzag", "makespan_min", "auto"] = "auto"
    """Which tokens each rank gets."""
    stages: Positive = 1
    """Pipeline stages: sets of ranks that hold some of the layers each."""
    virtual_stages: Positive = 1
    """Parts of the layers that each of these sets holds (interleaving)."""
    layers: Annotated[list[Positive], Field(min_length=1)] | None = None
    """How many layers each of these parts has, in order. Default: parts that weigh the same."""
    zero: Literal[0, 1, 2, 3] | None = None
    """The ZeRO stage of this module alone. Default: what `data.kind` says."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    precision: Precision | None = None
    """What the module is computed in. Default: the run's."""
    tp_sequence: bool = False
    """Cut activations between attention and feed-forward layers, too, along tokens (sequence parallelism)."""
    tp_vocabulary: bool = False
    """Cut the table of embeddings and the head of a language model, too, by words."""


class CompressionConfig(Section):
    """How gradients, or changes of weights, are made smaller for the wire."""

    kind: Literal["none", "bf16", "fp16", "topk", "randomk", "quantize", "powersgd"] = "none"
    """bf16, fp16: numbers of half the size; topk: the largest of each block; randomk: some, the same in all processes;
    quantize: few bits each; powersgd: two thin matrices for each matrix."""
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.01
    """topk, randomk: the share of the numbers that is sent."""
    bits: Literal[8, 4, 1] = 8
    """quantize: of each number; 1: the sign alone."""
    block: Positive = 1024
    """topk, quantize: numbers that have their largest chosen together, or one scale together."""
    rank: Positive = 4
    """powersgd: columns of the thin matrices."""
    error_feedback: bool = True
    """Remember what was not sent, and add it in the next step."""
    stochastic: bool = True
    """quantize with 8 or 4 bits: round up or down by chance, right on average."""
    warmup: NotNegative = 0
    """Steps at the beginning that send everything; at least 2 with powersgd."""
    seed: NotNegative = 0
    """Of what is chosen or rounded by chance."""


class LocalConfig(Section):
    """local_sgd, diloco: processes train by themselves for some steps, then bring their weights together."""

    every: Positive = 16
    """Steps between two exchanges."""
    outer_learning_rate: Rate = 0.7
    """diloco: how far the weights go along the mean change."""
    outer_momentum: Rate = 0.9
    """diloco: of the outer optimizer, Nesterov's."""
    overlap: bool = False
    """diloco: train on while changes travel; they are applied when the next exchange begins."""


class AsynchronousConfig(Section):
    """async: each process applies what has arrived, and waits only for those that are too far behind."""

    staleness: NotNegative = 4
    """Steps that a process may be ahead of the slowest."""
    scale_learning_rate: bool = True
    """Apply a change that is s steps old with 1 / (1 + s) of its weight."""


class GossipConfig(Section):
    """gossip: each process averages its weights with a few neighbours only."""

    graph: Literal["ring", "torus", "exponential", "random_pairs"] = "ring"
    """Who the neighbours are: the two beside; the four around; those 1, 2, 4, … ahead, in turn; one by chance."""
    overlap: bool = True
    """Let weights travel while the next gradients are computed."""
    wait: bool = True
    """Wait for the neighbours' weights of the same step; false: average with those that have come."""
    seed: NotNegative = 0
    """random_pairs: of the pairs."""


class DataParallelConfig(Section):
    """Data parallelism: what every process keeps, and what they share."""

    kind: Literal[
        "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "hsdp", "local_sgd", "diloco", "async", "gossip"
    ] = "ddp"
    """ddp: everything whole in every process; zero1: optimizer states shared out; zero2: gradients too; zero3, fsdp1,
    fsdp2: parameters too; hsdp: fsdp2 within each of several copies; local_sgd, diloco, async, gossip: processes that
    are not in step (slow networks)."""
    replicate: Positive | None = None
    """hsdp: the number of copies."""
    param_dtype: Precision | None = None
    """What sharded parameters are gathered and computed in. Default: what they are kept in."""
    reduce_dtype: Precision | None = None
    """What gradients are summed over processes in. Default: what they are computed in."""
    buffer_dtype: Precision | None = None
    """fsdp1: what buffers are cast to."""
    bucket_mb: AboveZero | Literal["auto"] | None = None
    """ddp, zero1: megabytes of gradients that are summed together; auto: as suits the link, measured at the start.
    Default: torch's."""
    static_graph: bool = False
    """ddp, zero1: every step uses the same parameters in the same order."""
    gradient_as_bucket_view: bool = True
    """ddp, zero1: gradients lie in the buckets, instead of being copied there."""
    find_unused: bool = True
    """ddp, zero1: look in every step for parameters without a gradient (a layer that no token reaches)."""
    offload: bool = False
    """Sharded parameters and the optimizer wait in the CPU's memory."""
    reshard_after_forward: bool | int | None = None
    """Whether gathered parameters are freed after forward and gathered again for backward; a number: over so many."""
    prefetch: NotNegative = 0
    """Units whose parameters are gathered ahead of the one that computes."""
    wrap: Literal["auto", "none"] | list[str] = "auto"
    """What is gathered together: auto: layers; none: the whole model; or names of classes."""
    wrap_min_parameters: Positive | None = None
    """Layers with fewer parameters are gathered with what is around them."""
    compression: CompressionConfig = CompressionConfig()
    local: LocalConfig = LocalConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    gossip: GossipConfig = GossipConfig()


class ParallelConfig(Section):
    """How the run is spread over processes, of which there are as many as it is started with.

    `parallel: auto` is short for `parallel: {auto: true}`.
    """

    modules: dict[str, ModuleParallelConfig] = {}
    """By name: each encoder, and language_model; or model, for a model that is not taken apart."""
    data: DataParallelConfig = DataParallelConfig()
    ranks: Literal["auto", "shared", "own", "colocated", "first_stage"] = "auto"
    """shared: every rank holds all modules; own: each module has ranks of its own; colocated: the encoders share ranks;
    first_stage: the encoders stand on the ranks of the language model's first stage."""
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "auto"] = "1f1b"
    """In which order the stages of a pipeline work."""
    verify: Literal["auto", "always", "never"] = "auto"
    """Try the plan on a tiny twin of the model before training. auto: if it cuts a model that no test has cut so."""
    auto: bool = False
    """Choose the plan when the run is started, for the processes that there are; then nothing above but `verify`
    is said."""
    cluster: str | None = None
    """auto: what the processes run on, a name or a file (docs/clusters.md). Default: this machine, by the catalogue."""
    costs: str | None = None
    """auto: a file of `cornstarch profile`. Default: what layers cost is counted."""

    @model_validator(mode="after")
    def _makes_sense(self) -> ParallelConfig:
        chosen = ("modules", "data", "ranks", "schedule")
        said = [name for name in chosen if getattr(self, name) != type(self).model_fields[name].default]
        if self.auto and said:
            raise ValueError(
                f"`auto` chooses {' and '.join(f'`{name}`' for name in said)} itself; leave one of them out"
            )
        for name in ("cluster", "costs"):
            if getattr(self, name) is not None and not self.auto:
                raise ValueError(f"`{name}` is what `auto` chooses by; write `auto: true` beside it, or leave it out")
        self.plan()
        return self

    def plan(self) -> Plan:
        """Return what is meant as a plan; with `auto`, before it is chosen: nothing is spread."""
        data = self.model_dump(mode="json", exclude={"verify", "auto", "cluster", "costs"})
        if not self.modules:
            del data["modules"]
        return Plan.from_data(data)
