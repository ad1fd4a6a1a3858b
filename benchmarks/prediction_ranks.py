"""Predict and run steps of several processes: two real ones with DDP, and pipelines of up to 24 virtual devices."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from prediction_steps import GIVEN_BACK, LLAMA, QWEN, SMALL, TINY, Case, Steps, batch_of, build, this_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from virtual_devices import Job, run

from cornstarch.engine.recompute import copy_to_meta
from cornstarch.parallel.ddp_fsdp import apply_data_parallel
from cornstarch.parallel.device import DevicePlacement
from cornstarch.plan import DataPlan, ModulePlan, Plan
from cornstarch.plan.candidates import Candidate
from cornstarch.plan.cluster import Cluster, Device, Link, device
from cornstarch.plan.communication import LINKS, Timing, fit_links
from cornstarch.plan.cost import RunCost
from cornstarch.plan.predict import predict
from cornstarch.planner import MicrobatchShape, model_cost, profile_model

SIZES = (2**16, 2**20, 2**24)  # bytes that the two processes all-reduce to measure their link
TURNS, STEPS = 3, 4  # rounds of measuring layers and running steps: a CPU's speed changes from minute to minute
ON_TWO = (Case(SMALL, 4, 256, images=1), Case(TINY, 4, 128, images=1), Case(TINY, 2, 256, images=2))
PLACES = ((1, 3), (2, 6), (4, 12), (4, 20))
"""Stages of the encoder, and of the language model."""
SECONDS = 3.0  # approximate step time on virtual devices


# ---------------------------------------------------------------------------------------------------- two processes


def on_two_ranks() -> Iterator[dict[str, Any]]:
    """Yield the results of two processes that train together, each on half of a batch."""
    for case in ON_TWO:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        port = free_port()
        workers = [context.Process(target=_work, args=(rank, port, case, there)) for rank in range(2)]
        with patch.dict(os.environ, GIVEN_BACK):
            for worker in workers:
                worker.start()
        there.close()
        try:
            yield here.recv()
        except EOFError:
            yield {"case": f"2 processes: {case.name}", "error": "a process failed; see above"}
        for worker in workers:
            worker.join()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _work(rank: int, port: int, case: Case, results: Connection) -> None:
    """Run as one of two processes."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    where = torch.device("cpu")
    model = build(case, where)
    batch = batch_of(case, model, where)
    placement = DevicePlacement(where, "fp32")
    microbatch = MicrobatchShape(case.rows, case.tokens, {"vision": case.rows * case.images}, batch["trained"])
    bare = copy_to_meta(model)
    steps = Steps(case, model, batch, placement)
    wrapped = apply_data_parallel(model, init_device_mesh("cpu", (2,)), DataPlan("ddp"))
    times = _timed(steps, wrapped)
    turns: list[dict[str, tuple[float, int]]] = []
    for _ in range(TURNS):
        # Both measure at the same time, so that they share the machine as in a training step.
        profiled = profile_model(bare, microbatch, placement, batch=2 * case.rows)
        link = fit_links([Timing("all_reduce", size, 2, _summed(size)) for size in SIZES])
        machine = this_device(where)
        analytic = model_cost(bare, microbatch, machine, "fp32", batch=2 * case.rows)
        costs = {"measured": profiled, "analytic": analytic}
        turns.append({way: _predicted(case, cost, machine, link) for way, cost in costs.items()})
        times += _timed(steps, wrapped)
    if rank == 0:
        found = {way: median(turn[way] for turn in turns) for way in turns[0]}
        results.send({"case": f"2 processes: {case.name} each", "seconds": median(times), **found})
    dist.barrier()
    dist.destroy_process_group()


def _timed(steps: Steps, wrapped: nn.Module) -> list[float]:
    """Return the seconds of some steps of both processes, after one warm-up step."""
    times = []
    for _ in range(1 + STEPS):
        dist.barrier()
        begin = time.perf_counter()
        steps(wrapped)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return times[1:]


def _summed(size: int) -> float:
    """Return the seconds of an all-reduce of this number of bytes between two processes."""
    value, best = torch.zeros(size // 4), float("inf")
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(value)
        best = min(best, time.perf_counter() - begin)
    return best


def _predicted(case: Case, cost: RunCost, machine: Device, link: Link) -> tuple[float, int]:
    modules = {"vision": ModulePlan(), "language_model": ModulePlan(activation_checkpointing=case.checkpointing)}
    cluster = Cluster(1, 2, machine, link, LINKS["loopback"])
    plan = Plan(modules, DataPlan("ddp"), ranks="shared")
    found = predict(Candidate.of(plan, dp=2, microbatches=1), cost, cluster)
    return found.step, found.peak


# ---------------------------------------------------------------------------------------------------- virtual devices


def on_virtual_devices() -> Iterator[dict[str, Any]]:
    """Yield the results of pipelines on virtual devices; layer costs are those of an H100, slowed down."""
    machine = device("H100")
    idle = Device("idle", machine.memory, flops=1e15)  # only the layers take time
    cluster = Cluster(4, 8, idle, Link(1e15, 0.0), Link(1e15, 0.0))
    for name in (QWEN, LLAMA):
        case = Case(name, 1, 4096)
        model = copy_to_meta(build(case, torch.device("meta")))
        cost = model_cost(model, MicrobatchShape(1, 4096, {"vision": 2}), machine, "bf16", batch=16)
        for vision, language in PLACES:
            modules = {"vision": ModulePlan(stages=vision), "language_model": ModulePlan(stages=language)}
            choice = Candidate.of(Plan(modules, ranks="own"), dp=1, microbatches=16)
            slow = _slower(cost, SECONDS / predict(choice, cost, cluster).step)
            found = predict(choice, slow, cluster)
            graph = found.timeline.schedule.graph
            layers = tuple(((node.forward, node.backward_input, node.backward_weight),) for node in graph.nodes)
            done = run(Job(graph, layers, 16, choice.schedule, 2))
            words = f"{vision + language} virtual devices: {name}, {vision} + {language} stages, 16 microbatches"
            yield {"case": words, "seconds": min(done), "measured": (found.step, 0)}


def _slower(cost: RunCost, factor: float) -> RunCost:
    modules = []
    for module in cost.modules:
        layers = tuple(
            replace(
                one,
                forward=one.forward * factor,
                input_gradient=one.input_gradient * factor,
                weight_gradient=one.weight_gradient * factor,
                again=None,
            )
            for one in module.layers
        )
        modules.append(replace(module, layers=layers))
    return replace(cost, modules=tuple(modules))
