"""cuDNN's kernels for causal masks with documents and spans, as pieces of concatenated rows.

In a document a token sees the tokens up to itself; in a span it also sees the tokens after itself. A kernel that knows
these two masks, and takes the starts and lengths of pieces, runs once for documents and once for spans, and no mask is
ever read block by block. The two results are merged by their logsumexp, and the backward pass of each is given the
merged output. On a CPU the same operators run in plain torch.

Shape letters: T tokens of all rows concatenated, N pieces, H heads, D head size.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cornstarch.attention import backends
from cornstarch.attention.mask import CausalMask, MaskSpec, find_starts, list_pieces, round_up
from cornstarch.compat.compiler import has_triton, mark_any_size

_PLAN_CACHE_SIZE = 256  # some kilobytes each
_KEY_TENSORS = (1, 2, 7, 8)  # of: query, key, value, output, logsumexp, gradient, and the gradients of the first three
_thread = threading.local()


@dataclass(frozen=True, eq=False)
class PieceMask(CausalMask):
    """The starts and lengths of pieces, int64 [2, N + 1], the longest first, the last of them empty.

    Numbers of pieces are rounded up, so that batches of other sizes need no other kernels: more pieces may be empty.
    """

    sizes: Tensor
    """int64 [3] on the CPU: rows, tokens of the longest document, tokens of the longest span."""
    documents: Tensor | None
    """None: every row is one document."""
    spans: Tensor | None
    """Without their last token, which sees nothing after itself; None: there are no spans."""
    in_span: Tensor | None
    """bool [T]: whether a token is in `spans`; None with them."""


def build_piece_mask(spec: MaskSpec) -> PieceMask:
    """Build the mask of a causal spec with contiguous documents and spans. Nothing is read from the device."""
    counts = spec.counts
    rows, tokens = spec.documents.shape
    new_document = find_starts(spec.documents).flatten()
    documents = spans = in_span = None
    if not counts.whole_rows:
        documents = list_pieces(new_document, torch.ones_like(new_document), round_up(counts.documents))
        documents = sort_by_length(documents)
    if counts.longest_span > 1:
        inside = ((spec.spans >= 0) & (spec.documents > 0)).flatten()
        new_span = new_document | find_starts(spec.spans).flatten()
        spans = list_pieces(new_span & inside, inside, round_up(counts.spans))
        spans[1] = (spans[1] - 1).clamp(min=0)
        spans = sort_by_length(spans)
        in_span = torch.zeros_like(inside)
        in_span[:-1] = inside[:-1] & inside[1:] & ~new_span[1:]
    longest = tokens if counts.whole_rows else min(round_up(counts.longest), tokens)
    sizes = torch.tensor([rows, longest, min(round_up(counts.longest_span), tokens)])
    return PieceMask(spec, sizes, documents, spans, in_span)


def sort_by_length(pieces: Tensor) -> Tensor:
    return mark_any_size(pieces[:, pieces[1].argsort(descending=True, stable=True)], 1)


# ------------------------------------------------------------------------------------------------ kernels


class PieceBatch(NamedTuple):
    """One call of a kernel: in each piece a token sees the tokens up to itself.

    With `looks_ahead`, it sees the tokens after itself, in a piece that continues for one token past its length.
    """

    pieces: Tensor | None
    """As in `PieceMask`; None: the rows."""
    rows: int
    longest: int
    """Tokens of the longest piece, or more."""
    scale: float
    looks_ahead: bool
    sees_all: bool = False  # each token sees all tokens of its piece


class PlainKernel:
    """Attention piece by piece in plain torch, on a CPU.

    As in `CudnnKernel`, output and logsumexp in the backward pass may be of more than these pieces, and results of
    tokens outside of all pieces mean nothing.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: PieceBatch) -> tuple[Tensor, Tensor]:
        """Return the output [T, H, D] and the logsumexp of the scores, float32 [T, H]."""
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        logsumexp = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
        for queries, keys, hidden in _iterate_pieces(batch, len(query)):
            found = backends.attend_plainly(query[queries], key[keys], value[keys], hidden, batch.scale)
            output[queries], logsumexp[queries] = found[0], found[1].transpose(0, 1)
        return output, logsumexp

    def backward(self, states: Sequence[Tensor], batch: PieceBatch) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, given `backends.BACKWARD_STATES`."""
        gradient, query, key, value, output, logsumexp = states
        gradients = [torch.zeros(one.shape, device=one.device) for one in (query, key, value)]
        for queries, keys, hidden in _iterate_pieces(batch, len(query)):
            piece = (gradient[queries], query[queries], key[keys], value[keys], output[queries])
            sums = logsumexp[queries].transpose(0, 1)
            found = backends.attend_plainly_backward((*piece, sums), hidden, batch.scale)
            for whole, where, part in zip(gradients, (queries, keys, keys), found, strict=True):
                whole[where] += part
        return tuple(one.to(query.dtype) for one in gradients)


def _iterate_pieces(batch: PieceBatch, tokens: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries, the keys, and the hidden pairs of every piece."""
    if batch.pieces is None:
        starts, lengths = list(range(0, tokens, tokens // batch.rows)), [tokens // batch.rows] * batch.rows
    else:
        starts, lengths = batch.pieces.tolist()
    ahead = 1 if batch.looks_ahead else 0
    for start, length in zip(starts, lengths, strict=True):
        if length:
            pairs = torch.ones(length, length, dtype=torch.bool)
            keys = slice(start + ahead, start + ahead + length)
            hidden = pairs.tril(-1) if batch.looks_ahead else pairs.triu(length if batch.sees_all else 1)
            yield slice(start, start + length), keys, hidden


@cache
def has_cudnn() -> bool:
    try:
        _package()
    except (ImportError, OSError, RuntimeError):
        return False
    return True


@cache
def _package() -> Any:
    return importlib.import_module("cudnn")


def has_kernels(head_dim: int, device: torch.device) -> bool:
    """Whether there are kernels for heads of a size on a device; builds plans for small pieces without running them."""
    return can_build_plans(head_dim, device, ((False, True), (False, False), (True, False)))


@cache
def can_build_plans(head_dim: int, device: torch.device, masks: tuple[tuple[bool | None, bool], ...]) -> bool:
    """Whether plans can be built for masks: which tokens are seen (None: all), and whether pieces are whole rows."""
    shapes = (device, torch.bfloat16, 256, 2, 1, head_dim)
    try:
        for build in (_build_forward_plan, _build_backward_plan):
            for ahead, whole in masks:
                build(shapes, 2, 128, 1.0, ahead, whole)
    except Exception:  # many kinds, depending on the versions of cuDNN and of its package
        return False
    return True


class CudnnKernel:
    """Attention in pieces of rows by cuDNN, as `PlainKernel` defines it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: PieceBatch) -> tuple[Tensor, Tensor]:
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

    def backward(self, states: Sequence[Tensor], batch: PieceBatch) -> tuple[Tensor, ...]:
        gradient, query, key, value, output, logsumexp = (one.contiguous() for one in states)
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        if batch.pieces is None:
            logsumexp = logsumexp.unflatten(0, (batch.rows, batch.longest)).transpose(1, 2).contiguous()
        plan = _build_backward_plan(*_get_plan_arguments(query, key, batch))
        _run(plan, batch, [query, key, value, output, logsumexp, gradient, *found])
        return found


def _get_plan_arguments(query: Tensor, key: Tensor, batch: PieceBatch) -> tuple[Any, ...]:
    tokens = round_up(len(query)) if batch.sees_all else len(query)  # of items there is any number; most is enough
    shapes = query.device, query.dtype, tokens, query.shape[1], key.shape[1], query.shape[2]
    count = batch.rows if batch.pieces is None else batch.pieces.shape[1] - 1
    ahead = None if batch.sees_all else batch.looks_ahead
    return shapes, count, batch.longest, batch.scale, ahead, batch.pieces is None


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

    def build_mask_options(self, scale: float, ahead: bool | None) -> dict[str, Any]:
        """Return the mask: tokens up to itself, or from itself on; None: all."""
        return {
            "attn_scale": scale,
            "use_padding_mask": bool(self.offsets),
            "seq_len_q": self.lengths,
            "seq_len_kv": self.lengths,
            "diagonal_alignment": self.cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": 1 if ahead else None,
            "diagonal_band_right_bound": self.longest if ahead else None if ahead is None else 0,
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
    shapes: tuple[Any, ...], pieces: int, longest: int, scale: float, ahead: bool | None, whole: bool
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
    shapes: tuple[Any, ...], pieces: int, longest: int, scale: float, ahead: bool | None, whole: bool
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


# ------------------------------------------------------------------------------------------------ merging
# In place, and only tokens in spans are touched: the results are as large as a layer's states, and reading them costs
# time.


def _merge_outputs(output: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor, in_span: Tensor) -> None:
    if output.is_cuda and has_triton():
        from cornstarch.attention import triton_merge

        return triton_merge.merge_outputs(output, logsumexp, more, more_logsumexp, in_span)
    both = torch.logaddexp(logsumexp, more_logsumexp)
    old, new = (logsumexp - both).exp().unsqueeze(-1), (more_logsumexp - both).exp().unsqueeze(-1)
    output.copy_(torch.where(in_span[:, None, None], output * old + more * new, output))
    logsumexp.copy_(torch.where(in_span[:, None], both, logsumexp))


def _add_gradients(gradient: Tensor, more: Tensor, in_span: Tensor, ahead: int) -> None:
    if gradient.is_cuda and has_triton():
        from cornstarch.attention import triton_merge

        return triton_merge.add_gradients(gradient, more, in_span, ahead)
    here = torch.zeros_like(in_span)
    here[ahead:] = in_span[: len(in_span) - ahead]
    gradient.copy_(torch.where(here[:, None, None], gradient + more, gradient))


# ------------------------------------------------------------------------------------------------ operators


def _select_kernel(tensor: Tensor) -> PlainKernel | CudnnKernel:
    return CudnnKernel() if tensor.is_cuda else PlainKernel()


def _attend(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    sizes, documents, spans, in_span, scale = others
    rows, longest, longest_span = sizes.tolist()
    kernel = _select_kernel(query)
    output, logsumexp = kernel(query, key, value, PieceBatch(documents, rows, longest, scale, looks_ahead=False))
    if spans is not None:
        more = kernel(query, key, value, PieceBatch(spans, rows, longest_span, scale, looks_ahead=True))
        _merge_outputs(output, logsumexp, *more, in_span)
    return output, logsumexp


def _attend_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *states, sizes, documents, spans, in_span, scale = arguments
    rows, longest, longest_span = sizes.tolist()
    kernel = _select_kernel(states[0])
    gradients = kernel.backward(states, PieceBatch(documents, rows, longest, scale, looks_ahead=False))
    if spans is not None:
        more = kernel.backward(states, PieceBatch(spans, rows, longest_span, scale, looks_ahead=True))
        for found, other, ahead in zip(gradients, more, (0, 1, 1), strict=True):  # keys are one token further on
            _add_gradients(found, other, in_span, ahead)
    return gradients


_MASK = "Tensor sizes, Tensor? documents, Tensor? spans, Tensor? in_span"
_operators = backends.define_operators("attend_pieces", _MASK, _MASK, (0, 1), _attend, _attend_backward)
backends.connect_backward(_operators, passed_on=(3, 4, 5, 6))


def attend_pieces(query: Tensor, key: Tensor, value: Tensor, pieces: PieceMask, scale: float) -> Tensor:
    """Attend: [B, H, S, D], keys and values with as many heads or fewer -> [B, S, H, D]."""
    arguments = query, key, value, pieces.sizes, pieces.documents, pieces.spans, pieces.in_span, scale
    return backends.attend_concatenated(torch.ops.cornstarch.attend_pieces, *arguments)


class CudnnBackend(backends.DocumentBackend):
    """cuDNN for whole rows."""

    name = "cudnn"
    mask_type = PieceMask
    choices = ("auto", "varlen", "cudnn")
    priority = 10
    package = "nvidia-cudnn-frontend"
    head_dim_multiple = 8

    def is_installed(self) -> bool:
        return has_cudnn()

    def is_available(self, device: torch.device, head_dim: int | None) -> bool:
        if head_dim is None or not self.supports_head_dim(head_dim):
            return False
        return has_cudnn() and has_kernels(head_dim, device)

    def build_mask(self, spec: MaskSpec, queries: Tensor | None = None, keys: Tensor | None = None) -> Any:
        return build_piece_mask(spec)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        return attend_pieces(query, key, value, mask, scale)


backends.register_attention_backend(CudnnBackend())
