"""Estimate the memory and the step time of a run before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

from cornstarch.config import Precision, RunConfig
from cornstarch.cost.activations import Activations
from cornstarch.cost.analytic import DeviceSpeed
from cornstarch.cost.tracer import trace_memory
from cornstarch.engine.memory_tracker import model_size
from cornstarch.engine.model_parts import ModelPart, split_into_parts
from cornstarch.errors import ConfigError
from cornstarch.parallel.ddp_fsdp import check_data_plan
from cornstarch.parallel.device import DTYPES
from cornstarch.plan import DataKind, DataPlan, Layout, Plan
from cornstarch.plan.cluster import Cluster, Device, Link, this_cpu
from cornstarch.plan.cost import ModuleSharding, RunCost, compute_rank_cost
from cornstarch.plan.data_options import choose_sharded_dtypes, data_conflicts
from cornstarch.plan.data_statistics import DataStatistics
from cornstarch.plan.layout import check_executable
from cornstarch.plan.low_bandwidth_cost import StepTime, SyncedParameters, SyncOption, compare_sync_options, recommend
from cornstarch.plan.memory import Memory, memory_of
from cornstarch.plan.pipeline_cost import compute_step_end
from cornstarch.plan.predict import Prediction
from cornstarch.plan.rank_order import GroupLinks
from cornstarch.planner.build_cost import build_run_model, run_cost
from cornstarch.planner.search_run import cost_of, own_plan
from cornstarch.report.number_format import format_bytes as show_size
from cornstarch.report.plan_text import describe_prediction
from cornstarch.tasks.build import build_calls, is_frozen_encoder, takes_tokens

# In the order of communication, least first. zero3 and fsdp2 are one kind; fsdp1 is shown only if the config has it.
_KINDS: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp1", "hsdp")


@dataclass(frozen=True)
class KindEstimate:
    """The memory of one kind of data parallelism."""

    data: DataPlan
    label: str
    memory: Memory | None
    """Bytes of the fullest rank; None if the kind is refused."""
    refused: str = ""
    """Why it is refused."""
    activations: int | None = None
    """Bytes; None if they could not be estimated."""
    last: int = 0
    """Activations that coexist with nearly all gradients: those of the largest layer."""
    accumulated: bool = False
    """Whether a step has several microbatches."""

    @property
    def peak(self) -> int:
        """The peak in bytes, with activations if they are known."""
        assert self.memory is not None
        return self.memory.peak(self.activations or 0, self.accumulated, self.last)

    def fits(self, device: Device) -> bool:
        return self.memory is not None and self.peak <= device.usable


@dataclass(frozen=True)
class Estimate:
    """The memory of a run on each rank, under every kind of data parallelism."""

    device: Device
    world: int
    precision: Precision
    parts: tuple[ModelPart, ...]
    kinds: tuple[KindEstimate, ...]
    """In the order of communication, least first."""
    chosen: KindEstimate
    """The config's kind."""
    rows: int
    """Samples of a microbatch on a rank."""
    tokens: int | None
    """Of each sample; None if the model takes no tokens."""
    notes: tuple[str, ...]
    advice: str
    """What to do, on one line."""


def estimate(config: RunConfig, device: Device, world: int, ranks_per_node: int = 8, items: int = 1) -> Estimate:
    """Return the memory of a run on each of `world` ranks under every kind of data parallelism.

    The run has no tensor or context parallelism and no stages (`needs_prediction`); each sample has `items` images and
    sounds.
    """
    plan, loop = config.parallel, config.loop
    Layout.of(plan, world, ranks_per_node)
    check_executable(plan)
    assert not needs_prediction(plan), "estimate_plan predicts it"
    model, precision = build_run_model(config, device, world)
    parts = split_into_parts(model, config.model, config.optimizer)
    rows = -(-config.rows_per_step // (loop.microbatches * world))

    @cache
    def get_activations(casts_weights: bool) -> tuple[Activations | None, list[str]]:
        return estimate_activations(model, config, rows, items, precision, device.name != "cpu", casts_weights)

    kinds, on_gpu = [], device.name != "cpu"
    own = choose_sharded_dtypes(plan.data, precision, on_gpu)
    for data, copies in _list_data_plans(plan, world, ranks_per_node):
        data = choose_sharded_dtypes(data, precision, on_gpu)
        found, _ = get_activations(data.param_dtype != precision)
        peak = None if found is None else found.peak(config.recomputes, loop.activation_bytes)
        last = 0 if found is None else found.layer
        memory, refused = None, ""
        try:
            if world > 1:
                check_data_plan(model, data)
            size = model_size(model, data, config.optimizer, loop.ema_decay is not None)
            memory = memory_of(size, data, world, copies=copies)
        except ConfigError as error:
            refused = str(error).splitlines()[-1].strip()
        names = {"hsdp": f"hsdp, {copies} copies", "zero3": "zero3 = fsdp2", "fsdp2": "zero3 = fsdp2"}
        label = "one process" if world == 1 else names.get(data.kind, data.kind)
        kinds.append(KindEstimate(data, label, memory, refused, peak, last, loop.microbatches > 1))
    chosen = next(kind for kind in kinds if kind.data == own)
    known, unknown = get_activations(chosen.data.param_dtype != precision)
    notes = [*_list_notes(config, world, rows, kinds), *unknown]
    if known is not None and known.copies > 0.02 * device.memory and world > 1:
        notes.append(
            f"with a sharded kind, parallel.data.param_dtype={precision} takes up to {show_size(known.copies)} less: "
            "autocast keeps no copies of the weights then."
        )
    advice = _advise(config, device, world, kinds, chosen, known)
    tokens = config.data.max_length if takes_tokens(model) else None
    return Estimate(device, world, precision, tuple(parts), tuple(kinds), chosen, rows, tokens, tuple(notes), advice)


def estimate_activations(
    model: nn.Module,
    config: RunConfig,
    rows: int,
    items: int,
    precision: Precision,
    on_gpu: bool = True,
    casts_weights: bool = True,
) -> tuple[Activations | None, list[str]]:
    """Return the activations of a microbatch on a rank, and what is missing; None if too much is missing.

    Rows have `data.max_length` tokens and `items` items for every encoder.
    """
    total: Activations | None = Activations()
    notes = []
    for name, part, call in build_calls(model, rows, config.data.max_length, items):
        try:
            found = trace_memory(part, call, DTYPES[precision], on_gpu, casts_weights).saved.activations()
            total = None if total is None else total + found
        except Exception as error:  # model code that needs values, which meta tensors do not have
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120].rstrip(".")
            notes.append(f"the activations of the {name} are left out: {reason}.")
            if not is_frozen_encoder(part):
                total = None
    return total, notes


def _list_data_plans(plan: Plan, world: int, ranks_per_node: int) -> Iterator[tuple[DataPlan, int]]:
    """Yield the kinds to compare with their numbers of copies; each keeps the config's options that it has."""
    own = "zero3" if plan.data.kind == "fsdp2" else plan.data.kind
    if world == 1:
        yield plan.data, 1
        return
    defaults = {field.name: field.default for field in dataclasses.fields(DataPlan)}
    for kind in dict.fromkeys((*_KINDS, own)):
        data = plan.data
        if kind != own:
            values = {**vars(data), "kind": kind}
            for option, _ in list(data_conflicts(values, defaults)):
                values[option] = defaults[option]
            data = DataPlan(**values)
        copies = _count_copies(plan, data, world, ranks_per_node) if kind == "hsdp" else 1
        if kind == own or (kind != "fsdp1" and copies is not None):
            yield data, copies or 1


def _count_copies(plan: Plan, data: DataPlan, world: int, ranks_per_node: int) -> int | None:
    """Return the number of copies of hsdp; None if hsdp would not differ from the other kinds."""
    try:
        copies = Layout.of(replace(plan, data=data), world, ranks_per_node).replicate or 1
    except ConfigError:
        return None
    if copies == 1:  # all in one node
        return 2 if world >= 4 and world % 2 == 0 and data.replicate is None else None
    return copies


def _list_notes(config: RunConfig, world: int, rows: int, kinds: Sequence[KindEstimate]) -> Iterator[str]:
    loop = config.loop
    if loop.batch_size % (loop.microbatches * world):
        yield (
            f"loop.batch_size = {loop.batch_size} is not a multiple of accumulation "
            f"{loop.microbatches} × {world} ranks, which training refuses; {rows} on a rank are assumed."
        )
    for kind in kinds:
        if kind.memory is None:
            yield f"{kind.label} is refused: {kind.refused}"
        elif kind.memory.offloaded:
            yield f"{kind.label}: each rank keeps {show_size(kind.memory.persistent)} in the CPU's memory (offload)."


def _advise(
    config: RunConfig,
    device: Device,
    world: int,
    kinds: Sequence[KindEstimate],
    chosen: KindEstimate,
    known: Activations | None,
) -> str:
    fitting = [kind for kind in kinds if kind.fits(device)]
    if all(kind.memory is None for kind in kinds):
        return f"Nothing can be estimated: {chosen.refused}"
    if not fitting:
        smallest = min((kind for kind in kinds if kind.memory is not None), key=lambda kind: kind.peak)
        remedies = ", ".join([*_list_remedies(config, device, world, smallest, known), "a smaller data.max_length"])
        takes = f"{smallest.label} takes least, {show_size(smallest.peak)} of {show_size(device.usable)}"
        return f"Nothing fits on {device.name}: {takes}. Try {remedies}."

    def rest(kind: KindEstimate) -> str:
        free = show_size(device.usable - kind.peak)
        return f"{free} are left" if kind.activations is not None else f"{free} are left, activations not counted"

    best = fitting[0]
    overrides = f"parallel.data.kind={best.data.kind}"
    if best.data.kind == "hsdp" and best.data.replicate is None:
        overrides += f" parallel.data.replicate={best.label.split()[1]}"
    if world == 1:
        return f"It fits on {device.name}: {rest(best)}."
    if best is chosen:
        return f"The config's kind, {chosen.label}, fits on {device.name}: {rest(chosen)}."
    if chosen in fitting:
        return (
            f"The config's kind, {chosen.label}, fits on {device.name}: {rest(chosen)}. So does {best.label}, which "
            f"communicates less ({overrides}): {rest(best)}."
        )
    trouble = "is refused" if chosen.memory is None else f"does not fit on {device.name}"
    return f"The config's kind, {chosen.label}, {trouble}. Use {overrides}: {rest(best)}."


def _list_remedies(
    config: RunConfig, device: Device, world: int, smallest: KindEstimate, known: Activations | None
) -> Iterator[str]:
    assert smallest.memory is not None
    if known is not None and not config.recomputes:
        peak = smallest.memory.peak(known.peak(recomputed=True), smallest.accumulated, known.layer)
        yield f"loop.activation_checkpointing=true (then {show_size(peak)})"
    if config.loop.batch_size > config.loop.microbatches * world:
        yield "a larger loop.gradient_accumulation_steps"
    if smallest.memory.peak() > device.usable / 2:
        yield "more ranks, fewer trained weights (`train: lora`)"
    if world > 1 and not smallest.data.offload:
        yield "parallel.data.offload=true with a sharded kind"


@dataclass(frozen=True)
class PlanEstimate:
    """The prediction of `cornstarch plan` for the config's own plan."""

    device: Device
    world: int
    parts: tuple[ModelPart, ...]
    cost: RunCost
    prediction: Prediction

    @property
    def advice(self) -> str:
        """What is predicted and what to do, on one line."""
        found = self.prediction
        if found.fits:
            return f"The config's plan fits on {self.device.name}. Predicted: {describe_prediction(found)}."
        return (
            f"The config's plan does not fit on {self.device.name}. Predicted: {describe_prediction(found)}. Try "
            "more tp, cp or stages, activation_checkpointing, or let the planner choose: cornstarch plan CONFIG."
        )


def needs_prediction(plan: Plan) -> bool:
    """Return whether a plan has tensor, context or expert parallelism, or stages."""
    return plan.is_pipeline or any(max(one.tp, one.cp, one.ep, one.stages) > 1 for one in plan.modules.values())


def estimate_plan(
    config: RunConfig, device: Device, world: int, ranks_per_node: int = 8, items: int = 1
) -> PlanEstimate:
    """Return the memory and step time that `cornstarch plan` predicts for the config's plan, with catalogue links."""
    plan, per_node = config.parallel, min(ranks_per_node, world)
    Layout.of(plan, world, ranks_per_node)
    check_executable(plan)
    if world % per_node:
        raise ConfigError(f"world = {world}: expected a multiple of {per_node}, the ranks on each node.")
    model, _ = build_run_model(config, device)
    if device.is_cpu:  # its processes share the cores
        device = replace(this_cpu(per_node), memory=device.memory)
    device = DeviceSpeed.of(device).device
    cluster = Cluster.of(device, world // per_node, per_node)
    facts = None if items == 1 else DataStatistics(config.data.max_length, dict.fromkeys(config.model.encoders, items))
    cost = cost_of(config, cluster, config.parallel.costs, facts)
    own = own_plan(config, cluster, cost)
    assert own is not None, "the plan is the config's own"
    if own.prediction is None:
        raise ConfigError(own.trouble)
    return PlanEstimate(
        device, world, tuple(split_into_parts(model, config.model, config.optimizer)), cost, own.prediction
    )


@dataclass(frozen=True)
class NetworkEstimate:
    """The step time over a network, for each way to synchronize replicas."""

    link: Link
    ranks: int
    exchanged: SyncedParameters
    step: StepTime
    """Of one rank alone."""
    choices: tuple[SyncOption, ...]
    """In the order of their effect on training, least first."""
    chosen: SyncOption

    @property
    def advice(self) -> str:
        plain, chosen = self.choices[0], self.chosen
        if chosen is plain:
            return "ddp is about as fast as anything here: sending less would not help."
        gain = f"a step would be {plain.seconds / chosen.seconds:.1f} times as fast as with ddp"
        return f"{chosen.label}: {gain}; in the config: {list_overrides(chosen)}."


def estimate_network(config: RunConfig, device: Device, world: int, link: Link) -> NetworkEstimate:
    """Return the step time of a run over a network; each rank has a link of its own."""
    if world < 2:
        raise ConfigError("--network: one rank sends nothing. Give the number of ranks: --world 4.")
    model, _ = build_run_model(config, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ConfigError("--network: nothing is trained, so nothing is exchanged.")
    exchanged = SyncedParameters(tuple(tuple(one.shape) for one in trained), max(one.element_size() for one in trained))
    step = _estimate_step(config, run_cost(config, device), device, world)
    assert device.bandwidth is not None  # the costs were computed with it
    found = tuple(compare_sync_options(exchanged, step, world, link, device.bandwidth))
    return NetworkEstimate(link, world, exchanged, step, found, recommend(found))


def _estimate_step(config: RunConfig, cost: RunCost, device: Device, world: int) -> StepTime:
    """Return the time of a step on one of several ranks, without communication."""
    microbatches = config.loop.microbatches
    rows = max(1, config.rows_per_step // (microbatches * world))
    nothing = Link(float("inf"), 0.0)
    links = GroupLinks(nothing, nothing, nothing)
    forward = backward = optimizer = 0.0
    for module in cost.modules:
        way = ModuleSharding(module.name, 1, 1, rows / cost.samples, links, checkpointing=config.recomputes)
        found = compute_rank_cost(cost, way, device)
        ahead, inputs, weights = found.sums
        forward, backward = forward + ahead, backward + inputs + weights
        optimizer += compute_step_end(found.layers, "ddp", 1, cost.state_bytes, links, device).optimizer
    # Gradients are sent during the backward pass of the last microbatch only.
    return StepTime(microbatches * forward + (microbatches - 1) * backward, backward, optimizer)


def list_overrides(choice: SyncOption) -> str:
    """Return a choice as overrides for the command line."""
    plan, default = choice.plan, type(choice.plan)()
    overrides = [] if plan.kind == "ddp" else [f"parallel.data.kind={plan.kind}"]
    for section in ("compression", "local", "asynchronous", "gossip"):
        own, usual = getattr(plan, section), getattr(default, section)
        overrides += [
            f"parallel.data.{section}.{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in vars(own).items()
            if value != getattr(usual, name)
        ]
    return " ".join(overrides)
