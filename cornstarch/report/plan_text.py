"""A plan in words: its sizes, its predicted figures, and why it won over the others. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from cornstarch.report.number_format import (
    format_bytes,
    format_count,
    format_error,
    format_percent,
    format_step_time,
    pluralize,
)

if TYPE_CHECKING:
    from cornstarch.plan.candidates import Candidate
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.plan import ModulePlan
    from cornstarch.plan.predict import Prediction
    from cornstarch.plan.search import RunnerUp, SearchResult

TIME_PARTS = {
    "compute": "computing",
    "recompute": "recomputing activations",
    "tensor": "tensor-parallel all-reduces",
    "context": "exchanging keys and values",
    "exchange": "sending tokens to experts and back",
    "gather": "waiting for sharded parameters",
    "data": "summing gradients over replicas",
    "optimizer": "the optimizer",
    "wait": "waiting for other stages",
    "uneven": "waiting for the replica with the largest samples",
    "slowest": "waiting for the slowest device",
}
"""Descriptions of the parts of a predicted step, by their names in the prediction."""
_ENCODER_RANKS = {
    "own": "on ranks of {whose} own",
    "colocated": "on ranks that all encoders share",
    "first_stage": "inside the language model's first stage",
    "shared": "on the language model's ranks",
}


def describe_choice(choice: Candidate) -> list[str]:
    """Return a choice as a few short lines: each module, then what they have in common."""
    lines = []
    for name, plan in choice.modules:
        parts = f" of {plan.virtual_stages} parts" if plan.virtual_stages > 1 else ""
        sizes = [f"{plan.stages} stages{parts}"] if plan.stages > 1 else []
        axes = ("cp", plan.cp), ("tp", plan.tp), ("ep", plan.ep)
        sizes += [f"{axis} {size}" for axis, size in axes if size > 1]
        again = ", checkpointing" if plan.activation_checkpointing else ""
        lines.append(f"{name}: {' × '.join(sizes) or 'one rank'}{again}")
    common = [f"dp {choice.dp} ({choice.kind})", pluralize(choice.microbatches, "microbatch", "microbatches")]
    lines.append(", ".join([*common, *([choice.schedule] if choice.is_pipeline else [])]))
    if len(choice.modules) > 1:
        encoders = "encoder" if len(choice.modules) == 2 else "encoders"
        lines.append(f"{encoders} {describe_encoder_ranks(choice)}")
    return lines


def describe_layer_split(best: Prediction) -> list[str]:
    """Return the number of layers of each stage, for the modules with several stages."""
    lines = []
    for name, starts in best.starts.items():
        if len(starts) > 1:
            ends = (*starts[1:], best.layers[name])
            parts = " + ".join(str(end - start) for start, end in zip(starts, ends, strict=True))
            lines.append(f"{name} is split into {parts} layers")
    return lines


def describe_encoder_ranks(choice: Candidate) -> str:
    """Return on which ranks the encoders run."""
    whose = "its" if len(choice.modules) == 2 else "their"
    return _ENCODER_RANKS.get(choice.ranks, _ENCODER_RANKS["own"]).format(whose=whose)


def describe_auto_plan(best: Prediction, cluster: Cluster) -> str:
    """Return a plan on one line."""
    return f"parallel: auto: {best.candidate.describe()}. Predicted for {cluster.name}: {describe_prediction(best)}."


def describe_prediction(best: Prediction) -> str:
    """Return the figures of a prediction on one line."""
    figures = [f"{format_step(best)} a step", f"{format_rate(best)} {select_rate_unit(best)} a second"]
    figures += [f"MFU {format_percent(best.mfu)}"] if best.mfu is not None else []
    figures.append(f"{format_bytes(best.peak)} of {format_bytes(best.limit)} on the fullest device")
    return ", ".join(figures).replace("\u00a0", " ")


def format_step(one: Prediction) -> str:
    """Return the time of a step, with its error bar if there is one."""
    return f"{format_step_time(one.step)}{format_error(one.error)}"


def select_rate_unit(one: Prediction) -> str:
    """Return the unit of throughput: tokens, or samples where the model takes no tokens."""
    return "tokens" if one.tokens_per_second else "samples"


def format_rate(one: Prediction) -> str:
    """Return the throughput in that unit, per second."""
    rate = one.tokens_per_second or one.samples_per_second
    return format_count(rate) if rate >= 100 else f"{rate:.3g}"


def compare_with_best(one: Prediction, best: Prediction) -> str:
    """Return how much slower a prediction is than the best, or why it does not fit."""
    if not one.fits:
        return one.reasons[0]
    slower = one.step / best.step - 1
    return f"+{slower:.1%}" if slower >= 0.0005 else "as fast as the best" if slower > -0.0005 else f"{slower:.1%}"


def extract_reason(one: RunnerUp) -> str:
    """Return why a plan lost, without the percentage."""
    figure, _, reason = one.reason.partition(": ")
    return f"lost: {reason}" if figure.startswith("+") else ""


def explain_choice(found: SearchResult) -> list[str]:
    """Return what decided for the best plan: each of its traits, against the best plan that differs in it."""
    best = found.best
    if best is None:
        return []
    others = [one.prediction for one in found.runners_up]
    fractions = [(getattr(best.breakdown, name) / best.step, text) for name, text in TIME_PARTS.items()]
    fractions.sort(key=lambda part: -part[0])
    parts = [f"{text} {fraction:.0%}" for fraction, text in fractions if fraction >= 0.005]
    times = [f"Where the time of the busiest device goes: {', '.join(parts)}."] if parts else []
    used = [f"Only {found.used} is used: beside other kinds of nodes it would wait for them."] if found.used else []
    return [*used, *_compare_traits(best, others), *times]


def _compare_traits(best: Prediction, others: Sequence[Prediction]) -> Iterator[str]:
    choice = best.candidate
    last_name, last = choice.modules[-1]

    def compare(trait: str, differs: Callable[[Candidate], bool], instead: Callable[[Candidate], str]) -> Iterator[str]:
        rival = min((one for one in others if differs(one.candidate)), key=lambda one: one.step, default=None)
        if rival is not None:
            yield f"{trait}: {instead(rival.candidate)} a step takes {_format_slowdown(rival, best)}."

    def get_last(one: Candidate) -> ModulePlan:
        return one.modules[-1][1]

    if len(choice.modules) > 1:
        inside = ("shared", "first_stage")  # both are on the language model's ranks
        alike = inside if choice.ranks in inside else (choice.ranks,)
        yield from compare(_describe_encoders(choice), lambda one: one.ranks not in alike, describe_encoder_ranks)
    trait = f"{last_name} has tp {last.tp}" if last.tp > 1 else f"{last_name} has no tensor parallelism"
    yield from compare(trait, lambda one: get_last(one).tp != last.tp, lambda one: f"with tp {get_last(one).tp}")
    if last.stages > 1:
        trait = f"{last_name} has {last.stages} stages"
        yield from compare(trait, lambda one: get_last(one).stages == 1, lambda one: "with one")
    else:
        trait = f"{last_name} has one stage"
        yield from compare(trait, lambda one: get_last(one).stages > 1, lambda one: f"with {get_last(one).stages}")
    if choice.dp > 1:
        trait = f"Data parallelism is {choice.kind}"
        yield from compare(trait, lambda one: one.kind != choice.kind, lambda one: f"with {one.kind}")


def _describe_encoders(choice: Candidate) -> str:
    *encoders, _ = choice.modules
    names = " and ".join(name for name, _ in encoders)
    if choice.ranks != "own":
        return f"{names} {'runs' if len(encoders) == 1 else 'run'} {describe_encoder_ranks(choice)}"
    ranks = " and ".join(pluralize(plan.ranks * choice.dp, "device") for _, plan in encoders)
    has, whose = ("has", "its") if len(encoders) == 1 else ("have", "their")
    return f"{names} {has} {ranks} of {whose} own"


def _format_slowdown(one: Prediction, best: Prediction) -> str:
    slower = one.step / best.step - 1
    if slower >= 1:
        return f"{1 + slower:.3g} times as long"
    return f"{slower:.1%} longer" if slower >= 0.0005 else "as long"


def build_train_command(
    best: Prediction, cluster: Cluster, config: str, plan: str, overrides: Sequence[str] = ()
) -> str:
    """Return the command that trains with a plan, with as many processes as the plan has ranks."""
    world, rest = best.candidate.world, shlex.join([config, *overrides, "--plan", plan])
    if world > cluster.per_node:
        nodes = -(-world // cluster.per_node)
        return (
            f"torchrun --nnodes={nodes} --nproc-per-node={world // nodes} --rdzv-backend=c10d "
            f"--rdzv-endpoint=FIRST_MACHINE:29500 -m cornstarch train {rest}"
        )
    return f"cornstarch train {rest}" + (f" --nproc {world}" if world > 1 else "")
