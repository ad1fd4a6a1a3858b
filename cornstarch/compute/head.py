"""How any causal language model comes to compute its loss without all logits, with no code of its own.

While a model computes a loss, its head hands on `LazyLogits`: hidden states that remember what would be done to them.
The model's own forward may scale or cap them; its loss function then takes what they remember. Whoever wants to see the
logits themselves gets them: they are computed at the first other use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from cornstarch.compute.cross_entropy import PLAIN, LogitShape, Words, linear_cross_entropy
from cornstarch.models.multimodal_language_model.facts import IGNORED

_at_most: ContextVar[int | None] = ContextVar("cornstarch_trained_rows", default=None)


@contextmanager
def trained_rows_at_most(count: int | None) -> Iterator[None]:
    """Say, for losses computed within this block, how many tokens are trained on at most.

    The head then leaves out the others, and no device has to be asked how many there are. Padding, images and prompts
    are often most of a batch.
    """
    token = _at_most.set(count)
    try:
        yield
    finally:
        _at_most.reset(token)


class LazyLogits:
    """Logits that are computed when somebody looks at them; torch's functions take them as the tensor they will be.

    Args:
        hidden: What they are made of.
        weight: The head's: all words, or this rank's.
        bias: The same.
        head: Makes logits of hidden states.
        words: Which words this rank has, where ranks share them.
        form: What has been done to them since.
        dtype: The precision that was asked for.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Callable[[Tensor], Tensor],
        words: Words | None = None,
        form: LogitShape = PLAIN,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self._head, self.words, self.form, self._dtype = head, words, form, dtype
        self._made: Tensor | None = None

    def made(self) -> Tensor:
        """Return the logits themselves."""
        if self._made is None:
            logits = self.form.apply(self._head(self.hidden))
            self._made = logits if self._dtype is None else logits.to(self._dtype)
        return self._made

    def _changed(self, form: LogitShape | None = None, dtype: torch.dtype | None = None) -> LazyLogits:
        return LazyLogits(
            self.hidden, self.weight, self.bias, self._head, self.words, form or self.form, dtype or self._dtype
        )

    def float(self) -> LazyLogits:
        """Return them in float32: in which their loss is computed anyway."""
        return self._changed(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return them in another precision, or wherever it may be."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            return self._changed(dtype=args[0])
        return self.made().to(*args, **kwargs)

    def tanh(self) -> Any:
        """Return them bent, as models do that cap them."""
        form = self.form.bent()
        return self.made().tanh() if form is None else self._changed(form)

    def __mul__(self, other: Any) -> Any:
        """Return them scaled."""
        return self._changed(self.form.scaled(other)) if _is_number(other) else self.made() * _made(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        """Return them scaled."""
        if _is_number(other) and other:
            return self._changed(self.form.scaled(1.0 / other))
        return self.made() / _made(other)

    def __getitem__(self, place: Any) -> Tensor:
        """Return some of them."""
        return self.made()[place]

    def __getattr__(self, name: str) -> Any:
        """Return whatever else a tensor has."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.made(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Bend them if that is asked for; else compute them."""
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return func(*_made(args), **{key: _made(value) for key, value in (kwargs or {}).items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _made(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.made()
    if isinstance(value, tuple | list):
        return type(value)(_made(one) for one in value)
    return value


class HeadLoss:
    """The loss of next words as transformers defines it, from `LazyLogits` where it is given them."""

    def __init__(self, otherwise: Any) -> None:
        self.otherwise = otherwise

    def __call__(
        self,
        logits: Tensor | LazyLogits,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the mean over words that are trained on, or their sum divided by a number that is given."""
        if not isinstance(logits, LazyLogits):
            given = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels, **options}
            return self.otherwise(logits, labels, vocab_size, ignore_index=ignore_index, **given)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        total = linear_cross_entropy(
            logits.hidden,
            logits.weight,
            shift_labels,
            bias=logits.bias,
            shape=logits.form,
            words=logits.words,
            at_most=_at_most.get(),
            ignore_index=ignore_index,
        )
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return total / torch.as_tensor(count, device=total.device)


def fuse_head_with_loss(model: nn.Module) -> str | None:
    """Let a causal language model compute its loss without all logits; return why not, if it cannot.

    The model's class, forward and parameters stay what they are.
    """
    causal: Any = model
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    if isinstance(head, nn.Linear) and isinstance(getattr(causal, "loss_function", None), HeadLoss):
        return None
    if type(head) is not nn.Linear:
        kind = "no head" if head is None else f"a {type(head).__name__} as its head, not a linear layer"
        return f"{type(model).__name__} has {kind}"
    if getattr(causal, "loss_function", None) is not ForCausalLMLoss:
        return f"{type(model).__name__} has a loss of its own"
    if computes_loss_itself(type(model)):
        return f"{type(model).__name__} computes its loss itself, from all logits"
    head.__class__ = LazyHead
    causal.loss_function = HeadLoss(causal.loss_function)
    causal.register_forward_pre_hook(_note_labels, with_kwargs=True)
    causal.register_forward_hook(_forget_labels, always_call=True)
    return None


def computes_loss_itself(kind: type[nn.Module]) -> bool:
    """Whether the forward of a transformers model has its loss written out, instead of asking its loss function."""
    return "self.loss_function(" not in inspect.getsource(kind.forward)


class LazyHead(nn.Linear):
    """A head that hands on `LazyLogits` while its model computes a loss."""

    computes_loss = False

    def forward(self, input: Tensor) -> Tensor:
        """Return logits, now or later."""
        if not self.computes_loss:
            return super().forward(input)
        # The weights of now: after the model's forward FSDP1 has put a shard in their place.
        logits = partial(nn.functional.linear, weight=self.weight, bias=self.bias)
        return LazyLogits(input, self.weight, self.bias, logits)  # type: ignore[return-value]


def _note_labels(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model.get_output_embeddings().computes_loss = kwargs.get("labels") is not None


def _forget_labels(model: Any, args: tuple[Any, ...], output: Any) -> None:
    model.get_output_embeddings().computes_loss = False


__all__ = ["HeadLoss", "LazyHead", "LazyLogits", "computes_loss_itself", "fuse_head_with_loss", "trained_rows_at_most"]
