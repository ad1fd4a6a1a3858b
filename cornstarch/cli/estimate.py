"""`cornstarch estimate` predicts the memory and network time of a run; `cornstarch profile` measures its layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cornstarch import cli
from cornstarch.cli import ConfigPath, Facts, Overrides, RanksPerNode, build_figure_table, wide_console
from cornstarch.errors import ConfigError
from cornstarch.report.number_format import format_bytes, format_step_time, pluralize

if TYPE_CHECKING:
    from rich.table import Table

    from cornstarch.config import RunConfig
    from cornstarch.plan.cluster import Device, Link
    from cornstarch.plan.memory import Memory
    from cornstarch.planner.estimate import Estimate, NetworkEstimate, PlanEstimate

    _MemoryRow = tuple[str, Memory | None, int | None, int, bool]  # name, states, activations, peak, whether it fits

_COSTS = Path("costs.yaml")


def estimate(
    config: ConfigPath,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="H100, A100-80, …, or cpu. Default: this machine's.")
    ] = None,
    world: Annotated[int, typer.Option(metavar="N", help="The number of ranks.")] = 1,
    ranks_per_node: RanksPerNode = 8,
    items: Annotated[int, typer.Option(metavar="N", min=1, help="Images, and sounds, assumed in each sample.")] = 1,
    network: Annotated[
        str | None, typer.Option(metavar="RATE", help="100Mbit, 1Gbit, …: compare ways to send less over it.")
    ] = None,
    latency: Annotated[str, typer.Option(metavar="TIME", help="The latency of the network.")] = "100us",
) -> None:
    """Predict the memory of a run on each rank, and which kinds of data parallelism fit.

    No weights are loaded and no GPU is needed. Parameters, gradients and optimizer states are exact; activations are
    estimated from shapes, for rows of `data.max_length` tokens. With tensor or context parallelism, or stages: what
    `cornstarch plan` predicts for the config's own plan, the memory of each rank and the time of a step.

    With --network: the bytes that each rank sends per step with every way to synchronize replicas, the time of a step,
    and the best way. Each rank has a link of that rate.
    """
    from cornstarch.config.config_file import load_config
    from cornstarch.plan.cluster import device, this_cpu
    from cornstarch.plan.layout import Layout

    run = load_config(config, overrides or ())
    requested = device(gpu) if gpu is not None else None
    link = _parse_link(network, latency)
    Layout.of(run.parallel, world, ranks_per_node)  # mistakes are reported before the wait for torch
    from cornstarch.planner.estimate import estimate, estimate_network, estimate_plan, needs_prediction

    cli.quiet_libraries()
    target = requested or _detect_device(run)
    if target.is_cpu:  # the ranks divide the memory of the machine
        target = replace(target, memory=target.memory // world)
    found: Estimate | PlanEstimate
    rows: list[_MemoryRow]
    if needs_prediction(run.parallel):
        found = estimate_plan(run, target, world, ranks_per_node, items)
        heading = f"each to plan with; {found.prediction.candidate.describe()}, in {found.cost.precision}"
        first, notes, limit = "on each rank of", found.prediction.reasons, found.prediction.limit
        rows = [(p.holds, p.states, p.activations, p.peak, p.peak <= limit) for p in found.prediction.memory]
    else:
        found = estimate(run, target, world, ranks_per_node, items)
        tokens = f" of {found.tokens:,} tokens" if found.tokens is not None else ""
        samples = f"{pluralize(found.rows, 'sample')}{tokens} per rank and microbatch, in {found.precision}"
        first, notes, heading, rows = "on each rank", found.notes, f"usable on each; {samples}", []
        for kind in found.kinds:
            name = f"{kind.label}{' *' if kind is found.chosen and world > 1 else ''}"  # the config's kind
            fits = kind.memory is not None and kind.fits(found.device)
            rows.append((name, kind.memory, kind.activations, 0 if kind.memory is None else kind.peak, fits))
    console = wide_console()
    parts = build_figure_table("part", "class", "parameters", "trained", "stored in", left=("class",))
    for part in found.parts:
        parts.add_row(part.name, part.kind, f"{part.count:,}", f"{part.trained_count:,}", format_bytes(part.bytes))
    console.print(parts)
    usable = format_bytes(found.device.usable)
    console.print(f"{pluralize(found.world, 'rank')} on {found.device.name}, {usable} {heading}", soft_wrap=True)
    console.print(_build_memory_table(first, rows))
    for line in [*(f"note: {note}" for note in notes), found.advice]:
        console.print(line, soft_wrap=True)
    if link is not None:
        # Over a network, each CPU rank has a machine of its own; only the catalogue knows the speed of a GPU.
        rated = this_cpu() if found.device.is_cpu else requested or device(found.device.name)
        over = estimate_network(run, rated, world, link)
        mbit = over.link.bandwidth * 8 / 1e6
        rate = f"{mbit / 1000:,.4g} Gbit/s" if mbit >= 1000 else f"{mbit:.4g} Mbit/s"
        what = f"{over.exchanged.numbers:,} trained parameters ({format_bytes(over.exchanged.size)})"
        compute = f"{format_step_time(over.step.seconds)} compute per step"
        console.print(f"\n{pluralize(over.ranks, 'rank')} with {rate} each; {what}, {compute}", soft_wrap=True)
        console.print(_build_network_table(over))
        console.print(over.advice, soft_wrap=True)


def _parse_link(network: str | None, latency: str) -> Link | None:
    from cornstarch.plan.cluster_file import parse_quantity
    from cornstarch.plan.low_bandwidth_cost import parse_network_link

    if network is None:
        return None
    try:
        seconds = parse_quantity(latency, "s", least=0)
    except ValueError as error:
        raise ConfigError(f"latency {latency!r}: {error}") from None
    return parse_network_link(network, seconds)


def _detect_device(run: RunConfig) -> Device:
    from cornstarch.parallel.device import choose_placement
    from cornstarch.plan.cluster import Device, this_cpu

    placement = choose_placement(run.device, "auto")
    if placement.device.type != "cuda":
        return this_cpu()
    import torch

    properties = torch.cuda.get_device_properties(placement.device)
    return Device(properties.name, int(properties.total_memory), placement.precision == "bf16")


def _build_memory_table(first: str, rows: list[_MemoryRow]) -> Table:
    averaged = any(memory is not None and memory.averages for _, memory, *_ in rows)
    names = ["parameters", "gradients", "optimizer", *(["average"] if averaged else []), "gathered", "activations"]
    table = build_figure_table(first, *names, "peak", "fits", left=("fits",))
    for name, memory, activations, peak, fits in rows:
        if memory is None:
            table.add_row(name, *[""] * (len(names) + 1), "refused")
            continue
        averages = [memory.averages] if averaged else []
        sizes = [memory.parameters, memory.gradients, memory.optimizer, *averages, memory.gathered]
        estimated = "?" if activations is None else f"~ {format_bytes(activations)}"
        answer = "yes, without activations" if activations is None else "yes"
        table.add_row(name, *map(format_bytes, sizes), estimated, format_bytes(peak), answer if fits else "no")
    return table


def _build_network_table(found: NetworkEstimate) -> Table:
    """Build the table of ways to synchronize replicas; the recommended one is marked."""
    columns = ("sent per step", "step", "vs ddp", "training")
    table = build_figure_table("replicas synchronized by", *columns, left=("training",))
    plain = found.choices[0]
    for one in found.choices:
        mark = " *" if one is found.chosen else ""
        step, times = format_step_time(one.seconds), f"{plain.seconds / one.seconds:.2f} ×"
        table.add_row(f"{one.label}{mark}", format_bytes(one.sent), step, times, one.effect)
    return table


def profile(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the costs, as YAML.")] = _COSTS,
    facts: Facts = None,
) -> None:
    """Measure the cost of a run's layers on this device, for the planner.

    One layer of each kind is built, with random weights, and run forward and backward, as the run would compute it. The
    whole model is never built and no weights are read, so a model that needs many devices can be measured on one.
    `cornstarch plan CONFIG --costs costs.yaml` plans with the measured costs.
    """
    from cornstarch.config.config_file import load_config
    from cornstarch.plan.data_statistics import read_data_statistics

    run = load_config(config, overrides or ())
    known = None if facts is None else read_data_statistics(facts)
    from cornstarch.planner import profile_run, write_costs
    from cornstarch.planner.build_cost import check_output, get_device_name

    cli.quiet_libraries()
    check_output(output)
    console, where = wide_console(), get_device_name(run)
    with console.status("") as status:
        found = profile_run(run, known, lambda words: status.update(f"measuring {words}"))
    write_costs(output, found, where)
    names = ("layer", "layers", "forward ms", "inputs ms", "weights ms", "activations", "recomputed")
    table = build_figure_table("module", *names, left=("layer",))
    for module in found.modules:  # layers of the same cost share a row
        for _, group in groupby(module.layers, key=lambda one: (one.forward, one.input_gradient, one.weight_gradient)):
            first, *others = group
            times = [f"{1e3 * one:.3f}" for one in (first.forward, first.input_gradient, first.weight_gradient)]
            sizes = [format_bytes(first.activation_bytes), format_bytes(first.activation_bytes_recomputed)]
            table.add_row(module.name, first.name, str(1 + len(others)), *times, *sizes)
    console.print(table)
    console.print(
        f"Measured microbatches of {found.samples} samples of {found.tokens:,.0f} tokens, in {found.precision}, on "
        f"{where}. Wrote {output}.",
        soft_wrap=True,
    )
