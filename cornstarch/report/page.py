"""The whole page: one HTML file with its style, its script and its media inside."""

from __future__ import annotations

from collections.abc import Sequence

from cornstarch import __version__
from cornstarch.report import figures, sections
from cornstarch.report.charts import COLOURS, Chart, Line, draw
from cornstarch.report.curves import LONG, smooth
from cornstarch.report.document import head
from cornstarch.report.gantt import pipeline
from cornstarch.report.looks import looks
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.overview import cards, header, notes
from cornstarch.report.reading import Curve, Run
from cornstarch.report.script import SCRIPT
from cornstarch.report.times import times

_MOST_MARKS = 20
_MOST_EVALUATIONS = 200
_SECTIONS = (
    ("curves", "Curves"),
    ("pipeline", "Pipeline"),
    ("times", "Where the time goes"),
    ("looks", "Does the model look?"),
    ("samples", "Samples"),
    ("model", "Model"),
    ("data", "Data"),
    ("events", "Events"),
    ("config", "Config"),
    ("versions", "Versions"),
)


def render(run: Run) -> str:
    """Return the page of a run."""
    contents = {
        "curves": curves(run),
        "pipeline": pipeline(run),  # only a run with stages has one
        "times": times(run),  # only a run that was profiled has them
        "looks": looks(run),
        "samples": sections.samples(run),
        "model": sections.model(run),
        "data": sections.data(run),
        "events": sections.events(run),
        "config": sections.config(run),
        "versions": sections.versions(run),
    }
    shown = [(id, title, content) for id, title in _SECTIONS if (content := contents[id]) is not None]
    body = element(
        "body",
        element("a", "Skip to the content", href="#main", class_="skip"),
        element("div", header(run), class_="page"),
        _navigation([(id, title) for id, title, _ in shown]),
        element(
            "main",
            notes(run),
            cards(run),
            [_section(*one) for one in shown],
            id="main",
            class_="page",
        ),
        element("footer", f"Written by Cornstarch {__version__} from {run.folder.name}", class_="page"),
        element("script", Markup(SCRIPT)),
    )
    return (
        "<!doctype html>\n"
        + element("html", head(f"{run.name[:200]} · {run.status[:40]} · Cornstarch"), body, lang="en")
        + "\n"
    )


def _navigation(sections: Sequence[tuple[str, str]]) -> Markup:
    links = [element("a", title, href=f"#{id}") for id, title in (("overview", "Overview"), *sections)]
    return element("nav", element("div", links, class_="page"), aria_label="Sections")


def _section(id: str, title: str, content: Markup) -> Markup:
    return element("section", element("h2", title, id=f"{id}-title"), content, id=id, aria_labelledby=f"{id}-title")


# ------------------------------------------------------------------------------------------------ curves


def curves(run: Run) -> Markup:
    """Return the curves of the run."""
    train = run.metrics.train
    items = [_line(index, name, curve) for index, (name, curve) in enumerate(run.metrics.items.items())]
    small = [
        _accuracy_chart(run),
        Chart("Learning rate", [Line("scheduled", train.get("learning_rate", []), 3)]),
        Chart("Tokens per second", _lines(train.get("tokens_per_second", []), 6), unit="count", from_zero=True),
        Chart("Items per second", items, from_zero=True),
        Chart("Share of the device's peak (MFU)", _lines(train.get("mfu", []), 2), unit="percent", from_zero=True),
        Chart("Gradient norm", _lines(train.get("grad_norm", []), 5), log=True),
        Chart("Memory", [Line("in use", train.get("memory", []), 4)], unit="size", from_zero=True),
        Chart("Seconds per step", _lines(train.get("step_time", []), 6), from_zero=True),
        Chart("Waiting for data, seconds per step", _waits(run), from_zero=True),
    ]
    loss = draw(_loss_chart(run))
    return join(
        loss or sections.missing("No loss is in metrics.jsonl, or none that is finite: there is nothing to draw."),
        element("div", [draw(chart) for chart in small], class_="charts"),
        _evaluations(run),
    )


def _loss_chart(run: Run) -> Chart:
    lines = _lines(run.metrics.train.get("loss", []), 1, "training", "training, smoothed")
    evaluated = _measure(run, "loss")
    if evaluated:
        lines.append(Line("evaluation", evaluated, 2, "dots"))
    return Chart("Loss", lines, marks=_marks(run), log=True, tall=True)


def _marks(run: Run) -> Sequence[tuple[float, str]]:
    """Return where the run was stopped and resumed, and where its best checkpoint is."""
    happened = [(event.step, event.name) for event in run.metrics.events if event.name in ("stopped", "resumed")]
    if run.best_step is not None:
        happened.append((run.best_step, "best"))
    by_step: dict[int, list[str]] = {}
    for step, name in happened:
        by_step.setdefault(step, []).append(name)
    return [(step, ", ".join(dict.fromkeys(names))) for step, names in sorted(by_step.items())][-_MOST_MARKS:]


def _waits(run: Run) -> list[Line]:
    """Return how long steps waited for batches, and the device for their copies, if it ever did."""
    train = run.metrics.train
    copies = [Line("copies", train["copy_wait"], 2)] if any(value for _, value in train.get("copy_wait", [])) else []
    return [Line("batches", train.get("data_wait", []), 1), *copies]


def _accuracy_chart(run: Run) -> Chart:
    names = list(dict.fromkeys(name for evaluation in run.metrics.evaluations for name in evaluation.sources))
    by_source = {name: _measure(run, "accuracy", name) for name in names[:COLOURS]}
    found = {name: curve for name, curve in by_source.items() if curve} or {"all": _measure(run, "accuracy")}
    lines = [Line(name[:60], curve, index % COLOURS + 1, "dots") for index, (name, curve) in enumerate(found.items())]
    return Chart("Held-out accuracy", lines, unit="percent", range=(0.0, 1.0))


def _measure(run: Run, measure: str, source: str | None = None) -> Curve:
    found: list[tuple[float, float]] = []
    for evaluation in run.metrics.evaluations:
        measures = evaluation.measures if source is None else evaluation.sources.get(source, {})
        if measure in measures:
            found.append((evaluation.step, measures[measure]))
    return found


def _lines(curve: Curve, colour: int, name: str = "logged", smoothed: str = "smoothed") -> list[Line]:
    """Return a curve, with a smooth one over it if it is long."""
    if len(curve) <= LONG:
        return [Line(name, curve, colour)]
    return [Line(name, curve, colour, "raw"), Line(smoothed, smooth(curve), colour)]


def _line(index: int, name: str, curve: Curve) -> Line:
    return Line(name[:60], smooth(curve) if len(curve) > LONG else curve, index % COLOURS + 1)


def _evaluations(run: Run) -> Markup | None:
    """Return all evaluations as a table, for those who want the numbers."""
    found = run.metrics.evaluations[-_MOST_EVALUATIONS:]
    if not found:
        return sections.missing("There is no evaluation in metrics.jsonl.")
    names = list(dict.fromkeys(name for evaluation in found for name in evaluation.measures))
    rows = [
        [f"{evaluation.step:,}", *[_shown(name, evaluation.measures.get(name)) for name in names]]
        for evaluation in reversed(found)
    ]
    columns = ["step", *[f"{name.replace('_', ' ')}#" for name in names]]
    count = figures.several(len(run.metrics.evaluations), "evaluation")
    return element("details", element("summary", f"{count}, as a table"), sections.table(columns, rows, "Evaluations"))


def _shown(name: str, value: float | None) -> str:
    return figures.percent(value) if name.endswith("accuracy") else figures.plain(value)
