"""Measure the overhead of tensor parallelism against torch's `parallelize_module` and transformers' own plan.

    python benchmarks/tp_overhead.py [--json results.json]

Two processes on this machine (gloo, one thread each) train a Llama. All contenders take turns in the same processes,
step by step, and the median step time counts; CPU seconds are given beside it, because on a busy machine processes wait
for a core. `cornstarch, compiled` compiles each layer with its collectives. The bytes sent are counted and compared
with the formula. The benchmark first checks that all contenders have the same loss and the same gradient of the
embedding table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.kernels.compile import compile_layers
from cornstarch.parallel.tensor import shard_tensors

RANKS, STEPS, WARM = 2, 15, 3
BATCH, TOKENS, HIDDEN, LAYERS = 2, 128, 256, 4


def build() -> Any:
    """Return the model, always with the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": 1024}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **sizes))  # type: ignore[arg-type]


def ours(mesh: DeviceMesh) -> nn.Module:
    """Shard with this package."""
    return shard_tensors(build(), mesh)


def compiled(mesh: DeviceMesh) -> nn.Module:
    """Shard with this package, and compile the layers, as a run does on GPUs."""
    model: Any = shard_tensors(build(), mesh)
    assert compile_layers(model.model.layers) == LAYERS
    return model


def by_hand(mesh: DeviceMesh) -> nn.Module:
    """Shard with torch, by hand."""
    model = build()
    plan: dict[str, Any] = {}
    for number in range(LAYERS):
        prefix = f"model.layers.{number}."
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan |= {prefix + key: ColwiseParallel() for key in columns}
        plan |= {prefix + key: RowwiseParallel() for key in ("self_attn.o_proj", "mlp.down_proj")}
    return parallelize_module(model, mesh, plan)


def by_transformers(mesh: DeviceMesh) -> nn.Module:
    """Shard with transformers, by the model's own plan."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = build()
    plan = {name: style for name, style in model.tp_plan.items() if ".layers." in name}
    apply_tensor_parallelism(model, mesh, plan)
    return model


WAYS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "cornstarch": ours,
    "cornstarch, compiled": compiled,
    "parallelize_module": by_hand,
    "transformers": by_transformers,
}


def step(model: nn.Module, ids: torch.Tensor) -> tuple[float, float]:
    """Train one step and return its seconds, and those that this process computed."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    taken = time.perf_counter() - start, time.process_time() - busy
    model.zero_grad()
    return taken


def check_equal(models: dict[str, nn.Module], ids: torch.Tensor) -> None:
    """Raise unless all contenders have the same loss and the same gradient behind all layers."""
    found = {}
    for name, model in models.items():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        first: Any = model.get_submodule("model.embed_tokens").weight.grad  # unsharded in every contender
        found[name] = float(loss), first.full_tensor() if hasattr(first, "full_tensor") else first.clone()
        model.zero_grad()
    expected = found["cornstarch"]
    for loss, gradient in found.values():
        torch.testing.assert_close((loss, gradient), expected, rtol=1e-4, atol=1e-6)


def exchanged(model: nn.Module, ids: torch.Tensor) -> int:
    """Return the bytes that a step all-reduces."""
    sent = 0
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return original(tensor, *arguments, **options)

    with mock.patch.object(dist, "all_reduce", counted):
        step(model, ids)
    return sent


def formula() -> int:
    """Return the expected all-reduced bytes: two regions per layer, forward and backward."""
    return 2 * 2 * LAYERS * BATCH * TOKENS * HIDDEN * 4


def work(rank: int, port: int, queue: Any) -> None:
    """Measure in one process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    models = {name: make(mesh) for name, make in WAYS.items()}
    ids = torch.randint(0, 1024, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    check_equal(models, ids)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(WARM + STEPS):
        for name, model in models.items():
            taken = step(model, ids)
            if number >= WARM:
                times[name].append(taken)
    sent = exchanged(models["cornstarch"], ids)
    if rank == 0:
        medians = {name: [statistics.median(one) for one in zip(*found, strict=True)] for name, found in times.items()}
        queue.put({"median": medians, "bytes": sent})
    dist.destroy_process_group()


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    processes = [context.Process(target=work, args=(rank, port, queue)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    result = queue.get(timeout=600)
    for process in processes:
        process.join()
    base = result["median"]["cornstarch"]
    print(f"{'way':20} {'ms/step':>8} {'CPU ms':>8}  cornstarch to it, in time and in CPU time")
    for name, (seconds, busy) in result["median"].items():
        ratios = f"{base[0] / seconds:.2f}x {base[1] / busy:.2f}x"
        print(f"{name:20} {1000 * seconds:8.1f} {1000 * busy:8.1f}  {ratios}")
    print(f"bytes all-reduced: {result['bytes']} of {formula()} by the formula")
    if options.json:
        options.json.write_text(json.dumps({**result, "formula": formula()}, indent=1))


if __name__ == "__main__":
    main()
