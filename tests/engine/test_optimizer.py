"""Learning rates against tables, groups against what parts say, averages against a formula."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from cornstarch.config import ModelConfig, OptimizerConfig, ScheduleConfig
from cornstarch.engine.model_parts import ModelPart, split_into_parts
from cornstarch.engine.optimizer import (
    AveragedWeights,
    LearningRate,
    apply_hyperparameters,
    make_optimizer,
    rate_factor,
)
from cornstarch.errors import ConfigError

# ------------------------------------------------------------------------------------------------ learning rates


def cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


# What the highest rate is multiplied by in each step, by hand.
TABLES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear, no warm-up": ({"name": "linear", "warmup": 0}, [1, 0.75, 0.5, 0.25]),
    "linear, to a half": ({"name": "linear", "warmup": 0, "final": 0.5}, [1, 0.875, 0.75, 0.625]),
    "linear, two steps": ({"name": "linear", "warmup": 2}, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
    "linear, a share": ({"name": "linear", "warmup": 0.4}, [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]),
    "a share rounds": ({"name": "linear", "warmup": 0.3}, [0.5, 1, 2 / 3, 1 / 3]),  # 1.2 steps are one
    "a small share": ({"name": "constant", "warmup": 0.03}, [1, 1, 1, 1]),  # 0.12 steps are none
    "one step": ({"name": "constant", "warmup": 1}, [0.5, 1, 1]),
    "constant has no final": ({"name": "constant", "warmup": 0, "final": 0.1}, [1, 1, 1]),
    "cosine": ({"name": "cosine", "warmup": 0}, [1, cosine(0.25), 0.5, cosine(0.75)]),
    "cosine, to a tenth": (
        {"name": "cosine", "warmup": 1, "final": 0.1},
        [0.5, 1, 0.1 + 0.9 * cosine(1 / 3), 0.1 + 0.9 * cosine(2 / 3)],
    ),
    "all is warm-up": ({"name": "cosine", "warmup": 9}, [0.25, 0.5, 0.75]),
    "one step in all": ({"name": "cosine", "warmup": 0.03}, [1]),
}


@pytest.mark.parametrize(("schedule", "expected"), TABLES.values(), ids=TABLES.keys())
def test_rates_are_those_of_the_table(schedule: dict[str, Any], expected: list[float]) -> None:
    config = ScheduleConfig(**schedule)
    assert [rate_factor(config, step, len(expected)) for step in range(len(expected))] == pytest.approx(expected)


@pytest.mark.parametrize("final", [0.0, 0.2])
def test_the_last_rate_is_reached_after_the_last_step(final: float) -> None:
    for name in ("cosine", "linear"):
        config = ScheduleConfig(name=name, warmup=2, final=final)  # type: ignore[arg-type]
        assert rate_factor(config, 10, 10) == pytest.approx(final)
        assert rate_factor(config, 25, 10) == pytest.approx(final)  # more steps than were planned


def test_every_step_learns_something() -> None:
    for name in ("cosine", "linear", "constant"):
        for warmup in (0, 0.1, 0.5, 3, 100):
            config = ScheduleConfig(name=name, warmup=warmup)  # type: ignore[arg-type]
            assert all(0 < rate_factor(config, step, 10) <= 1 for step in range(10))


def test_each_group_keeps_its_own_highest_rate() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(
        [{"params": first.parameters(), "lr": 0.4}, {"params": second.parameters(), "lr": torch.tensor(0.1)}]
    )
    rates = LearningRate(optimizer, ScheduleConfig(name="linear", warmup=0), 4)
    for step, factor in [(0, 1.0), (3, 0.25), (1, 0.75)]:  # in any order: it has no state
        assert rates.set(step) == pytest.approx(0.4 * factor)
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.4 * factor, 0.1 * factor])
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor)  # a compiled step reads it where it is


def test_the_rate_that_is_told_is_the_highest_of_all_parts_wherever_they_are() -> None:
    nothing = torch.optim.SGD([{"params": []}], lr=0.001)  # a stage that trains nothing
    rates = LearningRate(nothing, ScheduleConfig(name="linear", warmup=0), 4, highest=0.4)
    assert rates.set(3) == pytest.approx(0.1)


# ------------------------------------------------------------------------------------------------ groups


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def parts(module: nn.Module, **optimizer: Any) -> tuple[OptimizerConfig, list[ModelPart]]:
    config = OptimizerConfig(**optimizer)
    return config, split_into_parts(module, ModelConfig(given="model"), config)


def one_step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    module(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_biases_and_norms_are_not_decayed_and_frozen_weights_are_in_no_group() -> None:
    module: Any = model()
    module[2].weight.requires_grad_(False)
    optimizer = make_optimizer(*parts(module, weight_decay=0.1, learning_rate=0.5))
    decayed, others = optimizer.param_groups
    assert [id(p) for p in decayed["params"]] == [id(module[0].weight)]
    assert {id(p) for p in others["params"]} == {
        id(p) for p in (module[0].bias, module[1].weight, module[1].bias, module[2].bias)
    }
    assert [(group["lr"], group["weight_decay"]) for group in (decayed, others)] == [(0.5, 0.1), (0.5, 0.0)]


SAME = [
    ({"name": "adamw", "betas": (0.8, 0.95), "eps": 1e-6}, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    ({"name": "SGD", "momentum": 0.5}, torch.optim.SGD, {"momentum": 0.5}),
    ({"name": "sgd", "arguments": {"nesterov": True}}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ({"name": "torch.optim.Adam", "arguments": {"amsgrad": True}}, torch.optim.Adam, {"amsgrad": True}),
    ({"name": "Adagrad"}, torch.optim.Adagrad, {}),
    ({"name": "torch.optim.Adafactor"}, torch.optim.Adafactor, {}),
    ({"name": "torch.optim.RMSprop", "arguments": {"foreach": True}}, torch.optim.RMSprop, {"foreach": True}),
    ({"name": "adamw", "arguments": {"foreach": True}}, torch.optim.AdamW, {"foreach": True}),
    ({"name": "torch.optim.Rprop"}, torch.optim.Rprop, {}),
]


@pytest.mark.parametrize(("said", "kind", "options"), SAME, ids=[str(row[0]) for row in SAME])
def test_an_optimizer_does_what_torchs_own_does(said: dict[str, Any], kind: Any, options: dict[str, Any]) -> None:
    mine, theirs = model(), model()
    optimizer = make_optimizer(*parts(mine, learning_rate=0.05, **said))
    assert type(optimizer) is kind
    # weight decay 0 as ours, where there is such a thing
    plain = {"weight_decay": 0.0} if "weight_decay" in kind([nn.Parameter(torch.ones(1))]).defaults else {}
    reference = kind(theirs.parameters(), lr=0.05, **plain, **options)
    for seed in range(3):
        one_step(mine, optimizer, seed)
        one_step(theirs, reference, seed)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_it_is_fused_where_there_is_such_a_thing_unless_told_otherwise() -> None:
    for said, fused in [({}, True), ({"arguments": {"fused": False}}, False), ({"arguments": {"foreach": True}}, None)]:
        optimizer = make_optimizer(*parts(model(), **said))
        assert {group["fused"] for group in optimizer.param_groups} == {fused}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"name": "..x"}, "Expected adamw, sgd, or a class"),
        ({"name": "no.such.module"}, "Expected adamw, sgd, or a class"),
        ({"name": "torch.nn.Linear"}, "no class of optimizers"),
        ({"name": "torch.optim.LBFGS"}, "several times per step"),
        ({"name": "torch.optim.SparseAdam"}, "sparse gradients only"),
        ({"name": "torch.optim.Muon"}, "2D"),
        ({"name": "torch.optim.Rprop", "weight_decay": 0.1}, "knows no weight decay"),
        ({"arguments": {"lr": 1.0}}, "optimizer.learning_rate"),
        ({"arguments": {"weight_decay": 1.0}}, "optimizer.weight_decay"),
        ({"arguments": {"beta": 1.0}}, r"\['beta'\], which AdamW does not take. It takes amsgrad, betas"),
        ({"arguments": {"amsgrad": True, "eps": -1}}, "Invalid epsilon value"),
    ],
)
def test_what_no_optimizer_can_be_is_told(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(*parts(model(), **said))


def test_the_config_wins_over_a_restored_state() -> None:
    module = model()
    optimizer = make_optimizer(*parts(module, learning_rate=0.1, weight_decay=0.1, betas=(0.5, 0.5)))
    one_step(module, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    config, now = parts(module, learning_rate=0.2, weight_decay=0.0, betas=(0.9, 0.99))
    restored = make_optimizer(config, now)
    restored.load_state_dict(saved)
    assert restored.param_groups[0]["lr"] == 0.1
    apply_hyperparameters(restored, config, now)
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in restored.param_groups] == [(0.2, 0.0, (0.9, 0.99))] * 2
    before, after = saved["state"], restored.state_dict()["state"]
    assert all(torch.equal(before[key]["exp_avg"], after[key]["exp_avg"]) for key in before)  # what it had learned


# ------------------------------------------------------------------------------------------------ averages


def test_averages_are_those_of_the_formula() -> None:
    parameters = {"a": nn.Parameter(torch.randn(3)), "b": nn.Parameter(torch.randn(2, 2).bfloat16())}
    averages = AveragedWeights(parameters, 0.75)
    expected = {name: p.detach().float().numpy().astype("float64") for name, p in parameters.items()}
    for _ in range(5):
        for name, parameter in parameters.items():
            parameter.data += torch.randn_like(parameter)
            expected[name] = 0.75 * expected[name] + 0.25 * parameter.detach().float().numpy()
        averages.update()
    for name, average in averages.averages.items():
        assert average.dtype == torch.float32 and not average.requires_grad
        torch.testing.assert_close(average.double(), torch.from_numpy(expected[name]), rtol=1e-6, atol=1e-6)


def test_averages_are_in_use_within_a_block_only() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    averages = AveragedWeights({"p": parameter}, 0.5)
    parameter.data.fill_(4.0)
    averages.update()
    with pytest.raises(ZeroDivisionError), averages.in_use():
        assert parameter.tolist() == [2.0, 2.0] and parameter.dtype == torch.bfloat16
        raise ZeroDivisionError
    assert parameter.tolist() == [4.0, 4.0]
    parameter.data.add_(1)  # and its memory is its own
    assert averages.averages["p"].tolist() == [2.0, 2.0]


def test_a_rank_that_trains_nothing_has_nothing_to_average() -> None:
    averages = AveragedWeights({}, 0.5)
    averages.update()
    with averages.in_use():
        assert averages.averages == {}
