"""Sends tokens to the ranks that hold their experts, and the results back: exact, without a capacity.

Tokens are sorted by expert. One small all-gather tells every rank how many tokens each rank has for each expert; an
all-to-all sends the tokens, the model's own function computes the local experts on them, another all-to-all returns the
results, and the rank that the tokens came from adds them up with the router's weights. A rank without tokens for any
expert, and one whose experts get none, take part all the same: all ranks call a layer equally often.

Shape letters: T tokens of this rank, K experts of a token, H channels, R tokens that came to this rank's experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, all_to_all_single
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.collective_ops import RankGroup
from cornstarch.parallel.distributed import Collective, all_gather
from cornstarch.parallel.tensor.shard_boxes import to_local_parameter

_SHARDS = "expert_shards"


@dataclass
class ExpertShards:
    """What a module of experts knows about the ranks that its experts are on."""

    group: RankGroup
    """The ranks that have all experts together, each an equal number of them."""
    experts: int
    """On all of these ranks."""
    data: DeviceMesh
    """The ranks that have the same experts."""
    names: tuple[str, ...]
    """The parameters that are cut."""
    mean_load: float = 0.0
    """The tokens of the mean rank, added up over the forward passes since the last look at it."""
    highest_load: float = 0.0
    """Those of the busiest rank of each pass."""

    @property
    def local(self) -> int:
        return self.experts // self.group.count


def get_expert_shards(module: nn.Module) -> ExpertShards | None:
    """Return how the experts of this very module are shared out; None if they are not, or if it has none."""
    found: ExpertShards | None = module.__dict__.get(_SHARDS)
    return found


def dispatch_tokens(module: nn.Module, shards: ExpertShards) -> None:
    """Let a module of experts, whose parameters were cut, compute its own experts on the tokens of all ranks."""
    module.__dict__[_SHARDS] = shards
    module.__class__ = _derive_dispatching_class(type(module))  # type: ignore[arg-type]


@cache  # modules of one class share the class made of it
def _derive_dispatching_class(kind: type[nn.Module]) -> type[nn.Module]:
    # Tensor parallelism may have put a forward of any arguments around the model's own.
    found = (inspect.signature(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base))
    signature = next(one for one in found if not any(p.kind == p.VAR_POSITIONAL for p in one.parameters.values()))

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Tensor:
        # Models call the three by names of their own: the order is what all have in common.
        _, hidden, index, weights = signature.bind(self, *inputs, **options).arguments.values()
        return _run_experts(self, partial(kind.forward, self), hidden, index, weights)

    # All of the call, with the hooks of FSDP around it, is left out of graphs: how many tokens come is known only then,
    # and ranks wait for one another. What is before and after it in a layer is compiled.
    call = torch.compiler.disable(kind.__call__)
    return type(kind.__name__, (kind,), {"forward": forward, "__call__": call, "__module__": kind.__module__})


def _run_experts(
    module: nn.Module, run_local: Callable[..., Tensor], hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, wherever they are."""
    shards: ExpertShards = module.__dict__[_SHARDS]
    if weights_TK.shape != index_TK.shape:
        raise UnsupportedModelError(
            f"{type(module).__name__} was given weights {list(weights_TK.shape)} for choices {list(index_TK.shape)} of "
            "experts; expert parallelism expects one weight for each. Leave ep at 1."
        )
    group, (tokens, chosen) = shards.group, index_TK.shape
    experts = index_TK.reshape(-1)
    order = torch.argsort(experts, stable=True)
    tables, has_gradient = _count_tokens(experts, hidden_TH, shards)
    if has_gradient and not hidden_TH.requires_grad:
        # Another rank sends gradients back through this layer (its batch has an image, and this one none), and waits
        # for this rank in it.
        hidden_TH = hidden_TH.detach().requires_grad_()
    mine, theirs = tables[group.index], tables[:, group.index]
    send, receive = mine.sum(1).tolist(), theirs.sum(1).tolist()
    rows_RH = exchange_rows(hidden_TH[order // chosen], send, receive, group.process_group)
    numbers = torch.arange(shards.local, device=rows_RH.device).repeat(group.count)
    index_R = numbers.repeat_interleave(theirs.flatten().to(rows_RH.device), output_size=len(rows_RH))
    computed_RH = _compute_local_experts(module, shards, run_local, rows_RH, index_R)
    results = exchange_rows(computed_RH, receive, send, group.process_group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    results_TKH = results[place].view(tokens, chosen, results.shape[-1])
    return (results_TKH * weights_TK.unsqueeze(-1)).sum(1).to(hidden_TH.dtype)


def _count_tokens(experts: Tensor, hidden: Tensor, shards: ExpertShards) -> tuple[Tensor, bool]:
    """Return the tokens [from, to, expert] that ranks send each other, on the CPU; and whether gradients return."""
    counts = torch.zeros(shards.experts + 2, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.int64))
    counts[-1] = torch.is_grad_enabled() and hidden.requires_grad
    table = torch.stack(all_gather(counts, shards.group.process_group)).cpu()  # the one wait for the device
    if int(table[:, -2].sum()):
        raise UnsupportedModelError(
            "A router gave tokens to an expert that does not exist, as models do for tokens that skip their experts. "
            "Expert parallelism cannot dispatch them. Leave ep at 1."
        )
    ranks = shards.group.count
    tables = table[:, :-2].view(ranks, ranks, shards.local)
    loads = tables.sum((0, 2))
    shards.mean_load += float(loads.sum()) / ranks
    shards.highest_load += float(loads.max())
    return tables, bool(table[:, -1].any())


def _compute_local_experts(
    module: nn.Module, shards: ExpertShards, run_local: Callable[..., Tensor], rows: Tensor, index: Tensor
) -> Tensor:
    """Return what the model's own function computes of this rank's experts, each row with a weight of one."""
    ranks = shards.group.count
    # These ranks' tokens are all in one gradient: over them it is a sum, over the other ranks it will be averaged.
    local = {name: _scale_gradient(to_local_parameter(getattr(module, name)), ranks) for name in shards.names}
    if not len(rows):
        # The gradients are zeros, as those of an expert without tokens are in one process, and not missing.
        touched = sum(parameter.reshape(-1)[:0].sum() for parameter in local.values())
        return (rows + touched).to(rows.dtype)
    own = module.__dict__
    own.update(local, num_experts=shards.local)  # attributes are found before parameters
    try:
        return run_local(rows, index[:, None], rows.new_ones(len(rows), 1))
    finally:
        own["num_experts"] = shards.experts
        for name in local:
            own.pop(name, None)  # tensor parallelism inside has its own value there, and removes it


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, divisor: int) -> Tensor:
        context.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / context.divisor, None


def _scale_gradient(x: Tensor, divisor: int) -> Tensor:
    scaled: Tensor = _ScaledGradient.apply(x, divisor)
    return scaled


def exchange_rows(rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Send runs of rows to each rank, and return the rows that came, those of the first rank first; differentiable."""
    there, back = partial(_exchange, send, receive), partial(_exchange, receive, send)
    result: Tensor = Collective.apply(rows, there, back, group)
    return result


def _exchange(send: list[int], receive: list[int], rows: Tensor, group: ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


def measure_balance(modules: Iterable[nn.Module]) -> float | None:
    """Return the tokens of the mean rank over those of the busiest, since the last call; None if nothing was sent."""
    mean = highest = 0.0
    for shards in filter(None, map(get_expert_shards, modules)):
        mean, highest = mean + shards.mean_load, highest + shards.highest_load
        shards.mean_load = shards.highest_load = 0.0
    return mean / highest if highest else None
