"""Which plans and layouts expert parallelism goes with, and why it does not go with others; no torch.

The ranks that share the experts of a module out are a part of those that the module is replicated or sharded over:
dp × cp of them. A rank keeps experts / ep of the experts; the dp × cp / ep ranks that have the same ones replicate or
shard them as the plan's data parallelism says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.plan.data_options import SPLIT_BACKWARD, UNSYNCHRONIZED

if TYPE_CHECKING:
    from cornstarch.plan.layout import Layout
    from cornstarch.plan.plan import ModulePlan, Plan


def find_expert_conflicts(module: ModulePlan, data: Any, schedule: str, stages: int) -> Iterator[str]:
    """Yield why a module of a plan cannot share its experts out over ranks beside the plan's other options.

    Args:
        module: The plan of the module, with an ep above 1.
        data: The plan's data parallelism; None if it is wrong by itself.
        schedule: That of the plan.
        stages: The sets of ranks that work one after the other.
    """
    if module.tp_sequence:
        yield "With tp_sequence a layer has a part of the tokens, and its experts all of them.\nLeave tp_sequence out."
    if schedule in SPLIT_BACKWARD and stages > 1:
        yield (
            f"The schedule {schedule} takes the backward pass of a layer apart, in which ranks exchange tokens.\n"
            "Use the schedule 1f1b, gpipe or interleaved."
        )
    if data is None:
        return
    if data.kind in UNSYNCHRONIZED:
        yield f"With {data.kind} each rank trains a whole model by itself.\nUse the kind ddp, zero1 or fsdp2."
    elif data.kind == "fsdp1":
        yield "fsdp1 flattens parameters that all ranks have.\nUse the kind fsdp2."
    elif data.compression.kind != "none":
        yield "Gradients of experts are averaged over other ranks than those of other layers, and not compressed.\n" + (
            "Leave data.compression out."
        )
    if data.offload:
        yield "Experts cannot wait in the CPU's memory yet.\nLeave data.offload out."
    if type(data.reshard_after_forward) is int:
        yield (
            "Experts lie on other numbers of ranks than other layers, so that data.reshard_after_forward cannot be a "
            "number of ranks.\nUse true or false."
        )


def has_shared_experts(plan: Plan) -> bool:
    """Return whether any module of a plan shares its experts out over ranks."""
    return any(module.ep > 1 for module in plan.modules.values())


def check_expert_layout(layout: Layout) -> None:
    """Refuse a layout whose ranks the experts of a module cannot be shared out over; list the sizes that work."""
    for name, module in layout.plan.modules.items():
        copies, shards = layout.data_shape(name)
        ranks = shards if layout.plan.kind(name) == "hsdp" else copies * shards
        if ranks % module.ep == 0:
            continue
        what = f"each copy of {name} is sharded" if ranks != copies * shards else f"{name} is replicated or sharded"
        fitting = [str(size) for size in range(2, min(ranks, 1024) + 1) if ranks % size == 0]
        advice = f"Use {', '.join([*fitting[:7], '1'])}." if fitting else "Use 1, or more replicas."
        raise ConfigError(
            f"modules.{name}.ep = {module.ep}: {what} over {ranks:,} rank{'s' if ranks > 1 else ''} (dp {layout.dp} × "
            f"cp {layout.span(name).cp}), which ep must divide. {advice}"
        )


def explain_expert_count(experts: int, size: int) -> str | None:
    """Return why a number of experts cannot be shared out over `size` ranks; None if it can."""
    if experts % size == 0:
        return None
    fitting = ", ".join(str(number) for number in range(1, min(experts, 1024) + 1) if experts % number == 0)
    few = "fewer than one for each rank" if size > experts else "not equally many for each rank"
    return f"there are {experts} experts for ep = {size}, {few}. Use {fitting}."
