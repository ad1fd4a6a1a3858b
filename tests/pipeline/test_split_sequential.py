"""Stages of `nn.Sequential`, and of lists of layers and functions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.pipeline.split import cut, sequential_stages
from cornstarch.pipeline.template import PipelineTemplate
from tests.pipeline.protocol import Gradients, assert_same, collect_staged_gradients


def loss_of(output: Tensor) -> Tensor:
    return output.pow(2).sum()


BATCHES = [{"input": torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))} for rows in (3, 5)]
ORDER = ["F0", "F1", "B0", "B1"]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 6)]


def whole(model: nn.Module) -> Gradients:
    model = copy.deepcopy(model)
    losses = torch.stack([loss_of(model(batch["input"])) for batch in BATCHES]).sum()
    losses.backward()
    return {"loss": losses.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_of_a_sequential_compute_what_it_does(stages: int) -> None:
    model = nn.Sequential(*layers())
    template = PipelineTemplate.split(model, stages)
    parts = [cut(copy.deepcopy(model), template, stage) for stage in range(stages)]
    assert_same(collect_staged_gradients(parts, BATCHES, loss_of, ORDER), whole(model))


def test_stages_keep_the_names_of_the_sequential() -> None:
    model = nn.Sequential(*layers())
    parts = [cut(copy.deepcopy(model), PipelineTemplate("torch.nn.modules.container.Sequential", names), stage)
             for stage, names in enumerate([[["0", "1"], ["2", "3", "4"]]] * 2)]  # fmt: skip
    assert [sorted(part.model.state_dict()) for part in parts] == [
        ["0.bias", "0.weight"],
        ["2.bias", "2.weight", "4.bias", "4.weight"],
    ]


def test_functions_among_layers_compute_what_modules_do() -> None:
    chain = layers()
    mixed = [chain[0], torch.relu, *chain[2:4], lambda x: x * 2, chain[4]]
    parts = sequential_stages(mixed, [2, 4])

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    reference = nn.Sequential(chain[0], nn.ReLU(), *chain[2:4], Twice(), chain[4])
    expected = whole(reference)
    assert_same(collect_staged_gradients(parts, BATCHES, loss_of, ORDER), expected)
    assert [part.first for part in parts] == [True, False, False]
    assert [part.last for part in parts] == [False, False, True]


def test_layer_that_occurs_twice_is_tied() -> None:
    shared = nn.Linear(6, 6)
    chain = [shared, nn.Linear(6, 6), shared]
    expected = whole(nn.Sequential(*chain))
    parts = [copy.deepcopy(part) for part in sequential_stages(chain, [1, 2])]  # as on three processes
    assert parts[0].tied == {"0.weight": "0.weight", "0.bias": "0.bias"}
    assert parts[1].tied == {}
    assert parts[2].tied == {"2.weight": "0.weight", "2.bias": "0.bias"}
    assert_same(collect_staged_gradients(parts, BATCHES, loss_of), expected)


def test_nested_payloads_are_sent() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return x, {"twice": 2 * x}

    class Join(nn.Module):
        def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
            return pair[0] + pair[1]["twice"]

    chain = [*layers(), Pair(), Join(), nn.Linear(6, 2)]
    assert_same(collect_staged_gradients(sequential_stages(chain, [6]), BATCHES, loss_of), whole(nn.Sequential(*chain)))


@pytest.mark.parametrize("boundaries", [[0], [2, 2], [3, 1], [5], [-1]])
def test_boundaries_must_increase(boundaries: list[int]) -> None:
    with pytest.raises(ConfigError, match="there are 5 layers"):
        sequential_stages(layers(), boundaries)


def test_wrong_inputs_of_a_chain_are_refused() -> None:
    first, last = sequential_stages(layers(), [2])
    with pytest.raises(ConfigError, match="takes one input; the batch has a, b"):
        first({"a": torch.ones(1, 6), "b": torch.ones(1, 6)})
    payload = first({"anything": torch.ones(1, 6)})
    with pytest.raises(ConfigError, match="first stage receives nothing"):
        last({"anything": torch.ones(1, 6)})
    assert last({}, payload).shape == (1, 6)
    named = sequential_stages(layers(), [2], call=lambda model, batch: model(batch["x"] + batch["y"]))
    assert named[0]({"x": torch.ones(1, 6), "y": torch.ones(1, 6)}).shape == (1, 8)
