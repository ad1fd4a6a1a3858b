"""The candidates of a search as a table of a page, with what they can be filtered by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cornstarch.plan.choice import Choice
from cornstarch.plan.predict import Prediction
from cornstarch.report import figures
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.overview import bar
from cornstarch.report.plan_words import against, lines_of, rate, seconds, standing, unit

if TYPE_CHECKING:
    from cornstarch.plan.compared import Own
    from cornstarch.plan.search import Found

_FILTERS = {
    "encoders": "encoders",
    "tp": "tp",
    "stages": "stages",
    "data": "data parallelism",
    "again": "checkpointing",
}


def candidates(found: Found, own: Own | None) -> Markup:
    """Return all plans that were found, with filters.

    Args:
        found: The best and those of other kinds.
        own: The config's own plan, if it has one.
    """
    assert found.best is not None
    rows = list(_rows(found, own))
    every = [_facts(one.choice) for _, one, _ in rows]
    controls = [one for name in _FILTERS if (one := _filter(name, [facts[name] for facts in every])) is not None]
    columns = ["", "plan", "devices#", "a step#", f"{unit(found.best)}/s#", "MFU#", "memory#", "against the best"]
    heads = [
        element("th", name.rstrip("#"), scope="col", class_="number" if name.endswith("#") else None)
        for name in columns
    ]
    body = [_row(name, one, reason) for name, one, reason in rows]
    note = (
        f"There is no prediction of the config's own plan: {own.trouble}"
        if own is not None and not own.prediction
        else None
    )
    return join(
        element(
            "div",
            controls,
            element("output", f"{len(rows)} of {len(rows)}", aria_live="polite"),
            class_="filters",
            hidden=True,
        ),
        element(
            "div",
            element("table", element("thead", element("tr", heads)), element("tbody", body)),
            class_="scroll",
            role="region",
            aria_label="Candidates",
            tabindex=0,
        ),
        element("p", note, class_="note", style="margin-top:0.9rem") if note else None,
    )


def _rows(found: Found, own: Own | None) -> Iterator[tuple[str, Prediction, str]]:
    assert found.best is not None
    yield "best", found.best, ""
    for number, one in enumerate(found.runners_up, 2):
        yield str(number), one.prediction, one.reason
    if own is not None and own.prediction is not None:
        yield "config", own.prediction, against(own.prediction, found.best)


def _facts(choice: Choice) -> dict[str, str]:
    """Return what a candidate is filtered by."""
    last = choice.modules[-1][1]
    again = [name for name, plan in choice.modules if plan.activation_checkpointing]
    return {
        "encoders": standing(choice) if len(choice.modules) > 1 else "",
        "tp": str(last.tp),
        "stages": str(last.stages),
        "data": choice.kind,
        "again": "all" if len(again) == len(choice.modules) else " and ".join(again) or "none",
    }


def _filter(name: str, values: Sequence[str]) -> Markup | None:
    different = sorted(
        set(values), key=lambda value: (not value.isdigit(), int(value) if value.isdigit() else 0, value)
    )
    if len(different) < 2:
        return None
    options = [element("option", value, value=value) for value in different]
    return element(
        "label", _FILTERS[name], element("select", element("option", "any", value=""), options, data_filter=name)
    )


def _row(name: str, one: Prediction, reason: str) -> Markup:
    marks = {f"data_{key}": value for key, value in _facts(one.choice).items()}
    number, *rest = [
        f"{one.choice.world:,}", seconds(one.step), rate(one), figures.percent(one.mfu),
        join(figures.size(one.peak), bar(one.peak / one.limit, 1 if one.fits else 2)),
    ]  # fmt: skip
    return element(
        "tr",
        element("th", name, scope="row"),
        element("td", element("span", _broken(lines_of(one.choice)), class_="text")),
        [element("td", value, class_="number") for value in (number, *rest)],
        element("td", element("span", reason, class_="text")),
        class_="best" if name == "best" else None,
        **marks,
    )


def _broken(lines: Sequence[str]) -> Markup:
    return join([join(line, element("br")) for line in lines[:-1]], lines[-1])
