"""FlashAttention-4 (`flash-attn-4`) for causal masks with documents and spans, and for masks between ranks' tokens.

torch calls the same two functions of the package (`torch.nn.attention._fa4`), but passes no such masks. On a CPU the
same operators run in plain torch.

Shape letters: B rows, T tokens of all rows concatenated, N documents, H heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from cornstarch.attention import backends, mask
from cornstarch.attention.mask import BLOCK_SIZE, CausalMask, MaskSpec, RangeMask

SUPPORTED_VERSIONS = ("4.0.0b36",)
"""Versions whose private parts `flash_kernels` was written for."""
_GPUS = (9,)  # major compute capabilities on which it was tested: Hopper
_CACHE_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_GRADIENTS = ("dq", "dk", "dv")  # the package's names of the tensors that it writes gradients to

# ------------------------------------------------------------------------------------------------ the package


@cache
def has_flash() -> bool:
    """Whether a supported version of FlashAttention-4 is installed."""
    try:
        if importlib.metadata.version("flash-attn-4") not in SUPPORTED_VERSIONS:
            return False
        load_package()
        importlib.import_module("cornstarch.attention.flash_kernels")
    except Exception:  # many kinds, depending on the versions of the package's dependencies
        return False
    return True


@cache
def has_flash_on(device: torch.device) -> bool:
    """Whether FlashAttention-4 is installed and has kernels for a GPU."""
    return has_flash() and torch.cuda.get_device_capability(device)[0] in _GPUS


@cache
def load_package() -> Any:
    enable_kernel_cache()
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")  # and works
    return importlib.import_module("flash_attn.cute.interface")


def enable_kernel_cache() -> None:
    """Let the package cache its kernels, which compile for seconds each, in a folder that only this user can write."""
    if _CACHE_SWITCH in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"cornstarch_{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
        os.environ[_CACHE_SWITCH] = "1"
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash_attention"))


def _load_kernels(accumulate: bool = False) -> Any:
    from cornstarch.attention.flash_kernels import load_kernels

    return load_kernels(accumulate)


# ------------------------------------------------------------------------------------------------ documents
# A token sees the tokens of its document up to a limit: itself, or the last token of its span. So a key is seen by the
# queries of its document from one on: itself, or the first token of its span. The kernels look up both.

ENTRY_SIZE = 4
"""Numbers of an entry of the block order: a document or -1, the blocks before it, its length, its start."""
_PAIR = 2  # query heads per key head for which key and value gradients are added in half precision


@dataclass(frozen=True, eq=False)
class DocumentMask(CausalMask):
    """The visible tokens of whole rows, as two int32 lists of numbers.

    First the starts of documents [N + 1], the last of them empty; then one number per token, relative to the start of
    its document [T]; then an entry for each block of each document, the longest first, in which a kernel looks up its
    work. The number of documents is rounded up, so that batches of other sizes need no other kernels.
    """

    sizes: Tensor
    """int64 [3] on the CPU: rows, how many starts there are, tokens of the longest document or more."""
    ends: Tensor | None
    """How many tokens of its document a token sees; None: every row is one document without spans."""
    firsts: Tensor | None
    """The first token that sees a token; None likewise."""


def build_document_mask(spec: MaskSpec) -> DocumentMask:
    """Build the mask of a causal spec with contiguous documents and spans. Nothing is read from the device."""
    counts = spec.counts
    rows, tokens = spec.documents.shape
    total, device = rows * tokens, spec.documents.device
    if counts.whole_rows and counts.longest_span < 2:
        return DocumentMask(spec, torch.tensor([rows, 0, tokens]), None, None)
    index, new_document = torch.arange(total, device=device), mask.find_starts(spec.documents).flatten()
    if counts.whole_rows:
        starts, start, longest = torch.arange(rows + 1, device=device) * tokens, index // tokens * tokens, tokens
    else:
        starts = mask.list_pieces(new_document, torch.ones_like(new_document), mask.round_up(counts.documents))[0]
        start, longest = mask.find_run_bounds(new_document, index)[0], min(mask.round_up(counts.longest), tokens)
    outside = ((spec.spans < 0) | (spec.documents <= 0)).flatten()
    first, last = mask.find_run_bounds(new_document | outside | mask.find_starts(spec.spans).flatten(), index)
    order = _order_blocks(starts, total)
    ends, firsts = (torch.cat([starts, one, order]).int() for one in (last + 1 - start, first - start))
    return DocumentMask(spec, torch.tensor([rows, len(starts), longest]), ends, firsts)


def _order_blocks(starts: Tensor, tokens: int) -> Tensor:
    """Return the entries of all blocks, the longest documents first, as one list."""
    lengths = starts.diff()
    by_length = lengths.argsort(descending=True, stable=True)
    lengths = lengths[by_length]
    blocks = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
    entries = torch.stack([by_length, blocks.cumsum(0) - blocks, lengths, starts[by_length]], dim=1)
    nothing = torch.ones_like(entries[:1])
    nothing[:, 0].fill_(-1)
    count = (tokens + len(lengths) * (BLOCK_SIZE - 1)) // BLOCK_SIZE  # an upper bound that needs no device value
    repeats = torch.cat([blocks, count - blocks.sum(0, keepdim=True)])
    return torch.cat([entries, nothing]).repeat_interleave(repeats, 0, output_size=count).flatten()


def _kernel_options(sizes: Tensor, numbers: Tensor, scale: float) -> dict[str, Any]:
    _, starts, longest = sizes.tolist()
    return {
        "softmax_scale": scale,
        "causal": True,
        "cu_seqlens_q": numbers[:starts],
        "cu_seqlens_k": numbers[:starts],
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


def _backward_on_gpu(
    states: list[Tensor], logsumexp: Tensor, gradients: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    """Write gradients; for two query heads per key head, one query head after the other.

    The kernels would accumulate key and value gradients in a float32 buffer instead, which is cleared before and
    rounded after: as slow as reading all states once more. With more heads, rounding in between would lose too much.
    """
    query, key, value, output, gradient = states
    groups = query.shape[1] // key.shape[1]
    if groups != _PAIR:
        into = dict(zip(_GRADIENTS, gradients, strict=True))
        _load_kernels()._flash_attn_bwd(*states, logsumexp, **into, **options)
        return
    for head in range(groups):
        every = slice(head, None, groups)
        own = (query[:, every], key, value, output[:, every], gradient[:, every], logsumexp[every])
        into = dict(zip(_GRADIENTS, (gradients[0][:, every], *gradients[1:]), strict=True))
        _load_kernels(accumulate=head > 0)._flash_attn_bwd(*own, **into, **options)


def _iterate_documents(
    sizes: Tensor, numbers: Tensor | None, tokens: int, offset: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the slice of each document and its tokens' numbers; without `numbers`, their indices plus `offset`."""
    rows, count, _ = sizes.tolist()
    if numbers is None:
        length = tokens // rows
        for row in range(rows):
            yield slice(row * length, (row + 1) * length), torch.arange(length) + offset
        return
    starts = numbers[:count].tolist()
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        if start < end:
            yield slice(start, end), numbers[count + start : count + end]


def _attend_documents(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    sizes, ends, _, scale = others
    tokens, heads, _ = query.shape
    if query.is_cuda and ends is None:
        states = [one.unflatten(0, (int(sizes[0]), -1)) for one in (query, key, value)]
        found = load_package()._flash_attn_fwd(*states, softmax_scale=scale, causal=True, return_lse=True)
        return found[0].flatten(0, 1), found[1].view(heads, tokens)  # row after row
    if query.is_cuda:
        options = _kernel_options(sizes, ends, scale)
        output, logsumexp = _load_kernels()._flash_attn_fwd(query, key, value, return_lse=True, **options)[:2]
        return output, logsumexp
    output, logsumexp = query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=torch.float32)
    for here, end in _iterate_documents(sizes, ends, tokens, offset=1):
        hidden = torch.arange(len(end)) >= end[:, None]
        output[here], logsumexp[:, here] = backends.attend_plainly(query[here], key[here], value[here], hidden, scale)
    return output, logsumexp


def _attend_documents_backward(*arguments: Any) -> tuple[Tensor, ...]:
    gradient, query, key, value, output, logsumexp, sizes, firsts, scale = arguments
    gradients = backends.empty_gradients(gradient, query, key, value)
    states = [query, key, value, output, gradient]
    if query.is_cuda and firsts is None:
        rows = (int(sizes[0]), -1)
        into = {name: one.unflatten(0, rows) for name, one in zip(_GRADIENTS, gradients, strict=True)}
        states = [one.unflatten(0, rows) for one in states]
        by_row = logsumexp.view(rows[0], query.shape[1], -1)
        load_package()._flash_attn_bwd(*states, by_row, softmax_scale=scale, causal=True, **into)
    elif query.is_cuda:
        _backward_on_gpu(states, logsumexp, gradients, _kernel_options(sizes, firsts, scale))
    else:
        for here, first in _iterate_documents(sizes, firsts, len(query), offset=0):
            hidden = torch.arange(len(first))[:, None] < first
            parts = [one[here] for one in (gradient, query, key, value, output)]
            found = backends.attend_plainly_backward([*parts, logsumexp[:, here]], hidden, scale)
            for whole, part in zip(gradients, found, strict=True):
                whole[here] = part.to(query.dtype)
    return gradients


_operators = backends.define_operators(
    "attend_documents", "Tensor sizes, Tensor? ends, Tensor? firsts", "Tensor sizes, Tensor? firsts", (1, 0),
    _attend_documents, _attend_documents_backward,
)  # fmt: skip
backends.connect_backward(_operators, passed_on=(3, 5))


def attend_documents(query: Tensor, key: Tensor, value: Tensor, documents: DocumentMask, scale: float) -> Tensor:
    """Attend: [B, H, S, D], keys and values with as many heads or fewer -> [B, S, H, D]."""
    arguments = query, key, value, documents.sizes, documents.ends, documents.firsts, scale
    return backends.attend_concatenated(torch.ops.cornstarch.attend_documents, *arguments)


# ------------------------------------------------------------------------------------------------ ranges
# A query sees the keys from one position to another: for rows that are sharded over ranks. The kernel skips blocks
# without visible pairs, and compares positions only in partly visible blocks.


@cache
def _range_rule(has_positions: bool) -> Any:
    """Return the mask function in the language of FlashAttention-4's kernels, for keys in any or in row order."""
    cutlass, cute = importlib.import_module("cutlass"), importlib.import_module("cutlass.cute")
    scalar_to_ssa = importlib.import_module("flash_attn.cute.utils").scalar_to_ssa

    @cute.jit
    def within(row, head, query, key, lengths, given):  # type: ignore[no-untyped-def]
        first = scalar_to_ssa(given[0][row[0], query[0]], cutlass.Int32)
        last = scalar_to_ssa(given[1][row[0], query[0]], cutlass.Int32)
        return (key >= first) & (key <= last)

    @cute.jit
    def within_places(row, head, query, key, lengths, given):  # type: ignore[no-untyped-def]
        first = scalar_to_ssa(given[0][row[0], query[0]], cutlass.Int32)
        last = scalar_to_ssa(given[1][row[0], query[0]], cutlass.Int32)
        place = scalar_to_ssa(given[2][key[0]], cutlass.Int32)
        return (place >= first) & (place <= last)

    return within_places if has_positions else within


def _range_options(
    scale: float, first: Tensor, last: Tensor, positions: Tensor | None, blocks: list[Tensor]
) -> dict[str, Any]:
    sparse = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    return {
        "softmax_scale": scale,
        "mask_mod": _range_rule(positions is not None),
        "aux_tensors": [one for one in (first, last, positions) if one is not None],
        "block_sparse_tensors": sparse(*blocks, block_size=(BLOCK_SIZE, BLOCK_SIZE)),
        "pack_gqa": False,
    }


def _find_hidden(first: Tensor, last: Tensor, positions: Tensor | None, keys: int) -> Tensor:
    position = torch.arange(keys, device=first.device) if positions is None else positions
    return (position < first[..., None]) | (position > last[..., None])  # bool [B, Q, K]


def _attend_range(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    first, last, positions, forward_blocks, _, scale = others
    if query.is_cuda:
        options = _range_options(scale, first, last, positions, forward_blocks)
        output, logsumexp = load_package()._flash_attn_fwd(query, key, value, return_lse=True, **options)[:2]
        return output, logsumexp
    rows = zip(query, key, value, _find_hidden(first, last, positions, key.shape[1]), strict=True)
    outputs, sums = zip(*(backends.attend_plainly(*row, scale) for row in rows), strict=True)
    return torch.stack(outputs), torch.stack(sums)


def _attend_range_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *states, first, last, positions, blocks, scale = arguments
    gradient, query, key, value, output, logsumexp = states
    gradients = backends.empty_gradients(gradient, query, key, value)
    if query.is_cuda:
        options = _range_options(scale, first, last, positions, blocks)
        into = dict(zip(_GRADIENTS, gradients, strict=True))
        load_package()._flash_attn_bwd(query, key, value, output, gradient, logsumexp, **options, **into)
        return gradients
    hidden = _find_hidden(first, last, positions, key.shape[1])
    for row in range(len(query)):
        found = backends.attend_plainly_backward([one[row] for one in states], hidden[row], scale)
        for whole, part in zip(gradients, found, strict=True):
            whole[row] = part.to(query.dtype)
    return gradients


_RANGE = "Tensor first, Tensor last, Tensor? positions"
_range_forward, _range_backward = backends.define_operators(
    "attend_range", f"{_RANGE}, Tensor[] forward_blocks, Tensor[] backward_blocks", f"{_RANGE}, Tensor[] blocks",
    (0, 2, 1), _attend_range, _attend_range_backward,
)  # fmt: skip


def _save_range(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, first, last, positions, _, backward_blocks, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, first, last, positions, *backward_blocks)


def _differentiate_range(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    *states, first, last, positions, one, two, three, four = ctx.saved_tensors
    arguments = (first, last, positions, [one, two, three, four], ctx.scale)
    found = _range_backward(gradient.contiguous(), *states, *arguments)
    return (*found, None, None, None, [None] * 4, [None] * 4, None)


_range_forward.register_autograd(_differentiate_range, setup_context=_save_range)


def attend_range(query: Tensor, key: Tensor, value: Tensor, mask: RangeMask, scale: float) -> Tensor:
    """Attend: [B, H, Q, D], keys and values with as many heads or fewer -> [B, Q, H, D]."""
    states = [one.transpose(1, 2) for one in (query, key, value)]
    blocks, ranges = mask.block_mask, (mask.first, mask.last, mask.positions)
    to_keys = [blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices]
    to_queries = [blocks.q_num_blocks, blocks.q_indices, blocks.full_q_num_blocks, blocks.full_q_indices]
    output: Tensor = torch.ops.cornstarch.attend_range(*states, *ranges, to_keys, to_queries, scale)[0]
    return output


# ------------------------------------------------------------------------------------------------ backends


class FlashDocumentBackend(backends.DocumentBackend):
    """FlashAttention-4 for whole rows."""

    name = "flash"
    mask_type: ClassVar[type] = DocumentMask
    choices = ("auto", "varlen")
    priority = 20
    package = f"flash-attn-4 {' or '.join(SUPPORTED_VERSIONS)}"
    # Forward and backward kernels round some other head sizes up differently; gradients are wrong (seen: 4.0.0b36, 16).
    head_dim_multiple = 32

    def is_installed(self) -> bool:
        return has_flash()

    def is_available(self, device: torch.device, head_dim: int | None) -> bool:
        return head_dim is not None and self.supports_head_dim(head_dim) and has_flash_on(device)

    def build_mask(self, spec: MaskSpec, queries: Tensor | None = None, keys: Tensor | None = None) -> Any:
        return build_document_mask(spec)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        return attend_documents(query, key, value, mask, scale)


class FlashRangeBackend(FlashDocumentBackend):
    """FlashAttention-4 between the tokens of different ranks; head sizes are checked in each layer."""

    name = "flash_range"
    mask_type = RangeMask
    for_sharded_rows = True

    def is_available(self, device: torch.device, head_dim: int | None) -> bool:
        return has_flash_on(device)

    def build_mask(self, spec: MaskSpec, queries: Tensor | None = None, keys: Tensor | None = None) -> Any:
        return spec.build_range_mask(queries=queries, keys=keys)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        return attend_range(query, key, value, mask, scale)


backends.register_attention_backend(FlashDocumentBackend())
backends.register_attention_backend(FlashRangeBackend())
