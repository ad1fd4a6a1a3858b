"""The run folder as data: missing files leave gaps, damaged ones give a warning, and nothing stops the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cornstarch.errors import ConfigError
from cornstarch.report.json_values import as_list, as_mapping, as_number, as_text
from cornstarch.report.time_breakdown import PROFILE, ProfileBreakdown, read_time_breakdown
from cornstarch.report.timelines import TIMELINE, PipelineTimelines, read_timelines

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "run.json"
# Keys of an evaluation line that are not measures.
_OTHER_KEYS = {"kind", "step", "time", "seconds", "epoch", "count", "sources", "modality"}
_MAX_CONFIG = 200_000  # characters

# Keys of the train lines that are kept for all steps.
CURVES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "flops_per_second", "memory", "step_time",
    "predicted_step_time", "data_wait", "copy_wait",
)  # fmt: skip
Curve = Sequence[tuple[float, float]]
"""(step, value), in the order of steps; values may be NaN or infinite."""
Content = TypeVar("Content")


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation: of all held-out data, and of each source."""

    step: int
    measures: Mapping[str, float]
    sources: Mapping[str, Mapping[str, float]]
    modality: str | None = None
    """The modality whose items were shuffled between samples; None for a normal evaluation."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened once: resumed, saved, stopped, finished, best."""

    step: int
    time: float | None
    name: str
    text: str


@dataclass(frozen=True)
class ReportedPart:
    """One part of the model."""

    name: str
    kind: str
    train: str
    parameters: float | None
    trainable: float | None
    bytes: float | None
    learning_rate: float | None
    weight_decay: float | None
    flops: float | None


@dataclass(frozen=True)
class SampleAnswer:
    """The model's answer to one sample; `question` is a sequence of (kind, text or file)."""

    id: str
    source: str
    question: tuple[tuple[str, str], ...]
    truth: str
    answer: str
    right: bool | None


@dataclass
class MetricsHistory:
    """The content of metrics.jsonl."""

    train: Mapping[str, Curve] = field(default_factory=dict)
    """By key of the train lines, one of `CURVES`."""
    items: Mapping[str, Curve] = field(default_factory=dict)
    """Items per second, by modality."""
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    shuffled: list[EvaluationRecord] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    last_line: Mapping[str, Any] = field(default_factory=dict)
    """The last train line."""

    def last(self, key: str) -> float | None:
        """Return the last value of a key of the train lines."""
        return self.train[key][-1][1] if key in self.train else as_number(self.last_line.get(key))


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder."""

    folder: Path
    config: str | None
    metrics: MetricsHistory
    summary: Mapping[str, Any]
    """run.json as it is; its values may have any type, so convert them by `json_values`."""
    warnings: tuple[str, ...] = ()
    timelines: PipelineTimelines | None = None
    """Recorded steps of a run with pipeline stages."""
    breakdown: ProfileBreakdown | None = None
    """The time breakdown of a profiled run."""

    @property
    def name(self) -> str:
        return as_text(self.summary.get("name")) or self.folder.resolve().name

    @property
    def status(self) -> str:
        """Running, finished, stopped or failed."""
        return as_text(self.summary.get("status")) or "unknown"

    def number(self, key: str) -> float | None:
        return as_number(self.summary.get(key))

    @property
    def step(self) -> int | None:
        """The last known step."""
        stated = self.number("step")
        logged = [curve[-1][0] for curve in self.metrics.train.values() if curve]
        known = [int(step) for step in [stated, *logged] if step is not None and abs(step) < 2**53]
        return max(known, default=None)

    @property
    def seconds(self) -> float | None:
        """The training time."""
        stated = self.number("seconds")
        return stated if stated is not None else self.metrics.last("seconds")

    @property
    def evaluation(self) -> EvaluationRecord | None:
        if self.metrics.evaluations:
            return self.metrics.evaluations[-1]
        return _read_evaluation(as_mapping(self.summary.get("evaluation")))

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint."""
        named = [event.step for event in self.metrics.events if event.name == "best"]
        return named[-1] if named else _read_step(as_mapping(self.summary.get("best")))

    @property
    def shuffled(self) -> list[EvaluationRecord]:
        """The last evaluation with shuffled items, for each modality."""
        stated = [_read_evaluation(as_mapping(line)) for line in as_list(self.summary.get("shuffled"))]
        lines = [*stated, *self.metrics.shuffled]
        return list({line.modality: line for line in lines if line is not None}.values())

    @property
    def parts(self) -> list[ReportedPart]:
        numbers = ("parameters", "trainable", "bytes", "learning_rate", "weight_decay", "flops")
        parts = []
        for part in map(as_mapping, as_list(self.summary.get("parts"))):
            name, kind, train = (as_text(part.get(key)) for key in ("name", "kind", "train"))
            parts.append(ReportedPart(name, kind, train, **{key: as_number(part.get(key)) for key in numbers}))
        return parts

    @property
    def answers(self) -> list[SampleAnswer]:
        """The answers to samples at the end of the run."""
        answers = []
        for answer in map(as_mapping, as_list(self.summary.get("answers"))):
            question, right = answer.get("question"), answer.get("right")
            pieces = [{"text": question}] if isinstance(question, str) else map(as_mapping, as_list(question))
            asked = tuple((kind, as_text(value)) for piece in pieces for kind, value in piece.items())
            id, source, truth, text = (as_text(answer.get(key)) for key in ("id", "source", "truth", "answer"))
            verdict = right if isinstance(right, bool) else None
            answers.append(SampleAnswer(id, source, asked, truth, text, verdict))
        return answers


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; raise only if the path is not a run folder at all."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {found}; expected the folder of a run, such as runs/<name>, with a {METRICS}.")
    if not (folder / METRICS).is_file():
        others = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))[:5]
        advice = f" Its folders {', '.join(others)} have one: name one of them." if others else ""
        raise ConfigError(
            f"{folder} has no {METRICS}; expected a folder that `cornstarch train` wrote, with {CONFIG}, {METRICS} "
            f"and {SUMMARY}.{advice}"
        )
    warnings: list[str] = []

    def read_summary(value: object) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            warnings.append(f"{SUMMARY} holds a {type(value).__name__}, expected an object.")
        return as_mapping(value)

    config = None
    try:
        config = (folder / CONFIG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        warnings.append(f"There is no {CONFIG}.")
    except OSError as error:
        warnings.append(f"{CONFIG} could not be read ({error.strerror}).")
    if config is not None and len(config) > _MAX_CONFIG:
        warnings.append(f"{CONFIG} has {len(config):,} characters; the first {_MAX_CONFIG:,} are here.")
        config = config[:_MAX_CONFIG]
    missing = f"There is no {SUMMARY}: the model, the data, samples and versions are not known."
    summary = _read_json(folder / SUMMARY, read_summary, warnings, missing) or {}
    timelines = _read_json(folder / TIMELINE, lambda value: read_timelines(as_mapping(value)), warnings)
    breakdown = _read_json(folder / PROFILE, lambda value: read_time_breakdown(as_mapping(value)), warnings)
    return RunRecord(folder, config, read_metrics(folder / METRICS), summary, tuple(warnings), timelines, breakdown)


def _read_json(
    path: Path, read: Callable[[Any], Content], warnings: list[str], missing: str | None = None
) -> Content | None:
    """Return what `read` makes of a JSON file; None if it is damaged, or absent, with the warning `missing` if any."""
    try:
        return read(json.loads(path.read_bytes()))
    except FileNotFoundError:
        if missing is not None:
            warnings.append(missing)
    except (OSError, ValueError, LookupError, RecursionError) as error:
        warnings.append(f"{path.name} could not be read ({type(error).__name__}: {error}).")
    return None


def read_metrics(path: Path) -> MetricsHistory:
    """Read all lines; for a step that was logged again after a resume, the last line counts."""
    train: dict[str, dict[int, float]] = {key: {} for key in CURVES}
    items: dict[str, dict[int, float]] = {}
    evaluated: dict[tuple[str | None, int], EvaluationRecord] = {}
    metrics, unread, count, torn = MetricsHistory(), 0, 0, False
    for line in _read_lines(path):
        count += 1
        step = _read_step(line)
        torn = line is None or step is None  # of the last line in the end: a run that is still writing, or was killed
        if line is None or step is None:
            unread += 1
            continue
        kind = line.get("kind")
        if kind == "train":
            _add_values(train, CURVES, line, step)
            rates = as_mapping(line.get("items_per_second"))
            for modality in rates:
                items.setdefault(modality, {})
            _add_values(items, rates, rates, step)
            metrics.last_line = line
        elif kind in ("evaluation", "shuffled") and (evaluation := _read_evaluation(line)) is not None:
            evaluated[evaluation.modality, evaluation.step] = evaluation
        elif kind == "event":
            name, text = as_text(line.get("event")), as_text(line.get("text"))
            metrics.events.append(RunEvent(step, as_number(line.get("time")), name, text))
    metrics.train, metrics.items = (
        {key: sorted(values.items()) for key, values in found.items() if values} for found in (train, items)
    )
    in_order = sorted(evaluated.values(), key=lambda evaluation: evaluation.step)
    metrics.evaluations = [evaluation for evaluation in in_order if evaluation.modality is None]
    metrics.shuffled = [evaluation for evaluation in in_order if evaluation.modality is not None]
    if not count:
        metrics.warnings.append(f"{METRICS} is empty: nothing was logged yet.")
    elif unread:
        why = "; the last one is torn, as when a run is cut off while writing" if torn else ""
        metrics.warnings.append(f"{METRICS}: {unread:,} of {count:,} lines could not be read{why}.")
    return metrics


def _read_lines(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield the JSON object of each line; None for a line without one."""
    decode = json.JSONDecoder().decode
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if line.isspace():
                    continue
                try:
                    found = decode(line)
                except (ValueError, RecursionError):
                    found = None
                yield found if isinstance(found, dict) else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error


def _read_step(line: Mapping[str, Any] | None) -> int | None:
    step = as_number(line.get("step")) if line is not None else None
    return int(step) if step is not None and abs(step) < 2**53 else None


def _add_values(curves: dict[str, dict[int, float]], keys: Iterable[str], values: Mapping[str, Any], step: int) -> None:
    for key in keys:
        value = values.get(key)
        if type(value) is float:  # by far the most frequent; a run may have 100,000 lines
            curves[key][step] = value
        elif (known := as_number(value)) is not None:
            curves[key][step] = known


def _read_evaluation(line: Mapping[str, Any]) -> EvaluationRecord | None:
    step = _read_step(line)
    if step is None:
        return None
    sources = {name: _select_numbers(as_mapping(source)) for name, source in as_mapping(line.get("sources")).items()}
    modality = as_text(line.get("modality")) or "unknown" if line.get("kind") == "shuffled" else None
    measures = {key: value for key, value in _select_numbers(line).items() if key not in _OTHER_KEYS}
    return EvaluationRecord(step, measures, sources, modality)


def _select_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: known for key, value in values.items() if (known := as_number(value)) is not None}
