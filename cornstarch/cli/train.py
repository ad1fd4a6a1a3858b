"""`cornstarch train`: from a config to a trained model and a report; `cornstarch verify` tries its plan on a twin."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cornstarch.cli import INTERRUPTED, ConfigPath, Overrides, import_quickly, quiet_libraries, read_checked_config
from cornstarch.cli.launch_run import PlanKeeper, RunLaunch, find_launch
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.config import RunConfig
    from cornstarch.plan.layout import Layout


def train(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="The config, a YAML file. Default: the demo.")
    ] = None,
    overrides: Overrides = None,
    restart: Annotated[bool, typer.Option("--restart", help="Move an earlier run aside and start over.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume from a checkpoint although the config has changed.")
    ] = False,
    nproc: Annotated[
        str | None, typer.Option(help="Processes to start here; auto: one per GPU; 2:4: as many as there are.")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Restart up to N times after a failure. Overrides launch.restarts."),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Machines, or the least and the most (1:4). Run this command on each of them."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="The number of this machine, from 0.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="An address of machine 0, and a free port there.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write trace.json: a few pipeline steps for chrome://tracing and Perfetto.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile a few steps: the time of each part, and a trace.")
    ] = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan of `cornstarch plan --output`. Overrides the config's.")
    ] = None,
) -> None:
    """Train a model, resuming from the newest checkpoint if there is one, and write a report.

    Without a config, a small model learns from real images, sounds and text that come with Cornstarch, in about a
    minute on a laptop.
    """
    from cornstarch.config.run_folder import check_trace
    from cornstarch.demo import demo_config
    from cornstarch.launch import current_world
    from cornstarch.plan.layout import Layout, check_executable

    changes = list(overrides or ())
    if config is not None and "=" in config and not Path(config).exists():  # an override of the demo
        changes, config = [config, *changes], None
    run = demo_config(changes, plan) if config is None else read_checked_config(Path(config), changes, plan)
    launch = find_launch(run, nproc, nnodes, node_rank, master, restarts)
    options = {"allow_changes": allow_changes, "trace": trace, "profile": profile}  # every process gets them
    # Both before an earlier run is moved aside, and before any process starts: a mistake must not cost anything.
    planner = None
    if run.parallel.auto and launch is not None and launch.range.world > 1:
        planner = PlanKeeper(run, launch.range.is_elastic)
        if launch.is_first:
            planner.choose(launch.first_size)
    layout = None
    if not run.parallel.auto:
        check_executable(run.parallel)
        if trace:
            check_trace(run.parallel.is_pipeline)
        layout = Layout.of(run.parallel, *_get_world_size(launch))
    is_first = launch.is_first if launch is not None else current_world().rank == 0
    if restart and is_first:
        _set_aside(run)
    if launch is not None:
        command = [sys.executable, "-m", "cornstarch", "train", *([config] if config else []), *changes]
        command += [f"--{name.replace('_', '-')}" for name, is_given in options.items() if is_given]
        if planner is not None:
            plan = planner.path
        command += ["--plan", str(plan)] if plan is not None else []
        raise typer.Exit(launch.run(command, run, prepare=(lambda *_: []) if planner is None else planner.prepare))
    if _train_process(run, options, layout):
        raise typer.Exit(INTERRUPTED)


def _set_aside(run: RunConfig) -> None:
    from cornstarch.config.run_folder import RunFolder

    if run.checkpoint.folder is not None:
        from cornstarch.checkpoint.storage import check_empty  # imports torch

        check_empty(run.checkpoint.folder)  # it would not be moved aside, and the run would go on from there
    if (aside := RunFolder(run.folder).set_aside()) is not None:
        print(f"{run.folder}: moved the earlier run to {aside}")


def _get_world_size(launch: RunLaunch | None) -> tuple[int, int]:
    """Return the number of processes, and how many of them one machine has."""
    from cornstarch.launch import current_world

    if launch is not None:
        return launch.first_size.world, launch.first_size.local
    world = current_world()
    return world.size, world.local_size


def _train_process(run: RunConfig, options: dict[str, Any], layout: Layout | None) -> bool:
    """Train in this process, in a process group if there are others; return whether Ctrl-C ended the run."""
    from cornstarch.launch import agree, current_world, start_process_group
    from cornstarch.launch.stop_guard import StopGuard
    from cornstarch.plan.validation import as_data

    world, device = current_world(), None
    with ExitStack() as stack:
        stack.enter_context(StopGuard(run.folder, world.rank == 0).listen())
        with import_quickly():
            quiet_libraries()
            from cornstarch.train import Trainer
        if world.size > 1:
            import torch

            from cornstarch.engine.plan_requirements import check_optimizer

            if layout is not None:
                check_optimizer(run, layout)  # before the group exists: every rank finds the same, and none waits
            uses_gpu = run.device.startswith("cuda") or (run.device == "auto" and torch.cuda.is_available())
            device = stack.enter_context(start_process_group(world, "cuda" if uses_gpu else "cpu"))
            agree(as_data(run))
        trainer = Trainer(run, command=shlex.join(["cornstarch", *sys.argv[1:]]), device=device, **options)
        result = trainer.fit()
        generates_text = trainer.task.name in ("multimodal", "causal-lm", "seq2seq-lm")
        if result.status == "finished" and generates_text and trainer.rank == 0:
            print(f"Try it: cornstarch generate {run.folder}")
        return result.status == "stopped" and trainer.stop_signal.by_keyboard


def verify(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Processes. Default: two replicas of the plan, if few.")
    ] = None,
) -> None:
    """Run the config's plan on a tiny twin of its model, in local processes, and compare it with one process.

    The twin has the same classes and options, but few and narrow layers. Three steps on the first samples are compared,
    some of them without their images and sounds: the loss, every gradient and every parameter. No GPU is needed.
    """
    from cornstarch.config.config_file import UNDECIDED
    from cornstarch.plan.layout import Layout, check_executable

    run = read_checked_config(config, overrides)
    if run.parallel.auto:
        raise ConfigError(UNDECIDED)
    plan = run.parallel
    check_executable(plan)
    quiet_libraries()
    from cornstarch.verify.twin_trial import TOLERANCE, TrialError, build_twin_run, choose_trial_size, run_trial

    ranks, replicas = choose_trial_size(plan) if nproc is None else (nproc, Layout.of(plan, nproc).dp)
    if ranks == 1:
        print("The plan has one process; there is nothing to compare.")
        return
    with TemporaryDirectory() as folder:
        place = Path(folder)
        twin = build_twin_run(run, place / "run", replicas)
        print(f"{plan.describe()}\n\nA tiny twin of the model, {ranks} processes against one:", flush=True)
        try:
            found = run_trial(twin, ranks, place)
        except TrialError as error:
            if not error.is_shown:
                print(error, file=sys.stderr)
            raise typer.Exit(error.code) from None
    width = max(len(one.part) for one in found.parts)
    print(f"{'':{width}}  largest difference of a gradient, of a parameter after 3 steps (allowed: {TOLERANCE:g})")
    for one in found.parts:
        missing = f"  only on one side: {', '.join(one.missing[:3])}" if one.missing else ""
        print(f"{one.part:{width}}  {one.gradients:.1e}  {one.parameters:.1e}{missing}")
    print(f"{'loss':{width}}  {found.loss:.1e}")
    if not found.is_equal:
        where = f" The difference begins in {found.begins}." if found.begins else ""
        print(f"\nThe plan and one process compute different results.{where} Do not train with it.", file=sys.stderr)
        raise typer.Exit(1)
    print("\nThe plan computes the same as one process.")
