"""`cornstarch data check` reads a run's data; `cornstarch inspect-data` predicts the cost of its samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cornstarch import cli
from cornstarch.cli import ConfigPath, Overrides, build_figure_table, wide_console
from cornstarch.report.number_format import format_flops, pluralize

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from cornstarch.planner.inspect_data import Inspection

_PERCENTILES = (50, 90, 99, 100)
_MAX_LISTED = 10
_MIN_SAMPLES = 4  # per microbatch: with fewer, balancing has nothing to choose from
_MIN_GAIN = 1.05  # smaller gains are not worth a recommendation

_Samples = Annotated[int | None, typer.Option(min=1, help="Read at most this many samples of each source.")]


def check_data(
    config: ConfigPath,
    overrides: Overrides = None,
    samples: _Samples = None,
    rows: Annotated[bool, typer.Option("--rows", help="Rows and media only, without the model's tokenizer.")] = False,
) -> None:
    """Read, decode and tokenize a config's data; list broken samples and show five samples with their labels."""
    from rich.console import Console

    from cornstarch.config.config_file import load_config
    from cornstarch.data.data_report import check_data, render

    run = load_config(config, overrides or ())
    look = None
    if not rows:
        from cornstarch.tasks.build import build_preview

        cli.quiet_libraries()
        look = build_preview(run)
    report = check_data(run.data, look, most=samples)
    Console().print(render(report))
    if report.problems:
        raise typer.Exit(cli.WRONG_INPUT)  # the report has listed them


def inspect_data(
    config: ConfigPath,
    overrides: Overrides = None,
    samples: _Samples = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the facts that the planner uses, as YAML.")
    ] = None,
) -> None:
    """Show how large a run's samples are for each module, and what uneven samples cost on several replicas.

    Texts are tokenized; of images and sounds only headers are read. No GPU is needed. A model of parts is built without
    weights.
    """
    from rich.console import Console
    from rich.progress import track

    from cornstarch.config.config_file import load_config
    from cornstarch.plan.data_statistics import write_data_statistics

    run = load_config(config, overrides or ())
    cli.quiet_libraries()
    from cornstarch.planner.inspect_data import inspect_data

    screen = Console(stderr=True)

    def show_progress(numbers: Sequence[int]) -> Iterator[int]:
        yield from track(numbers, "Samples", console=screen, transient=True, disable=not screen.is_terminal)

    found = inspect_data(run, samples, show_progress)
    console = wide_console()
    sources = _build_sample_table("source", "samples", "inspected", "trained on")
    for one in found.sources:
        sources.add_row(one.name, f"{one.samples:,}", f"{one.looked_at:,}", f"{one.good:,}")
    for table in (sources, _build_size_table(found), _build_waiting_table(found)):
        console.print(table)
    effects = {"cut": "truncated", "error": "an error: a run stops at the first of them"}
    effect = effects.get(run.data.too_long, "skipped")
    lines = []
    for unused, text in ((found.too_long, f"too long ({effect})"), (found.broken, "broken")):
        if unused:
            lines.append(f"{pluralize(len(unused), 'sample')} {'is' if len(unused) == 1 else 'are'} {text}:")
            lines += [f"  {sample}" for sample in unused[:_MAX_LISTED]]
            lines += [f"  … and {len(unused) - _MAX_LISTED:,} more"] if len(unused) > _MAX_LISTED else []
    lines.append(
        f"Packed rows of {run.data.max_length:,} tokens are {found.fill:.1%} full"
        f"{'' if run.data.packing else ' (data.packing=true)'}."
    )
    for line in [*lines, *recommend(found)]:
        console.print(line, soft_wrap=True)
    if output is not None:
        write_data_statistics(output, found.facts)
        console.print(f"Wrote {output}.", soft_wrap=True)


def _build_sample_table(first: str, *names: str) -> Table:
    from rich import box

    return build_figure_table(first, *names, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _build_size_table(found: Inspection) -> Table:
    import numpy as np

    table = _build_sample_table("per sample", "mean", *(f"p{place}" for place in _PERCENTILES), "fraction")

    def add_row(name: str, values: np.ndarray) -> None:
        figures = np.percentile(values, _PERCENTILES, method="nearest")
        table.add_row(name, f"{values.mean():,.1f}", *(f"{value:,.0f}" for value in figures), "")

    add_row("tokens", found.lengths)
    for name in found.phases[:-1]:
        add_row(f"{name} items", np.array([size.items[name] for size in found.sizes]))
        add_row(f"{name} tokens", np.array([size.item_tokens[name] for size in found.sizes]))
    total = found.costs.sum()
    for name, work in zip(found.phases, found.costs, strict=True):
        figures = [work.mean(), *np.percentile(work, _PERCENTILES)]
        table.add_row(f"{name} work", *map(format_flops, figures), f"{work.sum() / total:.0%}" if total else "")
    return table


def _build_waiting_table(found: Inspection) -> Table:
    """Build the table of step times on several replicas, relative to the least possible; the config's is marked."""
    data = found.config.data
    ways = {"padded": (False, False), "padded, balanced": (False, True)}
    ways |= {"packed": (True, False), "packed, balanced": (True, True)}
    configured = (data.packing, data.balance != "off")
    heads = [f"{name} *" if way == configured else name for name, way in ways.items()]
    table = _build_sample_table("replicas", "microbatch size", *heads, "dominated by one sample")
    table.title, table.title_justify = "Step time relative to the least possible (predicted; * as configured)", "left"
    for one in found.waits:
        times = [f"{one.time(*way):.2f}" for way in ways.values()]
        table.add_row(f"{one.replicas}", f"{one.samples:g}", *times, ", ".join(one.dominated))
    return table


def recommend(found: Inspection) -> list[str]:
    """Return recommendations that would make steps shorter."""
    data, lines = found.config.data, []
    most = next((one for one in reversed(found.waits) if one.samples >= _MIN_SAMPLES), found.waits[0])
    is_balanced = data.balance != "off"
    now = most.time(data.packing, is_balanced)
    where = "in one process" if most.replicas == 1 else f"on {most.replicas} replicas"
    for setting, is_set, way in (
        ("data.packing=true", data.packing, (True, is_balanced)),
        ("data.balance=cost", is_balanced, (data.packing, True)),
    ):
        if not is_set and (gain := now / most.time(*way)) > _MIN_GAIN:
            lines.append(f"{setting} would make steps {gain:.2f} × as fast {where}.")
    for one in found.waits:
        if one.dominated:
            lines.append(
                f"From {one.replicas} replicas on, a single sample can cost more than the mean work of a replica "
                f"({', '.join(one.dominated)}); balancing cannot fix that. Use larger batches (loop.batch_size), or cp "
                "for these modules, which splits the images and tokens of each sample over ranks."
            )
            several = [name for name in found.phases[:-1] if max(size.items[name] for size in found.sizes) > 1]
            if not data.balance_encoders and (movable := [name for name in several if name in one.dominated]):
                lines.append(
                    f"data.balance_encoders=true lets replicas encode items of one another ({', '.join(movable)}), "
                    "where a sample has several."
                )
            break
    return lines
