"""Activations cut along tokens between regions."""

from __future__ import annotations

from typing import Any

import pytest

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.tensor import check_tensor_plan
from tests import zoo
from tests.parallel.tensor.work import adapt, alone, assert_same, build, cut, find_kept_between, two_lengths
from tests.parity.pool import Pool

# The longest of the texts has 11 tokens, which two ranks do not divide.
NAMES = [
    "llama",
    "qwen3",
    "mistral",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt2",
    "clip",
    "siglip",
    "vit",
    "pixtral",
]


@pytest.mark.parametrize("name", NAMES)
def test_sequence_parallel_gradients_equal_those_of_one_process(workers: Pool, name: str) -> None:
    expected = alone(name)
    for found in workers.run(2, cut, name, 2, {}, {"sequence": True}):
        assert_same(found, expected)


@pytest.mark.parametrize("how", [{"recompute": True}, {"vocabulary": True}], ids=str)
def test_sequence_parallelism_composes_with_other_options(workers: Pool, how: dict[str, Any]) -> None:
    expected = alone("llama")
    for found in workers.run(2, cut, "llama", 2, {}, {"sequence": True, **how}):
        assert_same(found, expected)


def test_four_ranks_give_the_gradients_of_one_process(workers: Pool) -> None:
    expected = alone("qwen3")
    for found in workers.run(4, cut, "qwen3", 4, {}, {"sequence": True}):
        assert_same(found, expected)


def test_norms_see_their_own_tokens_only(workers: Pool) -> None:
    assert workers.run(2, find_kept_between, True) == [(3, 6, 32)] * 2
    assert workers.run(2, find_kept_between, False) == [(3, 11, 32)] * 2


def test_other_length_between_forward_and_backward(workers: Pool) -> None:
    """Activations computed again must not take the length of the batch that came in between."""
    expected = two_lengths(1)
    for found in workers.run(2, two_lengths, 2):
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["opt", "whisper"])
def test_feed_forward_layers_without_a_module_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="feed-forward layers lie openly"):
        check_tensor_plan(build(name), 2, sequence=True)


def test_adapters_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\(sequence=True\): self_attn has adapters"):
        check_tensor_plan(adapt("llama"), 2, sequence=True)


def test_the_zoo_is_known() -> None:
    assert set(NAMES) <= {*zoo.LANGUAGE_MODELS, *zoo.ENCODERS}
