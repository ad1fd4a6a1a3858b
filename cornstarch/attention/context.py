"""Attention over a row whose tokens are cut over ranks: what each of them may see, and how that reaches a model.

While a cut is in use, `IMPLEMENTATION` means something else in transformers' registries: the mask that a layer is
handed is a `CutMask`, an object that knows the whole row, and attention is what the cut's method makes of it. Objects
travel through the layers as they are, so that layers that are replayed in the backward pass meet the same one.

How tensors get from rank to rank is not said here; see cornstarch.parallel.context.

Shape letters: B rows, H heads, S tokens of a row, Q and K tokens of some ranks, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from cornstarch.attention import interface, verify
from cornstarch.attention.interface import DENSE_IMPLEMENTATION, IMPLEMENTATION, attend, make_mask
from cornstarch.attention.mask import MaskSpec, Visibility, evaluate
from cornstarch.errors import ConfigError, UnsupportedModelError

# Tensors that models hand to their attention and that change nothing in it.
_HARMLESS = frozenset({"position_ids", "position_embeddings", "cache_position", "input_ids", "token_type_ids"})
_BLOCK = 128  # tokens of a FlexAttention block
_STRIP = 16  # blocks of queries whose masks are in memory together

Method = Callable[["Scoring", "CutMask", Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(scoring, mask, query, key, value, sinks) of this rank's tokens [B, H, s, D] -> [B, s, H, D]."""


@dataclass(frozen=True)
class Scoring:
    """What a layer asks for, beside its mask."""

    scaling: float
    softcap: float | None
    dropout: float
    training: bool


@dataclass(eq=False)
class TokenCut:
    """How the rows of one forward pass are cut."""

    spec: MaskSpec
    """Of the whole rows."""
    shares: tuple[Tensor, ...]
    """For each rank the places of its tokens."""
    rank: int
    method: Method
    calls: int = 0
    """How often a layer attended."""

    @property
    def mine(self) -> Tensor:
        """The places of this rank's tokens."""
        return self.shares[self.rank]

    @property
    def sizes(self) -> list[int]:
        """How many tokens each rank has."""
        return [len(share) for share in self.shares]

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(len(self.shares)))


@dataclass(eq=False)
class CutMask:
    """What tokens of some ranks may see of tokens of others, for one kind of layer; made when it is asked for."""

    cut: TokenCut
    pattern: Visibility
    use_flex: bool
    _rendered: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor | BlockMask] = field(default_factory=dict)
    _empty: dict[int, bool] = field(default_factory=dict)

    def between(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor | BlockMask:
        """Return the mask between the tokens of these ranks, in their order: bool [B, 1, Q, K], or a block mask."""
        if (queries, keys) not in self._rendered:
            asking, asked = (torch.cat([self.cut.shares[one] for one in ranks]) for ranks in (queries, keys))
            self._rendered[queries, keys] = self._render(asking, asked)
        return self._rendered[queries, keys]

    def _render(self, queries: Tensor, keys: Tensor) -> Tensor | BlockMask:
        flex = self.use_flex and queries.is_cuda and min(len(queries), len(keys)) >= _BLOCK
        if flex:
            return _block_mask(self.cut.spec.visibility(self.pattern), len(self.cut.spec.documents), queries, keys)
        return self.cut.spec.dense(self.pattern, queries, keys)

    def is_empty(self, owner: int) -> bool:
        """Whether no token of this rank sees any of another rank's."""
        if owner not in self._empty:
            mask = self.between((self.cut.rank,), (owner,))
            some = mask.kv_num_blocks.any() if isinstance(mask, BlockMask) else mask.any()
            if isinstance(mask, BlockMask) and mask.full_kv_num_blocks is not None:
                some = some | mask.full_kv_num_blocks.any()
            self._empty[owner] = not bool(some)
        return self._empty[owner]


def _block_mask(visibility: Visibility, rows: int, queries: Tensor, keys: Tensor) -> BlockMask:
    """Return a FlexAttention block mask between tokens at these places of the row."""

    def placed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visibility(row, head, queries[query], keys[key])

    some, every = [], []
    for strip in queries.split(_STRIP * _BLOCK):  # the whole mask is never in memory
        mask = evaluate(visibility, rows, strip, keys)
        mask = nn.functional.pad(mask, (0, -len(keys) % _BLOCK, 0, -len(strip) % _BLOCK))
        blocks = mask.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
        some.append(blocks.any(dim=-1).any(dim=3))
        every.append(blocks.all(dim=-1).all(dim=3))
    any_block, full_block = torch.cat(some, dim=2), torch.cat(every, dim=2)
    return BlockMask.from_kv_blocks(
        *_listed(any_block & ~full_block),
        *_listed(full_block),
        BLOCK_SIZE=_BLOCK,
        mask_mod=placed,
        seq_lengths=(len(queries), len(keys)),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    numbers = blocks.to(torch.int32)
    return numbers.sum(dim=-1, dtype=torch.int32), numbers.argsort(dim=-1, descending=True, stable=True).int()


# ------------------------------------------------------------------------------------------------ one rank's part


class _Layer(nn.Module):
    """Stands for the layer in transformers' kernels, which ask it for how often keys' heads are repeated."""

    def __init__(self, groups: int, training: bool) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = False
        self.training = training


def attend_here(
    scoring: Scoring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | BlockMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to keys that are all in this process: [B, Q, H, D]."""
    layer = _Layer(query.shape[1] // key.shape[1], scoring.training)
    attended, _ = attend(
        layer,
        query,
        key,
        value,
        mask,
        dropout=scoring.dropout,
        scaling=scoring.scaling,
        softcap=scoring.softcap,
        s_aux=sinks,
    )
    return attended


# ------------------------------------------------------------------------------------------------ inside a model

_current: ContextVar[TokenCut | None] = ContextVar("cornstarch_cut", default=None)


def begin_cut(cut: TokenCut) -> Callable[[], None]:
    """Let models attend over rows that are cut so; return what ends it."""
    token = _current.set(cut)
    return lambda: _current.reset(token)


def mask_in_use() -> MaskSpec | None:
    """Return what `use_mask` was given."""
    return interface._current.get()


def trust_masks(model: nn.Module) -> None:
    """Let `attend_through_masks` take a model as checked: it cannot be run yet, and is verified in another way."""
    verify._verified.add(model)


def _make_cut_mask(
    whole: Callable[..., Any],
    use_flex: bool,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *arguments: Any,
    mask_function: Visibility,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **options: Any,
) -> Any:
    cut = _current.get()
    if cut is None:
        return whole(
            batch_size,
            q_length,
            kv_length,
            *arguments,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            config=config,
            **options,
        )
    own = len(cut.mine)
    if (q_length, kv_length) != (own, own):
        raise UnsupportedModelError(
            f"it asks for a mask of {q_length} by {kv_length} tokens where this rank has {own}: its layers see other "
            "tokens than those of the text"
        )
    interface._check_mask_function(attention_mask, q_length, use_vmap, options)
    interface._check_index_scaling(config, cut.spec.documents.shape[1])
    if len(cut.spec.documents) != batch_size:
        raise ConfigError(f"The batch has {len(cut.spec.documents)} rows, and a layer was given {batch_size}.")
    padded = torch.ones(batch_size, own, device=cut.mine.device) if attention_mask is None else attention_mask
    return CutMask(cut, interface._within_document(mask_function, padded), use_flex)


def _attend_cut(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if not isinstance(attention_mask, CutMask):
        if _current.get() is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} was handed no mask by transformers' mask functions, so that nothing says "
                "what its tokens may see on other ranks"
            )
        return attend(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            softcap=softcap,
            s_aux=s_aux,
            **options,
        )
    _check_layer(module, query, key, attention_mask, options)
    attention_mask.cut.calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scoring = Scoring(scale, softcap, dropout, module.training)
    return attention_mask.cut.method(scoring, attention_mask, query, key, value, s_aux), None


def _check_layer(module: nn.Module, query: Tensor, key: Tensor, mask: CutMask, options: dict[str, Any]) -> None:
    name = type(module).__name__
    for option, value in options.items():
        if isinstance(value, Tensor) and option not in _HARMLESS:
            raise UnsupportedModelError(f"{name} changes its attention by {option!r}, which is not cut with the tokens")
    own = len(mask.cut.mine)
    if query.shape[2] != own or key.shape[2] != own:
        raise UnsupportedModelError(
            f"{name} attends from {query.shape[2]} to {key.shape[2]} tokens where this rank has {own}"
        )


def _register() -> None:
    makers: dict[str, tuple[Callable[..., Any], bool]] = {
        IMPLEMENTATION: (make_mask, True),
        DENSE_IMPLEMENTATION: (partial(make_mask, use_flex=False), False),
    }
    attention: Callable[..., Any] = _attend_cut
    for name, (whole, use_flex) in makers.items():
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, partial(_make_cut_mask, whole, use_flex))


_register()
