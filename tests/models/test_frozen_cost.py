"""A frozen part costs no backward, no saved activations and no optimizer state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from cornstarch import MultimodalModel
from tests.models.small import compose_model, ragged


def flops(work: object) -> int:
    with FlopCounterMode(display=False) as counter:
        work()  # type: ignore[operator]
    return counter.get_total_flops()


def bytes_saved_by(part: nn.Module, model: MultimodalModel) -> int:
    """Bytes that a part's forward keeps for the backward pass, parameters not counted."""
    saved: dict[int, int] = {}
    inside = [False]
    parameters = {p.data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if inside[0] and tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def enter(*_: object) -> None:
        inside[0] = True

    def leave(*_: object) -> None:
        inside[0] = False

    hooks = [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**ragged()).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    return sum(saved.values())


def test_frozen_encoder_saves_nothing() -> None:
    model = compose_model()
    assert bytes_saved_by(model.vision_encoder.module, model) > 0
    model.train(encoders_mode={"vision": (False, True)}, llm_mode=True)
    assert bytes_saved_by(model.vision_encoder.module, model) == 0
    assert bytes_saved_by(model.vision_encoder.projector, model) > 0


def test_frozen_language_model_saves_less_than_a_trained_one() -> None:
    model = compose_model()
    trained = bytes_saved_by(model.language_model, model)
    model.train(encoders_mode={"vision": (False, True), "audio": (False, True)}, llm_mode=False)
    assert bytes_saved_by(model.language_model, model) < 0.8 * trained


def test_frozen_encoder_costs_its_forward_only() -> None:
    """FLOPs of a whole step = encoder forward + a step of the rest on the encoder's finished output."""
    model = compose_model()
    model.train(encoders_mode={"vision": (False, True), "audio": (True, True)}, llm_mode=True)
    batch = ragged()
    whole = flops(lambda: model(**batch).loss.backward())
    encoder = model.vision_encoder.module
    forward = flops(lambda: encoder(pixel_values=batch["pixel_values"]))
    with torch.no_grad():
        finished = encoder(pixel_values=batch["pixel_values"])
    model.vision_encoder.module = Finished(finished, encoder)
    assert whole == forward + flops(lambda: model(**batch).loss.backward())


class Finished(nn.Module):
    """Hands out what an encoder has computed before."""

    def __init__(self, output: object, encoder: nn.Module) -> None:
        super().__init__()
        self.output, self.config = output, encoder.config

    def forward(self, pixel_values: Tensor) -> object:
        return self.output


def test_everything_frozen_has_no_graph_and_part_by_part_costs_grow() -> None:
    model = compose_model()
    batch = ragged()
    model.train(llm_mode=False)
    assert not model(**batch).loss.requires_grad
    nothing = flops(lambda: model(**batch))
    model.train(encoders_mode={"vision": (False, True), "audio": (False, True)}, llm_mode=False)
    projectors = flops(lambda: model(**batch).loss.backward())
    model.train(encoders_mode={"vision": (False, True), "audio": (False, True)}, llm_mode=True)
    language_model = flops(lambda: model(**batch).loss.backward())
    model.train(llm_mode=True)
    everything = flops(lambda: model(**batch).loss.backward())
    assert nothing < projectors < language_model < everything


def test_no_optimizer_state_for_frozen_parts() -> None:
    model = compose_model()
    model.train(encoders_mode={"vision": (False, True), "audio": (False, False)}, llm_mode=False)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: p.clone() for name, p in model.named_parameters()}
    model(**ragged()).loss.backward()
    optimizer.step()
    names = {id(p): name for name, p in model.named_parameters()}
    stateful = {names[id(p)] for p in optimizer.state}
    projector = {f"vision_encoder.projector.projection.{part}" for part in ("weight", "bias")}
    assert stateful == projector
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == projector


@pytest.mark.parametrize("llm_mode", [False, True])
def test_freezing_changes_no_gradient_of_what_is_trained(llm_mode: bool) -> None:
    full, partly = compose_model(), compose_model()
    partly.train(encoders_mode={"vision": (False, True), "audio": (False, True)}, llm_mode=llm_mode)
    for model in (full, partly):
        model(**ragged()).loss.backward()
    assert any(p.grad is not None for p in partly.parameters())
    for (name, p), q in zip(full.named_parameters(), partly.parameters(), strict=True):
        if q.requires_grad:
            assert torch.equal(p.grad, q.grad), name
        else:
            assert q.grad is None, name
