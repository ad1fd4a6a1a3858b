"""Attention among the tokens of each item, where a row holds many: patches of images, windows, chunks of sounds.

Encoders of items of any size (Qwen2-VL and its heirs, Pixtral) lay the tokens of all items end to end and attend within
each. With most attention implementations transformers loops over the items, or masks the pairs of different ones; with
an implementation whose name contains "flash" it makes one call and gives the bounds of the items (`cu_seq_lens_q`).
`ITEM_IMPLEMENTATION` is such a name. All items are then one operator, which compiles into the graph of its layer.

On a GPU the operator runs cuDNN's kernels, or torch's FlashAttention or memory-efficient kernels; on a CPU items of
equal length are one call of torch's kernel. Each computes the same logsumexp, so that any backward pass fits.

Shape letters: T tokens of all items, N items, H heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from cornstarch.attention import backends, cudnn_attention
from cornstarch.attention.interface import attention_forward, build_mask
from cornstarch.attention.mask import round_up
from cornstarch.compat import attention_kernels, count_changes
from cornstarch.errors import UnsupportedModelError

ITEM_IMPLEMENTATION = "cornstarch_flash"
"""transformers gives bounds of items to implementations whose name contains "flash"."""

Made = TypeVar("Made")
_FLASH_MAX_HEAD_DIM = 256
_CUDNN_MAX_HEAD_DIM = 128
_SHORT = 128  # tokens of items, windows of images for example, up to which FlashAttention is faster than cuDNN


class ItemKernel(ABC):
    """Attention in which every token sees all tokens of its item, and its backward pass."""

    @abstractmethod
    def forward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output [T, H, D] and the logsumexp, float32 [T, H], of query, key and value [T, H, D].

        `bounds`: int32 [N + 1], the first token of each item and the end; `longest`: tokens of the longest or more.
        """

    @abstractmethod
    def backward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, given `backends.BACKWARD_STATES`."""


class CudnnItems(ItemKernel):
    """cuDNN: the fastest on Hopper and later, in half precision."""

    def forward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        query, key, value = states
        return cudnn_attention.CudnnKernel()(query, key, value, _batch_items(bounds, longest, scale))

    def backward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
        return cudnn_attention.CudnnKernel().backward(states, _batch_items(bounds, longest, scale))


def _batch_items(bounds: Tensor, longest: int, scale: float) -> cudnn_attention.PieceBatch:
    """Return one call of cuDNN's kernel; sizes are rounded up, because each makes a plan of its own."""
    pieces = _remember(bounds, "pieces", lambda: _list_items(bounds.long()))
    return cudnn_attention.PieceBatch(pieces, 1, round_up(longest), scale, looks_ahead=False, sees_all=True)


def _list_items(bounds: Tensor) -> Tensor:
    count = bounds.numel() - 1
    lengths = nn.functional.pad(bounds.diff(), (0, round_up(count) + 1 - count))
    starts = torch.cat([bounds, bounds[-1:].expand(round_up(count) - count)])
    return cudnn_attention.sort_by_length(torch.stack([starts, lengths]))


class FlashItems(ItemKernel):
    """torch's FlashAttention: half precision, Ampere and later."""

    def forward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        output, logsumexp = attention_kernels.attend_varlen_flash(states, bounds, longest, scale)
        return output, logsumexp.transpose(0, 1).contiguous()

    def backward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
        *others, logsumexp = states
        states = (*others, logsumexp.transpose(0, 1).contiguous())
        return attention_kernels.attend_varlen_flash_backward(states, bounds, longest, scale)


class EfficientItems(ItemKernel):
    """torch's memory-efficient attention: also in float32, and on older GPUs."""

    def forward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        output, by_item = attention_kernels.attend_varlen_efficient(states, bounds, longest, scale)
        item, place = _locate_tokens(bounds, len(output))
        return output, by_item[item, :, place]

    def backward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
        *others, logsumexp = states
        item, place = _locate_tokens(bounds, len(logsumexp))
        sizes = (bounds.numel() - 1, logsumexp.shape[1], -(-longest // 32) * 32)  # as the forward pass returns it
        by_item = torch.full(sizes, torch.inf, device=logsumexp.device)
        by_item[item, :, place] = logsumexp
        return attention_kernels.attend_varlen_efficient_backward((*others, by_item), bounds, longest, scale)


def _locate_tokens(bounds: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the item of each token, and its place there."""
    index = torch.arange(tokens, device=bounds.device, dtype=bounds.dtype)
    item = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    return item, (index - bounds[item]).long()


class ItemsByLength(ItemKernel):
    """Items of equal length together, on a CPU by torch's kernel, elsewhere by the plain formula.

    It reads the lengths, so a GPU only runs it where no other kernel fits.
    """

    def forward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        query = states[0]
        output, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for rows in _iterate_lengths(bounds):
            if query.device.type == "cpu":
                given = [one[rows].transpose(1, 2) for one in states]
                found, sums = attention_kernels.attend_on_cpu(given, scale)
                output[rows], logsumexp[rows] = found.transpose(1, 2), sums.transpose(1, 2).float()
                continue
            for row in rows:
                query, key, value = (one[row] for one in states)
                found, sums = backends.attend_plainly(query, key, value, _hide_nothing(row), scale)
                output[row], logsumexp[row] = found, sums.transpose(0, 1)
        return output, logsumexp

    def backward(self, states: Sequence[Tensor], bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
        gradients = tuple(torch.empty_like(one) for one in states[1:4])
        for rows in _iterate_lengths(bounds):
            if states[0].device.type == "cpu":
                given = [one[rows].transpose(1, 2) for one in states]
                found = [one.transpose(1, 2) for one in attention_kernels.attend_on_cpu_backward(given, scale)]
                for whole, part in zip(gradients, found, strict=True):
                    whole[rows] = part
                continue
            for row in rows:
                *given, sums = (one[row] for one in states)
                plain = backends.attend_plainly_backward((*given, sums.transpose(0, 1)), _hide_nothing(row), scale)
                for whole, part in zip(gradients, plain, strict=True):
                    whole[row] = part.to(whole.dtype)
        return gradients


def _hide_nothing(row: Tensor) -> Tensor:
    return torch.zeros(len(row), len(row), dtype=torch.bool, device=row.device)


def _iterate_lengths(bounds: Tensor) -> Iterator[Tensor]:
    """Yield for each length of items the tokens of all items of that length: int64 [items, length]."""
    starts, lengths = bounds[:-1].long(), bounds.diff()
    for length in lengths.unique().tolist():
        if length:
            yield starts[lengths == length][:, None] + torch.arange(length, device=bounds.device)


def select_item_kernel(query: Tensor, longest: int) -> ItemKernel:
    """Return the fastest kernel for states [T, H, D] of items of some length that `use_attention` allows."""
    head_dim, is_half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    if not query.is_cuda:
        return ItemsByLength()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if is_half and head_dim % 8 == 0:
        has_flash = torch.cuda.get_device_capability(query.device) >= (8, 0) and head_dim <= _FLASH_MAX_HEAD_DIM
        prefers_flash = has_flash and longest <= _SHORT and backends.get_attention_choice() != "cudnn"
        if not is_deterministic and not prefers_flash and _has_cudnn_kernels(head_dim, query.device):
            return CudnnItems()
        if has_flash:
            return FlashItems()  # deterministic where torch is asked for it
    if head_dim % (8 if is_half else 4) == 0 and not is_deterministic:
        return EfficientItems()
    return ItemsByLength()


def _has_cudnn_kernels(head_dim: int, device: torch.device) -> bool:
    if backends.get_attention_choice() not in ("auto", "varlen", "cudnn") or head_dim > _CUDNN_MAX_HEAD_DIM:
        return False
    if torch.cuda.get_device_capability(device) < (9, 0) or not cudnn_attention.has_cudnn():
        return False
    return cudnn_attention.can_build_plans(head_dim, device, ((None, False),))


# ------------------------------------------------------------------------------------------------ operator


def _attend(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    bounds, longest, scale = others
    states = [one.contiguous() for one in (query, key, value)]
    bounds, longest = _read_bounds(bounds, longest)
    return select_item_kernel(query, longest).forward(states, bounds, longest, scale)


def _attend_backward(*arguments: Any) -> tuple[Tensor, ...]:
    *states, bounds, longest, scale = arguments
    states = [one.contiguous() for one in states]
    bounds, longest = _read_bounds(bounds, longest)
    return select_item_kernel(states[1], longest).backward(states, bounds, longest, scale)


@dataclass(frozen=True, eq=False)
class KnownBounds:
    """Bounds that were seen, and what was made of them. While they are held, no others are at their address."""

    bounds: Tensor
    changes: int | None
    made: dict[str, Any] = field(default_factory=dict)

    def is_of(self, bounds: Tensor) -> bool:
        own = self.bounds
        is_there = own.device == bounds.device and own.data_ptr() == bounds.data_ptr()
        is_alike = (own.dtype, own.shape, own.stride()) == (bounds.dtype, bounds.shape, bounds.stride())
        return is_there and is_alike and self.changes == count_changes(own) == count_changes(bounds)


_KEPT = 4  # bounds: of items and of windows, in this forward pass and in one that is recomputed
_known: tuple[KnownBounds, ...] = ()  # replaced, never changed: forward and backward passes run in different threads


def _remember(bounds: Tensor, name: str, make: Callable[[], Made]) -> Made:
    """Return what was made of these bounds before: all layers of an encoder are given the same."""
    global _known
    known = next((one for one in _known if one.is_of(bounds)), None)
    if known is None:
        known = KnownBounds(bounds, count_changes(bounds))
        _known = (*_known[1 - _KEPT :], known)
    if name not in known.made:
        known.made[name] = make()
    made: Made = known.made[name]
    return made


def _read_bounds(bounds: Tensor, longest: int) -> tuple[Tensor, int]:
    """Return bounds as kernels take them, and the length of the longest item, which 0 stands for if it is unknown."""
    longest = longest or _remember(bounds, "longest", lambda: int(bounds.diff().max()))  # waits for a GPU
    return _remember(bounds, "int32", lambda: bounds.to(torch.int32).contiguous()), longest


_MASK = "Tensor bounds, SymInt longest"
_operators = backends.define_operators("attend_items", _MASK, _MASK, (0, 1), _attend, _attend_backward)
backends.connect_backward(_operators, passed_on=(3,), numbers=(4,))


def attend_items(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """Attend within items: states [T, H, D] -> [T, H, D]; `longest`: tokens of the longest item, 0 if unknown."""
    output: Tensor = torch.ops.cornstarch.attend_items(query, key, value, bounds, longest, scale)[0]
    return output


# ------------------------------------------------------------------------------------------------ transformers


def item_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None, max_length_k: int | Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend within the items of a row; without bounds as `IMPLEMENTATION` does. [1, H, T, D] -> [1, T, H, D]."""
    if cu_seq_lens_q is None:
        return attention_forward(module, query, key, value, attention_mask, **options)
    _check_layer(module, query, key, attention_mask, options)
    options = {**backends.DEFAULT_OPTIONS, **options}
    if options["dropout"] or options["softcap"] is not None or options["s_aux"] is not None:
        item = _locate_tokens(cu_seq_lens_q, query.shape[2])[0]
        options["is_causal"] = False
        return backends.run_attention(module, query, key, value, (item[:, None] == item)[None, None], **options)
    scale = query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    # Some versions of transformers give a tensor, which no kernel takes without waiting for the device.
    longest = 0 if max_length_q is None or isinstance(max_length_q, Tensor) else max_length_q
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    return attend_items(query, key, value, cu_seq_lens_q, longest, scale)[None], None


def _check_layer(module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
    name, is_causal = type(module).__name__, options.get("is_causal")
    if is_causal or (is_causal is None and getattr(module, "is_causal", False)):
        raise UnsupportedModelError(f"{name} attends causally within its items.")
    if mask is not None or query.shape[0] != 1 or options.get("sliding_window") is not None:
        raise UnsupportedModelError(f"{name} restricts the tokens that its items see by more than their bounds.")
    if query.shape[2] != key.shape[2] or query.shape[-1] != key.shape[-1]:
        raise UnsupportedModelError(f"{name} has {query.shape[2]} queries of its items, and {key.shape[2]} keys.")


AttentionInterface.register(ITEM_IMPLEMENTATION, item_attention_forward)
AttentionMaskInterface.register(ITEM_IMPLEMENTATION, build_mask)
