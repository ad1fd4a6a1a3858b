"""Encoders of items of any size attend to all items at once only where a twin computes the same."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from cornstarch.attention import item_attention
from cornstarch.attention.item_attention import ITEM_IMPLEMENTATION
from cornstarch.models.multimodal_language_model.item_encoders import (
    attend_within_items,
    explain_difference,
    find_item_encoders,
    is_item_attention,
)
from tests import zoo

FAMILIES = (
    ("qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
    ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    ("qwen3_vl", "Qwen3VLVisionModel"),
    ("qwen3_vl_moe", "Qwen3VLMoeVisionModel"),
    ("qwen3_5", "Qwen3_5VisionModel"),
    ("qwen2_5_omni", "Qwen2_5OmniVisionEncoder"),
    ("qwen2_5_omni", "Qwen2_5OmniAudioEncoder"),
    ("glm4v", "Glm4vVisionModel"),
    ("paddleocr_vl", "PaddleOCRVisionTransformer"),
    ("video_llama_3", "VideoLlama3VisionModel"),
    ("pixtral", "PixtralVisionModel"),
)


@pytest.mark.parametrize(("family", "name"), FAMILIES, ids=[name for _, name in FAMILIES])
def test_every_family_computes_the_same(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(module, name)
    with torch.device("meta"):
        encoder = kind(kind.config_class())
    assert find_item_encoders(encoder) == [encoder]
    assert explain_difference(encoder) is None
    # The same is refused if items see one another.
    attend = item_attention.attend_items
    monkeypatch.setattr(item_attention, "attend_items", lambda q, k, v, b, *rest: attend(q, k, v, b[[0, -1]], *rest))
    reason = explain_difference(encoder)
    assert reason is not None and "differs by" in reason


@pytest.mark.parametrize("name", ["clip", "siglip2", "internvl", "whisper"])
def test_encoders_with_a_row_for_each_item_keep_their_attention(name: str) -> None:
    encoder = zoo.ENCODERS[name].build()
    before = encoder.config._attn_implementation
    assert attend_within_items(encoder) == []
    assert encoder.config._attn_implementation == before


def test_refusal_is_logged_and_keeps_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, said = zoo.ENCODERS["qwen2_vl"].build(), list[str]()
    attend = item_attention.attend_items
    monkeypatch.setattr(item_attention, "attend_items", lambda *given: attend(*given) * 1.001)
    assert attend_within_items(encoder, said.append) == []
    assert encoder.config._attn_implementation == "sdpa"
    (line,) = said
    assert line.startswith("Qwen2VisionTransformerPretrainedModel attends item by item: ") and "expected" in line


def test_only_the_encoder_of_a_model_is_switched() -> None:
    encoder = zoo.ENCODERS["qwen2_5_vl"].build()
    language_model = zoo.LANGUAGE_MODELS["llama"].build()
    model = nn.ModuleDict({"encoder": encoder, "language_model": language_model})
    assert attend_within_items(model) == ["Qwen2_5_VisionTransformerPretrainedModel"]
    assert encoder.config._attn_implementation == ITEM_IMPLEMENTATION
    assert language_model.config._attn_implementation == "sdpa"
    assert is_item_attention(encoder.blocks[0].attn)
    assert attend_within_items(model) == []  # it already is
