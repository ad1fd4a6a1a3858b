"""`cornstarch plan`: the best way to spread a run over a cluster, what it takes, and why the others lost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.facts import DataFacts
    from cornstarch.report.planning import Page
    from cornstarch.train.config import RunConfig

_OTHERS = 40  # plans of other kinds that are looked at, and listed on a page; there are hardly ever as many
_MOST_SIZES = 24
_SIZES = re.compile(r"gpus\s*=\s*(?:(\d{1,6})\s*\.\.\s*(\d{1,6})|(\d{1,6}(?:\s*,\s*\d{1,6})*))")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that win over the file's.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="2x8xH100, 8xA100-80, 2xcpu, …, or a file. Default: this one."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="This machine, and N processes, all of them used.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="What `cornstarch profile` measured, to plan by.")
    ] = None,
    facts: Annotated[
        Path | None, typer.Option("--facts", metavar="FILE", help="What `cornstarch inspect-data` found, to plan by.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the best plan, for `cornstarch train --plan`."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page: timeline, memory, candidates, reasons.")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if", metavar="gpus=A..B", help="Other sizes of the cluster, too: gpus=16..512, gpus=8,24."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=0, help="Plans of other kinds to show.")] = 5,
    price: Annotated[
        float | None, typer.Option("--price", metavar="DOLLARS", help="Of a GPU for an hour: shows the cost of tokens.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say the plan on one line only.")] = False,
) -> None:
    """Choose how a run is spread over a cluster: the fastest plan that fits, its time and memory, and why others lost.

    No weights are loaded, no GPU is needed, and the cluster need not be here. What the config says about `parallel`,
    `loop.accumulation` and activation checkpointing is chosen anew; all else is kept.
    """
    from cornstarch.errors import ConfigError
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.compared import resized, size_name
    from cornstarch.plan.facts import read_facts
    from cornstarch.train.source import load_config

    # Mistakes are told before waiting for torch.
    run = load_config(config, overrides or ())
    if cluster is not None and nproc is not None:
        raise ConfigError("--cluster and --nproc: the number of processes is that of the cluster. Give one of them.")
    if costs is not None and facts is not None:
        raise ConfigError("--costs and --facts: costs were measured with samples of a certain size. Give one of them.")
    if price is not None and not 0 < price < float("inf"):
        raise ConfigError(f"--price {price:g}: expected dollars for an hour of one GPU, above 0.")
    machines = None if cluster is None else Cluster.parse(cluster)
    sizes = [] if what_if is None else parse_sizes(what_if)
    data = None if facts is None else read_facts(facts)
    for path, option in ((output, "--output"), (html, "--html")):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.absolute().parent}.")
    if machines is not None:
        machines = replace(
            machines, name=machines.name or size_name(machines.device, machines.nodes, machines.per_node)
        )
        for size in sizes:
            resized(machines, size)  # refuses what does not fill nodes

    from cornstarch.cli.plan_tables import show
    from cornstarch.report.plan_words import train_command
    from cornstarch.report.planning import write_page

    page = _planned(run, machines or _this_machine(run, nproc), nproc is not None, costs, data, price)
    if quiet:
        print(page.sentence)
    else:
        show(page, top, "measured" if costs is not None else "counted", data)
    if sizes:
        page = _with_sizes(page, run, sizes)
    if output is not None:
        _write(output, page.plan)
        if not quiet:
            assert page.found.best is not None
            command = train_command(page.found.best, page.cluster, str(config), str(output), overrides or ())
            print(f"{output}: {command}")
    if html is not None:
        write_page(page, html)
        print(html)


def _planned(
    run: RunConfig,
    machines: Cluster,
    uses_all: bool,
    costs: Path | None,
    data: DataFacts | None,
    price: float | None,
) -> Page:
    """Return what was found; ConfigError if nothing fits."""
    from cornstarch.cli.train import quiet_libraries
    from cornstarch.errors import ConfigError
    from cornstarch.report.planning import Page
    from cornstarch.train.deciding import impossible, using_all
    from cornstarch.train.planning import cost_of, own_plan, plan_file, plan_run

    quiet_libraries()
    with _working("counting what layers cost" if costs is None else "reading what layers cost"):
        cost = cost_of(run, machines, costs or run.parallel.costs, data)
    with _working(f"searching plans for {machines.name}"):
        found = plan_run(run, machines, cost, _OTHERS)
        if found.best is None:
            raise ConfigError(impossible(found, machines))
        best = using_all(found, run, machines, cost) if uses_all else found.best
    found = replace(found, best=best)
    return Page(
        run.name, machines, cost, found, own_plan(run, machines, cost), (), plan_file(best, run, machines), price
    )


def _with_sizes(page: Page, run: RunConfig, sizes: Sequence[int]) -> Page:
    """Return what was found with the best plans on clusters of other sizes, which are shown."""
    from cornstarch.cli.plan_tables import show_sizes
    from cornstarch.train.planning import what_if

    with _working("searching plans for other sizes"):
        page = replace(page, scaled=tuple(what_if(run, page.cluster, page.cost, sizes)))
    show_sizes(page)
    return page


def parse_sizes(text: str) -> list[int]:
    """Return the sizes that `--what-if` names: doubled from the first to the last, or as listed."""
    from cornstarch.errors import ConfigError

    found = _SIZES.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError(f"--what-if {text}: expected gpus=16..512 (doubled each time) or a list, gpus=8,16,24.")
    if found[3] is not None:
        sizes = [int(one) for one in found[3].split(",")]
    else:
        first, last = int(found[1]), int(found[2])
        sizes = [first << power for power in range(_MOST_SIZES) if first << power <= last] if first else [0]
        if not sizes:
            raise ConfigError(f"--what-if {text}: {first} is more than {last}.")
    if 0 in sizes:
        raise ConfigError(f"--what-if {text}: 0 GPUs; expected at least 1.")
    return sorted(set(sizes))[:_MOST_SIZES]


def _this_machine(run: RunConfig, nproc: int | None) -> Cluster:
    """Return this machine: so many processes, or one for each GPU; or what the config names."""
    from cornstarch.plan.cluster import Cluster

    if nproc is None and run.parallel.cluster is not None:
        return Cluster.parse(run.parallel.cluster)
    import torch

    from cornstarch.train.deciding import this_cluster

    count = nproc or max(1, torch.cuda.device_count())
    return this_cluster(run, count, count)


@contextmanager
def _working(what: str) -> Iterator[None]:
    """Show that something is going on, in a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


def _write(path: Path, text: str) -> None:
    from cornstarch.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: it cannot be written ({error.strerror}).") from error
