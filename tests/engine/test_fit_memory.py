"""`loop.gradient_accumulation_steps: auto`: the fewest microbatches whose activations fit beside the states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cornstarch import ModalEncoderModule, MultimodalModel
from cornstarch.config import RunConfig
from cornstarch.config.config_file import load_config
from cornstarch.engine.fit_memory import estimate_activations, estimate_states, fit_microbatches
from tests import zoo

TOKENS = 64


BASE = {
    "model": {"given": "LlamaForCausalLM"},
    "data": {"train": [{"path": "train_data", "format": "given"}], "max_length": TOKENS},
}


def build_config(**loop: Any) -> RunConfig:
    return load_config(None, base={**BASE, "loop": loop})


def build_llama() -> nn.Module:
    return zoo.LANGUAGE_MODELS["llama"].build()


def test_fewest_that_fit_are_chosen() -> None:
    model, config = build_llama(), build_config()
    states, rows = estimate_states(model, config, 1), 8
    once = estimate_activations(model, config, rows, {}, 1.0)
    sums = 2 * sum(one.numel() for one in model.parameters())

    def fit(memory: float, **options: Any) -> int:
        return fit_microbatches(model, config, int(memory), rows, 8, {}, 8, **options)[0]

    assert fit(states + once + 1) == 1
    assert fit(states + once - 1e3) == 2
    assert fit(states + sums + once * 3 / 8 + 1) == 3  # 3 rows each, of which one is empty
    assert fit(states + sums + once * 3 / 8 + 1, is_packed=False) == 4
    assert fit(0) == 8  # nothing fits: the smallest there is, and the message when memory runs out says the rest


def test_what_sharding_recomputing_and_a_budget_save() -> None:
    model, config = build_llama(), build_config()
    whole = estimate_states(model, config, 1)
    assert estimate_states(model, config, 4) == whole  # ddp
    assert estimate_states(model, build_config(ema_decay=0.9), 4) > whole
    sharded = load_config(None, base={**BASE, "parallel": {"data": {"kind": "zero3"}}})
    assert estimate_states(model, sharded, 4) == pytest.approx(whole / 4)
    once = estimate_activations(model, config, 4, {}, 1.0)
    assert estimate_activations(model, build_config(activation_checkpointing=True), 4, {}, 1.0) < once / 4
    assert estimate_activations(model, build_config(activation_budget="1 MB"), 4, {}, 1.0) <= 4 * 1e6


def test_items_of_trained_encoders_count_and_frozen_ones_do_not() -> None:
    part = zoo.ENCODERS["siglip"]
    encoder, language = part.build(), build_llama()
    projector = nn.Linear(encoder.config.hidden_size, language.config.hidden_size)  # type: ignore[union-attr,arg-type]
    model = MultimodalModel({"vision": ModalEncoderModule(encoder, projector)}, language_model=language)  # type: ignore[arg-type]
    size = encoder.config.image_size  # type: ignore[union-attr]
    batch = {"input_ids": torch.zeros(2, TOKENS, dtype=torch.long), "pixel_values": torch.zeros(2, 3, size, size)}  # type: ignore[arg-type]
    config = build_config()
    with_images = estimate_activations(model, config, 2, batch, 1.0)
    text = estimate_activations(language, config, 2, batch, 1.0)
    assert with_images > text
    assert estimate_activations(model, config, 2, batch, 2.0) > with_images
    encoder.requires_grad_(False)
    assert estimate_activations(model, config, 2, batch, 1.0) == text


@pytest.mark.parametrize("given", ["auto", 2])
def test_auto_stands_for_what_was_chosen(given: Any) -> None:
    loop = build_config(gradient_accumulation_steps=given).loop
    assert loop.microbatches == (1 if given == "auto" else 2)
    if given == "auto":
        loop.set_chosen_microbatches(4)
        assert loop.microbatches == 4
        assert loop.model_dump()["gradient_accumulation_steps"] == "auto"  # what a run folder has
        assert loop.model_copy(update={"gradient_accumulation_steps": 3}).microbatches == 3
