"""How `cornstarch train` starts the processes of a run: how many, on which machines, and how often again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.config import RunConfig
    from cornstarch.launch import World
    from cornstarch.launch.run_director import Size, SizeRange


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

    @property
    def first_size(self) -> Size:
        """The size of the first attempt, if all machines arrive."""
        size = self.range.find_largest(self.range.nodes[1])
        assert size is not None, "checked when the launch was made"
        return size

    def run(self, command: Sequence[str], run: RunConfig, prepare: Callable[[Size, int], list[str]]) -> int:
        """Start the processes, and return the exit code; `prepare` is called before each attempt."""
        from cornstarch.launch import launch
        from cornstarch.launch.node_messages import TOKEN
        from cornstarch.launch.nodes import connect_nodes
        from cornstarch.launch.supervisor import Job, starts_here, supervise

        if not starts_here(os.environ):  # another launcher was registered
            return launch(command, self.range.local[1], run.folder / "logs")
        job = Job(tuple(command), run.folder, self.range, self.restarts, prepare)
        if self.address is None:
            return supervise(job)
        return supervise(job, connect_nodes(job, self.node, *self.address, os.environ.get(TOKEN, "")))


class PlanKeeper:
    """Chooses the plan of a run with `parallel: auto` for each size, and keeps it where its processes read it."""

    def __init__(self, run: RunConfig, is_elastic: bool) -> None:
        from cornstarch.config.run_folder import PLAN

        self._run, self._is_elastic = run, is_elastic
        self.path = run.folder / PLAN
        self._size: Size | None = None
        self._content = ""

    def choose(self, size: Size) -> None:
        """Choose the plan for a size, in a process: here torch would keep memory."""
        from cornstarch.config.config_file import dump_config

        with TemporaryDirectory() as folder:
            config, plan = Path(folder) / "run.yaml", Path(folder) / "plan.yaml"
            config.write_text(dump_config(self._run), encoding="utf-8")
            command = [sys.executable, "-m", "cornstarch", "plan", str(config), "--nproc", str(size.world)]
            ended = subprocess.run([*command, "--output", str(plan), "--quiet"])
            if ended.returncode:
                raise typer.Exit(ended.returncode)
            self._size, self._content = size, plan.read_text(encoding="utf-8")

    def prepare(self, size: Size, attempt: int) -> list[str]:
        """Write the plan of an attempt; return the arguments with which its processes accept a new one."""
        from cornstarch.config.run_folder import RunFolder

        if size != self._size:
            try:
                self.choose(size)
            except typer.Exit:
                raise ConfigError(f"`parallel: auto` has found no plan for {size.world} processes.") from None
        folder = RunFolder(self._run.folder)
        with folder.claim():
            folder.write(self.path.name, self._content)
        return ["--allow-changes"] if self._is_elastic and attempt else []


def find_launch(
    run: RunConfig,
    nproc: str | None,
    nnodes: str | None,
    node_rank: int | None,
    master: str | None,
    restarts: int | None,
) -> RunLaunch | None:
    """Return what to start for the options of a command; None if this process is to train by itself."""
    from cornstarch.launch import World, current_world, process_count
    from cornstarch.launch.attempt_record import is_supervised
    from cornstarch.launch.node_messages import parse_address
    from cornstarch.launch.run_director import SizeRange

    nodes = (1, 1) if nnodes is None else parse_range("nnodes", nnodes, int)
    several = nodes[1] > 1
    world = World() if several and "RANK" not in os.environ else current_world()
    if is_supervised():
        return None
    local = (1, 1) if nproc is None else parse_range("nproc", nproc, process_count)
    wanted = _count_restarts(run, world, restarts)
    _check_nodes(world, nodes[1], node_rank, master)
    if world.size > 1 and local[1] > 1:
        raise ConfigError(
            f"This process is already rank {world.rank} of {world.size}, started by torchrun or a similar launcher; "
            "each of these processes would start more. Remove --nproc."
        )
    if nodes[1] * local[1] == 1 and not wanted:
        return None
    range_ = SizeRange(nodes, local)
    if range_.is_elastic:  # of one size, a misfit is refused with its own reason
        range_ = replace(range_, check=partial(_find_misfit, run))
        if range_.find_largest(nodes[1]) is None:
            raise ConfigError(range_.describe_refusal(nodes[1]))
    if not several:
        return RunLaunch(range_, wanted)
    assert node_rank is not None and master is not None
    if run.parallel.auto:
        raise ConfigError(
            "`parallel: auto` with --nnodes: plan for the machines first, `cornstarch plan run.yaml --cluster NAME "
            "--output plan.yaml`, and give --plan plan.yaml."
        )
    return RunLaunch(range_, wanted, node_rank, parse_address(master))


def parse_range(name: str, text: str, parse: Callable[[str], int]) -> tuple[int, int]:
    """Return the least and the most of an option that is a number, or two with a colon in between."""
    first, colon, last = text.partition(":")
    try:
        found = (parse(first), parse(last if colon else first))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"--{name} {text}: expected a number of at least 1, or the least and the most, such as 2:4.")
    return found


def _find_misfit(run: RunConfig, size: Size) -> str | None:
    """Return why a run cannot have so many processes; None if it can."""
    from cornstarch.plan.layout import Layout

    if run.parallel.auto:
        return None  # it is planned for the size
    try:
        layout = Layout.of(run.parallel, size.world, size.local)
    except ConfigError as error:
        return str(error)
    step = run.loop.microbatches * layout.dp
    if run.loop.batch_size % step and not run.data.packing:
        return f"loop.batch_size = {run.loop.batch_size} does not divide into {layout.dp} replicas and microbatches."
    return None


def _check_nodes(world: World, nnodes: int, node_rank: int | None, master: str | None) -> None:
    if nnodes == 1:
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
