"""cuDNN's attention kernels for pieces of rows, by its own package (`nvidia-cudnn-frontend`).

torch hands on cuDNN's kernels for whole rows; for pieces it plans anew in every call (torch 2.11), which takes longer
than the kernels. Here a plan is made once for a size, and used again.

Tensors are [tokens of all rows, heads, width], token after token.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from cornstarch.attention.pieces import Cut

_PLANS = 256  # kept; some kilobytes each
_own = threading.local()


@cache
def has_cudnn() -> bool:
    """Whether cuDNN's own package is there."""
    try:
        _package()
    except (ImportError, OSError, RuntimeError):
        return False
    return True


@cache
def _package() -> Any:
    return importlib.import_module("cudnn")


@cache
def has_kernels(width: int, device: torch.device) -> bool:
    """Whether there are kernels for heads of a width on a device: plans are made for small pieces, and not run."""
    shapes = (device, torch.bfloat16, 256, 2, 1, width)
    try:
        for make in (_forward_plan, _backward_plan):
            for ahead, whole in ((False, True), (False, False), (True, False)):
                make(shapes, 2, 128, 1.0, ahead, whole)
    except Exception:  # of many kinds, by version of cuDNN and of its package
        return False
    return True


class Cudnn:
    """Attention in pieces of rows; see `cornstarch.attention.varlen.Kernel`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        """Attend."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        output, heads = torch.empty_like(query), query.shape[1]
        if cut.pieces is None:
            sums = torch.empty(cut.rows, heads, cut.longest, dtype=torch.float32, device=query.device)
        else:
            sums = torch.empty(len(query), heads, dtype=torch.float32, device=query.device)
        _run(_forward_plan(*_asked(query, key, cut)), cut, [query, key, value, output, sums])
        if cut.pieces is None:  # head after head; of one row the transposed is a view
            sums = sums.transpose(1, 2).reshape(-1, heads).contiguous()
        return output, sums

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        sums: Tensor,
        cut: Cut,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients."""
        gradient, output, sums = gradient.contiguous(), output.contiguous(), sums.contiguous()
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        if cut.pieces is None:
            sums = sums.unflatten(0, (cut.rows, cut.longest)).transpose(1, 2).contiguous()
        _run(_backward_plan(*_asked(query, key, cut)), cut, [query, key, value, output, sums, gradient, *found])
        return found


def _asked(query: Tensor, key: Tensor, cut: Cut) -> tuple[Any, ...]:
    """Return what a plan is made for."""
    shapes = query.device, query.dtype, query.shape[0], query.shape[1], key.shape[1], query.shape[2]
    count = cut.rows if cut.pieces is None else cut.pieces.shape[1] - 1
    return shapes, count, cut.longest, cut.scale, cut.ahead, cut.pieces is None


def _run(plan: tuple[Any, int], cut: Cut, states: list[Tensor]) -> None:
    """Carry out a plan on tensors in the order in which its tensors are numbered."""
    graph, space = plan
    device, given = states[0].device, list(states)
    if cut.pieces is not None:
        strides = tuple(one.stride(0) for one in states)
        offsets = cut.pieces[0] * _strides(strides, device)
        if cut.ahead:
            offsets = offsets + _further(strides, device)
        given += [*offsets.unbind(0), cut.pieces[1, :-1].to(torch.int32)]
    room = torch.empty(max(space, 1), dtype=torch.uint8, device=device)
    graph.execute(dict(enumerate(given, start=1)), room, handle=_handle(device))


@lru_cache(maxsize=1024)
def _strides(strides: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(strides, device=device)[:, None]


@lru_cache(maxsize=1024)
def _further(strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Return how much further on keys and values, and their gradients, are by one token."""
    moved = [stride if number in _KEYS else 0 for number, stride in enumerate(strides)]
    return torch.tensor(moved, device=device)[:, None]


_KEYS = (1, 2, 7, 8)  # among query, key, value, output, sums, gradient, and the gradients of the first three


def _handle(device: torch.device) -> Any:
    """Return this thread's handle, bound to the stream that torch computes on."""
    cudnn = _package()
    handles = _own.__dict__.setdefault("handles", {})
    if device not in handles:
        with torch.cuda.device(device):
            handles[device] = cudnn.create_handle()
    cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


# ---------------------------------------------------------------------------------------------------- plans


class _Drawing:
    """A graph of one operation; its tensors are numbered in the order in which they are given to it."""

    def __init__(self, shapes: tuple[Any, ...], pieces: int, longest: int, whole: bool, tensors: int) -> None:
        cudnn = _package()
        self.cudnn, (device, dtype, self.tokens, self.heads, self.groups, self.width) = cudnn, shapes
        self.kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[dtype]
        self.pieces, self.longest = pieces, longest
        self.graph = cudnn.pygraph(
            handle=_handle(device),
            io_data_type=self.kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self.offsets: list[Any] = []
        self.lengths: Any = None
        if not whole:
            kinds = cudnn.data_type
            self.offsets = [self._column(tensors + 1 + one, kinds.INT64, pieces + 1) for one in range(tensors)]
            self.lengths = self._column(2 * tensors + 1, kinds.INT32, pieces)

    def _column(self, number: int, kind: Any, count: int) -> Any:
        """Return a column of whole numbers: where pieces begin, or their lengths."""
        return self.graph.tensor(
            name=f"column{number}", dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=number
        )

    def _geometry(self, heads: int, width: int) -> dict[str, list[int]]:
        """Return size and strides of what lies token after token."""
        return {
            "dim": [self.pieces, heads, self.longest, width],
            "stride": [self.longest * heads * width, width, heads * width, 1],
        }

    def given(self, number: int, heads: int) -> Any:
        """Return an input."""
        tensor = self.graph.tensor(
            name=f"given{number}", data_type=self.kind, uid=number, **self._geometry(heads, self.width)
        )
        return self._in_pieces(tensor, number)

    def made(self, tensor: Any, number: int, heads: int) -> None:
        """Say where an output goes."""
        geometry = self._geometry(heads, self.width)
        tensor.set_uid(number).set_output(True).set_dim(geometry["dim"]).set_stride(geometry["stride"])
        self._in_pieces(tensor.set_data_type(self.kind), number)

    def given_sums(self) -> Any:
        """Return the sums of the softmax, the fifth tensor, as an input."""
        kind = self.cudnn.data_type.FLOAT
        return self._in_pieces(self.graph.tensor(name="sums", data_type=kind, uid=5, **self._sums()), 5)

    def made_sums(self, tensor: Any) -> None:
        """Say where the sums of the softmax go."""
        geometry = self._sums()
        tensor.set_uid(5).set_output(True).set_dim(geometry["dim"]).set_stride(geometry["stride"])
        self._in_pieces(tensor.set_data_type(self.cudnn.data_type.FLOAT), 5)

    def _sums(self) -> dict[str, list[int]]:
        """Return size and strides of the sums: token after token, or, of whole rows, head after head."""
        if self.offsets:
            return self._geometry(self.heads, 1)
        stride = [self.heads * self.longest, self.longest, 1, 1]
        return {"dim": [self.pieces, self.heads, self.longest, 1], "stride": stride}

    def _in_pieces(self, tensor: Any, number: int) -> Any:
        if self.offsets:
            tensor.set_ragged_offset(self.offsets[number - 1])
        return tensor

    def asked(self, scale: float, ahead: bool) -> dict[str, Any]:
        """Return what a token sees: up to itself, or from itself on."""
        return {
            "attn_scale": scale,
            "use_padding_mask": bool(self.offsets),
            "seq_len_q": self.lengths,
            "seq_len_kv": self.lengths,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": 1 if ahead else None,
            "diagonal_band_right_bound": self.longest if ahead else 0,
        }

    def planned(self) -> tuple[Any, int]:
        """Return the graph, ready to run, and the bytes that it needs."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return self.graph, self.graph.get_workspace_size()


@lru_cache(maxsize=_PLANS)
def _forward_plan(
    shapes: tuple[Any, ...], pieces: int, longest: int, scale: float, ahead: bool, whole: bool
) -> tuple[Any, int]:
    drawing = _Drawing(shapes, pieces, longest, whole, tensors=5)
    heads, groups = drawing.heads, drawing.groups
    output, sums = drawing.graph.sdpa(
        name="attend",
        q=drawing.given(1, heads),
        k=drawing.given(2, groups),
        v=drawing.given(3, groups),
        generate_stats=True,
        **drawing.asked(scale, ahead),
    )
    drawing.made(output, 4, heads)
    drawing.made_sums(sums)
    return drawing.planned()


@lru_cache(maxsize=_PLANS)
def _backward_plan(
    shapes: tuple[Any, ...], pieces: int, longest: int, scale: float, ahead: bool, whole: bool
) -> tuple[Any, int]:
    drawing = _Drawing(shapes, pieces, longest, whole, tensors=9)
    heads, groups = drawing.heads, drawing.groups
    tokens = -(-drawing.tokens // 64) * 64
    found = drawing.graph.sdpa_backward(
        name="attend_backward",
        q=drawing.given(1, heads),
        k=drawing.given(2, groups),
        v=drawing.given(3, groups),
        o=drawing.given(4, heads),
        stats=drawing.given_sums(),
        dO=drawing.given(6, heads),
        **drawing.asked(scale, ahead),
        **({} if whole else {"max_total_seq_len_q": tokens, "max_total_seq_len_kv": tokens}),
    )
    for number, (one, count) in enumerate(zip(found, (heads, groups, groups), strict=True), start=7):
        drawing.made(one, number, count)
    return drawing.planned()
