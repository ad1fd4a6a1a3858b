"""Small runs and clusters with simple figures, and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cornstarch.plan import candidates
from cornstarch.plan.candidates import Candidate, SearchSpace
from cornstarch.plan.cluster import Cluster, Device, Link
from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost
from cornstarch.plan.expert_cost import ExpertCost

GIB = 2**30


def layer(name: str = "layer", trained: bool = True, seconds: float = 1.0, **changed: object) -> LayerCost:
    """Return a layer of a second each, of 100 parameters in half precision, whose sums cost nothing."""
    given: dict[str, object] = {
        "forward": seconds,
        "input_gradient": seconds,
        "weight_gradient": seconds,
        "parameters": 100,
        "parameter_bytes": 200,
        "activation_bytes": 40,
        "activation_bytes_recomputed": 10,
        "output_bytes": 10,
        "trained": trained,
        "sums": 0,
    }
    return LayerCost(name, **{**given, **changed})  # type: ignore[arg-type]


def module(name: str, layers: int, trained: bool = True, seconds: float = 1.0, **changed: object) -> ModuleCost:
    """Return a module of equal layers; its last layer, a projector, is trained if it is an encoder."""
    sizes = {key: changed.pop(key) for key in ("tp_sizes", "cp_sizes") if key in changed}
    every = tuple(layer(f"{name}.{index}", trained, seconds, **changed) for index in range(layers))
    return ModuleCost(name, every, **sizes)  # type: ignore[arg-type]


def cluster(
    nodes: int = 1,
    per_node: int = 4,
    memory: int = GIB,
    inside: float = 1e9,
    between: float = 1e8,
    latency: float = 0.0,
) -> Cluster:
    """Return a cluster of devices that read their memory for nothing."""
    device = Device("toy", memory, flops=1e12)
    return Cluster(nodes, per_node, device, Link(inside, latency), Link(between, latency), name="toys")


def random_run(draw: random.Random) -> tuple[RunCost, Cluster]:
    """Return a run of one to three modules, and a cluster of up to eight devices, on which not everything fits."""
    encoders = draw.choice([0, 0, 1, 1, 1, 2])
    modules = []
    for index in range(encoders + 1):
        is_last = index == encoders
        name = ("model" if not encoders else "language_model") if is_last else f"encoder{index}"
        trained = draw.random() < (0.7 if is_last else 0.3)
        size = draw.choice([50, 100, 400])
        layers = tuple(
            layer(
                f"{name}.{number}",
                trained or (not is_last and number == 1) or (is_last and not encoders),
                draw.choice([1e-3, 2e-3, 3e-3]),
                parameters=size * 1000,
                parameter_bytes=size * 2000,
                activation_bytes=draw.choice([1, 4]) * 100_000,
                activation_bytes_recomputed=20_000,
                output_bytes=draw.choice([10_000, 100_000]),
                kv_bytes=5_000,
                sums=2,
            )
            for number in range(2 if not is_last else draw.choice([2, 3]))
        )
        modules.append(ModuleCost(name, layers, tp_sizes=(1, 2), cp_sizes=(1, 2) if is_last and encoders < 2 else (1,)))
    cost = RunCost(tuple(modules), batch=draw.choice([2, 2, 4]), tokens=100, flops=1e9, state_bytes=8)
    memory = int(draw.choice([1.5, 3, 6, 20]) * 1e6)
    nodes, per_node = draw.choice([(1, 2), (1, 4), (2, 2), (1, 3)])
    inside, between = draw.choice([(1e9, 1e8), (1e10, 1e9), (1e8, 1e7)])
    return cost, cluster(nodes, per_node, memory, inside, between, 1e-6)


def enumerate_candidates(cost: RunCost, cluster: Cluster, space: SearchSpace | None = None) -> Iterator[Candidate]:
    """Yield every candidate of a space."""
    space = space or SearchSpace()
    for sizes in candidates.enumerate_sizes(cost, cluster, space):
        for cut in cut_experts(sizes, cost):
            for microbatches in candidates.list_microbatches(cut, cost, space):
                for checkpointing in candidates.list_checkpointing(cost, space):
                    yield from candidates.complete_sizes(cut, checkpointing, microbatches, cost, space)


def cut_experts(sizes: candidates.ParallelSizes, cost: RunCost) -> Iterator[candidates.ParallelSizes]:
    """Yield sizes with every number of ranks that a plan may share experts out over, by trying all numbers."""
    for eps in product(*(range(1, max(module.ep_sizes) + 1) for module in cost.modules)):
        every = zip(cost.modules, sizes.sizes, eps, strict=True)
        if all(ep in module.ep_sizes and (sizes.dp * cp) % ep == 0 for module, (_, cp, _), ep in every):
            yield replace(sizes, eps=eps)


def add_experts(cost: RunCost, draw: random.Random) -> RunCost:
    """Return a run in which some layers of the last module have experts, slower layers if they are shared out."""
    *before, last = cost.modules
    many = draw.choice([2, 4, 6])
    share, sent, moved = draw.choice([0.5, 0.9]), draw.choice([10**3, 10**5]), draw.choice([0.0, 0.3])
    slower, layers, plain = draw.choice([1.0, 1.2]), [], []
    for number, one in enumerate(last.layers):
        if draw.random() < 0.3 and number:
            layers.append(one)
            plain.append(one)
            continue
        own = ExpertCost(
            int(one.parameters * share), int(one.parameters * share) * 2, int(one.num_trainable * share), sent, many,
            kept_bytes=one.activation_bytes // 2, tokens_forward=one.forward / 2, weights_forward=one.forward * moved,
            tokens_input_gradient=one.input_gradient / 2, weights_weight_gradient=one.weight_gradient * moved,
        )  # fmt: skip
        layers.append(replace(one, experts=own))
        times = {name: getattr(one, name) * slower for name in ("forward", "input_gradient", "weight_gradient")}
        plain.append(replace(one, **times, experts=own))
    sizes = tuple(size for size in range(1, many + 1) if many % size == 0)
    modules = (*before, replace(last, layers=tuple(layers), ep_sizes=sizes))
    eager = (*before, replace(last, layers=tuple(plain), ep_sizes=sizes))
    return replace(cost, modules=modules, eager=eager, expert_imbalance=draw.choice([1.0, 1.5]))
