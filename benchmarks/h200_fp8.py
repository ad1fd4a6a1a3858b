"""Compare a training step in fp8 with bf16 on one GPU: time, memory, and the loss curves.

    python benchmarks/h200_fp8.py [--ways bf16,rowwise,tensorwise] [--steps 100] [--json results.json]

The reference case of `h200_step.py`: SigLIP-so400m frozen, an MLP projector, Qwen3-1.7B trained from random weights,
fused AdamW, clipping at 1.0; 4 rows of 4,096 tokens with 2 images of 729 tokens each. The text is a random Markov chain
over 64 words with 4 successors each, so that there is something to learn. Every contender gets the same weights and the
same batches, a new one in each step, and runs in its own process.

Other contenders: `bf16_eager` differs from bf16 only by rounding and shows the noise between two equal runs;
`torchao_rowwise` and `torchao_tensorwise` are the same layers by torchao, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import on_gpu
import torch
import torch.nn.functional as F
from h200_step import CASES, IMAGE_TOKEN, Case, parts, work
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

from cornstarch import ModalEncoderModule, MultimodalModel
from cornstarch.attention.backends import use_attention
from cornstarch.compat import step_dividing
from cornstarch.engine.acceleration import accelerate_model
from cornstarch.kernels.fp8 import MIN_DIM, Fp8Linear, multiply_in_fp8
from cornstarch.kernels.fused_loss import limit_trained_rows
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.ddp_fsdp import wrapping_units
from cornstarch.parallel.gradients import compute_clip_divisor

WAYS = ("bf16", "rowwise", "tensorwise")
OTHERS = ("bf16_eager", "torchao_rowwise", "torchao_tensorwise")
WORDS, FOLLOWERS = 64, (0.5, 0.25, 0.15, 0.1)
RATE, RISING, BETAS = 1e-4, 20, (0.9, 0.95)  # with 3e-4 and torch's betas, even the bf16 loss spikes in step 28
WARM = 10  # untimed steps
TINY = Case("tiny", rows=2, tokens=32, images=1)


# ---------------------------------------------------------------------------------------------------- what is trained


def tiny_parts() -> tuple[Any, Any, nn.Module]:
    """Return tiny parts of the same kinds for a CPU."""
    torch.manual_seed(0)
    language = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=2 * WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, use_cache=False,
        )
    )  # fmt: skip
    vision = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28,
            patch_size=14, vision_use_head=False,  # type: ignore[call-arg]
        )
    )  # fmt: skip
    projector = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
    vision.requires_grad_(False).eval()
    language.train()
    return language.bfloat16(), vision.bfloat16(), projector.bfloat16()


def batches(case: Case, steps: int, token: int, image_size: int, image_tokens: int) -> list[dict[str, Any]]:
    """Return a batch for each step, on the CPU; images repeat every 4 steps."""
    made = torch.Generator().manual_seed(2)
    followers = torch.randint(0, WORDS, (WORDS, len(FOLLOWERS)), generator=made)
    rows = steps * case.rows
    chosen = torch.multinomial(torch.tensor(FOLLOWERS), rows * case.tokens, replacement=True, generator=made)
    chosen = chosen.view(rows, case.tokens)
    text = torch.zeros(rows, case.tokens, dtype=torch.long)
    text[:, 0] = torch.randint(0, WORDS, (rows,), generator=made)
    for place in range(1, case.tokens):
        text[:, place] = followers[text[:, place - 1], chosen[:, place]]
    span = case.tokens // case.images
    for number in range(case.images):
        begin = number * span + (span - image_tokens) // 2
        text[:, begin : begin + image_tokens] = token
    size = (case.rows * case.images, 3, image_size, image_size)
    images = [torch.randn(*size, generator=made).bfloat16() for _ in range(4)]
    found = []
    for step, ids in enumerate(text.view(steps, case.rows, case.tokens)):
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": ids.masked_fill(ids == token, -100),
            "pixel_values": images[step % len(images)],
        }
        if torch.cuda.is_available():
            batch = {name: one.pin_memory() for name, one in batch.items()}
        batch["facts"] = BatchFacts.of(batch, {"vision": token})
        batch["trained"] = int((F.pad(batch["labels"], (0, 1), value=-100)[:, 1:] != -100).sum())
        found.append(batch)
    return found


def convert(language: Any, way: str, least: int) -> int:
    """Convert the language model's linear layers for a contender; return their number."""
    layers = wrapping_units(language)
    if way.startswith("torchao_"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        large = {
            id(module)
            for layer in layers
            for module in layer.modules()
            if isinstance(module, nn.Linear) and min(module.in_features, module.out_features) >= least
        }
        config = Float8LinearConfig.from_recipe_name(way.removeprefix("torchao_"))
        convert_to_float8_training(language, module_filter_fn=lambda module, _: id(module) in large, config=config)
        return len(large)
    if way in ("rowwise", "tensorwise"):
        multiply_in_fp8(layers, way, least)  # type: ignore[arg-type]
    return sum(isinstance(module, Fp8Linear) for module in language.modules())


# ---------------------------------------------------------------------------------------------------- what is measured


def measure(way: str, steps: int, least: int, tiny: bool) -> dict[str, Any]:
    """Return the time, memory and losses of one contender."""
    device = torch.device("cpu" if tiny else "cuda")
    case = TINY if tiny else CASES["reference"]
    language, vision, projector = tiny_parts() if tiny else parts(case, device)
    trained = [parameter for part in (language, projector) for parameter in part.parameters()]
    token, image_size = WORDS if tiny else IMAGE_TOKEN, vision.config.image_size
    prepared = batches(case, steps, token, image_size, (image_size // vision.config.patch_size) ** 2)
    model = MultimodalModel(encoders={"vision": ModalEncoderModule(vision, projector)}, language_model=language)
    model.set_modality_token_ids({"vision": token})
    layers = convert(language, way, least)
    accelerate_model(model, device, "off" if way == "bf16_eager" or tiny else "layers")
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, fused=True)

    def step(number: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (number + 1) / RISING)
        given = prepared[number]
        batch = {key: value.to(device, non_blocking=True) for key, value in given.items() if not isinstance(value, int)}
        with limit_trained_rows(given["trained"]), use_attention("auto"):
            loss = model(**batch).loss
        loss.backward()
        if tiny:
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        else:
            step_dividing(optimizer, compute_clip_divisor(trained, 1.0)[1])
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def now() -> float:
        if not tiny:
            torch.cuda.synchronize()
        return time.perf_counter()

    warm = min(WARM, steps - 1)
    began = now()
    losses = [step(number) for number in range(warm)]
    warmed = now()
    losses += [step(number) for number in range(warm, steps)]
    ended = now()
    return {
        "way": way,
        "layers": layers,
        "milliseconds": (ended - warmed) * 1e3 / (steps - warm),
        "warm_seconds": warmed - began,
        "gib": 0.0 if tiny else torch.cuda.max_memory_allocated() / 2**30,
        "losses": torch.stack(losses).float().tolist(),
    }


def in_process(way: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one contender in its own process."""
    command = [sys.executable, __file__, "--way", way, "--steps", str(given.steps), "--least", str(given.least)]
    done = subprocess.run(
        command + (["--tiny"] if given.tiny else []), capture_output=True, text=True, timeout=given.timeout
    )
    last = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not last:
        return {"way": way, "error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    found: dict[str, Any] = json.loads(last[-1])
    print(f"{way}: {found['milliseconds']:.1f} ms, {found['gib']:.1f} GiB", file=sys.stderr, flush=True)
    return found


# ---------------------------------------------------------------------------------------------------- the tables


def compare_losses(losses: list[float], right: list[float]) -> tuple[float, int, float]:
    """Return the largest relative difference of two curves, its step, and that of their last tenths."""
    shares = [abs(a - b) / b for a, b in zip(losses, right, strict=True)]
    largest = max(range(len(shares)), key=shares.__getitem__)
    last = max(len(losses) // 10, 1)
    return shares[largest], largest + 1, abs(sum(losses[-last:]) / sum(right[-last:]) - 1)


def format_results(results: list[dict[str, Any]], case: Case, tiny: bool) -> str:
    """Return Markdown tables: the contenders, then points of their curves."""
    good = [one for one in results if "error" not in one]
    right = next((one for one in good if one["way"] == "bf16"), None)
    lines = [
        "| way | layers | ms | bf16 / it | TFLOP/s | peak GiB | largest difference of loss | last tenth | warm s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        if "error" in one:
            lines.append(f"| {one['way']} | {one['error']} |")
            continue
        ratio = difference = last = ""
        if right is not None and one is not right:
            ratio = f"{right['milliseconds'] / one['milliseconds']:.2f}"
            largest, step, mean = compare_losses(one["losses"], right["losses"])
            difference, last = f"{largest * 100:.2f} % (step {step})", f"{mean * 100:.2f} %"
        rate = "" if tiny else f"{work(case)[0] / one['milliseconds'] / 1e9:.0f}"
        lines.append(
            f"| {one['way']} | {one['layers']} | {one['milliseconds']:.1f} | {ratio} | {rate} | {one['gib']:.1f} | "
            f"{difference} | {last} | {one['warm_seconds']:.0f} |"
        )
    if good:
        entropy = -sum(share * math.log(share) for share in FOLLOWERS)
        lines += ["", f"Losses; the entropy of the text is {entropy:.2f}.", ""]
        lines += [f"| step | {' | '.join(one['way'] for one in good)} |", "|---|" + "---|" * len(good)]
        steps = len(good[0]["losses"])
        shown = sorted({1, *range(10, steps + 1, 10), steps} & set(range(1, steps + 1)))
        for step in shown:
            points = [f"{one['losses'][step - 1]:.4f}" for one in good]
            lines.append(f"| {step} | {' | '.join(points)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the requested contenders."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ways", default=",".join(WAYS))
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--least", type=int, help=f"minimum dimensions of a layer; default: {MIN_DIM}")
    arguments.add_argument("--timeout", type=int, default=560, help="seconds for each contender")
    arguments.add_argument("--tiny", action="store_true", help="use small parts on a CPU, to test this script")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--way", help=argparse.SUPPRESS)
    given = on_gpu.parse(arguments)
    if given.least is None:
        given.least = 32 if given.tiny else MIN_DIM
    if given.way:
        print(json.dumps(measure(given.way, given.steps, given.least, given.tiny)))
        return
    ways = on_gpu.listed(arguments, given.ways, WAYS + OTHERS)
    case = TINY if given.tiny else CASES["reference"]
    print(f"torch {torch.__version__}, {'CPU' if given.tiny else torch.cuda.get_device_name()}\n", flush=True)
    results = [in_process(way, given) for way in ways]
    print(format_results(results, case, given.tiny))
    if given.json:
        kept = {"torch": torch.__version__, "steps": given.steps, "least": given.least, "results": results}
        given.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
