"""Tensor parallelism together with FSDP2, with LoRA and with checkpoints."""

from __future__ import annotations

import pytest
import torch

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.tensor import check_tensor_plan
from tests.parallel.tensor import work
from tests.parallel.tensor.work import ROWS_OF_TWO, adapt, alone_on, assert_same, compose_model
from tests.parity.pool import Pool

MESHES = {
    "fsdp": ((2, 2), ("dp", "tp")),
    "one copy each": ((2, 1, 2), ("dp", "shard", "tp")),
}


@pytest.mark.parametrize(
    ("name", "adapters", "mesh", "how"),
    [
        *[(name, False, "fsdp", {}) for name in ("llama", "phi3", "qwen3_moe", "gpt2")],
        ("llama", True, "fsdp", {}),
        ("phi3", True, "fsdp", {}),
        ("phi3", False, "one copy each", {}),
        ("gemma3", False, "fsdp", {"sequence": True, "vocabulary": True}),
    ],
)
def test_composition_with_fsdp(fresh: Pool, name: str, adapters: bool, mesh: str, how: dict[str, bool]) -> None:
    expected, stepped = alone_on(name, adapters, ROWS_OF_TWO)
    results = fresh.run(4, compose_model, name, adapters, *MESHES[mesh], how)
    assert sum(found["outcome"].loss for found in results) / 4 == pytest.approx(expected.loss, rel=1e-5)
    for found in results:
        assert found["whole"] == found["boxes"] == []
        assert all(found["kinds"].values())
        assert_same(work.Outcome(expected.loss, found["outcome"].gradients), expected)
        for key, value in stepped.items():
            torch.testing.assert_close(found["steps"][key], value, rtol=1e-4, atol=1e-5)


def test_sharded_adapters_give_the_gradients_of_one_process(workers: Pool) -> None:
    for name in ("llama", "qwen3"):
        expected, _ = alone_on(name, True, work.ROWS)
        for found in workers.run(2, work.cut_with_adapters, name):
            assert_same(found, expected)
            trained = [key for key, gradient in found.gradients.items() if gradient is not None]
            assert trained and all("lora" in key for key in trained)


@pytest.mark.parametrize(("name", "sharded"), [("phi3", True), ("gpt2", False), ("llama4", True), ("qwen2_vl", True)])
def test_full_tensors_load_into_sharded_parameters(fresh: Pool, name: str, sharded: bool) -> None:
    assert fresh.run(4, work.refill, name, sharded) == [[]] * 4


def test_meta_model_is_sharded_and_loaded(workers: Pool) -> None:
    for found in workers.run(2, work.on_meta, "phi3"):
        assert found["meta"]
        assert found["held"]["model.layers.0.self_attn.qkv_proj.weight"] == (32, 32)  # of 64
        assert found["held"]["model.layers.0.mlp.down_proj.weight"] == (32, 32)  # of 64 inputs
        assert found["held"]["model.norm.weight"] == (32,)


def test_other_adapters_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"o_proj has adapters .*lora_magnitude_vector"):
        check_tensor_plan(adapt("llama", use_dora=True), 2)
