"""The cross-entropy of a linear head, without the logits of all rows in memory.

`linear_cross_entropy` works on chunks of rows: logits of a chunk -> losses and, in place of the logits, their
gradients -> gradients of the hidden states and of the weight. The backward pass has nothing left to compute, and the
logits of only one chunk exist at a time.

Shape letters: N rows (tokens), H hidden size, V vocabulary (of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cornstarch.compat.compiler import has_triton
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX

# Bytes of the logits of a chunk: enough rows for matrix products at full speed, small compared with a step.
CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
ROW_MULTIPLE = 128  # chunks are multiples of this number of rows


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its logits before the loss: `x * before`, or `tanh(x * before) * after`."""

    before: float = 1.0
    has_tanh: bool = False
    after: float = 1.0

    def scale(self, factor: float) -> LogitTransform:
        if self.has_tanh:
            return LogitTransform(self.before, True, self.after * factor)
        return LogitTransform(self.before * factor)

    def apply(self, logits: Tensor) -> Tensor:
        if self.before != 1.0:
            logits = logits * self.before
        if self.has_tanh:
            logits = torch.tanh(logits) * self.after
        return logits


NO_TRANSFORM = LogitTransform()

RowNormalizer = tuple[Tensor, Tensor]
"""The logarithm of the sum of exponentials of each row, in two parts: the largest logit, and what is added to it."""


class VocabShard(Protocol):
    """The part of the vocabulary on this rank, under tensor parallelism: its first id, and reductions in place."""

    @property
    def first(self) -> int: ...
    def largest(self, values: Tensor) -> None: ...
    def add_up(self, values: Tensor) -> None: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = NO_TRANSFORM,
    vocab_shard: VocabShard | None = None,
    max_trained_rows: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return the sum of the cross-entropies of `hidden @ weight.T + bias`, in float32.

    Args:
        hidden: [..., H].
        weight: [V, H].
        labels: [...] token ids. Rows labelled `ignore_index` are not trained on. They are not computed either if
            `max_trained_rows` is given, or on the CPU, where counting them is free.
        bias: [V].
        transform: Applied to the logits before the loss.
        vocab_shard: The token ids of this rank, if the vocabulary is sharded.
        max_trained_rows: An upper bound of the number of trained rows, if one is known.
        ignore_index: The label of rows that are not trained on.
    """
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device)
    index: Tensor | None = None
    if max_trained_rows is not None:
        size = max(-(-max_trained_rows // ROW_MULTIPLE) * ROW_MULTIPLE, ROW_MULTIPLE)
        if size < len(labels):
            index = torch.nonzero_static(labels != ignore_index, size=size, fill_value=-1).squeeze(-1)
    elif not labels.is_cuda:  # on a GPU, counting them would wait for the device
        index = (labels != ignore_index).nonzero().squeeze(-1)
    if index is not None:
        found = index >= 0
        index = index.clamp(min=0)
        rows, labels = rows.index_select(0, index), labels.index_select(0, index).masked_fill(~found, ignore_index)
    total: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, labels, transform, vocab_shard, ignore_index)
    return total


def split_rows(rows: int, vocabulary: int, bytes_per_logit: int, device: torch.device) -> list[int]:
    """Return the number of rows of each chunk: chunks are equal and within the memory limit."""
    limit = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])
    most = max(limit // max(vocabulary * bytes_per_logit, 1) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    count = max(-(-rows // most), 1)
    size = -(-rows // count)
    size = min(-(-size // ROW_MULTIPLE) * ROW_MULTIPLE, most)
    return [min(size, rows - start) for start in range(0, rows, max(size, 1))]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        transform: LogitTransform,
        vocab_shard: VocabShard | None,
        ignore_index: int,
    ) -> Tensor:
        kind = hidden.device.type
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        needs = ctx.needs_input_grad[:3]
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        # Sums over chunks are kept in float32: in bf16 each addition would round.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] and bias is not None else None
        start = 0
        with torch.autocast(kind, enabled=False):
            for size in split_rows(len(hidden), weight.shape[0], hidden.element_size(), hidden.device):
                rows, chunk_labels = hidden[start : start + size], labels[start : start + size]
                logits = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
                total += compute_losses_and_gradients(
                    logits, chunk_labels, transform, vocab_shard, ignore_index, any(needs)
                ).sum()
                if grad_hidden is not None:
                    torch.mm(logits, weight, out=grad_hidden[start : start + size])
                if grad_weight is not None:
                    _add_product(grad_weight, logits.t(), rows)
                if grad_bias is not None:
                    grad_bias += logits.sum(0, dtype=torch.float32)
                start += size
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = gradients
        scaled = [
            None if one is None else _scale(one, factor, dtype)
            for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def compute_losses_and_gradients(
    logits: Tensor, labels: Tensor, transform: LogitTransform, vocab_shard: VocabShard | None, ignore_index: int,
    needs_gradients: bool,
) -> Tensor:  # fmt: skip
    """Return the loss of each row, and replace the logits [N, V] by the gradients of the sum of the losses.

    The gradients are those of the logits before `transform`.
    """
    first = 0 if vocab_shard is None else vocab_shard.first
    largest, total, picked = _row_statistics(logits, labels, transform, first)
    if vocab_shard is not None:
        local = largest.clone()
        vocab_shard.largest(largest)
        # A rank without token ids has a maximum of -inf; its sum must not become nan.
        total = torch.where(local == -torch.inf, 0, total * (local - largest).exp())
        both = torch.stack([total, picked])
        vocab_shard.add_up(both)
        total, picked = both[0], both[1]
    log_total = total.log()  # separate from the maximum: their sum would be rounded where logits are large
    if needs_gradients:
        _replace_by_gradients(logits, labels, (largest, log_total), transform, first, ignore_index)
    return (largest - picked + log_total).masked_fill(labels == ignore_index, 0)


# On a GPU these three are Triton kernels, which read the logits once.


def _get_triton_kernels(values: Tensor) -> Any:
    if not (values.is_cuda and values.numel() > 0 and has_triton()):
        return None
    from cornstarch.kernels import triton_kernels

    return triton_kernels


def _row_statistics(
    logits: Tensor, labels: Tensor, transform: LogitTransform, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per row, the maximum, the sum of exponentials relative to it, and the label's logit (0: not here)."""
    if (kernels := _get_triton_kernels(logits)) is not None:
        return kernels.compute_row_statistics(logits, labels, transform, first)
    scores = transform.apply(logits.float())
    if not scores.shape[1]:
        zeros = scores.new_zeros(len(scores))
        return zeros - torch.inf, zeros, zeros.clone()
    is_local, column = _find_labels(scores, labels, first)
    largest = scores.amax(1)
    picked = scores.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~is_local, 0)
    return largest, (scores - largest.unsqueeze(1)).exp_().sum(1), picked


def _replace_by_gradients(
    logits: Tensor, labels: Tensor, normalizer: RowNormalizer, transform: LogitTransform, first: int, ignored: int
) -> None:
    if (kernels := _get_triton_kernels(logits)) is not None:
        return kernels.replace_by_gradients(logits, labels, normalizer, transform, first, ignored)
    if not logits.shape[1]:
        return
    scores = transform.apply(logits.float())
    slope, tanh_slope = transform.before, None
    if transform.has_tanh:
        tanh_slope = 1 - (scores / transform.after) ** 2
        slope = transform.before * transform.after
    largest, log_total = normalizer
    gradient = scores.sub_(largest.unsqueeze(1)).sub_(log_total.unsqueeze(1)).exp_()
    is_local, column = _find_labels(logits, labels, first)
    gradient.scatter_add_(1, column.unsqueeze(1), -is_local.unsqueeze(1).to(gradient.dtype))
    gradient *= ((labels != ignored) * slope).unsqueeze(1)
    if tanh_slope is not None:
        gradient *= tanh_slope
    if gradient is not logits:
        logits.copy_(gradient)


def _find_labels(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
    is_local = (labels >= first) & (labels < first + logits.shape[1])
    return is_local, (labels - first).masked_fill(~is_local, 0)


def _scale(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if (kernels := _get_triton_kernels(source)) is not None:
        return kernels.scale(source, factor, dtype)
    return torch.mul(source, factor.float(), out=torch.empty_like(source, dtype=dtype))
