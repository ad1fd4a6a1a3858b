"""Small runs and clusters with simple figures, and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

from cornstarch.plan import candidates
from cornstarch.plan.candidates import Candidate, SearchSpace
from cornstarch.plan.cluster import Cluster, Device, Link
from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost

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
        for microbatches in candidates.list_microbatches(sizes, cost, space):
            for checkpointing in candidates.list_checkpointing(cost, space):
                yield from candidates.complete_sizes(sizes, checkpointing, microbatches, cost, space)
