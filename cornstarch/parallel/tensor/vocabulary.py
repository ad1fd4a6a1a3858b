"""Embedding table and head sharded by words, and a cross-entropy that never has all logits in one place.

ids -> each rank's own rows of the table, zeros for other words -> reduce_from_ranks
hidden -> copy_to_ranks -> logits of each rank's own words -> largest, sum of exponentials and the label's logit: three
                           numbers per token are exchanged, instead of all logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import UnsupportedModelError
from cornstarch.kernels.cross_entropy import NO_TRANSFORM, compute_losses_and_gradients
from cornstarch.kernels.fused_loss import FusedCausalLMLoss, LazyLogits, has_inline_loss
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.parallel.collective_ops import RankGroup, copy_to_ranks, gather_from_ranks, reduce_from_ranks
from cornstarch.parallel.tensor.shard_boxes import ShardSpec, shard_interval, shard_parameter, to_local_parameter


def check_vocabulary(model: Any) -> None:
    """Refuse a model whose embedding table and head cannot be sharded by words."""
    kind, why = type(model), None
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding):
        why = "it has no table of embeddings"
    elif head is not None and type(head) is not nn.Linear:
        why = f"its head is a {type(head).__name__}, not a linear layer"
    elif head is not None and has_inline_loss(kind):
        why = "it computes its loss itself, from all logits"
    elif head is not None and head.weight.shape[0] != model.config.get_text_config().vocab_size:
        why = f"its head has {head.weight.shape[0]} words, its config {model.config.get_text_config().vocab_size}"
    elif table.max_norm is not None:
        why = "its table of embeddings is normalised while it is read"
    if why is not None:
        raise UnsupportedModelError(f"{kind.__name__} cannot be cut by words (vocabulary=True): {why}.")


def shard_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    """Shard the embedding table and the head by words, in place; tied ones stay tied."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    words = table.weight.shape[0]
    kind = type(table)
    # A subclass (Gemma's scales the embeddings) calls its parent's forward, which is ours then.
    subclass = type(kind.__name__, (kind, VocabularyEmbedding), {}) if kind is not nn.Embedding else VocabularyEmbedding
    table.__class__ = subclass
    table.__dict__["group"] = RankGroup.of(mesh.get_group())
    shard_parameter(table, "weight", ShardSpec(0, (words,), mesh.size()), mesh)
    if head is None:
        return
    words = head.weight.shape[0]
    head.__class__ = VocabularyHead
    head.__dict__.update(group=RankGroup.of(mesh.get_group()), words=words)
    if tied:
        head._parameters["weight"] = table._parameters["weight"]
    else:
        shard_parameter(head, "weight", ShardSpec(0, (words,), mesh.size()), mesh)
    if head.bias is not None:
        shard_parameter(head, "bias", ShardSpec(0, (words,), mesh.size()), mesh)
    if not isinstance(model.loss_function, FusedCausalLMLoss):
        model.loss_function = FusedCausalLMLoss(model.loss_function)


def local_vocabulary(words: int, group: RankGroup | dist.ProcessGroup) -> tuple[int, int]:
    """Return the range of a rank's words; the last ranks may have fewer, or none."""
    return shard_interval(words, group.size(), group.rank())


class VocabularyEmbedding(nn.Embedding):
    """An embedding table of which each rank has some of the words."""

    group: RankGroup

    def forward(self, input: Tensor) -> Tensor:
        first, last = local_vocabulary(self.num_embeddings, self.group)
        is_own = (input >= first) & (input < last)
        table = to_local_parameter(self.weight)
        if first == last:  # a rank without words; the sum keeps its table in the graph
            rows = table.new_zeros((*input.shape, self.embedding_dim)) + table.sum()
        else:
            padding = self.padding_idx
            inside = padding is not None and first <= padding < last
            index = (input - first).masked_fill(~is_own, 0)
            rows = nn.functional.embedding(index, table, padding - first if inside else None)  # type: ignore[operator]
            rows = rows.masked_fill(~is_own.unsqueeze(-1), 0)
        return reduce_from_ranks(rows, self.group)


@dataclass(frozen=True)
class VocabularyShard:
    """The words of one rank of a group, with the reductions that a cross-entropy over all words needs."""

    group: dist.ProcessGroup
    first: int

    def largest(self, values: Tensor) -> None:
        """Replace values by the largest of all ranks."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def add_up(self, values: Tensor) -> None:
        """Replace values by the sums over all ranks."""
        dist.all_reduce(values, group=self.group)


class VocabularyHead(nn.Linear):
    """A head of which each rank has some words; in training it returns logits of those, for `FusedCausalLMLoss`."""

    group: RankGroup
    words: int

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = to_local_parameter(self.weight), to_local_parameter(self.bias)
        input = copy_to_ranks(input, self.group)

        def logits(hidden: Tensor) -> Tensor:
            own = nn.functional.linear(hidden, weight, bias)
            padded = nn.functional.pad(own, (0, -(-self.words // self.group.size()) - own.shape[-1]))
            return gather_from_ranks(padded, self.group)[..., : self.words]

        # A frozen model is not in train mode, and gradients flow through it all the same.
        if not (torch.is_grad_enabled() and (self.training or input.requires_grad)):
            return logits(input)
        words = VocabularyShard(self.group.process_group, local_vocabulary(self.words, self.group)[0])
        return LazyLogits(input, weight, bias, logits, words)  # type: ignore[return-value]


def vocabulary_cross_entropy(
    local_logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup,
    words: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return the cross-entropy of each token, given the logits of each rank's own words; 0 where ignored.

    Args:
        local_logits: [..., this rank's words], in the order of ranks.
        labels: [...], the index of the target among all words.
        group: The ranks.
        words: The number of all words. Default: all ranks have equally many.
        ignore_index: The label of tokens without a target.
    """
    total = words if words is not None else local_logits.shape[-1] * group.size()
    first, last = local_vocabulary(total, group)
    assert local_logits.shape[-1] == last - first, (local_logits.shape, first, last)
    return _CrossEntropy.apply(local_logits, labels, VocabularyShard(group, first), ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, words: VocabularyShard, ignore_index: int) -> Tensor:
        rows = logits.reshape(labels.numel(), logits.shape[-1]).clone()
        losses = compute_losses_and_gradients(rows, labels.flatten(), NO_TRANSFORM, words, ignore_index, True)
        context.save_for_backward(rows.view_as(logits))
        return losses.view(labels.shape)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (of_logits,) = context.saved_tensors
        return of_logits * gradients[0].unsqueeze(-1).to(of_logits.dtype), None, None, None
