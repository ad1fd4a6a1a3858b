"""Whether the model looks: its accuracy with the true items against items exchanged between samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from cornstarch.report import figures
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.overview import bar
from cornstarch.report.reading import Evaluation, Run

# The first measure that both evaluations have is compared.
_MEASURES = ("accuracy", "token_accuracy", "loss")
_BETTER = 0.02
_ITEMS = {"vision": "images", "audio": "sounds", "video": "videos"}


class Comparison(NamedTuple):
    """One source with its true items and with exchanged ones."""

    source: str
    measure: str
    true: float
    exchanged: float
    note: str = ""
    chance: float | None = None
    """The accuracy that a model that looks has by chance, with exchanged items."""

    @property
    def verdict(self) -> tuple[str, str]:
        """Return a class and a sentence that say what the two numbers mean."""
        if not (math.isfinite(self.true) and math.isfinite(self.exchanged)):
            return "", "cannot be compared"
        worse = self.exchanged - self.true if self.measure == "loss" else self.true - self.exchanged
        # What can be lost is what is more than chance: of two classes, half of the answers stay right.
        chance = self.chance or 0.0
        if self.chance is not None and self.true < chance + _BETTER:
            return "bad", "the answers are hardly better than guessing"
        share = worse / (self.true - chance) if self.true else 0.0
        if share >= 0.5:
            return "good", "the answers depend on them"
        if share >= 0.1:
            return "warn", "the answers depend on them in part"
        return "bad", "the answers hardly depend on them"


def looks(run: Run) -> Markup:
    """Return the section."""
    compared = [(line, compare(_true(run, line), line)) for line in run.shuffled]
    blocks = [_block(line, rows) for line, rows in compared if rows]
    if not blocks:
        why = (
            "The run has evaluations with exchanged items, but none of the true ones to compare them with."
            if compared
            else "The run has no evaluation with exchanged items: it has not ended, or has no evaluation data with "
            "images or sounds."
        )
        return join(element("p", why, class_="missing"))
    return join(
        element(
            "p",
            "The held-out samples once as they are, and once with their images or sounds exchanged between samples. "
            "A model that looks falls to about the accuracy of guessing; one that does not look stays where it was.",
            class_="lead",
        ),
        element("div", blocks, class_="looks"),
    )


def _true(run: Run, line: Evaluation) -> Evaluation | None:
    """Return the evaluation at the same step, else the last one."""
    same = [evaluation for evaluation in run.metrics.evaluations if evaluation.step == line.step]
    return same[-1] if same else run.evaluation


def compare(true: Evaluation | None, exchanged: Evaluation) -> list[Comparison]:
    """Return the sources that both evaluations have; all together, if they share none."""
    if true is None:
        return []
    rows = [
        _row(source, true.sources[source], measures)
        for source, measures in exchanged.sources.items()
        if source in true.sources
    ]
    return [row for row in rows if row] or [row for row in [_row("all", true.measures, exchanged.measures)] if row]


def _row(source: str, true: Mapping[str, float], exchanged: Mapping[str, float]) -> Comparison | None:
    for measure in _MEASURES:
        if measure in true and measure in exchanged:
            note = _coverage(true.get("count"), exchanged.get("count"))
            chance = exchanged.get("chance") if measure == "accuracy" else None
            return Comparison(source, measure, true[measure], exchanged[measure], note, chance)
    return None


def _coverage(all_samples: float | None, with_items: float | None) -> str:
    """Say so if the two numbers are not over the same samples."""
    if all_samples is None or with_items is None or all_samples == with_items:
        return ""
    return f"{figures.count(with_items)} of the {figures.count(all_samples)} samples have items to exchange."


def _block(line: Evaluation, rows: list[Comparison]) -> Markup:
    name = line.modality or ""
    items = _ITEMS.get(name, f"{name} items")
    return element(
        "article",
        element("h3", f"{items[:1].upper()}{items[1:60]} exchanged"),
        [_source(row, items) for row in rows],
        class_="card look",
    )


def _source(row: Comparison, items: str) -> Markup:
    loss = row.measure == "loss"
    show = figures.plain if loss else figures.percent
    most = max((v for v in (row.true, row.exchanged) if math.isfinite(v)), default=1.0) if loss else 1.0
    kind, verdict = row.verdict
    change = f"{row.exchanged - row.true:+.3g}" if loss else f"{(row.exchanged - row.true) * 100:+.1f} points"
    return element(
        "div",
        element("h4", row.source[:60], element("small", f" {row.measure.replace('_', ' ')}")),
        element(
            "ul",
            [
                element("li", element("span", label, class_="name"), bar(value / (most or 1.0), colour),
                        element("b", show(value)))
                for label, value, colour in ((f"true {items}", row.true, 1), ("exchanged", row.exchanged, 2))
            ],
            class_="bars",
        ),
        element("p", row.note, class_="note") if row.note else None,
        element("p", f"Chance: {figures.percent(row.chance)}", class_="note") if row.chance is not None else None,
        element("p", element("b", change.replace("-", "−")), f": {verdict}", class_=f"verdict {kind}"),
    )  # fmt: skip
