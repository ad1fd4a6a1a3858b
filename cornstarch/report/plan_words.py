"""A chosen plan in words: what it is, why it won, and what it costs; no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from cornstarch.plan.choice import Choice
from cornstarch.plan.predict import Prediction
from cornstarch.report.figures import count, percent, several, size

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.search import Found, RunnerUp

SHARES = {
    "compute": "computing",
    "recompute": "computing activations again",
    "tensor": "sums over tensor-parallel ranks",
    "context": "exchanging keys and values",
    "gather": "waiting for sharded parameters",
    "data": "summing gradients over replicas",
    "optimizer": "the optimizer",
    "wait": "waiting for other stages",
    "uneven": "waiting for the replica with the largest samples",
}
"""By name of a share of the step: what it is."""
_STANDING = {
    "own": "on ranks of {whose} own",
    "colocated": "on ranks that all encoders share",
    "first_stage": "inside the language model's first stage",
    "shared": "on the language model's ranks",
}


def lines_of(choice: Choice) -> list[str]:
    """Return a choice as a few short lines: each module, then what they have in common."""
    lines = []
    for name, plan in choice.modules:
        parts = f" of {plan.virtual_stages} parts" if plan.virtual_stages > 1 else ""
        sizes = [f"{plan.stages} stages{parts}"] if plan.stages > 1 else []
        sizes += [f"{axis} {size}" for axis, size in (("cp", plan.cp), ("tp", plan.tp)) if size > 1]
        again = ", checkpointing" if plan.activation_checkpointing else ""
        lines.append(f"{name}: {' × '.join(sizes) or 'one rank'}{again}")
    common = [f"dp {choice.dp} ({choice.kind})", several(choice.microbatches, "microbatch", "microbatches")]
    lines.append(", ".join([*common, *([choice.schedule] if choice.is_pipeline else [])]))
    if len(choice.modules) > 1:
        encoders = "encoder" if len(choice.modules) == 2 else "encoders"
        lines.append(f"{encoders} {standing(choice)}")
    return lines


def cuts_of(best: Prediction) -> list[str]:
    """Return how many layers the stages of each module have that has several."""
    lines = []
    for name, starts in best.starts.items():
        if len(starts) > 1:
            ends = (*starts[1:], best.layers[name])
            parts = " + ".join(str(end - start) for start, end in zip(starts, ends, strict=True))
            lines.append(f"{name} is cut into {parts} layers")
    return lines


def standing(choice: Choice) -> str:
    """Return where the encoders of a choice stand."""
    return _STANDING.get(choice.ranks, _STANDING["own"]).format(whose=_whose(choice))


def _whose(choice: Choice) -> str:
    return "its" if len(choice.modules) == 2 else "their"


def sentence(best: Prediction, cluster: Cluster) -> str:
    """Return a plan on one line."""
    return f"parallel: auto: {best.choice.describe()}. Predicted for {cluster.name}: {predicted(best)}."


def predicted(best: Prediction) -> str:
    """Return the figures of a prediction on one line."""
    words = [f"{seconds(best.step)} a step", f"{rate(best)} {unit(best)} a second"]
    words += [f"MFU {percent(best.mfu)}"] if best.mfu is not None else []
    return ", ".join([*words, f"{size(best.peak)} of {size(best.limit)} on the fullest device"]).replace("\u00a0", " ")


def seconds(value: float) -> str:
    """Return a time with three digits: 2.14 s, 310 ms."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def unit(one: Prediction) -> str:
    """Return what is counted in a second: tokens, where the model takes any."""
    return "tokens" if one.tokens_per_second else "samples"


def rate(one: Prediction) -> str:
    """Return how many of them there are."""
    value = one.tokens_per_second or one.samples_per_second
    return count(value) if value >= 100 else f"{value:.3g}"


def against(one: Prediction, best: Prediction) -> str:
    """Return how a prediction compares with the best."""
    if not one.fits:
        return one.reasons[0]
    slower = one.step / best.step - 1
    return f"+{slower:.1%}" if slower >= 0.0005 else "as fast as the best" if slower > -0.0005 else f"{slower:.1%}"


def why_lost(one: RunnerUp) -> str:
    """Return the reason alone, without the figure."""
    figure, _, reason = one.reason.partition(": ")
    return f"lost: {reason}" if figure.startswith("+") else ""


def dollars(one: Prediction, devices: int, price: float) -> float | None:
    """Return what a million tokens cost, with so many devices at a price for an hour of one; None: there are none."""
    return price * devices / 3600 / one.tokens_per_second * 1e6 if one.tokens_per_second else None


# ------------------------------------------------------------------------------------------------ why it won


def why_best(found: Found) -> list[str]:
    """Return what decided for the best plan: each of its traits, against the best that has another one."""
    best = found.best
    if best is None:
        return []
    others = [one.prediction for one in found.runners_up]
    return [text for text in (*_traits(best, others), *_time(best)) if text]


def _traits(best: Prediction, others: Sequence[Prediction]) -> Iterator[str | None]:
    choice = best.choice
    last_name, last = choice.modules[-1]
    if len(choice.modules) > 1:
        yield _placement(best, others)

    def against(differs: Callable[[Choice], bool], said: str, instead: Callable[[Choice], str]) -> str | None:
        rival = min((one for one in others if differs(one.choice)), key=lambda one: one.step, default=None)
        return None if rival is None else f"{said}: {instead(rival.choice)} {_longer(rival, best)}."

    def size(one: Choice) -> int:
        return one.modules[-1][1].tp

    def stages(one: Choice) -> int:
        return one.modules[-1][1].stages

    yield against(
        lambda one: size(one) != last.tp,
        f"{last_name} has tp {last.tp}" if last.tp > 1 else f"No matrices of {last_name} are cut",
        lambda one: f"with tp {size(one)} a step takes",
    )
    if last.stages > 1:
        said = f"{last_name} has {last.stages} stages"
        yield against(lambda one: stages(one) == 1, said, lambda one: "with one a step takes")
    else:
        said = f"{last_name} has one stage"
        yield against(lambda one: stages(one) > 1, said, lambda one: f"with {stages(one)} a step takes")
    if choice.dp > 1:
        said = f"Replicas share by {choice.kind}"
        yield against(lambda one: one.kind != choice.kind, said, lambda one: f"with {one.kind} a step takes")


def _placement(best: Prediction, others: Sequence[Prediction]) -> str | None:
    """Return why encoders stand where they do."""
    choice = best.choice
    inside = ("shared", "first_stage")

    def alike(one: Choice) -> bool:
        return one.ranks == choice.ranks or (one.ranks in inside and choice.ranks in inside)

    rival = min((one for one in others if not alike(one.choice)), key=lambda one: one.step, default=None)
    if rival is None:
        return None
    *encoders, _ = choice.modules
    names = " and ".join(name for name, _ in encoders)
    where = f"{names} {'stands' if len(encoders) == 1 else 'stand'} {standing(choice)}"
    if choice.ranks == "own":
        ranks = " and ".join(several(plan.ranks * choice.dp, "device") for _, plan in encoders)
        where = f"{names} {'has' if len(encoders) == 1 else 'have'} {ranks} of {_whose(choice)} own"
    return f"{where}: {standing(rival.choice)} a step takes {_longer(rival, best)}."


def _longer(one: Prediction, best: Prediction) -> str:
    longer = one.step / best.step - 1
    if longer >= 1:
        return f"{1 + longer:.3g} times as long"
    return f"{longer:.1%} longer" if longer >= 0.0005 else "as long"


def _time(best: Prediction) -> Iterator[str]:
    shares = {name: getattr(best.shares, name) / best.step for name in SHARES}
    said = [f"{SHARES[name]} {share:.0%}" for name, share in sorted(shares.items(), key=_largest) if share >= 0.005]
    if said:
        yield f"Where the time of the busiest device goes: {', '.join(said)}."


def _largest(item: tuple[str, float]) -> float:
    return -item[1]


def train_command(best: Prediction, cluster: Cluster, config: str, plan: str, overrides: Sequence[str] = ()) -> str:
    """Return the command that trains with a plan, in as many processes as it is for."""
    world, rest = best.choice.world, shlex.join([config, *overrides, "--plan", plan])
    if world > cluster.per_node:
        nodes = -(-world // cluster.per_node)
        return (
            f"torchrun --nnodes={nodes} --nproc-per-node={world // nodes} --rdzv-backend=c10d "
            f"--rdzv-endpoint=FIRST_MACHINE:29500 -m cornstarch train {rest}"
        )
    return f"cornstarch train {rest}" + (f" --nproc {world}" if world > 1 else "")
