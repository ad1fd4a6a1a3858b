"""How much memory a run will take on each rank, before anything is loaded: only shapes are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.data import check_data_plan
from cornstarch.plan import DataKind, DataPlan, Layout, Plan
from cornstarch.plan.cluster import Device
from cornstarch.plan.layout import check_executable
from cornstarch.plan.memory import Memory, memory_of
from cornstarch.plan.options import conflicts
from cornstarch.report.figures import size as show_size
from cornstarch.train.activations import Activations, measure
from cornstarch.train.build import DTYPES
from cornstarch.train.config import Precision, RunConfig
from cornstarch.train.footprint import model_size
from cornstarch.train.on_meta import calls_of, is_frozen_encoder, model_on_meta, takes_tokens
from cornstarch.train.parts import Part, keep_in_precision, parts_of

# Those that communicate least first. zero3 and fsdp2 are one kind by two names; fsdp1 is shown if it is the config's.
_KINDS: tuple[DataKind, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp1", "hsdp")


@dataclass(frozen=True)
class KindEstimate:
    """One kind of data parallelism."""

    data: DataPlan
    label: str
    memory: Memory | None
    """Bytes of the rank that holds most; None if the kind is refused."""
    refused: str = ""
    """Why."""
    activations: int | None = None
    """Bytes; None if they could not be estimated."""
    last: int = 0
    """Those of them that are there with nearly all gradients: the largest layer's."""
    accumulated: bool = False
    """Whether a step has several portions."""

    @property
    def peak(self) -> int:
        """The most bytes at one time, activations included as far as they are known."""
        assert self.memory is not None
        return self.memory.peak(self.activations or 0, self.accumulated, self.last)

    def fits(self, device: Device) -> bool:
        """Say whether a device has room for it."""
        return self.memory is not None and self.peak <= device.usable


@dataclass(frozen=True)
class Estimate:
    """What a run takes on each rank."""

    device: Device
    world: int
    precision: Precision
    parts: tuple[Part, ...]
    kinds: tuple[KindEstimate, ...]
    """Those that communicate least first."""
    chosen: KindEstimate
    """The config's."""
    rows: int
    """Samples that a rank computes at a time."""
    tokens: int | None
    """Of each; None if the model takes no tokens."""
    notes: tuple[str, ...]
    advice: str
    """What to do, on one line."""


def estimate(config: RunConfig, device: Device, world: int, ranks_per_node: int = 8, items: int = 1) -> Estimate:
    """Return what a run takes on each rank under every kind of data parallelism.

    Args:
        config: The run.
        device: What each rank computes on.
        world: The number of ranks.
        ranks_per_node: Ranks on each node.
        items: Images, and sounds, in each sample.
    """
    plan, loop = config.parallel.plan(), config.loop
    Layout.of(plan, world, ranks_per_node)
    check_executable(plan)
    cut = [name for name, one in plan.modules.items() if one.tp > 1 or one.cp > 1 or one.stages > 1]
    if cut or plan.is_pipeline:
        raise ConfigError(
            f"parallel.modules.{[*cut, *plan.modules][0]}: Estimates know no tensor parallelism yet, no context "
            "parallelism and no stages.\n  Leave tp, cp and stages at 1 to see what data parallelism alone takes: it "
            "is more than with them."
        )
    precision = precision_on(config, device)
    model = model_on_meta(config)
    parts = parts_of(model, config.model, config.optimizer)
    keep_in_precision(parts, DTYPES[precision])
    rows = -(-loop.batch_size // (loop.accumulation * world))

    @cache
    def activations(casts_weights: bool) -> tuple[Activations | None, list[str]]:
        return activations_of(model, config, rows, items, precision, device.name != "cpu", casts_weights)

    kinds = []
    for data, copies in _data_plans(plan, world, ranks_per_node):
        found, _ = activations(data.param_dtype != precision)
        most = None if found is None else found.most(config.recomputes, loop.activation_bytes)
        last = 0 if found is None else found.layer
        memory, refused = _memory(model, config, data, world, copies)
        label = "one process" if world == 1 else _label(data.kind, copies)
        kinds.append(KindEstimate(data, label, memory, refused, most, last, loop.accumulation > 1))
    chosen = next(kind for kind in kinds if kind.data is plan.data)
    known, unknown = activations(chosen.data.param_dtype != precision)
    notes = [*_notes(config, world, rows, kinds), *unknown]
    if known is not None and known.copies > 0.02 * device.memory and world > 1:
        notes.append(
            f"with a sharded kind, parallel.data.param_dtype={precision} takes up to {show_size(known.copies)} less: "
            "autocast keeps no copies of the weights then."
        )
    advice = _advice(config, device, world, kinds, chosen, known)
    tokens = config.data.max_length if takes_tokens(model) else None
    return Estimate(device, world, precision, tuple(parts), tuple(kinds), chosen, rows, tokens, tuple(notes), advice)


def precision_on(config: RunConfig, device: Device) -> Precision:
    """Return what a run computes in on a device."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if device.has_bf16 else "fp32"


def activations_of(
    model: nn.Module,
    config: RunConfig,
    rows: int,
    items: int,
    precision: Precision,
    on_gpu: bool = True,
    casts_weights: bool = True,
) -> tuple[Activations | None, list[str]]:
    """Return the activations of a batch on a rank, and what could not be found out; None if that is too much.

    Rows are as long as they may be (`data.max_length`), and each has so many items for every encoder.
    """
    total: Activations | None = Activations()
    notes = []
    for name, part, call in calls_of(model, rows, config.data.max_length, items):
        try:
            found = measure(part, call, DTYPES[precision], on_gpu, casts_weights)
            total = None if total is None else total + found
        except Exception as error:  # a model's own code, where it looks at numbers that are not there
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120].rstrip(".")
            notes.append(f"the activations of the {name} are left out: {reason}.")
            if not is_frozen_encoder(part):
                total = None
    return total, notes


# ---------------------------------------------------------------------------------------------------- the kinds


def _data_plans(plan: Plan, world: int, ranks_per_node: int) -> Iterator[tuple[DataPlan, int]]:
    """Yield what is compared, the config's options as far as a kind has them, with the number of copies."""
    own = "zero3" if plan.data.kind == "fsdp2" else plan.data.kind
    if world == 1:
        yield plan.data, 1
        return
    for kind in dict.fromkeys((*_KINDS, own)):
        data = plan.data if kind == own else _with_kind(plan.data, kind)
        copies = _copies(plan, data, world, ranks_per_node) if kind == "hsdp" else 1
        if kind == own or (kind != "fsdp1" and copies is not None):
            yield data, copies or 1


def _with_kind(data: DataPlan, kind: DataKind) -> DataPlan:
    defaults = {field.name: field.default for field in dataclasses.fields(DataPlan)}
    values = {**vars(data), "kind": kind}
    for option, _ in list(conflicts(values, defaults)):
        values[option] = defaults[option]
    return DataPlan(**values)


def _copies(plan: Plan, data: DataPlan, world: int, ranks_per_node: int) -> int | None:
    """Return how many copies hsdp makes; None if it would be no different from the others."""
    try:
        copies = Layout.of(replace(plan, data=data), world, ranks_per_node).replicate or 1
    except ConfigError:
        return None
    if copies == 1:  # all in one node
        return 2 if world >= 4 and world % 2 == 0 and data.replicate is None else None
    return copies


def _label(kind: DataKind, copies: int) -> str:
    return f"hsdp, {copies} copies" if kind == "hsdp" else "zero3 = fsdp2" if kind in ("zero3", "fsdp2") else kind


def _memory(model: nn.Module, config: RunConfig, data: DataPlan, world: int, copies: int) -> tuple[Memory | None, str]:
    """Return what a rank holds, or why the kind is refused."""
    try:
        if world > 1:
            check_data_plan(model, data)
        size = model_size(model, data, config.optimizer, config.loop.ema is not None)
        return memory_of(size, data, world, copies=copies), ""
    except ConfigError as error:
        return None, str(error).splitlines()[-1].strip()


# ---------------------------------------------------------------------------------------------------- words


def _notes(config: RunConfig, world: int, rows: int, kinds: Sequence[KindEstimate]) -> Iterator[str]:
    loop = config.loop
    if loop.batch_size % (loop.accumulation * world):
        yield (
            f"loop.batch_size = {loop.batch_size} is no multiple of accumulation {loop.accumulation} × {world} ranks, "
            f"which training refuses; {rows} on a rank are assumed."
        )
    for kind in kinds:
        if kind.memory is None:
            yield f"{kind.label} is refused: {kind.refused}"
        elif kind.memory.offloaded:
            yield f"{kind.label}: each rank keeps {show_size(kind.memory.held)} in the CPU's memory (offload)."


def _advice(
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
        return _rescue(config, device, world, kinds, known)

    def left(kind: KindEstimate) -> str:
        free = show_size(device.usable - kind.peak)
        return f"{free} are left" if kind.activations is not None else f"{free} are left, activations not counted"

    best = fitting[0]
    if world == 1:
        return f"It fits on {device.name}: {left(best)}."
    if best is chosen:
        return f"The config's kind, {chosen.label}, fits on {device.name}: {left(chosen)}."
    if chosen in fitting:
        return (
            f"The config's kind, {chosen.label}, fits on {device.name}: {left(chosen)}. So does {best.label}, which "
            f"communicates less ({_setting(best)}): {left(best)}."
        )
    trouble = "is refused" if chosen.memory is None else f"does not fit on {device.name}"
    return f"The config's kind, {chosen.label}, {trouble}. Use {_setting(best)}: {left(best)}."


def _setting(kind: KindEstimate) -> str:
    setting = f"parallel.data.kind={kind.data.kind}"
    if kind.data.kind == "hsdp" and kind.data.replicate is None:
        setting += f" parallel.data.replicate={kind.label.split()[1]}"
    return setting


def _rescue(
    config: RunConfig, device: Device, world: int, kinds: Sequence[KindEstimate], known: Activations | None
) -> str:
    """Return what would help where nothing fits."""
    smallest = min((kind for kind in kinds if kind.memory is not None), key=lambda kind: kind.peak)
    assert smallest.memory is not None
    loop, remedies = config.loop, []
    if known is not None and not config.recomputes:
        peak = smallest.memory.peak(known.most(recomputed=True), smallest.accumulated, known.layer)
        remedies.append(f"loop.activation_checkpointing=true (then {show_size(peak)})")
    if loop.batch_size > loop.accumulation * world:
        remedies.append("a larger loop.accumulation")
    if smallest.memory.peak() > device.usable / 2:
        remedies += ["more ranks", "fewer trained weights (`train: lora`)"]
    if world > 1 and not smallest.data.offload:
        remedies.append("parallel.data.offload=true with a sharded kind")
    remedies.append("a smaller data.max_length")
    return (
        f"Nothing fits on {device.name}: {smallest.label} takes least, {show_size(smallest.peak)} of "
        f"{show_size(device.usable)}. Try {', '.join(remedies)}."
    )
