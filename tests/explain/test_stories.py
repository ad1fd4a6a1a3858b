"""Explanations: what is carried out has the right result, and bytes counted step by step are the formula's."""

from __future__ import annotations

import pytest

from cornstarch.errors import ConfigError
from cornstarch.explain import TOPICS, Story, explain
from cornstarch.explain.collectives import RingSimulation, build_example
from cornstarch.explain.data_parallel import ShardedModel
from cornstarch.explain.pipeline_schedules import POLICY_OF, VIRTUAL, compute_bubble
from cornstarch.explain.sharded_layers import (
    HEAD_WIDTH,
    HEADS_PER_RANK,
    FeedForward,
    build_ring,
    build_ulysses,
    distribute_tokens,
    exchange_pieces,
    sum_vectors,
)
from cornstarch.plan import DataPlan
from cornstarch.plan.communication import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes
from cornstarch.plan.memory import textbook
from cornstarch.plan.simulate import simulate
from cornstarch.schedule import Kind, StageGraph, make_schedule

RANKS = [2, 3, 4, 5, 8]


@pytest.mark.parametrize("topic", TOPICS)
def test_every_story_is_complete(topic: str) -> None:
    story = explain(topic)
    assert story.topic == topic and len(story.steps) >= 4 and story.formulas
    ranks = len(story.steps[0].rows)
    assert ranks == TOPICS[topic].sizes["ranks"]
    for step in story.steps:
        assert len(step.rows) == ranks and len(step.sent) in (0, ranks)
        assert step.title and step.description.endswith(".") and step.description[0].isupper()
        for row in step.rows:
            boxes = sorted(row.boxes, key=lambda box: box.start)
            assert all(box.start < box.end for box in boxes)
            assert all(one.end <= following.start for one, following in zip(boxes, boxes[1:], strict=False))
    assert any(step.sent for step in story.steps)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("topic", TOPICS)
def test_counted_values_equal_the_formulas(topic: str, ranks: int) -> None:
    sizes = {"parameters": 64 * ranks * ranks} if "parameters" in TOPICS[topic].sizes else {}
    story = explain(topic, ranks=ranks, **sizes)
    for formula in story.formulas:
        assert formula.counted.partition(" (")[0] == formula.result, formula


# ------------------------------------------------------------------------------------------------ collectives


def results(story: Story) -> list[list[str]]:
    return [[box.text for box in row.boxes] for row in story.steps[-1].rows]


@pytest.mark.parametrize("ranks", RANKS)
def test_ring_reduces_and_gathers(ranks: int) -> None:
    lists = build_example(ranks, 2 * ranks)
    sums = [[sum(own[chunk][at] for own in lists) for at in range(2)] for chunk in range(ranks)]
    ring = RingSimulation([[*own] for own in lists])
    sent = [0] * ranks
    for number in range(ranks - 1):
        for message in ring.reduce_round(number):
            sent[message.source] += message.bytes
    assert sent == [reduce_scatter_bytes(8 * ranks, ranks)] * ranks
    for rank in range(ranks):  # one finished chunk each, and nothing else
        assert [chunk for chunk in range(ranks) if ring.chunks[rank][chunk] is not None] == [(rank + 1) % ranks]
        assert ring.chunks[rank][(rank + 1) % ranks] == sums[(rank + 1) % ranks]
    for number in range(ranks - 1):
        for message in ring.gather_round(number, first=1):
            sent[message.source] += message.bytes
    assert ring.chunks == [sums] * ranks
    assert sent == [all_reduce_bytes(8 * ranks, ranks)] * ranks


def test_boxes_show_the_numbers_of_the_ring() -> None:
    assert results(explain("allreduce")) == [["1111 2222", "3333 4444", "5555 6666", "7777 8888"]] * 4
    assert results(explain("allgather")) == [["1 2", "30 40", "500 600", "7000 8000"]] * 4
    reduced = results(explain("reducescatter"))
    assert reduced == [["", "3333 4444", "", ""], ["", "", "5555 6666", ""], ["", "", "", "7777 8888"],
                       ["1111 2222", "", "", ""]]  # fmt: skip


@pytest.mark.parametrize(
    ("topic", "formula"),
    [("allreduce", all_reduce_bytes), ("allgather", all_gather_bytes), ("reducescatter", reduce_scatter_bytes)],
)
def test_bytes_of_collectives_equal_the_planner_s(topic: str, formula) -> None:
    for ranks, elements in ((2, 2), (3, 12), (4, 4096), (8, 64)):
        story = explain(topic, ranks=ranks, elements=elements)
        assert story.sent == (formula(4 * elements, ranks),) * ranks
        for step in story.steps:
            assert all(abs(arrow.target - arrow.source) in (1, ranks - 1) for arrow in step.arrows)


# ------------------------------------------------------------------------------------------------ shares


KINDS = ["ddp", "zero1", "zero2", "zero3", "fsdp2"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_state_equal_the_planner_s(kind: str, ranks: int) -> None:
    for parameters in (ranks * ranks * 100, 1009):  # evenly, and with padding
        model = ShardedModel(DataPlan(kind), parameters, ranks)  # type: ignore[arg-type]
        start = model.build_resting_state()
        after = start.replace(gradients="whole" if kind in ("ddp", "zero1") else "slice")
        for rank in range(ranks):
            memory = model.memory(rank)
            assert model.count_bytes(rank, after) == memory.persistent
            assert model.count_bytes(rank, start) == memory.persistent - memory.gradients


def test_memory_equals_the_textbook_s() -> None:
    shares = textbook(400, 4, weight=4, gradient=4, states=8)
    for topic, kind in (("ddp", "ddp"), ("zero1", "zero1"), ("zero3", "zero3"), ("fsdp", "zero3")):
        held = explain(topic, ranks=4, parameters=400).formulas[1]
        assert held.result == held.counted == f"{shares[kind]:,.0f} B", topic


@pytest.mark.parametrize(("topic", "passes"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("fsdp", 3)])
def test_bytes_of_data_parallelism_equal_the_formula(topic: str, passes: int) -> None:
    story = explain(topic, ranks=4, parameters=1000)
    assert story.sent == pytest.approx((passes * 3 / 4 * 4000,) * 4)


def test_new_boxes_of_a_step_are_marked() -> None:
    """Layers come one by one, and what is freed is nothing new."""
    brought = [{box.tooltip for row in step.rows for box in row.boxes if box.fresh} for step in explain("fsdp").steps]
    own = "from this rank's samples only"
    assert brought[:2] == [set(), {"parameters of layer 0: whole for a moment"}]
    assert brought[5] == set()
    assert brought[6] == {"parameters of layer 3: whole for a moment", "gradients of layer 3: " + own}
    assert brought[7] == {"gradients of layer 3: this rank's slice"}
    assert brought[8] == {"parameters of layer 2: whole for a moment", "gradients of layer 2: " + own}
    assert brought[-1] == set()


# ------------------------------------------------------------------------------------------------ tensor, context


@pytest.mark.parametrize(("hidden", "ranks"), [(4, 2), (8, 4), (6, 3), (16, 8)])
def test_sharded_layer_computes_the_same(hidden: int, ranks: int) -> None:
    whole = FeedForward.build_example(hidden)
    shards = whole.split(ranks)
    x, ones = [1, 2], [1, 1]
    assert sum((shard.compute_hidden(x) for shard in shards), []) == whole.compute_hidden(x)
    assert 0 in whole.compute_hidden(x) and any(whole.compute_hidden(x))  # the relu has something to do
    assert sum_vectors([shard.compute_output(x) for shard in shards]) == whole.compute_output(x)
    assert sum_vectors([shard.compute_input_gradient(x, ones) for shard in shards]) == whole.compute_input_gradient(
        x, ones
    )
    by_difference = [sum(whole.compute_output([1001, 2002])) - sum(whole.compute_output([1000, 2000]))]
    assert by_difference[0] == sum(g * d for g, d in zip(whole.compute_input_gradient(x, ones), [1, 2], strict=True))


def test_bytes_of_tensor_parallelism_equal_the_formula() -> None:
    story = explain("tp", ranks=4, elements=8)
    assert story.sent == (2 * all_reduce_bytes(8, 4),) * 4  # two numbers of four bytes, forth and back
    assert [step.title for step in story.steps if step.sent] == ["All-reduce", "All-reduce of the gradient"]


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_all_to_all_exchanges_tokens_for_heads_and_back(ranks: int) -> None:
    before = [[(rank, head) for head in range(ranks)] for rank in range(ranks)]
    turned, sent = exchange_pieces(before, ranks, by_heads=True)
    assert turned == [[(share, rank) for share in range(ranks)] for rank in range(ranks)]
    assert [len(own) for own in sent] == [ranks - 1] * ranks
    assert exchange_pieces(turned, ranks, by_heads=False)[0] == before
    size = 3 * (HEADS_PER_RANK * ranks) * HEAD_WIDTH * 4  # three tokens of each rank
    assert build_ulysses(ranks, 3 * ranks).sent == (4 * all_to_all_bytes(size, ranks),) * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_attention_covers_every_visible_pair(ranks: int) -> None:
    tokens = 4 * ranks
    story = build_ring(ranks, tokens)
    found = distribute_tokens(tokens, ranks, "zigzag")
    for rank in range(ranks):
        met = [step.rows[rank].boxes[1].tooltip for step in story.steps[:ranks]]
        assert len({*met}) == ranks  # the keys of everybody, once
        assert story.steps[ranks - 1].rows[rank].boxes[3].text == f"{found.loads[rank]:g} so far"
    assert sum(found.loads) == tokens * (tokens + 1) / 2
    block = 2 * 4 * HEADS_PER_RANK * ranks * HEAD_WIDTH * 4
    assert story.sent == ((ranks - 1) * block + (2 * ranks - 1) * block,) * ranks


# ------------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize(("places", "microbatches"), [(2, 2), (2, 6), (4, 4), (4, 8), (3, 3)])
@pytest.mark.parametrize("topic", POLICY_OF)
def test_last_step_is_the_simulated_schedule(topic: str, places: int, microbatches: int) -> None:
    story = explain(topic, ranks=places, microbatches=microbatches, elements=10)
    graph = StageGraph.chain(places, virtual_stages=VIRTUAL if topic == "interleaved" else 1)
    schedule = make_schedule(graph, microbatches, POLICY_OF[topic])
    timeline = simulate(schedule)
    assert timeline.bubble == pytest.approx(compute_bubble(topic, places, microbatches))
    drawn = [[(box.start, box.end) for box in row.boxes] for row in story.steps[-1].rows]
    assert drawn == [[(event.start, event.end) for event in own] for own in timeline.events]
    counts = [sum(len(row.boxes) for row in step.rows) for step in story.steps]
    fresh = [sum(box.fresh for row in step.rows for box in row.boxes) for step in story.steps]
    assert all(fresh[:-1]) and counts[:-1] == [sum(fresh[: at + 1]) for at in range(len(fresh) - 1)]
    sends = [
        40 * sum(action.kind in (Kind.SEND_F, Kind.SEND_B) for action in own)
        for own in schedule.with_transfers().actions
    ]
    assert story.sent == tuple(sends)


def test_text_says_why_a_rank_waits() -> None:
    steps = explain("gpipe", ranks=2, microbatches=1).steps
    assert steps[0].description.startswith("Rank 0 begins the forward of microbatch 0. Rank 1 waits:")
    assert "needs the output of stage 0" in steps[0].description
    assert (
        "Rank 0 waits: rank 0's next action, the backward of microbatch 0, needs the gradient" in steps[1].description
    )
    assert "Rank 1 has nothing left to do" in steps[3].description


def test_zero_bubble_says_where_its_formula_ends() -> None:
    bubble = explain("zero-bubble", ranks=4, microbatches=2).formulas[0]
    assert "M ≥ K" in bubble.result and bubble.counted.endswith("%")


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("topic", "options", "said"),
    [
        ("all_reduse", {}, "Did you mean allreduce"),
        ("gpip", {}, "Did you mean gpipe"),
        ("nothing like it", {}, "Topics: allreduce, allgather"),
        ("allreduce", {"elements": 10}, "Use 8 or 12"),
        ("allreduce", {"ranks": 1}, "expected 2 to 8"),
        ("allreduce", {"parameters": 100}, "allreduce has no parameters. It takes --ranks, --elements."),
        ("1f1b", {"microbatches": 0}, "expected 1 to 32"),
        ("1f1b", {"ranks": 8, "microbatches": 9}, "Use 8 or fewer"),
        ("tp", {"elements": 5}, "Use 4 or 6"),
        ("ring", {"elements": 12}, "Use 8 or 16"),
        ("interleaved", {"ranks": 4, "microbatches": 6}, "Use 4 or 8 microbatches"),
        ("zero3", {"parameters": 3}, "expected 64 to"),
    ],
)
def test_wrong_options_raise_config_error_with_advice(topic: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        explain(topic, **options)


@pytest.mark.parametrize(("written", "meant"), [("All-Reduce", "allreduce"), ("zero_bubble", "zero-bubble")])
def test_topic_names_may_be_spelled_differently(written: str, meant: str) -> None:
    assert explain(written).topic == meant
