"""Predict and run steps of multimodal models on one device.

The steps are those of `cornstarch train`: compiled layers on a GPU, a loss that never materializes all logits, frozen
encoders without gradients, gradient clipping, AdamW. The data is random and prepared in advance.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import known_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cornstarch import ModalEncoderModule, MultimodalModel
from cornstarch.compat import divides_gradients, step_dividing
from cornstarch.cost.analytic import CallCost
from cornstarch.cost.profiled import measure_seconds
from cornstarch.engine.acceleration import accelerate_model
from cornstarch.engine.recompute import copy_to_meta, recompute_activations
from cornstarch.kernels.adamw import select_optimizer_class
from cornstarch.kernels.fused_loss import limit_trained_rows
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.device import DevicePlacement
from cornstarch.parallel.gradients import compute_clip_divisor
from cornstarch.plan import ModulePlan, Plan
from cornstarch.plan.candidates import Candidate
from cornstarch.plan.cluster import Cluster, Device, device, this_cpu
from cornstarch.plan.communication import LINKS
from cornstarch.plan.cost import RunCost
from cornstarch.plan.predict import predict
from cornstarch.planner import MicrobatchShape, model_cost
from cornstarch.planner.build_cost import profile_model

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment in which glibc returns freed CPU memory to the system. Memory is then counted correctly, and a tensor
costs the same in steps, which allocate and free much memory, as in repeated measurements of a layer."""
IMAGE_TOKEN = 5
WARM = 3


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    rows: int
    tokens: int
    images: int = 2
    """Per row."""
    trained: str = "language model"
    """What is trained besides the projector: `nothing`, `language model`, or `everything`."""
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """A one-line description."""
        words = f"{self.model}, {self.rows} × {self.tokens:,}, {self.rows * self.images} images"
        says = {"nothing": ", projector alone", "everything": ", encoder trained too"}
        return words + says.get(self.trained, "") + (", recomputed" if self.checkpointing else "")


QWEN, LLAMA = "SigLIP-so400m + Qwen3-1.7B", "CLIP-L/336 + Llama-3.2-3B"
SMALL, TINY = "small SigLIP + small Qwen3", "small CLIP + small Llama"
ON_GPU = (
    Case(QWEN, 4, 4096),
    Case(QWEN, 2, 4096),
    Case(QWEN, 2, 8192),
    Case(QWEN, 4, 4096, checkpointing=True),
    Case(QWEN, 4, 4096, trained="nothing"),
    Case(QWEN, 4, 4096, trained="everything"),
    Case(LLAMA, 2, 4096),
    Case(LLAMA, 4, 2048),
    Case(LLAMA, 4, 4096, checkpointing=True),
    Case(LLAMA, 2, 4096, trained="nothing"),
)
ON_CPU = (
    Case(SMALL, 4, 256, images=1),
    Case(SMALL, 2, 256, images=1),
    Case(SMALL, 2, 512, images=2),
    Case(SMALL, 4, 256, images=1, checkpointing=True),
    Case(SMALL, 4, 256, images=1, trained="nothing"),
    Case(TINY, 2, 256, images=2),
    Case(TINY, 4, 128, images=1),
    Case(TINY, 2, 256, images=2, trained="everything"),
)
WARMING = Case(TINY, 1, 128, images=1)


# ---------------------------------------------------------------------------------------------------- models


def build(case: Case, device: torch.device) -> MultimodalModel:
    """Return a model with random weights: in bfloat16 on a GPU, in float32 otherwise."""
    torch.manual_seed(0)
    encoder, _, language_model = case.model.partition(" + ")
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            language, vision = known_models.language_model(language_model), known_models.encoder(encoder)
            width = language.config.hidden_size
            projector = nn.Sequential(nn.Linear(vision.config.hidden_size, width), nn.GELU(), nn.Linear(width, width))
    finally:
        torch.set_default_dtype(torch.float32)
    vision.requires_grad_(case.trained == "everything").train(case.trained == "everything")
    language.requires_grad_(case.trained != "nothing").train(case.trained != "nothing")
    model = MultimodalModel(encoders={"vision": ModalEncoderModule(vision, projector)}, language_model=language)
    model.set_modality_token_ids({"vision": IMAGE_TOKEN})
    return model


@torch.no_grad()
def batch_of(case: Case, model: MultimodalModel, device: torch.device) -> dict[str, Any]:
    """Return a batch on the device."""
    encoder = model.encoders["vision"]
    config = encoder.module.config  # type: ignore[union-attr]
    dtype = next(model.parameters()).dtype
    pixels = torch.randn(case.rows * case.images, 3, config.image_size, config.image_size, device=device, dtype=dtype)
    length = encoder(pixel_values=pixels[:1])[0].shape[1]
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(10, model.language_model.config.vocab_size, (case.rows, case.tokens), generator=made)  # type: ignore[union-attr]
    step = case.tokens // case.images
    for number in range(case.images):
        start = number * step + (step - length) // 2
        ids[:, start : start + length] = IMAGE_TOKEN
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    facts = BatchFacts.of(batch, {"vision": IMAGE_TOKEN})
    batch = {name: value.to(device) for name, value in batch.items()}
    trained = int((F.pad(labels, (0, 1), value=-100)[:, 1:] != -100).sum())
    return {**batch, "pixel_values": pixels, "facts": facts.to(device), "trained": trained}


# ---------------------------------------------------------------------------------------------------- done


class Steps:
    """Steps of training.

    Args:
        case: The configuration.
        model: Its model, on the device.
        batch: The batch of every step.
        placement: The device and the compute dtype.
    """

    def __init__(self, case: Case, model: MultimodalModel, batch: dict[str, Any], placement: DevicePlacement) -> None:
        self.model, self.placement = model, placement
        self.batch = {name: value for name, value in batch.items() if name != "trained"}
        self.labels = batch["trained"]
        if case.checkpointing:
            recompute_activations(model.language_model)
        accelerate_model(model, placement.device)
        for encoder in model.encoders.values():
            encoder.enable_inference_mode()
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kind = select_optimizer_class(torch.optim.AdamW) if placement.device.type == "cuda" else torch.optim.AdamW
        self.optimizer = kind(self.trained, lr=1e-5, fused=True)  # type: ignore[call-arg]

    def __call__(self, run: nn.Module | None = None) -> Tensor:
        """Run one step; `run` is called in place of the model."""
        with limit_trained_rows(self.labels), self.placement.forward_context():
            loss = (run or self.model)(**self.batch).loss
        loss.backward()
        divisor = compute_clip_divisor(self.trained, 1.0)[1]
        if divides_gradients(self.optimizer):
            step_dividing(self.optimizer, divisor)
        else:
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def done(steps: Steps, count: int) -> tuple[list[float], int]:
    """Return the seconds of steps (their mean on a GPU) and the peak memory in bytes."""
    device = steps.placement.device
    for _ in range(WARM if device.type == "cuda" else 1):
        steps()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            steps()
        end.record()
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) / 1e3 / count], torch.cuda.max_memory_allocated(device)
    times = []
    with most_resident() as most:
        for _ in range(count):
            start = time.process_time()  # one thread: CPU time excludes other load
            steps()
            times.append(time.process_time() - start)
    return times, most[0]


@contextmanager
def most_resident() -> Iterator[list[int]]:
    """Measure the peak memory of this process within this block (Linux)."""
    found = [0]
    Path("/proc/self/clear_refs").write_text("5")
    yield found
    lines = Path("/proc/self/status").read_text().splitlines()
    found[0] = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def resident() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------------------------- predicted


def predicted(case: Case, cost: RunCost, machine: Device) -> tuple[float, int]:
    """Return the seconds and the bytes that the planner predicts on one device."""
    modules = {"vision": ModulePlan(), "language_model": ModulePlan(activation_checkpointing=case.checkpointing)}
    cluster = Cluster(1, 1, machine, LINKS["loopback"], LINKS["loopback"])
    found = predict(Candidate.of(Plan(modules, ranks="shared"), dp=1, microbatches=1), cost, cluster)
    return found.step, found.peak


def this_device(where: torch.device) -> Device:
    """Return this machine's device from the catalogue; for a CPU, which has no data sheet, measured."""
    if where.type == "cuda":
        return device(torch.cuda.get_device_name(where))
    left = torch.randn(1024, 1024)
    rate = 2 * 1024**3 / measure_seconds(lambda: left @ left, where)
    return replace(this_cpu(os.cpu_count() or 1), rates=(("fp32", rate),), bandwidth=bandwidth(where))


def bandwidth(where: torch.device) -> float:
    """Return the bytes per second that the device reads and writes."""
    source = torch.ones(2**28 if where.type == "cuda" else 2**24, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure_seconds(lambda: target.copy_(source), where)


def predict_both(
    case: Case, bare: nn.Module, microbatch: MicrobatchShape, placement: DevicePlacement, known: dict[str, CallCost]
) -> dict[str, Any]:
    """Return the predictions for a case, from shapes alone and from measured layers."""
    where, began = placement.device, time.perf_counter()
    machine = this_device(where)
    analytic = predicted(case, model_cost(bare, microbatch, machine, placement.precision), machine)
    if where.type == "cuda":
        torch.compiler.reset()
    profiled = profile_model(bare, microbatch, placement, known=known)
    measured = predicted(case, profiled, replace(machine, bandwidth=bandwidth(where)))
    flops, took = profiled.flops * case.rows, time.perf_counter() - began
    return {"analytic": analytic, "measured": measured, "flops": flops, "took": took}


def measure(case: Case, where: torch.device, known: dict[str, CallCost], count: int) -> dict[str, Any]:
    """Predict and run the steps of a case.

    The speed of a CPU changes from minute to minute. There, half of the steps run before the layers are measured
    and half after, and layers that were measured for another case are measured again.
    """
    placement = DevicePlacement(where, "bf16" if where.type == "cuda" else "fp32")
    began, before = time.perf_counter(), resident()
    model = build(case, where)
    batch = batch_of(case, model, where)
    bare = copy_to_meta(model)
    microbatch = MicrobatchShape(case.rows, case.tokens, {"vision": case.rows * case.images}, batch["trained"])
    if where.type == "cuda":
        found = predict_both(case, bare, microbatch, placement, known)
        gc.collect()
        steps = Steps(case, model, batch, placement)
        torch.compiler.reset()
        times, most = done(steps, count)
    else:
        steps = Steps(case, model, batch, placement)
        times, most = done(steps, count - count // 2)
        found = predict_both(case, bare, microbatch, placement, {})
        times, most = times + done(steps, count // 2)[0], most - before
    del model, steps, batch
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    took = found["took"]
    return {
        **found,
        "case": case.name,
        "seconds": median(times),
        "bytes": most,
        "took": [took, time.perf_counter() - began - took],
    }
