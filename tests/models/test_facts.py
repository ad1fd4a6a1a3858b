"""Facts about a batch change neither results nor refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch import ModalEncoderModule, MultimodalModel
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import BatchFacts, split_items
from cornstarch.models.multimodal_language_model.packing import pack
from tests.models import small


def model_of(attention: str) -> MultimodalModel:
    encoders = {
        "vision": ModalEncoderModule(small.clip(), attention=attention),  # type: ignore[arg-type]
        "audio": ModalEncoderModule(small.whisper()),
    }
    model = MultimodalModel(encoders, small.llama())
    model.set_modality_token_ids({"vision": small.VISION, "audio": small.AUDIO})
    return model


def packed() -> dict[str, Any]:
    batch = small.ragged()
    items = {"pixel_values": [[0, 1], [], [], [2]], "input_features": [[0], [1], [], []]}
    samples = []
    for row in range(4):
        sample = {key: batch[key][row] for key in ("input_ids", "attention_mask", "labels")}
        sample |= {key: batch[key][own[row]] for key, own in items.items() if own[row]}
        samples.append(sample)
    return pack(samples, 60)


def whole() -> dict[str, Any]:
    """Rows without padding."""
    batch = small.ragged()
    keep = slice(0, int(batch["attention_mask"][0].sum()))
    rows = {key: batch[key][:1, keep] for key in ("input_ids", "attention_mask", "labels")}
    return {**rows, "pixel_values": batch["pixel_values"][:2], "input_features": batch["input_features"][:1]}


BATCHES = {"right": small.ragged, "left": lambda: small.ragged(left=True), "packed": packed, "whole": whole}


def gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("attention", ["causal", "item", "modality"])
def test_facts_do_not_change_results(kind: str, attention: str) -> None:
    model, batch = model_of(attention), BATCHES[kind]()
    loss, wanted = gradients(model, batch)
    facts = BatchFacts.of(batch, model.modality_token_ids)
    found_loss, found = gradients(model, {**batch, "facts": facts})
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_facts_equal_values_computed_by_hand() -> None:
    batch = {
        "input_ids": torch.tensor([[7, 64, 64, 0], [64, 8, 65, 65]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "labels": torch.tensor([[7, 7, -100, -100], [7, 8, 8, -100]]),
        "pixel_values": torch.zeros(2, 3),
        "audio": {"attention_mask": torch.ones(1, 9, dtype=torch.long), "input_features": torch.zeros(1, 2, 9)},
    }
    facts = BatchFacts.of(batch, {"vision": 64, "audio": 65})
    assert (facts.shape, facts.padding, facts.starts_with_padding, facts.packed) == ((2, 4), "right", False, False)
    assert facts.tokens == {"vision": [2, 1], "audio": [0, 2]}
    assert facts.trained_tokens == 3
    assert {name: places.tolist() for name, places in facts.places.items()} == {"vision": [1, 2, 4], "audio": [6, 7]}
    assert facts.host_inputs("vision").keys() == {"audio"}
    assert facts.host_inputs("audio").keys() == {"attention_mask"}
    with pytest.raises(TypeError, match="unhashable"):
        hash(facts)


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        ([[1, 1], [1, 1]], "none"), ([[1, 0], [1, 1]], "right"), ([[0, 1], [1, 1]], "other"),
        ([[1, 0, 1]], "other"), ([[0, 0], [1, 1]], "other"),
    ],
)  # fmt: skip
def test_padding_is_classified(mask: list[list[int]], padding: str) -> None:
    ids = torch.ones(len(mask), len(mask[0]), dtype=torch.long)
    assert BatchFacts.of({"input_ids": ids, "attention_mask": torch.tensor(mask)}, {}).padding == padding


def test_facts_of_another_batch_are_not_used() -> None:
    """A batch that was cut in two still has those of the whole one."""
    model, batch = model_of("item"), small.ragged()
    facts = BatchFacts.of(batch, model.modality_token_ids)
    half: dict[str, Any] = {key: batch[key][:1] for key in ("input_ids", "attention_mask", "labels")}
    half |= {"pixel_values": batch["pixel_values"][:2], "input_features": batch["input_features"][:1]}
    assert torch.equal(model(**half, facts=facts).loss, model(**half).loss)


def test_a_wrong_token_count_is_refused_with_facts() -> None:
    model, batch = model_of("causal"), small.ragged()
    facts = BatchFacts.of(batch, model.modality_token_ids)
    batch["pixel_values"] = batch["pixel_values"][:2]
    with pytest.raises(ConfigError, match="Sample 3 has 5 vision tokens"):
        model(**batch, facts=facts)


def test_without_a_mask_padding_is_only_left_behind_in_causal_models() -> None:
    """What a model was not tried for keeps its mask."""
    model, batch = model_of("causal"), small.ragged()
    facts = BatchFacts.of(batch, model.modality_token_ids)
    given: list[Any] = []
    model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    model(**batch, facts=facts)
    model.traits = type(model.traits)(is_causal=False)
    model(**batch, facts=facts)
    assert given[0] is None and given[1] is not None


def test_masks_on_the_cpu_split_items_as_those_beside_them() -> None:
    states = torch.arange(24.0).reshape(2, 4, 3).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    found = split_items(nn.Module(), {"pixel_attention_mask": mask}, states)
    assert found.lengths == [2, 3]
    torch.testing.assert_close(found.tokens, states[mask.bool()])
    found.tokens.sum().backward()
    assert torch.equal(states.grad, mask[..., None].expand(2, 4, 3).float())  # type: ignore[arg-type]
