"""Published throughput of training runs on many GPUs, each with its model, machines and layout: data only.

A row says what was published, where, which part of its layout comes from there, and what is assumed because nothing was
published. `looked_at`: the row's error was seen before the rules were settled. The others were listed, with their
figures and layouts, before any of them was predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from published_foundry_table import A100_40, A100_80, H100, H100_MANY

Unit = Literal["tokens/s/GPU", "TFLOP/s", "% MFU", "s"]


@dataclass(frozen=True)
class Shape:
    """A decoder-only language model."""

    family: Literal["gpt", "llama"]
    layers: int
    width: int
    heads: int
    vocabulary: int
    inner: int = 0
    """Of the feed-forward layers. Default: four times the width."""
    key_value_heads: int = 0
    tied: bool = True
    attention: str = "sdpa"
    """eager: the scores of all pairs of tokens are written to memory."""

    def config(self, tokens: int) -> dict[str, Any]:
        """Return the configuration for transformers."""
        if self.family == "gpt":  # without dropout, which the sources either switch off or do not mention
            return {
                "model_type": "gpt2", "vocab_size": self.vocabulary, "n_embd": self.width, "n_layer": self.layers,
                "n_head": self.heads, "n_positions": tokens, "activation_function": "gelu", "resid_pdrop": 0.0,
                "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": self.tied,
                "attn_implementation": self.attention,
            }  # fmt: skip
        return {
            "model_type": "llama", "vocab_size": self.vocabulary, "hidden_size": self.width,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads or self.heads, "intermediate_size": self.inner,
            "max_position_embeddings": tokens, "tie_word_embeddings": self.tied,
        }  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published run."""

    name: str
    shape: Shape
    tokens: int
    """Of a sequence."""
    nodes: int
    machine: str
    """A name in `MACHINES`."""
    batch: int
    """Sequences of a step."""
    microbatch: int
    """Sequences of a replica's microbatch."""
    published: float
    unit: Unit
    source: str
    layout: str
    """Where the layout comes from, and what is assumed."""
    looked_at: bool
    kind: str = "fsdp2"
    """The data parallelism."""
    compiled: bool = False
    checkpointing: bool = False
    tp: int = 1
    cp: int = 1
    stages: int = 1
    virtual: int = 1
    per_node: int = 8
    module: dict[str, Any] = field(default_factory=dict)
    """Further options of the module's plan."""
    loop: dict[str, Any] = field(default_factory=dict)
    """Further options of the loop."""

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    @property
    def replicas(self) -> int:
        return self.devices // (self.tp * self.cp * self.stages)


def attention(device: str, forward: float, backward: float, between: str) -> str:
    """Return a cluster file whose software has attention kernels of its time."""
    reached = f"{{attention: {forward}, attention_backward: {backward}}}"
    return f"device: {{name: {device}, reached: {reached}}}\nbetween: {{bandwidth: {between}, latency: 14 us}}\n"


MACHINES = {
    "H100": "device: H100\nbetween: {bandwidth: 400 Gbit/s, latency: 14 us}\n",
    "H100, 500 W": "device: {name: H100, memory: 95 GiB, bandwidth: 2.4 TB/s, power: 500 W}\n"
    "between: {bandwidth: 400 Gbit/s, latency: 14 us}\n",
    "A100-80": "device: A100-80\nbetween: {bandwidth: 200 Gbit/s, latency: 14 us}\n",
    # FlashAttention-3's figures for its predecessor at 16k tokens: 335 and 322 of 989 TFLOP/s.
    "H100, FlashAttention-2": attention("H100", 0.34, 0.33, "400 Gbit/s"),
    # FlashAttention-2 is 1.3 to 1.5 times as fast as attention in Triton, and twice as fast backward (its paper).
    "H100, Triton": attention("H100", 0.24, 0.165, "400 Gbit/s"),
    "A100-80, Triton": attention("A100-80", 0.44, 0.24, "200 Gbit/s"),
    "A100-40, Triton": attention("A100-40", 0.44, 0.24, "200 Gbit/s"),
}
"""Cluster files, without the number of nodes. Links inside nodes are the catalogue's."""

FOUNDRY = "llm-foundry, scripts/train/benchmarking/README.md"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
ASYNC_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
LLAMA = "The Llama 3 Herd of Models (arXiv 2407.21783), table 4"
MEGATRON = "Megatron-LM README (2024), strong scaling"
PTDP = "Narayanan et al., Efficient Large-Scale Language Model Training (arXiv 2104.04473), table 1"
RECOMPUTATION = "Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), tables 3 and 5"

MPT = {
    "1B": Shape("gpt", 24, 2048, 16, 50368),
    "3B": Shape("gpt", 32, 2560, 20, 50368),
    "7B": Shape("gpt", 32, 4096, 32, 50368),
    "13B": Shape("gpt", 40, 5120, 40, 50368),
    "30B": Shape("gpt", 48, 7168, 56, 50368),
    "70B": Shape("gpt", 80, 8192, 64, 50368),
}
SELECTIVE = {"activation_budget": 0.6}
"""What is left if every second product is computed again, as torchtitan does: 27,600 of 47,100 numbers a token."""
LLAMA_8B = Shape("llama", 32, 4096, 32, 128256, 14336, 8, tied=False)
LLAMA_70B = Shape("llama", 80, 8192, 64, 128256, 28672, 8, tied=False)
LLAMA_405B = Shape("llama", 126, 16384, 128, 128256, 53248, 8, tied=False)


def mpt(
    size: str, nodes: int, machine: str, microbatch: int, batch: int, published: float, looked_at: bool, **more: Any
) -> Row:
    """Return a row of llm-foundry's tables."""
    where = (
        "sequence, batch, microbatch, FULL_SHARD (zero3) or SHARD_GRAD_OP (zero2), checkpointing: the table. Layers "
        "not compiled, flash attention, bf16 gathers, float32 reductions: the repository's defaults at that time. "
        "70B on A100s and all on A100-40 reduce in bf16 (PURE), which counts here as float32. Attention in Triton; "
        "from 128 H100s on FlashAttention-2: its script's default then and later."
    )
    tokens = more.pop("tokens", 2048)
    name = f"MPT-{size}, {nodes * 8} × {machine}" + (f", {tokens:,} tokens" if tokens != 2048 else "")
    machine += ", FlashAttention-2" if machine == "H100" and nodes >= 16 else ", Triton"
    return Row(
        name, MPT[size], tokens, nodes, machine, batch, microbatch, published, "tokens/s/GPU",
        FOUNDRY, where, looked_at, **more,
    )  # fmt: skip


def read_table(text: str, machine: str) -> list[Row]:
    """Return the rows of a table of `published_foundry_table.py`, which were held back."""
    rows = []
    for line in text.strip().splitlines():
        size, tokens, devices, microbatch, batch, again, published = line.split()
        many = text is H100_MANY and size in ("1B", "3B")
        rows.append(
            mpt(
                size, int(devices) // 8, machine, int(microbatch), int(batch), float(published), False,
                tokens=int(tokens), checkpointing=again == "c", kind="zero2" if many else "fsdp2",
            )  # fmt: skip
        )
    return rows


def titan(name: str, shape: Shape, nodes: int, microbatch: int, published: float, source: str, **more: Any) -> Row:
    """Return a row of torchtitan's tables."""
    where = (
        "local batch, selective (every second product) or full checkpointing, FSDP and TP sizes, compile: the table."
    )
    machine = "H100, 500 W"
    batch = microbatch * nodes * 8 // more.get("tp", 1)
    common: dict[str, Any] = {"looked_at": True, "compiled": True, **more}
    return Row(name, shape, 8192, nodes, machine, batch, microbatch, published, "tokens/s/GPU", source, where, **common)


def llama(name: str, nodes: int, tokens: int, cp: int, published: float) -> Row:
    """Return a row of Llama 3's table."""
    where = (
        "tp 8, cp, 16 stages, sequence, 16 M tokens a batch, no checkpointing, gradients and optimizer states sharded, "
        "parameters not gathered again (zero2), a layer less in the first and the last stage: the paper. Assumed: 4 "
        "virtual stages (of 2 layers); 1 sequence a microbatch; sequence-parallel tp; operations counted with causal "
        "attention."
    )
    return Row(
        name, LLAMA_405B, tokens, nodes, "H100", 2048 * 8192 // tokens, 1, published, "TFLOP/s", LLAMA, where, True,
        kind="zero2", compiled=True, tp=8, cp=cp, stages=16, virtual=4,
        module={"tp_sequence": True, "tp_vocabulary": True, "layers": (1, *[2] * 63)},
    )  # fmt: skip


def gpt3(nodes: int, published: float) -> Row:
    """Return a row of Megatron-LM's strong scaling."""
    where = (
        "175 B, sequence 4,096, vocabulary 131,072, 1,152 sequences, overlapped communication, no checkpointing: the "
        "README. Assumed: tp 8, 12 stages of 4 virtual ones (2 layers each, as NeMo's recipe of this model), 1 "
        "sequence a microbatch, sequence-parallel tp, sharded optimizer with weights in bf16 (zero2)."
    )
    shape = Shape("gpt", 96, 12288, 96, 131072)
    return Row(
        f"GPT-3 175B, {nodes * 8:,} × H100", shape, 4096, nodes, "H100", 1152, 1, published, "% MFU", MEGATRON, where,
        True, kind="zero2", compiled=True, tp=8, stages=12, virtual=4,
        module={"tp_sequence": True, "tp_vocabulary": True},
    )  # fmt: skip


def ptdp(
    name: str, shape: Shape, nodes: int, stages: int, virtual: int, batch: int, microbatch: int, tera: float,
    tp: int = 8, looked_at: bool = True,
) -> Row:  # fmt: skip
    """Return a row of the table of 2021: everything is recomputed."""
    where = (
        "tp, stages, GPUs, batch, interleaved schedule, full recomputation, 8 × 200 Gbit/s a node: the paper. "
        "Attention writes its scores (eager), as in 2021. Assumed: the microbatch, the number of virtual stages; "
        "layers count as compiled, for the paper fuses them."
    )
    return Row(
        f"{name}, {nodes * 8:,} × A100", replace(shape, attention="eager"), 2048, nodes, "A100-80", batch, microbatch,
        tera, "TFLOP/s", PTDP, where, looked_at,
        kind="zero2", compiled=True, checkpointing=True, tp=tp, stages=stages, virtual=virtual,
        module={"tp_vocabulary": tp > 1},
    )  # fmt: skip


def recomputation(
    name: str, shape: Shape, devices: int, stages: int, virtual: int, batch: int, microbatch: int, seconds: float
) -> Row:
    """Return a row of the paper of 2022: only the inside of attention is recomputed."""
    where = (
        "tp 8, stages, virtual stages, GPUs, batch, microbatch, sequence parallelism, no replicas: the paper. "
        "Attention writes its scores (eager), which are recomputed: an activation budget that leaves no room for them. "
        "Layers count as compiled, for the paper fuses them."
    )
    # A token keeps 12 numbers for each of the width, and one for each head and token that it sees.
    budget = 12 / (12 + shape.heads * 2048 / shape.width) + 0.01
    return Row(
        f"{name}, {devices:,} × A100", replace(shape, attention="eager"), 2048, devices // 8, "A100-80", batch,
        microbatch, seconds, "s",
        RECOMPUTATION, where, True, kind="zero2", compiled=True, tp=8, stages=stages, virtual=virtual,
        module={"tp_sequence": True, "tp_vocabulary": True}, loop={"activation_budget": round(budget, 2)},
    )  # fmt: skip


ROWS = (
    mpt("7B", 1, "A100-80", 6, 96, 4641, True),
    mpt("7B", 1, "H100", 6, 48, 10643, True),
    mpt("7B", 64, "H100", 6, 3072, 9670, True),
    mpt("1B", 64, "H100", 12, 6144, 39837, True, kind="zero2"),
    mpt("30B", 1, "H100", 3, 504, 2002, True, checkpointing=True),
    mpt("30B", 64, "H100", 8, 4096, 2115, True, checkpointing=True),
    mpt("70B", 16, "H100", 8, 1024, 1058, True, checkpointing=True),
    mpt("70B", 64, "H100", 8, 4096, 1007, True, checkpointing=True),
    titan("Llama 8B, 8 × H100", LLAMA_8B, 1, 2, 6667, TITAN, loop=SELECTIVE),
    titan("Llama 8B, 128 × H100", LLAMA_8B, 16, 2, 6514, TITAN, loop=SELECTIVE),
    titan(
        "Llama 8B, FSDP 8 × TP 8", LLAMA_8B, 8, 12, 4378, ASYNC_TP, tp=8, module={"tp_sequence": True}, loop=SELECTIVE,
    ),
    titan(
        "Llama 70B, FSDP 32 × TP 8", LLAMA_70B, 32, 16, 597, ASYNC_TP, tp=8, module={"tp_sequence": True},
        checkpointing=True,
    ),
    llama("Llama 3 405B, 8,192 × H100", 1024, 8192, 1, 430),
    llama("Llama 3 405B, 16,384 × H100", 2048, 8192, 1, 400),
    llama("Llama 3 405B, 16,384 × H100, 128k", 2048, 131072, 16, 380),
    gpt3(12, 47),
    gpt3(576, 42),
    # Held back until they were predicted for the first time, and looked at since.
    mpt("13B", 1, "A100-80", 2, 48, 2262, True),
    mpt("30B", 1, "A100-80", 3, 504, 916, True, checkpointing=True),
    mpt("70B", 8, "A100-80", 8, 2048, 410, True, checkpointing=True),
    mpt("13B", 16, "A100-40", 16, 2048, 1972, True, checkpointing=True),
    mpt("13B", 64, "H100", 16, 8192, 4952, True, checkpointing=True),
    mpt("3B", 64, "H100", 8, 4096, 21664, True, kind="zero2"),
    mpt("7B", 1, "H100", 2, 32, 3318, True, tokens=32768, checkpointing=True),
    ptdp("GPT 18.4B", Shape("gpt", 40, 6144, 48, 51200), 32, 1, 1, 1024, 4, 135),
    ptdp("GPT 145.6B", Shape("gpt", 80, 12288, 96, 51200), 192, 8, 5, 2304, 1, 148),
    ptdp("GPT 1T", Shape("gpt", 128, 25600, 160, 51200), 384, 64, 2, 3072, 1, 163),
    recomputation("GPT 22B", Shape("gpt", 48, 6144, 64, 51200), 8, 1, 1, 4, 4, 1.10),
    recomputation("GPT 175B", Shape("gpt", 96, 12288, 96, 51200), 64, 8, 3, 64, 1, 13.75),
    recomputation("GPT 530B", Shape("gpt", 105, 20480, 128, 51200), 280, 35, 3, 280, 1, 37.83),
    recomputation("GPT 1T", Shape("gpt", 128, 25600, 160, 51200), 512, 64, 1, 512, 1, 71.49),
    # Held back.
    *read_table(H100_MANY, "H100"),
    *read_table(H100, "H100"),
    *read_table(A100_80, "A100-80"),
    *read_table(A100_40, "A100-40"),
    ptdp("GPT 1.7B", Shape("gpt", 24, 2304, 24, 51200), 4, 1, 1, 512, 4, 137, tp=1, looked_at=False),
    ptdp("GPT 3.6B", Shape("gpt", 30, 3072, 32, 51200), 8, 1, 1, 512, 4, 138, tp=2, looked_at=False),
    ptdp("GPT 7.5B", Shape("gpt", 36, 4096, 32, 51200), 16, 1, 1, 512, 4, 142, tp=4, looked_at=False),
    ptdp("GPT 39.1B", Shape("gpt", 48, 8192, 64, 51200), 64, 2, 4, 1536, 1, 138, looked_at=False),
    ptdp("GPT 76.1B", Shape("gpt", 60, 10240, 80, 51200), 128, 4, 5, 1792, 1, 140, looked_at=False),
    ptdp("GPT 310.1B", Shape("gpt", 96, 16384, 128, 51200), 240, 16, 3, 2160, 1, 155, looked_at=False),
    ptdp("GPT 529.6B", Shape("gpt", 105, 20480, 128, 51200), 315, 35, 3, 2520, 1, 163, looked_at=False),
)  # fmt: skip

LEFT_OUT = (
    "NeMo's and Megatron-Bridge's pages, and torchtitan's float8 rows: fp8, which the planner does not price.",
    "Megatron-Bridge's rows in bf16 are of mixtures of experts (gpt-oss 120B on 64 H100 and B200), whose ranks with "
    "all experts lie inside a node while stages cross nodes: an order of ranks that this package does not have.",
    "torchtitan's eager rows (5,762 and 5,605 tokens/s/GPU): every second product is recomputed in layers that are not "
    "compiled, which cannot be said here.",
    "MegaScale: parallel transformer blocks and sliding-window attention, which none of the model families here has; "
    "its table could not be read again for its Megatron-LM baseline.",
    "DistTrain: multimodal models whose sizes and layouts are not published.",
)
"""What was looked for and is no row, and why."""
