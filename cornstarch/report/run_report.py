"""The report of a run: report.html, one page with style, script and media inside, and the loss as loss.png."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.report import charts
from cornstarch.report import number_format as fmt
from cornstarch.report.charts import Chart, ChartLine, keep_finite, smooth_points
from cornstarch.report.compilation import build_compilation_view
from cornstarch.report.held_out import build_samples_view, build_shuffled_view, shorten_text
from cornstarch.report.html import Table, TableCell, render_page
from cornstarch.report.json_values import as_list, as_mapping, as_number, as_text
from cornstarch.report.restarts import build_restarts_view
from cornstarch.report.run_record import Curve, ReportedPart, RunRecord, read_run
from cornstarch.report.time_breakdown import format_milliseconds
from cornstarch.report.timelines import build_pipeline_view

PAGE, PICTURE = "report.html", "loss.png"

_SECTIONS = {
    "overview": "Overview",
    "curves": "Curves",
    "pipeline": "Pipeline",
    "times": "Where the time goes",
    "compilation": "Compiled layers",
    "shuffled-media": "Shuffled-media check",
    "samples": "Samples",
    "model": "Model",
    "data": "Data",
    "restarts": "Failures and restarts",
    "events": "Events",
    "config": "Config",
    "versions": "Versions",
}
# Class and sign of a status; the sign is for readers who do not see the colour.
_STATUS = {"finished": ("good", "✓"), "running": ("busy", "▸"), "stopped": ("warn", "■"), "failed": ("bad", "✗")}
_EVENTS = {"failed": "bad", "finished": "good", "best": "good"}
_EVENTS |= dict.fromkeys(("restarted", "stopped", "left_out", "rewound"), "warn")
_MAX_MARKS = 20
_MAX_EVALUATIONS = 200
_MAX_ROWS = 200


def write_report(folder: Path) -> Path:
    """Write `report.html` and `loss.png` into a run folder, from its content so far, and return the page's path."""
    folder = Path(folder)
    run = read_run(folder)
    # JSON may contain lone surrogates, which UTF-8 cannot encode.
    page = render_run(run).encode("utf-8", errors="replace")
    picture = plot_loss(run)
    for path, content in ((folder / PICTURE, picture), (folder / PAGE, page)):
        # Atomically: a reader finds the old file or the new one, never half of one.
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        except OSError as error:
            raise ConfigError(f"The report cannot be written into {folder}: {error.strerror}.") from error
        finally:
            unfinished.unlink(missing_ok=True)
    return folder / PAGE


def render_run(run: RunRecord) -> str:
    """Render the page of a run."""
    optional = {
        "pipeline": build_pipeline_view(run.timelines),
        "times": _build_times(run),
        "compilation": build_compilation_view(run),
        "restarts": build_restarts_view(run.folder),
    }
    return render_page(
        "run.html",
        title=f"{run.name[:200]} · {run.status[:40]}",
        sections=[(id, title) for id, title in _SECTIONS.items() if optional.get(id, True)],
        folder=run.folder.name,
        **_build_header(run),
        warnings=[*run.warnings, *run.metrics.warnings],
        accuracies=_build_accuracies(run),
        key_figures=list(_build_key_figures(run)),
        curves=_build_curves(run),
        **optional,
        shuffled=build_shuffled_view(run),
        samples=build_samples_view(run),
        model=_build_model_table(run.parts) if run.parts else None,
        data=_build_data(run),
        events=_build_events(run),
        config=run.config,
        config_lines=fmt.pluralize((run.config or "").count("\n"), "line"),
        versions=[(name[:60], as_text(v)[:60]) for name, v in as_mapping(run.summary.get("versions")).items()],
    )


def _build_header(run: RunRecord) -> dict[str, Any]:
    css, sign = _STATUS.get(run.status, ("", "?"))
    facts = {
        "task": as_text(run.summary.get("task")),
        "started": fmt.format_timestamp(run.number("started")),
        "ended": fmt.format_timestamp(run.number("ended")),
    }
    step, total = run.step, run.number("total_steps")
    progress = None
    if step is not None and total is not None and 0 < total < float("inf"):
        progress = {"fraction": step / total, "text": f"step {step:,} of {total:,.0f}"}
    return {
        "name": run.name[:200],
        "status": {"css": css, "sign": sign, "text": run.status[:40]},
        "facts": [(name, value) for name, value in facts.items() if value.strip(fmt.MISSING)],
        "command": as_text(run.summary.get("command"))[:2000],
        "progress": progress,
    }


def _build_accuracies(run: RunRecord) -> dict[str, Any] | None:
    """Return the accuracy of each source as bars; of all samples together if no source has one."""
    evaluation = run.evaluation
    if evaluation is None:
        return None
    sources = {name: measures for name, measures in evaluation.sources.items() if "accuracy" in measures}
    if not sources and "accuracy" in evaluation.measures:
        sources = {"all": evaluation.measures}
    rows = []
    for name, measures in list(sources.items())[:12]:
        accuracy, note = measures["accuracy"], f"of {measures['count']:,.0f}" if measures.get("count") else ""
        text = fmt.format_percent(accuracy)
        rows.append({"name": name[:60], "fraction": accuracy, "colour": 1, "text": text, "note": note})
    return {"title": f"Held-out accuracy at step {evaluation.step:,}", "rows": rows} if rows else None


def _build_key_figures(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of each card."""
    train, summary = run.metrics.train, run.summary
    trained, evaluation = run.metrics.last("loss"), run.evaluation
    if evaluation is not None and "loss" in evaluation.measures:
        best = f" · best at step {run.best_step:,}" if run.best_step is not None else ""
        note = f"training {fmt.format_number(trained)}{best}"
        yield "Held-out loss", fmt.format_number(evaluation.measures["loss"]), note
    else:
        note = "nothing was logged" if trained is None else "no evaluation"
        yield "Training loss", fmt.format_number(trained), note

    if "tokens_per_second" in train:
        notes = ["median"]
        if "flops_per_second" in train:
            notes.append(f"{fmt.format_flops(_median(train['flops_per_second']))}/s")
        if "mfu" in train:
            notes.append(f"{fmt.format_percent(_median(train['mfu']))} MFU")
        for name, curve in list(run.metrics.items.items())[:3]:
            notes.append(f"{fmt.format_number(float(f'{_median(curve):.3g}'))} {name}")
        yield "Tokens per second", fmt.format_count(_median(train["tokens_per_second"])), " · ".join(notes)

    prediction = as_mapping(summary.get("prediction"))
    ratio, notes = as_number(prediction.get("ratio")), [fmt.pluralize(run.step, "step")] if run.step else []
    if ratio is not None:
        longer = f"{fmt.format_percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"
        error = fmt.format_error(as_number(prediction.get("error"))).strip()
        bar = f" ({error})" if error else ""
        notes.append(f"{longer} than predicted for {as_text(prediction.get('cluster'))[:40]}{bar}")
    yield "Training time", fmt.format_duration(run.seconds), " · ".join(notes)
    if run.parts:
        total = sum(part.parameters or 0 for part in run.parts)
        trainable = sum(part.trainable or 0 for part in run.parts)
        fraction = f" ({fmt.format_percent(trainable / total)})" if total else ""
        yield "Parameters", fmt.format_count(total), f"{fmt.format_count(trainable)} trained{fraction}"

    device, precision = as_text(summary.get("device")), as_text(summary.get("precision"))
    if device or precision:
        notes = [f"precision {precision[:40]}"] if precision else []
        if buckets := as_text(summary.get("buckets")):
            notes.append(f"gradients in {buckets[:120]}")
        yield "Device", device[:40] or fmt.MISSING, " · ".join(notes)

    if "memory" in train:
        checkpointing = as_text(as_mapping(summary.get("recomputation")).get("line"))[:120]
        note = " · ".join(filter(None, ["as logged while training", checkpointing]))
        yield "Peak memory", fmt.format_bytes(max(value for _, value in train["memory"])), note


def _median(curve: Curve) -> float:
    return median(value for _, value in curve)


def _build_curves(run: RunRecord) -> dict[str, Any]:
    train = run.metrics.train
    items = [
        ChartLine(name[:60], smooth_points(curve) if len(curve) > charts.LONG else curve, index % charts.COLOURS + 1)
        for index, (name, curve) in enumerate(run.metrics.items.items())
    ]
    waits = [ChartLine("batches", train.get("data_wait", []), 1)]
    if any(value for _, value in train.get("copy_wait", [])):
        waits.append(ChartLine("copies", train["copy_wait"], 2))
    steps = _build_lines(train.get("step_time", []), 6)
    if predicted := train.get("predicted_step_time"):
        steps.append(ChartLine("predicted", predicted, 2))
    names = list(dict.fromkeys(name for evaluation in run.metrics.evaluations for name in evaluation.sources))
    by_source = {name: _collect_measure(run, "accuracy", name) for name in names[: charts.COLOURS]}
    found = {name: curve for name, curve in by_source.items() if curve} or {"all": _collect_measure(run, "accuracy")}
    accuracy = [ChartLine(name[:60], curve, colour, "dots") for colour, (name, curve) in enumerate(found.items(), 1)]
    others = [
        Chart("Held-out accuracy", accuracy, unit="percent", range=(0.0, 1.0)),
        Chart("Learning rate", [ChartLine("scheduled", train.get("learning_rate", []), 3)]),
        Chart("Tokens per second", _build_lines(train.get("tokens_per_second", []), 6), unit="count", from_zero=True),
        Chart("Items per second", items, from_zero=True),
        Chart("Model FLOPs utilization (MFU)", _build_lines(train.get("mfu", []), 2), "percent", from_zero=True),
        Chart("Gradient norm", _build_lines(train.get("grad_norm", []), 5), log=True),
        Chart("Memory", [ChartLine("in use", train.get("memory", []), 4)], unit="size", from_zero=True),
        Chart("Seconds per step", steps, from_zero=True),
        Chart("Waiting for data, seconds per step", waits, from_zero=True),
    ]
    loss = _build_lines(train.get("loss", []), 1, "training", "training, smoothed")
    if evaluated := _collect_measure(run, "loss"):
        loss.append(ChartLine("evaluation", evaluated, 2, "dots"))
    return {
        "loss": charts.draw_chart(Chart("Loss", loss, marks=_collect_marks(run), log=True, tall=True)),
        "charts": [charts.draw_chart(chart) for chart in others],
        "evaluations": _build_evaluation_table(run),
        "evaluation_count": fmt.pluralize(len(run.metrics.evaluations), "evaluation"),
    }


def _collect_marks(run: RunRecord) -> Sequence[tuple[float, str]]:
    """Return the steps at which the run was stopped or resumed, and that of its best checkpoint."""
    by_step: dict[int, list[str]] = {}
    for event in run.metrics.events:
        if event.name in ("stopped", "resumed", "restarted"):
            by_step.setdefault(event.step, []).append(event.name)
    if run.best_step is not None:
        by_step.setdefault(run.best_step, []).append("best")
    return [(step, ", ".join(dict.fromkeys(names))) for step, names in sorted(by_step.items())][-_MAX_MARKS:]


def _collect_measure(run: RunRecord, measure: str, source: str | None = None) -> Curve:
    found: list[tuple[float, float]] = []
    for evaluation in run.metrics.evaluations:
        measures = evaluation.measures if source is None else evaluation.sources.get(source, {})
        if measure in measures:
            found.append((evaluation.step, measures[measure]))
    return found


def _build_lines(curve: Curve, colour: int, name: str = "logged", smoothed: str = "smoothed") -> list[ChartLine]:
    """Return a curve, with a smooth one over it if it is long."""
    if len(curve) <= charts.LONG:
        return [ChartLine(name, curve, colour)]
    return [ChartLine(name, curve, colour, "raw"), ChartLine(smoothed, smooth_points(curve), colour)]


def _build_evaluation_table(run: RunRecord) -> Table | None:
    found = run.metrics.evaluations[-_MAX_EVALUATIONS:]
    if not found:
        return None
    names = list(dict.fromkeys(name for evaluation in found for name in evaluation.measures))
    formats = [fmt.format_percent if name.endswith("accuracy") else fmt.format_number for name in names]
    rows = [
        [f"{e.step:,}", *[form(e.measures.get(name)) for name, form in zip(names, formats, strict=True)]]
        for e in reversed(found)
    ]
    return Table(["step", *[f"{name.replace('_', ' ')}#" for name in names]], rows, "Evaluations")


def _build_times(run: RunRecord) -> dict[str, Any] | None:
    """Return where the time of a step goes; None if the run was not profiled."""
    breakdown = run.breakdown
    if breakdown is None:
        return None
    several = len(breakdown.ranks) > 1
    columns = ["part", "forward, ms#", "backward, ms#", "total, ms#", "fraction#", *(["least#", "most#"] * several)]
    rows: list[list[str | TableCell]] = []
    for row in breakdown.rows():
        extremes = [format_milliseconds(one) or "0" for one in breakdown.extremes(row.name)] if several else []
        fraction = row.seconds / breakdown.seconds if breakdown.seconds else None
        part = TableCell(fmt.format_percent(fraction), fraction=fraction) if fraction is not None else ""
        rows.append([row.name[:60], *row.format_phases(), part, *extremes])
        for kind in row.kinds.values():
            rows.append([TableCell(kind.name, "small"), *kind.format_phases(), "", *([""] * 2 * several)])
    foot = ["a step", "", "", format_milliseconds(breakdown.seconds), "", *([""] * 2 * several)]
    title = breakdown.title()
    return {
        "lead": f"{title[0].upper()}{title[1:]}.",
        "table": Table(columns, rows, "Where the time goes", foot),
        "notes": [note[:400] for note in breakdown.notes],
    }


def _build_model_table(parts: Sequence[ReportedPart]) -> Table:
    totals: dict[str, float | None] = {}
    for key in ("parameters", "trainable", "bytes", "flops"):
        known = [value for part in parts if (value := getattr(part, key)) is not None]
        totals[key] = sum(known) if known else None

    def build_fraction(text: str, value: float | None, whole: float | None) -> TableCell:
        if value is None or not whole:
            return TableCell(text)
        return TableCell(text, note=fmt.format_percent(value / whole), fraction=value / whole)

    columns = [
        "part", "kind", "parameters#", "trained#", "memory#", "learning rate#", "weight decay#", "forward per sample#",
    ]  # fmt: skip
    rows: list[list[str | TableCell]] = []
    for part in parts:
        parameters = build_fraction(fmt.format_count(part.parameters), part.parameters, totals["parameters"])
        trained = TableCell(fmt.format_count(part.trainable), note=part.train or fmt.MISSING)
        rates = [fmt.format_number(part.learning_rate), fmt.format_number(part.weight_decay)]
        flops = build_fraction(fmt.format_flops(part.flops), part.flops, totals["flops"])
        kind = TableCell(part.kind, "code")
        rows.append([part.name, kind, parameters, trained, fmt.format_bytes(part.bytes), *rates, flops])
    counts = [fmt.format_count(totals["parameters"]), fmt.format_count(totals["trainable"])]
    foot = ["all parts", "", *counts, fmt.format_bytes(totals["bytes"]), "", "", fmt.format_flops(totals["flops"])]
    return Table(columns, rows, "The parts of the model", foot)


def _build_data(run: RunRecord) -> list[tuple[str, list[str], str]]:
    """Return (title, lines, text if there are none) of each block."""
    described = as_mapping(run.summary.get("data"))
    unknown = "run.json does not describe it."
    blocks = [
        (title, _shorten_lines([as_text(line) for line in as_list(described.get(key))]), unknown)
        for key, title in (("train", "Training"), ("evaluation", "Evaluation"))
    ]
    skipped = {name: as_number(count) for name, count in as_mapping(run.summary.get("skipped")).items()}
    if not skipped and run.metrics.last("skipped") is not None:
        skipped = {"of all kinds": run.metrics.last("skipped")}
    lines = [f"{fmt.format_count(count)} {name.replace('_', ' ')}" for name, count in skipped.items()]
    blocks.append(("Skipped samples", _shorten_lines(lines), "The number of skipped samples is not known."))
    if cache := as_mapping(run.summary.get("features")):
        hits, misses = (as_number(cache.get(name)) or 0 for name in ("hits", "misses"))
        lines = [
            f"{fmt.format_count(hits)} of {fmt.format_count(hits + misses)} items found",
            f"{fmt.format_bytes(as_number(cache.get('bytes')))} in {as_text(cache.get('folder'))}",
            *([as_text(cache["problem"])] if cache.get("problem") else []),
        ]
        blocks.append(("Feature cache", _shorten_lines(lines), unknown))
    return blocks


def _shorten_lines(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_ROWS
    return [*map(shorten_text, lines[:_MAX_ROWS]), *([f"and {more:,} more"] if more > 0 else [])]


def _build_events(run: RunRecord) -> dict[str, Any]:
    found = run.metrics.events
    shown, started = found[-_MAX_ROWS:], run.number("started")
    note = f"The last {_MAX_ROWS} of {len(found):,}. " if len(found) > len(shown) else ""
    rows: list[list[str | TableCell]] = []
    for event in shown:
        css = _EVENTS.get(event.name, "")
        after = None if event.time is None or started is None else max(0.0, event.time - started)
        name = TableCell(event.name[:40] or "event", "span", f"pill {css}".rstrip())
        text = TableCell(shorten_text(event.text), "span", "text")
        times = [fmt.format_duration(after), fmt.format_timestamp(event.time)]
        rows.append([name, f"{event.step:,}", text, *times])
    table = Table(["event", "step#", "what", "after#", "time"], rows, "Events")
    return {"note": note, "table": table if found else None}


def plot_loss(run: RunRecord) -> bytes:
    """Return a PNG of the training and evaluation loss, for places that show no HTML."""
    # matplotlib is for pictures alone: nothing else imports it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink, pale, train_colour, evaluation_colour = "#1b2733", "#d9dfe5", "#0f766e", "#c2410c"
    figure = Figure(figsize=(8, 4.5), dpi=150, facecolor="white")
    figure.subplots_adjust(left=0.1, right=0.98, top=0.89, bottom=0.11)  # a layout engine would draw everything twice
    FigureCanvasAgg(figure)  # without pyplot, which would keep the figure in a global list
    axes = figure.add_subplot()
    trained = keep_finite(run.metrics.train.get("loss", []))
    evaluated = keep_finite(_collect_measure(run, "loss"))
    if len(trained) > charts.LONG:
        axes.plot(*zip(*charts.thin_points(trained), strict=True), color=train_colour, alpha=0.3, linewidth=1)
        smoothed = smooth_points(trained)
        axes.plot(*zip(*smoothed, strict=True), color=train_colour, linewidth=2, label="training (smoothed)")
    elif trained:
        marker = "o" if len(trained) < 3 else ""  # a line of one point would not be seen
        axes.plot(*zip(*trained, strict=True), color=train_colour, linewidth=2, label="training", marker=marker)
    if evaluated:
        points = charts.thin_points(evaluated)
        axes.plot(*zip(*points, strict=True), color=evaluation_colour, marker="o", markersize=4, label="evaluation")
    if trained or evaluated:
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, "no loss was logged", ha="center", va="center", transform=axes.transAxes, color=ink)
    # A name is text here, not mathematics between dollar signs.
    title = "".join(letter if letter.isprintable() else "\ufffd" for letter in run.name)
    title = title if len(title) <= 60 else title[:59] + "…"
    axes.set_title(title, loc="left", color=ink, fontweight="bold", parse_math=False)
    axes.set_xlabel("step", color=ink)
    axes.set_ylabel("loss", color=ink)
    axes.grid(color=pale, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(pale)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
