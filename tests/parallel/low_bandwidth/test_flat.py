"""Weights as one vector, and messages between two processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cornstarch.parallel.low_bandwidth.replicas import FlatWeights, distance, run_in_background
from tests.parallel.low_bandwidth.updates import swap
from tests.parity.pool import Pool


def parameters() -> list[nn.Parameter]:
    frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    return [nn.Parameter(torch.randn(2, 3).t()), frozen, nn.Parameter(torch.randn(4).bfloat16())]


def test_flat_weights_read_and_write_trained_parameters() -> None:
    first, frozen, last = given = parameters()
    weights = FlatWeights(given)
    assert (weights.numbers, weights.dtype) == (10, torch.float32)
    assert torch.equal(weights.read(), torch.cat([first.reshape(-1), last.float()]).detach())
    weights.write(torch.arange(10.0))
    assert first.tolist() == [[0, 1], [2, 3], [4, 5]] and last.tolist() == [6, 7, 8, 9]
    assert frozen.tolist() == [1] * 5


def test_used_weights_are_restored_bit_for_bit_after_an_error() -> None:
    weights = FlatWeights(parameters())
    before = weights.read()
    with pytest.raises(KeyError), weights.use(torch.zeros(10)):
        assert not weights.read().any()
        raise KeyError
    assert torch.equal(weights.read(), before)


def test_flat_weights_keep_doubles_and_allow_no_parameters() -> None:
    assert FlatWeights([nn.Parameter(torch.zeros(1).double())]).dtype == torch.float64
    nothing = FlatWeights([])
    assert nothing.read().numel() == nothing.numbers == 0
    nothing.write(nothing.zeros())
    assert distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])) == 5


@pytest.mark.parametrize("numbers", [1, 3 * 2**20 + 5])
def test_peers_send_and_receive_at_once(workers: Pool, numbers: int) -> None:
    assert workers.run(2, swap, numbers) == [True, True]


def test_background_task_returns_or_raises_its_result() -> None:
    def fail() -> None:
        raise KeyError("lost")

    assert run_in_background(lambda: 3).result() == 3
    failed = run_in_background(fail)
    with pytest.raises(KeyError, match="lost"):
        failed.result()
    assert failed.done()
