"""Small stages, run by the real runtime in several processes, and the same computation in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.compat import default_store
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.parallelize import ParallelizeOptions, parallelize
from cornstarch.parallel.device import DevicePlacement
from cornstarch.pipeline.p2p import P2PChannel, Route, StageEdge
from cornstarch.pipeline.runtime import Runtime
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import ModulePlan, Plan
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule
from tests import zoo

WIDTH = 6
MODULES = {"language_model", "model"}


class SmallStage(nn.Module):
    """Adds the received tensors to its own input, if it has one, and applies an MLP."""

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


def microbatches(count: int, modules: list[str], ragged: bool, text_only: bool) -> list[dict[str, Tensor]]:
    """Return inputs of every module; ragged: of different lengths; text_only: every other one has no image."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for m in range(count):
        rows = 2 + (m % 3 if ragged else 0)
        names = [name for name in modules if not (text_only and m % 2 and name not in MODULES)]
        found.append({name: torch.randn(rows, WIDTH, generator=generator) for name in names})
    return found


def build_stages(graph: StageGraph) -> dict[int, SmallStage]:
    """Return all stages of a graph."""
    return {
        number: SmallStage(number, node.module, node.trains, node.index == 0) for number, node in enumerate(graph.nodes)
    }


def is_active(graph: StageGraph, stage: int, inputs: Mapping[str, Any]) -> bool:
    """Return whether a stage has an input in a microbatch."""
    return graph.nodes[stage].module in inputs


def run_in_one_process(graph: StageGraph, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and all gradients, computed in one piece."""
    stages = build_stages(graph)
    losses = []
    for inputs in batches:
        outputs: dict[int, Any] = {}
        for number in range(len(graph.nodes)):  # numbered in the order of the edges
            if is_active(graph, number, inputs):
                before = {s: outputs[s] for s in graph.predecessors(number) if s in outputs}
                outputs[number] = stages[number](inputs, before)
        loss = outputs[graph.sink]["hidden"].pow(2).mean()
        if loss.requires_grad:
            loss.backward()
        losses.append(float(loss))
    return losses, collect_gradients(stages)


def collect_gradients(stages: Mapping[int, nn.Module]) -> dict[str, Any]:
    """Return all gradients by stage and name."""
    return {
        f"{number} {name}": None if p.grad is None else p.grad.numpy()
        for number, stage in stages.items()
        for name, p in stage.named_parameters()
    }


def build_runtime(
    graph: StageGraph, policy: str, count: int, own: Mapping[int, nn.Module], channel: P2PChannel | None = None
) -> Runtime:
    """Return the runtime of this process's place."""
    place = dist.get_rank()
    channel = channel or P2PChannel(dist.new_group(backend="gloo"), torch.device("cpu"))
    edges = {}
    for number, (source, target) in enumerate(graph.edges):
        a, b = graph.nodes[source].place, graph.nodes[target].place
        if a != b and place in (a, b):
            route = Route.between(np.array([[a]]), np.array([[b]]), is_same_module=True)
            edges[source, target] = StageEdge(place, route, channel, number, str(graph.nodes[source]))
    schedule = make_schedule(graph, count, policy)
    return Runtime(schedule, place, own, edges, channel, lambda stage, inputs: is_active(graph, stage, inputs))


def run(
    graph: StageGraph, policy: str, count: int, ragged: bool, text_only: bool, steps: int = 1
) -> tuple[list[float], dict[str, Any], int]:
    """Run this process's place; return the losses that it has, its gradients, and how many actions it recorded."""
    place, stages = dist.get_rank(), build_stages(graph)
    own = {number: stages[number] for number, node in enumerate(graph.nodes) if node.place == place}
    runtime = build_runtime(graph, policy, count, own)
    losses: dict[int, float] = {}

    def finish(m: int, output: Any) -> Tensor:
        loss: Tensor = output["hidden"].pow(2).mean()
        losses[m] = float(loss)
        return loss

    names = list(dict.fromkeys(node.module for node in graph.nodes))
    for _ in range(steps):
        for stage in own.values():
            stage.zero_grad()
        runtime.train(microbatches(count, names, ragged, text_only), finish)
    found = collect_gradients(own)
    if place == graph.nodes[graph.sink].place:
        trained = dict(losses)
        runtime.forward(microbatches(count, names, ragged, text_only), finish)
        assert losses == trained
    else:
        runtime.forward(microbatches(count, names, ragged, text_only), finish)
    runtime.channel.close()
    return [losses[m] for m in sorted(losses)], found, len(runtime.events)


class CountingChannel(P2PChannel):
    """Records the largest number of payloads in flight."""

    most = 0

    def send(self, *arguments: Any) -> None:
        """Begin to send."""
        super().send(*arguments)
        self.most = max(self.most, len(self._sent))


def measure_most_in_flight(graph: StageGraph, policy: str, count: int) -> tuple[int, int]:
    """Return the largest number of payloads in flight from this process, in training and in evaluation."""
    place, stages = dist.get_rank(), build_stages(graph)
    own = {number: stages[number] for number, node in enumerate(graph.nodes) if node.place == place}
    channel = CountingChannel(dist.new_group(backend="gloo"), torch.device("cpu"))
    runtime = build_runtime(graph, policy, count, own, channel)
    batches = microbatches(count, ["model"], False, False)
    runtime.train(batches, lambda m, output: output["hidden"].sum())
    training, channel.most = channel.most, 0
    runtime.forward(batches, lambda m, output: None)
    channel.close()
    return training, channel.most


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


_caught: list[BaseException] = []  # with its traceback, which refers to every message that was in flight


def fail(graph: StageGraph, place: int, microbatch: int, where: str, policy: str, count: int) -> tuple[str, float]:
    """Raise in one stage, and keep running; return the error message of this process, and when it was raised."""
    rank, stages = dist.get_rank(), build_stages(graph)
    failing = FailingStage(place, graph.nodes[place].module, True, place == 0)
    failing.at = where, microbatch
    own = failing if rank == place else stages[rank]
    runtime = build_runtime(graph, policy, count, {rank: own})

    def finish(m: int, output: Any) -> Tensor:
        if (where, microbatch) == ("loss", m):
            raise ValueError("a bad number")
        return output["hidden"].sum()

    message = "nothing"
    dist.barrier()  # the time until all processes raise is measured from when all have started
    try:
        for _ in range(2):  # some processes may have finished the first step
            runtime.train(microbatches(count, ["model"], False, False), finish)
    except RuntimeError as error:
        _caught[:], message = [error], str(error)
    ended = time.time()
    store = default_store()
    store.add("ended", 1)
    while store.add("ended", 0) < graph.places:  # an exit would close connections
        time.sleep(0.02)
    return message, ended


def fail_in_replica(rank: int, microbatch: int) -> tuple[str, float]:
    """Raise in the loss of one replica; return the error message of this process, and when it was raised."""
    plan = Plan(modules={"model": ModulePlan(stages=2)})
    layout = Layout.of(plan, dist.get_world_size(), dist.get_world_size())
    context = DistributedContext(layout, DevicePlacement(torch.device("cpu"), "fp32"))
    parallel = parallelize(zoo.LANGUAGE_MODELS["llama"].build(), context, ParallelizeOptions(microbatches=2))
    pipeline = parallel.pipeline
    assert pipeline is not None
    ids = torch.arange(3, 15).view(2, 6)

    def finish(number: int, output: Any) -> Tensor:
        if (dist.get_rank(), number) == (rank, microbatch):
            raise ValueError("a bad number")
        loss: Tensor = output.loss
        return loss

    message = "nothing"
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    dist.barrier()  # the time until all processes raise is measured from when all have started
    try:
        pipeline.train([batch, batch], finish)
    except RuntimeError as error:
        _caught[:], message = [error], str(error)
    ended = time.time()
    store = default_store()
    store.add("ended", 1)
    while store.add("ended", 0) < dist.get_world_size():  # no process exits before all have raised
        time.sleep(0.02)
    return message, ended
