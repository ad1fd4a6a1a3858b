"""Layers around experts that are elsewhere are compiled, and compute what they compute uncompiled."""

from __future__ import annotations

import pytest

from tests.parallel.expert import compiled
from tests.parity.pool import Pool


@pytest.mark.parametrize(
    ("family", "kind", "ep", "recompute", "ranks"),
    [
        ("mixtral", "fsdp2", 2, True, 2),
        ("mixtral", "ddp", 2, False, 2),
    ],
)
def test_compiled_layers_compute_the_same(
    workers: Pool, family: str, kind: str, ep: int, recompute: bool, ranks: int
) -> None:
    for found in workers.run(ranks, compiled.compare, family, kind, ep, recompute, "aot_eager_decomp_partition"):
        assert found["off"] < 1e-5, found
        # Layers share their graphs, of which the second kind is for any length.
        assert found["graphs"] >= 4 and found["breaks"] and found["variants"] <= 2, found
