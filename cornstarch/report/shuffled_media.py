"""The shuffled-media check: accuracy with the true images or sounds against items shuffled between samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from cornstarch.report.number_format import format_count, format_number, format_percent
from cornstarch.report.run_folder import EvaluationRecord, RunRecord

# The first measure that both evaluations have is compared.
_MEASURES = ("accuracy", "token_accuracy", "loss")
_BETTER = 0.02
_ITEMS = {"vision": "images", "audio": "sounds", "video": "videos"}


class MediaComparison(NamedTuple):
    """One source with its true items and with shuffled ones."""

    source: str
    measure: str
    true: float
    shuffled: float
    note: str = ""
    chance: float | None = None
    """The accuracy that a model that uses its items has by chance with shuffled ones."""

    @property
    def verdict(self) -> tuple[str, str]:
        """A CSS class and a sentence that say what the two numbers mean."""
        if not (math.isfinite(self.true) and math.isfinite(self.shuffled)):
            return "", "cannot be compared"
        worse = self.shuffled - self.true if self.measure == "loss" else self.true - self.shuffled
        # Only accuracy above chance can be lost: with two classes, half of the answers stay right.
        chance = self.chance or 0.0
        if self.chance is not None and self.true < chance + _BETTER:
            return "bad", "the answers are hardly better than guessing"
        fraction = worse / (self.true - chance) if self.true else 0.0
        if fraction >= 0.5:
            return "good", "the answers depend on them"
        if fraction >= 0.1:
            return "warn", "the answers depend on them in part"
        return "bad", "the answers hardly depend on them"


def compare_evaluations(true: EvaluationRecord | None, shuffled: EvaluationRecord) -> list[MediaComparison]:
    """Compare the sources that both evaluations have; all samples together if they have none in common."""
    if true is None:
        return []
    rows = [
        _compare_measures(source, true.sources[source], measures)
        for source, measures in shuffled.sources.items()
        if source in true.sources
    ]
    return [row for row in rows if row] or list(
        filter(None, [_compare_measures("all", true.measures, shuffled.measures)])
    )


def _compare_measures(source: str, true: Mapping[str, float], shuffled: Mapping[str, float]) -> MediaComparison | None:
    measure = next((name for name in _MEASURES if name in true and name in shuffled), None)
    if measure is None:
        return None
    everything, with_items = true.get("count"), shuffled.get("count")
    note = ""
    if everything is not None and with_items is not None and everything != with_items:
        note = f"{format_count(with_items)} of the {format_count(everything)} samples have items to shuffle."
    chance = shuffled.get("chance") if measure == "accuracy" else None
    return MediaComparison(source, measure, true[measure], shuffled[measure], note, chance)


def build_shuffled_view(run: RunRecord) -> dict[str, Any]:
    """Return the section's blocks, one for each modality, and whether there is any evaluation with shuffled items."""
    blocks = []
    for shuffled in run.shuffled:
        same_step = [one for one in run.metrics.evaluations if one.step == shuffled.step]
        rows = compare_evaluations(same_step[-1] if same_step else run.evaluation, shuffled)
        items = _ITEMS.get(shuffled.modality or "", f"{shuffled.modality or ''} items")
        if rows:
            title = f"{items[:1].upper()}{items[1:60]} shuffled"
            blocks.append({"title": title, "rows": [_build_row(row, items) for row in rows]})
    return {"any": bool(run.shuffled), "blocks": blocks}


def _build_row(row: MediaComparison, items: str) -> dict[str, Any]:
    is_loss = row.measure == "loss"
    show = format_number if is_loss else format_percent
    most = max((v for v in (row.true, row.shuffled) if math.isfinite(v)), default=1.0) if is_loss else 1.0
    css, verdict = row.verdict
    change = f"{row.shuffled - row.true:+.3g}" if is_loss else f"{(row.shuffled - row.true) * 100:+.1f} points"
    return {
        "source": row.source[:60],
        "measure": row.measure.replace("_", " "),
        "bars": [
            {"name": name, "fraction": value / (most or 1.0), "colour": colour, "text": show(value), "note": None}
            for name, value, colour in ((f"true {items}", row.true, 1), ("shuffled", row.shuffled, 2))
        ],
        "notes": list(
            filter(None, [row.note, f"Chance: {format_percent(row.chance)}" if row.chance is not None else ""])
        ),
        "css": css,
        "change": change.replace("-", "−"),
        "verdict": verdict,
    }
