"""What is read from a run folder, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cornstarch.errors import ConfigError
from cornstarch.report import write_report
from cornstarch.report.held_out import MediaComparison, compare_evaluations
from cornstarch.report.run_record import EvaluationRecord, read_metrics, read_run
from tests.report import fake_run


def test_all_kinds_of_lines_are_read(tmp_path: Path) -> None:
    run = read_run(fake_run.write_run(tmp_path / "demo"))
    steps = range(2, 601, 2)
    expected = [(step, fake_run.train_line(step, 600)) for step in steps]
    for key in ("loss", "learning_rate", "grad_norm", "tokens_per_second", "memory"):
        assert run.metrics.train[key] == [(step, line[key]) for step, line in expected]
    assert run.metrics.items["audio"] == [(step, line["items_per_second"]["audio"]) for step, line in expected]
    assert list(run.metrics.items) == ["vision", "audio"]
    assert [evaluation.step for evaluation in run.metrics.evaluations] == list(range(0, 601, 60))
    assert run.metrics.evaluations[-1].sources["digits"]["count"] == 360
    assert {line.modality for line in run.shuffled} == {"vision", "audio"}
    assert "seconds" not in run.metrics.evaluations[0].measures
    assert [event.name for event in run.metrics.events if event.name != "best"] == [
        "saved",
        "stopped",
        "resumed",
        "finished",
    ]
    assert (run.name, run.status, run.step) == ("demo", "finished", 600)
    assert not run.warnings and not run.metrics.warnings


def test_step_logged_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [("train", 10, 3.0), ("train", 20, 2.0), ("evaluation", 20, 9.0), ("train", 20, 1.5), ("train", 30, 1.0)]
    again = [("train", 20, 1.25), ("evaluation", 20, 8.0)]
    entries = [{"kind": kind, "step": step, "loss": loss} for kind, step, loss in [*lines, *again]]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    metrics = read_metrics(path)
    assert metrics.train["loss"] == [(10, 3.0), (20, 1.25), (30, 1.0)]
    assert [evaluation.measures["loss"] for evaluation in metrics.evaluations] == [8.0]


def test_last_values_of_keys_without_curves_are_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","step":1,"seconds":3.5,"skipped":2}\n')
    run = read_run(tmp_path)
    assert (run.seconds, run.metrics.last("skipped"), run.metrics.last("loss")) == (3.5, 2.0, None)
    assert run.name == tmp_path.name


def test_summary_replaces_missing_metrics_lines(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "demo")
    (folder / "metrics.jsonl").write_text("")
    run = read_run(folder)
    assert run.evaluation is not None and run.evaluation.measures["loss"] == fake_run.evaluation_line(600, 600)["loss"]
    assert {line.modality for line in run.shuffled} == {"vision", "audio"}


NO_RUNS = {
    "missing": ("does not exist", "expected the folder of a run"),
    "file": ("is a file", "expected the folder of a run"),
    "empty": ("has no metrics.jsonl", "expected a folder that `cornstarch train` wrote"),
    "parent": ("has no metrics.jsonl", "Its folders demo have one"),
    "folder": ("has no metrics.jsonl", "config.yaml, metrics.jsonl and run.json"),
}


@pytest.mark.parametrize("name", NO_RUNS)
def test_folder_without_a_run_raises_config_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    fake_run.write_run(tmp_path / "parent/demo", total=20)
    (tmp_path / "folder/metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        write_report(tmp_path / name)
    for said in NO_RUNS[name]:
        assert said in str(refused.value)
    assert not list(tmp_path.rglob("report.html"))


# ------------------------------------------------------------------------------------------------ looking


VERDICTS = [
    ("accuracy", 0.97, 0.10, "good"),
    ("accuracy", 0.97, 0.70, "warn"),
    ("accuracy", 0.97, 0.96, "bad"),
    ("accuracy", 0.50, 0.90, "bad"),
    ("accuracy", 0.0, 0.0, "bad"),
    ("accuracy", float("nan"), 0.1, ""),
    ("loss", 0.1, 3.0, "good"),
    ("loss", 2.0, 2.3, "warn"),
    ("loss", 2.0, 2.0, "bad"),
]


@pytest.mark.parametrize(("measure", "true", "exchanged", "kind"), VERDICTS)
def test_verdict_depends_on_the_lost_accuracy(measure: str, true: float, exchanged: float, kind: str) -> None:
    assert MediaComparison("digits", measure, true, exchanged).verdict[0] == kind


@pytest.mark.parametrize(
    ("true", "exchanged", "kind"),
    [(0.973, 0.514, "good"), (0.97, 0.75, "warn"), (0.97, 0.95, "bad"), (0.51, 0.5, "bad"), (0.4, 0.3, "bad")],
)
def test_two_classes_are_compared_with_chance(true: float, exchanged: float, kind: str) -> None:
    rows = {"a": {"accuracy": true, "count": 100.0}}, {"a": {"accuracy": exchanged, "count": 100.0, "chance": 0.5}}
    (found,) = compare_evaluations(*(EvaluationRecord(9, {}, row) for row in rows))
    assert found.verdict[0] == kind


def test_common_sources_and_measures_are_compared() -> None:
    true = EvaluationRecord(
        9, {"loss": 1.0, "accuracy": 0.8}, {"a": {"loss": 1.0, "accuracy": 0.9}, "b": {"loss": 2.0}}
    )
    by_source = EvaluationRecord(
        9, {"accuracy": 0.2}, {"a": {"accuracy": 0.1}, "b": {"loss": 4.0}, "c": {"loss": 1.0}}, "x"
    )
    assert compare_evaluations(true, by_source) == [
        MediaComparison("a", "accuracy", 0.9, 0.1),
        MediaComparison("b", "loss", 2.0, 4.0),
    ]
    assert compare_evaluations(true, EvaluationRecord(9, {"accuracy": 0.2}, {}, "x")) == [
        MediaComparison("all", "accuracy", 0.8, 0.2)
    ]
    assert compare_evaluations(true, EvaluationRecord(9, {"other": 0.2}, {}, "x")) == []
    assert compare_evaluations(None, by_source) == []


def test_note_says_when_only_some_samples_have_items() -> None:
    true = EvaluationRecord(9, {}, {"a": {"accuracy": 0.9, "count": 360}})
    some = EvaluationRecord(9, {}, {"a": {"accuracy": 0.1, "count": 120}}, "vision")
    assert [row.note for row in compare_evaluations(true, some)] == ["120 of the 360 samples have items to shuffle."]
    assert [row.note for row in compare_evaluations(true, EvaluationRecord(9, {}, true.sources, "vision"))] == [""]


def test_best_step_comes_from_the_last_event_or_the_summary(tmp_path: Path) -> None:
    folder = fake_run.write_run(tmp_path / "demo")
    fake_run.change_summary(folder, best={"step": 540, "metric": 0.95, "name": "accuracy"})
    assert read_run(folder).best_step == 600
    (folder / "metrics.jsonl").write_text("")
    assert read_run(folder).best_step == 540
    fake_run.change_summary(folder, best={"step": None, "metric": None, "name": "accuracy"})
    assert read_run(folder).best_step is None
