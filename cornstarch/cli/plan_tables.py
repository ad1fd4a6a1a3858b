"""The tables of `cornstarch plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cornstarch.report.figures import count, percent, size
from cornstarch.report.plan_words import against, cuts_of, dollars, lines_of, rate, seconds, unit, why_best, why_lost

if TYPE_CHECKING:
    from cornstarch.plan.facts import DataFacts
    from cornstarch.plan.predict import Prediction
    from cornstarch.report.planning import Page

_WIDE = 120  # columns that a table may have on a narrower terminal too: cut figures say nothing
_REFUSED = 3
_UNEVEN = 1.05


def show(page: Page, top: int, costs: str, facts: DataFacts | None = None) -> None:
    """Print the best plan, those of other kinds, the config's own, and the reasons.

    Args:
        page: What was found.
        top: Plans of other kinds.
        costs: How it is known what layers cost.
        facts: What the data is like, if that is known.
    """
    console, best, devices = _console(), page.best, page.cluster.devices
    tokens = f" of {count(page.cost.tokens)} tokens" if page.cost.tokens else ""
    lines = [
        f"{page.cluster.name}: {page.cluster.describe()}",
        f"{page.name}: {page.cost.batch:,} samples{tokens} a step, in {page.cost.precision}; costs of layers {costs}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print(plan_table(page, top))
    notes = [f"{line}." for line in cuts_of(best)] + why_best(page.found)
    if best.choice.world < devices:
        notes.append(f"{devices - best.choice.world} of {devices} devices have nothing to do.")
    uneven = facts.straggling(best.choice.dp) if facts is not None else 1.0
    if uneven > _UNEVEN:
        notes.append(
            f"The data is uneven: of {best.choice.dp} replicas the slowest has {uneven:.2f} times the mean work. "
            "`data.balance: cost` deals samples out by cost."
        )
    notes += [f"Too large: {one}." for one in page.found.refused[:_REFUSED]]
    for note in notes:
        console.print(f"• {note}", soft_wrap=True)


def plan_table(page: Page, top: int) -> Table:
    """Return the best plan, those of other kinds, and the config's own."""
    best, own = page.best, page.own
    table = _table(page, "", "a step", "slower", f"{unit(best)}/s", "MFU", "memory")
    table.add_row("best", *_cells(page, best, "", ""))
    for number, one in enumerate(page.found.runners_up[:top], 2):
        table.add_row(str(number), *_cells(page, one.prediction, against(one.prediction, best), why_lost(one)))
    if own is None:
        return table
    if own.prediction is None:
        said = [*own.plan.describe().splitlines()[1:], f"no prediction: {own.trouble}"]
        table.add_row("config", *[""] * (len(table.columns) - 2), "\n".join(said))
    elif own.prediction.fits:
        table.add_row("config", *_cells(page, own.prediction, against(own.prediction, best), ""))
    else:
        table.add_row("config", *_cells(page, own.prediction, "too large", own.prediction.reasons[0]))
    return table


def _cells(page: Page, one: Prediction, compared: str, reason: str) -> list[str]:
    cells = [seconds(one.step), compared, rate(one), percent(one.mfu), f"{size(one.peak)}\nof {size(one.limit)}"]
    return [
        *cells,
        *_paid(page, one, page.cluster.devices),
        "\n".join([*lines_of(one.choice), *filter(None, [reason])]),
    ]


def show_sizes(page: Page) -> None:
    """Print what other sizes of the cluster would do."""
    table = _table(page, "cluster", "a step", f"{unit(page.best)}/s", "efficiency", "MFU", "idle")
    for one in page.scaled:
        best, devices = one.best, one.cluster.devices
        if best is None:
            table.add_row(one.cluster.name, *[""] * (len(table.columns) - 2), "nothing fits")
            continue
        cells = [seconds(best.step), rate(best), percent(one.efficiency), percent(best.mfu)]
        idle = str(devices - best.choice.world or "")
        table.add_row(one.cluster.name, *cells, idle, *_paid(page, best, devices), best.choice.describe())
    console = _console()
    console.print(table)
    console.print(
        f"The batch is the same on every size, {page.cost.batch:,} samples a step; efficiency is that of a device, "
        "against the first size that does.",
        soft_wrap=True,
    )


def _paid(page: Page, one: Prediction, devices: int) -> list[str]:
    """Return the cell of costs, if there is one."""
    if page.price is None or not page.best.tokens_per_second:
        return []
    paid = dollars(one, devices, page.price)
    return ["" if paid is None else f"{paid:.3g}"]


def _table(page: Page, first: str, *names: str) -> Table:
    """Return a table of figures, costs if there is a price, and plans."""
    table = Table(first, show_lines=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if page.price is not None and page.best.tokens_per_second:
        table.add_column("$ for 1M\ntokens", justify="right", no_wrap=True)
    table.add_column("plan")
    return table


def _console() -> Console:
    return Console(markup=False, highlight=False, width=max(Console().width, _WIDE))
