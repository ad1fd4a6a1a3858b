"""Parameters that several stages have, as tied embeddings are: each holds a copy, and all have the gradient of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.parallel import processes
from cornstarch.parallel.data import local_value
from cornstarch.plan.layout import Layout


@dataclass(frozen=True)
class Tie:
    """One of them, as a process that has it sees it."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    """The processes that have the same part of it."""
    is_first: bool
    """Whether it counts here, and not in another process that has it, too."""


def find_ties(named: Mapping[str, nn.Parameter], layout: Layout) -> list[Tie]:
    """Find who else has a parameter; all processes must ask together.

    Args:
        named: This process's parameters that several stages have, by the name that the whole model has for them.
        layout: Who holds what.
    """
    found = []
    said = processes.gather_data(sorted(named))
    for name in sorted({name for one in said for name in one}):
        group = _same_part([rank for rank, names in enumerate(said) if name in names], layout)
        if name in named and len(group) > 1:
            made = dist.new_group(group, use_local_synchronization=True)
            found.append(Tie(named[name], made, group[0] == processes.rank()))
    return found


def _same_part(holders: Sequence[int], layout: Layout) -> list[int]:
    """Return those of some ranks that have the same coordinates as this one, but for the stage."""

    def coordinates(rank: int) -> tuple[object, ...]:
        place = layout.place(rank)
        return layout.span(place.modules[-1]), place.dp, place.cp, place.tp

    here = coordinates(processes.rank())
    return [rank for rank in holders if coordinates(rank) == here]


@contextmanager
def gradients_added_up(ties: Sequence[Tie]) -> Iterator[None]:
    """Run a block that computes gradients, and add those of tied parameters up, over the stages that have them.

    What was there before has been added up already, and is set aside meanwhile.
    """
    trained = [tie for tie in ties if tie.parameter.requires_grad]
    earlier = [tie.parameter.grad for tie in trained]
    for tie in trained:
        tie.parameter.grad = None
    yield
    for tie, before in zip(trained, earlier, strict=True):
        parameter = tie.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local_value(parameter.grad), group=tie.group)
        if before is not None:
            parameter.grad = parameter.grad + before


__all__ = ["Tie", "find_ties", "gradients_added_up"]
