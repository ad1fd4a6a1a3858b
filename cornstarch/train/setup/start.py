"""What there is of a run before there is a model: the device, the data, and how a model will come to the processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cornstarch.train.config import RunConfig
from cornstarch.train.precision import Placement, choose_placement
from cornstarch.train.runs import RunFolder
from cornstarch.train.setup.data import Rows, RunData, open_data
from cornstarch.train.setup.standing import Standing
from cornstarch.train.speed import check_fp8
from cornstarch.train.spreading import Spreading
from cornstarch.train.state import seed_all


@dataclass(frozen=True)
class Start:
    """A run that can make its model."""

    standing: Standing
    placement: Placement
    """Where this process computes, and in what."""
    data: RunData
    spreading: Spreading
    folder: RunFolder
    note: Callable[[str], None]
    """Tells the user something."""

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.standing.config


def begin(
    standing: Standing,
    device: torch.device | None,
    rows: tuple[Rows | None, Rows | None],
    folder: RunFolder,
    note: Callable[[str], None],
    exact: bool = False,
) -> Start:
    """Seed the random numbers, choose the device and open the data.

    Args:
        standing: The run, and this process's place in it.
        device: This process's own, of several. Default: the config's.
        rows: Training and evaluation data that were made in Python.
        folder: Of the run.
        note: Tells the user something.
        exact: Compute in fp32 whatever the precision of the run.
    """
    config = standing.config
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    seed_all(config.seed)
    placement = choose_placement(str(device or config.device), config.precision, config.attention)
    placement = replace(placement, exact=exact)
    check_fp8(config.fp8, placement.device)
    data = open_data(config, *rows)
    spreading = Spreading(config, standing.layout, placement, note)
    return Start(standing, placement, data, spreading, folder, note)


__all__ = ["Start", "begin"]
