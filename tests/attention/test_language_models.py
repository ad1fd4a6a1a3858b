"""Tiny language models of every kind under a `MaskSpec`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.masking_utils import create_chunked_causal_mask

from cornstarch.attention import IMPLEMENTATION, MaskSpec, attend_through_masks, use_mask
from tests import zoo
from tests.attention.brute_force import brute_force

KINDS = list(zoo.LANGUAGE_MODELS)
# Longer and shorter than the zoo's windows and chunks of 8 tokens; padding on both sides.
LENGTHS = [[13, 9, 3], [20]]
PADDING = [(2, 1), (0, 8)]
TOKENS = 28


def language_model(name: str, checkpointing: bool = False) -> PreTrainedModel:
    model = zoo.LANGUAGE_MODELS[name].build()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def documents() -> Tensor:
    rows = []
    for lengths, (left, right) in zip(LENGTHS, PADDING, strict=True):
        numbered = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
        rows.append([0] * left + numbered + [0] * right)
    return torch.tensor(rows)


def tokens() -> Tensor:
    return torch.randint(3, zoo.VOCABULARY, (len(LENGTHS), TOKENS), generator=zoo.generator(7))


def gradients(model: PreTrainedModel) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_gradients(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Compare every gradient, also whether there is one."""
    assert {name for name, grad in found.items() if grad is None} == {n for n, grad in expected.items() if grad is None}
    for name, grad in found.items():
        if grad is not None:
            largest = float(expected[name].abs().max())
            error = float((grad - expected[name]).abs().max())
            assert error <= 1e-5 * max(largest, 1.0), f"{name}: off by {error:.1e}, its largest entry is {largest:.1e}"


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the sum of a document's next-token losses."""
    return cross_entropy(logits[:-1].float(), ids[1:], reduction="sum")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", KINDS)
def test_a_packed_document_equals_the_document_alone(name: str, checkpointing: bool) -> None:
    ids, spec = tokens(), MaskSpec.from_documents(documents())
    model = language_model(name)
    model.set_attn_implementation("eager")
    alone, total = {}, torch.zeros(())
    for row in range(len(ids)):
        for number in range(1, len(LENGTHS[row]) + 1):
            own = ids[row, spec.documents[row] == number]
            alone[row, number] = model(input_ids=own[None]).logits[0]
            total = total + loss_of(alone[row, number], own)
    total.backward()
    expected = gradients(model)

    model = language_model(name, checkpointing)
    attend_through_masks(model)
    mask = (spec.documents > 0).long()
    with use_mask(spec):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=spec.positions()).logits
    packed = torch.zeros(())
    for (row, number), reference in alone.items():
        place = spec.documents[row] == number
        torch.testing.assert_close(logits[row, place], reference, rtol=1e-4, atol=1e-4)
        packed = packed + loss_of(logits[row, place], ids[row, place])
    packed.backward()  # outside use_mask: checkpointed layers are replayed here
    assert_equal_gradients(gradients(model), expected)


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def masks_by_hand(model: PreTrainedModel, spec: MaskSpec) -> Tensor | dict[str, Tensor]:
    """Return 4-D masks for eager attention: one for all layers, or one per kind of layers."""
    rows = (spec.documents.tolist(), spec.spans.tolist())
    config = model.config
    kinds = {
        "full_attention": lambda: brute_force(*rows),
        "sliding_attention": lambda: brute_force(*rows, window=config.sliding_window),
        "chunked_attention": lambda: brute_force(*rows, chunk=config.attention_chunk_size),
    }
    layer_types = set(getattr(config, "layer_types", None) or [])
    if layer_types - {"full_attention"} or len(layer_types) > 1:
        return {kind: additive(kinds[kind]()[:, None]) for kind in layer_types}
    sliding = getattr(config, "sliding_window", None) is not None
    return additive(kinds["sliding_attention" if sliding else "full_attention"]()[:, None])


def spans() -> Tensor:
    """Build a span in the first document, two adjacent ones in the second, and one number in two documents."""
    marks = torch.full((len(LENGTHS), TOKENS), -1)
    marks[0, 4:15] = 0
    marks[0, 16:19] = 1
    marks[0, 19:24] = 2
    marks[1, 0:3] = 5
    marks[1, 10:19] = 5
    return marks


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", KINDS)
def test_spans_equal_masks_made_by_hand_for_eager_attention(name: str, checkpointing: bool) -> None:
    ids, spec = tokens(), MaskSpec(documents(), spans())
    kept = spec.documents > 0
    weight = torch.randn(int(kept.sum()), zoo.VOCABULARY, generator=zoo.generator(1))
    model = language_model(name)
    model.set_attn_implementation("eager")
    by_hand = masks_by_hand(model, spec)
    reference = model(input_ids=ids, attention_mask=by_hand, position_ids=spec.positions()).logits[kept]
    (reference * weight).sum().backward()
    expected = gradients(model)

    model = language_model(name, checkpointing)
    attend_through_masks(model)
    with use_mask(spec):
        logits = model(input_ids=ids, attention_mask=kept.long(), position_ids=spec.positions()).logits[kept]
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4)
    (logits * weight).sum().backward()
    assert_equal_gradients(gradients(model), expected)


@pytest.mark.parametrize("name", KINDS)
def test_spans_are_longer_than_windows_and_chunks(name: str) -> None:
    """Otherwise windows and chunks would not be tested."""
    config = language_model(name).config
    sizes = [getattr(config, size, None) for size in ("sliding_window", "attention_chunk_size")]
    assert all(size is None or size <= 8 for size in sizes)
    if name == "gemma2":
        assert config.attn_logit_softcapping


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", KINDS)
def test_without_a_spec_nothing_changes(name: str, padding: str) -> None:
    """Bit-equal to "sdpa"; for a model with soft-capped scores, which "sdpa" cannot do, to "eager"."""
    model = language_model(name).eval()
    ids = tokens()
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[0, :3] = 0
        mask = mask if padding == "left" else mask.flip(-1)
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    with torch.no_grad():
        model.set_attn_implementation("eager" if capped else "sdpa")
        reference = model(input_ids=ids, attention_mask=mask).logits
        attend_through_masks(model)
        found = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(found[mask.bool()], reference[mask.bool()])


# ------------------------------------------------------------------------------------------ generation

NEW = 12
STATIC_CHUNKS = "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters  # from 5.18
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "none": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", KINDS)
def test_generation_continues_a_padded_prompt(name: str, cache: str) -> None:
    """Rows of two lengths with a span each continue as they do alone under a mask made by hand."""
    if cache == "static" and name == "llama4" and not STATIC_CHUNKS:
        pytest.skip("this transformers raises TypeError for chunked layers with a static cache")
    model = language_model(name).eval()
    attend_through_masks(model)
    lengths, width = [13, 10], 13
    ids = torch.randint(3, zoo.VOCABULARY, (2, width), generator=zoo.generator(2))
    numbers = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    marks = torch.full_like(ids, -1)
    marks[:, 5:9] = 0
    spec = MaskSpec(numbers, marks)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    with use_mask(spec):
        found = model.generate(input_ids=ids, attention_mask=numbers, **options, **CACHES[cache])
    assert found.shape == (2, width + NEW)
    for row, length in enumerate(lengths):
        prompt = found[row : row + 1, width - length :]
        by_hand = spec.extend(width + NEW)
        alone = MaskSpec(
            by_hand.documents[row : row + 1, width - length :], by_hand.spans[row : row + 1, width - length :]
        )
        model.set_attn_implementation("eager")
        with torch.no_grad():
            logits = model(
                input_ids=prompt, attention_mask=masks_by_hand(model, alone), position_ids=alone.positions()
            ).logits
        model.set_attn_implementation(IMPLEMENTATION)
        assert torch.equal(logits[0, length - 1 : -1].argmax(-1), prompt[0, length:])


def test_beams_and_samples_share_their_prompts_mask() -> None:
    model = language_model("mistral").eval()
    attend_through_masks(model)
    ids = torch.randint(3, zoo.VOCABULARY, (2, 10), generator=zoo.generator(2))
    spec = MaskSpec(torch.tensor([[0] * 3 + [1] * 7, [1] * 10]), torch.tensor([[-1] * 4 + [0] * 3 + [-1] * 3] * 2))
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "num_beams": 3}
    with use_mask(spec):
        both = model.generate(ids, attention_mask=spec.documents, num_return_sequences=2, **options)
    for row in range(2):
        keep = spec.documents[row] > 0
        alone = MaskSpec(spec.documents[row : row + 1, keep], spec.spans[row : row + 1, keep])
        with use_mask(alone):
            one = model.generate(
                ids[row : row + 1, keep], attention_mask=alone.documents, num_return_sequences=2, **options
            )
        assert torch.equal(both[2 * row : 2 * row + 2, 10:], one[:, int(keep.sum()) :])
