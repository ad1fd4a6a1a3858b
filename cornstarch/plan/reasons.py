"""Why a plan lost, in plain words; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cornstarch.plan.choice import Choice, crossing
from cornstarch.plan.predict import Prediction

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster


def refusal(choice: Choice, peak: int, usable: int) -> str:
    """Return why a choice that might have been fast was refused."""
    return f"{choice.describe()}: needs {peak / 2**30:.1f} GiB on a rank, and {usable / 2**30:.1f} are usable"


def why_slower(one: Prediction, best: Prediction, cluster: Cluster) -> str:
    """Return what makes a plan slower than the best: that which takes most more time than there."""
    slower = one.step / best.step - 1
    if slower < 0.0005:
        return f"as fast as the best ({one.choice.describe()})"
    grown = {name: getattr(one.shares, name) - getattr(best.shares, name) for name in vars(one.shares)}
    name = max(grown, key=grown.__getitem__)
    share, there = getattr(one.shares, name) / one.step, getattr(best.shares, name) / best.step
    return f"+{slower:.1%}: {_words(one, best, name, share, cluster)} (best: {there:.0%})"


def _words(one: Prediction, best: Prediction, name: str, share: float, cluster: Cluster) -> str:
    """Return what takes a share of the step, and why."""
    last_name, last = one.choice.modules[-1]
    found = crossing(one.choice.spans, one.choice.dp, cluster)
    where = (
        " crosses nodes" if last.tp > 1 and cluster.nodes > 1 and found.links[last_name].tp != cluster.inside else ""
    )
    over = f"tp = {last.tp} of {last_name}{where}"
    texts = {
        "tensor": f"{over}: its all-reduce takes {share:.0%} of the step",
        "context": f"cp = {last.cp} of {last_name}: exchanging keys and values takes {share:.0%} of the step",
        "gather": f"{one.choice.kind}: waiting for sharded parameters takes {share:.0%} of the step",
        "data": f"dp = {one.choice.dp}: summing gradients beyond what backward hides takes {share:.0%} of the step",
        "recompute": f"activation checkpointing: computing again takes {share:.0%} of the step",
        "optimizer": f"{one.choice.kind}: the optimizer takes {share:.0%} of the step",
        "uneven": f"dp = {one.choice.dp}: the replica with the largest samples is waited for, {share:.0%} of the step",
        "wait": f"waiting for other stages takes {share:.0%} of the step: {_pipeline(one)}",
        "compute": f"its busiest ranks compute for {share:.0%} of the step: {_load(one, best)}",
    }
    return texts[name]


def _pipeline(one: Prediction) -> str:
    stages = " + ".join(str(span.stages) for span in one.choice.spans)
    return f"{stages} stages, {one.choice.microbatches} microbatches"


def _load(one: Prediction, best: Prediction) -> str:
    used, there = one.choice.world, best.choice.world
    if used < there:
        return f"it uses {used} ranks, where the best uses {there}"
    return "the work is spread less evenly"
