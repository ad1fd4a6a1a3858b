"""Custom modules are split where their forward calls one module after the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cornstarch import PipelineTemplate
from cornstarch.errors import UnsupportedModelError
from cornstarch.pipeline.split import cut, run_staged, run_whole, survey


class Chain(nn.Module):
    """Modules without a list, and something that skips one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = F.relu(self.first(x))
        hidden = hidden + torch.tanh(self.second(hidden))
        return {"loss": F.mse_loss(self.last(self.norm(hidden)), y)}


class Listed(nn.Module):
    """A list inside a module with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.layers(x), y)}


class Again(Chain):
    """Calls one of its modules twice."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.second(self.second(self.first(x)))
        return {"loss": F.mse_loss(self.last(self.norm(hidden)), y)}


def batch(_: Any = None) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(3)
    return {"x": torch.randn(4, 6, generator=noise), "y": torch.randn(4, 2, generator=noise)}


@pytest.mark.parametrize("kind", [Chain, Listed])
def test_stages_compute_what_the_module_does(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    expected = run_whole(copy.deepcopy(model), batch())
    copies = [copy.deepcopy(model) for _ in range(3)]
    for one in copies:
        survey(one, batch)
    survey(model, batch)
    template = PipelineTemplate.split(model, 3, by="uniform")
    parts = [cut(one, template, stage) for stage, one in enumerate(copies)]
    assert all(0 < len(list(part.parameters())) < len(list(model.parameters())) for part in parts)
    found = run_staged(parts, batch())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_module_that_cannot_be_split_is_refused_with_advice() -> None:
    with pytest.raises(UnsupportedModelError, match="Let its forward call modules one after the other, each once"):
        survey(Again(), batch)
    with pytest.raises(UnsupportedModelError, match="say what it is run on"):
        survey(Chain())
