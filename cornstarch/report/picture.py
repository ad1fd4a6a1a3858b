"""The loss as a picture, for places where no HTML is shown."""

from __future__ import annotations

import io

from cornstarch.report.curves import LONG, finite, smooth, thin
from cornstarch.report.reading import Curve, Run

_INK, _PALE, _TRAIN, _EVALUATION = "#1b2733", "#d9dfe5", "#0f766e", "#c2410c"
_MARGINS = {"left": 0.1, "right": 0.98, "top": 0.89, "bottom": 0.11}


def loss_picture(run: Run) -> bytes:
    """Return a PNG of the loss of the training and of the evaluations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, facecolor="white")
    figure.subplots_adjust(**_MARGINS)  # a layout that finds them draws everything twice
    FigureCanvasAgg(figure)  # without pyplot, which would keep the figure in a global list
    axes = figure.add_subplot()
    trained = finite(run.metrics.train.get("loss", []))
    evaluated = finite((e.step, e.measures["loss"]) for e in run.metrics.evaluations if "loss" in e.measures)
    if len(trained) > LONG:
        axes.plot(*_columns(thin(trained)), color=_TRAIN, alpha=0.3, linewidth=1)
        axes.plot(*_columns(smooth(trained)), color=_TRAIN, linewidth=2, label="training (smoothed)")
    elif trained:
        marker = "o" if len(trained) < 3 else ""  # a line of one point would not be seen
        axes.plot(*_columns(trained), color=_TRAIN, linewidth=2, label="training", marker=marker)
    if evaluated:
        axes.plot(*_columns(thin(evaluated)), color=_EVALUATION, marker="o", markersize=4, label="evaluation")
    if trained or evaluated:
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, "no loss was logged", ha="center", va="center", transform=axes.transAxes, color=_INK)
    # A name is text here, not mathematics between dollar signs.
    axes.set_title(_short(run.name), loc="left", color=_INK, fontweight="bold", parse_math=False)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss", color=_INK)
    axes.grid(color=_PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_PALE)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _columns(points: Curve) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _short(name: str) -> str:
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in name)
    return shown if len(shown) <= 60 else shown[:59] + "…"
