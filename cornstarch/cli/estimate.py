"""Commands that look at a run before it trains: `data check` reads its data, `inspect-data` predicts the cost of its
samples, `estimate` predicts memory and network time, and `profile` measures layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cornstarch import cli
from cornstarch.cli import ConfigPath, Facts, Overrides, RanksPerNode, build_figure_table, wide_console
from cornstarch.errors import ConfigError
from cornstarch.report.number_format import format_bytes, format_flops, pluralize

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from cornstarch.config import RunConfig
    from cornstarch.plan.cluster import Device, Link
    from cornstarch.plan.cost import RunCost
    from cornstarch.planner.estimate import Estimate, NetworkEstimate, PlanEstimate
    from cornstarch.planner.inspect_data import Inspection

_COSTS = Path("costs.yaml")
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
    for line in [*_list_unused(found), *recommend(found)]:
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


def _list_unused(found: Inspection) -> list[str]:
    """Return lines about samples that are not trained on, or only in part."""
    lines = []
    effect = "truncated" if found.config.data.too_long == "cut" else "skipped"
    if found.config.data.too_long == "error":
        effect = "an error: a run stops at the first of them"
    for samples, text in ((found.too_long, f"too long ({effect})"), (found.broken, "broken")):
        if samples:
            lines.append(f"{pluralize(len(samples), 'sample')} {'is' if len(samples) == 1 else 'are'} {text}:")
            lines += [f"  {sample}" for sample in samples[:_MAX_LISTED]]
            lines += [f"  … and {len(samples) - _MAX_LISTED:,} more"] if len(samples) > _MAX_LISTED else []
    return lines


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


# ------------------------------------------------------------------------------------------------ estimate


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
    from cornstarch.planner.estimate import estimate, estimate_plan, needs_prediction

    cli.quiet_libraries()
    target = requested or _detect_device(run)
    if target.is_cpu:  # the ranks divide the memory of the machine
        target = replace(target, memory=target.memory // world)
    found: Estimate | PlanEstimate
    if needs_prediction(run.parallel):
        found = estimate_plan(run, target, world, ranks_per_node, items)
        planned = f"{found.prediction.candidate.describe()}, in {found.cost.precision}"
        heading = f"{format_bytes(found.device.usable)} each to plan with; {planned}"
        table, notes = _build_stage_table(found), list(found.prediction.reasons)
    else:
        found = estimate(run, target, world, ranks_per_node, items)
        tokens = f" of {found.tokens:,} tokens" if found.tokens is not None else ""
        rows = f"{pluralize(found.rows, 'sample')}{tokens} per rank and microbatch, in {found.precision}"
        heading = f"{format_bytes(found.device.usable)} usable on each; {rows}"
        table, notes = _build_kind_table(found), list(found.notes)
    console = wide_console()
    console.print(_build_part_table(found))
    console.print(f"{pluralize(found.world, 'rank')} on {found.device.name}, {heading}", soft_wrap=True)
    console.print(table)
    for line in [*(f"note: {note}" for note in notes), found.advice]:
        console.print(line, soft_wrap=True)
    if link is not None:
        from cornstarch.planner.estimate import estimate_network

        # Over a network, each CPU rank has a machine of its own; only the catalogue knows the speed of a GPU.
        rated = this_cpu() if found.device.is_cpu else requested or device(found.device.name)
        over = estimate_network(run, rated, world, link)
        mbit = over.link.bandwidth * 8 / 1e6
        rate = f"{mbit / 1000:,.4g} Gbit/s" if mbit >= 1000 else f"{mbit:.4g} Mbit/s"
        what = f"{over.exchanged.numbers:,} trained parameters ({format_bytes(over.exchanged.size)})"
        compute = f"{_format_time(over.step.seconds)} compute per step"
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


def _build_part_table(found: Estimate | PlanEstimate) -> Table:
    table = build_figure_table("part", "class", "parameters", "trained", "stored in", left=("class",))
    for part in found.parts:
        table.add_row(part.name, part.kind, f"{part.count:,}", f"{part.trained_count:,}", format_bytes(part.bytes))
    return table


def _build_kind_table(found: Estimate) -> Table:
    """Build the table of memory per kind of data parallelism; the config's is marked."""
    averaged = any(kind.memory is not None and kind.memory.averages for kind in found.kinds)
    names = ["parameters", "gradients", "optimizer", *(["average"] if averaged else []), "gathered", "activations"]
    table = build_figure_table("on each rank", *names, "peak", "fits", left=("fits",))
    for kind in found.kinds:
        name = f"{kind.label}{' *' if kind is found.chosen and found.world > 1 else ''}"
        memory = kind.memory
        if memory is None:
            table.add_row(name, *[""] * (len(names) + 1), "refused")
            continue
        states = [memory.parameters, memory.gradients, memory.optimizer, *([memory.averages] if averaged else [])]
        activations, fits = "?", "yes, without activations"
        if kind.activations is not None:
            activations, fits = f"~ {format_bytes(kind.activations)}", "yes"
        sizes = [*map(format_bytes, [*states, memory.gathered]), activations, format_bytes(kind.peak)]
        table.add_row(name, *sizes, fits if kind.fits(found.device) else "no")
    return table


def _build_stage_table(found: PlanEstimate) -> Table:
    """Return the memory of the ranks of each stage; all ranks of a stage have the same."""
    columns = ("parameters", "gradients", "optimizer", "gathered", "activations", "peak", "fits")
    table = build_figure_table("on each rank of", *columns, left=("fits",))
    for one in found.prediction.memory:
        states, activations = one.states, f"~ {format_bytes(one.activations)}"
        sizes = [states.parameters, states.gradients, states.optimizer, states.gathered]
        fits = "yes" if one.peak <= found.prediction.limit else "no"
        table.add_row(one.holds, *map(format_bytes, sizes), activations, format_bytes(one.peak), fits)
    return table


def _build_network_table(found: NetworkEstimate) -> Table:
    """Build the table of ways to synchronize replicas; the recommended one is marked."""
    columns = ("sent per step", "step", "vs ddp", "training")
    table = build_figure_table("replicas synchronized by", *columns, left=("training",))
    plain = found.choices[0]
    for one in found.choices:
        mark = " *" if one is found.chosen else ""
        step, times = _format_time(one.seconds), f"{plain.seconds / one.seconds:.2f} ×"
        table.add_row(f"{one.label}{mark}", format_bytes(one.sent), step, times, one.effect)
    return table


def _format_time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


# ------------------------------------------------------------------------------------------------ profile


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
    console.print(_build_cost_table(found))
    console.print(
        f"Measured microbatches of {found.samples} samples of {found.tokens:,.0f} tokens, in {found.precision}, on "
        f"{where}. Wrote {output}.",
        soft_wrap=True,
    )


def _build_cost_table(found: RunCost) -> Table:
    """Build the table of measured costs; layers of the same cost share a row."""
    names = ("layer", "layers", "forward ms", "inputs ms", "weights ms", "activations", "recomputed")
    table = build_figure_table("module", *names, left=("layer",))
    for module in found.modules:
        for _, group in groupby(module.layers, key=lambda one: (one.forward, one.input_gradient, one.weight_gradient)):
            layers = list(group)
            first = layers[0]
            times = [f"{1e3 * one:.3f}" for one in (first.forward, first.input_gradient, first.weight_gradient)]
            sizes = [format_bytes(first.activation_bytes), format_bytes(first.activation_bytes_recomputed)]
            table.add_row(module.name, first.name, str(len(layers)), *times, *sizes)
    return table
