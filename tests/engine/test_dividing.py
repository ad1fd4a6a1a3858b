"""Gradients divided by the optimizer while it reads them are gradients clipped before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cornstarch.compat import divides_gradients, step_dividing
from cornstarch.parallel.gradients import clip_gradients, compute_clip_divisor


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("most", [0.1, 1e6])
def test_a_step_is_that_of_clipped_gradients(kind: type[torch.optim.Adam], most: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    other = copy.deepcopy(one)
    optimizers = [kind(model.parameters(), lr=0.1, fused=True) for model in (one, other)]
    for number in range(3):
        batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(number)).to(device)
        for model in (one, other):
            model.zero_grad()
            (model(batch) ** 2).sum().backward()
        right = clip_gradients(None, list(one.parameters()), most)
        optimizers[0].step()
        norm, divisor = compute_clip_divisor(list(other.parameters()), most)
        step_dividing(optimizers[1], divisor)
        torch.testing.assert_close(norm, right)
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not hasattr(optimizers[1], "grad_scale")
    assert divides_gradients(optimizers[1]) == (device == "cuda")


def test_other_optimizers_do_not() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    assert not divides_gradients(torch.optim.SGD(parameters))
    assert not divides_gradients(torch.optim.AdamW(parameters, fused=False))
