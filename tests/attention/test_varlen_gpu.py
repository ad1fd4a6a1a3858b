"""Kernels for pieces of rows on a GPU, against plain attention with a dense mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cornstarch.attention import MaskSpec, cudnn, flash, use_mask
from cornstarch.attention.between import attend_between
from cornstarch.attention.choice import attend_with, takes
from cornstarch.attention.documents import attend_in_documents, documents_of
from cornstarch.attention.interface import attend_by_kernel, make_mask
from cornstarch.attention.pieces import pieces_of
from cornstarch.attention.varlen import attend_in_pieces
from cornstarch.compat import compiled
from tests.attention.test_flex_gpu import Layer, assert_close, packed
from tests.attention.test_pieces import written_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAKERS = [
    pytest.param("flash", marks=pytest.mark.skipif(not flash.has_flash(), reason="needs flash-attn-4")),
    pytest.param("cudnn", marks=pytest.mark.skipif(not cudnn.has_cudnn(), reason="needs nvidia-cudnn-frontend")),
]
WAYS = [*MAKERS, pytest.param("between", marks=MAKERS[0].marks)]


def rendered(spec: MaskSpec, maker: str) -> Any:
    """Return a mask as kernels want it."""
    make: Any = documents_of if maker == "flash" else pieces_of
    return make(spec, spec.counts, spec.block_mask)


def attended(maker: str, *given: Any) -> Tensor:
    return attend_in_documents(*given) if maker == "flash" else attend_in_pieces(*given)


def whole(tokens: int, spans: bool) -> MaskSpec:
    """Two rows of one document with images, one with padding behind it."""
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


def assert_equal_to_a_dense_mask(spec: MaskSpec, way: str, heads: tuple[int, int], width: int) -> None:
    real = spec.documents > 0
    torch.manual_seed(0)
    rows, tokens = real.shape
    shapes = [(rows, count, tokens, width) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    weight = torch.randn(rows, tokens, heads[0], width, device="cuda") * real[..., None, None]
    reference, exact = written_out(spec, inputs, weight)

    if way == "between":
        found = attend_between(*inputs, spec.between(), 0.3)
    else:
        found = attended(way, *inputs, rendered(spec, way), 0.3)
    (found * weight).sum().backward()
    assert_close(found[real], reference[real], 2e-2, "output")
    assert_gradients(inputs, exact)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [packed, whole, one_row])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2)])
@pytest.mark.parametrize(("tokens", "width"), [(256, 64), (1000, 128)])
@pytest.mark.parametrize("spans", [True, False])
def test_kernels_equal_a_dense_mask(
    way: str, make: Any, heads: tuple[int, int], tokens: int, width: int, spans: bool
) -> None:
    assert_equal_to_a_dense_mask(make(tokens, spans), way, heads, width)


def scattered(tokens: int, spans: bool) -> MaskSpec:
    """Two rows of many documents of all lengths, with images of all lengths in every other one."""
    documents, marks = torch.zeros(2, tokens, dtype=torch.long), torch.full((2, tokens), -1)
    lengths = [1, 300, 2, 127, 64, 128, 700, 3, 129, 16, 255, 63, 256, 17, 65, 15]
    for row in range(2):
        begin = number = 0
        while begin < tokens - 40:  # behind it there is padding
            length = min(lengths[(number * (2 * row + 1)) % len(lengths)], tokens - 40 - begin)
            number += 1
            documents[row, begin : begin + length] = number
            if spans and number % 2:
                marks[row, begin + length // 5 : begin + max(1, length // 2)] = 0
                marks[row, begin + length // 2 : begin + length - length // 7] = 1
            begin += length
    return MaskSpec(documents, marks).to("cuda")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("heads", "width"),
    [((4, 2), 32), ((2, 2), 64), ((4, 1), 64), ((4, 2), 96), ((2, 2), 128), ((4, 2), 128), ((6, 2), 128)],
)
@pytest.mark.parametrize("spans", [True, False])
def test_many_documents(way: str, heads: tuple[int, int], width: int, spans: bool) -> None:
    assert_equal_to_a_dense_mask(scattered(3000, spans), way, heads, width)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_compiled_layer_attends_in_pieces(maker: str) -> None:
    spec = packed(512)

    def layer(states: Any, mask: Any) -> Any:
        return attended(maker, states * 2, states, states + 1, mask, 0.1).sin()

    results = []
    for function in (layer, compiled(layer)):
        torch.manual_seed(0)
        states = torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        found = function(states, rendered(spec, maker))
        found.float().square().mean().backward()
        results.append((found.detach(), states.grad))
    for name, one, other in zip(("output", "gradient"), *results, strict=True):
        assert_close(other, one, 2e-2, name)


def test_which_kernels_are_chosen() -> None:
    from transformers.masking_utils import causal_mask_function

    spec = packed(256)
    mask = (spec.documents > 0).long()
    config = SimpleNamespace(hidden_size=256, num_attention_heads=4)
    asked: dict[str, Any] = {
        "mask_function": causal_mask_function,
        "attention_mask": mask,
        "device": "cuda",
        "config": config,
    }
    with use_mask(spec):
        quickest = "Documents" if flash.runs_on(torch.device("cuda", 0)) else "Pieces"
        for way, expected in (("flex", "BlockMask"), ("varlen", quickest), ("sdpa", "Tensor")):
            with attend_with(way):  # type: ignore[arg-type]
                assert type(make_mask(2, 256, 256, **asked)).__name__ == expected
        with attend_with("auto"):
            quick = torch.cuda.get_device_capability() >= (9, 0)
            assert type(make_mask(2, 256, 256, **asked)).__name__ == (quickest if quick else "BlockMask")
        with attend_with("varlen"):

            def window(row: Any, head: Any, query: Any, key: Any) -> Any:
                return (key <= query) & (key > query - 20)

            found = make_mask(2, 256, 256, **{**asked, "mask_function": window})
            assert type(found).__name__ == "BlockMask", "pieces know no windows"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [8, 16, 24, 32, 48, 80, 96, 112])
def test_heads_of_other_widths_attend_or_are_left_to_others(width: int, way: str) -> None:
    maker: Any = "cudnn" if way == "cudnn" else "flash"
    if not takes(maker, width) or (maker == "cudnn" and not cudnn.has_kernels(width, torch.device("cuda", 0))):
        pytest.skip("there are no kernels for them")
    assert_equal_to_a_dense_mask(packed(300), way, (4, 2), width)


@pytest.mark.skipif(not flash.has_flash(), reason="needs flash-attn-4")
@pytest.mark.parametrize("mask", ["documents", "between"])
def test_a_layer_whose_heads_are_others_than_the_config_says_takes_other_kernels(mask: str) -> None:
    spec = packed(300)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 300, 48, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    real = spec.documents > 0
    weight = torch.randn(2, 300, 4, 48, device="cuda") * real[..., None, None]
    reference, exact = written_out(spec, inputs, weight)
    asked: Any = rendered(spec, "flash") if mask == "documents" else spec.between()
    found, _ = attend_by_kernel(Layer(1), *inputs, asked, scaling=0.3)
    (found * weight).sum().backward()
    assert_close(found[real], reference[real], 2e-2, "output")
    assert_gradients(inputs, exact)


@pytest.mark.parametrize("maker", ["flash", "cudnn"])
def test_a_mask_that_is_known_is_not_waited_for(maker: str) -> None:
    spec = packed(256)
    known = MaskSpec(spec.documents, spec.spans, False, spec.counts)
    rendered(known, maker)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rendered(known, maker)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not flash.has_flash(), reason="needs flash-attn-4")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("tokens", [256, 1000, 2100])
def test_some_queries_of_a_row_see_keys_in_another_order(heads: tuple[int, int], tokens: int) -> None:
    spec = packed(tokens)
    torch.manual_seed(0)
    rows = len(spec.documents)
    shapes = [(rows, count, tokens, 128) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    places = [torch.arange(rank, tokens, 3, device="cuda") for rank in range(3)]
    asking, asked = places[1], torch.cat(places)
    weight = torch.zeros(rows, tokens, heads[0], 128, device="cuda")
    weight[:, asking] = torch.randn(rows, len(asking), heads[0], 128, device="cuda")
    reference, exact = written_out(spec, inputs, weight)

    cut = [one[:, :, where] for one, where in zip(inputs, (asking, asked, asked), strict=True)]
    found = attend_between(*cut, spec.between(queries=asking, keys=asked), 0.3)
    (found * weight[:, asking]).sum().backward()
    assert_close(found, reference[:, asking], 2e-2, "output")
    assert_gradients(inputs, exact)
