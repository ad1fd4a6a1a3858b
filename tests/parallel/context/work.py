"""What the tests here let several processes do: compute a batch whole and cut, and compare.

Each function runs in every process; what one process computes whole is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cornstarch import MultimodalModel
from cornstarch.attention import MaskSpec, attend_through_masks, use_mask
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.parallel.context import shard_items, shard_tokens, unshard_tokens
from cornstarch.plan.token_distribution import BlockWork, TokenDistribution
from tests import zoo
from tests.models.whole_models import FAMILIES, IMAGE

ROUNDING: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
ROWS, TOKENS = 2, 37  # divides nothing


def mesh() -> DeviceMesh:
    """Return the mesh of all processes."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def shuffle_rows(work: BlockWork, ranks: int) -> TokenDistribution:
    """Deal out at random, unevenly: every token of its own."""
    owners = np.random.default_rng(0).integers(0, ranks, len(work.blocks))
    owners[:ranks] = np.arange(ranks)
    return TokenDistribution(tuple(np.flatnonzero(owners == rank) for rank in range(ranks)), work, "random", "a test")


DISTRIBUTIONS: dict[str, Any] = {
    name: name for name in ("uniform", "zigzag", "makespan_min", "auto")
} | {"random": shuffle_rows}  # fmt: skip


# ------------------------------------------------------------------------------------------------ batches


def text() -> dict[str, Tensor]:
    """Return rows of text without padding."""
    ids = torch.randint(zoo.EOS + 1, zoo.VOCABULARY, (ROWS, TOKENS), generator=zoo.generator(4))
    return {"input_ids": ids, "labels": ids.clone()}


def pad_rows() -> dict[str, Tensor]:
    """Return rows of different lengths."""
    batch = text()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, TOKENS - 9 :] = 0
    return {**batch, "labels": batch["labels"].masked_fill(mask == 0, zoo.IGNORED), "attention_mask": mask}


def spec(images: bool) -> MaskSpec:
    """Return packed documents with padding behind, with or without images that see themselves in both directions."""
    documents = torch.ones(ROWS, TOKENS, dtype=torch.long)
    documents[0, 11:30], documents[0, 30:] = 2, 0
    documents[1, 19:] = 2
    spans = torch.full_like(documents, -1)
    if images:
        spans[0, 3:9], spans[0, 14:26], spans[1, 5:12], spans[1, 20:23] = 0, 1, 0, 1
        spans[1, 30:33] = 1  # of one span, in two pieces
    return MaskSpec(documents, spans)


def masked(images: bool) -> dict[str, Tensor]:
    """Return the batch of such a mask."""
    batch, mask = text(), spec(images)
    trained = (mask.documents > 0) & (mask.positions() > 0)
    return {
        "input_ids": batch["input_ids"],
        "labels": batch["labels"].masked_fill(~trained, zoo.IGNORED),
        "attention_mask": (mask.documents > 0).long(),
        "position_ids": mask.positions(),
    }


def pad_left() -> dict[str, Tensor]:
    """Return rows with padding in front."""
    batch = pad_rows()
    turned = {name: value.flip(1) for name, value in batch.items()}
    turned["labels"][1, 9] = zoo.IGNORED  # the first of the text: nothing but padding is before it
    return {**turned, "position_ids": (turned["attention_mask"].cumsum(1) - 1).clamp(min=0)}


Case = tuple[Callable[[], dict[str, Tensor]], Callable[[], MaskSpec | None]]
MASKS: dict[str, Case] = {
    "causal": (text, lambda: None),
    "padding": (pad_rows, lambda: None),
    "padding in front": (pad_left, lambda: None),
    "documents": (lambda: masked(False), lambda: spec(False)),
    "images": (lambda: masked(True), lambda: spec(True)),
}


# ------------------------------------------------------------------------------------------------ comparing


@dataclass(frozen=True)
class Difference:
    """How far a cut computation is from the whole one."""

    case: str
    what: str
    """What differs, or nothing."""


Gradients = Mapping[str, Tensor | None]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Return every parameter's gradient of a loss, and leave none behind."""
    loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def summed(found: Gradients) -> dict[str, Tensor | None]:
    """Add gradients up over the ranks."""
    for gradient in found.values():
        if gradient is not None:
            dist.all_reduce(gradient)
    return dict(found)


def difference(found: Gradients, expected: Gradients, scale: float = 1e-4) -> str:
    """Say which gradient is another one."""
    if found.keys() != expected.keys():
        return "other parameters"
    for name, value in expected.items():
        other = found[name]
        if (value is None) != (other is None):
            return f"{name}: {'no' if other is None else 'a'} gradient"
        if value is None or other is None:
            continue
        atol = max(ROUNDING["atol"], scale * float(value.abs().max()))
        if not torch.allclose(other, value, rtol=ROUNDING["rtol"], atol=atol):
            return f"{name}: off by {float((other - value).abs().max()):.1e} of {float(value.abs().max()):.1e}"
    return ""


def compare_results(
    model: nn.Module,
    batch: dict[str, Any],
    mask: MaskSpec | None,
    options: dict[str, Any],
    change: Callable[[], Any] | None = None,
) -> str:
    """Compute a batch whole, then cut (and changed), and say what differs."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext if mask is None else lambda: use_mask(mask)
    language_model: Any = model.language_model if isinstance(model, MultimodalModel) else model
    model.zero_grad(set_to_none=True)
    if mask is not None:
        attend_through_masks(language_model)
    with within():
        output = model(**batch)
    expected_loss, expected_logits = output.loss.detach(), output.logits.detach()
    expected = gradients(model, output.loss)
    shard_tokens(language_model, mesh(), **options)
    if change is not None:
        change()
    try:
        with within():
            output = model(**batch)
        total = output.loss.detach().clone()
        dist.all_reduce(total)
        found = summed(gradients(model, output.loss))
        if not torch.allclose(total, expected_loss, rtol=1e-5):
            return f"loss {float(total):.6f} instead of {float(expected_loss):.6f}"
        seen = batch.get("attention_mask", torch.ones(expected_logits.shape[:2]))[:, output.token_index].bool()
        own = expected_logits[:, output.token_index]
        if not torch.allclose(output.logits[seen], own[seen], rtol=1e-3, atol=1e-4):
            return f"logits off by {float((output.logits[seen] - own[seen]).abs().max()):.1e}"
        return difference(found, expected)
    finally:
        unshard_tokens(language_model)


def language_model(
    name: str,
    cases: list[tuple[str, str, str]],
    recompute: bool = False,
    config: dict[str, Any] | None = None,
) -> list[Difference]:
    """Try (mask, mode, distribution) on a model of the zoo."""
    model = zoo.LANGUAGE_MODELS[name].build(**(config or {})).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = []
    for mask, mode, distribution in cases:
        make, make_mask = MASKS[mask]
        options = {"mode": mode, "distribution": DISTRIBUTIONS[distribution]}
        what = compare_results(model, make(), make_mask(), options)
        found.append(Difference(f"{name}, {mask}, {mode}, {distribution}", what))
    return found


# ------------------------------------------------------------------------------------------------ composed


def multimodal(attention: str, mode: str, trained: tuple[bool, bool] = (True, True), dealt: bool = False) -> str:
    """Try CLIP and Llama, with or without images that are dealt out, too."""
    with zoo.reproducible(0):
        encoder = ModalEncoderModule(zoo.ENCODERS["clip"].build(), attention=attention)  # type: ignore[arg-type]
        model = MultimodalModel({"vision": encoder}, zoo.LANGUAGE_MODELS["llama"].build())
    zoo.disturb(model)
    model.set_modality_token_ids({"vision": zoo.MODALITY_TOKEN})
    model.train(encoders_mode={"vision": trained}, llm_mode=True)
    items = zoo.ENCODERS["clip"].inputs(zoo.item_count(zoo.RAGGED))
    lengths = zoo.ENCODERS["clip"].feature_lengths(zoo.item_count(zoo.RAGGED))
    batch = {**zoo.text_batch(zoo.RAGGED, lengths), **items}
    change = (lambda: shard_items(model.vision_encoder, mesh())) if dealt else None
    return compare_results(model, batch, None, {"mode": mode, "distribution": "makespan_min"}, change)


def take_over(family: str, mode: str) -> str:
    """Try a whole multimodal model that was taken apart, on a row with images and no padding."""
    whole = FAMILIES[family].build()
    model = MultimodalModel.from_multimodal(whole)
    batch = FAMILIES[family].batch(whole, "none")
    labels = batch["input_ids"].masked_fill(batch["input_ids"] >= IMAGE, zoo.IGNORED)
    options = {"mode": mode, "distribution": shuffle_rows}
    try:
        return compare_results(model.train(), {**batch, "labels": labels}, None, options)
    except ConfigError as error:
        return f"refused: {error}"


def adapters(mode: str) -> str:
    """Try LoRA on Llama."""
    with zoo.reproducible(0):
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(zoo.LANGUAGE_MODELS["llama"].build(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    return compare_results(model, masked(True), spec(True), {"mode": mode, "distribution": shuffle_rows})
