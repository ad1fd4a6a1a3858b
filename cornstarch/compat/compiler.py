"""The compiler of torch: its limits, what it has compiled and why again, and what it keeps of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.fx.traceback
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy


def has_triton() -> bool:
    """Return whether Triton can make kernels for a device here."""
    from torch.utils._triton import has_triton as found

    return bool(found())


_MOST_COMPILED = 64  # variants of a layer: kinds of masks and layers, with and without gradients, fixed and free sizes


def allow_variants() -> None:
    """Let what is compiled have more variants than torch's 8, behind which it is no longer compiled."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, _MOST_COMPILED)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * _MOST_COMPILED)


def compile_variants(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    allow_variants()
    made: Callable[..., Any] = torch.compile(function, **options)
    return made


def compile_error() -> tuple[type[Exception], ...]:
    """Return the classes of what torch raises when it cannot compile a function, or has compiled it too often."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def is_recompile_limit(error: BaseException) -> bool:
    """Return whether torch gave up on a function because it has too many compiled variants."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def mark_any_size(tensor: Tensor, dim: int) -> Tensor:
    """Let what is compiled for a tensor take any size of a dim from two on, unless the code needs one; return it."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(tensor, dim)
    return tensor


def copy_view(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that is a view of another, else the tensor itself.

    torch guards the sizes of what a view is of, too: where sizes are dynamic, the first layer of a model, whose input
    is a view of what was merged, would have a variant of its own, and the other layers another.
    """
    return tensor if tensor._base is None else tensor.clone()


@contextmanager
def raise_at_recompile_limit() -> Iterator[None]:
    """Let torch raise in this block, instead of running a function eagerly, when it has too many variants."""
    # Not for the whole process: code of a user's own, compiled elsewhere, keeps torch's way.
    from torch._dynamo import config

    before, config.fail_on_recompile_limit_hit = config.fail_on_recompile_limit_hit, True
    try:
        yield
    finally:
        config.fail_on_recompile_limit_hit = before


class CompiledFrame(NamedTuple):
    """A Python function that torch compiled, or failed to."""

    function: str
    reason: str | None  # the guard that failed, if the function had been compiled before
    seconds: float
    failed: bool


_frames: list[CompiledFrame] = []
_last_metrics: list[Any] = [None]  # the newest of torch's records that was read


def count_frames() -> int:
    """Return how many functions torch has compiled in this process, as far as it keeps records."""
    # torch keeps the last 64 records, of forward and backward passes, as private names of all versions from 2.11 on.
    from torch._dynamo import utils

    records = utils._compilation_metrics
    if not records or records[-1] is _last_metrics[0]:
        return len(_frames)
    new = []
    for record in reversed(records):
        if record is _last_metrics[0]:
            break
        new.append(record)
    _last_metrics[0] = records[-1]
    for record in reversed(new):
        if record.co_name is not None and record.is_forward is not False:
            function = f"{record.co_name} ({record.co_filename}:{record.co_firstlineno})"
            seconds = float(record.entire_frame_compile_time_s or 0.0)
            reason = getattr(record, "recompile_reason", None)
            _frames.append(CompiledFrame(function, reason, seconds, record.fail_type is not None))
    return len(_frames)


def last_guard() -> str | None:
    """Return the guard that failed in the last compilation, if it was not the first of its function."""
    count_frames()
    return _frames[-1].reason if _frames else None


def read_frames(count: int) -> list[CompiledFrame]:
    """Return the newest of the functions that `count_frames` has counted."""
    return _frames[-count:] if count else []


def set_activation_budget(fraction: float) -> None:
    """Let what is compiled from now on keep this fraction of its activations, and recompute the cheapest others."""
    from torch._functorch import config

    config.activation_memory_budget = fraction
    # torch would also keep whatever a matrix product of the backward pass reads: an activation function's output beside
    # its inputs. To write that once more costs almost nothing, and it takes a fifth of the memory of a step.
    config.ban_recompute_materialized_backward = False


@contextmanager
def save_results() -> Iterator[None]:
    """Let a graph that is being traced in this block keep its results for the backward pass, whatever memory it takes.

    torch does so for its own collectives, by their names, and for what selective checkpointing marks, as here.
    """
    meta = torch.fx.traceback.current_meta
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        meta.pop("recompute")
        if before is not None:
            meta["recompute"] = before


@contextmanager
def record_in_operator() -> Iterator[None]:
    """Let autograd record, or run, in this block of an operator's implementation."""
    # torch runs implementations below autograd, where `enable_grad` alone changes nothing.
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield
