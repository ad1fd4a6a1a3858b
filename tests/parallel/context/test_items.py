"""Encoders whose items are dealt out give the features, and the gradients, of one process."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from tests import zoo
from tests.parallel.context import refused, special
from tests.parity.pool import Pool


@pytest.mark.parametrize(("ranks", "items"), [(2, 5), (3, 2)])
@pytest.mark.parametrize("name", zoo.ENCODERS)
def test_sharded_items_give_the_gradients_of_one_process(workers: Pool, name: str, ranks: int, items: int) -> None:
    assert workers.run(ranks, special.encoder, name, items) == [""] * ranks


@pytest.mark.parametrize(("ranks", "items"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("name", ["clip", "siglip", "siglip2", "vit", "dinov2", "internvl", "qwen2_vl", "whisper"])
def test_sharded_patches_give_the_gradients_of_one_process(workers: Pool, name: str, ranks: int, items: int) -> None:
    assert workers.run(ranks, special.encoder, name, items, "always") == [""] * ranks


@pytest.mark.parametrize("name", ["pixtral", "qwen2_vl", "clip"])
def test_sharded_patches_work_with_activation_checkpointing(workers: Pool, name: str) -> None:
    if name == "pixtral" and Version(transformers.__version__) < Version("5.22"):
        pytest.skip("older versions hand positions to the attention, and items are dealt out instead")
    assert workers.run(2, special.encoder, name, 3, "always", True) == ["", ""]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2"])
def test_sharded_patches_work_under_data_parallelism(workers: Pool, kind: str) -> None:
    assert workers.run(2, special.patches_with_data_parallelism, kind) == ["", ""]


@pytest.mark.parametrize("name", ["clip", "qwen2_vl"])
def test_patches_are_sharded_where_items_cannot_be_balanced(workers: Pool, name: str) -> None:
    for few, many in workers.run(2, special.tokens_in_layers, name):
        assert few[0] in (many[0] // 2, -(-many[0] // 2))  # of one item each rank has half of the tokens
        assert few[1] is None and many[1] is None


def test_encoder_with_unshardable_patches_falls_back_to_items(workers: Pool) -> None:
    for (_, reason), _ in workers.run(2, special.tokens_in_layers, "qwen3_vl"):
        assert "computes something else" in reason
    assert workers.run(2, special.encoder, "dinov3", 1) == ["", ""]


def test_items_are_balanced_by_patches(workers: Pool) -> None:
    for patches in workers.run(2, special.patches_encoded):
        assert patches == [24, 24]  # of grids of 16, 8, 16 and 8 patches


def test_unshardable_items_are_refused(workers: Pool) -> None:
    for found in workers.run(2, refused.collect_refused_items):
        assert "takes means over all items of a batch" in found["batch norm"]
        assert "were given different items" in found["different items"]
        assert "mesh of one axis" in found["mesh"]
        assert "'sizes' of shape [3]" in found["unknown input"]
