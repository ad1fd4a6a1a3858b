"""What is logged can be read back with each tracker's own library, and no tracker can end a run.

Each installed tracker runs in a process of its own, as a run would use it.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cornstarch.errors import ConfigError
from cornstarch.metrics import trackers
from cornstarch.metrics.trackers import TrackedRun, flatten, open_trackers, register_tracker

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"name": "small", "loop": {"steps": 6}, "data": {"train": [{"path": "train.jsonl"}]}, "output": Path("x")}

RECORDS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "train": (
        {
            "kind": "train", "step": 10, "time": 1.7e9, "epoch": 0.5, "loss": 2.5, "grad_norm": None, "tokens": 7,
            "items_per_second": {"vision": 3.0, "audio": 4.5},
        },
        {
            "train/epoch": 0.5, "train/loss": 2.5, "train/tokens": 7.0, "train/items_per_second/vision": 3.0,
            "train/items_per_second/audio": 4.5,
        },
    ),
    "evaluation": (
        {"kind": "evaluation", "step": 1, "loss": 1, "accuracy": 0.5, "sources": {"digits": {"accuracy": 0.25}}},
        {"evaluation/loss": 1.0, "evaluation/accuracy": 0.5, "evaluation/digits/accuracy": 0.25},
    ),
    "shuffled": (
        {"kind": "shuffled", "step": 1, "modality": "vision", "accuracy": 0.1, "sources": {"digits": {"accuracy": 0}}},
        {"shuffled/vision/accuracy": 0.1, "shuffled/vision/digits/accuracy": 0.0},
    ),
    "event": ({"kind": "event", "step": 1, "time": 2.0, "event": "saved", "text": "3"}, {}),
    "no numbers": ({"kind": "train", "a": True, "b": "1", "c": [1], "sources": None}, {}),
    "infinite": ({"kind": "train", "loss": math.inf}, {"train/loss": math.inf}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_flattened_names(name: str) -> None:
    record, expected = RECORDS[name]
    assert flatten(record) == expected


# ------------------------------------------------------------------------------------------------ failures


class FakeTracker:
    """Fails after `good` calls."""

    def __init__(self, good: int = 1000, run_id: str | None = None) -> None:
        self.good, self.run_id, self.seen, self.closed = good, run_id, [], []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if len(self.seen) == self.good:
            raise ConnectionError("the server is gone")
        self.seen.append((step, dict(values)))

    def close(self, status: str) -> None:
        self.closed.append(status)
        if self.good == 0:
            raise OSError("nor can it be closed")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with no registered tracker."""
    monkeypatch.setattr(trackers, "TRACKERS", {})


@pytest.mark.usefixtures("registry")
def test_a_failing_tracker_is_reported_once_and_dropped(tmp_path: Path) -> None:
    good, bad, worse = FakeTracker(), FakeTracker(good=2), FakeTracker(good=0)
    for name, tracker in {"good": good, "bad": bad, "worse": worse}.items():
        register_tracker(name, lambda run, tracker=tracker: tracker)
    told: list[str] = []
    opened = open_trackers(["bad", "worse", "good"], tmp_path, "run", CONFIG, warn=told.append)
    for step in range(5):
        for tracker in opened:
            tracker.log(step, {"train/loss": 1.0})
    for tracker in opened:
        tracker.close("finished")
        tracker.close("finished")
    assert [len(one.seen) for one in (good, bad, worse)] == [5, 2, 0]
    assert (good.closed, bad.closed, worse.closed) == (["finished"], ["failed"], ["failed"])
    assert len(told) == 2 and "worse failed" in told[0] and "ConnectionError: the server is gone" in told[1]


@pytest.mark.usefixtures("registry")
def test_python_warns_by_default(tmp_path: Path) -> None:
    register_tracker("bad", lambda run: FakeTracker(good=0))
    (tracker,) = open_trackers(["bad"], tmp_path, "run", CONFIG)
    with pytest.warns(UserWarning, match="bad failed"):
        tracker.log(1, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.log(2, {})


@pytest.mark.usefixtures("registry")
def test_a_tracker_that_cannot_be_opened_stops_the_start_of_the_run(tmp_path: Path) -> None:
    def refuse(run: TrackedRun) -> Any:
        raise PermissionError("no key")

    good = FakeTracker()
    register_tracker("good", lambda run: good)
    register_tracker("bad", refuse)
    with pytest.raises(ConfigError, match=r"bad could not be started: PermissionError: no key\n.*logging\.to"):
        open_trackers(["good", "bad"], tmp_path, "run", CONFIG)
    assert good.closed == ["failed"]


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb", "mlflow"])
def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    for module in [*sys.modules, "mlflow.tracking", "torch.utils.tensorboard"]:
        if module.split(".")[0] == name or module.startswith(f"torch.utils.{name}"):
            monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)  # None: an import fails
    with pytest.raises(ConfigError, match=f"pip install {name}`"):
        open_trackers([name], tmp_path, "run", CONFIG)
    assert "TRACKIO_DIR" not in os.environ


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'comet', expected tensorboard, trackio, wandb, mlflow"):
        open_trackers(["comet"], tmp_path, "run", CONFIG)


@pytest.mark.usefixtures("registry")
def test_ids_are_stored_and_unreadable_ones_replaced(tmp_path: Path) -> None:
    seen: list[TrackedRun] = []

    def build(run: TrackedRun) -> FakeTracker:
        seen.append(run)
        return FakeTracker(run_id="abc")

    register_tracker("fake", build)
    (tmp_path / "loggers.json").write_text("{")
    open_trackers(["fake"], tmp_path, "run", CONFIG)
    open_trackers(["fake"], tmp_path, "run", CONFIG)
    assert [run.run_id for run in seen] == [None, "abc"]
    assert list_stored_ids(tmp_path) == {"fake": "abc"}


# ------------------------------------------------------------------------------------------------ the trackers

# A run of five steps that is killed, and one that resumes after step 3.
LOGGED = """
import json, sys
from pathlib import Path
from cornstarch.metrics.trackers import flatten, open_trackers

name, folder, start, end, status = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
config = {"name": "small", "loop": {"steps": 6}, "data": {"train": [{"path": "train.jsonl"}]}, "output": None}
(tracker,) = open_trackers([name], folder, "small", config, step=start, warn=sys.exit)
for step in range(start + 1, end + 1):
    tracker.log(step, flatten({"kind": "train", "loss": (1 if start == 0 else 10) / step}))
record = {"kind": "evaluation", "accuracy": 0.5, "loss": float("nan"), "sources": {"a&b (c).jsonl": {"accuracy": 0.25}}}
tracker.log(end, flatten(record))
tracker.close(status)
"""


def log(name: str, folder: Path, start: int, end: int, status: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    ran = subprocess.run(
        [sys.executable, "-c", LOGGED, name, str(folder), str(start), str(end), status],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1", **more},
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def two_runs(name: str, folder: Path) -> None:
    pytest.importorskip(name)
    folder.mkdir()
    assert log(name, folder, 0, 5, "stopped").stdout == ""
    before = list_stored_ids(folder)
    assert log(name, folder, 3, 6, "finished").stdout == ""
    assert list_stored_ids(folder) == before


def list_stored_ids(folder: Path) -> dict[str, str]:
    path = folder / "loggers.json"
    return json.loads(path.read_text()) if path.exists() else {}


# Steps, and the losses that were logged: those after step 3 by the second run.
STEPS = [1, 2, 3, 4, 5, 6]
LOSSES = [1, 1 / 2, 1 / 3, 10 / 4, 10 / 5, 10 / 6]


def test_tensorboard_reads_back_losses_and_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    for start, end in ((0, 5), (3, 6)):  # in this process: torch is here already
        monkeypatch.setattr(sys, "argv", ["", "tensorboard", str(tmp_path / "run"), str(start), str(end), "finished"])
        exec(LOGGED, {})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    found = events.Scalars("train/loss")
    assert [event.step for event in found] == STEPS
    assert [event.value for event in found] == pytest.approx(LOSSES)
    assert events.Scalars("evaluation/a&b (c).jsonl/accuracy")[-1].value == 0.25
    assert math.isnan(events.Scalars("evaluation/loss")[-1].value)
    assert b"train.jsonl" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_trackio_reads_back_losses_and_config(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two_runs("trackio", folder)
    assert list_stored_ids(folder) == {"trackio": "small"}
    code = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps([S.get_projects(), [r['name'] for r in S.get_run_records('cornstarch')],"
        " S.get_logs('cornstarch', 'small'), S.get_run_config('cornstarch', 'small')]))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    projects, runs, found, config = json.loads(ran.stdout)
    assert projects == ["cornstarch"] and runs == ["small"] and config["loop"]["steps"] == 6
    losses = {line["step"]: line["train/loss"] for line in found if "train/loss" in line}  # the last of each step
    assert losses == pytest.approx(dict(zip(STEPS, LOSSES, strict=True)))
    assert any(line.get("evaluation/a&b (c).jsonl/accuracy") == 0.25 for line in found)


def test_mlflow_reads_back_losses_and_config(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two_runs("mlflow", folder)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("cornstarch")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.info.run_id == list_stored_ids(folder)["mlflow"]
    losses = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert losses == pytest.approx(dict(zip(STEPS, LOSSES, strict=True)))
    assert run.data.metrics["evaluation/a_b _c_.jsonl/accuracy"] == 0.25
    assert math.isnan(run.data.metrics["evaluation/loss"])
    assert run.data.params["loop.steps"] == "6" and run.data.params["data.train.0.path"] == "train.jsonl"


def test_mlflow_without_a_server_cannot_start(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    environment = {
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }  # fmt: skip
    with pytest.raises(AssertionError, match=r"mlflow could not be started: MlflowException"):
        log("mlflow", tmp_path, 0, 1, "finished", **environment)


def test_mlflow_reports_a_server_that_stops_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    told: list[str] = []
    (tracker,) = open_trackers(["mlflow"], tmp_path, "small", CONFIG, warn=told.append)
    gone = threading.Event()

    def refuse(self: Any, *args: Any, **more: Any) -> None:
        gone.wait()  # it takes its time
        raise ConnectionError("no route")

    monkeypatch.setattr(MlflowClient, "log_batch", refuse)
    for step in range(20):
        tracker.log(step, {"train/loss": 1.0})  # would never return if training waited
    assert not told
    gone.set()
    tracker.close("finished")
    assert len(told) == 1 and "ConnectionError: no route" in told[0]


def test_wandb_reads_back_losses(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two_runs("wandb", folder)
    number = list_stored_ids(folder)["wandb"]
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{number}.wandb"] * 2
    logged = [line for file in files for line in wandb_history(file)]
    losses = {line["step"]: line["train/loss"] for line in logged if "train/loss" in line}
    assert losses == pytest.approx(dict(zip(STEPS, LOSSES, strict=True)))
    assert any(line.get("evaluation/a&b (c).jsonl/accuracy") == 0.25 for line in logged)


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """Return what was logged, from a file as `wandb sync` would send it."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for content in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def log_records(content: bytes, block: int = 32768, first: int = 7) -> Iterator[bytes]:
    """Read LevelDB's log format: blocks, in which each piece has a checksum, a length, and whether it is the last."""
    position, record = first, b""
    while position + 7 <= len(content):
        if block - position % block < 7:  # too little left for a piece
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
