"""How attention runs over rows whose tokens are sharded: the registry of modes, the built-in ones, their collectives.

To add a mode, write a class that is built with the process group and called as `ContextParallelMode` says, and register
it by the name that `parallel.<module>.cp_mode` has for it.

Ring attention: a rank attends with its queries to the block of keys and values that is with it, while the next block
travels. Each block yields its attention output and the logarithm of its sum of weights (logsumexp); from the two,
blocks are combined exactly. The backward pass sends the blocks round once more, each with the gradient accumulated for
it. Nothing but a rank's own tokens is kept between the two.

Shape letters: B rows, H heads, s tokens of this rank, S tokens of all ranks, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from cornstarch.attention.backends import get_flex_attention
from cornstarch.attention.interface import ScoreOptions, ShardedMask, attend_locally
from cornstarch.attention.mask import RangeMask
from cornstarch.errors import ConfigError
from cornstarch.parallel.distributed import Collective, TensorTransport, all_gather
from cornstarch.plan.data_options import REGISTERED

Group = dist.ProcessGroup
_MAX_SCORES = 1 << 26  # scores that are in memory together
_MASKED = -1e30  # the score of a masked key: finite, because -inf minus -inf would make gradients NaN
_FLEX_MIN_HEAD_DIM = 16
_CHUNKS = 4  # keys and values are gathered in this many groups of heads, so that less memory is in use at a time


class ContextParallelMode(Protocol):
    """Attends from the tokens of this rank to those of all ranks."""

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Return the output [B, s, H, D] for this rank's queries, keys and values [B, H, s, D]."""
        ...


MODES: dict[str, Callable[[Group], ContextParallelMode]] = {}


def register_context_parallel_mode(name: str, build: Callable[[Group], ContextParallelMode]) -> None:
    """Register a mode; `build` is called with the process group of the ranks that share a row."""
    MODES[name] = build
    REGISTERED["cp_mode"].add(name)


class _GroupMode:
    keeps_query = True
    """Whether autograd saves the query of this rank as it is."""

    def __init__(self, group: Group) -> None:
        self.group = group


class GatherAttention(_GroupMode):
    """Every rank gathers all keys and values, some heads at a time, and attends with its own queries."""

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        cut = mask.sharding
        rendered = mask.render((cut.rank,), cut.all_ranks)
        groups = query.shape[1] // key.shape[1]
        attended = []
        for heads in _split_evenly(key.shape[1], min(_CHUNKS, key.shape[1])):
            queries = slice(heads.start * groups, heads.stop * groups)
            both = torch.cat([key[:, heads], value[:, heads]], dim=-1)
            gathered = gather_varying(both, 2, cut.sizes, self.group)
            keys, values = gathered.split([key.shape[-1], value.shape[-1]], dim=-1)
            own_sinks = None if sinks is None else sinks[queries]
            attended.append(attend_locally(scoring, query[:, queries], keys, values, rendered, own_sinks))
        return torch.cat(attended, dim=2)


class AllToAllAttention(_GroupMode):
    """Every rank gets the whole rows of some heads (DeepSpeed Ulysses): all-to-all before and after attention.

    Heads need not divide. A key head that several ranks need is sent to each of them.
    """

    keeps_query = False

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        cut = mask.sharding
        ranks, heads = len(cut.rank_positions), query.shape[1]
        if heads < ranks:
            raise ConfigError(describe_too_few_heads(heads, ranks))
        query_heads = _split_evenly(heads, ranks)
        groups = heads // key.shape[1]
        key_heads = [slice(one.start // groups, (one.stop - 1) // groups + 1) for one in query_heads]
        mine = query_heads[cut.rank]
        queries = self._gather_rows(query, query_heads, cut.sizes, cut.rank)
        keys = _repeat_heads(self._gather_rows(key, key_heads, cut.sizes, cut.rank), mine, groups)
        values = _repeat_heads(self._gather_rows(value, key_heads, cut.sizes, cut.rank), mine, groups)
        rendered = mask.render(cut.all_ranks, cut.all_ranks)
        own_sinks = None if sinks is None else sinks[mine]
        attended_BShD = attend_locally(scoring, queries, keys, values, rendered, own_sinks)
        rows, own, width = attended_BShD.shape[0], cut.sizes[cut.rank], attended_BShD.shape[3]
        shapes = [(rows, own, one.stop - one.start, width) for one in query_heads]
        return torch.cat(all_to_all(attended_BShD.split(cut.sizes, dim=1), shapes, self.group), dim=2)

    def _gather_rows(self, states: Tensor, heads: Sequence[slice], sizes: list[int], rank: int) -> Tensor:
        """Turn [B, H, s, D], all heads of some tokens, into [B, h, S, D], some heads of all tokens."""
        count = heads[rank].stop - heads[rank].start
        shapes = [(states.shape[0], count, size, states.shape[3]) for size in sizes]
        return torch.cat(all_to_all([states[:, one] for one in heads], shapes, self.group), dim=2)


def _repeat_heads(states: Tensor, queries: slice, groups: int) -> Tensor:
    """Repeat key or value heads for each query head, where query heads do not share them evenly."""
    first = queries.start // groups
    owners = [head // groups - first for head in range(queries.start, queries.stop)]
    times = len(owners) // states.shape[1]
    is_even = owners == [head // times for head in range(times * states.shape[1])]
    return states if is_even else states[:, owners]


def _split_evenly(count: int, parts: int) -> list[slice]:
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def describe_too_few_heads(heads: int, ranks: int) -> str:
    return (
        f"all_to_all gives each rank whole heads, and a layer has {heads} for {ranks} ranks. "
        f"Use cp = {heads} or less, or the mode ring_attn or gather, which leave heads whole."
    )


class RingAttention(_GroupMode):
    """Keys and values travel; queries stay."""

    def __call__(
        self, scoring: ScoreOptions, mask: ShardedMask, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        # One message per block instead of two.
        both = torch.cat([key, value], dim=-1)
        attended, logsum = _Ring.apply(query, both, key.shape[-1], scoring, mask, self.group)
        if sinks is not None:  # one more key per head that takes weight and gives nothing
            attended = attended * torch.sigmoid(logsum - sinks.float()[:, None]).unsqueeze(-1)
        return attended.to(query.dtype).transpose(1, 2).contiguous()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, both: Tensor, key_width: int, scoring: ScoreOptions, mask: ShardedMask, group: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.key_width, ctx.scoring, ctx.mask, ctx.group = key_width, scoring, mask, group
        # The backward pass computes blocks again, and must drop the same weights.
        ctx.random = None
        if scoring.dropout:
            ctx.random = torch.cuda.get_rng_state(query.device) if query.is_cuda else torch.get_rng_state()
        # In float32: each of the blocks adds a rounding error otherwise.
        attended = query.new_zeros(*query.shape[:3], both.shape[-1] - key_width, dtype=torch.float32)
        logsum = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        for owner, block in _iter_blocks(both, mask, group):
            if mask.is_empty(owner):  # the block travels on all the same: other ranks may need it
                continue
            seen = mask.render((mask.sharding.rank,), (owner,))
            part, part_sum = attend_block(query, block, key_width, seen, scoring)
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
        with torch.random.fork_rng([query.device] if query.is_cuda else [], enabled=ctx.random is not None):
            if ctx.random is not None and query.is_cuda:  # draw the same numbers as the forward pass
                torch.cuda.set_rng_state(ctx.random, query.device)
            elif ctx.random is not None:
                torch.set_rng_state(ctx.random)
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
                arriving = pass_to_next_rank(of_block, _next_shape(both, mask, owner), ctx.group)
        assert arriving is not None
        return of_query.to(query.dtype), arriving().to(both.dtype), None, None, None, None


def _iter_blocks(both: Tensor, mask: ShardedMask, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (owner, keys and values) of this rank and then of the ones before it; the next block is in flight."""
    ranks, rank = len(mask.sharding.rank_positions), mask.sharding.rank
    block = both
    for step in range(ranks):
        owner = (rank - step) % ranks
        coming = pass_to_next_rank(block, _next_shape(both, mask, owner), group) if step < ranks - 1 else None
        yield owner, block
        if coming is not None:
            block = coming()


def _next_shape(both: Tensor, mask: ShardedMask, owner: int) -> tuple[int, ...]:
    """Return the shape of the block that follows that of `owner`."""
    sizes = mask.sharding.sizes
    return (*both.shape[:2], sizes[(owner - 1) % len(sizes)], both.shape[3])


def _fraction(part: Tensor, total: Tensor) -> Tensor:
    """Return a block's fraction of all weight, [B, H, s, 1]: 0 where neither has any, and -inf - -inf is NaN."""
    return torch.exp(part - total).nan_to_num(0.0).unsqueeze(-1)


def attend_block(
    query: Tensor, both: Tensor, key_width: int, mask: Tensor | BlockMask | RangeMask, scoring: ScoreOptions
) -> tuple[Tensor, Tensor]:
    """Attend to one block alone: return the output [B, H, s, D], and the logsumexp [B, H, s]."""
    key, value = both[..., :key_width], both[..., key_width:]
    mask = mask.block_mask if isinstance(mask, RangeMask) else mask
    if isinstance(mask, BlockMask):
        if not scoring.dropout and min(query.shape[-1], value.shape[-1]) >= _FLEX_MIN_HEAD_DIM:
            # transformers keeps one compiled FlexAttention, which also returns the logsumexp.
            layer = nn.Module()
            layer.training = scoring.training
            found, logsum = get_flex_attention()(
                layer, query, key, value, mask, scaling=scoring.scaling, softcap=scoring.softcap
            )
            return found.transpose(1, 2), logsum
        queries, keys = (torch.arange(one.shape[2], device=query.device) for one in (query, key))
        row = torch.arange(query.shape[0], device=query.device)[:, None, None, None]
        mask = mask.mask_mod(row, torch.zeros_like(row), queries[None, None, :, None], keys[None, None, None, :])
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    strip = max(1, _MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts, sums = [], []
    for queries, seen in zip(query.split(strip, dim=2), mask.split(strip, dim=2), strict=True):
        scores = (queries @ key.transpose(2, 3)).float() * scoring.scaling
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        scores = scores.masked_fill(~seen, _MASKED)
        sums.append(scores.logsumexp(dim=-1))
        weights = torch.exp(scores - sums[-1].unsqueeze(-1)).to(value.dtype)
        parts.append(nn.functional.dropout(weights, p=scoring.dropout, training=scoring.training) @ value)
    return torch.cat(parts, dim=2), torch.cat(sums, dim=2)


# ---------------------------------------------------------------------------------------------------- collectives
#
# Ranks may have tensors of different sizes. Only operations that gloo and NCCL both have, under names that torch 2.11
# to 2.15 share.


def gather_varying(tensor: Tensor, dim: int, sizes: Sequence[int], group: Group) -> Tensor:
    """Return the tensors of all ranks, concatenated along `dim`; gradients are summed over the ranks."""
    return Collective.apply(tensor, _gather_padded, _sum_own_rows, dim, tuple(sizes), group)


def _gather_padded(tensor: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> Tensor:
    rows = tensor.movedim(dim, 0)
    # gloo's all_gather needs equal shapes.
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    found = zip(all_gather(padded, group), sizes, strict=True)
    return torch.cat([one[:size] for one, size in found]).movedim(0, dim)


def _sum_own_rows(gradient: Tensor, dim: int, sizes: tuple[int, ...], group: Group) -> Tensor:
    # All-to-all and a local sum instead of reduce_scatter, which needs equal shapes; the sum is in float32.
    rows = gradient.movedim(dim, 0).contiguous()
    own, ranks = sizes[dist.get_rank(group)], len(sizes)
    received = rows.new_empty(ranks * own, *rows.shape[1:])
    dist.all_to_all_single(received, rows, [own] * ranks, list(sizes), group=group)
    return received.unflatten(0, (ranks, own)).sum(0, dtype=torch.float32).to(rows.dtype).movedim(0, dim)


def all_to_all(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Send a piece to each rank, and return the pieces received, whose shapes are known; differentiable."""
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    send = [piece.numel() for piece in pieces]
    receive = [torch.Size(shape).numel() for shape in shapes]
    there, back = partial(_exchange, send, receive), partial(_exchange, receive, send)
    received: Tensor = Collective.apply(flat, there, back, group)
    return [part.view(*shape) for part, shape in zip(received.split(receive), shapes, strict=True)]


def _exchange(send: list[int], receive: list[int], flat: Tensor, group: Group) -> Tensor:
    received = flat.new_empty(sum(receive))
    dist.all_to_all_single(received, flat.contiguous(), receive, send, group=group)
    return received


def pass_to_next_rank(tensor: Tensor, shape: Sequence[int], group: Group) -> Callable[[], Tensor]:
    """Begin to send a tensor to the next rank, and to receive one from the one before; return what waits for it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    transport = TensorTransport.of(group, tensor.device)
    sent, received = transport.prepare_send(tensor), transport.allocate_receive(shape, tensor.dtype)
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    # In one batch: with NCCL, separate sends and receives around a ring would wait for one another.
    both = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
    works = dist.batch_isend_irecv(both)
    in_flight = [sent]  # its memory must not be used again before it is sent

    def wait() -> Tensor:
        for work in works:
            work.wait()
        in_flight.clear()
        return transport.finish_receive(received)

    return wait


register_context_parallel_mode("gather", GatherAttention)
register_context_parallel_mode("all_to_all", AllToAllAttention)
register_context_parallel_mode("ring_attn", RingAttention)
