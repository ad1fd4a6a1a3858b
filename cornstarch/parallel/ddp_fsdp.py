"""Data parallelism: DDP, FSDP 1 and 2, ZeRO 1 to 3 and HSDP behind one entry, and the units of FSDP."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from cornstarch.compat import buffer_options, reshard_flat_units
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.parallel.expert import find_expert_modules, get_expert_shards
from cornstarch.parallel.flat_shards import find_shard
from cornstarch.parallel.low_bandwidth.gradient_hooks import CompressedHSDPShards, attach_compression, get_gradient_sync
from cornstarch.plan.cluster_file import format_quantity
from cornstarch.plan.communication import Link, Timing, fit_link
from cornstarch.plan.data_options import keeps_gathered
from cornstarch.plan.low_bandwidth_cost import choose_bucket_bytes
from cornstarch.plan.plan import DataPlan

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


def apply_data_parallel(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    """Wrap a model for data parallelism, and return the module to call instead of it.

    Create the optimizer afterwards, from the model's parameters; with zero1 from the shards of a
    `cornstarch.parallel.Zero1`, which also reduces gradients. All ranks must come with the same weights: only DDP
    broadcasts those of the first rank. Gradients are averaged over ranks: a rank that has some of a replica's tokens
    passes the sum over its tokens, divided by the tokens of all ranks, times the number of ranks.

    With the kinds local_sgd, diloco, async and gossip the backward pass synchronizes nothing. Let the loop call what
    `cornstarch.parallel.low_bandwidth.build_replica_sync` returns.
    """
    match plan.kind:
        case "local_sgd" | "diloco" | "async" | "gossip":
            for parameter in model.parameters():
                if parameter.requires_grad:  # frozen parameters are never exchanged at all
                    dist.broadcast(parameter.detach(), group=mesh.get_group(), group_src=0)
            return model
        case "ddp" if mesh.ndim == 2:
            # With tensor parallelism, parameters are DTensors, which DDP does not know: FSDP 2 in shards of one rank.
            return _apply_fsdp2(model, mesh, plan)
        case "zero1" if plan.compression.kind == "none":
            return _apply_zero1(model, mesh, plan)
        case "ddp" | "zero1":
            # Compressed gradients are averaged in whole buckets; zero1 takes its shards of them.
            return attach_compression(_apply_ddp(model, mesh, plan), mesh, plan.compression)
        case "hsdp" if plan.compression.kind != "none":
            # Sharded within a replica only: given both axes, FSDP 2 would reduce over replicas, too, uncompressed.
            return attach_compression(_apply_fsdp2(model, mesh["shard"], plan), mesh, plan.compression)
        case "fsdp1":
            return _apply_fsdp1(model, mesh, plan)
        case _:
            return _apply_fsdp2(model, mesh, plan)


def check_data_plan(model: nn.Module, plan: DataPlan) -> None:
    """Raise `ConfigError` for combinations of a model and a plan that do not work."""
    if plan.kind != "fsdp1":
        return
    kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    if len(kinds) > 1:
        raise ConfigError(
            f"parallel.data.kind = fsdp1\n  It flattens parameters together, which must have one type; the model "
            f"has {' and '.join(kinds)}. Give all parts the same `dtype`, or use fsdp2."
        )
    if adapted := [name for name, module in model.named_modules() if hasattr(module, "parameter_name")]:
        raise ConfigError(
            f"parallel.data.kind = fsdp1\n  {adapted[0]} has an adapter on a single parameter (PEFT's "
            "target_parameters, as for experts), whose weight FSDP 1 would change while it is in use. Use fsdp2."
        )


def _apply_ddp(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    measured = _measure_bucket(model, mesh, plan)
    megabytes = plan.bucket_mb if measured is None else measured.megabytes
    options: dict[str, Any] = {} if megabytes is None else {"bucket_cap_mb": megabytes}
    wrapped = _DDP(
        model,
        device_ids=[torch.cuda.current_device()] if mesh.device_type == "cuda" else None,
        process_group=mesh.get_group(),
        static_graph=plan.static_graph,
        gradient_as_bucket_view=plan.gradient_as_bucket_view,
        find_unused_parameters=plan.find_unused and not plan.static_graph,
        **buffer_options(bool(_find_saved_buffers(model))),
        **options,
    )
    if measured is not None:
        _MEASURED[wrapped] = measured
    return wrapped


def _apply_zero1(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    """Let a model send its saved buffers round before every forward pass, as DDP does; `Zero1` does the rest."""
    group, buffers = mesh.get_group(), _find_saved_buffers(model)
    if (measured := _measure_bucket(model, mesh, plan)) is not None:
        _MEASURED[model] = measured

    def send_buffers(*_: Any) -> None:
        for buffer in buffers:
            dist.broadcast(buffer, group=group, group_src=0)

    if buffers:
        model.register_forward_pre_hook(send_buffers)
    return model


def _find_saved_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that are saved with a model, such as running statistics: replicas have one value of them.

    The others, such as the tables of rotary embeddings, can be computed at any time and do not change.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in parameters]


class _DDP(DistributedDataParallel):
    """DistributedDataParallel with a readable error for `find_unused: false` where a step left parameters unused."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            # torch names parameters by their indices among those that are trained.
            names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            counted = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            unused = [names[int(number)] for number in counted[1].split()] if counted else ["some parameter"]
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise ConfigError(
                "parallel.data.find_unused = false\n"
                f"  The last step left {', '.join(unused[:3])}{more} without a gradient, and ranks wait for it.\n"
                "  Leave it out, or freeze what the loss does not depend on."
            ) from None


@dataclass(frozen=True)
class MeasuredBucket:
    """A size of DDP's buckets, and the measured link that it was chosen for."""

    size: int  # bytes
    link: Link  # as an all-reduce sees it

    @property
    def megabytes(self) -> float:
        return self.size / 2**20

    @property
    def line(self) -> str:
        rate = format_quantity(float(f"{self.link.bandwidth:.3g}"), "B/s")
        wait = format_quantity(float(f"{self.link.latency:.3g}"), "s")
        return f"buckets of {self.megabytes:.3g} MiB for a link of {rate} and {wait} a message, measured"


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure the link between the ranks of a group by all-reduces; all ranks get the same result."""
    timings = []
    for size in (2**10, 2**19, 2**21):  # bytes; all of them together take a second at 100 Mbit/s
        value = torch.zeros(size // 4, device=device)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            dist.all_reduce(value, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        # The first one sets up connections. Of the others the quickest counts, on the slowest rank: ranks must agree.
        slowest = torch.tensor([min(seconds[1:])], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        timings.append(Timing("all_reduce", size, dist.get_world_size(group), float(slowest)))
    return fit_link(timings)


_MEASURED: WeakKeyDictionary[nn.Module, MeasuredBucket] = WeakKeyDictionary()


def get_measured_bucket(wrapped: nn.Module) -> MeasuredBucket | None:
    """Return the buckets of a wrapped model, if they were measured (`bucket_mb: auto`)."""
    return _MEASURED.get(wrapped)


def _measure_bucket(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> MeasuredBucket | None:
    if plan.bucket_mb != "auto":
        return None
    size = sum(to_local_tensor(one.detach()).nbytes for one in model.parameters() if one.requires_grad)
    link = measure_link(mesh.get_group(), torch.device(mesh.device_type))
    return MeasuredBucket(choose_bucket_bytes(link, mesh.size(), size), link)


def _apply_fsdp2(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    keeps = keeps_gathered(plan.kind, plan.reshard_after_forward, is_pipeline=False)
    reshard = not keeps if plan.reshard_after_forward is None else plan.reshard_after_forward
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=_DTYPES[plan.param_dtype], reduce_dtype=_DTYPES[plan.reduce_dtype], cast_forward_inputs=False
    )
    # CPU memory is pinned so that a GPU can read it; on a CPU-only run there is nothing to pin for.
    offload = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if plan.offload else fsdp.OffloadPolicy()
    for experts in find_expert_modules(model):  # before the layers around them: other ranks have the same ones
        _apply_fsdp2_to_experts(experts, bool(reshard), policy)
    # Units before the root: `fully_shard` gives a module the parameters that no module inside has taken.
    units = [unit for unit in find_fsdp_units(model, plan) if get_expert_shards(unit) is None]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    # The root is in use from the first layer to the last: freeing it after forward would only cost time.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    if ahead := plan.prefetch:
        ordered: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
        for index, one in enumerate(ordered):
            one.set_modules_to_forward_prefetch(ordered[index + 1 : index + 1 + ahead])
            one.set_modules_to_backward_prefetch(ordered[max(index - ahead, 0) : index][::-1])
    return model


def _apply_fsdp2_to_experts(module: nn.Module, reshard: bool, policy: fsdp.MixedPrecisionPolicy) -> None:
    shards = get_expert_shards(module)
    assert shards is not None
    mesh = shards.data
    widths = [to_local_tensor(one.detach()).shape[1] for one in module.parameters(recurse=False)]
    divides = all(width % mesh.size(-1) == 0 for width in widths)

    def choose_dim(parameter: nn.Parameter) -> Shard | None:
        # Whole experts, where every rank gets equally many; else some of the channels of each.
        return Shard(1) if shards.local % mesh.size(-1) and divides else None

    fully_shard(
        module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, shard_placement_fn=choose_dim
    )  # fmt: skip


def _apply_fsdp1(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    if plan.offload and mesh.device_type == "cpu":
        raise ConfigError(
            "parallel.data.offload = true\n  fsdp1 keeps shards in memory that is pinned for a GPU, and this run is on "
            "the CPU, where they are already. Leave it out, or use fsdp2."
        )
    units = {id(unit) for unit in [*find_fsdp_units(model, plan), *find_frozen_modules(model)]}
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    dtypes: dict[str, Any] = {name: _DTYPES[getattr(plan, name)] for name in names}
    precision = fsdp.MixedPrecision(**dtypes, cast_forward_inputs=False) if any(dtypes.values()) else None
    keep = plan.reshard_after_forward is False
    return FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP if keep else fsdp.ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        mixed_precision=precision,
        cpu_offload=fsdp.CPUOffload(offload_params=True) if plan.offload else None,
        device_id=torch.cuda.current_device() if mesh.device_type == "cuda" else torch.device("cpu"),
        use_orig_params=True,  # parameters keep their names, and optimizer groups work as without FSDP
    )


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP has gathered: without a backward pass it leaves the root unit gathered."""
    reshard_flat_units(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def defer_gradient_sync(wrapped: nn.Module | None, is_deferred: bool) -> AbstractContextManager[None]:
    """Run a block whose gradients need not reach other ranks yet, because more microbatches of the step follow.

    Only replicated models save time by it. Sharded ones would have to keep all gradients unsharded; theirs are reduced
    at once and add up to the same.
    """
    # torch must synchronize the first backward pass of a static graph, and does not tell which one is the first.
    if is_deferred and isinstance(wrapped, DistributedDataParallel) and not wrapped.static_graph:
        return wrapped.no_sync()
    if is_deferred and isinstance(sync := get_gradient_sync(wrapped), CompressedHSDPShards):
        return sync.defer()
    return nullcontext()


@contextmanager
def use_full_model(wrapped: Any) -> Iterator[None]:
    """Run a block in which all ranks may call the model itself, equally often, for example to generate."""
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            yield
    elif isinstance(wrapped, FSDPModule):
        # Layers gather themselves. The root gathers when the wrapper is called, which does not happen here.
        wrapped.unshard()
        try:
            yield
        finally:
            wrapped.reshard()
    else:
        yield


def drop_idle_gradients(model: nn.Module, items: Mapping[str, float]) -> None:
    """Set gradients to None where a single process would have none: no momentum or weight decay must apply to them.

    These are of encoders without an item on any rank (`items` counts them), and of parameters that no loss depends on.
    """
    if isinstance(model, MultimodalModel):
        idle = [model.encoders[name].parameters() for name, count in items.items() if not count]
        for parameter in chain(*idle, model.zero_gradient_parameters):
            parameter.grad = None
            if (shard := find_shard(parameter)) is not None:
                shard.stepped.grad = None


# Names in the documentation of earlier releases.
gradients_kept_here, whole_model = defer_gradient_sync, use_full_model


def wrapping_units(model: nn.Module, classes: Sequence[str] | None = None, least: int = 0) -> list[nn.Module]:
    """Return the modules that become FSDP units; all other parameters belong to the root unit, the model itself.

    By default these are the layers of the outermost lists of layers. Embeddings, norms and heads stay with the model:
    a language model's embeddings are looked up before it is called, and tied weights must be in one unit.

    Args:
        model: The model.
        classes: Names of the classes whose modules are units, instead of the default.
        least: The minimum number of parameters of a unit.
    """
    own = iter(model) if isinstance(model, nn.Sequential) else _find_layers(model)
    found = _find_by_class(model, classes) if classes is not None else own
    shared = {number for number, uses in _count_parameter_uses(model).items() if uses > 1}
    alone = (unit for unit in found if not shared & {id(parameter) for parameter in unit.parameters()})
    return [unit for unit in alone if sum(parameter.numel() for parameter in unit.parameters()) >= max(least, 1)]


def find_fsdp_units(model: nn.Module, plan: DataPlan) -> list[nn.Module]:
    if plan.wrap == "none":
        return []
    return wrapping_units(model, None if plan.wrap == "auto" else list(plan.wrap), plan.wrap_min_parameters or 0)


def _find_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList | nn.Sequential):
            yield from _find_layers(child)
            continue
        for layer in child:
            if isinstance(layer, nn.ModuleList | nn.ModuleDict):  # never called itself, so no hook would run
                yield from _find_layers(layer)
            elif isinstance(child, nn.ModuleList) or any(True for _ in layer.children()):
                yield layer  # a single linear layer of a Sequential is too small: a projector consists of two


def _find_by_class(model: nn.Module, classes: Sequence[str]) -> Iterator[nn.Module]:
    there = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in classes if name not in there]:
        listed = ", ".join(sorted(there))
        raise ConfigError(f"wrap names {', '.join(missing)}, which the model does not have. It has: {listed}.")

    def find_inside(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child).__name__ in classes:
                yield child
            else:
                yield from find_inside(child)

    return find_inside(model)


def find_frozen_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are entirely frozen: FSDP 1 would create zero gradients for them.

    Left out are those whose parameters are used without a call of theirs, which is when FSDP 1 gathers a unit: tied
    ones, and those around the embedding table of a language model, which a multimodal model looks up first.
    """
    table = model.language_model.get_input_embeddings() if isinstance(model, MultimodalModel) else None  # type: ignore[operator]
    uses = _count_parameter_uses(model)

    def find_inside(module: nn.Module) -> Iterator[nn.Module]:
        # torch's own attention computes with the weights of its output projection without calling it.
        for child in () if isinstance(module, nn.MultiheadAttention) else module.children():
            parameters = list(child.parameters())
            is_shared = any(count < uses[number] for number, count in _count_parameter_uses(child).items())
            is_around_table = child is not table and any(inner is table for inner in child.modules())
            if any(parameter.requires_grad for parameter in parameters) or is_shared or is_around_table:
                yield from find_inside(child)
            elif parameters and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield child

    return find_inside(model)


def _count_parameter_uses(module: nn.Module) -> Counter[int]:
    """Return under how many names a module has each parameter, by id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
