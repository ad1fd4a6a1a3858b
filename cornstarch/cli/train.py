"""`cornstarch train`: from a config to a trained model and a report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cornstarch.cli.main import INTERRUPTED

if TYPE_CHECKING:
    import torch

    from cornstarch.train.config import RunConfig


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG]", help="The run's config, a YAML file. Without one: the demo.", show_default=False
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Values that win over the file's.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Set an earlier run aside and begin anew.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on from a checkpoint although the config has changed.")
    ] = False,
    nproc: Annotated[
        str | None,
        typer.Option(help="Processes to start here; auto: one for each GPU. Under torchrun leave it out."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Write trace.json, some steps of a pipeline, for chrome://tracing and Perfetto."),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Profile some steps: where the time goes, part by part, and a trace of it."),
    ] = False,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="FILE", help="A plan of `cornstarch plan --output`; it stands for the config's."
        ),
    ] = None,
) -> None:
    """Train a model, from the newest checkpoint on if the run has one, and write a report.

    Without a config a small model learns from real images, sounds and text that come with Cornstarch, in about a minute
    on a laptop.
    """
    from cornstarch.cli.paths import path_mistakes
    from cornstarch.demo import demo_config
    from cornstarch.launch import agree, current_world, launch, process_count, start_process_group
    from cornstarch.plan.layout import Layout, check_executable
    from cornstarch.train.runs import PLAN, RunFolder, check_trace
    from cornstarch.train.source import as_data, read_config
    from cornstarch.train.tree import raise_mistakes

    changes = list(overrides or ())
    if config is not None and "=" in config and not Path(config).exists():  # an override of the demo
        changes, config = [config, *changes], None
    if config is None:
        run = demo_config(changes, plan_file)
    else:
        reading = read_config(Path(config), changes, plan=plan_file)
        raise_mistakes([*reading.mistakes, *path_mistakes(reading.values)])
        assert reading.config is not None
        run = reading.config
    world = current_world()
    count = 1 if nproc is None else process_count(nproc)
    # Before an earlier run is set aside, and before any process is started.
    decided = _decided(run, count) if run.parallel.auto and count > 1 else None
    layout = None
    if not run.parallel.auto:
        plan = run.parallel.plan()
        check_executable(plan)
        if trace:
            check_trace(plan.is_pipeline)
        layout = Layout.of(plan, max(count, world.size), max(count, world.local_size))
    if restart and world.rank == 0:
        aside = RunFolder(run.folder).set_aside()
        if aside is not None:
            print(f"{run.folder}: the earlier run is now {aside}")
    if count > 1:
        options = {"--allow-changes": allow_changes, "--trace": trace, "--profile": profile}
        own = [name for name, is_given in options.items() if is_given]
        if decided is not None:
            plan_file = run.folder / PLAN
            with RunFolder(run.folder).claimed():
                RunFolder(run.folder).write(PLAN, decided)
        own += ["--plan", str(plan_file)] if plan_file is not None else []
        command = [sys.executable, "-m", "cornstarch", "train", *([config] if config else []), *changes, *own]
        raise typer.Exit(launch(command, count, run.folder / "logs"))
    if world.size == 1:
        interrupted = _fit(run, allow_changes, trace, profile)
    else:
        from cornstarch.train.optimizer_check import check_optimizer

        if layout is not None:
            check_optimizer(run, layout)  # every rank finds the same: none has to wait for another one
        device = "cuda" if run.device.startswith("cuda") or (run.device == "auto" and _has_gpu()) else "cpu"
        with start_process_group(world, device) as own_device:
            agree(as_data(run))
            interrupted = _fit(run, allow_changes, trace, profile, own_device)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _fit(run: RunConfig, allow_changes: bool, trace: bool, profile: bool, device: torch.device | None = None) -> bool:
    """Train; return whether Ctrl-C ended it."""
    quiet_libraries()
    from cornstarch.train import Trainer

    command = shlex.join(["cornstarch", *sys.argv[1:]])
    trainer = Trainer(run, allow_changes=allow_changes, command=command, device=device, trace=trace, profile=profile)
    result = trainer.fit()
    says = result.status == "finished" and trainer.task.name in ("multimodal", "causal-lm", "seq2seq-lm")
    if says and trainer.rank == 0:
        print(f"talk to it: cornstarch generate {run.folder}")
    return result.status == "stopped" and trainer.interrupted


def _decided(run: RunConfig, count: int) -> str:
    """Return the plan of a run with `parallel: auto`, before its processes are started.

    Another process chooses: here torch would take memory as long as the run lasts.
    """
    import subprocess
    from tempfile import TemporaryDirectory

    from cornstarch.train.source import dump_config

    with TemporaryDirectory() as folder:
        config, plan = Path(folder) / "run.yaml", Path(folder) / "plan.yaml"
        config.write_text(dump_config(run), encoding="utf-8")
        command = [sys.executable, "-m", "cornstarch", "plan", str(config), "--nproc", str(count)]
        ended = subprocess.run([*command, "--output", str(plan), "--quiet"])
        if ended.returncode:
            raise typer.Exit(ended.returncode)
        return plan.read_text(encoding="utf-8")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def quiet_libraries() -> None:
    """Keep other libraries' progress bars and hints out of ours."""
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
