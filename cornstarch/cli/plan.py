"""`cornstarch plan`: find the best parallel plan for a cluster, with its cost, and why other plans are slower."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cornstarch.cli import (
    ConfigPath,
    Facts,
    Overrides,
    build_figure_table,
    import_quickly,
    quiet_libraries,
    wide_console,
    write_file,
)
from cornstarch.errors import ConfigError
from cornstarch.report import plan_text
from cornstarch.report.number_format import format_bytes, format_count, format_percent

if TYPE_CHECKING:
    from rich.table import Table

    from cornstarch.config import RunConfig
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.data_statistics import DataStatistics
    from cornstarch.plan.predict import Prediction
    from cornstarch.report.plan_page import PlanReport

_MAX_OTHERS = 40  # plans of other kinds that are compared, and listed on a page; there are rarely as many
_MAX_SIZES = 24
_MAX_REFUSED = 3
_UNEVEN = 1.05  # the slowest replica's work over the mean from which on balancing is recommended
_SIZES = re.compile(r"gpus\s*=\s*(?:(\d{1,6})\s*\.\.\s*(\d{1,6})|(\d{1,6}(?:\s*,\s*\d{1,6})*))")


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="2x8xH100, 8xA100-80, 2xcpu, …, or a file. Default: this machine."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Plan for N processes on this machine, and use all of them.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured costs, from `cornstarch profile`.")
    ] = None,
    facts: Facts = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="First measure this machine and the run's layers; write both there."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="--calibrate: take seconds, and be less exact.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best plan, for `cornstarch train --plan`.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page: timeline, memory, candidates, reasons.")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(metavar="gpus=A..B", help="Also plan for other cluster sizes: gpus=16..512, gpus=8,24."),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=0, help="The number of plans of other kinds to show.")] = 5,
    price: Annotated[
        float | None, typer.Option(metavar="DOLLARS", help="The price of a GPU hour: shows the cost of tokens.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only one line with the plan.")] = False,
) -> None:
    """Find the fastest parallel plan that fits a cluster, its time and memory, and why other plans are slower.

    No weights are loaded, no GPU is needed, and the cluster need not be here. The planner chooses `parallel`,
    `loop.gradient_accumulation_steps` and activation checkpointing; everything else in the config is kept.
    """
    from cornstarch.config.config_file import load_config
    from cornstarch.plan.cluster import Cluster, format_cluster_name, resize_cluster
    from cornstarch.plan.data_statistics import read_data_statistics
    from cornstarch.report.plan_page import render_plan

    # All mistakes are reported before the wait for torch.
    run = load_config(config, overrides or ())
    _check_options(cluster, nproc, costs, facts, price, calibrate, quick)
    sizes = [] if what_if is None else parse_sizes(what_if)
    data = None if facts is None else read_data_statistics(facts)
    machines = None
    if cluster is not None:
        machines = Cluster.parse(cluster)
        name = format_cluster_name(machines.device, machines.nodes, machines.per_node)
        machines = replace(machines, name=machines.name or name)
        for size in sizes:
            resize_cluster(machines, size)  # refuses a size that does not fill nodes
    _check_folders(output, html)
    if calibrate is not None:
        run = _calibrate(run, calibrate, nproc, quick, data)
    page = _search_plan(run, machines or _this_machine(run, nproc), nproc is not None, costs, data)
    page = replace(page, price=price)
    if quiet:
        print(plan_text.describe_auto_plan(page.best, page.cluster))
    else:
        _print_plans(page, top, "measured" if page.cost.is_measured else "estimated", data)
    if sizes:
        page = _compare_sizes(page, run, sizes)
    if output is not None:
        write_file("--output", output, page.plan)
        if not quiet:
            command = plan_text.build_train_command(page.best, page.cluster, str(config), str(output), overrides or ())
            print(f"{output}: {command}")
    if html is not None:
        write_file("--html", html, render_plan(page))
        print(html)


def _check_options(
    cluster: str | None,
    nproc: int | None,
    costs: Path | None,
    facts: Path | None,
    price: float | None,
    calibrate: Path | None,
    quick: bool,
) -> None:
    """Refuse options that do not go together."""
    if cluster is not None and nproc is not None:
        raise ConfigError("--cluster and --nproc: the cluster sets the number of processes. Use one of them.")
    if costs is not None and facts is not None:
        raise ConfigError("--costs and --facts: costs were measured for a certain sample size. Use one of them.")
    if calibrate is not None and (cluster is not None or costs is not None):
        raise ConfigError("--calibrate measures this machine and the run's layers: leave --cluster and --costs out.")
    if quick and calibrate is None:
        raise ConfigError("--quick is an option of --calibrate. Add --calibrate FOLDER.")
    if price is not None and not 0 < price < float("inf"):
        raise ConfigError(f"--price {price:g}: expected dollars per GPU hour, above 0.")


def _check_folders(output: Path | None, html: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed."""
    for path, option in ((output, "--output"), (html, "--html")):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.absolute().parent}.")


def parse_sizes(text: str) -> list[int]:
    """Return the sizes in `--what-if`: doubled from the first to the last, or as listed."""
    found = _SIZES.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError(f"--what-if {text}: expected gpus=16..512 (doubled each time) or a list, gpus=8,16,24.")
    if found[3] is not None:
        sizes = [int(one) for one in found[3].split(",")]
    else:
        first, last = int(found[1]), int(found[2])
        sizes = [first << power for power in range(_MAX_SIZES) if first << power <= last] if first else [0]
        if not sizes:
            raise ConfigError(f"--what-if {text}: {first} is more than {last}.")
    if 0 in sizes:
        raise ConfigError(f"--what-if {text}: 0 GPUs; expected at least 1.")
    return sorted(set(sizes))[:_MAX_SIZES]


def _calibrate(run: RunConfig, folder: Path, nproc: int | None, quick: bool, data: DataStatistics | None) -> RunConfig:
    """Measure this machine and the run's layers; return the run with the files that were written."""
    from rich.console import Console

    with Console(stderr=True).status("starting …") as status, import_quickly():
        from cornstarch.planner.calibrate import calibrate_run

        quiet_libraries()
        found = calibrate_run(run, folder, nproc, quick, data, lambda words: status.update(f"measuring {words} …"))
    print(f"Measured this machine and the layers of {run.name}: {found.cluster} and {found.costs}.")
    return found.config


def _this_machine(run: RunConfig, nproc: int | None) -> Cluster:
    """Return the cluster that the config names, or this machine with `nproc` processes or one per GPU."""
    from cornstarch.plan.cluster import Cluster

    if nproc is None and run.parallel.cluster is not None:
        return Cluster.parse(run.parallel.cluster)
    import torch

    from cornstarch.planner.search_run import build_cluster

    count = nproc or max(1, torch.cuda.device_count())
    return build_cluster(run, count, count)


def _search_plan(
    run: RunConfig, machines: Cluster, uses_all: bool, costs: Path | None, data: DataStatistics | None
) -> PlanReport:
    """Return the best plan and its rivals; ConfigError if nothing fits."""
    status = _show_status("estimating the cost of layers" if costs is None else "reading the cost of layers")
    with status, import_quickly():  # also the trace: nearly all of its objects stay, or are freed without a collection
        from cornstarch.planner import search_run
        from cornstarch.report.plan_page import PlanReport

        quiet_libraries()
        cost = search_run.cost_of(run, machines, costs or run.parallel.costs, data)
    with _show_status(f"searching plans for {machines.name}"):
        found = search_run.plan_run(run, machines, cost, _MAX_OTHERS)
        if found.best is None:
            raise ConfigError(search_run.explain_failure(found, machines))
        best = search_run.use_all_devices(found, run, machines, cost) if uses_all else found.best
    found = replace(found, best=best)
    own = search_run.own_plan(run, machines, cost)
    return PlanReport(run.name, machines, cost, found, own, (), search_run.format_plan_file(best, run, machines))


def _show_status(text: str) -> AbstractContextManager[object]:
    from rich.console import Console

    return Console(stderr=True).status(f"{text} …")


def _print_plans(page: PlanReport, top: int, costs: str, facts: DataStatistics | None) -> None:
    """Print the best plan, `top` plans of other kinds, the config's own, and the reasons."""
    console, best, devices = wide_console(), page.best, page.cluster.devices
    tokens = f" of {format_count(page.cost.tokens)} tokens" if page.cost.tokens else ""
    batch = f"{page.cost.batch:,} samples{tokens} per step, in {page.cost.precision}"
    console.print(f"{page.cluster.name}: {page.cluster.describe()}", soft_wrap=True)
    console.print(f"{page.name}: {batch}; layer costs {costs}", soft_wrap=True)
    console.print(_build_plan_table(page, top))
    notes = [f"{line}." for line in plan_text.describe_layer_split(best)]
    notes += plan_text.explain_choice(page.found)
    if best.candidate.world < devices:
        notes.append(f"{devices - best.candidate.world} of {devices} devices stay idle.")
    uneven = facts.straggler_factor(best.candidate.dp) if facts is not None else 1.0
    if uneven > _UNEVEN:
        notes.append(
            f"The data is uneven: of {best.candidate.dp} replicas the slowest has {uneven:.2f} times the mean work. "
            "`data.balance: cost` assigns samples by cost."
        )
    notes += [f"Too large: {one}." for one in page.found.refused[:_MAX_REFUSED]]
    for note in notes:
        console.print(f"• {note}", soft_wrap=True)


def _build_plan_table(page: PlanReport, top: int) -> Table:
    best, own = page.best, page.own
    names = ("step", "slower", f"{plan_text.select_rate_unit(best)}/s", "MFU", "memory", *page.price_column, "plan")
    table = build_figure_table("", *names, left=("plan",), no_wrap=True, show_lines=True)

    def add_row(name: str, one: Prediction, compared: str, reason: str) -> None:
        figures = [plan_text.format_step(one), compared, plan_text.format_rate(one), format_percent(one.mfu)]
        memory = f"{format_bytes(one.peak)}\nof {format_bytes(one.limit)}"
        described = "\n".join([*plan_text.describe_choice(one.candidate), *filter(None, [reason])])
        table.add_row(name, *figures, memory, *page.format_price(one, page.cluster.devices), described)

    add_row("best", best, "", "")
    for number, other in enumerate(page.found.runners_up[:top], 2):
        compared = plan_text.compare_with_best(other.prediction, best)
        add_row(str(number), other.prediction, compared, plan_text.extract_reason(other))
    for other in page.found.relaxed:
        add_row("–", other.prediction, plan_text.compare_with_best(other.prediction, best), other.reason)
    if own is not None and own.prediction is None:
        text = [*own.plan.describe().splitlines()[1:], f"no prediction: {own.trouble}"]
        table.add_row("config", *[""] * (len(table.columns) - 2), "\n".join(text))
    elif own is not None and own.prediction is not None:
        is_fitting = own.prediction.fits
        compared = plan_text.compare_with_best(own.prediction, best) if is_fitting else "too large"
        add_row("config", own.prediction, compared, "" if is_fitting else own.prediction.reasons[0])
    return table


def _compare_sizes(page: PlanReport, run: RunConfig, sizes: Sequence[int]) -> PlanReport:
    """Print the best plans on clusters of other sizes, and return the page with them."""
    from cornstarch.planner.search_run import what_if
    from cornstarch.report.plan_page import build_size_table

    with _show_status("searching plans for other sizes"):
        page = replace(page, scaled=tuple(what_if(run, page.cluster, page.cost, sizes)))
    view = build_size_table(page)
    names = [name.rstrip("#") for name in view.columns]
    table = build_figure_table(*names, left=("plan",), no_wrap=True, show_lines=True)
    for row in view.rows:
        table.add_row(*(cell if isinstance(cell, str) else cell.text for cell in row))
    console = wide_console()
    console.print(table)
    console.print(
        f"The batch is the same on every size, {page.cost.batch:,} samples per step; efficiency is per device, "
        "relative to the first size that fits.",
        soft_wrap=True,
    )
    return page
