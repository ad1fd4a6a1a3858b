"""Tied weights: parameters that several stages have, such as tied embeddings. Each stage has a copy of them.

The gradients of all copies are summed after the last backward of a step, and not in between: each stage contributes
only its own use of the weight, and all copies must get the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.parallel import distributed
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.plan.layout import Layout

_ORIGINAL_NAMES = "_cornstarch_whole_names"


@dataclass(frozen=True)
class TiedParameter:
    """A parameter of this process that other stages also have."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    """The processes that have the same shard of it."""
    is_first: bool
    """Whether this process counts it, for norms and sizes; the other processes of the group do not."""


def find_tied_parameters(named: Mapping[str, nn.Parameter], layout: Layout) -> list[TiedParameter]:
    """Find the processes that share each parameter; all processes must call it together."""

    def get_coordinates(rank: int) -> tuple[object, ...]:
        place = layout.place(rank)
        return layout.span(place.modules[-1]), place.dp, place.cp, place.tp  # all but the stage

    found = []
    gathered = distributed.all_gather_json(sorted(named))
    here = get_coordinates(distributed.rank())
    # The same order of names everywhere: creating a group is a collective operation of its members.
    for name in sorted({name for names in gathered for name in names}):
        ranks = [rank for rank, names in enumerate(gathered) if name in names and get_coordinates(rank) == here]
        if name in named and len(ranks) > 1:
            group = dist.new_group(ranks, use_local_synchronization=True)
            found.append(TiedParameter(named[name], group, ranks[0] == distributed.rank()))
    return found


@contextmanager
def sum_tied_gradients(ties: Sequence[TiedParameter]) -> Iterator[None]:
    """Run a block that computes gradients, and sum those of tied parameters over the stages that have them.

    Gradients from before the block were summed already; they are set aside, so that they are not summed again.
    """
    trained = [tie for tie in ties if tie.parameter.requires_grad]
    earlier = [tie.parameter.grad for tie in trained]
    for tie in trained:
        tie.parameter.grad = None
    yield
    for tie, before in zip(trained, earlier, strict=True):
        parameter = tie.parameter
        if parameter.grad is None:  # this stage did not use it, but all processes of the group must take part
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(to_local_tensor(parameter.grad), group=tie.group)
        if before is not None:
            parameter.grad = parameter.grad + before


def set_original_names(model: nn.Module, names: Mapping[str, str]) -> None:
    """Store, by local name, the name of a parameter in the whole model: a tied head is the table of embeddings."""
    model.__dict__[_ORIGINAL_NAMES] = dict(names)


def get_original_names(model: nn.Module) -> Mapping[str, str]:
    """Return the names that `set_original_names` stored; most models have none."""
    found: Mapping[str, str] = model.__dict__.get(_ORIGINAL_NAMES, {})
    return found
