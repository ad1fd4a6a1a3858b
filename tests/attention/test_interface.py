"""The mask and attention functions that transformers calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, Llama4TextConfig, MistralConfig
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from cornstarch.attention import IMPLEMENTATION, MaskPattern, MaskSpec, use_mask
from cornstarch.attention.interface import DENSE_IMPLEMENTATION
from cornstarch.errors import ConfigError, UnsupportedModelError
from tests.attention.brute_force import brute_force, expect, packed_rows

WINDOW, CHUNK = 5, 4
KINDS: dict[str, tuple[Callable[..., Any], MaskPattern]] = {
    "causal": (create_causal_mask, MaskPattern()),
    "sliding": (create_sliding_window_causal_mask, MaskPattern(window=WINDOW)),
    "chunked": (create_chunked_causal_mask, MaskPattern(chunk=CHUNK)),
    "bidirectional": (create_bidirectional_mask, MaskPattern(causal=False)),
}


def config(implementation: str = IMPLEMENTATION, **options: Any) -> Any:
    found = MistralConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, sliding_window=WINDOW)
    found.attention_chunk_size = CHUNK
    found._attn_implementation = implementation
    for name, value in options.items():
        setattr(found, name, value)
    return found


def make(kind: str, attention_mask: Tensor | None, implementation: str = IMPLEMENTATION, **options: Any) -> Any:
    """Ask transformers for a mask as a model's forward does."""
    queries = options.pop("queries", None)
    rows, tokens = options.pop("shape", None) or attention_mask.shape
    arguments = {"past_key_values": None, **options}
    embeds = torch.zeros(rows, tokens if queries is None else queries, 8)
    return KINDS[kind][0](config(implementation), embeds, attention_mask=attention_mask, **arguments)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(spec=packed_rows())
def test_a_layers_own_pattern_counts_within_documents(kind: str, spec: MaskSpec) -> None:
    attention_mask = (spec.documents > 0).long()
    with use_mask(spec):
        found = make(kind, attention_mask)
    if spec.is_plain:  # transformers' own path, which may omit the mask
        found = make(kind, attention_mask, "eager") if found is None else found
        found = torch.ones(1, 1, 1, 1, dtype=torch.bool) if found is None else found
        found = (found if found.dtype == torch.bool else found >= 0).expand(*attention_mask.shape[:1], 1, -1, -1)
        assert torch.equal(found.bool().expand_as(expect(spec, KINDS[kind][1])), expect(spec, KINDS[kind][1]))
        return
    assert torch.equal(found, expect(spec, KINDS[kind][1]))


def fill_cache(length: int) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, length, 8), torch.zeros(1, 1, length, 8), 0)
    return cache


@pytest.mark.parametrize("kind", ["causal", "sliding", "chunked"])
@settings(max_examples=30, deadline=None)
@given(spec=packed_rows(max_rows=2, max_tokens=12), new=st.integers(1, 4), data=st.data())
def test_decoding_adds_text_to_the_last_document(kind: str, spec: MaskSpec, new: int, data: st.DataObject) -> None:
    """With the other tokens in a cache, the mask is the end of the longer row's mask."""
    tokens = spec.documents.shape[1]
    queries = data.draw(st.integers(1, tokens + new - 1)) if tokens + new > 1 else 1
    longer = spec.extend(tokens + new)
    if spec.is_plain:
        return
    attention_mask = torch.nn.functional.pad((spec.documents > 0).long(), (0, new), value=1)
    with use_mask(spec):
        found = make(kind, attention_mask, past_key_values=fill_cache(tokens + new - queries), queries=queries)
        without_cache = make(kind, attention_mask)
    whole = expect(longer, KINDS[kind][1])
    assert torch.equal(found, whole[:, :, -queries:])
    assert torch.equal(without_cache, whole)


@pytest.mark.parametrize("implementation", [IMPLEMENTATION, DENSE_IMPLEMENTATION])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [None, [[1] * 9], [[0, 0, 1, 1, 1, 1, 1, 1, 1]], [[1] * 7 + [0] * 2]], ids=str)
def test_without_a_spec_the_mask_is_that_of_sdpa(kind: str, rows: list[list[int]] | None, implementation: str) -> None:
    attention_mask = None if rows is None else torch.tensor(rows)
    options = {} if rows else {"shape": (1, 9)}
    sdpa = make(kind, attention_mask, "sdpa", **options)
    with use_mask(None):
        found = make(kind, attention_mask, implementation, **options)
    assert (found is None and sdpa is None) or torch.equal(found, sdpa)


def test_use_mask_ends_with_its_block() -> None:
    outer, inner = (MaskSpec.from_documents(torch.tensor([row])) for row in ([1, 2, 2], [1, 1, 2]))
    ones = torch.ones(1, 3, dtype=torch.long)
    with use_mask(outer):
        with pytest.raises(RuntimeError, match="stop"), use_mask(inner):
            assert torch.equal(make("causal", ones), inner.dense())
            raise RuntimeError("stop")
        assert torch.equal(make("causal", ones), outer.dense())
        with use_mask(None):
            assert make("causal", ones) is None
    assert make("causal", ones) is None


SPEC = MaskSpec.from_documents(torch.tensor([[1, 1, 2, 2, 2], [0, 1, 1, 1, 1]]))


def test_generation_repeats_each_row_for_its_beams() -> None:
    mask = torch.ones(6, 5, dtype=torch.long)
    with use_mask(SPEC), torch.no_grad():
        assert torch.equal(make("causal", mask), SPEC.dense().repeat_interleave(3, dim=0))
        with pytest.raises(ConfigError, match="2 rows, the model was given 5"):
            make("causal", mask[:5])
    with use_mask(SPEC), pytest.raises(ConfigError, match="2 rows, the model was given 6"):
        make("causal", mask)


def test_missing_attention_mask_with_restarting_positions_is_refused() -> None:
    """transformers would guess the documents and apply its guess by row index."""
    with use_mask(SPEC):
        assert torch.equal(make("causal", None, shape=(2, 5)), SPEC.dense())
        with pytest.raises(ConfigError, match="attention_mask"):
            make("causal", None, shape=(2, 5), position_ids=SPEC.positions())


def test_a_models_own_mask_function_is_refused() -> None:
    with use_mask(SPEC), pytest.raises(UnsupportedModelError, match="mask function of its own"):
        make("causal", torch.ones(2, 5, dtype=torch.long), or_mask_function=lambda b, h, q, k: q == k)


def test_scaling_by_row_index_is_refused_where_it_starts() -> None:
    tuned = Llama4TextConfig(attn_temperature_tuning=True, floor_scale=5, attention_chunk_size=4)
    tuned._attn_implementation = IMPLEMENTATION
    for tokens, refused in ((4, False), (5, True)):
        spec = MaskSpec(SPEC.documents[:, -tokens:], SPEC.spans[:, -tokens:])
        ones = torch.ones(2, tokens, dtype=torch.long)
        with use_mask(spec):
            if refused:
                with pytest.raises(UnsupportedModelError, match="shorter than 5 tokens"):
                    create_causal_mask(tuned, torch.zeros(2, tokens, 8), ones, None)
            else:
                create_causal_mask(tuned, torch.zeros(2, tokens, 8), ones, None)
    create_causal_mask(
        tuned, torch.zeros(2, 9, 8), torch.ones(2, 9, dtype=torch.long), None
    )  # without a spec nothing is refused


# ------------------------------------------------------------------------------------------- attention


class Layer(nn.Module):
    """The attributes of a layer that transformers' attention functions read."""

    is_causal = True
    num_key_value_groups = 2


def states(tokens: int = 9, keys: int | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(2, 4, tokens, 8), (2, 2, keys or tokens, 8), (2, 2, keys or tokens, 8)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def attend_by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend head by head and query by query, in double precision."""
    rows, heads, queries, _ = query.shape
    output = torch.zeros(query.shape, dtype=torch.double)
    for row in range(rows):
        for head in range(heads):
            keys, values = key[row, head // 2].double(), value[row, head // 2].double()
            for place in range(queries):
                scores = keys @ query[row, head, place].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if mask is not None:
                    scores = scores.masked_fill(~mask[row, 0, place], -torch.inf)
                sink = torch.zeros(()) if sinks is None else sinks[head].double().exp()
                weights = scores.exp() / (scores.exp().sum() + sink)
                output[row, head, place] = weights @ values
    return output.transpose(1, 2)


attend = AttentionInterface()[IMPLEMENTATION]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "additive"])
def test_attention_respects_scaling_softcap_and_sinks(softcap: float | None, with_sinks: bool, mask_kind: str) -> None:
    query, key, value = states()
    sinks = torch.randn(4) if with_sinks else None
    causal = brute_force([[1] * 9] * 2, [[-1] * 9] * 2)[:, None]
    packed = brute_force([[1] * 4 + [2] * 5, [0] * 2 + [3] * 7], [[-1] * 9] * 2)[:, None]
    given = {
        "none": None,
        "bool": packed,
        "additive": torch.zeros(packed.shape).masked_fill(~packed, torch.finfo(torch.float32).min),
    }[mask_kind]
    options: dict[str, Any] = {"softcap": softcap, "s_aux": sinks}
    found, _ = attend(Layer(), query, key, value, given, scaling=0.7, **options)
    reference = attend_by_hand(query, key, value, causal if given is None else packed, 0.7, softcap, sinks)
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
    # and the gradients
    weight = torch.randn(found.shape)
    gradients = [torch.autograd.grad((o * weight).sum(), [query, key, value]) for o in (found, reference)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(1, 6), (4, 6)])
def test_omitted_masks_mean_the_same_with_softcap(queries: int, keys: int) -> None:
    """One query sees all keys; several from the row's start see no empty slot of a static cache."""
    query, key, value = states(queries, keys)
    found, _ = attend(Layer(), query, key, value, None, scaling=0.5, softcap=1e6)
    sdpa, _ = AttentionInterface()["sdpa"](Layer(), query, key, value, None, scaling=0.5)
    torch.testing.assert_close(found, sdpa)


def test_an_unmasked_layer_that_is_not_causal_sees_everything() -> None:
    query, key, value = states()
    found, _ = attend(Layer(), query, key, value, None, scaling=0.5, softcap=3.0, is_causal=False)
    torch.testing.assert_close(
        found.double(), attend_by_hand(query, key, value, None, 0.5, 3.0, None), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("with_mask", [False, True])
def test_plain_attention_is_bit_equal_to_sdpa(with_mask: bool) -> None:
    mask = brute_force([[1] * 4 + [2] * 5] * 2, [[-1] * 9] * 2)[:, None] if with_mask else None
    inputs = states()
    found, _ = attend(Layer(), *inputs, mask, scaling=0.5)
    sdpa, _ = AttentionInterface()["sdpa"](Layer(), *inputs, mask, scaling=0.5)
    assert torch.equal(found, sdpa)


def test_block_mask_becomes_dense_where_flex_attention_does_not_support_the_layer() -> None:
    """Its kernel needs heads of 16 channels, and it has no dropout."""
    spec = MaskSpec.from_documents(torch.tensor([[1] * 4 + [2] * 5, [0] * 2 + [3] * 7]))
    inputs = states()
    found, _ = attend(Layer(), *inputs, spec.block_mask(), scaling=0.5)
    dense, _ = attend(Layer(), *inputs, spec.dense(), scaling=0.5)
    assert torch.equal(found, dense)
    torch.manual_seed(0)
    found, _ = attend(Layer(), *inputs, spec.block_mask(), scaling=0.5, dropout=0.3)
    torch.manual_seed(0)
    dropped, _ = attend(Layer(), *inputs, spec.dense(), scaling=0.5, dropout=0.3)
    assert torch.equal(found, dropped) and not torch.equal(dropped, dense)


def test_block_mask_runs_on_flex_attention_with_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled kernel, which takes a minute to build on a CPU; test_flex_gpu.py runs it."""

    def uncompiled(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: BlockMask,
        *,
        scaling: float,
        softcap: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        def cap(score: Tensor, *place: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        output = flex_attention(query, key, value, cap, block_mask=mask, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", uncompiled)
    spec = MaskSpec.from_documents(torch.tensor([[1] * 4 + [2] * 5, [0] * 2 + [3] * 7]))
    inputs = [torch.cat([state, state], dim=-1).detach() for state in states()]  # 16 channels
    found, _ = attend(Layer(), *inputs, spec.block_mask(), scaling=0.5, softcap=2.0)
    dense, _ = attend(Layer(), *inputs, spec.dense(), scaling=0.5, softcap=2.0)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "head_mask"])
def test_scores_changed_in_an_unknown_way_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        attend(Layer(), *states(), None, **{name: torch.zeros(1)})


def test_both_names_are_registered() -> None:
    for name in (IMPLEMENTATION, DENSE_IMPLEMENTATION):
        assert name in AttentionInterface() and name in AttentionMaskInterface()
