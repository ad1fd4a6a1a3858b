"""What processes do with layers that are compiled around experts elsewhere: train, count graphs, compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cornstarch.kernels.compile import checkpoint_layer, compile_layers
from cornstarch.kernels.compile_log import CompileLog
from cornstarch.parallel import wrapping_units
from cornstarch.parallel.ddp_fsdp import apply_data_parallel
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.expert import shard_experts
from cornstarch.plan.plan import DataPlan
from tests import zoo
from tests.versions import compile_counts

LENGTHS, LAYERS = (12, 17, 23), 4


def compare(family: str, kind: str, ep: int, recompute: bool, backend: str) -> dict[str, Any]:
    """Train compiled and uncompiled, and return how far gradients and losses are apart, and what was compiled."""
    torch.compiler.reset()
    plain, _ = train(family, kind, ep, recompute, None)
    compiled, found = train(family, kind, ep, recompute, backend)
    off = max(float((one - other).abs().max()) for one, other in zip(plain, compiled, strict=True))
    return {"off": off, **found}


def train(
    family: str, kind: str, ep: int, recompute: bool, backend: str | None
) -> tuple[list[Tensor], dict[str, Any]]:
    """Train a step with rows of each length; return all losses and local gradients, and the graphs."""
    model: Any = zoo.LANGUAGE_MODELS[family].build(num_hidden_layers=LAYERS).train()
    ranks, layers, log = dist.get_world_size(), wrapping_units(model), CompileLog()
    for layer in layers if recompute else ():
        checkpoint_layer(layer)
    mesh = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("dp", "ep"))
    shard_experts(model, mesh["ep"], mesh["dp"])
    sizes = {"replicate": ranks, "shard": 1} if kind == "ddp" else {"dp": ranks}
    data = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    wrapped = apply_data_parallel(model, data, DataPlan(kind))  # type: ignore[arg-type]
    if backend is not None:
        compile_layers(layers, log=log, backend=backend)
    before, optimizer = compile_counts(), torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Tensor] = []
    for length in LENGTHS:
        ids = torch.randint(zoo.EOS + 1, zoo.VOCABULARY, (2, length), generator=zoo.generator(length + dist.get_rank()))
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append(loss.detach())
        found += [to_local_tensor(one.grad).clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    after = compile_counts()
    counts = {name: after[name] - before[name] for name in ("graphs", "breaks")}
    return found, {**counts, "layers": len(layers), "variants": max(log.variants().values(), default=0)}
