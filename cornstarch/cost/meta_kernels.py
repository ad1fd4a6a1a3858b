"""Kernels that shapes and the meta device lack: attention, grouped products, the fused loss, and autocast.

Those of the meta device save for the backward pass what the real kernels save. Attention on shapes knows its mask as a
`MaskPattern`, recognized from the mask function of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from cornstarch.attention.mask import MaskFunction, MaskPattern
from cornstarch.kernels.fused_loss import LazyLogits, fuse_head_with_loss
from cornstarch.models.multimodal_language_model.shape_inference import ShapeTensor

if TYPE_CHECKING:
    from cornstarch.cost.tracer import Tracer

_IMPLEMENTATION = "cornstarch_shapes"
# What autocast computes in half precision, and in float32; torch's own autocast does nothing on the meta device.
_HALF = {
    F.linear, F.bilinear, F.multi_head_attention_forward, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm,
    Tensor.bmm, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addbmm,
    torch.einsum, torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
}  # fmt: skip
_FULL = {
    F.layer_norm, torch.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax,
    torch.log_softmax, Tensor.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, torch.pow, Tensor.pow, torch.rsqrt,
    Tensor.rsqrt, torch.exp, Tensor.exp, torch.cumsum, Tensor.cumsum, torch.sum, Tensor.sum,
}  # fmt: skip
_QKV = ("query", "key", "value")
_GROUPED = ("grouped_mm", "_grouped_mm")
_CAST = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST = 1 << 17  # the longest window or chunk that is recognized
_CHECKED = 512  # pairs that check a recognized pattern

EVERYTHING = MaskPattern(causal=False)
"""Every token sees all of its document."""


class AttentionShape(torch.autograd.Function):
    """Attention on shapes: a result and gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.forms = [(one.shape, one.dtype) for one in (query, key, value)]
        return ShapeTensor.of((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), query.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return tuple(
            ShapeTensor.of(*form) if needed else None
            for form, needed in zip(ctx.forms, ctx.needs_input_grad, strict=True)
        )


def infer_grouped_shape(rows: Tensor, matrices: Tensor, *others: Any) -> Tensor:
    """Return the shape of a grouped product; torch implements it for some precisions only."""
    if matrices.dim() == 3:
        return ShapeTensor.of((rows.shape[0], matrices.shape[-1]), rows.dtype)
    ends = next(one for one in others if isinstance(one, Tensor))
    return ShapeTensor.of((len(ends), rows.shape[0], matrices.shape[-1]), rows.dtype)


class MetaKernels(TorchFunctionMode):
    """Casts as autocast does (`dtype` None: off; `on_copy` gets copied weights); replaces attention, grouped matmul."""

    def __init__(
        self, tracer: Tracer, dtype: torch.dtype | None, on_gpu: bool, on_copy: Callable[[Tensor], None]
    ) -> None:
        super().__init__()
        self._tracer, self._dtype, self._on_gpu, self._on_copy = tracer, dtype, on_gpu, on_copy
        self._weights: dict[nn.Parameter, Tensor] = {}  # autocast, too, copies each weight once

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is F.scaled_dot_product_attention:
            inputs = [arguments[n] if n < len(arguments) else named[name] for n, name in enumerate(_QKV)]
            with self._tracer.pause():
                query, key, value = (self._cast(value, self._dtype) for value in inputs)
                # On a GPU, no fused kernel takes float32 with fewer heads for keys than for queries.
                same_heads = query.dim() < 4 or query.shape[1] == key.shape[1]
                is_fused = same_heads or query.dtype != torch.float32 or not self._on_gpu
                output = _Attention.apply(query, key, value, is_fused)
            self._tracer.record_attention(inputs[0], inputs[1], inputs[2], output)
            return output
        if getattr(function, "__name__", "") in _GROUPED:  # it has kernels for some precisions only, and no autocast
            rows, matrices = arguments[:2]
            with self._tracer.pause():
                output = _GroupedProduct.apply(rows, matrices)
            self._tracer.record_product([rows, matrices], [output], 2.0 * rows.numel() * matrices.shape[-1])
            return output
        wanted = self._dtype if function in _HALF else torch.float32 if function in _FULL else None
        if self._dtype is None or wanted is None:
            return function(*arguments, **named)
        arguments = tuple(self._cast(value, wanted) for value in arguments)
        return function(*arguments, **{name: self._cast(value, wanted) for name, value in named.items()})

    def _cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or not isinstance(value, Tensor) or value.dtype not in _CAST or value.dtype is dtype:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(dtype)
        if value not in self._weights:
            self._weights[value] = value.to(dtype)
            self._on_copy(self._weights[value])
        return self._weights[value]


class _Attention(torch.autograd.Function):
    """Saves the inputs; a fused kernel also its output and one number per query, any other kernel its scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_fused: bool) -> Tensor:
        if is_fused and query.dim() > 2:  # in the layout of the next layer, which then saves no copy
            *rows, heads, tokens, _ = query.shape
            output = query.new_empty(*rows, tokens, heads, value.shape[-1]).transpose(-2, -3)
        else:
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
        keys = [] if is_fused else [key.shape[-2]]
        scores = query.new_empty(*query.shape[:-1], *keys, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, scores, *([output] if is_fused else []))
        return output


class _GroupedProduct(torch.autograd.Function):
    """The product of rows with the matrices of experts: saves both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])


class _FusedLoss(torch.autograd.Function):
    """The loss without materialized logits: saves the gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        needed = [
            hidden.new_empty(hidden.shape, dtype=dtype) if ctx.needs_input_grad[0] else None,
            weight.new_empty(weight.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None,
            bias.new_empty(bias.shape, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None,
        ]
        ctx.save_for_backward(*needed)
        return hidden.new_empty((), dtype=torch.float32)


def use_fused_loss(model: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a language model on the meta device save what the fused loss saves, if its loss can be fused."""
    if fuse_head_with_loss(model) is not None:
        return
    plain: Any = model.loss_function
    dtype = None if compute_dtype is torch.float32 else compute_dtype

    def loss(logits: Any, *given: Any, **options: Any) -> Any:
        if not isinstance(logits, LazyLogits):  # the model has materialized them
            return plain(logits, *given, **options)
        return _FusedLoss.apply(logits.hidden, logits.weight, logits.bias, dtype or logits.weight.dtype)

    model.loss_function = loss  # type: ignore[assignment]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous(), None


# Registered as attention but not as a mask: transformers then builds no masks, for which it would read values.
AttentionInterface.register(_IMPLEMENTATION, _attend)


@contextmanager
def attend_without_masks(model: nn.Module) -> Iterator[None]:
    """Let the transformers models in a model attend without masks, inside the block."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [(module, module.config._attn_implementation) for module in inner]
    try:
        for module in inner:
            if module.config._attn_implementation == "sdpa":
                module.set_attn_implementation(_IMPLEMENTATION)
        yield
    finally:
        for module, implementation in before:
            if module.config._attn_implementation != implementation:
                module.set_attn_implementation(implementation)


def recognize_pattern(rule: MaskFunction) -> MaskPattern | None:
    """Return the pattern of a mask function of transformers; None if it is not a `MaskPattern`."""
    queries = torch.arange(_LONGEST)
    causal = not bool(_ask(rule, torch.tensor([0]), torch.tensor([1])))
    reach = int(_ask(rule, queries, torch.zeros_like(queries)).sum())  # how many queries see the first token
    pattern = MaskPattern(causal=causal)
    if 0 < reach < _LONGEST:
        # Of a window, not of a chunk, the next query sees the second token.
        is_window = reach == 1 or bool(_ask(rule, torch.tensor([reach]), torch.tensor([1])))
        pattern = MaskPattern(reach if is_window else None, None if is_window else reach, causal)
    asking, asked = _draw_pairs(reach)
    return pattern if torch.equal(_ask(rule, asking, asked), _ask(pattern, asking, asked)) else None


def _ask(rule: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    none = torch.zeros_like(queries)
    return torch.as_tensor(rule(none, none, queries, keys)).broadcast_to(queries.shape)


@lru_cache(maxsize=64)
def _draw_pairs(reach: int) -> tuple[Tensor, Tensor]:
    """Return random pairs at distances around the reach."""
    noise = torch.Generator().manual_seed(0)
    queries = torch.randint(0, min(4 * reach + 4, _LONGEST), (_CHECKED,), generator=noise)
    distance = torch.randint(-reach - 2, reach + 3, (_CHECKED,), generator=noise)
    return queries, (queries - distance).clamp(0, _LONGEST - 1)
