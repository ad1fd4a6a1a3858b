"""Virtual devices: processes in which the computation of a layer is a sleep of its cost.

The real runtime executes a real schedule on them, with messages of a few numbers. Since they sleep nearly all of the
time, many of them fit on two cores. If a sleep ends too late, as on a busy machine, the next one is shortened by the
delay; all other time of the runtime counts.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.pipeline.p2p import P2PChannel, Route, StageEdge
from cornstarch.pipeline.runtime import Runtime
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule

Cost = tuple[float, float, float]
"""Forward, backward of inputs, backward of weights: seconds of one microbatch."""

# Imported once, in the process that the places are forked from; none of it starts threads.
_IMPORTED = ["cornstarch.pipeline.runtime", "cornstarch.pipeline.template"]
_START = 120.0  # seconds; busy machines fork and connect slowly
_numbers = count()


@dataclass(frozen=True)
class Job:
    """A pipeline and its costs."""

    graph: StageGraph
    layers: tuple[tuple[Cost, ...], ...]
    """Layer costs by stage; their sum is the stage's cost in the graph."""
    microbatches: int
    policy: str
    steps: int

    @property
    def compute(self) -> float:
        """Seconds of computation per step, over all places."""
        total = 0.0
        for stage, layers in enumerate(self.layers):
            forward, backward = _passes(self.graph, stage, layers)
            total += sum(forward) + (sum(backward) if self.graph.wants_gradient(stage) else 0.0)
        return total * self.microbatches


def run(job: Job) -> list[float]:
    """Return the seconds of each step, from the start of the first place to the end of the last."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    name, pipes, processes = str(next(_numbers)), [], []
    try:
        for place in range(job.graph.places):
            here, there = context.Pipe(duplex=False)
            processes.append(context.Process(target=_work, args=(place, store.port, name, job, there), daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        spans = [_told(pipe, place) for place, pipe in enumerate(pipes)]
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    return [max(end for _, end in step) - min(begin for begin, _ in step) for step in zip(*spans, strict=True)]


def _told(pipe: Connection, place: int) -> list[tuple[float, float]]:
    """Return the start and end times of each step of a place."""
    try:
        if pipe.poll(_START):
            return pipe.recv()
    except EOFError:
        pass
    raise RuntimeError(f"place {place} has failed, or takes longer than {_START:.0f} s")


# ---------------------------------------------------------------------------------------------------- one process


def _work(place: int, port: int, name: str, job: Job, pipe: Connection) -> None:
    """Run as one place."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=place, world_size=job.graph.places)
    post = P2PChannel(dist.new_group(backend="gloo"), torch.device("cpu"))
    device = Device()
    stages = {stage: VirtualStage(job.graph, stage, job.layers[stage], device) for stage in job.graph.at(place)}
    schedule = make_schedule(job.graph, job.microbatches, job.policy)
    runtime = Runtime(schedule, place, stages, _edges(job.graph, place, post), post)
    inputs = [{"value": torch.zeros(8)} for _ in range(job.microbatches)]
    spans = []
    for step in range(1 + job.steps):
        device.sleeps = step > 0  # the first step learns the messages between stages
        dist.barrier()
        begin = time.perf_counter()  # the same clock in all processes
        runtime.train(inputs, lambda m, output: output.sum())
        spans.append((begin, time.perf_counter()))
    pipe.send(spans[1:])
    dist.barrier()
    post.close()
    dist.destroy_process_group()


def _edges(graph: StageGraph, place: int, post: P2PChannel) -> dict[tuple[int, int], StageEdge]:
    """Return the edges between local and remote stages; each place is one process."""
    found = {}
    for number, (source, target) in enumerate(graph.edges):
        a, b = graph.nodes[source].place, graph.nodes[target].place
        if a != b and place in (a, b):
            route = Route.between(np.array([[a]]), np.array([[b]]), is_same_module=True)
            found[source, target] = StageEdge(place, route, post, number, str(graph.nodes[source]))
    return found


def _passes(graph: StageGraph, stage: int, layers: Sequence[Cost]) -> tuple[list[float], list[float]]:
    """Return the costs of a stage's layers, forward and backward, in execution order."""
    trains = graph.nodes[stage].trains
    backward = [inputs + (weights if trains else 0.0) for _, inputs, weights in reversed(layers)]
    return [forward for forward, _, _ in layers], backward


_WATCHED, _WATCHED_SHARE = 4e-3, 0.02  # seconds of a sleep that poll the clock, and their largest fraction of it


class Device:
    """The device that the stages of a place run on, one after the other."""

    def __init__(self) -> None:
        self.sleeps = True
        self._late = 0.0
        """Delay of the last sleep, in seconds."""
        self._woke = 0.0

    def compute(self, costs: Sequence[float]) -> None:
        """Sleep layer by layer.

        Without the last sleep's delay, this would have started earlier by that much, minus the time since then: in that
        time the device may have waited for others.
        """
        begin = time.perf_counter()
        end = begin - max(0.0, self._late - (begin - self._woke))
        for cost in costs if self.sleeps else ():
            end += cost
            _sleep_until(end, watched=min(_WATCHED, _WATCHED_SHARE * cost))
        self._woke = time.perf_counter()
        self._late = self._woke - end if self.sleeps else 0.0


def _sleep_until(end: float, watched: float) -> None:
    """Sleep, and poll the clock at the end: systems wake a process some milliseconds late."""
    time.sleep(max(0.0, end - watched - time.perf_counter()))
    while time.perf_counter() < end:
        pass


class VirtualStage(nn.Module):
    """Sleeps for the cost of its layers, forward and backward."""

    def __init__(self, graph: StageGraph, stage: int, layers: Sequence[Cost], device: Device) -> None:
        super().__init__()
        self.forward_costs, self.backward_costs = _passes(graph, stage, layers)
        self.weight = nn.Parameter(torch.zeros(()), requires_grad=graph.nodes[stage].trains)
        self.device = device

    def forward(self, inputs: Mapping[str, Tensor], received: Mapping[int, Any]) -> Any:
        """Sum the received tensors."""
        value = sum(received.values()) if received else inputs["value"]
        return _Compute.apply(value, self.weight, self)  # type: ignore[no-untyped-call]


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, stage: VirtualStage) -> Tensor:
        ctx.stage = stage
        stage.device.compute(stage.forward_costs)
        return value + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.stage.device.compute(ctx.stage.backward_costs)
        wants_value, wants_weight, _ = ctx.needs_input_grad
        return gradients[0] if wants_value else None, gradients[0].sum() if wants_weight else None, None
