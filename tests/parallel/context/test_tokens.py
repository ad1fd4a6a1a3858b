"""Models whose tokens are cut compute what one process computes: loss, logits and every gradient."""

from __future__ import annotations

from itertools import cycle

import pytest

from tests import zoo
from tests.parallel.context import special, work
from tests.parity.pool import Pool

MODES = ("gather", "all_to_all", "ring_attn")


def cases(ranks: int) -> list[tuple[str, str, str]]:
    """Every mask in every mode; distributions take turns."""
    turns = cycle(work.DISTRIBUTIONS)
    chosen = work.MASKS if ranks == 2 else ("padding", "images")
    return [(mask, mode, next(turns)) for mask in chosen for mode in MODES]


def must_be_equal(found: list[list[work.Difference]]) -> None:
    wrong = {f"{one.case}: {one.what}" for rank in found for one in rank if one.what}
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("name", zoo.LANGUAGE_MODELS)
def test_language_model_gradients_equal_those_of_one_process(workers: Pool, name: str) -> None:
    must_be_equal(workers.run(2, work.language_model, name, cases(2)))


# Every kind of odd once: shared keys, layers that see chunks, windows beside whole rows, experts, learned positions.
@pytest.mark.parametrize("name", ["llama", "llama4", "gemma3", "qwen3_moe", "gpt2"])
def test_three_ranks_give_the_gradients_of_one_process(workers: Pool, name: str) -> None:
    must_be_equal(workers.run(3, work.language_model, name, cases(3)))


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
def test_activation_checkpointing_gives_the_same_gradients(workers: Pool, name: str) -> None:
    every = [(mask, mode, "random") for mask in ("padding", "images") for mode in MODES]
    must_be_equal(workers.run(2, work.language_model, name, every, True))


def test_every_distribution_in_the_ring(workers: Pool) -> None:
    every = [("images", "ring_attn", how) for how in work.DISTRIBUTIONS]
    must_be_equal(workers.run(3, work.language_model, "mistral", every))


def test_four_ranks_give_the_gradients_of_one_process(workers: Pool) -> None:
    every = [("images", mode, "makespan_min") for mode in MODES]
    must_be_equal(workers.run(4, work.language_model, "gemma2", every))


# Heads that divide nothing: six over four ranks, with two heads of keys.
def test_heads_that_do_not_divide_give_the_gradients_of_one_process(workers: Pool) -> None:
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
    every = [("images", mode, "random") for mode in MODES]
    must_be_equal(workers.run(4, work.language_model, "llama", every, False, heads))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["causal", "item", "modality"])
def test_composed_model_gives_the_gradients_of_one_process(workers: Pool, attention: str, mode: str) -> None:
    assert workers.run(2, work.multimodal, attention, mode) == ["", ""]


@pytest.mark.parametrize("dealt", [False, True])
def test_composed_model_over_three_ranks_gives_the_gradients_of_one_process(workers: Pool, dealt: bool) -> None:
    assert workers.run(3, work.multimodal, "item", "ring_attn", (True, True), dealt) == ["", "", ""]


# Positions of three axes, features that enter at several layers, a cache that is made in training, another loss.
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "idefics3", "qwen2-audio"])
def test_decomposed_multimodal_models_give_the_gradients_of_one_process(workers: Pool, family: str) -> None:
    assert workers.run(2, work.take_over, family, "ring_attn") == ["", ""]


@pytest.mark.parametrize("mode", MODES)
def test_adapter_gradients_equal_those_of_one_process(workers: Pool, mode: str) -> None:
    assert workers.run(2, work.adapters, mode) == ["", ""]


@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_sharded_tokens_work_under_data_parallelism(workers: Pool, data: str) -> None:
    """Gradients are averaged over the ranks, so that a loss times their number gives those of the batch."""
    assert workers.run(2, special.with_data_parallelism, data) == ["", ""]


def test_ring_replays_dropout_in_the_backward_pass(workers: Pool) -> None:
    for slope, expected in workers.run(2, special.slope_under_dropout):
        assert slope == pytest.approx(expected, rel=2e-2)


def test_generation_uses_whole_rows(workers: Pool) -> None:
    for cut, whole in workers.run(2, special.generate_text):
        assert cut == whole


def test_output_has_the_index_of_its_tokens(workers: Pool) -> None:
    found = workers.run(3, special.token_indices)
    assert sorted(place for places, _, _ in found for place in places) == list(range(work.TOKENS))
    assert all(shape == (work.ROWS, len(places), zoo.VOCABULARY) for places, shape, _ in found)
    assert all(reason == found[0][2] and "largest over mean work" in reason for _, _, reason in found)


def test_meta_model_is_verified_when_weights_are_loaded(workers: Pool) -> None:
    assert workers.run(2, special.from_meta) == ["", ""]


def test_loss_is_divided_by_num_items_in_batch(workers: Pool) -> None:
    for found, expected in workers.run(2, special.with_given_count):
        assert found == pytest.approx(expected, rel=1e-5)
