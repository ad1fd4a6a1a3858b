"""Masks as the first and the last place that a query sees, against the same mask written out."""

from __future__ import annotations

import pytest
import torch

from cornstarch.attention.between import attend_between
from tests.attention.test_pieces import SPECS, assert_gradients, written_out


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_places_equal_a_dense_mask(name: str, heads: tuple[int, int]) -> None:
    spec = SPECS[name]
    rows, tokens = spec.documents.shape
    torch.manual_seed(0)
    inputs = [torch.randn(rows, n, tokens, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    weight = torch.randn(rows, tokens, heads[0], 8)
    reference, exact = written_out(spec, inputs, weight)
    found = attend_between(*inputs, spec.between(), 0.3)
    (found * weight).sum().backward()
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
    assert_gradients(inputs, exact)


@pytest.mark.parametrize("name", SPECS)
def test_some_queries_and_keys_in_another_order(name: str) -> None:
    spec = SPECS[name]
    rows, tokens = spec.documents.shape
    torch.manual_seed(0)
    inputs = [torch.randn(rows, 4, tokens, 8, requires_grad=True) for _ in range(3)]
    asking, asked = torch.randperm(tokens)[: tokens // 2], torch.randperm(tokens)
    weight = torch.zeros(rows, tokens, 4, 8)
    weight[:, asking] = torch.randn(rows, len(asking), 4, 8)
    reference, exact = written_out(spec, inputs, weight)
    places = (asking, asked, asked)
    cut = [one[:, :, where] for one, where in zip(inputs, places, strict=True)]
    found = attend_between(*cut, spec.between(queries=asking, keys=asked), 0.3)
    (found * weight[:, asking]).sum().backward()
    torch.testing.assert_close(found.double(), reference[:, asking], rtol=1e-5, atol=1e-5)
    assert_gradients(inputs, exact)
