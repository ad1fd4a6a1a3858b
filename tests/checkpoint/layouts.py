"""A small model under each way to spread it over processes, and what workers do with its checkpoints.

Gradients are numbers that depend on the parameter's name and the step alone, so that every layout takes the same steps
as one process, to the bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cornstarch.checkpoint import CheckpointStore, Sharded, state_hash
from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.named_state import local_parameters, named_parameters
from cornstarch.checkpoint.shards import Tensorlike, local_shards
from cornstarch.checkpoint.state import capture, restore, restore_weights
from cornstarch.errors import ConfigError
from cornstarch.parallel import Zero1
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.flat_shards import find_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.narrow = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.norm(self.wide(x)).relu())


class Small(nn.Module):
    """Frozen, trained and tied parameters whose sizes fit no number of processes, a 3-dim one, and a buffer."""

    def __init__(self, seed: int = 0, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, width)
        self.frozen = nn.Linear(width, 64).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.filter = nn.Conv1d(width, 3, 3)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.embedding(x))[..., : self.embedding.embedding_dim]
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum() + self.filter(x.transpose(1, 2)).sum()


Build = tuple[nn.Module, torch.optim.Optimizer]


def two_groups(model: nn.Module, stepped: Mapping[str, nn.Parameter] | None = None) -> torch.optim.Optimizer:
    trained = _train(model) if stepped is None else list(stepped.items())
    kinds = [
        {"params": [p for n, p in trained if "bias" not in n], "lr": 0.1, "weight_decay": 0.1},
        {"params": [p for n, p in trained if "bias" in n], "lr": 0.02, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([kind for kind in kinds if kind["params"]])


def _train(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in named_parameters(model).items() if p.requires_grad]


def plain(model: nn.Module) -> Build:
    return model, two_groups(model)


def ddp(model: nn.Module) -> Build:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, two_groups(wrapped)


def _fully_shard(model: nn.Module, mesh: Any) -> Build:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, two_groups(model)


def fsdp2(model: nn.Module) -> Build:
    return _fully_shard(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))


def hsdp(model: nn.Module) -> Build:
    shape = (2, dist.get_world_size() // 2)
    return _fully_shard(model, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def fsdp1(model: nn.Module, **options: Any) -> Build:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **options,
    )
    return wrapped, two_groups(wrapped)


def fsdp1_hybrid(model: nn.Module) -> Build:
    from torch.distributed.fsdp import ShardingStrategy

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fsdp1(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def zero1(model: nn.Module) -> Build:
    """Flat shards: an optimizer has only some parameters, or an interval of one, and perhaps only one of the groups."""
    return _divide_states(model, None)


def zero1_tp(model: nn.Module) -> Build:
    """Flat shards of what tensor parallelism has cut along rows and columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    return _divide_states(model, mesh["dp"].get_group())


def _divide_states(model: nn.Module, group: Any) -> Build:
    zero1 = Zero1(dict(_train(model)), group, bucket_bytes=400)
    optimizer = two_groups(model, zero1.shards)
    _DIVIDED[optimizer] = zero1
    return model, optimizer


_DIVIDED: WeakKeyDictionary[torch.optim.Optimizer, Zero1] = WeakKeyDictionary()


def zero1_torch(model: nn.Module) -> Build:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    groups = [
        {k: v for k, v in g.items() if k in ("params", "lr", "weight_decay")} for g in two_groups(model).param_groups
    ]
    return model, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.5)


def tensor_parallel(model: nn.Module) -> Build:
    """Slices along both dims: columns and rows on one axis, and FSDP2 on the other."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"frozen": RowwiseParallel()})
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    return _fully_shard(model, mesh["dp"])


LAYOUTS: dict[str, Callable[[nn.Module], Build]] = {
    "one": plain, "ddp": ddp, "fsdp2": fsdp2, "hsdp": hsdp, "fsdp1": fsdp1, "fsdp1 hybrid": fsdp1_hybrid,
    "zero1": zero1, "zero1 tp": zero1_tp, "zero1 of torch": zero1_torch, "tp": tensor_parallel,
}  # fmt: skip


def build(layout: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """Return the model, its optimizer, and averages of its weights."""
    model, optimizer = LAYOUTS[layout](Small(seed))
    return model, optimizer, {name: p.detach().clone() for name, p in _train(model)}


# ---------------------------------------------------------------------------------------------------- steps


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """Return the gradient of a whole parameter in a step, the same for every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
    return torch.randn(shape, generator=generator)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, averages: dict[str, Tensor], first: int, last: int
) -> None:
    """Take optimizer steps `first` to `last`, each with made-up gradients."""
    local = local_parameters(model)
    live = named_parameters(model)
    for step in range(first, last + 1):
        for name, parameter in _train(model):
            whole = gradient(name, local[name].shape, step)
            parameter.grad = _like(local[name], parameter, whole)
            if (shard := find_shard(parameter)) is not None:
                flat = to_local_tensor(parameter.grad).reshape(-1)
                own = flat[shard.start : shard.start + shard.stepped.numel()]
                shard.stepped.grad = own.reshape(shard.stepped.shape)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if optimizer in _DIVIDED:
                _DIVIDED[optimizer].gather_parameters()
            for name, average in averages.items():
                average.lerp_(live[name], 0.1)
            for buffer in model.buffers():
                buffer.fill_(step)


def _like(local: Tensorlike, parameter: nn.Parameter, whole: Tensor) -> Tensor | None:
    if isinstance(local, Sharded):
        if not parameter.numel():
            return None
        flat = whole.reshape(-1)
        return flat[local.start : local.start + parameter.numel()].reshape(parameter.shape).clone()
    result = torch.zeros_like(parameter)
    for box, part in local_shards(result):
        part.copy_(whole[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))])
    return result


# ---------------------------------------------------------------------------------------------------- jobs


def save_run(folder: Path, layout: str, form: str = "sharded", **options: Any) -> dict[str, Any]:
    """Train three steps, save them, take a fourth, and save it elsewhere; return hashes of both."""
    model, optimizer, averages = build(layout)
    steps(model, optimizer, averages, 1, 3)
    store = CheckpointStore(folder, keep=2)
    store.save(3, *state(model, optimizer, averages), form=form, metric=0.5, **options)
    steps(model, optimizer, averages, 4, 4)
    store.wait()
    return {"saved": hash_of(folder), "next": hash_after(folder / "after", model, optimizer, averages)}


def loaded(folder: Path, layout: str) -> dict[str, Any]:
    """Load what was saved into a model with other weights, save it again, take a step; return hashes of both."""
    model, optimizer, averages = build(layout)
    for _, parameter in _train(model):
        with torch.no_grad():
            parameter.fill_(7)
    store = CheckpointStore(folder, keep=2)
    checkpoint = store.latest()
    assert checkpoint is not None and store.problems == []
    with checkpoint.tensors() as tensors:
        restore(tensors, checkpoint.data(), model, optimizer, ema=averages)
    drawn = torch.rand(2).tolist()
    again = hash_after(folder / "again", model, optimizer, averages, 3)
    steps(model, optimizer, averages, 4, 4)
    after = hash_after(folder / "next", model, optimizer, averages)
    return {"saved": again, "next": after, "drawn": drawn, "rates": [g["lr"] for g in optimizer.param_groups]}


def state(model: nn.Module, optimizer: torch.optim.Optimizer, averages: dict[str, Tensor]) -> tuple[Any, Any]:
    """Return what is saved."""
    tensors, data = capture(model, optimizer, ema=averages, loader_position={"epoch": 1})
    return tensors, {**data, "per_rank": {"rank": Coordinator.default().rank}}


def hash_of(folder: Path) -> str:
    """Return the hash of the newest checkpoint."""
    checkpoint = CheckpointStore(folder, keep=2).latest()
    assert checkpoint is not None
    with checkpoint.all_tensors() as tensors:
        return state_hash(tensors)


def hash_after(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, averages: dict[str, Tensor], step: int = 4
) -> str:
    CheckpointStore(folder, keep=2).save(step, *state(model, optimizer, averages))
    return hash_of(folder)


def weights_loaded(folder: Path, layout: str, averaged: bool) -> bool:
    """Load only weights, and say whether they are those of the checkpoint."""
    model, *_ = build(layout)
    checkpoint = CheckpointStore(folder, keep=1).latest()
    assert checkpoint is not None
    with checkpoint.tensors() as tensors:
        restore_weights(tensors, checkpoint.data(), model, averaged=averaged)
        kind = "ema" if averaged else "parameters"
        local = local_parameters(model)
        return all(
            torch.equal(part, tensors.read(f"{kind}/{name}", box))
            for name, _ in _train(model)
            for box, part in local_shards(local[name])
        )


def refusal(job: Callable[..., Any], *arguments: Any) -> str:
    """Return the message of the ConfigError that a job raises."""
    with suppress(AttributeError):
        try:
            result = job(*arguments)
        except ConfigError as error:
            return str(error)
    raise AssertionError(f"nothing was refused: {result}")


def train(folder: Path, layout: str, resume: bool) -> list[float]:
    """Train with real batches, looking at the model in between; stop in the middle if asked. Return the losses."""
    model, optimizer, averages = build(layout)
    losses: list[float] = []
    generator = torch.Generator().manual_seed(Coordinator.default().rank)
    for step in range(1, 5):
        batch = torch.randint(7, (2, 6), generator=generator)
        if resume and step == 3:
            CheckpointStore(folder, keep=1).save(2, *state(model, optimizer, averages))
            model, optimizer, averages = build(layout)
            checkpoint = CheckpointStore(folder, keep=1).latest()
            assert checkpoint is not None
            with checkpoint.tensors() as tensors:
                restore(tensors, checkpoint.data(), model, optimizer, ema=averages)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # FSDP leaves the outermost unit gathered
            losses += [float(loss), float(model(batch))]
    return losses


def boxes_of_torch(layout: str) -> bool:
    """Say whether torch's own planner cuts tensors where we do."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    model, *_ = build(layout)
    tensors = {name: p.detach() for name, p in named_parameters(model).items()}
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=True)
    planned = {
        (item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for item in planner.create_local_plan().items
        if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel()
    }
    ours = {(name, box.offsets, box.sizes) for name, tensor in tensors.items() for box, _ in local_shards(tensor)}
    return planned == {entry for entry in ours if 0 not in entry[2]}


def with_other_frozen_values(folder: Path, layout: str) -> dict[str, Any]:
    """Load into a model of which one frozen number is another."""
    before = Small.__init__

    def changed(self: Small, *arguments: Any) -> None:
        before(self, *arguments)
        with torch.no_grad():
            self.frozen.weight[-1, -1] += 1

    Small.__init__ = changed  # type: ignore[method-assign]
    try:
        return loaded(folder, layout)
    finally:
        Small.__init__ = before  # type: ignore[method-assign]


def save_what_is_inside(folder: Path) -> None:
    """Save the model inside FSDP1, which shows intervals where parameters were."""
    model, optimizer, _ = build("fsdp1")
    CheckpointStore(folder, keep=1).save(1, *capture(model.module, optimizer))
