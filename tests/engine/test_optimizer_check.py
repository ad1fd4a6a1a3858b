"""Optimizers that look beyond single numbers are found by trying them, and refused where ranks hold pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from cornstarch.engine.plan_requirements import check_optimizer, find_scope
from cornstarch.errors import ConfigError
from cornstarch.plan import Layout
from cornstarch.train import load_config


class GlobalNorm(torch.optim.Optimizer):
    """Divides all gradients by the norm of all of them: its steps depend on every parameter."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        own = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in own])
        for parameter in own:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad / norm)


class TrustRatio(torch.optim.SGD):
    """Scales the step of a matrix by the norms of the matrix and its gradient, as LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(parameter.norm() / parameter.grad.norm())
        super().step()


SCOPES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, weight_decay=0.1), "number"),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "number"),
    "adagrad": (torch.optim.Adagrad, "number"),
    "rmsprop": (torch.optim.RMSprop, "number"),
    "nadam": (torch.optim.NAdam, "number"),
    "adafactor": (torch.optim.Adafactor, "matrix"),
    "muon": (torch.optim.Muon, "matrix"),
    "trust ratio": (TrustRatio, "matrix"),
    "global norm": (GlobalNorm, "all"),
}


@pytest.mark.parametrize(("build", "scope"), SCOPES.values(), ids=SCOPES)
def test_what_a_step_depends_on(build: Callable[[Any], torch.optim.Optimizer], scope: str) -> None:
    before = torch.get_rng_state()
    assert find_scope(build) == scope
    assert torch.equal(torch.get_rng_state(), before)


HERE = f"{__name__}."
MATRIX, ALL = "needs whole matrices", "depends on the other parameters"
TP = {"modules": {"vision": {"tp": 2}, "language_model": {"tp": 2}}}
STAGES = {"modules": {"vision": {}, "language_model": {"stages": 2}}, "ranks": "first_stage"}
ADAFACTOR = "torch.optim.Adafactor"
PLANS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (ADAFACTOR, {"data": {"kind": "fsdp1"}}, "full", MATRIX),
    (ADAFACTOR, {"data": {"kind": "zero3"}}, "full", MATRIX),
    (ADAFACTOR, TP, "full", MATRIX),
    (ADAFACTOR, TP, "frozen", None),  # what is cut is not trained
    (ADAFACTOR, {"data": {"kind": "zero1"}}, "full", None),
    (ADAFACTOR, STAGES, "full", None),
    (ADAFACTOR, {"data": {"kind": "fsdp1"}, "verify": "never"}, "full", None),
    ("adamw", {"data": {"kind": "fsdp1"}}, "full", None),
    ("torch.optim.RMSprop", {"data": {"kind": "fsdp1"}}, "full", None),
    (HERE + "GlobalNorm", {"data": {"kind": "zero1"}}, "full", ALL),
    (HERE + "GlobalNorm", {"data": {"kind": "fsdp2"}}, "full", ALL),
    (HERE + "GlobalNorm", STAGES, "full", ALL),
    (HERE + "GlobalNorm", {}, "full", None),
    (HERE + "CannotBeTried", {"data": {"kind": "fsdp2"}}, "full", "that failed: RuntimeError: needs a GPU"),
    (HERE + "CannotBeTried", {}, "full", None),
]


class CannotBeTried(torch.optim.SGD):
    """Has no step on a CPU."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise RuntimeError("needs a GPU")


@pytest.mark.parametrize(("name", "parallel", "train", "said"), PLANS)
def test_optimizers_are_refused_where_ranks_hold_less_than_they_look_at(
    name: str, parallel: dict[str, Any], train: str, said: str | None
) -> None:
    base = {
        "model": {
            "language_model": {"path": "llm", "train": train},
            "encoders": {"vision": {"path": "clip", "train": "projector"}},
        },
        "data": {"train": [{"path": "train.json"}]},
        "optimizer": {"name": name},
        "parallel": parallel,
    }
    config = load_config(None, base=base)
    layout = Layout.of(config.parallel, 2)
    if said is None:
        check_optimizer(config, layout)
        return
    with pytest.raises(ConfigError, match=said) as refusal:
        check_optimizer(config, layout)
    assert str(refusal.value).startswith(f"optimizer.name = {name}")
