"""Recorded steps: on one clock, beside what their own costs predict, as a trace, and of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cornstarch.config.run_folder import check_trace
from cornstarch.errors import ConfigError
from cornstarch.metrics.timeline import compare_step
from cornstarch.report.timelines import TIMELINE, TRACE, chrome_trace, read_timelines
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule
from tests.parity.pool import pool
from tests.report import fake_timeline
from tests.trainer.test_pipelined_run import STAGES, fit_run, tokenizer  # noqa: F401  (a fixture)

UNIT = 0.01


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 8), (4, 3)])
def test_bubble_of_equal_stages_equals_the_formula(policy: str, stages: int, microbatches: int) -> None:
    schedule = make_schedule(StageGraph.chain(stages), microbatches, policy)
    found = compare_step(schedule, fake_timeline.record_events(schedule))
    expected = (stages - 1) / (microbatches + stages - 1)
    for picture in (found["real"], found["predicted"]):
        assert picture["bubble"] == pytest.approx(expected)
        assert picture["bubbles"] == pytest.approx([expected] * stages)
        assert picture["seconds"] == pytest.approx(3 * UNIT * (microbatches + stages - 1))
        assert picture["transfers"] == pytest.approx([0.0] * stages, abs=1e-6)


@pytest.mark.parametrize("policy", ["naive", "gpipe", "1f1b", "zero_bubble"])
def test_without_transfers_a_step_takes_the_predicted_time(policy: str) -> None:
    graph = StageGraph.branches({"vision": 2, "audio": 1}, 2, trains={"vision": False})
    schedule = make_schedule(graph, 5, policy)
    found = compare_step(schedule, fake_timeline.record_events(schedule))
    assert found["real"]["seconds"] == pytest.approx(found["predicted"]["seconds"])
    for real, predicted in zip(found["real"]["events"], found["predicted"]["events"], strict=True):
        assert [event[:3] for event in real] == [event[:3] for event in predicted]
        assert [event[4] for event in real] == pytest.approx([event[4] for event in predicted], abs=1e-6)


def test_transfer_time_is_separated_from_waiting() -> None:
    """Stage 1 is there from the beginning, stage 0 computes for 10 ms, and what it made takes 4 ms to arrive."""
    schedule = make_schedule(StageGraph.chain(2, trains=False), 1, "gpipe")
    recorded = [
        {"place": 1, "began": 100.0, "events": [["F", 1, 0, 0.0, 0.024, 0.014]]},
        {"place": 0, "began": 100.0, "events": [["F", 0, 0, 0.0, 0.01, 0.0]]},
    ]
    found = compare_step(schedule, recorded)
    assert found["real"]["transfers"] == pytest.approx([0.0, 0.004])
    assert (found["real"]["seconds"], found["predicted"]["seconds"]) == pytest.approx((0.024, 0.02))
    assert found["real"]["bubbles"] == pytest.approx([14 / 24, 14 / 24])


def test_places_with_different_start_times_are_aligned() -> None:
    schedule = make_schedule(StageGraph.chain(2, trains=False), 1, "gpipe")
    recorded = [
        {"place": 0, "began": 100.5, "events": [["F", 0, 0, 0.0, 0.01, 0.0]]},
        {"place": 1, "began": 100.0, "events": [["F", 1, 0, 0.0, 0.53, 0.51]]},
    ]
    found = compare_step(schedule, recorded)
    assert found["began"] == 100.0
    assert found["real"]["seconds"] == pytest.approx(0.53)
    assert found["real"]["events"][0][0][3:5] == pytest.approx([0.5, 0.51])


def test_microbatches_without_work_for_an_encoder_cost_nothing() -> None:
    graph = StageGraph.branches({"vision": 1}, 1, trains={"vision": False, "language_model": False})
    schedule = make_schedule(graph, 2, "gpipe")
    recorded = [
        {"place": 0, "began": 0.0, "events": [["F", 0, 0, 0.0, 0.01, 0.0]]},
        {"place": 1, "began": 0.0, "events": [["F", 1, 0, 0.0, 0.03, 0.01], ["F", 1, 1, 0.03, 0.05, 0.0]]},
    ]
    found = compare_step(schedule, recorded)
    assert found["predicted"]["seconds"] == pytest.approx(0.005 + 0.04)
    assert len(found["real"]["events"][0]) == 1


def check_trace_file(trace: dict[str, Any], places: int) -> None:
    """Check what chrome://tracing and Perfetto need, and that a place does one thing at a time."""
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    done = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(named) + len(done) == len(trace["traceEvents"]) and done
    assert {event["pid"] for event in named if event["name"] == "process_name"} == {*range(places)}
    assert {event["pid"] for event in done} == {*range(places)}
    for place in range(places):
        own = sorted((event for event in done if event["pid"] == place), key=lambda event: event["ts"])
        for event in own:
            assert event["name"] and event["cat"] and event["ts"] >= 0 and event["dur"] >= 0
        for one, following in zip(own, own[1:], strict=False):
            assert one["ts"] + one["dur"] <= following["ts"] + 1.0  # microseconds


def test_a_trace_has_every_action_of_every_step() -> None:
    data = fake_timeline.data("zero_bubble", microbatches=4)
    trace = chrome_trace(data)
    check_trace_file(trace, 4)
    done = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "transfer wait"]
    steps = read_timelines(data).steps
    assert len(done) == sum(len(own) for step in data["steps"] for own in step["real"]["events"])
    assert {event["args"]["step"] for event in done} == {step.step for step in steps} == {3, 90}
    assert min(event["ts"] for event in done if event["args"]["step"] == 90) >= 1e6  # it began a second later


@pytest.mark.parametrize("name", ["vision, pp 2", "vision inside, pp 2 x dp 2", "vision inside, interleaved"])
def test_a_pipelined_run_records_its_steps(name: str, tokenizer: str, tmp_path: Path) -> None:  # noqa: F811
    ranks, parallel = STAGES[name]
    pool().run(ranks, fit_with_trace, parallel, tokenizer, str(tmp_path / "run"), 7)
    data = json.loads((tmp_path / "run" / TIMELINE).read_text())
    read = read_timelines(data)
    assert [step.step for step in read.steps] == [3, 4, 5, 7]
    assert read.microbatches == 4 and read.schedule == parallel.get("schedule", "1f1b")
    check_trace_file(json.loads((tmp_path / "run" / TRACE).read_text()), len(read.places))
    for step in read.steps:
        for place, (real, predicted) in enumerate(zip(step.real.rows, step.predicted.rows, strict=True)):
            done = [(bar.letter, bar.stage, bar.microbatch) for bar in real if bar.kind != "transfer wait"]
            assert done == [(bar.letter, bar.stage, bar.microbatch) for bar in predicted]
            busy = sum(bar.lasts for bar in real if bar.kind != "transfer wait")
            assert busy == pytest.approx(sum(bar.lasts for bar in predicted), rel=0.02)
            assert step.real.bubbles[place] == pytest.approx(1 - busy / step.real.seconds, abs=0.01)
        assert step.predicted.seconds <= 1.5 * step.real.seconds  # all costs are means
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<section id="pipeline"' in page and page.count('class="gantt"') == 4


def fit_with_trace(*arguments: Any) -> Any:
    """Run a config with a trace."""
    return fit_run(*arguments, trace=True)


def test_a_run_without_stages_has_no_timeline(tokenizer: str, tmp_path: Path) -> None:  # noqa: F811
    pool().run(1, fit_run, {}, tokenizer, str(tmp_path / "run"), 3)
    assert not (tmp_path / "run" / TIMELINE).exists()
    assert 'id="pipeline"' not in (tmp_path / "run" / "report.html").read_text()


def test_a_trace_of_no_pipeline_is_refused() -> None:
    check_trace(True)
    with pytest.raises(ConfigError, match="--trace: a trace shows the stages of a pipeline, and this run has none"):
        check_trace(False)
