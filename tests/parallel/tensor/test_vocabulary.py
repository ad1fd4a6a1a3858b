"""Embeddings, head and cross-entropy cut by words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.tensor import check_tensor_plan
from tests import zoo
from tests.parallel.tensor.work import (
    ROWS,
    all_labels,
    all_logits,
    alone,
    assert_same,
    build,
    cut,
    scored,
    sharded_vocabulary,
    speak,
)
from tests.parity.pool import Pool


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("words", [64, 13, 9, 3])
def test_vocabulary_cross_entropy_equals_the_full_one(workers: Pool, words: int, ranks: int) -> None:
    """Of 9 words over 4 ranks, 3 are on each of the first three; of 3 words, the last rank has none."""
    for mean in (True, False):
        logits = all_logits(words).requires_grad_()
        labels = all_labels(words)
        expected = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=zoo.IGNORED
        ).view_as(labels)
        (expected.mean() if mean else (expected * torch.arange(12).view(3, 4)).sum()).backward()
        results = workers.run(ranks, scored, words, mean)
        assert logits.grad is not None
        torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in results], -1), logits.grad)
        for losses, _, _ in results:
            torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3_moe"])
def test_vocabulary_parallel_gradients_equal_those_of_one_process(workers: Pool, name: str, tied: bool) -> None:
    for words in (zoo.VOCABULARY, zoo.VOCABULARY + 1):  # the second does not divide
        options = {"tie_word_embeddings": tied, "vocab_size": words}
        expected = alone(name, **options)
        for found in workers.run(2, cut, name, 2, options, {"vocabulary": True}):
            assert_same(found, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_evaluation_returns_all_logits(workers: Pool, name: str) -> None:
    model = build(name, vocab_size=zoo.VOCABULARY + 1).eval()
    with torch.no_grad():
        expected = model(**zoo.text_batch(ROWS))
    for rank, found in enumerate(workers.run(2, speak, name)):
        torch.testing.assert_close(found["logits"], expected.logits)
        assert found["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
        assert found["local"] == (33, 32)[rank]
        assert found["tied"] == model.config.tie_word_embeddings


def test_models_without_a_plain_head_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"CLIPVisionModel cannot be cut by words .*no table"):
        check_tensor_plan(zoo.ENCODERS["clip"].build(), 2, vocabulary=True)


@pytest.mark.parametrize("words", [67, 7, 5])
def test_words_that_do_not_divide_are_sharded_once_more(fresh: Pool, words: int) -> None:
    assert fresh.run(6, sharded_vocabulary, words, 3) == [True] * 6
