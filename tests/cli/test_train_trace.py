"""`cornstarch train --trace`: a trace of a pipelined run, and no pipelined run, no trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.small_runs import Command, write_config
from tests.cli.started import together

STAGES = (
    "model.language_model.config.num_hidden_layers=2",
    "parallel.modules.vision.stages=1",
    "parallel.modules.language_model.stages=2",
    "parallel.ranks=first_stage",
    "parallel.schedule=gpipe",
    "loop.accumulation=4",
)


def test_two_processes_write_one_trace(tmp_path: Path) -> None:
    write_config(tmp_path)
    ended = together("train", "run.yaml", *STAGES, "--trace", folder=tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    trace = json.loads((tmp_path / "run/trace.json").read_text())
    done = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] != "transfer wait"]
    for step in (3, 4, 5, 6):
        for place in range(2):
            own = [event for event in done if event["args"]["step"] == step and event["pid"] == place]
            names = [f"{kind}{m}" for kind in "FB" for m in range(4)]
            assert sorted(event["name"] for event in own) == sorted(names)
            assert [event["name"] for event in sorted(own, key=lambda event: event["ts"])][:4] == names[:4]
    assert trace["otherData"] == {"schedule": "gpipe"}
    assert 'id="pipeline"' in (tmp_path / "run/report.html").read_text()


def test_without_stages_there_is_nothing_to_trace(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, error = command("train", "run.yaml", "--trace", "--restart")
    assert code == 2 and "--trace: a trace shows the stages of a pipeline, and this run has none" in error
    assert not (tmp_path / "run").exists()
