"""Stages of a few numbers, run by the real runtime in several processes, and the same computed in one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.compat import default_store
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


def runtime_of(
    graph: StageGraph, policy: str, count: int, own: Mapping[int, nn.Module], post: Post | None = None
) -> Runtime:
    """Return what runs the stages of this process's place."""
    place = dist.get_rank()
    post = post or Post(dist.new_group(backend="gloo"), torch.device("cpu"))
    edges = {}
    for number, (source, target) in enumerate(graph.edges):
        a, b = graph.nodes[source].place, graph.nodes[target].place
        if a != b and place in (a, b):
            route = Route.between(np.array([[a]]), np.array([[b]]), is_same_module=True)
            edges[source, target] = Edge.at(place, route, post, number, str(graph.nodes[source]))
    schedule = make_schedule(graph, count, policy)
    return Runtime(schedule, place, own, edges, post, lambda stage, inputs: takes_part(graph, stage, inputs))


def run(
    graph: StageGraph, policy: str, count: int, ragged: bool, lonely: bool, steps: int = 1
) -> tuple[list[float], dict[str, Any], int]:
    """Run this process's place; return the losses that it has, its gradients, and how many actions it recorded."""
    place, stages = dist.get_rank(), made(graph)
    own = {number: stages[number] for number, node in enumerate(graph.nodes) if node.place == place}
    runtime = runtime_of(graph, policy, count, own)
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
    runtime.post.close()
    return [losses[m] for m in sorted(losses)], found, len(runtime.events)


class CountingPost(Post):
    """Knows how much it ever held."""

    most = 0

    def send(self, *arguments: Any) -> None:
        """Begin to send."""
        super().send(*arguments)
        self.most = max(self.most, len(self._left))


def most_held(graph: StageGraph, policy: str, count: int) -> tuple[int, int]:
    """Return how many payloads this process held at most because they might not have left, in training and without."""
    place, stages = dist.get_rank(), made(graph)
    own = {number: stages[number] for number, node in enumerate(graph.nodes) if node.place == place}
    post = CountingPost(dist.new_group(backend="gloo"), torch.device("cpu"))
    runtime = runtime_of(graph, policy, count, own, post)
    batches = microbatches(count, ["model"], False, False)
    runtime.train(batches, lambda m, output: output["hidden"].sum())
    training, post.most = post.most, 0
    runtime.forward(batches, lambda m, output: None)
    post.close()
    return training, post.most


class _Trouble(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("a bad number")


class FailingStage(SmallStage):
    """Raises at one microbatch, forward or backward."""

    at: tuple[str, int] = ("", -1)
    calls = 0

    def forward(self, inputs: Mapping[str, Tensor], received: Mapping[int, Any]) -> Any:
        """Return what the stage returns, if it does."""
        made = super().forward(inputs, received)
        number, self.calls = self.calls, self.calls + 1
        if self.at == ("forward", number):
            raise ValueError("a bad number")
        if self.at == ("backward", number):
            made["hidden"] = _Trouble.apply(made["hidden"])
        return made


_caught: list[BaseException] = []  # with its traceback, which knows every message that was on its way


def fail(graph: StageGraph, place: int, microbatch: int, where: str, policy: str, count: int) -> tuple[str, float]:
    """Raise in one stage, and live on; return what every process is told, and when it was done with it."""
    rank, stages = dist.get_rank(), made(graph)
    failing = FailingStage(place, graph.nodes[place].module, True, place == 0)
    failing.at = where, microbatch
    own = failing if rank == place else stages[rank]
    runtime = runtime_of(graph, policy, count, {rank: own})

    def finish(m: int, output: Any) -> Tensor:
        if (where, microbatch) == ("loss", m):
            raise ValueError("a bad number")
        return output["hidden"].sum()

    words = "nothing"
    dist.barrier()  # how long it takes until all know is counted from when all are at work
    try:
        for _ in range(2):  # the first step may be over for some
            runtime.train(microbatches(count, ["model"], False, False), finish)
    except RuntimeError as error:
        _caught[:], words = [error], str(error)
    ended = time.time()
    store = default_store()
    store.add("ended", 1)
    while store.add("ended", 0) < graph.places:  # nobody goes, and closes its connections by that, before all know
        time.sleep(0.02)
    return words, ended
