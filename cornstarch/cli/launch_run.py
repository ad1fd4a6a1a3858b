"""How `cornstarch train` starts the processes of a run: how many, on which machines, and how often again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.config import RunConfig
    from cornstarch.launch import World
    from cornstarch.launch.run_director import SizeRange


@dataclass(frozen=True)
class RunLaunch:
    """What a supervisor of this machine has to start."""

    range: SizeRange
    restarts: int = 0
    node: int = 0
    address: tuple[str, int] | None = None
    """Where the machines agree; None for one machine."""

    @property
    def is_first(self) -> bool:
        return self.node == 0

    def run(self, command: Sequence[str], run: RunConfig) -> int:
        """Start the processes, and return the exit code."""
        from cornstarch.launch import launch
        from cornstarch.launch.node_messages import TOKEN
        from cornstarch.launch.nodes import connect_nodes
        from cornstarch.launch.supervisor import Job, starts_here, supervise

        if not starts_here(os.environ):  # another launcher was registered
            return launch(command, self.range.local[1], run.folder / "logs")
        job = Job(tuple(command), run.folder, self.range, self.restarts)
        if self.address is None:
            return supervise(job)
        return supervise(job, connect_nodes(job, self.node, *self.address, os.environ.get(TOKEN, "")))


def find_launch(
    run: RunConfig,
    nproc: str | None,
    nnodes: int | None,
    node_rank: int | None,
    master: str | None,
    restarts: int | None,
) -> RunLaunch | None:
    """Return what to start for the options of a command; None if this process is to train by itself."""
    from cornstarch.launch import World, current_world, process_count
    from cornstarch.launch.attempt_record import is_supervised
    from cornstarch.launch.node_messages import parse_address
    from cornstarch.launch.run_director import Size, SizeRange

    several = nnodes is not None and nnodes > 1
    world = World() if several and "RANK" not in os.environ else current_world()
    if is_supervised():
        return None
    count = 1 if nproc is None else process_count(nproc)
    wanted = _count_restarts(run, world, restarts)
    _check_nodes(world, nnodes, node_rank, master)
    if world.size > 1 and count > 1:
        raise ConfigError(
            f"This process is already rank {world.rank} of {world.size}, started by torchrun or a similar launcher; "
            "each of these processes would start more. Remove --nproc."
        )
    size = Size(nnodes or 1, count)
    if size.world == 1 and not wanted:
        return None
    range_ = SizeRange.of(size)
    if not several:
        return RunLaunch(range_, wanted)
    assert node_rank is not None and master is not None
    return RunLaunch(range_, wanted, node_rank, parse_address(master))


def _check_nodes(world: World, nnodes: int | None, node_rank: int | None, master: str | None) -> None:
    if nnodes is None or nnodes == 1:
        if node_rank or master is not None:
            raise ConfigError("--node-rank and --master are for runs on several machines: add --nnodes N.")
        return
    if world.size > 1:
        raise ConfigError(f"--nnodes {nnodes}: torchrun has started this process. Use its --nnodes, or no torchrun.")
    if node_rank is None or master is None:
        raise ConfigError(
            f"--nnodes {nnodes} needs --node-rank, the number of this machine, and --master, an address of machine 0:\n"
            f"  cornstarch train run.yaml --nproc 8 --nnodes {nnodes} --node-rank 0 --master node-0:29500"
        )
    if node_rank >= nnodes:
        raise ConfigError(f"--node-rank {node_rank}: {nnodes} machines have the numbers 0 to {nnodes - 1}.")


def _count_restarts(run: RunConfig, world: World, restarts: int | None) -> int:
    """Return how often this process has to restart the run; not at all under torchrun, which does so itself."""
    wanted = run.launch.restarts if restarts is None else restarts
    if world.size == 1:
        return wanted
    if restarts:
        raise ConfigError(
            f"--restarts {restarts}: this process is rank {world.rank} of {world.size}, and what started it must "
            "restart it: torchrun --max-restarts, or `cornstarch train --nproc` instead of torchrun."
        )
    if wanted and world.rank == 0:
        print(f"launch.restarts = {wanted} has no effect here; torchrun has --max-restarts.", file=sys.stderr)
    return 0
