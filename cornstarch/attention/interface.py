"""How a `MaskSpec` enters a transformers model: one name in transformers' attention and mask registries.

While no spec is in use, this name behaves as "sdpa". With a spec, transformers still says what each layer asks for
(causal, sliding, chunked): its mask function is asked with positions within the document instead of the row.

Something else may make the masks for a while (`make_masks_by`), and a mask may be an object that attends by itself
(`AttendingMask`): that is how rows that are cut over ranks enter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from cornstarch.attention.between import attend_between
from cornstarch.attention.choice import Maker, can_attend, kernels_of_documents, wants_dense
from cornstarch.attention.documents import Documents, attend_in_documents, documents_of
from cornstarch.attention.mask import BLOCK, CAUSAL, Between, MaskSpec, Visibility, evaluate
from cornstarch.attention.pieces import Pieces, pieces_of
from cornstarch.attention.varlen import attend_in_pieces
from cornstarch.compat import allow_variants
from cornstarch.errors import ConfigError, UnsupportedModelError

IMPLEMENTATION = "cornstarch"
# The same for models that say they do not understand FlexAttention's masks: dense ones on every device.
DENSE_IMPLEMENTATION = "cornstarch_dense"

_FLEX_MIN_HEAD_DIM = 16
# Arguments by which a layer changes its attention scores in a way that masks as data do not express.
_UNSUPPORTED_SCORES = ("position_bias", "indices", "block_indices", "head_mask")

_current: ContextVar[MaskSpec | None] = ContextVar("cornstarch_mask", default=None)
_maker: ContextVar[Callable[..., Any] | None] = ContextVar("cornstarch_mask_maker", default=None)
_attender: ContextVar[Callable[..., Any] | None] = ContextVar("cornstarch_attender", default=None)


class AttendingMask(ABC):
    """A mask that attends by itself; it travels through a model's layers in the place of a tensor."""

    @abstractmethod
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        dropout: float,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attend for a layer: [B, tokens, heads, width]."""


def make_masks_by(maker: Callable[..., Any]) -> Callable[[], None]:
    """Let `maker` make the masks of layers, with the arguments of `make_mask`; return what ends it."""
    token = _maker.set(maker)
    return lambda: _maker.reset(token)


def attend_by(attender: Callable[..., Any]) -> Callable[[], None]:
    """Let `attender` attend for layers, as (module, query, key, value, mask, options); return what ends it."""
    token = _attender.set(attender)
    return lambda: _attender.reset(token)


def mask_in_use() -> MaskSpec | None:
    """Return what `use_mask` was given."""
    return _current.get()


@contextmanager
def use_mask(spec: MaskSpec | None) -> Iterator[None]:
    """Let models whose attention implementation is `IMPLEMENTATION` attend as `spec` says, within this block.

    Only the forward pass must be inside: checkpointed layers are replayed with the mask they were given.
    """
    token = _current.set(spec)
    try:
        yield
    finally:
        _current.reset(token)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Visibility,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    use_flex: bool = True,
    **options: Any,
) -> Any:
    """Make one kind of layer's mask; transformers calls it once per kind and forward pass."""
    maker = _maker.get()
    if maker is not None:
        return maker(
            batch_size,
            q_length,
            kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            config=config,
            use_flex=use_flex,
            options=options,
        )
    spec = _current.get()
    if spec is None or spec.is_plain:
        sdpa_mask = AttentionMaskInterface()["sdpa"]
        mask: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **options,
        )
        return mask
    end = kv_offset + kv_length
    check_mask_function(attention_mask, q_length, use_vmap, options)
    check_index_scaling(config, end)
    spec = _rows(spec, batch_size).to(device).extended(end)
    pattern = within_document(mask_function, None if attention_mask is None else attention_mask.to(device))
    whole_row = isinstance(q_offset, int) and q_offset == 0 and q_length == end == spec.documents.shape[1]
    if use_flex and spec.documents.is_cuda and whole_row and q_length >= BLOCK and not wants_dense():
        kernels = kernels_of_documents(spec.documents.device, _width(config)) if pattern is CAUSAL else None
        if kernels is not None and spec.counts.in_pieces:
            cut = documents_of if kernels == "flash" else pieces_of
            return cut(spec, spec.counts, partial(spec.block_mask, pattern))
        return spec.block_mask(pattern)
    queries = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_offset, end, device=device)
    return spec.dense(pattern, queries, keys)


def within_document(mask_function: Visibility, attention_mask: Tensor | None) -> Visibility:
    """Return transformers' rule on positions within a document."""
    asked: Any = mask_function
    if asked is causal_mask_function:
        return CAUSAL
    if attention_mask is None:
        return mask_function
    # transformers counts chunks from the end of the left padding, which it subtracts from the indices it is asked
    # with; positions within a document have no padding, so it is added first. Windows only see differences.
    left_padding = (attention_mask.cumsum(dim=-1) == 0).sum(dim=-1)

    def pattern(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask_function(row, head, query + left_padding[row], key + left_padding[row])

    return pattern


def _width(config: Any) -> int | None:
    """Return how wide a model's heads are, if its config says it."""
    heads, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    width = getattr(config, "head_dim", None)
    if width is None and isinstance(heads, int) and isinstance(size, int) and heads > 0:
        width = size // heads
    return width if isinstance(width, int) else None


def _rows(spec: MaskSpec, batch_size: int) -> MaskSpec:
    rows = spec.documents.shape[0]
    if rows == batch_size:
        return spec
    if batch_size % rows or torch.is_grad_enabled():
        raise ConfigError(
            f"The mask in use has {rows} rows, the model was given {batch_size}; make the mask from the same batch."
        )
    return spec.repeat_interleave(batch_size // rows)  # generation repeats each prompt for its beams and samples


def check_mask_function(attention_mask: Tensor | None, q_length: int, use_vmap: bool, options: dict[str, Any]) -> None:
    """Refuse what transformers has mixed into its rule by row index."""
    if use_vmap:
        raise UnsupportedModelError("The model adds a mask function of its own, which may depend on row indices.")
    # Without an attention mask transformers looks for documents in the position ids. If it finds any, it mixes them
    # into mask_function by row index, and no longer allows to leave out the mask.
    if attention_mask is None and q_length > 1 and not options.get("allow_is_causal_skip", True):
        raise ConfigError("A model under use_mask(spec) needs its 2-D attention_mask too (1: token, 0: padding).")


def check_index_scaling(config: Any, end: int) -> None:
    """Refuse models that scale queries by their index in a row of `end` tokens."""
    # With temperature tuning (Llama 4) a query is scaled by its index in the row, in steps of floor_scale tokens:
    # equal to the index in its document only before the first step.
    if getattr(config, "attn_temperature_tuning", False) and end >= getattr(config, "floor_scale", end + 1):
        raise UnsupportedModelError(
            f"The model scales its attention by a token's place in the row once a row has {config.floor_scale} "
            f"tokens; this row has {end}, and its documents must be scaled by their own places. "
            f"Use rows shorter than {config.floor_scale} tokens, or one document per row without padding."
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | Documents | Pieces | Between | AttendingMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend for a layer: as its mask does, as whoever attends for it now does, or by `attend_by_kernel`."""
    if torch.compiler.is_compiling() and not isinstance(attention_mask, AttendingMask):
        # Only layers are compiled for which nobody attends, and context variables cannot be traced.
        return attend_by_kernel(module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, **options)
    attender = _attender.get()
    if attender is not None:
        asked = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux, **options}
        return attender(module, query, key, value, attention_mask, asked)
    if isinstance(attention_mask, AttendingMask):
        attended = attention_mask.attend(
            module, query, key, value, dropout=dropout, scaling=scaling, softcap=softcap, sinks=s_aux, options=options
        )
        return attended, None
    if _maker.get() is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was handed no mask by transformers' mask functions, so that nothing says what "
            "its tokens may see on other ranks"
        )
    return attend_by_kernel(module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux, **options)


def attend_by_kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | Documents | Pieces | Between | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the best kernel that respects everything the layer asks for."""
    for name in _UNSUPPORTED_SCORES:
        if options.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} changes its attention scores by {name!r}.")
    if isinstance(attention_mask, Documents | Pieces | Between):
        maker: Maker = "cudnn" if isinstance(attention_mask, Pieces) else "flash"
        if dropout == 0 and softcap is None and s_aux is None and can_attend(query, value, maker):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            if isinstance(attention_mask, Documents):
                return attend_in_documents(query, key, value, attention_mask, scale), None
            if isinstance(attention_mask, Pieces):
                return attend_in_pieces(query, key, value, attention_mask, scale), None
            return attend_between(query, key, value, attention_mask, scale), None
        attention_mask = attention_mask.block_mask
    if isinstance(attention_mask, BlockMask):
        if dropout == 0 and query.shape[-1] >= _FLEX_MIN_HEAD_DIM:
            return _pair(
                flex_attention()(
                    module,
                    query,
                    key,
                    value,
                    attention_mask,
                    scaling=scaling,
                    softcap=softcap,
                    s_aux=s_aux,
                    **options,
                )
            )
        attention_mask = _densify(attention_mask, query, key)  # FlexAttention has neither
    if softcap is None and s_aux is None:
        sdpa = AttentionInterface()["sdpa"]
        return _pair(sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options))
    if attention_mask is None and options.get("is_causal", getattr(module, "is_causal", True)):
        attention_mask = _causal(query, key)
    scores = _scores(query, key, scaling, softcap)
    weights = _weights(scores, attention_mask, s_aux).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ _repeat_heads(value, query)).transpose(1, 2).contiguous(), weights


def flex_attention() -> Callable[..., Any]:
    """Return transformers' FlexAttention, which compiles itself where it is called outside of compiled layers."""
    if not torch.compiler.is_compiling():
        allow_variants()  # else a layout of tensors too many, and whole matrices of scores are computed
    found: Callable[..., Any] = AttentionInterface()["flex_attention"]
    return found


def _pair(output: Any) -> tuple[Tensor, Tensor | None]:
    attended, weights = output
    return attended, weights


def _densify(block_mask: BlockMask, query: Tensor, key: Tensor) -> Tensor:
    queries = torch.arange(query.shape[2], device=query.device)
    keys = torch.arange(key.shape[2], device=query.device)
    visibility: Visibility = block_mask.mask_mod
    return evaluate(visibility, query.shape[0], queries, keys)


def _causal(query: Tensor, key: Tensor) -> Tensor | None:
    # transformers leaves out the mask for one query that sees everything, and for a whole row from its start (the
    # keys behind it are the empty places of a static cache).
    queries, keys = query.shape[2], key.shape[2]
    if queries == 1:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()


def _repeat_heads(states: Tensor, query: Tensor) -> Tensor:
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _scores(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ _repeat_heads(key, query).transpose(2, 3) * scale
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _weights(scores: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    # A sink is one more key per head that takes weight and gives nothing.
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


def _register() -> None:
    attention: Callable[..., Any] = attend
    masks: dict[str, Callable[..., Any]] = {
        IMPLEMENTATION: make_mask,
        DENSE_IMPLEMENTATION: partial(make_mask, use_flex=False),
    }
    for name, mask in masks.items():
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)


_register()
