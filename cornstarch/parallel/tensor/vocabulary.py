"""Embeddings and head cut by words, and a cross-entropy that never has all logits in one place.

ids -> each rank's own rows of the table, zeros for others' words -> add_up
hidden -> copy_in -> logits of each rank's own words -> largest, sum of exponentials and the label's logit: three
                                                        numbers per token are exchanged, instead of all logits
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.tensor.collectives import Group, add_up, copy_in, join
from cornstarch.parallel.tensor.order import Cut, distribute, local_use

_IGNORED = -100


def check_vocabulary(model: Any) -> None:
    """Refuse a model whose embeddings and head cannot be cut by words."""
    kind = type(model)
    why = None
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, nn.Embedding):
        why = "it has no table of embeddings"
    elif head is not None and type(head) is not nn.Linear:
        why = f"its head is a {type(head).__name__}, not a linear layer"
    elif head is not None and "self.loss_function(" not in inspect.getsource(kind.forward):
        why = "it computes its loss itself, from all logits"
    elif head is not None and head.weight.shape[0] != model.config.get_text_config().vocab_size:
        why = f"its head has {head.weight.shape[0]} words, its config {model.config.get_text_config().vocab_size}"
    elif table.max_norm is not None:
        why = "its table of embeddings is normalised while it is read"
    if why is not None:
        raise UnsupportedModelError(f"{kind.__name__} cannot be cut by words (vocabulary=True): {why}.")


def cut_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    """Cut the table of embeddings and the head by words, in place; tied ones stay tied."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is table.weight
    words = table.weight.shape[0]
    kind = type(table)
    # A class of its own (Gemma's scales what is read) calls its parent's forward, which is ours then.
    table.__class__ = (
        VocabularyEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, VocabularyEmbedding), {})
    )
    table.__dict__["group"] = mesh.get_group()
    distribute(table, "weight", Cut(0, (words,), mesh.size()), mesh)
    if head is None:
        return
    words = head.weight.shape[0]
    head.__class__ = VocabularyHead
    head.__dict__.update(group=mesh.get_group(), words=words)
    if tied:
        head._parameters["weight"] = table._parameters["weight"]
    else:
        distribute(head, "weight", Cut(0, (words,), mesh.size()), mesh)
    if head.bias is not None:
        distribute(head, "bias", Cut(0, (words,), mesh.size()), mesh)
    model.loss_function = VocabularyLoss(mesh.get_group(), words, model.loss_function)


def own_words(words: int, group: Group) -> tuple[int, int]:
    """Return the first of a rank's words and the one behind its last; the last ranks may have fewer, or none."""
    step = -(-words // group.size())
    first = min(group.rank() * step, words)
    return first, min(first + step, words)


class VocabularyEmbedding(nn.Embedding):
    """A table of embeddings of which each rank has some of the words."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:
        """Look up words, whoever has them."""
        first, last = own_words(self.num_embeddings, self.group)
        is_own = (input >= first) & (input < last)
        table = local_use(self.weight)
        if first == last:  # a rank without words; the sum keeps its table in the graph
            rows = table.new_zeros((*input.shape, self.embedding_dim)) + table.sum()
        else:
            padding = self.padding_idx
            inside = padding is not None and first <= padding < last
            rows = nn.functional.embedding(
                (input - first).masked_fill(~is_own, 0),
                table,
                padding - first if inside else None,  # type: ignore[operator]
            ).masked_fill(~is_own.unsqueeze(-1), 0)
        return add_up(rows, self.group)


class VocabularyHead(nn.Linear):
    """A head of which each rank has some of the words.

    While a model is trained it gives back the logits of a rank's own words, for `VocabularyLoss`; else all of them.
    """

    group: Group
    words: int

    def forward(self, input: Tensor) -> Tensor:
        """Return logits."""
        logits = nn.functional.linear(copy_in(input, self.group), local_use(self.weight), local_use(self.bias))
        return logits if self.training and torch.is_grad_enabled() else self.joined(logits)

    def joined(self, logits: Tensor) -> Tensor:
        """Return the logits of all words, from those that each rank has."""
        step = -(-self.words // self.group.size())
        padded = nn.functional.pad(logits, (0, step - logits.shape[-1]))
        return join(padded, self.group)[..., : self.words]


class VocabularyLoss:
    """The loss of next words as transformers defines it, from the logits that each rank has."""

    def __init__(self, group: Group, words: int, otherwise: Any) -> None:
        self.group, self.words, self.otherwise = group, words, otherwise

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the mean over words that are trained on, or their sum divided by a number that is given."""
        first, last = own_words(self.words, self.group)
        if logits.shape[-1] == self.words and last - first != self.words:  # all logits are here
            given = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels, **options}
            return self.otherwise(logits, labels, vocab_size, ignore_index=ignore_index, **given)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        losses = vocabulary_cross_entropy(logits, shift_labels, self.group, self.words, ignore_index)
        if num_items_in_batch is None:
            return losses.sum() / (shift_labels != ignore_index).sum()
        return losses.sum() / torch.as_tensor(num_items_in_batch, device=losses.device)


def vocabulary_cross_entropy(
    local_logits: Tensor, labels: Tensor, group: Group, words: int | None = None, ignore_index: int = _IGNORED
) -> Tensor:
    """Return the cross-entropy of each token, of which each rank has the logits of its own words; 0 where ignored.

    Args:
        local_logits: [..., this rank's words], in the order of ranks.
        labels: [...], the number of the right word among all.
        group: The ranks.
        words: How many words there are; left out, all ranks have equally many.
        ignore_index: A label that means none.
    """
    total = words if words is not None else local_logits.shape[-1] * group.size()
    first, last = own_words(total, group)
    assert local_logits.shape[-1] == last - first, (local_logits.shape, first, last)
    return _CrossEntropy.apply(local_logits, labels, group, first, ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, group: Group, first: int, ignore_index: int) -> Tensor:
        count = logits.shape[-1]
        scores = logits.float()
        largest = scores.amax(-1) if count else scores.new_full(scores.shape[:-1], -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scores = scores - largest.unsqueeze(-1)
        is_own = (labels >= first) & (labels < first + count)
        place = (labels - first).masked_fill(~is_own, 0)
        of_label = scores.gather(-1, place.unsqueeze(-1)).squeeze(-1) if count else torch.zeros_like(largest)
        weights = scores.exp_()
        sums = torch.stack([weights.sum(-1), of_label.masked_fill(~is_own, 0)])
        dist.all_reduce(sums, group=group)
        weights /= sums[0].unsqueeze(-1)
        context.save_for_backward(weights, place, is_own, labels != ignore_index)
        context.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(labels == ignore_index, 0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        weights, place, is_own, is_trained = context.saved_tensors
        gradient = weights.clone()
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, place.unsqueeze(-1), -is_own.unsqueeze(-1).to(gradient.dtype))
        gradient *= (gradients[0] * is_trained).unsqueeze(-1)
        return gradient.to(context.dtype), None, None, None, None


__all__ = ["vocabulary_cross_entropy"]
