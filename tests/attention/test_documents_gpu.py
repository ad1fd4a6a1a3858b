"""FlashAttention-4 and cuDNN under masks of documents and spans, against a dense mask. Needs a CUDA device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cornstarch.attention import MaskSpec, use_mask
from cornstarch.attention.backends import DocumentBackend, run_attention, use_attention
from cornstarch.attention.cudnn_attention import CudnnBackend
from cornstarch.attention.flash_attention import (
    FlashDocumentBackend,
    FlashRangeBackend,
    attend_range,
    has_flash,
    has_flash_on,
)
from cornstarch.attention.interface import build_mask
from cornstarch.compat.compiler import compile_variants
from tests.attention.packed_masks import attend_densely
from tests.attention.test_flex_gpu import Layer, assert_close, packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKENDS = [
    pytest.param(one, id=one.name, marks=pytest.mark.skipif(not one.is_installed(), reason=f"needs {one.package}"))
    for one in (FlashDocumentBackend(), CudnnBackend(), FlashRangeBackend())
]


def whole(tokens: int, spans: bool) -> MaskSpec:
    """Build two rows of one document with images, one of them with trailing padding."""
    documents, marks = torch.ones(2, tokens, dtype=torch.long), torch.full((2, tokens), -1)
    documents[1, tokens - 9 :] = 0
    if spans:
        marks[0, 3 : tokens // 3] = 0
        marks[1, tokens // 3 : tokens // 2] = 1
    return MaskSpec(documents, marks).to("cuda")


def one_row(tokens: int, spans: bool) -> MaskSpec:
    both = whole(tokens, spans)
    return MaskSpec(both.documents[:1], both.spans[:1])


def assert_gradients(inputs: list[Tensor], exact: list[Tensor]) -> None:
    for one, ideal, which in zip(inputs, exact, ("query", "key", "value"), strict=True):
        assert one.grad is not None and ideal.grad is not None
        assert_close(one.grad, ideal.grad, 2e-2, f"gradient of the {which}")


def assert_equals_dense_mask(spec: MaskSpec, backend: DocumentBackend, heads: tuple[int, int], width: int) -> None:
    real = spec.documents > 0
    torch.manual_seed(0)
    rows, tokens = real.shape
    shapes = [(rows, count, tokens, width) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    weight = torch.randn(rows, tokens, heads[0], width, device="cuda") * real[..., None, None]
    reference, exact = attend_densely(spec, inputs, weight)

    found = backend.attend(*inputs, backend.build_mask(spec), 0.3)
    (found * weight).sum().backward()
    assert_close(found[real], reference[real], 2e-2, "output")
    assert_gradients(inputs, exact)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [packed, whole, one_row])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2)])
@pytest.mark.parametrize(("tokens", "width"), [(256, 64), (1000, 128)])
@pytest.mark.parametrize("spans", [True, False])
def test_kernels_equal_dense_mask(
    backend: DocumentBackend, make: Any, heads: tuple[int, int], tokens: int, width: int, spans: bool
) -> None:
    assert_equals_dense_mask(make(tokens, spans), backend, heads, width)


def scattered(tokens: int, spans: bool) -> MaskSpec:
    """Build two rows of many documents of all lengths, with images of all lengths in every other one."""
    documents, marks = torch.zeros(2, tokens, dtype=torch.long), torch.full((2, tokens), -1)
    lengths = [1, 300, 2, 127, 64, 128, 700, 3, 129, 16, 255, 63, 256, 17, 65, 15]
    for row in range(2):
        begin = number = 0
        while begin < tokens - 40:  # followed by padding
            length = min(lengths[(number * (2 * row + 1)) % len(lengths)], tokens - 40 - begin)
            number += 1
            documents[row, begin : begin + length] = number
            if spans and number % 2:
                marks[row, begin + length // 5 : begin + max(1, length // 2)] = 0
                marks[row, begin + length // 2 : begin + length - length // 7] = 1
            begin += length
    return MaskSpec(documents, marks).to("cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "width"),
    [((4, 2), 32), ((2, 2), 64), ((4, 1), 64), ((4, 2), 96), ((2, 2), 128), ((4, 2), 128), ((6, 2), 128)],
)
@pytest.mark.parametrize("spans", [True, False])
def test_many_documents_equal_dense_mask(
    backend: DocumentBackend, heads: tuple[int, int], width: int, spans: bool
) -> None:
    assert_equals_dense_mask(scattered(3000, spans), backend, heads, width)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_compiled_layer_equals_eager_layer(backend: DocumentBackend) -> None:
    spec = packed(512)

    def layer(states: Any, mask: Any) -> Any:
        return backend.attend(states * 2, states, states + 1, mask, 0.1).sin()

    results = []
    for function in (layer, compile_variants(layer)):
        torch.manual_seed(0)
        states = torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        found = function(states, backend.build_mask(spec))
        found.float().square().mean().backward()
        results.append((found.detach(), states.grad))
    for name, one, other in zip(("output", "gradient"), *results, strict=True):
        assert_close(other, one, 2e-2, name)


def test_mask_type_depends_on_the_choice() -> None:
    from transformers.masking_utils import causal_mask_function

    spec = packed(256)
    mask = (spec.documents > 0).long()
    config = SimpleNamespace(hidden_size=256, num_attention_heads=4)
    arguments: dict[str, Any] = {
        "mask_function": causal_mask_function,
        "attention_mask": mask,
        "device": "cuda",
        "config": config,
    }
    with use_mask(spec):
        fastest = "DocumentMask" if has_flash_on(torch.device("cuda", 0)) else "PieceMask"
        for choice, expected in (("flex", "BlockMask"), ("varlen", fastest), ("sdpa", "Tensor")):
            with use_attention(choice):  # type: ignore[arg-type]
                assert type(build_mask(2, 256, 256, **arguments)).__name__ == expected
        with use_attention("auto"):
            is_hopper = torch.cuda.get_device_capability() >= (9, 0)
            assert type(build_mask(2, 256, 256, **arguments)).__name__ == (fastest if is_hopper else "BlockMask")
        with use_attention("varlen"):

            def window(row: Any, head: Any, query: Any, key: Any) -> Any:
                return (key <= query) & (key > query - 20)

            found = build_mask(2, 256, 256, **{**arguments, "mask_function": window})
            assert type(found).__name__ == "BlockMask", "kernels for documents have no windows"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [8, 16, 24, 32, 48, 80, 96, 112])
def test_other_head_sizes_equal_dense_mask_where_they_are_supported(width: int, backend: DocumentBackend) -> None:
    if not backend.supports_head_dim(width) or not backend.is_available(torch.device("cuda", 0), width):
        pytest.skip("there are no kernels for them")
    assert_equals_dense_mask(packed(300), backend, (4, 2), width)


@pytest.mark.skipif(not has_flash(), reason="needs flash-attn-4")
@pytest.mark.parametrize("backend", [FlashDocumentBackend(), FlashRangeBackend()], ids=lambda one: one.name)
def test_layer_with_unsupported_heads_runs_on_a_more_general_backend(backend: DocumentBackend) -> None:
    spec = packed(300)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 300, 48, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    real = spec.documents > 0
    weight = torch.randn(2, 300, 4, 48, device="cuda") * real[..., None, None]
    reference, exact = attend_densely(spec, inputs, weight)
    found, _ = run_attention(Layer(1), *inputs, backend.build_mask(spec), scaling=0.3)
    (found * weight).sum().backward()
    assert_close(found[real], reference[real], 2e-2, "output")
    assert_gradients(inputs, exact)


@pytest.mark.parametrize("backend", [FlashDocumentBackend(), CudnnBackend()], ids=lambda one: one.name)
def test_building_a_known_mask_does_not_wait_for_the_device(backend: DocumentBackend) -> None:
    spec = packed(256)
    known = MaskSpec(spec.documents, spec.spans, False, spec.counts)
    backend.build_mask(known)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.build_mask(known)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not has_flash(), reason="needs flash-attn-4")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("tokens", [256, 1000, 2100])
def test_ranges_of_some_queries_and_keys_in_another_order(heads: tuple[int, int], tokens: int) -> None:
    spec = packed(tokens)
    torch.manual_seed(0)
    rows = len(spec.documents)
    shapes = [(rows, count, tokens, 128) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    places = [torch.arange(rank, tokens, 3, device="cuda") for rank in range(3)]
    queries, keys = places[1], torch.cat(places)
    weight = torch.zeros(rows, tokens, heads[0], 128, device="cuda")
    weight[:, queries] = torch.randn(rows, len(queries), heads[0], 128, device="cuda")
    reference, exact = attend_densely(spec, inputs, weight)

    cut = [one[:, :, where] for one, where in zip(inputs, (queries, keys, keys), strict=True)]
    found = attend_range(*cut, spec.build_range_mask(queries=queries, keys=keys), 0.3)
    (found * weight[:, queries]).sum().backward()
    assert_close(found, reference[:, queries], 2e-2, "output")
    assert_gradients(inputs, exact)
