"""`cornstarch inspect-data`: what a run's data will cost it, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from cornstarch.train.inspecting import Inspection, Waiting

_PERCENTILES = (50, 90, 99, 100)
_LISTED = 10
_ENOUGH = 4  # samples of a portion
_WORTH = 1.05  # a gain that is told
_WIDE = 110  # columns that a table may have on a narrower terminal too: cut figures say nothing


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("inspect-data")(inspect)


def inspect(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that win over the file's.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Look at so many samples of each source only.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write what a planner needs of it, as YAML.")
    ] = None,
) -> None:
    """Show how large a run's samples are for each of its modules, and what uneven samples cost on several replicas.

    Texts are tokenized; of images and sounds only headers are read. No GPU is needed; a model that is composed of parts
    is made without weights.
    """
    from rich.console import Console
    from rich.progress import track

    from cornstarch.cli.train import quiet_libraries
    from cornstarch.plan.facts import write_facts
    from cornstarch.train.source import load_config

    run = load_config(config, overrides or ())
    quiet_libraries()
    from cornstarch.train.inspecting import inspect_data

    screen = Console(stderr=True)

    def watched(numbers: Sequence[int]) -> Iterator[int]:
        yield from track(numbers, "Samples", console=screen, transient=True, disable=not screen.is_terminal)

    found = inspect_data(run, samples, watched)
    console = Console(markup=False, highlight=False, width=max(Console().width, _WIDE))
    console.print(source_table(found))
    console.print(size_table(found))
    console.print(waiting_table(found))
    for line in [*_left_out(found), *advice(found)]:
        console.print(line, soft_wrap=True)
    if output is not None:
        write_facts(output, found.facts)
        console.print(f"Written to {output}.", soft_wrap=True)


# ------------------------------------------------------------------------------------------------ tables


def source_table(found: Inspection) -> Table:
    """Return what was looked at."""
    table = _table("source", "samples", "looked at", "trained on")
    for one in found.sources:
        table.add_row(one.name, f"{one.samples:,}", f"{one.looked_at:,}", f"{one.good:,}")
    return table


def size_table(found: Inspection) -> Table:
    """Return the sizes of samples, module by module."""
    import numpy as np

    from cornstarch.report.figures import flops

    table = _table("of a sample", "mean", *(f"p{place}" for place in _PERCENTILES), "share")
    _add(table, "tokens", found.lengths)
    for name in found.phases[:-1]:
        items = np.array([size.items[name] for size in found.sizes])
        _add(table, f"{name} items", items)
        _add(table, f"{name} tokens", np.array([size.item_tokens[name] for size in found.sizes]))
    whole = found.costs.sum()
    for name, work in zip(found.phases, found.costs, strict=True):
        figures = [work.mean(), *np.percentile(work, _PERCENTILES)]
        table.add_row(f"{name} work", *map(flops, figures), f"{work.sum() / whole:.0%}" if whole else "")
    return table


def waiting_table(found: Inspection) -> Table:
    """Return how long a step takes on several replicas, over the least possible; the config's way is marked."""
    data = found.config.data
    ways = {"padded": (False, False), "padded, balanced": (False, True)}
    ways |= {"packed": (True, False), "packed, balanced": (True, True)}
    marked = (data.packing, data.balance != "off")
    heads = [f"{name} *" if way == marked else name for name, way in ways.items()]
    table = _table("replicas", "samples of a portion", *heads, "dominated by one sample")
    table.title, table.title_justify = "A step's time over the least possible (predicted; * as configured)", "left"
    for one in found.waits:
        times = [f"{one.time(*way):.2f}" for way in ways.values()]
        table.add_row(f"{one.replicas}", f"{one.samples:g}", *times, ", ".join(one.dominated))
    return table


def _add(table: Table, name: str, values: np.ndarray) -> None:
    import numpy as np

    figures = np.percentile(values, _PERCENTILES, method="nearest")
    table.add_row(name, f"{values.mean():,.1f}", *(f"{value:,.0f}" for value in figures), "")


def _table(first: str, *names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(first, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right")
    return table


# ------------------------------------------------------------------------------------------------ words


def _left_out(found: Inspection) -> list[str]:
    """Return what will not be trained on, or not whole."""
    from cornstarch.report.figures import several

    lines = []
    fate = "cut" if found.config.data.too_long == "cut" else "left out"
    if found.config.data.too_long == "error":
        fate = "refused: a run stops at the first of them"
    for samples, said in ((found.too_long, f"will not fit ({fate})"), (found.broken, "cannot be used")):
        if samples:
            lines.append(f"{several(len(samples), 'sample')} {said}:")
            lines += [f"  {sample}" for sample in samples[:_LISTED]]
            lines += [f"  … and {len(samples) - _LISTED:,} more"] if len(samples) > _LISTED else []
    return lines


def advice(found: Inspection) -> list[str]:
    """Return what would make steps shorter, in words."""
    data, lines = found.config.data, []
    # With fewer samples there is nothing to choose from.
    most = next((one for one in reversed(found.waits) if one.samples >= _ENOUGH), found.waits[0])
    is_balanced = data.balance != "off"
    now = most.time(data.packing, is_balanced)
    if not data.packing and now / most.time(True, is_balanced) > _WORTH:
        lines.append(_gain(most, "data.packing=true", now / most.time(True, is_balanced)))
    if not is_balanced and now / most.time(data.packing, True) > _WORTH:
        lines.append(_gain(most, "data.balance=cost", now / most.time(data.packing, True)))
    for one in found.waits:
        if one.dominated:
            lines.append(
                f"From {one.replicas} replicas on, one sample alone can be more than a replica's even share "
                f"({', '.join(one.dominated)}): balancing cannot even that. Use larger batches (loop.batch_size), or "
                "cp for the modules, which spreads the images and tokens of each sample over ranks."
            )
            several = [name for name in found.phases[:-1] if max(size.items[name] for size in found.sizes) > 1]
            if not data.split_images and (lent := [name for name in several if name in one.dominated]):
                lines.append(
                    f"data.split_images=true lets replicas encode one another's items ({', '.join(lent)}), where a "
                    "sample has several."
                )
            break
    return lines


def _gain(one: Waiting, setting: str, gain: float) -> str:
    where = "in one process" if one.replicas == 1 else f"on {one.replicas} replicas"
    return f"{setting} would make steps {gain:.2f} × as fast {where}."
