"""cuDNN's attention kernels for pieces of rows, through its own package (`nvidia-cudnn-frontend`).

torch exposes cuDNN's kernels for whole rows; for pieces it builds a plan in every call (torch 2.11), which takes longer
than the kernels. Here a plan is built once per size and reused.

Tensors are [tokens of all rows, heads, head size], contiguous.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cornstarch.attention.cudnn_attention import PieceBatch

_PLAN_CACHE_SIZE = 256  # some kilobytes each
_KEY_TENSORS = (1, 2, 7, 8)  # of: query, key, value, output, logsumexp, gradient, and the gradients of the first three
_thread = threading.local()


@cache
def has_cudnn() -> bool:
    """Whether cuDNN's own package is installed."""
    try:
        _package()
    except (ImportError, OSError, RuntimeError):
        return False
    return True


@cache
def _package() -> Any:
    return importlib.import_module("cudnn")


@cache
def has_kernels(head_dim: int, device: torch.device) -> bool:
    """Whether there are kernels for heads of a size on a device; builds plans for small pieces without running them."""
    shapes = (device, torch.bfloat16, 256, 2, 1, head_dim)
    try:
        for build in (_build_forward_plan, _build_backward_plan):
            for ahead, whole in ((False, True), (False, False), (True, False)):
                build(shapes, 2, 128, 1.0, ahead, whole)
    except Exception:  # many kinds, depending on the versions of cuDNN and of its package
        return False
    return True


class CudnnKernel:
    """Attention in pieces of rows; see `cornstarch.attention.cudnn_attention.PlainKernel`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: PieceBatch) -> tuple[Tensor, Tensor]:
        """Attend."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output, heads = torch.empty_like(query), query.shape[1]
        if batch.pieces is None:
            logsumexp = torch.empty(batch.rows, heads, batch.longest, dtype=torch.float32, device=query.device)
        else:
            logsumexp = torch.empty(len(query), heads, dtype=torch.float32, device=query.device)
        plan = _build_forward_plan(*_get_plan_arguments(query, key, batch))
        _run(plan, batch, [query, key, value, output, logsumexp])
        if batch.pieces is None:  # cuDNN writes head after head; the transpose of one row is a view
            logsumexp = logsumexp.transpose(1, 2).reshape(-1, heads).contiguous()
        return output, logsumexp

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        batch: PieceBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients."""
        gradient, output, logsumexp = gradient.contiguous(), output.contiguous(), logsumexp.contiguous()
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        if batch.pieces is None:
            logsumexp = logsumexp.unflatten(0, (batch.rows, batch.longest)).transpose(1, 2).contiguous()
        plan = _build_backward_plan(*_get_plan_arguments(query, key, batch))
        _run(plan, batch, [query, key, value, output, logsumexp, gradient, *found])
        return found


def _get_plan_arguments(query: Tensor, key: Tensor, batch: PieceBatch) -> tuple[Any, ...]:
    shapes = query.device, query.dtype, query.shape[0], query.shape[1], key.shape[1], query.shape[2]
    count = batch.rows if batch.pieces is None else batch.pieces.shape[1] - 1
    return shapes, count, batch.longest, batch.scale, batch.looks_ahead, batch.pieces is None


def _run(plan: tuple[Any, int], batch: PieceBatch, states: list[Tensor]) -> None:
    """Execute a plan; `states` are in the order of its tensors' numbers."""
    graph, workspace_bytes = plan
    device, given = states[0].device, list(states)
    if batch.pieces is not None:
        strides = tuple(one.stride(0) for one in states)
        offsets = batch.pieces[0] * _stride_column(strides, device)
        if batch.looks_ahead:
            offsets = offsets + _key_offset_column(strides, device)
        given += [*offsets.unbind(0), batch.pieces[1, :-1].to(torch.int32)]
    workspace = torch.empty(max(workspace_bytes, 1), dtype=torch.uint8, device=device)
    graph.execute(dict(enumerate(given, start=1)), workspace, handle=_get_handle(device))


@lru_cache(maxsize=1024)
def _stride_column(strides: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(strides, device=device)[:, None]


@lru_cache(maxsize=1024)
def _key_offset_column(strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the stride of keys, values and their gradients, which are read one token ahead; 0 for others."""
    moved = [stride if number in _KEY_TENSORS else 0 for number, stride in enumerate(strides)]
    return torch.tensor(moved, device=device)[:, None]


def _get_handle(device: torch.device) -> Any:
    """Return this thread's handle, bound to torch's current stream."""
    cudnn = _package()
    handles = _thread.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


# ------------------------------------------------------------------------------------------------ plans


class _GraphBuilder:
    """Builds a cuDNN graph of one operation; tensors are numbered from 1 in the order in which `_run` gives them."""

    def __init__(self, shapes: tuple[Any, ...], pieces: int, longest: int, whole: bool, tensors: int) -> None:
        cudnn = _package()
        self.cudnn, (device, dtype, self.tokens, self.heads, self.groups, self.width) = cudnn, shapes
        self.kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
        self.pieces, self.longest = pieces, longest
        self.graph = cudnn.pygraph(
            handle=_get_handle(device),
            io_data_type=self.kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self.offsets: list[Any] = []
        self.lengths: Any = None
        if not whole:
            kinds = cudnn.data_type
            self.offsets = [self._add_column(tensors + 1 + one, kinds.INT64, pieces + 1) for one in range(tensors)]
            self.lengths = self._add_column(2 * tensors + 1, kinds.INT32, pieces)

    def _add_column(self, number: int, kind: Any, count: int) -> Any:
        """Declare a column of integers: the starts of pieces, or their lengths."""
        return self.graph.tensor(
            name=f"column{number}", dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=number
        )

    def _describe(self, number: int, heads: int) -> tuple[Any, list[int], list[int]]:
        """Return type, size and strides of a tensor; the fifth is the logsumexp."""
        if number == 5 and not self.offsets:  # of whole rows cuDNN writes it head after head, not token after token
            strides = [self.heads * self.longest, self.longest, 1, 1]
            return self.cudnn.data_type.FLOAT, [self.pieces, self.heads, self.longest, 1], strides
        kind, width = (self.cudnn.data_type.FLOAT, 1) if number == 5 else (self.kind, self.width)
        strides = [self.longest * heads * width, width, heads * width, 1]
        return kind, [self.pieces, heads, self.longest, width], strides

    def add_input(self, number: int, heads: int) -> Any:
        kind, dim, stride = self._describe(number, heads)
        tensor = self.graph.tensor(name=f"given{number}", data_type=kind, uid=number, dim=dim, stride=stride)
        return self._set_offset(tensor, number)

    def set_output(self, tensor: Any, number: int, heads: int) -> None:
        kind, dim, stride = self._describe(number, heads)
        tensor.set_uid(number).set_output(True).set_dim(dim).set_stride(stride)
        self._set_offset(tensor.set_data_type(kind), number)

    def _set_offset(self, tensor: Any, number: int) -> Any:
        if self.offsets:
            tensor.set_ragged_offset(self.offsets[number - 1])
        return tensor

    def build_mask_options(self, scale: float, ahead: bool) -> dict[str, Any]:
        """Return the mask: tokens up to itself, or from itself on."""
        return {
            "attn_scale": scale,
            "use_padding_mask": bool(self.offsets),
            "seq_len_q": self.lengths,
            "seq_len_kv": self.lengths,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": 1 if ahead else None,
            "diagonal_band_right_bound": self.longest if ahead else 0,
        }

    def build_plan(self) -> tuple[Any, int]:
        """Return the graph, ready to run, and the bytes of its workspace."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return self.graph, self.graph.get_workspace_size()


@lru_cache(maxsize=_PLAN_CACHE_SIZE)
def _build_forward_plan(
    shapes: tuple[Any, ...], pieces: int, longest: int, scale: float, ahead: bool, whole: bool
) -> tuple[Any, int]:
    builder = _GraphBuilder(shapes, pieces, longest, whole, tensors=5)
    heads, groups = builder.heads, builder.groups
    output, logsumexp = builder.graph.sdpa(
        name="attend",
        q=builder.add_input(1, heads),
        k=builder.add_input(2, groups),
        v=builder.add_input(3, groups),
        generate_stats=True,
        **builder.build_mask_options(scale, ahead),
    )
    builder.set_output(output, 4, heads)
    builder.set_output(logsumexp, 5, heads)
    return builder.build_plan()


@lru_cache(maxsize=_PLAN_CACHE_SIZE)
def _build_backward_plan(
    shapes: tuple[Any, ...], pieces: int, longest: int, scale: float, ahead: bool, whole: bool
) -> tuple[Any, int]:
    builder = _GraphBuilder(shapes, pieces, longest, whole, tensors=9)
    heads, groups = builder.heads, builder.groups
    tokens = -(-builder.tokens // 64) * 64
    found = builder.graph.sdpa_backward(
        name="attend_backward",
        q=builder.add_input(1, heads),
        k=builder.add_input(2, groups),
        v=builder.add_input(3, groups),
        o=builder.add_input(4, heads),
        stats=builder.add_input(5, heads),
        dO=builder.add_input(6, heads),
        **builder.build_mask_options(scale, ahead),
        **({} if whole else {"max_total_seq_len_q": tokens, "max_total_seq_len_kv": tokens}),
    )
    for number, (one, count) in enumerate(zip(found, (heads, groups, groups), strict=True), start=7):
        builder.set_output(one, number, count)
    return builder.build_plan()
