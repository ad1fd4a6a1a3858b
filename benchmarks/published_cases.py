"""Published results, and the same runs in our simulator: models, clusters, plans.

The operations of layers are counted (nine_models.py), devices and links come from the catalogue, and a device reaches a
fraction of the vendor's peak rate (`EFFICIENCY`). `cornstarch.plan.predict` predicts the plans, and
`cornstarch.plan.search` finds ours. Nothing here ran on the machines of the published figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod

from modality_plans import PUBLISHED, even_starts
from nine_models import (
    DEVICES,
    ENCODER_DEVICES,
    FIXED,
    FREE,
    LANGUAGE,
    LANGUAGE_DEVICES,
    MICROBATCHES,
    VIT_22B,
    WORKLOADS,
    Model,
    Stack,
    run_cost,
)

from cornstarch.plan.candidates import Candidate, SearchSpace
from cornstarch.plan.cluster import Cluster
from cornstarch.plan.cost import ModuleCost, RunCost
from cornstarch.plan.data_options import RankPlacement
from cornstarch.plan.pipeline_cost import CostModel, PipelineCost
from cornstarch.plan.plan import WHOLE_MODEL, DataPlan, ModulePlan, Plan
from cornstarch.plan.predict import Prediction, predict
from cornstarch.plan.search import search

EFFICIENCY = 0.55  # assumed: fraction of the peak rate that matrix products reach in training


def rate(cluster: Cluster, efficiency: float = EFFICIENCY) -> float:
    """Return the operations per second of a device."""
    return efficiency * cluster.device.flops_of("bf16")


# ---------------------------------------------------------------------------------------------------- nine models

MACHINES = (("6x4xA40", EFFICIENCY), ("6x4xA40", 0.35), ("3x8xA100-80G", EFFICIENCY), ("3x8xH100", 0.4))
"""24 GPUs each. Machines and efficiencies are assumptions, so there are several."""
SAME = SearchSpace(checkpointing=(True,), microbatches=(MICROBATCHES,), kinds=("ddp",), virtual=(2, 3))


@dataclass(frozen=True)
class Against:
    """One of the nine models: the authors' plans, and ours."""

    model: Model
    own: Prediction
    """The authors' plan: the language model on five places, each encoder on one."""
    colocated: Prediction
    """Their chain: encoders together, and their number of language model stages."""
    stages: Prediction
    """Ours, with their tp, cp and microbatches."""
    free: Prediction
    """Ours, with all sizes searched."""

    @property
    def human(self) -> Prediction:
        """The better of the authors' plans."""
        return min(self.own, self.colocated, key=lambda one: one.step)

    @property
    def ratios(self) -> tuple[float, float]:
        """The human plan's step time relative to ours: with the same tp and cp, and with all sizes searched."""
        return self.human.step / self.stages.step, self.human.step / self.free.step


@cache
def nine(machines: str = MACHINES[0][0], efficiency: float = EFFICIENCY) -> tuple[Against, ...]:
    """Return the nine models with the authors' plans and ours."""
    cluster = Cluster.parse(machines)
    return tuple(_against(model, cluster, rate(cluster, efficiency)) for model in WORKLOADS["published"])


def _against(model: Model, cluster: Cluster, operations: float) -> Against:
    cost = run_cost(model, operations, FIXED)
    count = PUBLISHED[model.name]
    shared: RankPlacement = "colocated" if len(model.encoders) > 1 else "own"
    return Against(
        model,
        _authors(model, cost, cluster, (5, 1), "own"),
        _authors(model, cost, cluster, (count, (DEVICES - count * LANGUAGE_DEVICES) // ENCODER_DEVICES), shared),
        best(cost, cluster, SAME),
        best(run_cost(model, operations, FREE), cluster, SearchSpace(virtual=(2, 3))),
    )


def best(cost: RunCost, cluster: Cluster, space: SearchSpace) -> Prediction:
    """Return the result of the product's search."""
    found = search(cost, cluster, space, runners_up=0)
    assert found.best is not None, found.message
    return found.best


def _authors(
    model: Model, cost: RunCost, cluster: Cluster, stages: tuple[int, int], ranks: RankPlacement
) -> Prediction:
    """Return a plan of the authors: 1F1B, tp 2, cp 2 in the language model, even stages, recomputation.

    stages: Stages of the language model, and of each encoder.
    """
    modules = {name: ModulePlan(tp=2, stages=stages[1]) for name in model.encoders}
    modules[LANGUAGE] = ModulePlan(tp=2, cp=2, stages=stages[0], activation_checkpointing=True)
    starts = {name: even_starts(len(cost.module(name).layers), plan.stages) for name, plan in modules.items()}
    return predict(Candidate.of(Plan(modules, ranks=ranks), 1, MICROBATCHES, starts), cost, cluster)


def frozen_aware() -> Iterator[tuple[float, float]]:
    """Yield for each model the cost of ignoring frozen parts: in the stages only; in the passes as well."""
    cluster = Cluster.parse(MACHINES[0][0])
    roomy = replace(cluster, device=replace(cluster.device, memory=2**60))  # memory is not limited here
    for one in nine():
        trained = best(run_cost(one.model, rate(cluster), FIXED, trained=True), roomy, SAME)
        cuts = replace(trained.candidate, starts=tuple(trained.starts.items()))
        cost = run_cost(one.model, rate(cluster), FIXED)
        yield predict(cuts, cost, roomy).step / one.stages.step, trained.step / one.stages.step


# ---------------------------------------------------------------------------------------------------- Megatron-Bridge

H100 = Cluster.parse("3x8xH100")
# Qwen3.5-VL-27B, with ordinary attention assumed in all layers; an image of 768 × 768 in patches of 16.
QWEN_27B = Stack("qwen3.5_27b", 64, 5120, 17408, 24, 4, 256, True, 248320)
QWEN_VISION = Stack("qwen3.5_vision", 27, 1152, 4304, 16, 16, 72, False, 0, 1, 48 * 48, 24 * 24)
MIMO_CELLS = {
    (2048, 32): (0.236, 0.310),
    (2048, 64): (0.355, 0.447),
    (4096, 32): (0.230, 0.233),
    (4096, 64): (0.275, 0.306),
}
"""By tokens and samples per step: the smallest and largest gain of three datasets, in tokens/s per active GPU."""
SIZES = {"encoder": ((1, 2, 4), (1,)), LANGUAGE: ((1, 2, 4, 8), (1,))}


SLOWER = (1, 2, 3, 4, 5.5)
"""Slowdown factors of the encoder relative to its operations on one rank, in both plans."""


@dataclass(frozen=True)
class Mimo:
    """One cell of the tutorial's table, and the simulated gain of the image rank."""

    tokens: int
    batch: int
    published: tuple[float, float]
    shared: float
    """The gain if tp ranks divide the encoder's work in the first stage of the standard plan."""
    slower: tuple[float, ...]
    """The gains if each tp rank does all of it, slowed down by the factors of `SLOWER`."""


def mimo() -> Iterator[Mimo]:
    """Yield the cells of the tutorial: 16 ranks with the encoder in the first stage against 17 with one for images."""
    for (tokens, batch), gained in MIMO_CELLS.items():
        slower = tuple(_gain(tokens, batch, 4 * times) for times in SLOWER)
        yield Mimo(tokens, batch, gained, _gain(tokens, batch, 1.0), slower)


def _gain(tokens: int, batch: int, slower: float) -> float:
    """Return the gain of an image rank, in tokens per second per active rank.

    slower: The encoder's slowdown in the first stage, relative to its operations divided over tp ranks.
    """
    model = Model("Qwen3.5-VL-27B", QWEN_27B, {"vision": QWEN_VISION}, tokens - QWEN_VISION.handed)
    cost = run_cost(model, rate(H100), SIZES, trained=True, batch=batch)
    language = ModulePlan(tp=4, stages=2)
    starts = {"vision": (0,), LANGUAGE: even_starts(64, 2)}
    inside = Plan({"vision": ModulePlan(tp=4), LANGUAGE: language}, DataPlan("zero1"), "first_stage")
    standard = predict(Candidate.of(inside, 2, batch // 2, starts), _slowed(cost, slower), H100)
    # The image rank encodes the images of both replicas; tp does not slow it down.
    apart = Plan({"vision": ModulePlan(), LANGUAGE: language}, DataPlan("zero1"), "own")
    ours = predict(Candidate.of(apart, 2, batch // 2, starts), _slowed(cost, 2.0 * max(1.0, slower / 4)), H100)
    return standard.step * 16 / (ours.step * 17) - 1


def _slowed(cost: RunCost, times: float) -> RunCost:
    """Return a run whose encoders are slower by a factor."""
    slow = [
        replace(
            layer,
            forward=layer.forward * times,
            input_gradient=layer.input_gradient * times,
            weight_gradient=layer.weight_gradient * times,
            again=None,
        )
        for layer in cost.modules[0].layers
    ]
    first = cost.modules[0]
    return replace(cost, modules=(ModuleCost(first.name, tuple(slow), first.feeds, first.tp_sizes), cost.modules[-1]))


# ---------------------------------------------------------------------------------------------------- Optimus

OPTIMUS = Cluster.parse("384x8xH100")
GPT_175B = Stack("gpt_175b", 96, 12288, 4 * 12288, 96, 96, 128, False, 51200)
OPTIMUS_BATCH = 1536
BUBBLES = {"PP": 0.229, "TP": 0.112, "DP reduce-scatter": 0.089, "DP all-gather": 0.033}
OPTIMUS_GAIN = (0.205, 0.213)


@dataclass(frozen=True)
class Optimus:
    """ViT-22B and GPT-175B on 3,072 GPUs."""

    even: Prediction
    """The encoder in the first of eight stages, tp 8, twelve even chunks per place."""
    balanced: Prediction
    """The fastest of the same kind that fits, balanced by the costs of layers and encoder."""
    tried: int
    """The number of plans that were compared."""
    alone: Prediction
    """The fastest of the same kind without an encoder: the limit if all of its work fits into gaps."""
    ours: Prediction
    cost: RunCost

    def bubbles(self, one: Prediction) -> dict[str, float]:
        """Return the idle fractions of a step, averaged over the places of the pipeline."""
        timeline, whole = one.timeline, one.step * len(one.timeline.events)
        late = [
            stretch.end - own[-1].end
            for own, stretches in zip(timeline.events, timeline.other_work, strict=True)
            for stretch in stretches
            if stretch.name == "sums"
        ]
        after = sum(end.gather for end in timeline.ends)
        passes = PipelineCost(one.candidate, CostModel(self.cost, OPTIMUS)).rank_costs.values()
        tensor = one.candidate.microbatches * sum(float(module.tensor.sum()) for module in passes)
        return {
            "PP": (whole - sum(timeline.busy) - sum(late) - after) / whole,
            "TP": tensor / whole,
            "DP reduce-scatter": sum(late) / whole,
            "DP all-gather": after / whole,
        }

    def unhidden(self, one: Prediction) -> float:
        """Return the fraction of the gradient reduction in float32 and without overlap."""
        return 2 * max(end.reduction for end in one.timeline.ends) / one.step


def optimus() -> Optimus:
    """Return the run with its encoder, without it, and with our plan."""
    vision = replace(VIT_22B, tiles=1, tokens=1024, handed=1024)
    model = Model("ViT-22B + GPT-175B", GPT_175B, {"vision": vision}, 1024)
    sizes = {"encoder": ((1, 2, 4, 8), (1,)), LANGUAGE: ((8,), (1,))}
    cost = run_cost(model, rate(OPTIMUS), sizes, trained=True, batch=OPTIMUS_BATCH)
    bare = replace(cost, modules=(replace(cost.modules[-1], name=WHOLE_MODEL),))
    every = tuple(range(GPT_175B.layers))
    even = Candidate.of(_usual(("vision", LANGUAGE), 12, False), 48, 16, {LANGUAGE: every, "vision": (0,)})
    balanced, alone = (
        [predict(choice, one, OPTIMUS) for choice in _usual_choices(names)]
        for names, one in ((("vision", LANGUAGE), cost), ((WHOLE_MODEL,), bare))
    )
    return Optimus(
        predict(even, cost, OPTIMUS),
        min((one for one in balanced if one.fits), key=lambda one: one.step),
        len(balanced),
        min((one for one in alone if one.fits), key=lambda one: one.step),
        best(cost, OPTIMUS, SearchSpace(virtual=(2, 4, 6), tp_sequence=True)),
        cost,
    )


def _usual_choices(names: tuple[str, ...]) -> Iterator[Candidate]:
    """Yield plans that a careful user would try: microbatches, chunks, and recomputation."""
    for many, parts, again in product((8, 16, 32), (1, 2, 4, 6), (False, True)):
        yield Candidate.of(_usual(names, parts, again), 48, many)


def _usual(names: tuple[str, ...], parts: int, again: bool) -> Plan:
    """Return tp 8 and eight stages, with the encoder, if any, in the first."""
    *encoders, last = names
    modules = {name: ModulePlan(tp=8, activation_checkpointing=again) for name in encoders}
    modules[last] = ModulePlan(tp=8, stages=8, virtual_stages=parts, tp_sequence=True, activation_checkpointing=again)
    ranks: RankPlacement = "first_stage" if encoders else "auto"
    return Plan(modules, DataPlan("zero1"), ranks, "interleaved" if parts > 1 else "1f1b")


def geometric(ratios: list[float]) -> float:
    """Return the mean of ratios."""
    return prod(ratios) ** (1 / len(ratios))
