"""The causal language modeling loss without the logits of all tokens in memory, for any model of transformers.

`fuse_head_with_loss` changes a model in place. While the model computes a loss, its head returns `LazyLogits`: hidden
states that record what the model's own forward does to the logits (scaling, soft-capping). The loss function then
computes the cross-entropy from the hidden states and the head's weight. Any other use of the logits computes them.
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

from cornstarch.kernels.cross_entropy import NO_TRANSFORM, LogitTransform, VocabShard, linear_cross_entropy
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX

_max_trained_rows: ContextVar[int | None] = ContextVar("cornstarch_trained_rows", default=None)


@contextmanager
def limit_trained_rows(count: int | None) -> Iterator[None]:
    """Declare an upper bound of the number of trained tokens, for losses computed within this block.

    The head then skips all other tokens, without asking the device how many there are. Padding, images and prompts are
    often most of a batch.
    """
    token = _max_trained_rows.set(count)
    try:
        yield
    finally:
        _max_trained_rows.reset(token)


class LazyLogits:
    """Logits that are computed on first use; torch functions accept them as the tensor that they will be."""

    # No dataclass: FSDP1 takes dataclass outputs apart, and hooks the tensors in them.

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Callable[[Tensor], Tensor],
        vocab_shard: VocabShard | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias, self.vocab_shard, self._head = hidden, weight, bias, vocab_shard, head
        self.transform: LogitTransform = NO_TRANSFORM
        self._dtype: torch.dtype | None = None
        self._logits: Tensor | None = None

    def materialize(self) -> Tensor:
        if self._logits is None:
            logits = self.transform.apply(self._head(self.hidden))
            self._logits = logits if self._dtype is None else logits.to(self._dtype)
        return self._logits

    def _replace(self, transform: LogitTransform | None = None, dtype: torch.dtype | None = None) -> LazyLogits:
        logits = LazyLogits(self.hidden, self.weight, self.bias, self._head, self.vocab_shard)
        logits.transform, logits._dtype = transform or self.transform, dtype or self._dtype
        return logits

    def float(self) -> LazyLogits:
        """Return the logits in float32, the precision in which their loss is computed anyway."""
        return self._replace(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits in another precision, still lazy, or on another device."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            return self._replace(dtype=args[0])
        return self.materialize().to(*args, **kwargs)

    def tanh(self) -> Any:
        """Return the hyperbolic tangent, which models use to cap logits; a second one cannot stay lazy."""
        if self.transform.has_tanh:
            return self.materialize().tanh()
        return self._replace(LogitTransform(self.transform.before, True))

    def __mul__(self, other: Any) -> Any:
        if _is_number(other):
            return self._replace(self.transform.scale(other))
        return self.materialize() * _materialize(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if _is_number(other) and other:
            return self._replace(self.transform.scale(1.0 / other))
        return self.materialize() / _materialize(other)

    def __getitem__(self, place: Any) -> Tensor:
        return self.materialize()[place]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep `torch.tanh` lazy; compute the logits for every other function."""
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return func(*_materialize(args), **{key: _materialize(value) for key, value in (kwargs or {}).items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _materialize(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.materialize()
    if isinstance(value, tuple | list):
        return type(value)(_materialize(item) for item in value)
    return value


class FusedCausalLMLoss:
    """transformers' causal language modeling loss, computed from `LazyLogits` if it is given them."""

    def __init__(self, unfused: Any) -> None:
        self.unfused = unfused

    def __call__(
        self,
        logits: Tensor | LazyLogits,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the mean over trained tokens, or their sum divided by `num_items_in_batch`."""
        if not isinstance(logits, LazyLogits):
            given = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels, **options}
            return self.unfused(logits, labels, vocab_size, ignore_index=ignore_index, **given)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        total = linear_cross_entropy(
            logits.hidden,
            logits.weight,
            shift_labels,
            bias=logits.bias,
            transform=logits.transform,
            vocab_shard=logits.vocab_shard,
            max_trained_rows=_max_trained_rows.get(),
            ignore_index=ignore_index,
        )
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return total / torch.as_tensor(count, device=total.device)


class LazyLMHead(nn.Linear):
    """A language modeling head that returns `LazyLogits` while its model computes a loss."""

    computes_loss = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.computes_loss:
            return super().forward(input)
        # Bind the weights now: FSDP1 replaces them by a shard after the model's forward.
        head = partial(nn.functional.linear, weight=self.weight, bias=self.bias)
        return LazyLogits(input, self.weight, self.bias, head)  # type: ignore[return-value]


def fuse_head_with_loss(model: nn.Module) -> str | None:
    """Let a causal language model compute its loss without the logits of all tokens; return why not, if it cannot.

    The model keeps its class, forward and parameters.
    """
    causal: Any = model
    name = type(model).__name__
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    if isinstance(head, nn.Linear) and isinstance(getattr(causal, "loss_function", None), FusedCausalLMLoss):
        return None
    if type(head) is not nn.Linear:
        kind = "no head" if head is None else f"a {type(head).__name__} as its head, not a linear layer"
        return f"{name} has {kind}"
    if getattr(causal, "loss_function", None) is not ForCausalLMLoss:
        return f"{name} has a loss of its own"
    if has_inline_loss(type(model)):
        return f"{name} computes its loss itself, from all logits"
    head.__class__ = LazyLMHead
    causal.loss_function = FusedCausalLMLoss(causal.loss_function)
    causal.register_forward_pre_hook(_start_loss, with_kwargs=True)
    causal.register_forward_hook(_end_loss, always_call=True)
    return None


def has_head(model: nn.Module) -> bool:
    """Whether a model computes logits of a vocabulary."""
    get: Any = getattr(model, "get_output_embeddings", None)
    return get is not None and get() is not None


def has_inline_loss(kind: type[nn.Module]) -> bool:
    """Whether the forward of a transformers model computes its loss inline instead of calling its loss function."""
    forward = getattr(kind, "original_forward", kind.forward)  # of models that were taken apart
    return "self.loss_function(" not in inspect.getsource(forward)


def _start_loss(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model.get_output_embeddings().computes_loss = kwargs.get("labels") is not None


def _end_loss(model: Any, args: tuple[Any, ...], output: Any) -> None:
    model.get_output_embeddings().computes_loss = False
