"""`cornstarch estimate`: what a run takes in memory on each rank, and over a slow network, before it is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cornstarch.plan.cluster import Device, Link
    from cornstarch.train.config import RunConfig
    from cornstarch.train.estimate import Estimate, KindEstimate
    from cornstarch.train.network import NetworkEstimate

_WIDE = 120  # columns that a table may have on a narrower terminal too: cut figures say nothing


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("estimate")(estimate)


def estimate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that win over the file's.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="H100, A100-80, …, or cpu. Default: this machine's."),
    ] = None,
    world: Annotated[int, typer.Option("--world", metavar="N", help="The number of ranks.")] = 1,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", metavar="N", help="Ranks on each node.")] = 8,
    items: Annotated[
        int, typer.Option("--items", metavar="N", min=1, help="Images, and sounds, assumed in each sample.")
    ] = 1,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="RATE", help="100Mbit, 1Gbit, …: what sending less over it would bring."),
    ] = None,
    latency: Annotated[str, typer.Option("--latency", metavar="TIME", help="Of a message over it.")] = "100us",
) -> None:
    """Show what a run takes in memory on each rank, and which kinds of data parallelism fit.

    No weights are loaded and no GPU is needed. Parameters, gradients and states of the optimizer are exact; activations
    are estimated from shapes, for rows of `data.max_length` tokens.

    With --network: what each rank would send in a step with every way to keep replicas together, how long the step
    would take, and which way is worth it. Each rank has a link of that rate.
    """
    from rich.console import Console

    from cornstarch.plan.cluster import device
    from cornstarch.plan.layout import Layout
    from cornstarch.train.source import load_config

    run = load_config(config, overrides or ())
    meant = device(gpu) if gpu is not None else None
    link = _link(network, latency)
    Layout.of(run.parallel.plan(), world, ranks_per_node)  # a world that does not fit is told before waiting for torch
    from cornstarch.cli.train import quiet_libraries
    from cornstarch.train.estimate import estimate

    quiet_libraries()
    found = estimate(run, _shared(meant or this_device(run), world), world, ranks_per_node, items)
    console = Console(markup=False, highlight=False, width=max(Console().width, _WIDE))
    console.print(part_table(found))
    console.print(_heading(found), soft_wrap=True)
    console.print(kind_table(found))
    for line in [*(f"note: {note}" for note in found.notes), found.advice]:
        console.print(line, soft_wrap=True)
    if link is not None:
        from cornstarch.train.network import network_estimate

        over = network_estimate(run, _computing(meant, found.device, world), world, link)
        console.print(_network_heading(over), soft_wrap=True)
        console.print(network_table(over))
        console.print(over.advice, soft_wrap=True)


def _link(network: str | None, latency: str) -> Link | None:
    """Return the network that is asked about."""
    from cornstarch.errors import ConfigError
    from cornstarch.plan.network import network_link
    from cornstarch.plan.quantities import quantity

    if network is None:
        return None
    try:
        wait = quantity(latency, "s", least=0)
    except ValueError as error:
        raise ConfigError(f"latency {latency!r}: {error}") from None
    return network_link(network, wait)


def _computing(meant: Device | None, found: Device, world: int) -> Device:
    """Return what a rank computes on with figures of its speed, which only the catalogue has."""
    from cornstarch.plan.cluster import this_cpu
    from cornstarch.plan.devices import device

    if found.is_cpu:  # each rank on a machine of its own: they are joined by a network
        return this_cpu()
    return meant or device(found.name)


def this_device(run: RunConfig) -> Device:
    """Return what this machine would compute a run on."""
    from cornstarch.plan.cluster import Device, this_cpu
    from cornstarch.train.precision import choose_placement

    placement = choose_placement(run.device, "auto")
    if placement.device.type != "cuda":
        return this_cpu()
    import torch

    properties = torch.cuda.get_device_properties(placement.device)
    return Device(properties.name, int(properties.total_memory), placement.precision == "bf16")


def _shared(device: Device, world: int) -> Device:
    """Return one rank's share: the processes of a CPU have its memory together."""
    from dataclasses import replace

    return replace(device, memory=device.memory // world) if device.is_cpu else device


# ------------------------------------------------------------------------------------------------ tables


def part_table(found: Estimate) -> Table:
    """Return what the model is made of."""
    from cornstarch.report.figures import size

    table = _table("part", "class", "parameters", "trained", "kept in")
    for part in found.parts:
        table.add_row(part.name, part.kind, f"{part.count:,}", f"{part.trained_count:,}", size(part.bytes))
    return table


def _heading(found: Estimate) -> str:
    from cornstarch.report.figures import several, size

    tokens = f" of {found.tokens:,} tokens" if found.tokens is not None else ""
    where = f"{several(found.world, 'rank')} on {found.device.name}, {size(found.device.usable)} each to plan with"
    return f"{where}; {several(found.rows, 'sample')}{tokens} on a rank at a time, in {found.precision}"


def kind_table(found: Estimate) -> Table:
    """Return what each kind of data parallelism takes; the config's is marked."""
    averaged = any(kind.memory is not None and kind.memory.averages for kind in found.kinds)
    names = ["parameters", "gradients", "optimizer", *(["average"] if averaged else []), "gathered", "activations"]
    table = _table("on each rank", *names, "peak", "fits")
    for kind in found.kinds:
        chosen = " *" if kind is found.chosen and found.world > 1 else ""
        table.add_row(f"{kind.label}{chosen}", *_cells(kind, averaged), _verdict(kind, found.device))
    return table


def _cells(kind: KindEstimate, averaged: bool) -> list[str]:
    from cornstarch.report.figures import size

    memory = kind.memory
    if memory is None:
        return [""] * (6 + averaged)
    held = [memory.parameters, memory.gradients, memory.optimizer, *([memory.averages] if averaged else [])]
    activations = "?" if kind.activations is None else f"~ {size(kind.activations)}"
    return [*map(size, [*held, memory.gathered]), activations, size(kind.peak)]


def _verdict(kind: KindEstimate, device: Device) -> str:
    if kind.memory is None:
        return "refused"
    if not kind.fits(device):
        return "no"
    return "yes" if kind.activations is not None else "yes, so far"


def _network_heading(found: NetworkEstimate) -> str:
    from cornstarch.report.figures import several, size

    mbit = found.link.bandwidth * 8 / 1e6
    rate = f"{mbit / 1000:,.4g} Gbit/s" if mbit >= 1000 else f"{mbit:.4g} Mbit/s"
    computing = f"{_time(found.step.seconds)} to compute"
    what = f"{found.exchanged.numbers:,} trained numbers ({size(found.exchanged.size)})"
    return f"\n{several(found.ranks, 'rank')}, each behind {rate}; {what}, {computing} a step"


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def network_table(found: NetworkEstimate) -> Table:
    """Return what each way to keep replicas together would take; the one to choose is marked."""
    from cornstarch.report.figures import size

    table = _table("replicas kept together by", "sent a step", "step", "to ddp", "training")
    plain = found.choices[0]
    for one in found.choices:
        chosen = " *" if one is found.chosen else ""
        step, times = _time(one.seconds), f"{plain.seconds / one.seconds:.2f} ×"
        table.add_row(f"{one.label}{chosen}", size(one.sent), step, times, one.effect)
    return table


def _table(first: str, *names: str) -> Table:
    from rich.table import Table

    table = Table(first)
    for name in names:
        table.add_column(name, justify="left" if name in ("class", "fits", "training") else "right")
    return table
