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
    "encoder_ffn_dim": 5120, "decoder_layers": 1, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120,
    "num_mel_bins": 128, "max_source_positions": 1500,
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
    is_slow: bool = False
    """Whether its search takes minutes."""


BRIDGE = "Megatron-Bridge, scripts/performance, bf16"
SLOW = (
    "name: 8x8xH100 at 10 Gbit/s\nnodes: 8\nper_node: 8\ndevice: H100\n"
    "between: {bandwidth: 10 Gbit/s, latency: 100 us}\n"
)
MIXED = "nodes:\n- {count: 2, per_node: 8, device: H100}\n- {count: 4, per_node: 8, device: A100-80}\n"
A100 = (
    "name: 32x8xA100-80\nnodes: 32\nper_node: 8\ndevice: A100-80\n"
    "between: {bandwidth: 200 Gbit/s, latency: 14 us}\n"
)
CUT_405B = (1, *[2] * 63)  # a layer less in the first stage, and the head in the last, as the paper has it

BRIDGE_8B = Recipe(BRIDGE, cp=2)
NEMO_32B = Recipe("NeMo 2, recipes/qwen25_32b.py", tp=8, stages=2, rows=2)
BRIDGE_70B_H100 = Recipe(BRIDGE, tp=4, stages=4, virtual=5, cp=2)
BRIDGE_70B_B200 = Recipe(BRIDGE, tp=2, stages=4, virtual=5, cp=2)
FOUNDRY_70B = Recipe("llm-foundry, MPT-70B", rows=2, kind="zero3", checkpointing=True)
TITAN_8B = Recipe("torchtitan, 8B on 128 H100", rows=2, kind="fsdp2")
TITAN_70B = Recipe("torchtitan, 70B on 256 H100", tp=8, rows=2, kind="fsdp2", checkpointing=True)
BRIDGE_405B_H100 = Recipe(BRIDGE, tp=8, stages=8, virtual=8, cp=2, layers=CUT_405B)
BRIDGE_405B_B200 = Recipe(BRIDGE, tp=4, stages=8, virtual=8, cp=2, layers=CUT_405B)
LLAMA_405B = Recipe("Llama 3, table 4", tp=8, stages=16, virtual=4, layers=CUT_405B)
LLAMA_8B_128K = Recipe("NeMo 2, recipes/llama3_8b_128k.py", tp=4, stages=2, cp=8)
LONG_128K = Recipe("NeMo, long sequence performance", tp=2, cp=4)
LONG_1M = Recipe("NeMo, long sequence performance", tp=4, cp=16)

CASES = (
    Case(
        "SigLIP + 8B", "8B", "8xH100", 128, BRIDGE_8B,
        "Ours adds 2 stages to the same cp 2. zero2 without stages gathers and reduces for each of 32 microbatches; "
        "with stages weights are kept, and gradients reduced once. Megatron keeps them without stages, too, so this "
        "is a difference of runtimes: there the recipe would win.", encoders=VISION,
    ),
    Case(
        "SigLIP + 8B", "8B", "64x8xH100", 2048, TITAN_8B,
        "As above: fewer gathers against more to coordinate. Within what published rows are predicted to (9 %), the "
        "two are equal, and FSDP alone is simpler.", encoders=VISION,
    ),
    Case(
        "SigLIP + 8B, slow links", "8B", SLOW, 1024, Recipe("torchtitan, HSDP", rows=2, kind="hsdp"),
        "HSDP reduces all gradients over 10 Gbit/s in every microbatch; with cp 8 and 2 stages a quarter as many "
        "replicas reduce half as much, once in a step. That cp fills a node is right: keys and values stay inside.",
        encoders=VISION,
    ),
    Case(
        "SigLIP + 8B, mixed nodes", "8B", MIXED, 768, Recipe("torchtitan, 8B on 8 H100", kind="fsdp2"),
        "No published recipe has mixed nodes. All 48 devices, the H100s waiting for the A100s, beat the 16 H100s alone "
        "and the 32 A100s alone.", encoders=VISION,
    ),
    Case(
        "SigLIP + 32B", "32B", "2x8xH100", 32, NEMO_32B,
        "The recipe fills a node with tp 8, and sums activations 4 times a layer. tp 2 × cp 2 halves the ranks of a "
        "replica's stage; 4 stages keep the weights apart. The sums of tp are exposed here and partly hidden in "
        "Megatron, so that less than the difference is to be gained there.", 4096, VISION,
    ),
    Case(
        "SigLIP + 32B", "32B", "8x8xH200", 256, NEMO_32B,
        "141 GB hold a replica on two devices: tp 2 is enough, and there is no bubble. The recipe is for 80 GB.",
        4096, VISION,
    ),
    Case("SigLIP + 70B", "70B", "8x8xH100", 128, BRIDGE_70B_H100, "The same plan, but for vp 3.", encoders=VISION),
    Case(
        "SigLIP + 70B", "70B", "8x8xB200", 128, BRIDGE_70B_B200,
        "cp 8 for tp 2 × cp 2: with 8 heads of keys and values for 64 of queries, cp moves a tenth of what tp does. "
        "Within the errors of predictions they are equal.", encoders=VISION,
    ),
    Case(
        "SigLIP + 70B", "70B", A100, 1024, FOUNDRY_70B,
        "The recipe shards weights alone and recomputes everything to fit. Stages and cp × tp inside a node keep all "
        "activations, which saves the recomputation: a fifth of the step. The recipe's figure itself is predicted well "
        "(published_clusters.md: −2 %).", 4096, VISION,
    ),
    Case(
        "SigLIP + 70B", "70B", "128x8xH100", 2048, TITAN_70B,
        "The recipe shows that PyTorch's FSDP and tp work together; it is not tuned: tp 8 and full recomputation. Its "
        "published 597 tokens/s/GPU are predicted to −2 %. Ours is close to Megatron-Bridge's on 64 GPUs, with cp 8 "
        "for some of its tp.", encoders=VISION,
    ),
    Case(
        "SigLIP + 405B", "405B", "128x8xH100", 512, BRIDGE_405B_H100,
        "More stages for the memory of a fully trained run with SigLIP (the recipe needs 79 GiB of 75 here, and ran on "
        "80 GB without it), and cp 8 × tp 4 for tp 8 × cp 2: fewer sums of tp for more keys and values.",
        encoders=VISION,
    ),
    Case(
        "SigLIP + 405B", "405B", "512x8xH100", 2048, LLAMA_405B,
        "cp lets a batch of 2,048 be 256 microbatches for each of 8 replicas, not 64 for each of 32: less waiting for "
        "stages. Llama 3 had 16 M tokens in a batch on 16,384 GPUs, and cp 1 at 8k tokens.", encoders=VISION,
    ),
    Case(
        "SigLIP + 405B", "405B", "16x8xB200", 64, BRIDGE_405B_B200,
        "The same tp and cp; 16 stages for 8, without replicas: nothing is left to reduce, and it fits. With 64 "
        "samples both wait for stages.", encoders=VISION,
    ),
    Case(
        "8B, 128k tokens", "8B", "8x8xH100", 512, LLAMA_8B_128K,
        "The same cp 8, without tp 4 and 2 stages, which sums and half as many replicas cost more than they save: "
        "layers under cp 8 fit without them.", 131_072,
    ),
    Case(
        "8B, 128k tokens", "8B", "16x8xB200", 32, LONG_128K, "The same cp 4; tp 2 is not needed on 180 GB.", 131_072,
    ),
    Case("8B, 1M tokens", "8B", "32x8xH100", 8, LONG_1M, "The same plan.", 1_048_576),
    Case("8B, 1M tokens", "8B", "128x8xB200", 16, LONG_1M, "The same plan.", 1_048_576),
    Case(
        "Whisper + ViT-22B + 70B", "70B", "32x8xH100", 512, Recipe("Megatron-LM, DistTrain's baseline", tp=8, stages=8),
        "DistTrain gives encoders ranks of their own with sizes of their own, and reports up to 2.2 times the "
        "throughput of Megatron-LM, which puts them into the first stage; its sizes are not published, and the "
        "recipe's are assumed. Ours does what DistTrain does: own ranks, tp 4 for ViT-22B, none for Whisper, so that "
        "they work while the language model does; the rest is cp 8 for some of tp 8, as above.",
        8192, BOTH, is_slow=True,
    ),
    Case(
        "SigLIP + 30B-A3B", "30B-A3B", "2x8xH100", 1024, Recipe(BRIDGE, ep=16),
        "Eight stages hold all experts without sending a token; with ep 16 half of the step is tokens between nodes. "
        "Megatron-Bridge's later recipe (2 stages, ep 8) keeps them inside a node, with stages between nodes: an order "
        "of ranks that is not built here. Its published 5,113 to 5,275 tokens/s/GPU (without dropped tokens, fp8) are "
        "near the 6.7 k that ep 16 is predicted to reach, and a third of what is predicted of ours: doubtful, below.",
        4096, VISION,
    ),
    Case(
        "SigLIP + 235B-A22B", "235B-A22B", "32x8xH100", 2048, Recipe(BRIDGE, tp=2, stages=8, virtual=4, ep=16),
        "The recipe's ep is 32, over its ranks of tp, too; here ep divides the ranks with other tokens, so 16. Its "
        "experts' ranks are on 16 nodes and send tokens over the network for two thirds of the step; Megatron has them "
        "on 4 nodes. Ours cuts the channels of experts inside a node (tp 4) and sends none. "
        "Published for the recipe: 1,575 to 1,633 tokens/s/GPU in fp8; ours is predicted at 2.3 k in bf16.",
        4096, VISION, is_slow=True,
    ),
)  # fmt: skip

OUTLOOK = """
## What decides, and whether it is believable

- **cp instead of tp.** Our plans have more cp and less tp than Llama 3 and NeMo 2 have. For each token of a row, tp
  all-reduces activations of the full width four times a layer; cp gathers keys and values three times, which with
  grouped queries are a quarter (70B) or an eighth (405B) as wide: a tenth or a twentieth of the bytes. That is
  arithmetic, and Megatron-Bridge's recipes have cp 2 for 8B, 70B and 405B at 8,192 tokens, too. How far to go is less
  certain: sums of tp are fully exposed here, because this package does not overlap them, and Megatron-LM hides some.
  The products of a rank have as many tiles with cp as with tp, so their efficiency does not decide: with 1,024 rows, a
  byte of a weight is read for 1,024 operations, five times what an H100 needs to be busy. Work is even: attention
  within 1.04 of the mean, with linear layers within 1.01 (cp_balance.md).
- **Stages for small models.** Sharded kinds without stages gather weights and reduce gradients in each microbatch, and
  with stages once in a step. This is what the runtime does. Megatron's distributed optimizer does it once either way.
- **Where nothing is published** (slow links, mixed nodes, encoders of 22B), recipes are the nearest by hand.
- **Mixtures without ep.** Both plans for mixtures leave experts whole and cut by stages or tp: here ranks with other
  tokens are on other nodes wherever a model has stages. Where they are on one node (8 ranks, no stages), ep is priced
  at NVLink's speed. 35 and 40 % MFU for mixtures are more than anyone has published on H100s (Megatron-Bridge: 12 to
  24 % of the peak of bf16, in fp8): products of experts are priced by their operations, tiles and bytes; the time of
  the host is not. Do not plan mixtures by this page without a measurement.
- **Slow searches.** Whisper + ViT-22B + 70B and 235B-A22B take 109 and 152 CPU-seconds, more than the 30 that are
  wanted of any. The former was searched before predictions knew that tp leaves norms and embeddings whole.
- Differences below 9 % are within the mean error of these predictions for published runs (published_clusters.md).
- No rule of the cost model was changed after these comparisons. The time to start kernels is divided by tp × cp with
  the rest of a layer, which is too little where a rank's layer takes less than a millisecond: the 8B model with cp 8.

Sources: Megatron-Bridge, scripts/performance/configs (llama3, llama31, qwen3 workload_base_configs.py; bf16, V1); NeMo,
nemo/collections/llm/recipes, and its page on long sequences (LLaMA3-8B in fp8 on B200: tp and cp by length);
torchtitan and llm-foundry as in published_clusters.md; The Llama 3 Herd of Models (arXiv 2407.21783); DistTrain (arXiv
2408.04275).
"""
