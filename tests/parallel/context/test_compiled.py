"""Layers that are compiled under context parallelism train as one process does that compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.parallel.context.compiled import Run, Setup, train, train_each, train_encoder
from tests.parity.pool import Pool

SETUPS = {
    "ring_attn, inductor": Setup(distribution="zigzag", backend="inductor"),
    "all_to_all": Setup(mode="all_to_all", distribution="uniform"),
    "a mode of a user's own": Setup(mode="plain_python"),
    "documents, part of the activations": Setup(images=False, distribution="auto", activation_budget=0.3),
    "gather, fsdp2, recomputed": Setup(mode="gather", fsdp=True, recompute=True),
    "gather, windows, softcap": Setup(model="gemma2", mode="gather", distribution="makespan_min"),
    "ring_attn, one matrix for query, key and value": Setup(model="gpt2"),
}


TWO_AXES = {"tp 2 x cp 2, sequence": Setup(tp=2, tp_sequence=True)}
COUNTS = (3, 1, 4, 2)


@pytest.fixture(scope="module")
def runs(workers: Pool) -> Iterator[dict[str, list[Run]]]:
    """Return by name what each rank came to; one job, because processes that compile are slow to start."""
    workers.renew()
    found: dict[str, list[Run]] = {}
    for ranks, setups in ((2, SETUPS), (4, TWO_AXES)):
        by_rank = workers.run(ranks, train_each, list(setups.values()), seconds=900.0)
        found |= {name: [one[place] for one in by_rank] for place, name in enumerate(setups)}
    yield found
    workers.renew()


def assert_equal(found: Run, expected: Run) -> None:
    """Losses, every gradient of each step and the parameters after the last are the same, up to rounding."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for step, right in zip(found.gradients, expected.gradients, strict=True):
        assert step.keys() == right.keys()
        largest = max(float(value.abs().max()) for value in right.values() if value is not None)
        for name, value in right.items():
            assert (step[name] is None) == (value is None), name
            torch.testing.assert_close(step[name], value, rtol=1e-4, atol=1e-6 * largest, msg=lambda t, n=name: n + t)
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [*SETUPS, *TWO_AXES])
def test_compiled_layers_train_as_one_process_does(name: str, runs: dict[str, list[Run]]) -> None:
    setup = (SETUPS | TWO_AXES)[name]
    expected = train(setup, is_whole=True)
    for found in runs[name]:
        assert_equal(found, expected)
        # Whole (`fullgraph`), for the first length and for any; of gemma2 there are two kinds of layers.
        assert found.breaks == 0 and 1 <= found.variants <= (4 if setup.model == "gemma2" else 3)
        assert found.held == 0  # what attention keeps for the backward pass is gone with it


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("divides_patches", [False, True])
def test_encoders_compile_over_whole_items(divides_patches: bool, recompute: bool, workers: Pool) -> None:
    expected = train_encoder(COUNTS, is_whole=True)
    for found in workers.run(2, train_encoder, COUNTS, False, divides_patches, recompute):
        assert_equal(found, expected)
        assert found.breaks == 0
        assert found.variants == 0 if divides_patches else 1 <= found.variants <= 3
