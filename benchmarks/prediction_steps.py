"""Steps of multimodal models on one device: predicted, and done.

What is done is what `cornstarch train` does: layers compiled on a GPU, a loss without all logits, frozen encoders
without gradients, gradients clipped, AdamW. Data is random and lies ready.
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
from cornstarch.compute.adamw import quick
from cornstarch.compute.head import trained_rows_at_most
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.clipping import clipping_divisor
from cornstarch.plan import ModulePlan, Plan
from cornstarch.plan.choice import Choice
from cornstarch.plan.cluster import Cluster, Device, device, this_cpu
from cornstarch.plan.cost import RunCost
from cornstarch.plan.links import LINKS
from cornstarch.plan.predict import predict
from cornstarch.train.budget import without_weights
from cornstarch.train.costing import Portion, model_cost
from cornstarch.train.costing.calls import CallCost
from cornstarch.train.costing.measured import time_of
from cornstarch.train.costing.profile import profile_model
from cornstarch.train.precision import Placement
from cornstarch.train.recompute import recompute_activations
from cornstarch.train.speed import speed_up

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment in which memory that is freed on a CPU is given back: it is counted right, and a tensor costs the same in
steps, which take much memory and free it, as where a layer is measured again and again (glibc)."""
IMAGE_TOKEN = 5
WARM = 3


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    rows: int
    tokens: int
    images: int = 2
    """Of each row."""
    trained: str = "language model"
    """Beside the projector, which always is: `nothing`, `language model`, or `everything`."""
    checkpointing: bool = False

    @property
    def name(self) -> str:
        """What it is, on one line."""
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
    """Return a model with random weights: on a GPU in bfloat16, else in float32."""
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
        case: What is trained.
        model: Its model, on the device.
        batch: What it is trained on, again and again.
        placement: The device, and what is computed in.
    """

    def __init__(self, case: Case, model: MultimodalModel, batch: dict[str, Any], placement: Placement) -> None:
        self.model, self.placement = model, placement
        self.batch = {name: value for name, value in batch.items() if name != "trained"}
        self.labels = batch["trained"]
        if case.checkpointing:
            recompute_activations(model.language_model)
        speed_up(model, placement.device)
        for encoder in model.encoders.values():
            encoder.settle()
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kind = quick(torch.optim.AdamW) if placement.device.type == "cuda" else torch.optim.AdamW
        self.optimizer = kind(self.trained, lr=1e-5, fused=True)  # type: ignore[call-arg]

    def __call__(self, run: nn.Module | None = None) -> Tensor:
        """Do one; `run`: what stands for the model."""
        with trained_rows_at_most(self.labels), self.placement.computing():
            loss = (run or self.model)(**self.batch).loss
        loss.backward()
        divisor = clipping_divisor(self.trained, 1.0)[1]
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
    """Return the seconds of steps, on a GPU their mean, and the most bytes that were there."""
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
            start = time.process_time()  # one thread: what else the machine does is left out
            steps()
            times.append(time.process_time() - start)
    return times, most[0]


@contextmanager
def most_resident() -> Iterator[list[int]]:
    """Find the most memory that this process has within this block (Linux)."""
    found = [0]
    Path("/proc/self/clear_refs").write_text("5")
    yield found
    lines = Path("/proc/self/status").read_text().splitlines()
    found[0] = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def resident() -> int:
    """Return the memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------------------------- predicted


def predicted(case: Case, cost: RunCost, machine: Device) -> tuple[float, int]:
    """Return the seconds and the bytes that the planner predicts on one device."""
    modules = {"vision": ModulePlan(), "language_model": ModulePlan(activation_checkpointing=case.checkpointing)}
    cluster = Cluster(1, 1, machine, LINKS["loopback"], LINKS["loopback"])
    found = predict(Choice.of(Plan(modules, ranks="shared"), dp=1, microbatches=1), cost, cluster)
    return found.step, found.peak


def this_device(where: torch.device) -> Device:
    """Return this machine's device as the catalogue has it; of a CPU, which has no data sheet, as it is measured."""
    if where.type == "cuda":
        return device(torch.cuda.get_device_name(where))
    left = torch.randn(1024, 1024)
    rate = 2 * 1024**3 / time_of(lambda: left @ left, where)
    return replace(this_cpu(os.cpu_count() or 1), rates=(("fp32", rate),), bandwidth=bandwidth(where))


def bandwidth(where: torch.device) -> float:
    """Return the bytes a second that the device reads and writes."""
    source = torch.ones(2**28 if where.type == "cuda" else 2**24, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_of(lambda: target.copy_(source), where)


def foretold(
    case: Case, bare: nn.Module, portion: Portion, placement: Placement, known: dict[str, CallCost]
) -> dict[str, Any]:
    """Return what is predicted of a case, from shapes alone and from measured layers."""
    where, began = placement.device, time.perf_counter()
    machine = this_device(where)
    analytic = predicted(case, model_cost(bare, portion, machine, placement.precision), machine)
    if where.type == "cuda":
        torch.compiler.reset()
    profiled = profile_model(bare, portion, placement, known=known)
    measured = predicted(case, profiled, replace(machine, bandwidth=bandwidth(where)))
    flops, took = profiled.flops * case.rows, time.perf_counter() - began
    return {"analytic": analytic, "measured": measured, "flops": flops, "took": took}


def measure(case: Case, where: torch.device, known: dict[str, CallCost], count: int) -> dict[str, Any]:
    """Predict and do the steps of a case.

    The pace of a CPU changes from minute to minute. There, half of the steps are done before the layers are measured
    and half of them after, and what was measured for another case is measured again.
    """
    placement = Placement(where, "bf16" if where.type == "cuda" else "fp32")
    began, before = time.perf_counter(), resident()
    model = build(case, where)
    batch = batch_of(case, model, where)
    bare = without_weights(model)
    portion = Portion(case.rows, case.tokens, {"vision": case.rows * case.images}, batch["trained"])
    if where.type == "cuda":
        found = foretold(case, bare, portion, placement, known)
        gc.collect()
        steps = Steps(case, model, batch, placement)
        torch.compiler.reset()
        times, most = done(steps, count)
    else:
        steps = Steps(case, model, batch, placement)
        times, most = done(steps, count - count // 2)
        found = foretold(case, bare, portion, placement, {})
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
