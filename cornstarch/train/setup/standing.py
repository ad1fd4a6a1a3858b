"""Where this process stands in a run: which plan that has, and what of it is this process's."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from cornstarch.errors import ConfigError
from cornstarch.launch import current_world
from cornstarch.parallel import processes
from cornstarch.parallel.mesh import Replica
from cornstarch.plan.layout import Layout, check_executable
from cornstarch.plan.options import APART
from cornstarch.train.config import RunConfig
from cornstarch.train.deciding import Decision, decide
from cornstarch.train.optimizer_check import check_optimizer


@dataclass(frozen=True)
class Standing:
    """A run's plan, and this process's place in it."""

    config: RunConfig
    """The run, with its plan."""
    decision: Decision | None
    """`parallel: auto`: what was decided."""
    layout: Layout
    """Who holds what."""
    rank: int
    ranks: int
    replica: Replica
    """The processes that work on the same samples."""

    @classmethod
    def of(cls, config: RunConfig, device: torch.device | None) -> Standing:
        """Return it for this process; all of them must ask.

        Args:
            config: The run, whose plan may be left to be decided.
            device: This process's own, of several. Default: the config's.
        """
        rank, ranks = processes.rank(), processes.size()
        _check_acquainted(ranks)
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        decision = decide(config, ranks, per_node, device) if config.parallel.auto else None
        config = config if decision is None else decision.config
        plan = config.parallel.plan()
        check_executable(plan)  # also in one process, which would leave it out without a word
        layout = Layout.of(plan, ranks, per_node)
        check_optimizer(config, layout)
        return cls(config, decision, layout, rank, ranks, Replica.of(layout, rank))

    @property
    def is_apart(self) -> bool:
        """Whether each process trains by itself, on batches of its own."""
        return self.ranks > 1 and self.config.parallel.data.kind in APART

    @property
    def draws_as(self) -> int:
        """The first of the processes that draw the same random numbers as this one."""
        same = (rank for rank in range(self.ranks) if Replica.of(self.layout, rank).share == self.replica.share)
        return next(same)


def _check_acquainted(ranks: int) -> None:
    """Refuse to train the same in every one of several processes."""
    if ranks == 1 and (world := current_world()).size > 1:
        raise ConfigError(
            f"This is process {world.rank} of {world.size}, but they do not know one another. Make the trainer "
            "inside `with cornstarch.launch.start_process_group(cornstarch.launch.current_world(), device):`, or "
            "use `cornstarch train`."
        )


__all__ = ["Standing"]
