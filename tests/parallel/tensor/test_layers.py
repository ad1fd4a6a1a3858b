"""Layers for models made by hand, and the exchanges beneath them."""

from __future__ import annotations

import pytest
import torch

from cornstarch.errors import ConfigError
from cornstarch.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from tests.parallel.tensor.work import by_hand, collect_refused_layers, collect_refused_models, exchanges
from tests.parity.pool import Pool


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_parallel_linear_layers_match_nn_linear(workers: Pool, ranks: int, apart: bool) -> None:
    """A column and a row make what the same two layers make whole; apart, each gives and takes whole activations."""
    for found in workers.run(ranks, by_hand, apart):
        for name, (value, expected) in found.items():
            torch.testing.assert_close(value, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_collectives_and_their_gradients(workers: Pool) -> None:
    counts = workers.run(2, exchanges)
    # Llama, 2 layers: attention and feed-forward each add up once forward, and once backward for all they read.
    assert counts == [{"forward": 4, "backward": 4}] * 2


def test_sizes_that_do_not_divide_are_refused(workers: Pool) -> None:
    for messages in workers.run(2, collect_refused_layers):
        assert messages == [
            "7 outputs cannot be cut evenly over 2 ranks.",
            "7 inputs cannot be cut evenly over 2 ranks.",
        ]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_layer_without_mesh_is_refused(kind: type[ColumnParallelLinear]) -> None:
    said = rf"{kind.__name__}: mesh = 2; expected a DeviceMesh of one axis"
    with pytest.raises(ConfigError, match=said):
        kind(8, 12, 2, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        kind.from_linear(torch.nn.Linear(8, 12), 2)  # type: ignore[arg-type]


def test_unshardable_models_are_refused(workers: Pool) -> None:
    for twice, axes in workers.run(2, collect_refused_models):
        assert "is cut over ranks already" in twice
        assert "one axis, found 2: give mesh['tp']" in axes
