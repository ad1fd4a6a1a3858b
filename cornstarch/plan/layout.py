"""The layout of a plan over a number of ranks: places and process groups; pure arithmetic, no process group, no torch.

layout = Layout.of(plan, world=54)
layout.place(40)                           # Place(modules=('language_model',), stage=2, dp=1, cp=0, tp=0)
layout.groups("tp", "language_model")      # every group at once: an array of shape (groups, ranks of a group)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from typing import Literal, NamedTuple, get_args

import numpy as np

from cornstarch.errors import ConfigError
from cornstarch.plan import rank_order
from cornstarch.plan.data_options import REPLICATED, SHARDED, SPLIT_BACKWARD, UNSYNCHRONIZED
from cornstarch.plan.expert_options import check_expert_layout, has_shared_experts
from cornstarch.plan.plan import Plan
from cornstarch.plan.rank_order import Placement, Ranks, Span
from cornstarch.plan.validation import format_value, nearest

MOST_RANKS = 10_000_000

Axis = Literal["tp", "cp", "pp", "dp", "data", "replicate", "shard"]
AXES: tuple[Axis, ...] = get_args(Axis)


class Place(NamedTuple):
    """The place of one rank."""

    modules: tuple[str, ...]
    """One module, or all that share these ranks."""
    stage: int
    """The pipeline stage of the module."""
    dp: int
    """The replica."""
    cp: int
    """The shard of each sequence."""
    tp: int
    """The shard of each matrix."""


@dataclass(frozen=True)
class Layout:
    """A plan on a number of ranks. Build one with `Layout.of`."""

    plan: Plan
    world: int
    """All ranks."""
    ranks_per_node: int
    """Consecutive ranks on each node: rank 9 is on node 1 if there are 8."""
    replicate: int | None
    """hsdp: copies of the model, each of them sharded; None for every other kind."""
    placement: Placement
    """The order of the ranks."""

    @classmethod
    def of(cls, plan: Plan, world: int, ranks_per_node: int = 8) -> Layout:
        """Return the layout for `world` ranks; the number of replicas (dp) follows."""
        for name, number, most in (("world", world, MOST_RANKS), ("ranks_per_node", ranks_per_node, 2**31)):
            if type(number) is not int or not 1 <= number <= most:
                raise ConfigError(f"{name} = {format_value(number)}: expected a whole number from 1 to {most:,}.")
        dp = _infer_dp(plan, world)
        placement = rank_order.place_spans(
            rank_order.build_spans(plan.modules, plan.sharing, plan.ranks), dp, ranks_per_node
        )
        layout = cls(plan, world, ranks_per_node, _infer_replicate(plan, dp, ranks_per_node), placement)
        check_expert_layout(layout)
        size = plan.data.reshard_after_forward
        for module in plan.modules:
            shards = layout.data_shape(module)[1]
            if size is not None and not isinstance(size, bool) and (shards % size or size >= shards):
                fitting = [str(n) for n in islice((n for n in range(2, shards) if shards % n == 0), 8)]
                advice = f"Use {', '.join(fitting)}, true or false." if fitting else "Use true or false."
                raise ConfigError(
                    f"data.reshard_after_forward = {size}: {module} is sharded over {shards:,} ranks; the number must "
                    f"divide that and be smaller. {advice}"
                )
        return layout

    @property
    def dp(self) -> int:
        return self.placement.dp

    @property
    def nodes(self) -> int:
        """Nodes; the last one may have fewer ranks."""
        return -(-self.world // self.ranks_per_node)

    def span(self, module: str) -> Span:
        """Return the sizes of a module."""
        spans = {name: span for span in self.placement.spans for name in span.modules}
        if module not in spans:
            meant = nearest(str(module), list(spans))
            advice = f"did you mean {meant!r}?" if meant else f"expected one of {', '.join(spans)}."
            raise ConfigError(f"The plan has no module {format_value(module)!r}; {advice}")
        return spans[module]

    def data_shape(self, module: str) -> tuple[int, int]:
        """Return (copies, shards) of a module: dp × cp in all; zero1 has shards of the optimizer state alone."""
        ranks = self.dp * self.span(module).cp
        if self.plan.kind(module) in ("ddp", *UNSYNCHRONIZED):
            return ranks, 1
        copies = self.replicate or 1
        return copies, ranks // copies

    @property
    def exchanges_in_passes(self) -> bool:
        """Whether ranks of a data group communicate during passes, by FSDP or between experts: all of them then run
        the same modules every time."""
        modules = self.plan.modules
        if has_shared_experts(self.plan):
            return True
        return any(self.plan.kind(name) in SHARDED and prod(self.data_shape(name)) > 1 for name in modules)

    def place(self, rank: int) -> Place:
        """Return the place of a rank."""
        self._check_index("rank", rank, self.world)
        span, dp, offset = self.placement.locate(rank)
        stage, within = divmod(offset, span.stage_ranks)
        return Place(span.modules_at(stage), stage, dp, *divmod(within, span.tp))

    def rank(self, module: str, stage: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank of a place."""
        span = self.span(module)
        sizes = {"stage": span.stages_of(module), "dp": self.dp, "cp": span.cp, "tp": span.tp}
        for (name, size), index in zip(sizes.items(), (stage, dp, cp, tp), strict=True):
            self._check_index(f"{name} of {module}", index, size)
        return self.placement.start(span, dp) + (stage * span.cp + cp) * span.tp + tp

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        self._check_index("rank", rank, self.world)
        return rank // self.ranks_per_node

    @staticmethod
    def _check_index(name: str, index: int, size: int) -> None:
        if not 0 <= index < size:
            raise ConfigError(f"{name} = {index}: expected 0" + (f" to {size - 1:,}." if size > 1 else "."))

    def mesh(self, module: str) -> Ranks:
        """Return the ranks of a module as an array with the axes (pp, dp, cp, tp)."""
        span = self.span(module)
        return self._mesh(span, *map(np.arange, (span.stages_of(module), self.dp, span.cp, span.tp)))

    def _mesh(self, span: Span, *index: Ranks) -> Ranks:
        """Return the ranks at all combinations of these stages, replicas, cp and tp coordinates."""
        stage, dp, cp, tp = np.ix_(*index)
        return self.placement.starts(span, dp) + (stage * span.cp + cp) * span.tp + tp

    def ranks(self, module: str) -> Ranks:
        """Return all ranks of a module, in ascending order."""
        return np.sort(self.mesh(module), axis=None)

    def groups(self, axis: Axis, module: str) -> Ranks:
        """Return every group of a module along an axis, as an array of shape (groups, ranks of a group).

        tp, cp, pp, dp: ranks that differ in this coordinate only.
        data: ranks with the same parameters, dp × cp of them; dp varies slowest.
        shard, replicate: the data groups cut into copies, as `data_shape` says: a shard group holds one copy together,
        and the ranks of a replicate group hold the same shard.
        """
        return _groups(self.mesh(module), axis, self.data_shape(module))

    def group(self, axis: Axis, module: str, rank: int) -> Ranks:
        """Return the one group along an axis that a rank belongs to, without building the others."""
        place = self.place(rank)
        if module not in place.modules:
            self.span(module)  # an unknown module is another mistake
            raise ConfigError(f"Rank {rank} holds {' and '.join(place.modules)}, no part of {module}.")
        span = self.span(module)
        free = {"pp": (0,), "dp": (1,), "cp": (2,), "tp": (3,)}.get(axis, (1, 2))
        sizes = (span.stages_of(module), self.dp, span.cp, span.tp)
        here = zip(sizes, (place.stage, place.dp, place.cp, place.tp), strict=True)
        mesh = self._mesh(span, *(np.arange(n) if i in free else np.array([at]) for i, (n, at) in enumerate(here)))
        if axis not in ("shard", "replicate"):
            return _groups(mesh, axis, (1, 1))[0]
        data = _groups(mesh, "data", (1, 1))[0]
        shards = self.data_shape(module)[1]
        index = place.dp * span.cp + place.cp
        return data[index // shards * shards :][:shards] if axis == "shard" else data[index % shards :: shards]

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Groups that cross nodes, which slows the run down: one line for the innermost axis of each module."""
        return tuple(warning for span in self.placement.spans if (warning := self._find_crossing(span)) is not None)

    def _find_crossing(self, span: Span) -> str | None:
        node, name = self.ranks_per_node, " and ".join(span.modules)
        starts = self.placement.starts(span)
        nested = [
            ("tp", f"tp {span.tp}", span.tp, rank_order.group_starts(starts, span.stages * span.cp, span.tp)),
            ("cp", f"cp {span.cp} × tp {span.tp} = {span.stage_ranks}", span.stage_ranks,
             rank_order.group_starts(starts, span.stages, span.stage_ranks)),
            ("pp", f"{span.stages} stages × cp {span.cp} × tp {span.tp} = {span.ranks}", span.ranks, starts),
        ]  # fmt: skip
        for axis, sizes, ranks, groups in nested:
            nodes = rank_order.nodes_of(groups, ranks, node)
            crossing = int((nodes > 1).sum())
            if not crossing or (axis == "pp" and ranks > node):  # pipelines are made for crossing nodes
                continue
            what = {"tp": "tensor-parallel groups", "cp": "context-parallel groups", "pp": "pipelines"}[axis]
            advice = "Use sizes that divide one another and the ranks of a node."
            why = f"nodes of {node} ranks are not filled evenly. {advice}"
            if ranks > node:
                why = f"a node has {node} ranks. Use {'tp' if axis == 'tp' else 'cp × tp'} of at most {node}."
            many = "all" if crossing == len(groups) else f"{crossing:,} of {len(groups):,}"
            return f"{name}: {many} {what} ({sizes}) lie on up to {int(nodes.max())} nodes: {why}"
        return None

    def unexecutable(self) -> list[str]:
        """Return why this layout can be planned but not run yet; empty if it can be run."""
        return unexecutable(self.plan)

    def describe(self) -> str:
        """Return the sizes as a few lines of text."""
        replicas = "1 replica" if self.dp == 1 else f"{self.dp:,} replicas"
        ranks = "1 rank" if self.world == 1 else f"{self.world:,} ranks"
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes:,} nodes"
        head = f"{ranks} on {nodes} of {self.ranks_per_node}: {replicas} of {self.plan.replica:,}"
        rows: list[tuple[str, ...]] = [("module", "ranks", "pp", "dp", "cp", "tp", "data parallelism")]
        for name in self.plan.modules:
            span = self.span(name)
            stages = span.stages_of(name)
            sizes = (self.dp * stages * span.stage_ranks, stages, self.dp, span.cp, span.tp)
            kind, (copies, shards) = self.plan.kind(name), self.data_shape(name)
            data = f"{kind}, {copies:,} × {shards:,}" if kind == "hsdp" else f"{kind} over {copies * shards:,}"
            data += f", experts over {ep:,}" if (ep := self.plan.modules[name].ep) > 1 else ""
            rows.append((name, *(f"{size:,}" for size in sizes), data))
        return "\n".join([head, "", *columns(rows, right=range(1, 6))])


def unexecutable(plan: Plan) -> list[str]:
    """Return why a plan can be laid out but not run yet; empty if it can be run."""
    reasons = _unexecutable_pipeline(plan) if plan.is_pipeline else []
    reasons += _sync_conflicts(plan)
    largest = max(module.tp for module in plan.modules.values())
    for name, module in plan.modules.items():
        kind, others, tp = plan.kind(name), plan.data.kind, f"modules.{name}.tp = {module.tp}"
        if module.precision:
            advice = "Set it for the whole run: precision."
            reasons.append(f"modules.{name}.precision: it cannot be set for one module yet. {advice}")
        if kind != others:
            beside = f"{kind} for one module, where the others have {others}, cannot be run yet. Use data.kind alone."
            reasons.append(f"modules.{name}.zero = {module.zero}: {beside}")
        if module.tp > 1 and others == "fsdp1":
            advice = "Use the kind ddp, fsdp2, zero1, zero2, zero3 or hsdp."
            reasons.append(f"{tp}: data.kind = {others} knows whole matrices only. {advice}")
        if plan.shared and module.tp not in (1, largest):
            beside = f"beside a module with tp {largest} on the same ranks it cannot be run yet."
            reasons.append(f"{tp}: {beside} Use 1 or {largest}.")
    return reasons


def _sync_conflicts(plan: Plan) -> list[str]:
    """Return why the replicas of a plan cannot be synchronized as its data parallelism says; empty if they can."""
    data, modules, reasons = plan.data, plan.modules, []
    has_tp = any(module.tp > 1 for module in modules.values())
    if data.kind in UNSYNCHRONIZED:
        largest = {axis: max(getattr(module, axis) for module in modules.values()) for axis in ("tp", "cp")}
        sizes = [f"{axis} {size}" for axis, size in largest.items() if size > 1]
        sizes += ["a pipeline"] if plan.is_pipeline else []
        if sizes:
            reasons.append(
                f"data.kind = {data.kind}: each rank trains a whole model by itself, and the plan has "
                f"{' and '.join(sizes)}. Use ranks of one model each, or the kind ddp with a compression."
            )
    elif data.compression.kind != "none":
        what = f"data.compression.kind = {data.compression.kind}: "
        if plan.is_pipeline:
            reasons.append(f"{what}the stages of a pipeline exchange gradients whole. Leave it out, or use one stage.")
        elif has_tp and data.kind in REPLICATED:
            reasons.append(f"{what}with tp the ranks exchange shards of gradients. Leave it out, or use the kind hsdp.")
    return reasons


def _unexecutable_pipeline(plan: Plan) -> list[str]:
    kind, reasons = plan.data.kind, []
    if kind == "fsdp1":
        reasons.append("data.kind = fsdp1: it cannot shard the stages of a pipeline. Use fsdp2.")
    if plan.schedule in SPLIT_BACKWARD:  # zero_bubble takes backward passes apart, and auto may choose it
        what = f"schedule = {plan.schedule}: "
        if kind not in (*REPLICATED, "fsdp1"):
            reasons.append(
                f"{what}{kind} gathers parameters for a whole backward pass, which zero_bubble takes apart. Use the "
                "kind ddp or zero1, or the schedule 1f1b or interleaved."
            )
        if again := [name for name, module in plan.modules.items() if module.activation_checkpointing]:
            reasons.append(
                f"{what}{' and '.join(again)} would compute activations again for the gradients of inputs, and once "
                "more for those of each matrix, which zero_bubble takes apart. Use the schedule 1f1b or interleaved."
            )
    for modules in plan.sharing:
        for name in modules:
            module, (_, cp, tp) = plan.modules[name], plan.sizes(modules)
            if (module.cp, module.tp) != (cp, tp):
                reasons.append(
                    f"modules.{name}: tp {module.tp} and cp {module.cp} beside a module with tp {tp} and cp {cp} on "
                    "the same ranks of a pipeline cannot be run yet. Use the same, or ranks: own."
                )
    return reasons


def check_executable(plan: Plan) -> None:
    """Raise ConfigError with the reasons if a plan cannot be run yet."""
    if reasons := unexecutable(plan):
        raise ConfigError("parallel: this plan cannot be run yet.\n  " + "\n  ".join(reasons))


def _infer_dp(plan: Plan, world: int) -> int:
    """Return the number of replicas; ConfigError that names sizes that work, if the ranks do not fit."""
    step = plan.replica * (plan.data.replicate or 1)
    if world % step == 0:
        return world // plan.replica
    below = world // step * step
    works = [str(size) for size in (below, below + step) if size]
    works = works if below else [*works, str(2 * step)]
    copies = f" and the plan wants {plan.data.replicate} copies (hsdp)" if plan.data.replicate not in (None, 1) else ""
    short = "do not divide evenly" if world > step else "are too few" if world > 1 else "is too few"
    raise ConfigError(
        f"{world:,} rank{'s' if world > 1 else ''} {short}: a replica takes {plan.replica:,}"
        f"{_describe_replica(plan)}{copies}.\n"
        f"Sizes that work are multiples of {step:,}: {' or '.join(works)}."
    )


def _describe_replica(plan: Plan) -> str:
    """Return how the ranks of a replica add up: ` (vision 2 + language_model 3 × 2 × 4 = 24)`."""
    words = []
    for span in rank_order.build_spans(plan.modules, plan.sharing, plan.ranks):
        sizes = [("stages", span.stages), ("cp", span.cp), ("tp", span.tp)]
        factors = [f"{size} stages" if axis == "stages" else f"{axis} {size}" for axis, size in sizes if size > 1]
        name = "" if len(plan.sharing) == 1 else f"{' and '.join(span.modules)} "
        words.append(f"{name}{' × '.join(factors) + ' = ' if len(factors) > 1 else ''}{span.ranks:,}")
    return f" ({' + '.join(words)})" if plan.replica > 1 and (len(words) > 1 or "=" in words[0]) else ""


def _infer_replicate(plan: Plan, dp: int, ranks_per_node: int) -> int | None:
    """Return the number of copies under hsdp: the plan's, or as many as keep a copy within a node."""
    if plan.data.kind != "hsdp" or plan.data.replicate is not None:
        return plan.data.replicate
    copies = rank_order.copies_in_nodes(plan.replica, dp, ranks_per_node)
    if copies == dp > 1:
        raise ConfigError(
            f"data.kind = hsdp: {dp:,} replicas of {plan.replica:,} ranks cannot be cut into copies that each lie in a "
            f"node of {ranks_per_node} ranks. Say how many copies there are: data.replicate, a divisor of {dp:,}."
        )
    return copies


def _groups(mesh: Ranks, axis: Axis, data_shape: tuple[int, int]) -> Ranks:
    """Return the groups of a mesh with the axes (pp, dp, cp, tp)."""
    if axis not in AXES:
        raise ConfigError(f"There is no axis {axis!r}; expected one of {', '.join(AXES)}.")
    stages, dp, cp, tp = mesh.shape
    # The axis of a group comes last, and its ranks are one row.
    orders = {
        "tp": ((0, 1, 2, 3), tp),
        "cp": ((0, 1, 3, 2), cp),
        "pp": ((1, 2, 3, 0), stages),
        "dp": ((0, 2, 3, 1), dp),
    }
    order, size = orders.get(axis, ((0, 3, 1, 2), dp * cp))
    groups = mesh.transpose(order).reshape(-1, size)
    copies, shards = data_shape
    if axis == "replicate":
        return groups.reshape(-1, copies, shards).swapaxes(1, 2).reshape(-1, copies)
    return groups.reshape(-1, shards) if axis == "shard" else groups


def columns(rows: Sequence[tuple[str, ...]], right: Collection[int] = ()) -> list[str]:
    """Return rows as lines of aligned columns; those in `right` end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:{'>' if i in right else '<'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    return [line.rstrip() for line in lines]
