"""`cornstarch profile`: what the layers of a run cost, measured on this device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cornstarch.plan.cost import RunCost

_COSTS = Path("costs.yaml")
_WIDE = 120  # columns that a table may have on a narrower terminal too: cut figures say nothing


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("profile")(profile)


def profile(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that win over the file's.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the costs go, as YAML.")] = _COSTS,
    facts: Annotated[
        Path | None,
        typer.Option("--facts", metavar="FILE", help="What the data is like: a file of `cornstarch inspect-data`."),
    ] = None,
) -> None:
    """Measure what the layers of a run cost on this device, for the planner.

    One layer of each kind is made, with random weights, and run forward and backward, as the run would compute it. The
    model is not made and no weights are read, so that a model that needs many devices can be measured on one.
    `cornstarch plan CONFIG --costs costs.yaml` plans with what was found.
    """
    from rich.console import Console

    from cornstarch.cli.train import quiet_libraries
    from cornstarch.plan.facts import read_facts
    from cornstarch.train.source import load_config

    run = load_config(config, overrides or ())
    known = None if facts is None else read_facts(facts)
    from cornstarch.train.costing import profile_run, write_costs
    from cornstarch.train.costing.place import check_place, device_name

    quiet_libraries()
    check_place(output)
    console = Console(markup=False, highlight=False, width=max(Console().width, _WIDE))
    where = device_name(run)
    with console.status("") as status:
        found = profile_run(run, known, lambda words: status.update(f"measuring {words}"))
    write_costs(output, found, where)
    console.print(cost_table(found))
    console.print(
        f"{found.samples} samples of {found.tokens:,.0f} tokens at a time, in {found.precision}, on {where}: written "
        f"to {output}",
        soft_wrap=True,
    )


def cost_table(found: RunCost) -> Table:
    """Return what modules cost, layers of the same cost together."""
    from itertools import groupby

    from rich.table import Table

    from cornstarch.report.figures import size

    table = Table("module", "layer")
    for name in ("layers", "forward ms", "inputs ms", "weights ms", "kept", "recomputed"):
        table.add_column(name, justify="right")
    for module in found.modules:
        for _, group in groupby(module.layers, key=lambda one: (one.forward, one.input_gradient, one.weight_gradient)):
            layers = list(group)
            first = layers[0]
            times = [f"{1e3 * one:.3f}" for one in (first.forward, first.input_gradient, first.weight_gradient)]
            kept = [size(first.activation_bytes), size(first.activation_bytes_recomputed)]
            table.add_row(module.name, first.name, str(len(layers)), *times, *kept)
    return table
