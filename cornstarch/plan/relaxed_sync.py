"""Plans that change the training, for clusters whose nodes are far apart: replicas that exchange less; no torch.

They are never chosen: gradients that are compressed, and replicas that average their weights every few steps, train
another way (docs/slow_networks.md). A search lists them beside its plans where they would be much faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cornstarch.plan.candidates import SearchSpace
from cornstarch.plan.cost import RunCost
from cornstarch.plan.low_bandwidth_cost import StepTime, SyncedParameters, SyncOption, compare_sync_options
from cornstarch.plan.memory import count_exchange_copies
from cornstarch.plan.predict import Prediction

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster

SLOW = 6.25e9
"""Bytes per second of a device to other nodes, 50 Gbit/s: below, plans that change the training are listed."""
_LEAST_GAIN = 0.1  # of the best plan's step
_LISTED = ("ddp", "local_sgd", "diloco")  # ddp: with a compression


def is_slow(cluster: Cluster) -> bool:
    return cluster.nodes > 1 and cluster.between.bandwidth < SLOW


def restrict_to_replicas(cost: RunCost, space: SearchSpace) -> tuple[RunCost, SearchSpace]:
    """Return a run and a space in which every rank has the whole model: no other ranks can exchange less."""
    modules = tuple(replace(one, tp_sizes=(1,), cp_sizes=(1,)) for one in cost.modules)
    return replace(cost, modules=modules), replace(space, ranks=("first_stage",), kinds=("ddp",), most_stages=1)


def compare_relaxed(
    base: Prediction, best: Prediction, cost: RunCost, cluster: Cluster
) -> Iterator[tuple[Prediction, str]]:
    """Yield the fastest way of each kind to exchange less that fits, with what it changes.

    Args:
        base: The best plan whose replicas are whole models.
        best: The best plan; ways that are not much faster are left out.
        cost: The costs of the run.
        cluster: The machines.
    """
    numbers = sum(layer.num_trainable for module in cost.modules for layer in module.layers)
    gradients = sum(layer.gradient_bytes for module in cost.modules for layer in module.layers)
    ranks, node, many = base.candidate.dp, base.run.graph.nodes[0], base.candidate.microbatches
    if ranks == 1 or not numbers or cluster.device.bandwidth is None:
        return
    # Only the backward pass of the last microbatch can hide what is exchanged.
    backward = node.backward_input + node.backward_weight
    step = StepTime(many * node.forward + (many - 1) * backward, backward, base.run.ends[0].optimizer)
    what = SyncedParameters(((numbers,),), max(1, round(gradients / numbers)))
    found: dict[str, SyncOption] = {}
    for option in compare_sync_options(what, step, ranks, cluster.between, cluster.device.bandwidth):
        kind, plan = option.plan.kind, option.plan
        is_exact = kind == "ddp" and plan.compression.kind == "none"
        # The factors of powersgd depend on the shapes of all weights, which a search does not know.
        if kind not in _LISTED or is_exact or plan.compression.kind == "powersgd":
            continue
        extra = 4 * numbers * count_exchange_copies(plan)
        fits = base.peak + extra <= base.limit
        is_fastest = kind not in found or option.seconds < found[kind].seconds
        if fits and is_fastest and option.seconds < (1 - _LEAST_GAIN) * best.step:
            found[kind] = option
    for option in sorted(found.values(), key=lambda one: one.seconds):
        yield _apply(option, base, 4 * numbers * count_exchange_copies(option.plan)), _describe(option)


def _apply(option: SyncOption, base: Prediction, extra: int) -> Prediction:
    """Return the prediction of a plan with another way to exchange, and `extra` bytes for it."""
    faster = base.step / option.seconds
    return replace(
        base,
        candidate=replace(base.candidate, kind=option.plan.kind),
        step=option.seconds,
        samples_per_second=base.samples_per_second * faster,
        tokens_per_second=base.tokens_per_second * faster,
        mfu=None if base.mfu is None else base.mfu * faster,
        memory=tuple(replace(place, peak=place.peak + extra) for place in base.memory),
        breakdown=replace(base.breakdown, data=max(0.0, option.seconds - base.step + base.breakdown.data)),
    )


def _describe(option: SyncOption) -> str:
    return f"changes the training: {option.label} ({option.effect})"
