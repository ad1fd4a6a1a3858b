"""Wrappers of other libraries around the parts of a model are called, not bypassed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from cornstarch import MultimodalModel
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from tests.models.small import compose_model, ragged

PARTS = ("vision_encoder", "vision_encoder.module", "vision_encoder.projector", "language_model")
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "torch.compile": lambda part: torch.compile(part, backend="eager"),  # type: ignore[return-value]
}


def loss_and_gradients(model: MultimodalModel) -> tuple[Tensor, dict[str, Tensor | None]]:
    loss = model(**ragged()).loss
    loss.backward()
    return loss.detach(), {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): parameter.grad
        for name, parameter in model.named_parameters()
    }


def wrap(model: MultimodalModel, part: str, wrapper: Callable[[nn.Module], nn.Module]) -> list[Any]:
    """Put a wrapper around a part, and return a list that grows with each of its calls."""
    parent, _, name = part.rpartition(".")
    wrapped = wrapper(model.get_submodule(part))
    setattr(model.get_submodule(parent), name, wrapped)
    calls: list[Any] = []
    wrapped.register_forward_hook(lambda *arguments: calls.append(1))
    return calls


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_is_called(kind: str, part: str) -> None:
    expected_loss, expected = loss_and_gradients(compose_model())
    model = compose_model()
    inner = model.get_submodule(part)
    calls = wrap(model, part, WRAPPERS[kind])
    loss, found = loss_and_gradients(model)
    assert len(calls) == 1
    assert unwrap(model.get_submodule(part)) is inner
    torch.testing.assert_close(loss, expected_loss)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


def test_adapters_around_an_encoder_and_its_projector() -> None:
    model = compose_model()
    plain = model(**ragged()).logits
    adapters = LoraConfig(r=2, target_modules=["q_proj", "projection"], init_lora_weights=False)
    calls = wrap(model, "vision_encoder", lambda part: get_peft_model(part, adapters))  # type: ignore[arg-type]
    output = model(**ragged())
    output.loss.backward()
    assert len(calls) == 1 and not torch.equal(output.logits, plain)
    trained = {name for name, parameter in model.vision_encoder.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert all(parameter.grad is not None for parameter in model.vision_encoder.parameters() if parameter.requires_grad)
