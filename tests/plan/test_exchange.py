"""Plans for slow networks: what can be said, what cannot be combined, and what is kept for it."""

from __future__ import annotations

from typing import Any

import pytest

from cornstarch.errors import ConfigError
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
def test_a_plan_survives_becoming_data(options: dict[str, Any]) -> None:
    plan = Plan.from_data({"data": options})
    assert Plan.from_data(plan.as_data()) == plan
    assert DataPlan(**options) == plan.data
    assert hash(plan.data) == hash(DataPlan(**options))


def test_sections_may_be_made_in_python() -> None:
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
    ({"compression": {"kind": "topk", "ratio": 0}}, "data.compression.ratio = 0", "a share above 0, at most 1"),
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
def test_a_mistake_is_told_with_its_place(options: dict[str, Any], named: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.from_data({"data": options})
    message = str(caught.value)
    assert message.startswith(named) and said in message
    assert "mistakes" not in message  # and nothing else is told
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
def test_what_a_rank_that_is_not_a_whole_model_cannot_do(data: Any, module: Any, reason: str) -> None:
    plan = Plan.from_data({"modules": {"model": module}, "data": data})
    assert any(reason in one for one in unexecutable(plan))


def test_what_can_be_run() -> None:
    for options in GOOD:
        assert not unexecutable(Plan.from_data({"data": options}))
    both = Plan.from_data({"modules": {"model": {"cp": 2}}, "data": {"compression": TOPK}})
    assert not unexecutable(both)


@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "async", "gossip"])
def test_replicas_that_are_apart_are_whole(kind: Any) -> None:
    layout = Layout.of(Plan(data=DataPlan(kind)), 4)
    assert (layout.dp, layout.data_shape("model")) == (4, (4, 1))


def test_what_exchanges_keep_counts_as_memory() -> None:
    parameters = (ParameterSize((10, 10), 4, True), ParameterSize((50,), 4, False))
    size = ModelSize(parameters, states={(4, True): StateSize(8)})
    plain = memory_of(size, DataPlan(), 2)
    assert plain.exchanged == 0
    remembered = memory_of(size, DataPlan(compression=Compression("topk")), 2)
    assert remembered.exchanged == 400 and remembered.peak() == plain.peak() + 400
    assert memory_of(size, DataPlan(compression=Compression("topk", error_feedback=False)), 2).exchanged == 0
    assert memory_of(size, DataPlan("diloco"), 2).exchanged == 800  # the weights that all had last, and the momentum
    assert memory_of(size, DataPlan("gossip"), 2).held == memory_of(size, DataPlan(), 1).held
