"""Experiment trackers beside metrics.jsonl: TensorBoard, Trackio, Weights & Biases, MLflow.

A tracker's library is imported only when `logging.to` names it, and none needs an account: results stay in the run's
folder unless the user's environment names a server. `register_tracker` adds another tracker.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

from cornstarch.errors import ConfigError
from cornstarch.files import replace_file
from cornstarch.plan.data_options import REGISTERED

TrackerStatus = Literal["finished", "stopped", "failed"]
IDS = "loggers.json"
"""In the run's folder: the tracker's id of this run, so that a resumed run continues there."""

_NOT_LOGGED = ("kind", "step", "time", "modality", "sources")
_PROJECT = "cornstarch"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is opened with."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    """The resolved config, as JSON data."""
    step: int
    """The step that a resumed run continues after."""
    run_id: str | None = None
    """The `Tracker.run_id` of the same run before it was resumed."""


class Tracker(Protocol):
    """Logs the numbers of one run."""

    run_id: str | None
    """The tracker's own id of this run, with which a resumed run finds it again; None if it needs none."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step by name."""

    def close(self, status: TrackerStatus) -> None:
        """Report how the run ended, and flush."""


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {}
"""The trackers that `logging.to` names."""


def register_tracker(name: str, build: Callable[[TrackedRun], Tracker]) -> None:
    """Make a tracker available in `logging.to`. `build` imports the tracker's library."""
    TRACKERS[name] = build
    REGISTERED["tracker"].add(name)


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics, by names like `train/loss` and `evaluation/digits/accuracy`."""
    prefix = str(record.get("kind", "train"))
    if record.get("modality") is not None:
        prefix += f"/{record['modality']}"
    sources = record.get("sources")
    logged = {key: value for key, value in record.items() if key not in _NOT_LOGGED}
    return dict([*_numbers(prefix, logged), *_numbers(prefix, sources if isinstance(sources, Mapping) else {})])


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{key}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{key}", float(value)


def open_trackers(
    names: Sequence[str],
    folder: Path,
    run_name: str,
    config_data: Mapping[str, Any],
    step: int = 0,
    warn: Callable[[str], None] | None = None,
) -> list[Tracker]:
    """Open the trackers of a run, which continues after `step`; raise ConfigError if one cannot be opened.

    A tracker that fails later is reported once, by `warn` or Python's warnings, and dropped; training continues.
    """
    config = json.loads(json.dumps(config_data, default=str))
    ids: dict[str, str] = {}
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # without the file, the trackers start new runs
        saved = json.loads((folder / IDS).read_text("utf-8"))
        ids = {key: value for key, value in saved.items() if isinstance(value, str)}
    trackers: list[Tracker] = []
    try:
        for name in names:
            tracker = _open(name, TrackedRun(folder.absolute(), run_name, config, step, ids.get(name)))
            trackers.append(_GuardedTracker(name, tracker, warn or warnings.warn))
            if tracker.run_id is not None and ids.get(name) != tracker.run_id:
                ids[name] = tracker.run_id  # stored at once: the run may be killed at any moment
                replace_file(folder / IDS, (json.dumps(ids, indent=1) + "\n").encode())
    except BaseException:
        for tracker in trackers:
            tracker.close("failed")
        raise
    return trackers


def _open(name: str, run: TrackedRun) -> Tracker:
    if name not in TRACKERS:
        raise ConfigError(f"logging.to has {name!r}, expected {', '.join(TRACKERS)}.")
    try:
        return TRACKERS[name](run)
    except ImportError as error:
        raise ConfigError(
            f"logging.to has {name!r}, but it cannot be imported: {error}.\n"
            f"  Install it with `pip install {name}`, or leave it out: metrics.jsonl is always written."
        ) from error
    except Exception as error:  # any error of a library or its server; the run has not started
        raise ConfigError(
            f"{name} could not be started: {type(error).__name__}: {error}\n"
            "  Fix that, or leave it out of logging.to: metrics.jsonl is always written."
        ) from error


class _GuardedTracker:
    """Drops a tracker at its first failure, so that it cannot end the run."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._tracker: Tracker | None = tracker
        self.run_id = tracker.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.log(step, values))

    def close(self, status: TrackerStatus) -> None:
        self._try(lambda tracker: tracker.close(status))
        self._tracker = None

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:
            failed, self._tracker = self._tracker, None
            with suppress(Exception):
                failed.close("failed")
            self._warn(
                f"{self._name} failed and is not logged to any more ({type(error).__name__}: {error}). "
                "The run continues, and metrics.jsonl has everything."
            )


class TensorBoardTracker:
    """Writes to the folder `tensorboard`."""

    run_id: str | None = None

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        is_new = not folder.exists()
        # purge_step hides what was logged after the checkpoint that the run resumes from.
        self._writer = SummaryWriter(str(folder), purge_step=None if is_new else run.step + 1)
        if is_new:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: TrackerStatus) -> None:
        self._writer.close()


class TrackioTracker:
    """Writes to the folder `trackio`, or where Trackio's environment variables point."""

    def __init__(self, run: TrackedRun) -> None:
        is_shared = any(os.environ.get(name) for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        folder = run.folder / "trackio"
        if not is_shared:
            os.environ["TRACKIO_DIR"] = str(folder)  # read once, when Trackio is imported
        try:
            self._trackio = import_module("trackio")
        finally:
            if not is_shared:
                del os.environ["TRACKIO_DIR"]
        if not is_shared and Path(used := self._trackio.utils.TRACKIO_DIR) != folder:
            warnings.warn(f"Trackio was in use before this run: it writes to {used}, not to {folder}.", stacklevel=2)
        name = f"{run.name}-{uuid4().hex[:6]}" if is_shared else run.name  # Trackio resumes by name: it must be unique
        with redirect_stdout(StringIO()):
            self._run = self._trackio.init(
                project=_PROJECT,
                name=run.run_id or name,
                resume="allow" if run.run_id else "never",
                config=run.config,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.run_id: str | None = self._run.name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: TrackerStatus) -> None:
        with redirect_stdout(StringIO()):
            self._trackio.finish()


class WandbTracker:
    """Writes to the folder `wandb`, offline unless WANDB_API_KEY or WANDB_MODE is set."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        is_online = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")
        settings: dict[str, Any] = {"console": "off", **({} if is_online else {"mode": "offline", "silent": True})}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=run.config,
            reinit="create_new",
            settings=wandb.Settings(**settings),
        )
        self.run_id: str | None = self._run.id
        # W&B's own steps must increase; ours go back when a run resumes from an older checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, status: TrackerStatus) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MLFLOW_NAME = re.compile(r"[^\w./ :-]")
_MLFLOW_PARAMETERS = 100  # per request
_MLFLOW_LETTERS = 500  # of a value
_MLFLOW_WAIT = 60.0  # seconds, for a server at the end


class MlflowTracker:
    """Writes to `mlflow.db`, or to the server of MLFLOW_TRACKING_URI."""

    # Requests are sent by a thread, because MLflow retries a request that a server does not take for minutes.
    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when MLflow is imported
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs each table that it creates
        self._uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=self._uri or f"sqlite:///{run.folder / 'mlflow.db'}")
        self._pool = ThreadPoolExecutor(1, "mlflow")
        self._sent: deque[Future[None]] = deque()
        self.run_id: str | None = run.run_id
        try:
            if run.run_id is not None:
                self._client.update_run(run.run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self.run_id = None
        if self.run_id is None:
            self.run_id = self._create(run)

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        artifacts = None if self._uri else (run.folder / "mlflow").as_uri()
        experiment = self._client.create_experiment(name, artifacts) if found is None else found.experiment_id
        run_id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        leaves = _leaves("", run.config)
        parameters = [Param(_MLFLOW_NAME.sub("_", name)[:250], value[:_MLFLOW_LETTERS]) for name, value in leaves]
        for start in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(run_id, params=parameters[start : start + _MLFLOW_PARAMETERS])
        return run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        while self._sent and self._sent[0].done():
            self._sent.popleft().result()  # raises the error of a failed request
        now = int(time.time() * 1000)
        metrics = [Metric(_MLFLOW_NAME.sub("_", name), value, now, step) for name, value in values.items()]
        self._sent.append(self._pool.submit(self._client.log_batch, self.run_id, metrics=metrics))

    def close(self, status: TrackerStatus) -> None:
        has_failed = any(one.done() and one.exception() is not None for one in self._sent)
        try:
            if status != "failed" or not has_failed:
                for one in self._sent:
                    one.result(timeout=_MLFLOW_WAIT)
                self._client.set_terminated(self.run_id, _MLFLOW_STATUS[status])
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of a config by their dotted names."""
    if isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


register_tracker("tensorboard", TensorBoardTracker)
register_tracker("trackio", TrackioTracker)
register_tracker("wandb", WandbTracker)
register_tracker("mlflow", MlflowTracker)
