"""Data parallelism: DDP, FSDP 1 and 2, ZeRO 1 to 3 and HSDP behind one entry."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cornstarch.compat import buffer_options, reshard_flat_units
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel.bucket_size import ChosenBucket, chosen_bucket
from cornstarch.parallel.carriage import Carriage
from cornstarch.parallel.exchange.attach import compressed, exchange_within
from cornstarch.parallel.exchange.hooks import CompressedCopies
from cornstarch.parallel.units import wrapping_units
from cornstarch.plan.plan import DataPlan

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}


def apply_data_parallel(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    """Return what to call instead of the model, whose parameters are now kept as the plan says.

    Make the optimizer afterwards, from the model's parameters. All processes must come with the same weights: only DDP
    hands round those of the first. Losses are averaged over processes: a process that has a
    share of the tokens gives the sum over its tokens, divided by the tokens of all, times the number of processes.

    With the kinds local_sgd, diloco, async and gossip nothing is exchanged in backward passes: let the loop call what
    `cornstarch.parallel.exchange.exchange_of` returns.
    """
    match plan.kind:
        case "local_sgd" | "diloco" | "async" | "gossip":
            return _apart(model, mesh)
        case "ddp" if mesh.ndim == 2:  # in shards of one process: what is cut over others is no matter for DDP
            return _fully_sharded_2(model, mesh, plan)
        case "ddp" | "zero1":
            return compressed(_replicated(model, mesh, plan), mesh, plan.compression)
        case "hsdp" if plan.compression.kind != "none":
            # Natively, gradients would be added up in full over copies, too.
            return compressed(_fully_sharded_2(model, mesh["shard"], plan), mesh, plan.compression)
        case "fsdp1":
            return _fully_sharded_1(model, mesh, plan)
        case _:
            return _fully_sharded_2(model, mesh, plan)


# ---------------------------------------------------------------------------------------------------- the kinds


def _replicated(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    measured = None
    if plan.bucket_mb == "auto":
        measured = chosen_bucket(model.parameters(), mesh.get_group(), torch.device(mesh.device_type))
    megabytes = plan.bucket_mb if measured is None else measured.megabytes
    options: dict[str, Any] = {} if megabytes is None else {"bucket_cap_mb": megabytes}
    wrapped = _Replicated(
        model,
        device_ids=[torch.cuda.current_device()] if mesh.device_type == "cuda" else None,
        process_group=mesh.get_group(),
        static_graph=plan.static_graph,
        gradient_as_bucket_view=plan.gradient_as_bucket_view,
        find_unused_parameters=plan.find_unused and not plan.static_graph,
        **buffer_options(_keeps_buffers(model)),
        **options,
    )
    wrapped.measured_bucket = measured
    return wrapped


def _apart(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let all processes begin with the weights of the first."""
    group = mesh.get_group()
    first = dist.get_process_group_ranks(group)[0]
    for parameter in model.parameters():
        if parameter.requires_grad:  # what is frozen is never exchanged at all
            dist.broadcast(parameter.detach(), first, group=group)
    return model


def _keeps_buffers(model: nn.Module) -> bool:
    """Whether a model has buffers that are saved with it, as running statistics are.

    DDP sends them round in every step. Tables that can be computed at any time, as those of rotary embeddings, are not
    saved, and do not change.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return not parameters.issuperset(model.state_dict())


class _Replicated(DistributedDataParallel):
    """DistributedDataParallel, with words for `find_unused: false` where a step has not used everything."""

    measured_bucket: ChosenBucket | None = None
    """With `bucket_mb: auto`, what was chosen."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        try:
            return super().forward(*inputs, **options)
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise ConfigError(
                "parallel.data.find_unused = false\n"
                f"  The last step left {self._unused(str(error))} without a gradient, and processes wait for it.\n"
                "  Leave it out, or freeze what the loss does not depend on."
            ) from None

    def _unused(self, message: str) -> str:
        """Return the names of the parameters that torch counts."""
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        counted = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        unused = [names[int(number)] for number in counted[1].split()] if counted else []
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        return ", ".join(unused[:3]) + more if unused else "some parameter"


def _fully_sharded_2(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    reshard = plan.kind not in ("ddp", "zero2") if plan.reshard_after_forward is None else plan.reshard_after_forward
    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES[plan.param_dtype], reduce_dtype=_DTYPES[plan.reduce_dtype], cast_forward_inputs=False
    )
    # Pages of a CPU are pinned for a GPU to read them; without one there is nothing to pin for.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if plan.offload else OffloadPolicy()
    units = sharded_units(model, plan)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    # The model itself is in use from the first layer to the last: freeing it in between would only cost time.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    if plan.prefetch:
        _prefetch(units, plan.prefetch)
    return model


def _prefetch(units: list[nn.Module], ahead: int) -> None:
    """Let each unit's gathering begin while units before it compute."""
    ordered: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for index, unit in enumerate(ordered):
        unit.set_modules_to_forward_prefetch(ordered[index + 1 : index + 1 + ahead])
        unit.set_modules_to_backward_prefetch(ordered[max(index - ahead, 0) : index][::-1])


def _fully_sharded_1(model: nn.Module, mesh: DeviceMesh, plan: DataPlan) -> nn.Module:
    if plan.offload and mesh.device_type == "cpu":
        raise ConfigError(
            "parallel.data.offload = true\n  fsdp1 keeps shards in memory that is pinned for a GPU, and this run is on "
            "the CPU, where they are already. Leave it out, or use fsdp2."
        )
    units = {id(unit) for unit in [*sharded_units(model, plan), *frozen_modules(model)]}
    precision = None
    if plan.param_dtype or plan.reduce_dtype or plan.buffer_dtype:
        precision = MixedPrecision(
            param_dtype=_DTYPES[plan.param_dtype],
            reduce_dtype=_DTYPES[plan.reduce_dtype],
            buffer_dtype=_DTYPES[plan.buffer_dtype],
            cast_forward_inputs=False,
        )
    keep = plan.reshard_after_forward is False
    return FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        mixed_precision=precision,
        cpu_offload=CPUOffload(offload_params=True) if plan.offload else None,
        device_id=torch.cuda.current_device() if mesh.device_type == "cuda" else torch.device("cpu"),
        use_orig_params=True,
    )


def sharded_units(model: nn.Module, plan: DataPlan) -> list[nn.Module]:
    """Return the modules that a plan gathers and frees together; what is in none belongs to the model itself."""
    if plan.wrap == "none":
        return []
    classes = None if plan.wrap == "auto" else list(plan.wrap)
    return wrapping_units(model, classes, plan.wrap_min_parameters or 0)


def frozen_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that are frozen as a whole: FSDP 1 would make zero gradients for them.

    A table of embeddings is a module of its own, because a multimodal model looks up words before it calls its language
    model. Modules that share a parameter with others, as tied embeddings do, stay with the model: FSDP 1 would take it
    away from the others. So do modules whose weights are read by the module around them, which does not call them: FSDP
    1 gathers a unit when it is called.
    """
    table = model.language_model.get_input_embeddings() if isinstance(model, MultimodalModel) else None  # type: ignore[operator]
    uses = _parameter_uses(model)

    def inside(module: nn.Module) -> Iterator[nn.Module]:
        for child in () if _reads_weights_of_children(module) else module.children():
            parameters = list(child.parameters())
            is_shared = any(count < uses[number] for number, count in _parameter_uses(child).items())
            if any(parameter.requires_grad for parameter in parameters) or is_shared or _holds(child, table):
                yield from inside(child)
            elif parameters and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield child

    return inside(model)


def _parameter_uses(module: nn.Module) -> Counter[int]:
    """Count under how many names a module has each parameter, by its id."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _reads_weights_of_children(module: nn.Module) -> bool:
    """Whether a module computes with weights of modules inside without calling them, as torch's own attention does."""
    return isinstance(module, nn.MultiheadAttention)


def _holds(module: nn.Module, other: nn.Module | None) -> bool:
    return module is not other and any(inner is other for inner in module.modules())


# ---------------------------------------------------------------------------------------------------- while training


@contextmanager
def gradients_kept_here(wrapped: nn.Module | None, kept: bool) -> Iterator[None]:
    """Run a block whose gradients need not reach the other processes yet: more portions of the step follow.

    Only replicated models save by it. Sharded ones would have to hold all gradients; theirs are reduced at once, and
    add up to the same.
    """
    # The first backward pass of a static graph must be synchronised, and which is the first is torch's secret.
    if kept and isinstance(wrapped, DistributedDataParallel) and not wrapped.static_graph:
        with wrapped.no_sync():
            yield
    elif kept and isinstance(between := exchange_within(wrapped), CompressedCopies):
        with between.kept():
            yield
    else:
        yield


@contextmanager
def whole_model(wrapped: Any) -> Iterator[None]:
    """Run a block in which the model itself may be called, and not only what wraps it: to generate, say.

    All processes must run it, and call the model equally often.
    """
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            yield
    elif isinstance(wrapped, FSDPModule):
        # Layers gather themselves; what is around them is gathered when the model is called, which it is not.
        wrapped.unshard()
        try:
            yield
        finally:
            wrapped.reshard()
    else:
        yield


def reshard(model: nn.Module) -> None:
    """Free what FSDP has gathered: without a backward pass, it leaves the outermost unit as it was used.

    Args:
        model: The model, or what wraps it.
    """
    reshard_flat_units(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def measured_bucket(wrapped: nn.Module) -> ChosenBucket | None:
    """Return the size of the buckets that was chosen for the link; None if it was not measured."""
    return wrapped.measured_bucket if isinstance(wrapped, _Replicated) else None


def forget_idle_gradients(model: nn.Module, items: Mapping[str, float]) -> None:
    """Drop gradients that one process does not have, so that neither momentum nor weight decay changes the weights.

    They are those of encoders that no process had an item for, which ran on stand-ins, and zeros that FSDP 1 makes for
    parameters that no loss reaches.

    Args:
        model: What is trained.
        items: How many all processes had, by encoder.
    """
    if isinstance(model, MultimodalModel):
        for name, count in items.items():
            if not count:
                for parameter in model.encoders[name].parameters():
                    parameter.grad = None
        for parameter in model.given_zeros:
            parameter.grad = None


def full_value(tensor: Tensor) -> Tensor:
    """Return a tensor whole, on every process."""
    if not isinstance(tensor, DTensor):
        return tensor
    if Carriage.of(tensor.device_mesh.get_group(0), tensor.device).through_cpu:
        # gloo crashes when it gathers parts that are on GPUs (pytorch/pytorch#152645).
        return cast(DTensor, tensor.cpu()).full_tensor().to(tensor.device)
    return tensor.full_tensor()


def local_value(tensor: Tensor) -> Tensor:
    """Return what of a tensor is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_data_plan(model: nn.Module, plan: DataPlan) -> None:
    """Refuse what a model and a plan cannot do together."""
    if plan.kind == "fsdp1" and any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        kinds = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
        if len(kinds) > 1:
            raise ConfigError(
                f"parallel.data.kind = fsdp1\n  It flattens parameters together, which must have one type; the model "
                f"has {' and '.join(kinds)}. Give all parts the same `dtype`, or use fsdp2."
            )
    adapted = [name for name, module in model.named_modules() if hasattr(module, "parameter_name")]
    if plan.kind == "fsdp1" and adapted:
        raise ConfigError(
            f"parallel.data.kind = fsdp1\n  {adapted[0]} has an adapter on a single parameter (PEFT's "
            "target_parameters, as for experts), whose weight FSDP 1 would change while it is in use. Use fsdp2."
        )
