"""Twenty runs, the published recipe nearest to each, and why the planner's answer differs from it: data only.

A recipe says how its authors lay the language model out; `benchmarks/twenty_plans.py` predicts it on the same cluster,
with the encoders in the language model's first stage or on its ranks. A batch is the recipe's, if it states one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
VIT_22B = {  # Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters (arXiv 2302.05442), as a SigLIP
    "model_type": "siglip_vision_model", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 48,
    "num_attention_heads": 48, "image_size": 336, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "decoder_layers": 1, "num_mel_bins": 128, "max_source_positions": 1500,
}  # fmt: skip


def llama(layers: int, width: int, inner: int, heads: int) -> dict[str, Any]:
    """Return the shape of a Llama 3.1, or of a model that differs in its sizes alone."""
    return {
        "model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 2**20,
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
    }  # fmt: skip


def qwen_moe(layers: int, width: int, inner: int, heads: int) -> dict[str, Any]:
    """Return the shape of a Qwen3 with 128 experts, of which a token has 8."""
    return {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": inner, "num_hidden_layers": layers,
        "hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": heads,
        "max_position_embeddings": 40_960,
    }  # fmt: skip


LANGUAGE = {
    "8B": llama(32, 4096, 14336, 32),
    "32B": {**llama(64, 5120, 27648, 40), "vocab_size": 152_064},  # Qwen2.5-32B
    "70B": llama(80, 8192, 28672, 64),
    "405B": llama(126, 16384, 53248, 128),
    "30B-A3B": qwen_moe(48, 2048, 768, 32),
    "235B-A22B": qwen_moe(94, 4096, 1536, 64),
}
VISION = {"vision": SIGLIP}
BOTH = {"audio": WHISPER, "vision": VIT_22B}


@dataclass(frozen=True)
class Recipe:
    """How others lay such a language model out."""

    where: str
    """The source."""
    tp: int = 1
    cp: int = 1
    stages: int = 1
    virtual: int = 1
    ep: int = 1
    rows: int = 1
    """Of a microbatch."""
    kind: str = "zero2"
    """Megatron's distributed optimizer keeps weights in half precision and shards the states: zero2."""
    checkpointing: bool = False
    layers: tuple[int, ...] | None = None

    def describe(self) -> str:
        """Return the sizes on one line."""
        sizes = (("tp", self.tp), ("pp", self.stages), ("vp", self.virtual), ("cp", self.cp), ("ep", self.ep))
        words = [f"{name} {size}" for name, size in sizes if size > 1] or ["no model parallelism"]
        rows = [f"{self.rows} row{'s' if self.rows > 1 else ''} a microbatch", self.kind]
        return ", ".join([*words, *rows, *(["checkpointing"] if self.checkpointing else [])])


@dataclass(frozen=True)
class Case:
    """A run on a cluster."""

    name: str
    language: str
    cluster: str
    """A name, or the content of a cluster file."""
    batch: int
    recipe: Recipe
    why: str
    """Why the plans differ, or that they do not."""
    tokens: int = 8192
    encoders: dict[str, Any] = field(default_factory=dict)

    @property
    def is_mixture(self) -> bool:
        return "A" in self.language


BRIDGE = "Megatron-Bridge, scripts/performance, bf16"
SLOW = "name: 8x8xH100 at 10 Gbit/s\nnodes: 8\nper_node: 8\ndevice: H100\nbetween: {bandwidth: 10 Gbit/s, latency: 100 us}\n"
A100 = "name: %dx8xA100-80\nnodes: %d\nper_node: 8\ndevice: A100-80\nbetween: {bandwidth: 200 Gbit/s, latency: 14 us}\n"
CUT_405B = (1, *[2] * 63)  # as the paper: a layer less in the first and the last stage

CASES = (
    Case("SigLIP + 8B", "8B", "8xH100", 128, Recipe(BRIDGE, cp=2), "", encoders=VISION),
    Case("SigLIP + 8B", "8B", A100 % (16, 16), 1024, Recipe("llm-foundry, MPT-7B", rows=4, kind="zero3"), "", encoders=VISION),
    Case("SigLIP + 8B", "8B", "64x8xH100", 2048, Recipe("torchtitan, 8B on 128 H100", rows=2, kind="fsdp2"), "", encoders=VISION),
    Case("SigLIP + 32B", "32B", "2x8xH100", 32, Recipe("NeMo 2, qwen25_32b", tp=8, stages=2, rows=2), "", 4096, VISION),
    Case("SigLIP + 32B", "32B", "8x8xH200", 256, Recipe("NeMo 2, qwen25_32b", tp=8, stages=2, rows=2), "", 4096, VISION),
    Case("SigLIP + 70B", "70B", "8x8xH100", 128, Recipe(BRIDGE, tp=4, stages=4, virtual=5, cp=2), "", encoders=VISION),
    Case("SigLIP + 70B", "70B", "8x8xB200", 128, Recipe(BRIDGE, tp=2, stages=4, virtual=5, cp=2), "", encoders=VISION),
    Case("SigLIP + 70B", "70B", A100 % (32, 32), 1024, Recipe("llm-foundry, MPT-70B", rows=2, kind="zero3", checkpointing=True), "", 4096, VISION),
    Case("SigLIP + 70B", "70B", "128x8xH100", 2048, Recipe("torchtitan, 70B on 256 H100", tp=8, rows=2, kind="fsdp2", checkpointing=True), "", encoders=VISION),
    Case("SigLIP + 405B", "405B", "128x8xH100", 512, Recipe(BRIDGE, tp=8, stages=8, virtual=8, cp=2, layers=CUT_405B), "", encoders=VISION),
    Case("SigLIP + 405B", "405B", "512x8xH100", 2048, Recipe("Llama 3, table 4", tp=8, stages=16, virtual=4, layers=CUT_405B), "", encoders=VISION),
    Case("SigLIP + 405B", "405B", "16x8xB200", 64, Recipe(BRIDGE, tp=4, stages=8, virtual=8, cp=2, layers=CUT_405B), "", encoders=VISION),
    Case("Whisper + ViT-22B + 70B", "70B", "32x8xH100", 512, Recipe("DistTrain's Megatron-LM baseline, sizes assumed", tp=8, stages=8), "", 8192, BOTH),
    Case("8B, 128k tokens", "8B", "8x8xH100", 512, Recipe("NeMo 2, llama3_8b_128k", tp=4, stages=2, cp=8), "", 131_072),
    Case("8B, 128k tokens", "8B", "16x8xB200", 32, Recipe("NeMo, long sequence performance", tp=2, cp=4), "", 131_072),
    Case("8B, 1M tokens", "8B", "32x8xH100", 8, Recipe("NeMo, long sequence performance", tp=4, cp=16), "", 1_048_576),
    Case("8B, 1M tokens", "8B", "128x8xB200", 4, Recipe("NeMo, long sequence performance", tp=4, cp=16), "", 1_048_576),
    Case("SigLIP + 8B, slow links", "8B", SLOW, 1024, Recipe("torchtitan, HSDP", rows=2, kind="hsdp"), "", encoders=VISION),
    Case("SigLIP + 30B-A3B", "30B-A3B", "2x8xH100", 1024, Recipe(BRIDGE, ep=16), "", 4096, VISION),
    Case("SigLIP + 235B-A22B", "235B-A22B", "32x8xH100", 2048, Recipe(BRIDGE, tp=2, stages=8, virtual=4, ep=32), "", 4096, VISION),
)
OUTLOOK = ""
