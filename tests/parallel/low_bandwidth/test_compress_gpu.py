"""On a GPU, where a stream of its own encodes and sends: the same as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cornstarch.plan import Compression
from tests.parallel.low_bandwidth.compressing import interrupted, train_run
from tests.parallel.low_bandwidth.test_compress import CHANCE, HOWS, RESUMED, train_alone
from tests.parity.pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Pool]:
    """Return processes that share a GPU."""
    pool = Pool("cuda")
    yield pool
    pool.close()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "topk", "8 bits", "4 bits", "signs"])
def test_compressed_ddp_follows_the_formula(on_gpu: Pool, name: str, ranks: int) -> None:
    found = on_gpu.run(ranks, train_run, {"compression": HOWS[name]}, 4, 1, None, False, "cuda")
    expected = train_alone(Compression(**HOWS[name]), ranks, list(found[0]["own"]["exchange"]["memory"]))
    for one in found:
        for key, value in expected.items():
            torch.testing.assert_close(one["weights"][key], value, rtol=1e-3, atol=1e-3, msg=key)
            assert torch.equal(one["weights"][key], found[0]["weights"][key])


@pytest.mark.parametrize("plan", [RESUMED["randomk"], RESUMED["hsdp"], (2, {"compression": CHANCE["8 bits"]})])
def test_resume_is_bit_equal(on_gpu: Pool, plan: tuple[int, dict[str, Any]]) -> None:
    ranks, options = plan
    for one in on_gpu.run(ranks, interrupted, options, "cuda"):
        for key, weight in one["whole"]["weights"].items():
            assert torch.equal(one["resumed"]["weights"][key], weight), key
