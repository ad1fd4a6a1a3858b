"""Plans for slow networks: options, conflicts, memory; and the predicted step of each way to synchronize."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from cornstarch.errors import ConfigError
from cornstarch.parallel.low_bandwidth import weight_averaging as graphs
from cornstarch.plan import (
    Asynchronous,
    Compression,
    DataPlan,
    Gossip,
    Layout,
    Local,
    ModelSize,
    Plan,
    memory_of,
    unexecutable,
)
from cornstarch.plan.communication import LINKS, Link, all_reduce_bytes
from cornstarch.plan.low_bandwidth_cost import (
    NEAR,
    SMALLEST_BUCKET,
    StepTime,
    SyncedParameters,
    SyncOption,
    choose_bucket_bytes,
    compare_sync_options,
    count_neighbours,
    count_sent_per_step,
    parse_network_link,
    recommend,
)
from cornstarch.plan.memory import ParameterSize, StateSize

TOPK = {"kind": "topk", "ratio": 0.05}

GOOD: list[dict[str, Any]] = [
    {"compression": TOPK},
    {"kind": "zero1", "compression": {"kind": "quantize", "bits": 1, "block": 256, "warmup": 10}},
    {"kind": "hsdp", "replicate": 2, "compression": {"kind": "randomk", "seed": 4, "error_feedback": False}},
    {"compression": {"kind": "powersgd", "rank": 8}},
    {"kind": "local_sgd", "local": {"every": 4}, "compression": {"kind": "bf16"}},
    {"kind": "diloco", "local": {"outer_learning_rate": 1.0, "outer_momentum": 0.5, "overlap": True}},
    {"kind": "async", "asynchronous": {"staleness": 0, "scale_learning_rate": False}},
    {"kind": "gossip", "gossip": {"graph": "random_pairs", "wait": False, "seed": 7}},
]


@pytest.mark.parametrize("options", GOOD)
def test_a_plan_survives_a_round_trip_through_data(options: dict[str, Any]) -> None:
    plan = Plan.from_data({"data": options})
    assert Plan.from_data(plan.as_data()) == plan
    assert DataPlan(**options) == plan.data
    assert hash(plan.data) == hash(DataPlan(**options))


def test_sections_built_in_python_equal_those_from_data() -> None:
    plan = DataPlan("diloco", local=Local(every=4), compression=Compression("quantize", bits=4))
    assert plan == Plan.from_data({"data": {"kind": "diloco", "local": {"every": 4}, "compression": {
        "kind": "quantize", "bits": 4}}}).data  # fmt: skip
    assert plan.describe() == "diloco, compression quantize (bits 4), local every 4"
    assert DataPlan("gossip", gossip=Gossip("torus")).describe() == "gossip, gossip torus"
    assert DataPlan("async", asynchronous=Asynchronous(2)).describe() == "async, asynchronous staleness 2"


WRONG = [
    ({"compression": {"kind": "top_k"}}, "data.compression.kind = top_k", "Did you mean `topk`?"),
    ({"compression": {"kind": "topk", "ratoi": 0.1}}, "data.compression.ratoi = 0.1", "Did you mean `ratio`?"),
    ({"compression": "topk"}, "data.compression = topk", "Expected a mapping with some of these keys: kind, ratio"),
    ({"compression": {"kind": "topk", "ratio": 0}}, "data.compression.ratio = 0", "a fraction above 0, at most 1"),
    ({"compression": {"kind": "topk", "ratio": 1.5}}, "data.compression.ratio = 1.5", "0.01 for 1 %"),
    ({"compression": {"kind": "topk", "block": 100}}, "data.compression.block = 100", "a multiple of 8"),
    ({"compression": {"kind": "topk", "block": 2**17}}, "data.compression.block = 131072", "at most 65,536"),
    ({"compression": {"kind": "quantize", "bits": 2}}, "data.compression.bits = 2", "Expected 8, 4 or 1."),
    ({"compression": {"kind": "quantize", "ratio": 0.1}}, "data.compression.ratio", "It goes with topk or randomk"),
    ({"compression": {"warmup": 3}}, "data.compression.warmup = 3", "the kind of compression is none"),
    ({"kind": "gossip", "gossip": {"graph": "start"}}, "data.gossip.graph = start", "Expected ring, torus"),
    ({"kind": "local_sgd", "local": {"every": 0}}, "data.local.every = 0", "a whole number of at least 1"),
    # what cannot be combined
    ({"kind": "zero3", "compression": TOPK}, "data.compression", "zero3 has no place for it: FSDP adds up shards"),
    ({"kind": "fsdp1", "compression": TOPK}, "data.compression", "or hsdp, which compresses"),
    ({"kind": "gossip", "compression": TOPK}, "data.compression", "gossip sends whole weights"),
    ({"kind": "async", "compression": TOPK}, "data.compression", "local_sgd or diloco"),
    ({"kind": "hsdp", "compression": {"kind": "powersgd"}}, "data.compression", "factors of whole matrices"),
    ({"kind": "diloco", "compression": {"kind": "powersgd"}}, "data.compression", "diloco does not exchange"),
    ({"compression": TOPK, "static_graph": True}, "data.static_graph = true", "buckets must stay as they are"),
    ({"compression": TOPK, "find_unused": False}, "data.find_unused = false", "buckets must stay as they are"),
    ({"local": {"every": 3}}, "data.local", "It goes with the kind local_sgd or diloco; the kind is ddp"),
    ({"kind": "local_sgd", "local": {"outer_momentum": 0.5}}, "data.local", "has no outer optimizer"),
    ({"kind": "local_sgd", "local": {"overlap": True}}, "data.local", "so it waits for it"),
    ({"asynchronous": {"staleness": 3}}, "data.asynchronous", "It goes with the kind async"),
    ({"kind": "async", "gossip": {"graph": "torus"}}, "data.gossip", "It goes with the kind gossip"),
    ({"kind": "gossip", "bucket_mb": 3}, "data.bucket_mb = 3", "gossip exchanges no gradients"),
    ({"kind": "async", "static_graph": True}, "data.static_graph = true", "nothing in a backward pass"),
    ({"kind": "diloco", "offload": True}, "data.offload = true", "diloco keeps whole parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "named", "said"), WRONG)
def test_a_mistake_is_reported_with_its_path(options: dict[str, Any], named: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.from_data({"data": options})
    message = str(caught.value)
    assert message.startswith(named) and said in message
    assert "mistakes" not in message  # and nothing else is reported
    with pytest.raises(ConfigError):
        DataPlan(**options)


@pytest.mark.parametrize(
    ("data", "module", "reason"),
    [
        ({"kind": "gossip"}, {"tp": 2}, "the plan has tp 2"),
        ({"kind": "diloco"}, {"cp": 2}, "the plan has cp 2"),
        ({"kind": "async"}, {"stages": 2}, "the plan has a pipeline"),
        ({"compression": TOPK}, {"stages": 2}, "the stages of a pipeline exchange gradients whole"),
        ({"compression": TOPK}, {"tp": 2}, "with tp the ranks exchange shards of gradients"),
    ],
)
def test_unsynchronized_kinds_refuse_model_parallelism(data: Any, module: Any, reason: str) -> None:
    plan = Plan.from_data({"modules": {"model": module}, "data": data})
    assert any(reason in one for one in unexecutable(plan))


def test_valid_options_are_executable() -> None:
    for options in GOOD:
        assert not unexecutable(Plan.from_data({"data": options}))
    both = Plan.from_data({"modules": {"model": {"cp": 2}}, "data": {"compression": TOPK}})
    assert not unexecutable(both)


@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "async", "gossip"])
def test_unsynchronized_replicas_are_whole(kind: Any) -> None:
    layout = Layout.of(Plan(data=DataPlan(kind)), 4)
    assert (layout.dp, layout.data_shape("model")) == (4, (4, 1))


def test_low_bandwidth_state_counts_as_memory() -> None:
    parameters = (ParameterSize((10, 10), 4, True), ParameterSize((50,), 4, False))
    size = ModelSize(parameters, states={(4, True): StateSize(8)})
    plain = memory_of(size, DataPlan(), 2)
    assert plain.exchanged == 0
    remembered = memory_of(size, DataPlan(compression=Compression("topk")), 2)
    assert remembered.exchanged == 400 and remembered.peak() == plain.peak() + 400
    assert memory_of(size, DataPlan(compression=Compression("topk", error_feedback=False)), 2).exchanged == 0
    assert memory_of(size, DataPlan("diloco"), 2).exchanged == 800  # the weights that all had last, and the momentum
    assert memory_of(size, DataPlan("gossip"), 2).persistent == memory_of(size, DataPlan(), 1).persistent


# ---------------------------------------------------------------------------------------------------- step times

MODEL = SyncedParameters(((1024, 4096), (4096,), (4096, 1024)), 4)
STEP = StepTime(0.01, 0.02, 0.002)
MEMORY = 1e12


@pytest.mark.parametrize(
    ("text", "rate"), [("1Gbit", 125e6), ("100 Mbit/s", 12.5e6), ("100mbit", 12.5e6), ("12.5 MB/s", 12.5e6)]
)
def test_parse_network_link_reads_rates(text: str, rate: float) -> None:
    assert parse_network_link(text, 0.001) == Link(rate, 0.001)


@pytest.mark.parametrize("text", ["", "fast", "0Gbit", "-1Gbit", "1 Gbits", "5 ms"])
def test_parse_network_link_refuses_other_texts(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 100Mbit, 1Gbit"):
        parse_network_link(text)


def test_sent_bytes_of_every_kind() -> None:
    size = MODEL.size
    assert count_sent_per_step(DataPlan(), MODEL, 4) == all_reduce_bytes(size, 4)
    assert (
        count_sent_per_step(DataPlan(kind="local_sgd", local=Local(every=8)), MODEL, 4) == all_reduce_bytes(size, 4) / 8
    )
    half = DataPlan(compression=Compression("bf16"))
    assert count_sent_per_step(half, MODEL, 2) == size / 2
    assert count_sent_per_step(DataPlan(kind="gossip"), MODEL, 4) == 2 * size
    assert count_sent_per_step(DataPlan(kind="async"), MODEL, 4) == 3 * size
    in_step = DataPlan(kind="async", asynchronous=Asynchronous(staleness=0))
    assert count_sent_per_step(in_step, MODEL, 4) == all_reduce_bytes(size, 4)
    thin = DataPlan(compression=Compression("powersgd", rank=2))
    assert count_sent_per_step(thin, MODEL, 2) == 4 * (2 * 2 * (1024 + 4096) + 4096)
    assert all(count_sent_per_step(plan, MODEL, 1) == 0 for plan in (DataPlan(), half, DataPlan(kind="gossip")))


@pytest.mark.parametrize("ranks", range(2, 18))
@pytest.mark.parametrize("graph", ["ring", "torus", "exponential", "random_pairs"])
def test_neighbours_equal_those_of_the_graph(graph: graphs.Graph, ranks: int) -> None:
    steps = range(1, 1 + max(1, (ranks - 1).bit_length()))  # all distances of the exponential graph
    counted = mean(len(graphs.find_neighbours(graph, rank, ranks, step)) for rank in range(ranks) for step in steps)
    assert count_neighbours(Gossip(graph=graph), ranks) == pytest.approx(counted)


def found(link: Link, ranks: int = 4) -> dict[str, SyncOption]:
    return {one.label: one for one in compare_sync_options(MODEL, STEP, ranks, link, MEMORY)}


def test_a_slow_step_is_bound_by_communication() -> None:
    slow = found(Link(12.5e6, 0.0))
    plain = slow["ddp"]
    assert plain.exchange == pytest.approx(plain.sent / 12.5e6)
    assert plain.seconds == pytest.approx(STEP.forward + plain.exchange + STEP.optimizer)  # backward is hidden in it
    local = slow["local_sgd, every 16"]
    assert local.seconds == pytest.approx(STEP.seconds + plain.exchange / 16)
    hidden = slow["diloco, overlapped, 8 bits"]
    assert hidden.seconds == pytest.approx(max(STEP.seconds + hidden.compress, hidden.exchange))
    assert slow["ddp, bf16"].seconds < plain.seconds and slow["gossip, ring"].seconds > plain.seconds


def test_a_fast_network_needs_only_ddp() -> None:
    ways = compare_sync_options(MODEL, STEP, 4, Link(450e9, 3e-6), MEMORY)
    assert recommend(ways).label == "ddp"


def test_recommend_chooses_the_mildest_fast_option() -> None:
    for rate in (1e6, 12.5e6, 125e6, 1e9, 1e10):
        ways = compare_sync_options(MODEL, STEP, 4, Link(rate, 1e-4), MEMORY)
        best = recommend(ways)
        quickest = min(one.seconds for one in ways)
        assert best.seconds <= NEAR * quickest
        assert all(one.seconds > NEAR * quickest for one in ways[: ways.index(best)])
    assert recommend(compare_sync_options(MODEL, STEP, 4, Link(1e6, 1e-4), MEMORY)).label != "ddp"


def test_buckets_grow_with_latency() -> None:
    size = 10**9
    slow, quick = (
        choose_bucket_bytes(parse_network_link("1Gbit"), 2, size),
        choose_bucket_bytes(LINKS["NVLink 4"], 8, size),
    )
    assert SMALLEST_BUCKET < slow < 2**20 < 25 * 2**20 < quick
    link = parse_network_link("1Gbit")
    rounds, bucket = 2 * (4 - 1), choose_bucket_bytes(link, 4, size)
    waited = rounds * link.latency
    assert waited / (waited + all_reduce_bytes(bucket, 4) / link.bandwidth) == pytest.approx(0.1, rel=1e-3)
    assert choose_bucket_bytes(Link(1e9, 1.0), 8, 4 * 2**20) == 2**20  # a quarter of all, at most
    assert choose_bucket_bytes(Link(1e9, 0.0), 8, size) == SMALLEST_BUCKET
