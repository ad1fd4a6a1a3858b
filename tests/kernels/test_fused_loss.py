"""Any causal language model computes the same loss and gradients when its head is fused with its loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from cornstarch.kernels.fused_loss import FusedCausalLMLoss, LazyLogits, fuse_head_with_loss, limit_trained_rows
from cornstarch.models.multimodal_language_model.import_hf.parts import build_causal_language_model
from tests import zoo


def build_batch(rows: int = 2, tokens: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, zoo.VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def compute_gradients(model: nn.Module, **options: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**build_batch(), **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sorted(zoo.LANGUAGE_MODELS))
def test_fused_loss_equals_the_models_own(name: str) -> None:
    model = zoo.LANGUAGE_MODELS[name].build()
    fused = copy.deepcopy(model)
    names = list(dict(fused.named_parameters()))
    why = fuse_head_with_loss(fused)
    if why is not None:
        assert type(fused.get_output_embeddings()) is not nn.Linear or "loss of its own" in why
        return
    assert list(dict(fused.named_parameters())) == names
    with limit_trained_rows(2 * 7):
        loss, found = compute_gradients(fused)
    right, expected = compute_gradients(model)
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)


def test_logits_are_computed_on_first_use() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build()
    expected = model(**build_batch()).logits
    fuse_head_with_loss(model)
    output = model(**build_batch())
    assert isinstance(output.logits, LazyLogits)
    torch.testing.assert_close(output.logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(torch.softmax(output.logits, -1), expected.softmax(-1))
    torch.testing.assert_close(output.logits[:, -1], expected[:, -1])
    assert output.logits.shape == expected.shape
    assert isinstance(
        model(input_ids=build_batch()["input_ids"]).logits, torch.Tensor
    )  # without labels there is no loss


def test_loss_is_divided_by_num_items_in_batch() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build()
    expected = model(**build_batch(), num_items_in_batch=31).loss
    fuse_head_with_loss(model)
    torch.testing.assert_close(model(**build_batch(), num_items_in_batch=31).loss, expected)
    assert isinstance(model.loss_function, FusedCausalLMLoss)
    assert fuse_head_with_loss(model) is None  # a second time changes nothing
    torch.testing.assert_close(model(**build_batch(), num_items_in_batch=31).loss, expected)


def test_model_without_a_head_is_explained() -> None:
    assert "has no head" in (fuse_head_with_loss(nn.Linear(2, 2)) or "")


def test_a_whole_model_that_was_taken_apart_is_fused() -> None:
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": zoo.VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    whole: Any = zoo.build(transformers.Qwen2_5_VLForConditionalGeneration, config)
    model = build_causal_language_model(whole, whole.model.language_model)
    expected, right = compute_gradients(model)
    assert fuse_head_with_loss(model) is None
    assert isinstance(model(**build_batch()).logits, LazyLogits)
    loss, found = compute_gradients(model)
    torch.testing.assert_close(loss, expected)
    assert right.keys() == found.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
