"""Programs that draw curves, beside metrics.jsonl: TensorBoard, Trackio, Weights & Biases, MLflow.

None is imported before it is asked for, and none needs an account: what they write stays in the run's folder unless the
user's environment names a server.
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
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Protocol
from uuid import uuid4

from cornstarch.errors import ConfigError

Status = Literal["finished", "stopped", "failed"]
IDS = "loggers.json"
"""In the run's folder: which run of which program this one is, so that it goes on there after a resume."""

_BESIDE = ("kind", "step", "time", "modality", "sources")
_PROJECT = "cornstarch"


class Logger(Protocol):
    """Takes numbers by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note the numbers of a step."""
        ...

    def close(self, status: Status) -> None:
        """Say how the run ended, and write what is not written yet."""
        ...


def flatten(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics, by names like `train/loss` and `evaluation/digits/accuracy`."""
    prefix = str(record.get("kind", "train"))
    if record.get("modality") is not None:
        prefix += f"/{record['modality']}"
    sources = record.get("sources")
    return {
        **dict(_numbers(prefix, {key: value for key, value in record.items() if key not in _BESIDE})),
        **dict(_numbers(prefix, sources if isinstance(sources, Mapping) else {})),
    }


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{key}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{key}", float(value)


def open_loggers(
    names: Sequence[str],
    folder: Path,
    run_name: str,
    config_data: Mapping[str, Any],
    step: int = 0,
    warn: Callable[[str], None] | None = None,
) -> list[Logger]:
    """Open the programs that a run logs to.

    What cannot be opened is a ConfigError: it is told before training starts. What fails later is told once and left
    alone, and the run goes on.

    Args:
        names: `tensorboard`, `trackio`, `wandb`, `mlflow`.
        folder: The run's.
        run_name: What the run is called there.
        config_data: The resolved config, as plain data.
        step: The step after which a resumed run goes on.
        warn: Where failures are told. Default: Python's warnings.
    """
    ids = _Ids(folder / IDS)
    opened: list[Logger] = []
    try:
        for name in names:
            opened.append(_Guarded(name, _opened(name, _Run(folder, run_name, config_data, step), ids), warn or _warn))
    except BaseException:
        for logger in opened:
            logger.close("failed")
        raise
    return opened


class _Run:
    """What a logger is told about the run."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
        self.folder, self.name, self.step = folder.absolute(), name, step
        self.config = json.loads(json.dumps(config, default=str))  # plain data, whatever was given


class _Ids:
    """By program: which of its runs this one is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        with suppress(OSError, ValueError):  # without it, a new run is begun there
            known = json.loads(path.read_text(encoding="utf-8"))
            self._known = {key: value for key, value in known.items() if isinstance(value, str)}

    def get(self, name: str) -> str | None:
        """Return the id, if there is one."""
        return self._known.get(name)

    def set(self, name: str, value: str) -> None:
        """Store an id at once: the run may be killed at any moment."""
        if self._known.get(name) == value:
            return
        self._known[name] = value
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        temporary.write_text(json.dumps(self._known, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


def _opened(name: str, run: _Run, ids: _Ids) -> Logger:
    if name not in _LOGGERS:
        raise ConfigError(f"logging.to has {name!r}, expected {', '.join(_LOGGERS)}.")
    try:
        return _LOGGERS[name](run, ids)
    except ImportError as error:
        raise ConfigError(
            f"logging.to has {name!r}, but it cannot be imported: {error}.\n"
            f"  Install it with `pip install {name}`, or leave it out: metrics.jsonl is always written."
        ) from error
    except Exception as error:  # whatever a program or its server meets; the run has not begun
        raise ConfigError(
            f"{name} could not be started: {type(error).__name__}: {error}\n"
            "  Mend that, or leave it out of logging.to: metrics.jsonl is always written."
        ) from error


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


class _Guarded:
    """A logger that cannot end the run: when it fails, that is told once, and it is left alone."""

    def __init__(self, name: str, logger: Logger, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._logger: Logger | None = logger

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note the numbers of a step, if it still works."""
        self._try(lambda logger: logger.log(step, values))

    def close(self, status: Status) -> None:
        """Close it; it can be called again."""
        self._try(lambda logger: logger.close(status))
        self._logger = None

    def _try(self, do: Callable[[Logger], None]) -> None:
        if self._logger is None:
            return
        try:
            do(self._logger)
        except Exception as error:
            failed, self._logger = self._logger, None
            with suppress(Exception):
                failed.close("failed")
            self._warn(
                f"{self._name} failed and is not logged to any more ({type(error).__name__}: {error}). "
                "The run goes on, and metrics.jsonl has everything."
            )


# ------------------------------------------------------------------------------------------------ TensorBoard


class _TensorBoard:
    def __init__(self, run: _Run, ids: _Ids) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        is_new = not folder.exists()
        # What was logged after the checkpoint from which the run goes on is not drawn.
        self._writer = SummaryWriter(str(folder), purge_step=None if is_new else run.step + 1)
        if is_new:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: Status) -> None:
        self._writer.close()


# ------------------------------------------------------------------------------------------------ Trackio


class _Trackio:
    def __init__(self, run: _Run, ids: _Ids) -> None:
        is_shared = any(os.environ.get(name) for name in ("TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        self._trackio = _import_trackio(None if is_shared else run.folder / "trackio")
        known = ids.get("trackio")
        name = f"{run.name}-{uuid4().hex[:6]}" if is_shared else run.name  # it goes on by name, which must be its own
        with redirect_stdout(StringIO()):
            self._run = self._trackio.init(
                project=_PROJECT,
                name=known or name,
                resume="allow" if known else "never",
                config=run.config,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        ids.set("trackio", self._run.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: Status) -> None:
        with redirect_stdout(StringIO()):
            self._trackio.finish()


def _import_trackio(folder: Path | None) -> Any:
    """Import it with its data in a folder, which it asks for then and never again."""
    if folder is None:
        return import_module("trackio")
    os.environ["TRACKIO_DIR"] = str(folder)
    try:
        trackio = import_module("trackio")
    finally:
        del os.environ["TRACKIO_DIR"]
    if Path(trackio.utils.TRACKIO_DIR) != folder:
        _warn(f"Trackio was in use before this run: it writes to {trackio.utils.TRACKIO_DIR}, and not to {folder}.")
    return trackio


# ------------------------------------------------------------------------------------------------ Weights & Biases


class _WandB:
    def __init__(self, run: _Run, ids: _Ids) -> None:
        import wandb

        is_offline = not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"))
        settings: dict[str, Any] = {"console": "off", **({"mode": "offline", "silent": True} if is_offline else {})}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            id=ids.get("wandb"),
            resume="allow",
            dir=str(run.folder),
            config=run.config,
            reinit="create_new",
            settings=wandb.Settings(**settings),
        )
        ids.set("wandb", self._run.id)
        # Its own steps never go back; ours do, when a run goes on from an older checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


# ------------------------------------------------------------------------------------------------ MLflow

_MLFLOW_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MLFLOW_NAME = re.compile(r"[^\w./ :-]")
_MLFLOW_PARAMETERS = 100  # at once
_MLFLOW_LETTERS = 500  # of a value
_MLFLOW_WAIT = 60.0  # seconds, for a server at the end


class _MLflow:
    """Sends in a thread of its own: MLflow repeats what a server does not take for minutes."""

    def __init__(self, run: _Run, ids: _Ids) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells how it makes its tables
        self._given = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=self._given or f"sqlite:///{run.folder / 'mlflow.db'}")
        self._pool = ThreadPoolExecutor(1, "mlflow")
        self._sent: deque[Future[None]] = deque()
        known = ids.get("mlflow")
        self._run_id = known if known is not None and self._is_there(known) else self._created(run)
        ids.set("mlflow", self._run_id)

    def _is_there(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def _created(self, run: _Run) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        place = None if self._given else (run.folder / "mlflow").as_uri()
        experiment = self._client.create_experiment(name, place) if found is None else found.experiment_id
        created = self._client.create_run(experiment, run_name=run.name)
        self._run_id = str(created.info.run_id)
        self._log_config(run.config)
        return self._run_id

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [
            Param(_MLFLOW_NAME.sub("_", name)[:250], value[:_MLFLOW_LETTERS]) for name, value in _leaves("", config)
        ]
        for start in range(0, len(parameters), _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MLFLOW_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        while self._sent and self._sent[0].done():
            self._sent.popleft().result()  # raises what went wrong
        now = int(time.time() * 1000)
        metrics = [Metric(_MLFLOW_NAME.sub("_", name), value, now, step) for name, value in values.items()]
        self._sent.append(self._pool.submit(self._client.log_batch, self._run_id, metrics=metrics))

    def close(self, status: Status) -> None:
        if status == "failed" and any(one.done() and one.exception() is not None for one in self._sent):
            self._pool.shutdown(wait=False, cancel_futures=True)
            return
        try:
            for one in self._sent:
                one.result(timeout=_MLFLOW_WAIT)
            self._client.set_terminated(self._run_id, _MLFLOW_ENDS[status])
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of a config by their dotted names."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if pairs is None:
        yield prefix, value if isinstance(value, str) else json.dumps(value)
        return
    for key, inner in pairs:
        yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)


_LOGGERS: dict[str, Callable[[_Run, _Ids], Logger]] = {
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _WandB,
    "mlflow": _MLflow,
}

__all__ = ["Logger", "flatten", "open_loggers"]
