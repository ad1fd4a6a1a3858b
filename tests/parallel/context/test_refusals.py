"""What context parallelism cannot do is refused with the reason: by name, by a short text, or in the first step."""

from __future__ import annotations

import pytest
import torch

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.parallel.context import check_tokens, shard_tokens, verify_tokens
from tests import zoo
from tests.models import sweep
from tests.parallel.context import refused
from tests.parity.pool import Pool


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BloomForCausalLM", "takes no position_ids"),
        ("MambaForCausalLM", "takes no position_ids"),
        ("Qwen3NextForCausalLM", "linear_attention"),
        ("FalconH1ForCausalLM", "mix tokens|mixes neighbouring tokens"),
    ],
)
def test_unsupported_models_are_refused_by_name(name: str, reason: str) -> None:
    model = sweep.build_language_model(name).to("meta")
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_tokens(model, 2)
    assert "cp = 1" in str(caught.value)


def test_fewer_heads_than_ranks_is_refused_for_all_to_all() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build()
    with pytest.raises(ConfigError, match=r"a layer has 4 for 6 ranks. Use cp = 4 or less, or the mode ring_attn"):
        check_tokens(model, 6, "all_to_all")
    check_tokens(model, 6, "gather")
    check_tokens(model, 4, "all_to_all")


def test_module_outside_transformers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        check_tokens(torch.nn.Linear(2, 2), 2)


def test_unsharded_model_cannot_be_verified() -> None:
    with pytest.raises(ConfigError, match="are not cut; call shard_tokens first"):
        verify_tokens(zoo.LANGUAGE_MODELS["llama"].build())


def test_shard_tokens_without_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match="was given str; expected the mesh of one axis"):
        shard_tokens(zoo.LANGUAGE_MODELS["llama"].build(), "cp")  # type: ignore[arg-type]


def test_verification_refuses_models_that_names_do_not_reveal(workers: Pool) -> None:
    for found in workers.run(2, refused.collect_refused_models):
        assert "computes something else than whole" in found["mixes neighbours"]
        assert "computes something else than whole" in found["counts from where a rank begins"]
        assert "1 of them attended" in found["attends in one layer only"]
        assert found["afterwards, as before"] == ""
        assert "1 of them attended" in found["cut again"]


def test_unsupported_batches_and_options_are_refused(workers: Pool) -> None:
    for found in workers.run(2, refused.collect_refused_batches):
        assert "were given different batches (rows x tokens: 2 x 37, 2 x 36)" in found["other batch"]
        assert "attention_mask has shape [2, 1, 37, 37]" in found["4-D mask"]
        assert "padding between tokens" in found["hole"]
        assert "give position_ids, or pad on the right" in found["padding in front"]
        assert "ask padding to predict" in found["labels at padding"]
        assert "position_ids jump" in found["positions"]
        assert "cannot be cut over 2 ranks" in found["one token"]
        assert "logits_to_keep" in found["logits_to_keep"]
        assert "the loss of a router" in found["router"]
        assert "either input_ids or inputs_embeds" in found["nothing"]
        assert "'deltas' of shape [2, 3]" in found["unknown input"]
        assert "cut already" in found["twice"]
        assert "mode = 'star': expected one of all_to_all, gather, ring_attn" in found["mode"]
        assert "distribution = 'fair': expected one of uniform" in found["distribution"]
        assert "The mask in use is of [2, 5] tokens, the batch of [2, 37]" in found["other mask"]
        assert found["and then a good one"] == ""


def test_dynamic_rope_beyond_its_limit_is_refused(workers: Pool) -> None:
    for found in workers.run(2, refused.collect_refused_rotations):
        assert "dynamic rotary embeddings" in found["dynamic, long"] and "at most 16" in found["dynamic, long"]
        assert found["dynamic, short"] == ""
        assert "longrope rotary embeddings" in found["longrope, uniform"]
        assert found["longrope, zigzag"] == ""
