"""Ring attention over sharded rows: keys and values go from rank to rank, and the softmax is combined on the way.

A rank attends with its queries to the block of keys and values that is with it, while the next block travels. Each
block yields its attention output and the logarithm of its sum of weights (logsumexp); from the two, blocks are combined
exactly. The backward pass sends the blocks round once more, each with the gradient accumulated for it. Nothing but a
rank's own tokens is kept between the two.

Shape letters: B rows, H heads, s tokens of this rank, k tokens of a block, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.attention.backends import get_flex_attention
from cornstarch.attention.interface import ScoreOptions, ShardedMask
from cornstarch.attention.mask import RangeMask
from cornstarch.parallel.context.all_to_all import Group, pass_to_next_rank
from cornstarch.parallel.context.modes import register_context_parallel_mode

_MAX_SCORES = 1 << 26  # scores that are in memory together
_MASKED = -1e30  # the score of a masked key: finite, because -inf minus -inf would make gradients NaN
_FLEX_MIN_HEAD_DIM = 16


class RingAttention:
    """Keys and values travel; queries stay."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with the queries of this rank: [B, s, H, D]."""
        # One message per block instead of two.
        both = torch.cat([key, value], dim=-1)
        attended, logsum = _Ring.apply(query, both, key.shape[-1], scoring, mask, self.group)
        if sinks is not None:  # one more key per head that takes weight and gives nothing
            attended = attended * torch.sigmoid(logsum - sinks.float()[:, None]).unsqueeze(-1)
        return attended.to(query.dtype).transpose(1, 2).contiguous()


register_context_parallel_mode("ring_attn", RingAttention)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, both: Tensor, key_width: int, scoring: ScoreOptions, mask: ShardedMask, group: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.key_width, ctx.scoring, ctx.mask, ctx.group = key_width, scoring, mask, group
        # The backward pass computes blocks again, and must drop the same weights.
        ctx.random = _get_random_state(query) if scoring.dropout else None
        # In float32: each of the blocks adds a rounding error otherwise.
        attended = query.new_zeros(*query.shape[:3], both.shape[-1] - key_width, dtype=torch.float32)
        logsum = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        for owner, block in _iter_blocks(both, mask, group):
            if mask.is_empty(owner):  # the block travels on all the same: other ranks may need it
                continue
            part, part_sum = attend_block(
                query, block, key_width, mask.render((mask.sharding.rank,), (owner,)), scoring
            )
            total = torch.logaddexp(logsum, part_sum)
            attended = attended * _fraction(logsum, total) + part.float() * _fraction(part_sum, total)
            logsum = total
        ctx.save_for_backward(query, both, attended, logsum)
        return attended, logsum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, both, attended, logsum = ctx.saved_tensors
        mask, rank = ctx.mask, ctx.mask.sharding.rank
        of_query = torch.zeros_like(query, dtype=torch.float32)
        arriving = None
        with _replay_random_state(ctx.random, query):
            for owner, block in _iter_blocks(both, mask, ctx.group):
                of_block = torch.zeros_like(block, dtype=torch.float32)
                if not mask.is_empty(owner):
                    again, other = query.detach().requires_grad_(), block.detach().requires_grad_()
                    with torch.enable_grad():
                        seen = mask.render((rank,), (owner,))
                        part, part_sum = attend_block(again, other, ctx.key_width, seen, ctx.scoring)
                    # With w = exp(part_sum - logsum): attended = sum of w * part over blocks, so a block's output gets
                    # w times the gradient, and its logsumexp gets the change of all w that it causes.
                    weight = _fraction(part_sum.detach(), logsum)
                    change = ((part.detach().float() - attended) * gradients[0]).sum(-1)
                    of_sum = weight.squeeze(-1) * (change + gradients[1])
                    found = torch.autograd.grad(
                        [part, part_sum], [again, other], [(weight * gradients[0]).to(part.dtype), of_sum]
                    )
                    of_query += found[0]
                    of_block += found[1]
                if arriving is not None:
                    of_block += arriving()
                # The gradient follows its block, while the next one is computed, and at last reaches the block's owner.
                following = (owner - 1) % len(mask.sharding.rank_positions)
                arriving = pass_to_next_rank(of_block, _block_shape(both, mask.sharding.sizes[following]), ctx.group)
        assert arriving is not None
        return of_query.to(query.dtype), arriving().to(both.dtype), None, None, None, None


def _iter_blocks(both: Tensor, mask: ShardedMask, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (owner, keys and values) of this rank and then of the ones before it; the next block is in flight."""
    ranks, rank = len(mask.sharding.rank_positions), mask.sharding.rank
    block = both
    for step in range(ranks):
        owner = (rank - step) % ranks
        coming = None
        if step < ranks - 1:
            coming = pass_to_next_rank(block, _block_shape(both, mask.sharding.sizes[(owner - 1) % ranks]), group)
        yield owner, block
        if coming is not None:
            block = coming()


def _block_shape(both: Tensor, tokens: int) -> tuple[int, ...]:
    return (*both.shape[:2], tokens, both.shape[3])


def _fraction(part: Tensor, total: Tensor) -> Tensor:
    """Return a block's fraction of all weight, [B, H, s, 1]: 0 where neither has any, and -inf - -inf is NaN."""
    return torch.exp(part - total).nan_to_num(0.0).unsqueeze(-1)


# ------------------------------------------------------------------------------------------------ one block


def attend_block(
    query: Tensor, both: Tensor, key_width: int, mask: Tensor | BlockMask | RangeMask, scoring: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Attend to one block alone: return the output [B, H, s, D], and the logsumexp [B, H, s]."""
    key, value = both[..., :key_width], both[..., key_width:]
    mask = mask.block_mask if isinstance(mask, RangeMask) else mask
    if isinstance(mask, BlockMask):
        if not scoring.dropout and min(query.shape[-1], value.shape[-1]) >= _FLEX_MIN_HEAD_DIM:
            return _attend_flex(query, key, value, mask, scoring)
        queries, keys = (torch.arange(one.shape[2], device=query.device) for one in (query, key))
        row = torch.arange(query.shape[0], device=query.device)[:, None, None, None]
        mask = mask.mask_mod(row, torch.zeros_like(row), queries[None, None, :, None], keys[None, None, None, :])
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    strip = max(1, _MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts = [
        _attend_strip(queries, key, value, seen, scoring)
        for queries, seen in zip(query.split(strip, dim=2), mask.split(strip, dim=2), strict=True)
    ]
    return torch.cat([part for part, _ in parts], dim=2), torch.cat([logsum for _, logsum in parts], dim=2)


def _attend_strip(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: ScoreOptions
) -> tuple[Tensor, Tensor]:
    scores = (query @ key.transpose(2, 3)).float() * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, _MASKED)
    logsum = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - logsum.unsqueeze(-1)).to(value.dtype)
    weights = nn.functional.dropout(weights, p=scoring.dropout, training=scoring.training)
    return weights @ value, logsum


def _attend_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scoring: ScoreOptions
) -> tuple[Tensor, Tensor]:
    # transformers keeps one compiled FlexAttention, which also returns the logsumexp.
    layer = nn.Module()
    layer.training = scoring.training
    found, logsum = get_flex_attention()(
        layer, query, key, value, mask, scaling=scoring.scaling, softcap=scoring.softcap
    )
    return found.transpose(1, 2), logsum


# ------------------------------------------------------------------------------------------------ dropout


def _get_random_state(query: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(query.device) if query.is_cuda else torch.get_rng_state()


@contextmanager
def _replay_random_state(state: Tensor | None, query: Tensor) -> Iterator[None]:
    """Run a block that draws the same random numbers as the forward pass."""
    if state is None:
        yield
        return
    with torch.random.fork_rng(devices=[query.device] if query.is_cuda else []):
        if query.is_cuda:
            torch.cuda.set_rng_state(state, query.device)
        else:
            torch.set_rng_state(state)
        yield
