"""Every private name of torch and transformers that is used, and every branch on a version, in one place.

Each entry says why it is needed. Unless it says otherwise, it is for all supported versions (torch 2.11 to 2.15,
transformers 5.17 to 5.22), which have no public way to do the same, and can go when there is one.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# The documented way to see every operation with its tags, in a module with a private name.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def is_flattened(parameter: Any) -> bool:
    """Return whether FSDP1 keeps a parameter in a flat one, cut into intervals. Goes when FSDP1 goes."""
    # A model inside the outermost `FullyShardedDataParallel` shows intervals in place of parameters.
    return bool(getattr(parameter, "_fsdp_flattened", False))


def reshard_flat_units(model: torch.nn.Module) -> None:
    """Free the parameters that FSDP1 has gathered, so that the model has its intervals only. Goes when FSDP1 goes."""
    # torch leaves the outermost unit gathered after a forward pass without a backward, and uses those values next.
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._runtime_utils import _reshard

    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None or not hasattr(handle.flat_param, "_full_param_padded"):
            continue  # it has no parameters of its own, or did not run yet
        if handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(unit, handle, True)


def content_before_sharding(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without the state and hooks of `fully_shard`, which torch cannot copy."""
    content = {name: value for name, value in module.__dict__.items() if not name.startswith("__composable_api")}
    for name, hooks in content.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            homes = {key: str(getattr(hook, "__module__", "")) for key, hook in hooks.items()}
            kept = {key: hooks[key] for key, home in homes.items() if not home.startswith("torch.distributed.fsdp")}
            content[name] = type(hooks)(kept)
    return content


def leave_out_of_ddp(kind: type[torch.nn.Module], names: Callable[[Any], list[str]]) -> None:
    """Let `DistributedDataParallel` leave out parameters of models of a class: their gradients are not averaged."""
    setattr(kind, "_ddp_params_and_buffers_to_ignore", property(names))  # noqa: B010


def multiply_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors, in place, by a number on their device, in one kernel where there is one."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))


def compute_total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors together; torch's own function rounds it to the precision of half-precision ones."""
    if not any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = [norm for group in alike.values() for norm in torch._foreach_norm(group, 2, dtype=torch.float32)]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def add_to_all(tensors: Sequence[Tensor], number: float | Tensor) -> None:
    """Add a number to tensors of one device, in place, in one kernel."""
    # A tensor by itself would be read by the CPU, which waits for it; a list of it is not.
    numbers = [number] * len(tensors) if isinstance(number, Tensor) else number
    torch._foreach_add_(list(tensors), numbers)


def move_memory(parameter: Tensor, memory: Tensor) -> None:
    """Let a parameter have other memory, with the same values; it stays the object that modules and hooks refer to."""
    # A DTensor shows its local tensor by copies of the object only.
    getattr(parameter, "_local_tensor", parameter).data = memory


def reduce_scatter_flat(own: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin to sum a flat tensor over a group into this rank's shard of it."""
    # torch 2.13 warns of the older name. Goes with torch 2.12.
    begin = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return begin(own, flat, group=group, async_op=True)


def all_gather_flat(flat: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Begin to gather the shards of a flat tensor; `own` may be this rank's part of it."""
    # torch 2.13 warns of the older name. Goes with torch 2.12.
    begin = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return begin(flat, own, group=group, async_op=True)


def buffer_options(sent: bool) -> dict[str, Any]:
    """Return the argument of `DistributedDataParallel` that says whether buffers are sent round in every step."""
    # torch 2.13 warns of the older name. Goes with torch 2.12.
    known = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": sent}


_patching = threading.RLock()
Reader = Callable[[Any, list[str], Any], Mapping[str, Any]]


@contextmanager
def patch_attributes(*replaced: tuple[Any, str, Any]) -> Iterator[None]:
    """Run a block with attributes (owner, name, value) replaced."""
    with _patching:  # one at a time: what is replaced is there once for all threads
        originals = [vars(owner)[name] for owner, name, _ in replaced]
        try:
            for owner, name, value in replaced:
                setattr(owner, name, value)
            yield
        finally:
            for (owner, name, _), original in zip(replaced, originals, strict=True):
                setattr(owner, name, original)


@contextmanager
def weights_through(reader: Reader) -> Iterator[None]:
    """Run a block in which `from_pretrained` loads the tensors that `reader` gives it, in place of all of its files'.

    The reader is called with the model on the meta device, the files, and transformers' own settings of this load
    (`weight_mapping`, `hf_quantizer`, `ignore_mismatched_sizes`). It may change the model, and returns by stored name
    whatever gives a tensor for `[...]`. transformers' `distributed_config` cuts models as transformers does only; goes
    when a function of one's own can be given there.
    """
    from transformers import PreTrainedModel

    loader: Any = PreTrainedModel
    with _patching:
        original, own = loader._load_pretrained_model, threading.get_ident()

        def load(model: Any, state_dict: Any, files: Any, settings: Any, *others: Any, **options: Any) -> Any:
            if threading.get_ident() == own:
                state_dict = reader(model, files, settings)
            return original(model, state_dict, files, settings, *others, **options)

        with patch_attributes((loader, "_load_pretrained_model", staticmethod(load))):
            yield


@dataclass(frozen=True)
class Destination:
    """What transformers makes of a stored tensor."""

    names: tuple[str, ...]
    """The parameters or buffers of the model that it goes to."""
    steps: tuple[tuple[str, int | None], ...] = ()
    """What is done on the way: the operation, and its dim, None where that does not say all. Nothing: it is renamed."""
    source: int = 0
    """Which of the kinds of tensors that are put together it is."""
    sources: int = 1
    """How many kinds there are."""


def destinations(
    base_prefix: str, names: Collection[str], stored: Iterable[str], mapping: Any
) -> dict[str, Destination]:
    """Return where transformers' loader puts each stored tensor; those that it has no place for are left out.

    `base_prefix` is the model's `base_model_prefix`, `names` are those of its parameters and buffers, `stored` those in
    the files, and `mapping` is the `weight_mapping` of this load.
    """
    from transformers import core_model_loading as loading

    entries = copy.deepcopy(list(mapping or []))  # they remember what they met
    renamings = [entry for entry in entries if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    there: Any = dict.fromkeys(names, True)
    found: dict[str, Destination] = {}
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, base_prefix, there)
        if name not in there and key in there:
            name, pattern = loading.rename_source_key(key, [], [], base_prefix, there)
        if name in there:
            found[key] = Destination((name,)) if pattern is None else _convert(name, pattern, by_pattern[pattern])
    for entry, own in zip(mapping or [], entries, strict=True):
        entry._was_used |= own._was_used  # what was used is undone when the model is saved
    return found


def _convert(name: str, pattern: str, converter: Any) -> Destination:
    targets, sources = converter.target_patterns, converter.source_patterns
    steps = []
    for operation in converter.operations:
        options = {option: value for option, value in vars(operation).items() if value is not None}
        steps.append((type(operation).__name__, options["dim"] if options.keys() == {"dim"} else None))
    names = tuple(name.replace(targets[0], target) for target in targets)
    return Destination(names, tuple(steps), sources.index(pattern), len(sources))


def backward_of_inputs(
    roots: Sequence[Tensor], gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor],
    weights: Sequence[torch.nn.Parameter],
) -> Any:  # fmt: skip
    """Compute the gradients of inputs alone, into their `grad`; return what `backward_of_weights` goes on from.

    None: the gradients of the weights have been computed, too. torch's own zero-bubble schedules lose gradients behind
    frozen stages; the two functions themselves are right, also where some weights are frozen.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    given = None if gradients is None else list(gradients)
    roots = [root.clone() if root._is_view() else root for root in roots]  # it detaches them in place
    try:
        return stage_backward_input(list(roots), given, list(inputs), iter(weights))[1]
    except RuntimeError as error:
        # torch 2.11 and 2.12 do not allow for an input that nothing depends on: then nothing is left for later.
        if "not have been used in the graph" not in f"{error} {error.__cause__}":
            raise (error.__cause__ or error) from None  # they wrap whatever a module raises
    torch.autograd.backward(list(roots), given)
    return None


def backward_of_weights(weights: Sequence[torch.nn.Parameter], left: Any) -> None:
    """Compute the gradients of weights that `backward_of_inputs` has left, and add them to their `grad`.

    torch 2.11 and 2.12 cannot read the shape of a gradient at a custom `autograd.Function`, and crash where they
    compare it with the given one. Autograd itself has computed these gradients, so the comparison is left out. Goes
    with 2.12.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight

    compare = torch.autograd._make_grads
    if torch.__version__ < "2.13":
        torch.autograd._make_grads = lambda outputs, gradients, *_, **__: tuple(gradients)
    try:
        stage_backward_weight(iter(weights), left)
    finally:
        torch.autograd._make_grads = compare


_in_order: ContextVar[bool] = ContextVar("cornstarch_positions_in_order", default=False)


@contextmanager
def positions_in_order() -> Iterator[None]:
    """Run a block in which transformers does not look for documents in the positions of tokens: there are none."""
    # It looks whenever it is given neither a mask nor a cache, and waits for a GPU to do so.
    _ask_before_looking()
    token = _in_order.set(True)
    try:
        yield
    finally:
        _in_order.reset(token)


@cache
def _ask_before_looking() -> None:
    from transformers import masking_utils

    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None if _in_order.get() else look(position_ids)


def default_store() -> torch.distributed.Store:
    """Return the store over which the processes of a run found one another."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def process_groups() -> list[torch.distributed.ProcessGroup]:
    """Return all process groups that this process is in, that of all ranks included."""
    from torch.distributed.distributed_c10d import _world

    return [group for group in _world.pg_map if isinstance(group, torch.distributed.ProcessGroup)]


def move_present(model: torch.nn.Module, device: torch.device) -> None:
    """Bring a model to a device, in place, but for parameters on the meta device, which `Module.to` refuses."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def multiply_groups() -> list[Any]:
    """Return the operations that multiply rows with the matrices of experts; `functional.grouped_mm` calls them."""
    return [torch.ops.aten._grouped_mm] if hasattr(torch.ops.aten, "_grouped_mm") else []


def multiply_scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Tensor:
    """Return the product of two matrices of 8 bits in bf16; `fast`: sums may be kept in less than full precision.

    torch 2.13 has `torch.nn.functional.scaled_mm` and can compile it; not tried in 2.11. Goes with 2.11 and 2.12.

    `a` lies row by row in memory, `b` column by column. Each is multiplied by its scale: a number, or one for each row
    of `a` and for each column of `b`.
    """
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def without_futures(hook: Any) -> Any:
    """Return torch's PowerSGD hook so that it has done everything when it returns its future.

    As it is, it leaves most of it to gloo's thread, which goes on when something has arrived. A process that ends right
    after its last step may then wait for that thread while the thread waits for the interpreter, for ever (torch 2.13;
    4 of 78 runs). The hook finds `dist` and `default` among the names of its module; here they are others. Goes when
    gloo's threads no longer hold functions of Python when a process ends.
    """
    own = {"dist": _InStep(), "default": SimpleNamespace(_allreduce_fut=_mean_in_step)}
    return FunctionType(hook.__code__, {**hook.__globals__, **own}, hook.__name__)


class _InStep:
    """`torch.distributed`, whose sums are there when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        dist.all_reduce(tensor, group=group)
        return SimpleNamespace(get_future=lambda: _complete_future([tensor]))


def _mean_in_step(group: dist.ProcessGroup, tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Take the mean of a tensor, in the way of torch's hook for the steps before it compresses."""
    dist.all_reduce(tensor.div_(group.size()), group=group)
    return _complete_future(tensor)


def _complete_future(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can divide gradients while it reads them: torch's fused Adam and AdamW on a GPU."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return False
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(group.get("fused") for group in groups) and all(
        parameter.is_cuda and type(parameter) is torch.nn.Parameter for parameter in parameters
    )


def step_dividing(optimizer: torch.optim.Optimizer, divisor: Tensor) -> None:
    """Do a step with gradients divided by a number on their device; `GradScaler` does it in the same way."""
    chosen: Any = optimizer
    chosen.grad_scale = divisor.float().reshape(())
    chosen.found_inf = torch.zeros((), device=divisor.device)
    try:
        chosen.step()
    finally:
        del chosen.grad_scale, chosen.found_inf


def list_groups() -> list[tuple[str, list[int], int]]:
    """Return name, ranks, and number of collectives and messages that this process has begun, of each process group."""
    # Counted by torch itself for gloo and NCCL. A group that counts nothing is left out.
    found: list[tuple[str, list[int], int]] = []
    for group in process_groups():
        with suppress(RuntimeError):
            count = _count_started(group)
            found.append((str(group.group_name), dist.get_process_group_ranks(group), count))
    return found


def sequence_numbers() -> list[int]:
    """Return how many collectives and messages this process has begun in each of its process groups."""
    found = []
    for group in process_groups():
        with suppress(RuntimeError):
            found.append(_count_started(group))
    return found


def _count_started(group: Any) -> int:
    # The group itself counts nothing where it has a backend for each kind of device ("cpu:gloo,cuda:nccl").
    devices = [one.split(":")[0] for one in dist.get_backend_config(group).split(",") if ":" in one]
    backends = [group._get_backend(torch.device(one)) for one in devices]
    found = {id(one): int(one._get_sequence_number_for_group()) for one in backends}  # one may serve several
    return sum(found.values())


def clone_store(store: torch.distributed.Store) -> torch.distributed.Store:
    """Return a store with a connection of its own, where that is possible."""
    # Type stubs do not know the method.
    copying: Any = store
    with suppress(RuntimeError, NotImplementedError, AttributeError):
        return copying.clone()
    return store


def read_flight_recorder() -> list[dict[str, Any]]:
    """Return the last collectives of this process, of all groups, as torch's Flight Recorder has them, in order."""
    from torch._C import _distributed_c10d

    read = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if read is None:
        return []
    try:
        return list(json.loads(read(includeCollectives=True, onlyActive=False)).get("entries", ()))
    except (RuntimeError, ValueError, TypeError):  # a version that records nothing, or in another form
        return []


def pending_collectives() -> list[str]:
    """Return the collectives that this process began and that are not complete, in words: `all_reduce [1024]`."""
    return [describe_collective(one) for one in read_flight_recorder() if one.get("retired") is False]


def describe_collective(entry: Mapping[str, Any]) -> str:
    """Return an entry of the Flight Recorder in words."""
    name = str(entry.get("profiling_name", "")).rpartition(":")[2]
    return " ".join([name, *(str(list(size)) for size in entry.get("input_sizes") or ())])


def is_forked_after_cuda() -> bool:
    """Return whether this process was forked from one that had used CUDA, which then cannot be used here."""
    return bool(torch.cuda._is_in_bad_fork())


def count_changes(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for one of inference mode, where nobody counts."""
    return None if tensor.is_inference() else tensor._version
