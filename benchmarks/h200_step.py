"""Measure a training step of a vision-language model on one GPU: transformers, compiled transformers, and Cornstarch.

    python benchmarks/h200_step.py [--cases reference,images,packed,large_lora,large_full] [--json results.json]

The reference: SigLIP-so400m frozen, an MLP projector, Qwen3-1.7B trained, bf16, fused AdamW, clipping at 1.0; 4 rows
of 4,096 tokens with 2 images of 729 tokens each, random weights. Every contender gets the same weights and the same
batches and runs in its own process, in turn. The losses of 50 steps are compared.

The work is the same for every contender and is counted by `cornstarch.cost.flops`: frozen parts forward only, attention
by visible pairs, recomputed layers once, and the head on every token, although Cornstarch computes it only where there
is a label. A second column shows the fraction of the peak rate without the skipped tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import known_models
import on_gpu
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PEAK = 989e12  # bf16 of an H100 or H200, dense
IMAGE_TOKENS = 729
IMAGE_TOKEN = 151_655
STEPS, WARM, BATCHES = 50, 10, 4
RATE = 1e-5


@dataclass(frozen=True)
class Case:
    """The model, what is trained, and the data."""

    name: str
    rows: int = 4
    tokens: int = 4096
    images: int = 2
    """Per row."""
    documents: int = 1
    """Per row, of equal length; images are divided evenly."""
    size: str = "1.7B"
    trained: str = "full"
    """Or "lora"."""
    checkpointing: bool = False
    budget: float = 1.0
    """The fraction of activations that Cornstarch keeps."""
    steps: int = STEPS


CASES = {
    one.name: one
    for one in (
        Case("reference"),
        Case("images", images=5, steps=30),
        Case("many_images", rows=2, tokens=8192, images=8, steps=30),
        Case("packed", rows=1, tokens=32768, images=16, documents=8, steps=30),
        Case("large_lora", rows=2, size="8B", trained="lora", steps=25),
        Case("large_full", rows=4, size="8B", checkpointing=True, steps=20),
    )
}
WAYS = ("eager", "compiled", "ours")


# ---------------------------------------------------------------------------------------------------- the model


def parts(case: Case, device: torch.device) -> tuple[Any, Any, nn.Module]:
    """Return language model, vision encoder and projector, always with the same weights."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            language = known_models.language_model(f"Qwen3-{case.size}", use_cache=False)
            vision = known_models.encoder("SigLIP-so400m")
            width = language.config.hidden_size
            projector = nn.Sequential(nn.Linear(1152, width), nn.GELU(), nn.Linear(width, width))
    finally:
        torch.set_default_dtype(torch.float32)
    vision.requires_grad_(False).eval()
    if case.trained == "lora":
        from peft import LoraConfig, get_peft_model

        language.requires_grad_(False)
        torch.manual_seed(1)
        language = get_peft_model(language, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        for parameter in language.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    language.train()
    if case.checkpointing:
        language.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return language, vision, projector


def batches(case: Case) -> Iterator[dict[str, Tensor]]:
    """Yield the batches, on the CPU."""
    made = torch.Generator().manual_seed(2)
    for _ in range(BATCHES):
        ids = torch.randint(0, 150_000, (case.rows, case.tokens), generator=made)
        for place in image_places(case):
            ids[:, place : place + IMAGE_TOKENS] = IMAGE_TOKEN
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        pixels = torch.randn(case.rows * case.images, 3, 384, 384, generator=made).bfloat16()
        batch = {"input_ids": ids, "labels": labels, "pixel_values": pixels}
        if case.documents > 1:
            length = case.tokens // case.documents
            documents = torch.arange(case.tokens) // length + 1
            batch["documents"] = documents.expand(case.rows, -1).contiguous()
            starts = torch.arange(0, case.tokens, length)
            batch["labels"][:, starts] = -100
        yield batch


def image_places(case: Case) -> list[int]:
    """Return the start positions of images in a row."""
    step = case.tokens // case.images
    return [number * step + (step - IMAGE_TOKENS) // 2 for number in range(case.images)]


# ---------------------------------------------------------------------------------------------------- what is counted


def work(case: Case) -> tuple[float, float]:
    """Return the floating-point operations of a step: with the head on every token, and where there are labels.

    Cornstarch's own counter, on a model without weights.
    """
    from cornstarch import ModalEncoderModule, MultimodalModel
    from cornstarch.cost.flops import FlopCounter

    language, vision, projector = parts(replace(case, checkpointing=False), torch.device("meta"))
    model = MultimodalModel(encoders={"vision": ModalEncoderModule(vision, projector)}, language_model=language)
    model.set_modality_token_ids({"vision": IMAGE_TOKEN})
    found = FlopCounter(model).step(next(batches(case)))
    return found.total + found.untrained_head, found.total


# ---------------------------------------------------------------------------------------------------- the ways


def plain_loss(language: Any, vision: Any, projector: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return the loss of a hand-written step with transformers."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            states = vision(batch["pixel_values"]).last_hidden_state
        tokens = projector(states)
        is_image = batch["input_ids"] == IMAGE_TOKEN
        embeds = language.get_input_embeddings()(batch["input_ids"])
        embeds = embeds.masked_scatter(is_image.unsqueeze(-1), tokens)
        given: dict[str, Any] = {}
        if "documents" in batch:  # transformers detects documents from the positions
            length = int((batch["documents"][0] == 1).sum())
            positions = torch.arange(batch["input_ids"].shape[1], device=embeds.device) % length
            given["position_ids"] = positions.expand(batch["input_ids"].shape[0], -1)
        return language(inputs_embeds=embeds, labels=batch["labels"], **given).loss

    return loss


def compiled_loss(language: Any, vision: Any, projector: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return the same with every layer compiled by hand."""
    base = language.get_base_model() if hasattr(language, "get_base_model") else language
    for layer in (*base.model.layers, *vision.encoder.layers):
        layer.compile(dynamic=False)
    return plain_loss(language, vision, projector)


def our_loss(
    language: Any, vision: Any, projector: nn.Module, case: Case
) -> tuple[nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """Return the model composed by Cornstarch, and its loss."""
    from cornstarch import ModalEncoderModule, MultimodalModel
    from cornstarch.attention.backends import use_attention
    from cornstarch.engine.acceleration import accelerate_model
    from cornstarch.engine.recompute import recompute_activations
    from cornstarch.kernels.fused_loss import limit_trained_rows

    model = MultimodalModel(encoders={"vision": ModalEncoderModule(vision, projector)}, language_model=language)
    model.set_modality_token_ids({"vision": IMAGE_TOKEN})
    if case.checkpointing:
        recompute_activations(model)
    print(accelerate_model(model, torch.device("cuda"), activation_budget=case.budget), file=sys.stderr)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with limit_trained_rows(batch["trained"]), use_attention("auto"):  # type: ignore[arg-type]
            return model(**{key: value for key, value in batch.items() if key != "trained"}).loss

    return model, loss


def measure(case: Case, way: str, profile: bool = False) -> dict[str, Any]:
    """Return times, memory and losses of one contender."""
    device = torch.device("cuda")
    language, vision, projector = parts(case, device)
    trained = [p for p in (*language.parameters(), *projector.parameters()) if p.requires_grad]
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    if way == "ours":
        from cornstarch.kernels.adamw import select_optimizer_class

        kind = select_optimizer_class(kind)
    optimizer = kind(trained, lr=RATE, fused=True)  # type: ignore[call-arg]
    if way == "ours":
        from cornstarch.compat import step_dividing
        from cornstarch.models.multimodal_language_model.facts import BatchFacts
        from cornstarch.parallel.gradients import compute_clip_divisor

        model, loss_of = our_loss(language, vision, projector, case)
    else:
        loss_of = (compiled_loss if way == "compiled" else plain_loss)(language, vision, projector)
    prepared: list[dict[str, Any]] = []
    for batch in batches(case):
        one: dict[str, Any] = {name: value.pin_memory() for name, value in batch.items()}
        if way == "ours":
            one["facts"] = BatchFacts.of(one, {"vision": IMAGE_TOKEN})
            one["trained"] = int((F.pad(batch["labels"], (0, 1), value=-100)[:, 1:] != -100).sum())
        prepared.append(one)

    def step(number: int) -> Tensor:
        batch = {
            key: value if isinstance(value, int) else value.to(device, non_blocking=True)
            for key, value in prepared[number % BATCHES].items()
        }
        loss = loss_of(batch)
        loss.backward()
        if way == "ours":
            step_dividing(optimizer, compute_clip_divisor(trained, 1.0)[1])
        else:
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    losses = [step(number) for number in range(WARM)]
    torch.cuda.synchronize()
    warm = time.perf_counter() - began
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    for number in range(WARM, case.steps):
        losses.append(step(number))
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))
    found = {
        "way": way,
        "milliseconds": marks[0].elapsed_time(marks[-1]) / len(times),
        "median": times[len(times) // 2],
        "warm_seconds": warm,
        "gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": torch.stack(losses).float().tolist(),
    }
    if profile:
        found["profile"] = profiled(step)
    return found


def profiled(step: Callable[[int], Tensor]) -> list[tuple[str, float, int]]:
    """Return the GPU's time per step by kernel, in ms, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for number in range(3):
            step(number)
        torch.cuda.synchronize()
    rows = [
        (one.key, one.self_device_time_total / 3e3, one.count // 3)
        for one in found.key_averages()
        if one.self_device_time_total > 0
    ]
    return sorted(rows, key=lambda row: -row[1])


# ---------------------------------------------------------------------------------------------------- the table


def in_process(case: Case, way: str, profile: bool) -> dict[str, Any]:
    """Measure one contender in its own process."""
    command = [sys.executable, __file__, "--case", case.name, "--way", way, "--budget", str(case.budget)]
    command += ["--profile"] if profile else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    last = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not last:
        return {"way": way, "error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    found: dict[str, Any] = json.loads(last[-1])
    print(f"{case.name}, {way}: {found['milliseconds']:.1f} ms, {found['gib']:.1f} GiB", file=sys.stderr, flush=True)
    return found


def format_results(case: Case, results: list[dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    good = {one["way"]: one for one in results if "error" not in one}
    full, needed = work(case)
    lines = [
        f"### {case.name}: {case.rows} x {case.tokens} tokens, {case.images} images/row, {case.size}, {case.trained}"
        + (", recomputed layers" if case.checkpointing else "")
        + (f", {case.documents} documents per row" if case.documents > 1 else ""),
        "",
        f"{full / 1e12:.1f} TFLOP per step, {needed / 1e12:.1f} with the head where there are labels.",
        "",
        "| way | ms | MFU | MFU, head on labels | peak GiB | eager / it | compiled / it | loss off eager | warm s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        if "error" in one:
            lines.append(f"| {one['way']} | {one['error']} |")
            continue
        ms = one["milliseconds"]
        ratios = [f"{good[o]['milliseconds'] / ms:.2f}" if o in good else "" for o in ("eager", "compiled")]
        off = ""
        if "eager" in good:
            pairs = zip(one["losses"], good["eager"]["losses"], strict=False)
            off = f"{max(abs(a - b) / b for a, b in pairs) * 100:.2f} %"
        share = [f"{flops / (ms / 1e3) / PEAK * 100:.1f} %" for flops in (full, needed)]
        if one["way"] != "ours":
            share[1] = ""
        lines.append(
            f"| {one['way']} | {ms:.1f} | {share[0]} | {share[1]} | {one['gib']:.1f} | {ratios[0]} | {ratios[1]} | "
            f"{off} | {one['warm_seconds']:.0f} |"
        )
    for one in results:
        if one.get("profile"):
            total = sum(row[1] for row in one["profile"])
            lines += ["", f"Kernel times of {one['way']} ({total:.1f} ms of kernels per step):", ""]
            lines += ["| ms | times | kernel |", "|---|---|---|"]
            lines += [f"| {ms:.2f} | {count} | `{name[:100]}` |" for name, ms, count in one["profile"][:40]]
    return "\n".join(lines)


def main() -> None:
    """Measure the requested cases."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", default="reference")
    arguments.add_argument("--ways", default=",".join(WAYS))
    arguments.add_argument("--profile", action="store_true", help="profile `ours`")
    arguments.add_argument("--budget", type=float, help="fraction of activations that Cornstarch keeps")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--case", help=argparse.SUPPRESS)
    arguments.add_argument("--way", help=argparse.SUPPRESS)
    given = on_gpu.parse(arguments)
    if given.way:
        case = CASES[given.case] if given.budget is None else replace(CASES[given.case], budget=given.budget)
        print(json.dumps(measure(case, given.way, given.profile)))
        return
    cases, ways = on_gpu.listed(arguments, given.cases, CASES), on_gpu.listed(arguments, given.ways, WAYS)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    kept = {}
    for name in cases:
        case = CASES[name] if given.budget is None else replace(CASES[name], budget=given.budget)
        results = [in_process(case, way, given.profile and way == "ours") for way in ways]
        print(format_results(case, results), "\n", flush=True)
        kept[name] = {"case": asdict(case), "results": results}
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
