"""Attention over a row whose tokens are cut over ranks: what each of them may see, and how that reaches a model.

While a cut is in use, the mask that a layer is handed is a `CutMask`, an object that knows the whole row, and attention
is what the cut's method makes of it. Objects travel through the layers as they are, so that layers that are replayed in
the backward pass meet the same one.

How tensors get from rank to rank is not said here; see cornstarch.parallel.context.

Shape letters: B rows, H heads, S tokens of a row, Q and K tokens of some ranks, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.attention.choice import attends_between
from cornstarch.attention.interface import (
    AttendingMask,
    attend_by_kernel,
    check_index_scaling,
    check_mask_function,
    make_masks_by,
    within_document,
)
from cornstarch.attention.mask import BLOCK, CAUSAL, Between, MaskSpec, Visibility
from cornstarch.errors import ConfigError, UnsupportedModelError

# Tensors that models hand to their attention and that change nothing in it.
_HARMLESS = frozenset({"position_ids", "position_embeddings", "cache_position", "input_ids", "token_type_ids"})

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
class CutMask(AttendingMask):
    """What tokens of some ranks may see of tokens of others, for one kind of layer; made when it is asked for."""

    cut: TokenCut
    pattern: Visibility
    use_flex: bool
    _rendered: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor | BlockMask | Between] = field(default_factory=dict)
    _empty: dict[int, bool] = field(default_factory=dict)

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
        """Attend for a layer with this rank's tokens."""
        _check_layer(module, query, key, self, options)
        self.cut.calls += 1
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        scoring = Scoring(scale, softcap, dropout, module.training)
        return self.cut.method(scoring, self, query, key, value, sinks)

    def between(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor | BlockMask | Between:
        """Return the mask between the tokens of these ranks, in their order: bool [B, 1, Q, K], or a block mask."""
        if (queries, keys) not in self._rendered:
            asking, asked = (torch.cat([self.cut.shares[one] for one in ranks]) for ranks in (queries, keys))
            self._rendered[queries, keys] = self._render(asking, asked)
        return self._rendered[queries, keys]

    def _render(self, queries: Tensor, keys: Tensor) -> Tensor | BlockMask | Between:
        spec, flex = self.cut.spec, self.use_flex and queries.is_cuda and min(len(queries), len(keys)) >= BLOCK
        if flex and self.pattern is CAUSAL and spec.counts.in_pieces and attends_between(queries.device):
            return spec.between(queries=queries, keys=keys)
        return spec.block_mask(self.pattern, queries, keys) if flex else spec.dense(self.pattern, queries, keys)

    def is_empty(self, owner: int) -> bool:
        """Whether no token of this rank sees any of another rank's."""
        if owner not in self._empty:
            mask = self.between((self.cut.rank,), (owner,))
            mask = mask.block_mask if isinstance(mask, Between) else mask
            some = mask.kv_num_blocks.any() if isinstance(mask, BlockMask) else mask.any()
            if isinstance(mask, BlockMask) and mask.full_kv_num_blocks is not None:
                some = some | mask.full_kv_num_blocks.any()
            self._empty[owner] = not bool(some)
        return self._empty[owner]


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
    mask: Tensor | BlockMask | Between,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to keys that are all in this process: [B, Q, H, D]."""
    layer = _Layer(query.shape[1] // key.shape[1], scoring.training)
    attended, _ = attend_by_kernel(
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


def begin_cut(cut: TokenCut) -> Callable[[], None]:
    """Let models attend over rows that are cut so; return what ends it."""
    return make_masks_by(partial(_make_cut_mask, cut))


def _make_cut_mask(
    cut: TokenCut,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Visibility,
    attention_mask: Tensor | None,
    use_vmap: bool,
    config: Any,
    use_flex: bool,
    options: dict[str, Any],
) -> CutMask:
    own = len(cut.mine)
    if (q_length, kv_length) != (own, own):
        raise UnsupportedModelError(
            f"it asks for a mask of {q_length} by {kv_length} tokens where this rank has {own}: its layers see other "
            "tokens than those of the text"
        )
    check_mask_function(attention_mask, q_length, use_vmap, options)
    check_index_scaling(config, cut.spec.documents.shape[1])
    if len(cut.spec.documents) != batch_size:
        raise ConfigError(f"The batch has {len(cut.spec.documents)} rows, and a layer was given {batch_size}.")
    padded = torch.ones(batch_size, own, device=cut.mine.device) if attention_mask is None else attention_mask
    return CutMask(cut, within_document(mask_function, padded), use_flex)


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
