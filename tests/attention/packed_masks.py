"""Packed masks of every kind, and attention under a dense mask as the reference of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cornstarch.attention import MaskSpec
from cornstarch.compat.compiler import compile_variants
from tests.versions import compile_counts


class KernelSpec(MaskSpec):
    """A spec whose kernels must not need a block mask."""

    def block_mask(self, *others: Any) -> Any:
        raise AssertionError("no block mask is needed")


def pack_rows(documents: list[list[int]], spans: dict[int, list[tuple[int, int, int]]] | None = None) -> MaskSpec:
    """Build rows from the lengths of documents (numbered from 1), and (begin, end, number) of spans by row."""
    numbers = [torch.arange(1, len(row) + 1).repeat_interleave(torch.tensor(row)) for row in documents]
    rows = torch.stack(numbers)
    marks = torch.full_like(rows, -1)
    for row, found in (spans or {}).items():
        for begin, end, number in found:
            marks[row, begin:end] = number
    return KernelSpec(rows, marks)


def pad_row(spec: MaskSpec, row: int, begin: int) -> MaskSpec:
    documents = spec.documents.clone()
    documents[row, begin:] = 0
    return KernelSpec(documents, spec.spans)


def attend_densely(spec: MaskSpec, inputs: list[Tensor], weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return attention under a dense mask in float64, and its inputs with the gradients of the weighted sum."""
    exact = [one.detach().double().requires_grad_() for one in inputs]
    groups = exact[0].shape[1] // exact[1].shape[1]
    query, key, value = exact[0], *(one.repeat_interleave(groups, 1) for one in exact[1:])
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~spec.dense(), -torch.inf)
    reference = (scores.softmax(-1) @ value).transpose(1, 2)
    (reference * weight).sum().backward()
    return reference, exact


def assert_gradients(inputs: list[Tensor], exact: list[Tensor]) -> None:
    for one, ideal in zip(inputs, exact, strict=True):
        assert one.grad is not None and ideal.grad is not None
        torch.testing.assert_close(one.grad.double(), ideal.grad, rtol=1e-5, atol=1e-5)


SPECS = {
    "one document": pack_rows([[24], [24]]),
    "documents": pack_rows([[5, 12, 7], [1, 22, 1]]),
    "images": pack_rows([[24], [24]], {0: [(3, 11, 0), (15, 20, 1)], 1: [(0, 24, 2)]}),
    "images side by side": pack_rows([[24]], {0: [(3, 11, 0), (11, 20, 1)]}),
    "an image of one token": pack_rows([[12, 12]], {0: [(3, 4, 0), (15, 20, 1), (22, 23, 2)]}),
    "numbers in another order": pack_rows([[24]], {0: [(3, 8, 7), (12, 20, 2)]}),
    "equal numbers in other documents": pack_rows([[10, 14]], {0: [(3, 8, 0), (12, 20, 0)]}),
    "equal numbers on both sides of a border": pack_rows([[10, 14]], {0: [(3, 10, 0), (10, 20, 0)]}),
    "trailing padding": pad_row(pack_rows([[24], [24]], {0: [(3, 8, 0)]}), 0, 20),
    "padding": pad_row(pack_rows([[10, 14], [24]], {0: [(3, 8, 0)]}), 0, 20),
}


def assert_equals_dense_mask(
    name: str, heads: tuple[int, int], attend: Callable[[MaskSpec, list[Tensor]], Tensor]
) -> None:
    spec = SPECS[name]
    rows, tokens = spec.documents.shape
    torch.manual_seed(0)
    inputs = [torch.randn(rows, n, tokens, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    weight = torch.randn(rows, tokens, heads[0], 8) * (spec.documents > 0)[..., None, None]  # padding is not trained on
    reference, exact = attend_densely(spec, inputs, weight)
    found = attend(spec, inputs)
    (found * weight).sum().backward()
    real = spec.documents > 0
    torch.testing.assert_close(found[real], reference.float()[real], rtol=1e-5, atol=1e-5)
    assert_gradients(inputs, exact)


def assert_compiled_once(attend: Callable[..., Tensor], render: Callable[[MaskSpec], Any]) -> None:
    """Attend in a compiled layer with ragged batches: it must not recompile after the second."""
    torch.compiler.reset()

    def layer(states: Tensor, mask: Any) -> Tensor:
        return attend(states * 2, states, states + 1, mask, 0.5).sin()

    fast = compile_variants(layer)
    before, frames = compile_counts(), []
    for length in (9, 17, 12, 30, 21, 5, 28):
        spec = pack_rows([[length, 40 - length]], {0: [(1, 1 + length // 2, 0)]})
        states = torch.randn(1, 2, 40, 8, requires_grad=True)
        found = fast(states, render(spec))
        torch.testing.assert_close(found, layer(states, render(spec)))
        found.sum().backward()
        frames.append(compile_counts()["graphs"] - before["graphs"])
    assert frames[-1] == frames[1] <= 2, frames
    assert compile_counts()["breaks"] == before["breaks"]
