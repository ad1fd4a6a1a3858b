"""Any causal language model computes the same loss and gradients when its head is fused with its loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cornstarch.compute.head import HeadLoss, LazyLogits, fuse_head_with_loss, trained_rows_at_most
from tests import zoo


def batch(rows: int = 2, tokens: int = 12) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, zoo.VOCABULARY, (rows, tokens), generator=made)
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def gradients(model: nn.Module, **options: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch(), **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sorted(zoo.LANGUAGE_MODELS))
def test_every_language_model(name: str) -> None:
    model = zoo.LANGUAGE_MODELS[name].build()
    fused = copy.deepcopy(model)
    names = list(dict(fused.named_parameters()))
    why = fuse_head_with_loss(fused)
    if why is not None:
        assert type(fused.get_output_embeddings()) is not nn.Linear or "loss of its own" in why
        return
    assert list(dict(fused.named_parameters())) == names
    with trained_rows_at_most(2 * 7):
        loss, found = gradients(fused)
    right, expected = gradients(model)
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)


def test_logits_are_there_for_whoever_looks() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build()
    expected = model(**batch()).logits
    fuse_head_with_loss(model)
    output = model(**batch())
    assert isinstance(output.logits, LazyLogits)
    torch.testing.assert_close(output.logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(torch.softmax(output.logits, -1), expected.softmax(-1))
    torch.testing.assert_close(output.logits[:, -1], expected[:, -1])
    assert output.logits.shape == expected.shape
    assert isinstance(model(input_ids=batch()["input_ids"]).logits, torch.Tensor)  # nobody asked for a loss


def test_sum_divided_by_a_number_that_is_given() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build()
    expected = model(**batch(), num_items_in_batch=31).loss
    fuse_head_with_loss(model)
    torch.testing.assert_close(model(**batch(), num_items_in_batch=31).loss, expected)
    assert isinstance(model.loss_function, HeadLoss)
    assert fuse_head_with_loss(model) is None  # a second time changes nothing
    torch.testing.assert_close(model(**batch(), num_items_in_batch=31).loss, expected)


def test_a_model_without_such_a_head_says_so() -> None:
    assert "has no head" in (fuse_head_with_loss(nn.Linear(2, 2)) or "")
