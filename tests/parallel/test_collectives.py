"""Layers that are compiled together with their collectives compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.conftest import workers
from tests.parallel.tensor.work import assert_same, train_compiled
from tests.parity.pool import Pool

__all__ = ["workers"]

LENGTHS = (10, 13, 12, 17)
WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "tp 2": ((2,), {}, "inductor"),
    "tp 2 x fsdp 2, sequence": ((2, 2), {"sequence": True}, "aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_train_as_one_process_does(way: str, workers: Pool) -> None:
    shape, how, backend = WAYS[way]
    expected = train_compiled(LENGTHS, (), {}, backend)
    workers.renew()
    for found in workers.run(torch.Size(shape).numel(), train_compiled, LENGTHS, shape, how, backend):
        for one, right in zip(found.outcomes, expected.outcomes, strict=True):
            assert_same(one, right)
        torch.testing.assert_close(found.parameters, expected.parameters, rtol=1e-4, atol=1e-6)
        # One graph for the first length, one for any: all layers share them, whole (`fullgraph`). With sharded tokens
        # four lengths took three graphs.
        assert found.graphs <= (3 if how else 2) and found.breaks == 0
    workers.renew()
