"""Attention over cut rows in a ring: keys and values go from rank to rank, and the softmax is put together on the way.

A rank attends with its queries to the block of keys and values that is with it, while the next block travels. Each
block gives what it would give alone and the logarithm of its sum of weights; from the two, blocks are put together
exactly. The backward pass sends the blocks round once more, each with the gradient that has been gathered for it.
Nothing but a rank's own tokens is kept between the two.

Shape letters: B rows, H heads, s tokens of this rank, k tokens of a block, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.attention.context import CutMask, Scoring
from cornstarch.attention.interface import flex_attention
from cornstarch.attention.mask import Between
from cornstarch.parallel.context.exchange import Group, pass_on

_NUMBERS = 1 << 26  # scores that are in memory together
_HIDDEN = -1e30  # the score of what is not seen: finite, so that gradients are
_FLEX_MIN_HEAD_DIM = 16


class RingAttention:
    """Keys and values travel; queries stay."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self, scoring: Scoring, mask: CutMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with the queries of this rank: [B, s, H, D]."""
        both = torch.cat([key, value], dim=-1)
        attended, logsum = _Ring.apply(query, both, key.shape[-1], scoring, mask, self.group)
        if sinks is not None:  # one more key per head that takes weight and gives nothing
            attended = attended * torch.sigmoid(logsum - sinks.float()[:, None]).unsqueeze(-1)
        return attended.to(query.dtype).transpose(1, 2).contiguous()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, both: Tensor, key_width: int, scoring: Scoring, mask: CutMask, group: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.key_width, ctx.scoring, ctx.mask, ctx.group = key_width, scoring, mask, group
        ctx.random = _random_state(query) if scoring.dropout else None
        attended = query.new_zeros(*query.shape[:3], both.shape[-1] - key_width, dtype=torch.float32)
        logsum = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        for owner, block in _around(both, mask, group):
            if mask.is_empty(owner):
                continue
            part, part_sum = attend_block(query, block, key_width, mask.between((mask.cut.rank,), (owner,)), scoring)
            total = torch.logaddexp(logsum, part_sum)
            attended = attended * _share(logsum, total) + part.float() * _share(part_sum, total)
            logsum = total
        ctx.save_for_backward(query, both, attended, logsum)
        return attended, logsum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, both, attended, logsum = ctx.saved_tensors
        mask, rank = ctx.mask, ctx.mask.cut.rank
        of_query = torch.zeros_like(query, dtype=torch.float32)
        arriving = None
        with _replayed(ctx.random, query):
            for owner, block in _around(both, mask, ctx.group):
                of_block = torch.zeros_like(block, dtype=torch.float32)
                if not mask.is_empty(owner):
                    again, other = query.detach().requires_grad_(), block.detach().requires_grad_()
                    with torch.enable_grad():
                        seen = mask.between((rank,), (owner,))
                        part, part_sum = attend_block(again, other, ctx.key_width, seen, ctx.scoring)
                    weight = _share(part_sum.detach(), logsum)
                    change = ((part.detach().float() - attended) * gradients[0]).sum(-1)
                    of_sum = weight.squeeze(-1) * (change + gradients[1])
                    found = torch.autograd.grad(
                        [part, part_sum], [again, other], [(weight * gradients[0]).to(part.dtype), of_sum]
                    )
                    of_query += found[0]
                    of_block += found[1]
                if arriving is not None:
                    of_block += arriving()
                # It goes on with its block, beside the computation of the next one, and at last to the block's owner.
                following = (owner - 1) % len(mask.cut.shares)
                arriving = pass_on(of_block, _block_shape(both, mask.cut.sizes[following]), ctx.group)
        assert arriving is not None
        return of_query.to(query.dtype), arriving().to(both.dtype), None, None, None, None


def _around(both: Tensor, mask: CutMask, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (owner, keys and values) of this rank and then of the ones before it, the next under way meanwhile."""
    ranks, rank = len(mask.cut.shares), mask.cut.rank
    block = both
    for step in range(ranks):
        owner = (rank - step) % ranks
        coming = None
        if step < ranks - 1:
            coming = pass_on(block, _block_shape(both, mask.cut.sizes[(owner - 1) % ranks]), group)
        yield owner, block
        if coming is not None:
            block = coming()


def _block_shape(both: Tensor, tokens: int) -> tuple[int, ...]:
    return (*both.shape[:2], tokens, both.shape[3])


def _share(part: Tensor, total: Tensor) -> Tensor:
    """Return which part of all weight a block has, [B, H, s, 1]: none where neither has seen anything."""
    return torch.exp(part - total).nan_to_num(0.0).unsqueeze(-1)


# ------------------------------------------------------------------------------------------------ one block


def attend_block(
    query: Tensor, both: Tensor, key_width: int, mask: Tensor | BlockMask | Between, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attend to one block alone: what comes of it [B, H, s, D], and the logarithm of the sum of weights [B, H, s]."""
    key, value = both[..., :key_width], both[..., key_width:]
    mask = mask.block_mask if isinstance(mask, Between) else mask
    if isinstance(mask, BlockMask):
        if not scoring.dropout and min(query.shape[-1], value.shape[-1]) >= _FLEX_MIN_HEAD_DIM:
            return _flex(query, key, value, mask, scoring)
        queries, keys = (torch.arange(one.shape[2], device=query.device) for one in (query, key))
        row = torch.arange(query.shape[0], device=query.device)[:, None, None, None]
        mask = mask.mask_mod(row, torch.zeros_like(row), queries[None, None, :, None], keys[None, None, None, :])
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    strip = max(1, _NUMBERS // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts = [
        _strip(queries, key, value, seen, scoring)
        for queries, seen in zip(query.split(strip, dim=2), mask.split(strip, dim=2), strict=True)
    ]
    return torch.cat([part for part, _ in parts], dim=2), torch.cat([logsum for _, logsum in parts], dim=2)


def _strip(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    scores = (query @ key.transpose(2, 3)).float() * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, _HIDDEN)
    logsum = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - logsum.unsqueeze(-1)).to(value.dtype)
    weights = nn.functional.dropout(weights, p=scoring.dropout, training=scoring.training)
    return weights @ value, logsum


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scoring: Scoring) -> tuple[Tensor, Tensor]:
    # transformers keeps one compiled FlexAttention; it gives the logarithms too.
    layer = nn.Module()
    layer.training = scoring.training
    found, logsum = flex_attention()(layer, query, key, value, mask, scaling=scoring.scaling, softcap=scoring.softcap)
    return found.transpose(1, 2), logsum


# ------------------------------------------------------------------------------------------------ dropout


def _random_state(query: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(query.device) if query.is_cuda else torch.get_rng_state()


@contextmanager
def _replayed(state: Tensor | None, query: Tensor) -> Iterator[None]:
    """Draw the same random numbers as in the forward pass, within this block."""
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[query.device] if query.is_cuda else []):
        if query.is_cuda:
            torch.cuda.set_rng_state(state, query.device)
        else:
            torch.set_rng_state(state)
        yield
