"""A sample of the sweep over language models and encoders; `python -m tests.generality.tensor` judges them all."""

from __future__ import annotations

import pytest

from tests.generality.tensor import judge_tensor, largest_difference
from tests.models.sweep import REFUSED, SUPPORTED

SAMPLE = {
    "ApertusForCausalLM": SUPPORTED,  # a learned activation function
    "BertLMHeadModel": SUPPORTED,
    "BloomForCausalLM": SUPPORTED,  # slopes per head: attention stays whole
    "CodeGenForCausalLM": SUPPORTED,  # a fused projection in an order of its own: attention stays whole
    "DeepseekV3ForCausalLM": SUPPORTED,  # low-rank attention, experts
    "DiffLlamaForCausalLM": SUPPORTED,  # heads in pairs: attention stays whole
    "Gemma3nForCausalLM": SUPPORTED,  # channels chosen by what all of them are: feed-forward stays whole
    "GptOssForCausalLM": SUPPORTED,  # sinks, experts with biases
    "MiMoV2FlashForCausalLM": SUPPORTED,  # layers with other numbers of heads than the config says
    "JambaForCausalLM": SUPPORTED,  # layers with state stay whole
    "MLCDVisionModel": SUPPORTED,  # rotary embeddings that are learned
    "Exaone4_5_VisionModel": SUPPORTED,  # counts the width of its keys and values
    "GroupViTVisionModel": SUPPORTED,  # attention without heads
    "MambaForCausalLM": REFUSED,
    "XLNetLMHeadModel": REFUSED,
}
PARTLY = {"BloomForCausalLM", "CodeGenForCausalLM", "DiffLlamaForCausalLM", "Gemma3nForCausalLM", "GroupViTVisionModel"}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_models(name: str) -> None:
    verdict = judge_tensor(name)
    assert verdict.status == SAMPLE[name], verdict
    assert bool(verdict.whole) == (name in PARTLY), verdict


def test_the_judge_sees_differences() -> None:
    import torch

    one = {"loss": torch.tensor(1.0), "a": torch.ones(3), "b": None}
    assert largest_difference(dict(one), one) == ""
    assert "a differs by 0.001" in largest_difference({**one, "a": torch.tensor([1.0, 1.001, 1.0])}, one)
    assert "nan" in largest_difference({**one, "a": torch.tensor([1.0, float("nan"), 1.0])}, one)
    assert largest_difference({**one, "b": torch.ones(1)}, one) == "b has a gradient"
    assert largest_difference({**one, "a": None}, one) == "a has no gradient"
