"""Local updates are their formulas, and a resumed run is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cornstarch.plan.data_options import Compression
from tests.parallel.low_bandwidth.updates import Replicas, resume, train_run
from tests.parity.pool import Pool

EVERY, STEPS = 2, 9
RATE, MOMENTUM = 0.6, 0.8
OUTER = {"every": EVERY, "outer_learning_rate": RATE, "outer_momentum": MOMENTUM}


class Outer:
    """The outer optimizer, torch's own."""

    def __init__(self, common: Tensor) -> None:
        self.common = torch.nn.Parameter(common.clone())
        self.optimizer = torch.optim.SGD([self.common], lr=RATE, momentum=MOMENTUM, nesterov=True)

    def move_batch(self, mean: Tensor) -> Tensor:
        """Return the common weights after a step."""
        self.common.grad = mean
        self.optimizer.step()
        return self.common.detach().clone()


def assert_history(found: list[dict[str, Any]], step: int, expected: list[Tensor], **tolerance: float) -> None:
    for rank, weights in enumerate(expected):
        torch.testing.assert_close(found[rank]["history"][step - 1], weights, **tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_local_sgd_takes_the_mean_of_weights(workers: Pool, ranks: int) -> None:
    found = workers.run(ranks, train_run, {"kind": "local_sgd", "local": {"every": EVERY}}, STEPS)
    replicas = Replicas(ranks)
    for step in range(1, STEPS + 1):
        weights = replicas.learn(step)
        if step % EVERY == 0:
            replicas.put([sum(weights) / ranks] * ranks)  # type: ignore[list-item]
        assert_history(found, step, replicas.weights, rtol=1e-10, atol=1e-12)
    mean = torch.stack(replicas.weights).mean(0)
    numbers = mean.numel()
    for one in found:
        torch.testing.assert_close(one["mean"], mean, rtol=1e-10, atol=1e-12)
        assert torch.equal(one["mean"], found[0]["mean"])
        assert torch.equal(one["after"], one["history"][-1])
        exchanges = STEPS // EVERY + 1  # and one for `averaged`
        assert one["figures"]["bytes_sent"] == exchanges * Compression().count_sent_bytes(numbers, 8, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_diloco_moves_the_common_weights_by_nesterov(workers: Pool, ranks: int) -> None:
    found = workers.run(ranks, train_run, {"kind": "diloco", "local": OUTER}, STEPS)
    replicas = Replicas(ranks)
    outer = Outer(replicas.weights[0])
    for step in range(1, STEPS + 1):
        weights = replicas.learn(step)
        if step % EVERY == 0:
            mean = torch.stack([outer.common.detach() - one for one in weights]).mean(0)
            replicas.put([outer.move_batch(mean)] * ranks)
        assert_history(found, step, replicas.weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_diloco_with_overlap_applies_a_round_when_the_next_has_ended(workers: Pool, ranks: int) -> None:
    found = workers.run(ranks, train_run, {"kind": "diloco", "local": {**OUTER, "overlap": True}}, STEPS)
    replicas = Replicas(ranks)
    starts, travelling = replicas.weights, None
    outer = Outer(starts[0])
    for step in range(1, STEPS + 1):
        weights = replicas.learn(step)
        if step % EVERY == 0:
            changes = [one - start for one, start in zip(weights, starts, strict=True)]
            if travelling is not None:
                outer.move_batch(travelling)
            travelling = -torch.stack(changes).mean(0)
            starts = [outer.common.detach() + change for change in changes]
            replicas.put(starts)
        assert_history(found, step, replicas.weights, rtol=1e-10, atol=1e-12)


def round_values(values: Tensor, block: int) -> Tensor:
    """Return numbers in 8 bits: one scale for each block."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % block)).view(-1, block)
    scales = padded.abs().amax(1, keepdim=True) / 127
    return ((padded / scales).round() * scales).view(-1)[: len(values)]


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_quantized_changes_with_error_feedback_follow_the_formula(workers: Pool, kind: str) -> None:
    plan = {"kind": kind, "compression": {"kind": "quantize", "block": 16, "stochastic": False}, "local": OUTER}
    if kind == "local_sgd":
        plan["local"] = {"every": EVERY}
    found = workers.run(2, train_run, plan, STEPS, torch.float32)
    replicas = Replicas(2, torch.float32)
    common = replicas.weights[0]
    outer, lost = Outer(common), [torch.zeros_like(common)] * 2
    for step in range(1, STEPS + 1):
        weights = replicas.learn(step)
        if step % EVERY == 0:
            wanted = [common - one + left for one, left in zip(weights, lost, strict=True)]
            said = [round_values(one, 16) for one in wanted]
            lost = [one - other for one, other in zip(wanted, said, strict=True)]
            mean = torch.stack(said).mean(0)
            common = outer.move_batch(mean) if kind == "diloco" else common - mean
            replicas.put([common] * 2)
        assert_history(found, step, replicas.weights, rtol=1e-4, atol=1e-5)
    assert any(left.abs().max() > 1e-6 for left in lost)


PLANS: dict[str, dict[str, Any]] = {
    "local_sgd": {"kind": "local_sgd", "local": {"every": 3}},
    "diloco": {"kind": "diloco", "local": OUTER},
    "diloco, overlap": {"kind": "diloco", "local": {**OUTER, "overlap": True}},
    "diloco, overlap, 4 bits": {
        "kind": "diloco",
        "local": {**OUTER, "overlap": True},
        "compression": {"kind": "quantize", "bits": 4, "block": 16},
    },
    "local_sgd, randomk": {
        "kind": "local_sgd",
        "local": {"every": 2},
        "compression": {"kind": "randomk", "ratio": 0.25},
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_resumed_run_is_bit_equal(workers: Pool, name: str) -> None:
    for whole, after, sent, sent_after in workers.run(3, resume, PLANS[name], 5, 9):
        assert torch.equal(whole, after)
        assert sent == sent_after > 0
