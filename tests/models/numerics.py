"""Every model family on a device, in fp32 and bf16, against fp32 on the CPU: the loss and all gradients.

python -m tests.models.numerics --device cuda   # writes benchmarks/results/gpu_numerics.md

A family is a language model with CLIP, an encoder with Llama, or a whole model that was taken apart; all tiny, with the
same weights and the same batch on both sides. Three ways are compared with fp32 on the CPU:

- fp32: another device, other kernels, other orders of summation; no TensorFloat-32;
- autocast: weights in fp32, computed in bf16, as `precision: bf16` trains;
- weights: the parameters themselves in bf16.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from textwrap import fill
from typing import Any

if __name__ == "__main__":  # before anything imports transformers, which reads it once
    os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch import ModalEncoderModule, MultimodalModel
from cornstarch.parallel.device import DevicePlacement
from tests.models.whole_models import FAMILIES as WHOLE
from tests.models.whole_models import why_not_here
from tests.versions import versions_of
from tests.zoo import ENCODERS, IGNORED, LANGUAGE_MODELS, MODALITY_TOKEN, PAD, RAGGED, Inputs, item_count, text_batch

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_numerics.md"
WIDTH = 120

WAYS = ("fp32", "autocast", "weights")


@dataclass(frozen=True)
class Bounds:
    """How far a device may be from fp32 on the CPU."""

    loss: float
    """|a - b| / |b|."""
    gradients: float
    """The norm of all differences, as a share of the norm of all gradients."""
    cosine: float
    """1 - the cosine between the two gradients of a large parameter, at most."""


BOUNDS: Mapping[str, Bounds] = {
    # Sums in another order: 2^-24 = 6e-8 for each operation, and more where large numbers cancel.
    "fp32": Bounds(1e-5, 2e-4, 1e-6),
    # Each result is rounded to 8 bits, 2^-9 = 0.2 % off at most. Of some dozens, one behind the other, the errors add
    # up like steps in random directions, to 1 or 2 %; 4 % with OPT, where rounding decides which side of zero a ReLU is
    # on. A loss is the mean over all tokens, where they largely cancel. Twice what bf16 on a CPU gives, or more.
    "autocast": Bounds(5e-3, 8e-2, 1e-2),
    # Here the weights are rounded too, and what layers add to is rounded after each.
    "weights": Bounds(5e-3, 1e-1, 2e-2),
}
# A router takes the best experts. Where two are nearly as good, rounding decides, and a token takes another way.
ROUTED: Mapping[str, Bounds] = {
    "fp32": BOUNDS["fp32"],
    "autocast": Bounds(1e-2, 3e-1, 2e-1),
    "weights": Bounds(1e-2, 3e-1, 2e-1),
}


# ------------------------------------------------------------------------------------------------ families


@dataclass(frozen=True)
class Family:
    """A model that is tried, and how its batches and models are made."""

    kind: str
    is_routed: bool
    cases: Callable[[], dict[str, tuple[MultimodalModel, Inputs]]]
    """By what is tried: a model, and a batch for it."""

    @property
    def bounds(self) -> Mapping[str, Bounds]:
        """How far it may be off."""
        return ROUTED if self.is_routed else BOUNDS


# Heads of 32 channels where models say how wide they are, as FlashAttention-4 takes; else of 16, as FlexAttention does.
SIZES: dict[str, Any] = {"hidden_size": 64, "max_position_embeddings": 512}
WHERE_NAMED = {"head_dim": 32, "sliding_window": 50, "attention_chunk_size": 48, "word_embed_proj_dim": 64}
LONG = 320  # tokens of a row: more than FlexAttention's blocks of 128
# Rows of documents; "*" is an item.
PACKED = (
    ("ttt*" + "t" * 60 + "*tt", "t" * 40 + "**" + "t" * 30, "*" + "t" * 50),
    ("t" * 70 + "*" + "t" * 40, "t" * 90),
)


def language_model(name: str) -> PreTrainedModel:
    """Build a language model that can take long rows."""
    part = LANGUAGE_MODELS[name]
    return part.build(**SIZES, **{key: size for key, size in WHERE_NAMED.items() if key in part.options})


def compose_model(language_model_name: str, encoder_name: str) -> dict[str, tuple[MultimodalModel, Inputs]]:
    """Make the cases of a language model and an encoder."""
    part = ENCODERS[encoder_name]
    found = {}
    for case, attention in (("short", "causal"), ("long", "item")):
        torch.manual_seed(0)  # the projector is new
        encoder = ModalEncoderModule(part.build(), attention=attention)
        model = MultimodalModel({"seen": encoder}, language_model(language_model_name))
        model.set_modality_token_ids({"seen": MODALITY_TOKEN})
        count = item_count(RAGGED if case == "short" else ["".join(row) for row in PACKED])
        lengths = part.feature_lengths(count)
        text = text_batch(RAGGED, lengths) if case == "short" else pack_batch(lengths)
        found[case] = model.train(), {**text, **part.inputs(count)}
    return found


def pack_batch(lengths: Sequence[int]) -> Inputs:
    """Make a batch of long rows, each of several documents, padded on the right."""
    batch = text_batch(["".join(row) for row in PACKED], lengths)
    missing = LONG - batch["input_ids"].shape[1]
    fillers = {"input_ids": PAD, "attention_mask": 0, "labels": IGNORED}
    batch = {name: nn.functional.pad(one, (0, missing), value=fillers[name]) for name, one in batch.items()}
    batch["documents"] = torch.zeros_like(batch["input_ids"])
    items = iter(lengths)
    for index, row in enumerate(PACKED):
        start = 0
        for number, document in enumerate(row, start=1):
            end = start + sum(next(items) if sign == "*" else 1 for sign in document)
            batch["documents"][index, start:end] = number
            batch["labels"][index, start] = IGNORED
            start = end
    return batch


def build_decomposed(name: str) -> dict[str, tuple[MultimodalModel, Inputs]]:
    """Make the case of a whole model; none, if this transformers has it in another way."""
    whole = WHOLE[name].build()
    if why_not_here(name, whole) is not None:
        return {}
    batch = WHOLE[name].batch(whole)
    # Padded on the left: what is before the first token of a row sees nothing, where each kernel has its own answer.
    is_predicted = batch["attention_mask"] * nn.functional.pad(batch["attention_mask"], (1, -1))
    labels = batch["input_ids"].masked_fill(is_predicted == 0, IGNORED)
    return {"short": (MultimodalModel.from_multimodal(whole), {**batch, "labels": labels})}


def _is_routed(name: str) -> bool:
    return any(part in name for part in ("moe", "mixtral", "llama4", "aria"))


FAMILIES: dict[str, Family] = {
    **{f"{n} with clip": Family("language model", _is_routed(n), lambda n=n: compose_model(n, "clip"))
       for n in LANGUAGE_MODELS},
    **{f"llama with {n}": Family(f"{part.modality} encoder", False, lambda n=n: compose_model("llama", n))
       for n, part in ENCODERS.items()},
    **{n: Family("whole model", _is_routed(n), lambda n=n: build_decomposed(n)) for n in WHOLE},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ figures


@dataclass(frozen=True)
class Figures:
    """How far one way of computing is from fp32 on the CPU."""

    family: str
    case: str
    way: str
    loss: float
    gradients: float
    cosine: float
    """1 - the smallest cosine of a large parameter's gradient."""
    where: str
    """Whose it is."""

    def problems(self) -> list[str]:
        """Return what is too far off."""
        most = FAMILIES[self.family].bounds[self.way]
        return [
            f"{self.family}, {self.case} rows, {self.way}: {name} {getattr(self, name):.1e}, at most {limit:g}"
            + (f" ({self.where})" if name == "cosine" else "")
            for name, limit in vars(most).items()
            if not getattr(self, name) <= limit
        ]


@contextmanager
def exactly() -> Iterator[None]:
    """Compute without TensorFloat-32 in this block, with kernels of its own: past a limit torch stops compiling."""
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


def figures(name: str, device: str, ways: Sequence[str] = WAYS) -> list[Figures]:
    """Return how far a family is off on a device."""
    found = []
    with exactly():
        for case, (model, batch) in FAMILIES[name].cases().items():
            expected = compute(model, batch, "cpu", "fp32")
            for way in ways:
                found.append(compare(name, case, way, compute(model, batch, device, way), expected))
    return found


Computed = tuple[float, dict[str, Tensor]]
"""A loss, and all gradients that there are."""


def compute(model: MultimodalModel, batch: Inputs, device: str, way: str) -> Computed:
    """Return the loss and the gradients of a copy of a model on a device."""
    placement = DevicePlacement(torch.device(device), "bf16" if way == "autocast" else "fp32")
    own, inputs = copy.deepcopy(model).to(placement.device), placement.move_batch(batch)
    if way == "weights":
        for parameter in own.parameters():  # not the buffers: positions are computed in fp32 in any precision
            parameter.data = parameter.data.to(torch.bfloat16)
        inputs = {key: one.bfloat16() if one.is_floating_point() else one for key, one in inputs.items()}
    with placement.forward_context():
        loss = own(**inputs).loss
    loss.backward()
    gradients = {n: p.grad.double().cpu() for n, p in own.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def compare(family: str, case: str, way: str, found: Computed, expected: Computed) -> Figures:
    """Return how far one is from the other."""
    ours, theirs = found[1], expected[1]
    odd = sorted(ours.keys() ^ theirs.keys())
    assert not odd, f"{family}: only one side has gradients of {odd}"
    whole = sum(float(one.norm()) ** 2 for one in theirs.values()) ** 0.5
    apart = sum(float((ours[name] - one).norm()) ** 2 for name, one in theirs.items()) ** 0.5
    # Of a gradient that is nearly zero, a key's bias say, only rounding is left, which points anywhere.
    large = {name: one for name, one in theirs.items() if one.numel() >= 256 and float(one.norm()) > 0.01 * whole}
    angles = {name: 1 - float(nn.functional.cosine_similarity(ours[name].flatten(), one.flatten(), dim=0))
              for name, one in large.items()}  # fmt: skip
    where = max(angles, key=lambda name: angles[name])
    loss = abs(found[0] - expected[0]) / abs(expected[0])
    return Figures(family, case, way, loss, apart / whole, angles[where], where)


# ------------------------------------------------------------------------------------------------ the page


def page(found: Sequence[Figures], device: str, seconds: float) -> str:
    """Return the page."""
    wrong = [problem for one in found for problem in one.problems()]
    name = torch.cuda.get_device_name(0) if device == "cuda" else f"{platform.machine()} CPU"
    tools = versions_of("torch", "transformers", "flash-attn-4", "nvidia-cudnn-frontend")
    head = (
        f"**{len({one.family for one in found})} families, {len(found)} comparisons, {len(wrong)} out of bounds.** "
        f"{datetime.now(UTC):%Y-%m-%d}, {name}, {tools}, Python {platform.python_version()}, {seconds:.0f} s. Tiny "
        "models, the same weights and batch on the device and, in fp32, on the CPU. Short rows are padded and causal; "
        f"long ones have {LONG} tokens, packed documents and images that see themselves both ways: on a GPU that is "
        "FlashAttention-4 or cuDNN in bf16, where they are installed and take the heads, else FlexAttention. Each "
        "cell: the loss's relative deviation; the norm of all differences of gradients as a share of their norm; 1 − "
        "the smallest cosine of a large parameter's gradient."
    )
    command = f"`python -m tests.models.numerics --device {device}`"
    lines = ["# Numerics on a GPU", "", command, "", fill(head, WIDTH), ""]
    lines += ["| at most | fp32 | bf16 autocast | bf16 weights |", "|---|---|---|---|"]
    for title, bounds in (("", BOUNDS), ("with a router of experts", ROUTED)):
        limits = " | ".join(f"{b.loss:g} {b.gradients:g} {b.cosine:g}" for b in (bounds[way] for way in WAYS))
        lines.append(f"| {title} | {limits} |")
    lines += ["", "| family | | rows | fp32 | bf16 autocast | bf16 weights |", "|---|---|---|---|---|---|"]
    by_cell = {(one.family, one.case, one.way): one for one in found}
    for family, case in dict.fromkeys((one.family, one.case) for one in found):
        cells = " | ".join(_show(by_cell.get((family, case, way))) for way in WAYS)
        lines.append(f"| {family} | {FAMILIES[family].kind} | {case} | {cells} |")
    return "\n".join(lines) + "\n"


def _show(one: Figures | None) -> str:
    if one is None:
        return ""
    text = f"{one.loss:.0e} {one.gradients:.0e} {one.cosine:.0e}"
    return f"**{text}**" if one.problems() else text


def tried(name: str, device: str) -> list[Figures] | str:
    """Print and return how far a family is off, or what went wrong: the others are still worth knowing."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    try:
        found = figures(name, device)
    except Exception as error:
        problem = f"{name}: {type(error).__name__}: {error}"
        print(problem, flush=True)
        return problem
    told = "; ".join(f"{one.case} {one.way} {_show(one)}" for one in found)
    print(f"{time.monotonic() - begun:5.1f} s  {name}: {told}", flush=True)
    return found


def main() -> int:
    """Return 1 if something is out of bounds."""
    reader = argparse.ArgumentParser(prog="python -m tests.models.numerics")
    reader.add_argument("--device", choices=["cpu", "cuda"], required=True)
    reader.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    reader.add_argument("--jobs", type=int, default=1, help="processes at a time")
    reader.add_argument("--page", type=Path, default=PAGE)
    asked = reader.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        reader.error("--device cuda: torch finds no GPU here")
    start, found, failed = time.monotonic(), [], []
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as processes:
        for own in processes.map(tried, asked.families, [asked.device] * len(asked.families)):
            if isinstance(own, str):
                failed.append(own)
            else:
                found += own
    asked.page.write_text(page(found, asked.device, time.monotonic() - start), encoding="utf-8")
    wrong = [*failed, *(problem for one in found for problem in one.problems())]
    for problem in wrong:
        print(f"FAILED {problem}")
    print(f"{len(wrong)} failures; written to {asked.page}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
