"""Stages of a few numbers, run by the real runtime in several processes, and the same computed in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.pipeline.runtime import Runtime
from cornstarch.pipeline.transfer import Edge, Post, Route
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule

WIDTH = 6
MODULES = {"language_model", "model"}


class SmallStage(nn.Module):
    """Adds what it receives to its own input, if it has one, and computes a little."""

    def __init__(self, number: int, module: str, trains: bool, is_first: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.requires_grad_(trains)
        self.module, self.is_first = module, is_first

    def forward(self, inputs: Mapping[str, Tensor], received: Mapping[int, Any]) -> Any:
        """Return a payload: a tensor in a dictionary beside a number."""
        hidden = inputs[self.module] if self.is_first else 0.0
        for source in sorted(received):
            hidden = hidden + received[source]["hidden"] * received[source]["factor"]
        return {"hidden": self.layers(hidden), "factor": 0.5, "rows": [torch.arange(3)]}


def microbatches(count: int, modules: list[str], ragged: bool, lonely: bool) -> list[dict[str, Tensor]]:
    """Return inputs of every module; ragged: of different lengths; lonely: every other one has no image."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for m in range(count):
        rows = 2 + (m % 3 if ragged else 0)
        names = [name for name in modules if not (lonely and m % 2 and name not in MODULES)]
        found.append({name: torch.randn(rows, WIDTH, generator=generator) for name in names})
    return found


def made(graph: StageGraph) -> dict[int, SmallStage]:
    """Return all stages of a graph."""
    return {
        number: SmallStage(number, node.module, node.trains, node.index == 0) for number, node in enumerate(graph.nodes)
    }


def takes_part(graph: StageGraph, stage: int, inputs: Mapping[str, Any]) -> bool:
    """Whether a stage has something to do."""
    return graph.nodes[stage].module in inputs


def alone(graph: StageGraph, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and all gradients, computed in one piece."""
    stages = made(graph)
    losses = []
    for inputs in batches:
        outputs: dict[int, Any] = {}
        for number in range(len(graph.nodes)):  # numbered in the order of the edges
            if takes_part(graph, number, inputs):
                before = {s: outputs[s] for s in graph.predecessors(number) if s in outputs}
                outputs[number] = stages[number](inputs, before)
        loss = outputs[graph.sink]["hidden"].pow(2).mean()
        if loss.requires_grad:
            loss.backward()
        losses.append(float(loss))
    return losses, gradients(stages)


def gradients(stages: Mapping[int, nn.Module]) -> dict[str, Any]:
    """Return all gradients by stage and name."""
    return {
        f"{number} {name}": None if p.grad is None else p.grad.numpy()
        for number, stage in stages.items()
        for name, p in stage.named_parameters()
    }


def run(
    graph: StageGraph, policy: str, count: int, ragged: bool, lonely: bool, steps: int = 1
) -> tuple[list[float], dict[str, Any], int]:
    """Run this process's place; return the losses that it has, its gradients, and how many actions it recorded."""
    place = dist.get_rank()
    schedule = make_schedule(graph, count, policy)
    stages = made(graph)
    own = {number: stages[number] for number, node in enumerate(graph.nodes) if node.place == place}
    post = Post(dist.new_group(backend="gloo"), torch.device("cpu"))
    edges = {}
    for number, (source, target) in enumerate(graph.edges):
        a, b = graph.nodes[source].place, graph.nodes[target].place
        if a != b and place in (a, b):
            route = Route.between(np.array([[a]]), np.array([[b]]), is_same_module=True)
            edges[source, target] = Edge.at(place, route, post, number, str(graph.nodes[source]))
    runtime = Runtime(schedule, place, own, edges, post, lambda stage, inputs: takes_part(graph, stage, inputs))
    losses: dict[int, float] = {}

    def finish(m: int, output: Any) -> Tensor:
        loss: Tensor = output["hidden"].pow(2).mean()
        losses[m] = float(loss)
        return loss

    names = list(dict.fromkeys(node.module for node in graph.nodes))
    for _ in range(steps):
        for stage in own.values():
            stage.zero_grad()
        runtime.train(microbatches(count, names, ragged, lonely), finish)
    found = gradients(own)
    if place == graph.nodes[graph.sink].place:
        trained = dict(losses)
        runtime.forward(microbatches(count, names, ragged, lonely), finish)
        assert losses == trained
    else:
        runtime.forward(microbatches(count, names, ragged, lonely), finish)
    post.close()
    return [losses[m] for m in sorted(losses)], found, len(runtime.events)


def fail(graph: StageGraph, place: int, microbatch: int) -> str:
    """Raise inside one stage; return what every process is told."""

    class Failing(SmallStage):
        calls = 0

        def forward(self, inputs: Mapping[str, Tensor], received: Mapping[int, Any]) -> Any:
            self.calls += 1
            if self.calls == microbatch + 1:
                raise ValueError("a bad number")
            return super().forward(inputs, received)

    rank = dist.get_rank()
    stages = made(graph)
    if rank == place:
        stages[place] = Failing(place, graph.nodes[place].module, True, place == 0)
    post = Post(dist.new_group(backend="gloo"), torch.device("cpu"))
    edges = {}
    for number, (source, target) in enumerate(graph.edges):
        if rank in (source, target):
            route = Route.between(np.array([[source]]), np.array([[target]]), is_same_module=True)
            edges[source, target] = Edge.at(rank, route, post, number, str(graph.nodes[source]))
    runtime = Runtime(make_schedule(graph, 4, "1f1b"), rank, {rank: stages[rank]}, edges, post)
    try:
        runtime.train(microbatches(4, ["model"], False, False), lambda m, output: output["hidden"].sum())
    except RuntimeError as error:
        return str(error)
    return "nothing"
