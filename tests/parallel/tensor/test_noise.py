"""Dropout in models that are cut: the same where activations are whole, other numbers where ranks have other heads."""

from __future__ import annotations

import pytest
from torch import nn

from cornstarch.parallel.tensor.dropout import has_dropout
from tests import zoo
from tests.parallel.tensor.noise import CASES, adapters, dropped, masks, recomputed
from tests.parity.pool import Pool


@pytest.mark.parametrize("name", CASES)
def test_full_activations_are_equal_on_all_ranks_with_dropout(fresh: Pool, name: str) -> None:
    for found in fresh.run(2, dropped, name):
        assert found["loss"] and found["next"], found
        assert all(found["hidden"]) and all(found["whole"]), found


def test_ranks_drop_different_heads(fresh: Pool) -> None:
    for are_alike, layers_are_alike, again in fresh.run(2, masks):
        assert not are_alike and not layers_are_alike and again


def test_ranks_drop_different_tokens(fresh: Pool) -> None:
    """Where activations between regions are cut along tokens, what is dropped there is each rank's own."""
    for found in fresh.run(2, dropped, "phi3", True):
        assert found["loss"] and found["next"], found
        assert not any(found["zeros"]), found


@pytest.mark.parametrize(("name", "sequence"), [("gpt2", False), ("opt", False), ("phi3", False), ("phi3", True)])
def test_recomputed_layers_replay_dropout(fresh: Pool, name: str, sequence: bool) -> None:
    for off, is_same_state in fresh.run(2, recomputed, name, sequence):
        assert off < 1e-6 and is_same_state  # other masks would be off by 1e-2


def test_adapters_drop_full_inputs_alike_and_sharded_ones_differently(fresh: Pool) -> None:
    for found in fresh.run(2, adapters):
        assert found == {"q_proj": True, "k_proj": True, "o_proj": False, "up_proj": True, "down_proj": False}


def test_model_without_dropout_has_no_random_state_hooks() -> None:
    assert not has_dropout(zoo.LANGUAGE_MODELS["llama"].build(attention_dropout=0.0))
    assert has_dropout(zoo.LANGUAGE_MODELS["llama"].build(attention_dropout=0.1))
    assert has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert not has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
