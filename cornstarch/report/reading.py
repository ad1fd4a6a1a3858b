"""The run folder as data: what is missing stays empty, what is damaged is noted, nothing stops the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cornstarch.errors import ConfigError
from cornstarch.report.spending import PROFILE, Spending, read_spending
from cornstarch.report.timelines import TIMELINE, Timelines, read_timelines
from cornstarch.report.values import entries, mapping, number, text

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "run.json"
# Keys of an evaluation line that are no measures.
_BESIDE = {"kind", "step", "time", "seconds", "epoch", "count", "sources", "modality"}
_MOST_CONFIG = 200_000  # characters

# Keys of the train lines that are kept for all steps.
CURVES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "flops_per_second", "memory", "step_time",
    "data_wait", "copy_wait",
)  # fmt: skip
Curve = Sequence[tuple[float, float]]
"""(step, value), in the order of steps; values may be NaN or infinite."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: of all held-out data, and of each source."""

    step: int
    measures: Mapping[str, float]
    sources: Mapping[str, Mapping[str, float]]
    modality: str | None = None
    """The modality whose items were exchanged between samples; None for an evaluation of the true ones."""


@dataclass(frozen=True)
class Event:
    """Something that happened once: resumed, saved, stopped, finished, best."""

    step: int
    time: float | None
    name: str
    text: str


@dataclass(frozen=True)
class Part:
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
class Answer:
    """What the model said to one sample; `question` holds (kind, text or file) in reading order."""

    id: str
    source: str
    question: tuple[tuple[str, str], ...]
    truth: str
    answer: str
    right: bool | None


@dataclass
class Metrics:
    """What metrics.jsonl holds."""

    train: dict[str, Curve] = field(default_factory=dict)
    """By key of the train lines, one of `CURVES`."""
    items: dict[str, Curve] = field(default_factory=dict)
    """Items per second, by modality."""
    evaluations: list[Evaluation] = field(default_factory=list)
    shuffled: list[Evaluation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last_line: Mapping[str, Any] = field(default_factory=dict)
    """The train line that was written last."""

    def last(self, key: str) -> float | None:
        """Return the last value of a key of the train lines."""
        return self.train[key][-1][1] if key in self.train else number(self.last_line.get(key))


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path
    config: str | None
    metrics: Metrics
    summary: Mapping[str, Any]
    """run.json as it is; read it through the methods and `text`, `number`, `mapping`, `entries`."""
    notes: tuple[str, ...] = ()
    timelines: Timelines | None = None
    """Steps of a run whose model is cut into stages."""
    spending: Spending | None = None
    """Where the time goes, of a run that was profiled."""

    @property
    def name(self) -> str:
        """The run's name; the folder's if it has none."""
        return text(self.summary.get("name")) or self.folder.resolve().name

    @property
    def status(self) -> str:
        """Running, finished, stopped or failed."""
        return text(self.summary.get("status")) or "unknown"

    def number(self, key: str) -> float | None:
        """Return a number of run.json."""
        return number(self.summary.get(key))

    @property
    def step(self) -> int | None:
        """The last step that is known."""
        stated = self.number("step")
        logged = [curve[-1][0] for curve in self.metrics.train.values() if curve]
        known = [int(step) for step in [stated, *logged] if step is not None and abs(step) < 2**53]
        return max(known, default=None)

    @property
    def seconds(self) -> float | None:
        """How long it trained."""
        stated = self.number("seconds")
        return stated if stated is not None else self.metrics.last("seconds")

    @property
    def evaluation(self) -> Evaluation | None:
        """The last evaluation."""
        if self.metrics.evaluations:
            return self.metrics.evaluations[-1]
        return _evaluation(mapping(self.summary.get("evaluation")))

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint."""
        named = [event.step for event in self.metrics.events if event.name == "best"]
        return named[-1] if named else _step(mapping(self.summary.get("best")))

    @property
    def shuffled(self) -> list[Evaluation]:
        """The last evaluation with exchanged items, for each modality."""
        stated = [_evaluation(mapping(line)) for line in entries(self.summary.get("shuffled"))]
        lines = [*stated, *self.metrics.shuffled]
        return list({line.modality: line for line in lines if line is not None}.values())

    @property
    def parts(self) -> list[Part]:
        """The parts of the model."""
        return [_part(mapping(part)) for part in entries(self.summary.get("parts"))]

    @property
    def answers(self) -> list[Answer]:
        """The samples that the model was asked at the end."""
        return [_answer(mapping(answer)) for answer in entries(self.summary.get("answers"))]


def read_run(folder: Path) -> Run:
    """Read a run folder; only what is no run folder at all is refused."""
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
    config, notes = _config(folder / CONFIG)
    summary, more = _summary(folder / SUMMARY)
    timelines, last = _read(folder / TIMELINE, read_timelines)
    spending, lost = _read(folder / PROFILE, read_spending)
    notes += [*more, *last, *lost]
    return Run(folder, config, read_metrics(folder / METRICS), summary, tuple(notes), timelines, spending)


def _config(path: Path) -> tuple[str | None, list[str]]:
    try:
        config = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None, [f"There is no {CONFIG}."]
    except OSError as error:
        return None, [f"{CONFIG} could not be read ({error.strerror})."]
    if len(config) > _MOST_CONFIG:
        return config[:_MOST_CONFIG], [f"{CONFIG} has {len(config):,} characters; the first {_MOST_CONFIG:,} are here."]
    return config, []


def _summary(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    try:
        summary = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, [f"There is no {SUMMARY}: the model, the data, samples and versions are not known."]
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{SUMMARY} could not be read ({type(error).__name__}: {error})."]
    if not isinstance(summary, dict):
        return {}, [f"{SUMMARY} holds a {type(summary).__name__}, expected an object."]
    return summary, []


def _read(path: Path, read: Callable[[Mapping[str, Any]], Found]) -> tuple[Found | None, list[str]]:
    """Return what a file holds that not every run has."""
    try:
        return read(mapping(json.loads(path.read_bytes()))), []
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, LookupError, RecursionError) as error:
        return None, [f"{path.name} could not be read ({type(error).__name__}: {error})."]


# ------------------------------------------------------------------------------------------------ metrics


def read_metrics(path: Path) -> Metrics:
    """Read all lines; a step that was logged twice, because the run was resumed before it, counts as last logged."""
    train: dict[str, dict[int, float]] = {key: {} for key in CURVES}
    items: dict[str, dict[int, float]] = {}
    evaluated: dict[tuple[str | None, int], Evaluation] = {}
    metrics, unread, count, torn = Metrics(), 0, 0, False
    for line in _lines(path):
        count += 1
        step = _step(line)
        torn = line is None or step is None
        if line is None or step is None:
            unread += 1
            continue
        kind = line.get("kind")
        if kind == "train":
            _keep(train, CURVES, line, step)
            rates = mapping(line.get("items_per_second"))
            for modality in rates:
                items.setdefault(modality, {})
            _keep(items, rates, rates, step)
            metrics.last_line = line
        elif kind in ("evaluation", "shuffled") and (evaluation := _evaluation(line)) is not None:
            evaluated[evaluation.modality, evaluation.step] = evaluation
        elif kind == "event":
            what = text(line.get("event"))
            metrics.events.append(Event(step, number(line.get("time")), what, text(line.get("text"))))
    metrics.train, metrics.items = _curves(train), _curves(items)
    in_order = sorted(evaluated.values(), key=lambda evaluation: evaluation.step)
    metrics.evaluations = [evaluation for evaluation in in_order if evaluation.modality is None]
    metrics.shuffled = [evaluation for evaluation in in_order if evaluation.modality is not None]
    metrics.notes = _metrics_notes(count, unread, torn)
    return metrics


def _metrics_notes(count: int, unread: int, torn: bool) -> list[str]:
    if not count:
        return [f"{METRICS} is empty: nothing was logged yet."]
    if not unread:
        return []
    why = "; the last one is torn, as when a run is cut off while writing" if torn else ""
    return [f"{METRICS}: {unread:,} of {count:,} lines could not be read{why}."]


def _lines(path: Path) -> Iterator[Mapping[str, Any] | None]:
    """Yield each line's object, or None for a line that is none."""
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


def _step(line: Mapping[str, Any] | None) -> int | None:
    step = number(line.get("step")) if line is not None else None
    return int(step) if step is not None and abs(step) < 2**53 else None


def _keep(curves: dict[str, dict[int, float]], keys: Iterable[str], values: Mapping[str, Any], step: int) -> None:
    for key in keys:
        value = values.get(key)
        if type(value) is float:  # by far the most; a run may have 100,000 lines
            curves[key][step] = value
        elif (known := number(value)) is not None:
            curves[key][step] = known


def _curves(found: Mapping[str, Mapping[int, float]]) -> dict[str, Curve]:
    return {key: sorted(values.items()) for key, values in found.items() if values}


def _evaluation(line: Mapping[str, Any]) -> Evaluation | None:
    step = _step(line)
    if step is None:
        return None
    sources = {name: _numbers(mapping(source)) for name, source in mapping(line.get("sources")).items()}
    modality = text(line.get("modality")) or "unknown" if line.get("kind") == "shuffled" else None
    measures = {key: value for key, value in _numbers(line).items() if key not in _BESIDE}
    return Evaluation(step, measures, sources, modality)


# ------------------------------------------------------------------------------------------------ run.json


def _part(part: Mapping[str, Any]) -> Part:
    names = ("parameters", "trainable", "bytes", "learning_rate", "weight_decay", "flops")
    numbers = {name: number(part.get(name)) for name in names}
    return Part(text(part.get("name")), text(part.get("kind")), text(part.get("train")), **numbers)


def _answer(answer: Mapping[str, Any]) -> Answer:
    question = answer.get("question")
    pieces = [{"text": question}] if isinstance(question, str) else [mapping(piece) for piece in entries(question)]
    right = answer.get("right")
    return Answer(
        id=text(answer.get("id")),
        source=text(answer.get("source")),
        question=tuple((kind, text(value)) for piece in pieces for kind, value in piece.items()),
        truth=text(answer.get("truth")),
        answer=text(answer.get("answer")),
        right=right if isinstance(right, bool) else None,
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: known for key, value in values.items() if (known := number(value)) is not None}
