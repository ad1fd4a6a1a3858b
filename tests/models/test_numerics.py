"""bf16 against fp32, here on the CPU: the same code that compares a GPU with the CPU, for some families."""

from __future__ import annotations

import pytest
import torch

from tests.models.numerics import FAMILIES, LONG, compare, figures, pack_batch, page
from tests.models.whole_models import FAMILIES as WHOLE
from tests.zoo import ENCODERS, LANGUAGE_MODELS


@pytest.mark.parametrize("family", ["qwen3 with clip", "mixtral with clip", "llama with whisper", "qwen3-vl"])
def test_bf16_is_near_fp32(family: str) -> None:
    found = figures(family, "cpu")
    assert [problem for one in found for problem in one.problems()] == []
    assert {one.gradients == 0 for one in found if one.way == "fp32"} == {True}
    assert all(one.gradients > 1e-3 for one in found if one.way != "fp32")  # it was computed in bf16
    assert f"| {family} |" in page(found, "cpu", 1.0)


def test_every_family_is_covered() -> None:
    assert len(FAMILIES) == len(LANGUAGE_MODELS) + len(ENCODERS) - 1 + len(WHOLE)  # Llama with CLIP is of two kinds


def test_long_rows_have_documents_and_are_longer_than_blocks_of_flex_attention() -> None:
    batch = pack_batch([5] * 6)
    assert batch["documents"].shape == (2, LONG) and LONG > 2 * 128
    assert batch["documents"].amax(1).tolist() == [3, 2]
    assert torch.equal(batch["documents"] > 0, batch["attention_mask"] > 0)


@pytest.mark.parametrize(("change", "seen"), [(1.0, 0), (1.2, 1), (-1.0, 2)])
def test_a_wrong_gradient_is_detected(change: float, seen: int) -> None:
    gradient = torch.randn(32, 32, dtype=torch.double)
    expected = 2.0, {"weight": gradient, "bias": torch.zeros(32, dtype=torch.double)}
    found = 2.0, {**expected[1], "weight": change * gradient}
    assert len(compare("llava", "short", "autocast", found, expected).problems()) == seen


def test_a_wrong_or_non_finite_loss_is_detected() -> None:
    gradients = {"weight": torch.ones(32, 32, dtype=torch.double)}
    for loss in (2.1, float("nan")):
        (problem,) = compare("llava", "short", "fp32", (loss, gradients), (2.0, gradients)).problems()
        assert "llava, short rows, fp32: loss" in problem
    with pytest.raises(AssertionError, match="only one side has gradients of"):
        compare("llava", "short", "fp32", (2.0, {}), (2.0, gradients))
