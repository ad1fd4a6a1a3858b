"""What a step takes over a slow network: bytes, seconds, and the way that is worth it."""

from __future__ import annotations

from statistics import mean

import pytest

from cornstarch.errors import ConfigError
from cornstarch.parallel.exchange import graphs
from cornstarch.plan.communication import all_reduce_bytes
from cornstarch.plan.exchange import Asynchronous, Compression, Gossip, Local
from cornstarch.plan.links import LINKS, Link
from cornstarch.plan.network import (
    NEAR,
    SMALLEST_BUCKET,
    Choice,
    Exchanged,
    Step,
    bucket_bytes,
    choices,
    neighbours,
    network_link,
    recommended,
    sent_per_step,
)
from cornstarch.plan.plan import DataPlan

MODEL = Exchanged(((1024, 4096), (4096,), (4096, 1024)), 4)
STEP = Step(0.01, 0.02, 0.002)
MEMORY = 1e12


@pytest.mark.parametrize(
    ("text", "rate"), [("1Gbit", 125e6), ("100 Mbit/s", 12.5e6), ("100mbit", 12.5e6), ("12.5 MB/s", 12.5e6)]
)
def test_a_network_is_named_by_its_rate(text: str, rate: float) -> None:
    assert network_link(text, 0.001) == Link(rate, 0.001)


@pytest.mark.parametrize("text", ["", "fast", "0Gbit", "-1Gbit", "1 Gbits", "5 ms"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 100Mbit, 1Gbit"):
        network_link(text)


def test_bytes_of_every_way() -> None:
    size = MODEL.size
    assert sent_per_step(DataPlan(), MODEL, 4) == all_reduce_bytes(size, 4)
    assert sent_per_step(DataPlan(kind="local_sgd", local=Local(every=8)), MODEL, 4) == all_reduce_bytes(size, 4) / 8
    half = DataPlan(compression=Compression("bf16"))
    assert sent_per_step(half, MODEL, 2) == size / 2
    assert sent_per_step(DataPlan(kind="gossip"), MODEL, 4) == 2 * size
    assert sent_per_step(DataPlan(kind="async"), MODEL, 4) == 3 * size
    in_step = DataPlan(kind="async", asynchronous=Asynchronous(staleness=0))
    assert sent_per_step(in_step, MODEL, 4) == all_reduce_bytes(size, 4)
    thin = DataPlan(compression=Compression("powersgd", rank=2))
    assert sent_per_step(thin, MODEL, 2) == 4 * (2 * 2 * (1024 + 4096) + 4096)
    assert all(sent_per_step(plan, MODEL, 1) == 0 for plan in (DataPlan(), half, DataPlan(kind="gossip")))


@pytest.mark.parametrize("ranks", range(2, 18))
@pytest.mark.parametrize("graph", ["ring", "torus", "exponential", "random_pairs"])
def test_neighbours_are_as_many_as_the_graph_has(graph: graphs.Graph, ranks: int) -> None:
    steps = range(1, 1 + max(1, (ranks - 1).bit_length()))  # all distances of the exponential graph
    counted = mean(len(graphs.neighbours(graph, rank, ranks, step)) for rank in range(ranks) for step in steps)
    assert neighbours(Gossip(graph=graph), ranks) == pytest.approx(counted)


def found(link: Link, ranks: int = 4) -> dict[str, Choice]:
    return {one.label: one for one in choices(MODEL, STEP, ranks, link, MEMORY)}


def test_a_slow_step_is_what_the_wire_takes() -> None:
    slow = found(Link(12.5e6, 0.0))
    plain = slow["ddp"]
    assert plain.exchange == pytest.approx(plain.sent / 12.5e6)
    assert plain.seconds == pytest.approx(STEP.forward + plain.exchange + STEP.optimizer)  # backward is hidden in it
    local = slow["local_sgd, every 16"]
    assert local.seconds == pytest.approx(STEP.seconds + plain.exchange / 16)
    hidden = slow["diloco, overlapped, 8 bits"]
    assert hidden.seconds == pytest.approx(max(STEP.seconds + hidden.compress, hidden.exchange))
    assert slow["ddp, bf16"].seconds < plain.seconds and slow["gossip, ring"].seconds > plain.seconds


def test_a_quick_network_needs_nothing() -> None:
    ways = choices(MODEL, STEP, 4, Link(450e9, 3e-6), MEMORY)
    assert recommended(ways).label == "ddp"


def test_the_mildest_of_the_quick_ones_is_chosen() -> None:
    for rate in (1e6, 12.5e6, 125e6, 1e9, 1e10):
        ways = choices(MODEL, STEP, 4, Link(rate, 1e-4), MEMORY)
        best = recommended(ways)
        quickest = min(one.seconds for one in ways)
        assert best.seconds <= NEAR * quickest
        assert all(one.seconds > NEAR * quickest for one in ways[: ways.index(best)])
    assert recommended(choices(MODEL, STEP, 4, Link(1e6, 1e-4), MEMORY)).label != "ddp"


def test_buckets_are_larger_where_messages_wait_longer() -> None:
    size = 10**9
    slow, quick = bucket_bytes(network_link("1Gbit"), 2, size), bucket_bytes(LINKS["NVLink 4"], 8, size)
    assert SMALLEST_BUCKET < slow < 2**20 < 25 * 2**20 < quick
    link = network_link("1Gbit")
    rounds, share = 2 * (4 - 1), bucket_bytes(link, 4, size)
    waited = rounds * link.latency
    assert waited / (waited + all_reduce_bytes(share, 4) / link.bandwidth) == pytest.approx(0.1, rel=1e-3)
    assert bucket_bytes(Link(1e9, 1.0), 8, 4 * 2**20) == 2**20  # a quarter of all, at most
    assert bucket_bytes(Link(1e9, 0.0), 8, size) == SMALLEST_BUCKET
