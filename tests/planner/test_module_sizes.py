"""Sizes of tp and cp that suit a module, what tp shards of it, and what fp8 gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cornstarch.plan.candidates import SearchSpace
from cornstarch.plan.cluster import Cluster, device
from cornstarch.plan.cost import LayerCost, RunCost
from cornstarch.planner import run_cost
from cornstarch.planner.search_run import plan_run
from cornstarch.train import RunConfig, load_config

H100, A100 = device("H100"), device("A100-80")
WIDE = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
VISION = {
    "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def config(tokens: int = 4096, batch: int = 8, train: str = "full", **sections: Any) -> RunConfig:
    model = {
        "encoders": {"vision": {"token": "<image>", "config": VISION, "train": "projector"}},
        "language_model": {"config": WIDE, "train": train},
    }
    data, loop = {"train": "none.json", "max_length": tokens}, {"batch_size": batch}
    return load_config(None, base={"model": model, "data": data, "loop": loop, "precision": "bf16", **sections})


def middle_layer(cost: RunCost) -> LayerCost:
    """Return a layer of the language model that has no embeddings and no head."""
    return cost.module("language_model").layers[1]


def test_cp_grows_with_the_tokens_of_a_row() -> None:
    for tokens, most in ((512, 8), (131_072, 128)):
        cost = run_cost(config(tokens), H100)
        vision, language = cost.modules
        assert max(language.cp_sizes) == most and vision.cp_sizes == language.cp_sizes


def test_long_rows_leave_no_device_idle() -> None:
    """One row of 128k tokens on 32 devices whose language model has 8 key heads: cp of 4 or more is needed."""
    found = plan_run(config(131_072, batch=1), Cluster.parse("4x8xH100"), space=SearchSpace(most_stages=1)).best
    assert found is not None
    assert found.candidate.world == 32 and found.candidate.modules[-1][1].cp > 8 // found.candidate.modules[-1][1].tp


def test_what_tp_can_shard_is_what_the_runtime_can() -> None:
    vision, language = run_cost(config(512), H100).modules
    assert language.tp_sequence and language.layers[-1].tp_cuts == "vocabulary"
    assert not vision.tp_sequence and all(layer.tp_cuts != "vocabulary" for layer in vision.layers)


@pytest.mark.parametrize(("scaling", "reached"), [("rowwise", 0.60), ("tensorwise", 0.66)])
def test_fp8_makes_large_trained_products_faster_and_nothing_else(scaling: str, reached: float) -> None:
    plain, fast = (middle_layer(run_cost(config(512, fp8=mode), H100)) for mode in ("off", scaling))
    ratio = H100.flops_of("fp8") * reached / H100.flops_of("bf16")
    assert plain.weight_gradient / ratio < fast.weight_gradient < plain.weight_gradient
    assert fast.forward < plain.forward and fast.input_gradient < plain.input_gradient
    assert replace(fast, forward=0, input_gradient=0, weight_gradient=0, again=0) == replace(
        plain, forward=0, input_gradient=0, weight_gradient=0, again=0
    )


def test_fp8_gains_nothing_in_frozen_layers_and_on_devices_without_it() -> None:
    for how, where in (({"train": "frozen"}, H100), ({}, A100)):
        plain, fast = (middle_layer(run_cost(config(512, fp8=mode, **how), where)) for mode in ("off", "rowwise"))
        assert fast == plain
