"""Layers on a GPU: what is measured of them, beside what is analytic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cornstarch.plan.cluster import device
from cornstarch.planner import profile_run, run_cost
from cornstarch.train import load_config

pytestmark = pytest.mark.gpu

SIZES = {
    "model_type": "qwen3", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("train", ["full", "frozen"])
def test_profiled_costs_are_near_analytic_ones(train: str) -> None:
    language: dict[str, Any] = {"tokenizer": "none/none", "config": SIZES, "dtype": "bf16", "train": train}
    vision = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14, "num_hidden_layers": 2}
    base = {
        "model": {
            "encoders": {"vision": {"token": "<image>", "config": vision, "train": "projector", "dtype": "bf16"}},
            "language_model": language,
        },
        "data": {"train": "none.json", "max_length": 4096},
        "loop": {"batch_size": 4, "steps": 1},
    }
    config = load_config(None, base=base)
    measured, analytic = profile_run(config), run_cost(config, device(torch.cuda.get_device_name()))
    for one, other in zip(measured.modules, analytic.modules, strict=True):
        for layer, expected in zip(one.layers, other.layers, strict=True):
            assert layer.parameters == expected.parameters
    layer, expected = (cost.modules[-1].layers[1] for cost in (measured, analytic))
    assert layer.activation_bytes == pytest.approx(expected.activation_bytes, rel=0.15)
    assert layer.forward == pytest.approx(expected.forward, rel=0.5)
    assert (layer.weight_gradient > 0) == (train == "full") and layer.input_gradient > 0
