"""`cornstarch explain`: how ranks work together, step by step, with real numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cornstarch.cli import write_file
from cornstarch.errors import ConfigError

NAMES = (
    "allreduce, allgather, reducescatter, ddp, zero1, zero2, zero3, fsdp, tp, ulysses, ring, naive, gpipe, 1f1b, "
    "interleaved, zero-bubble"
)


def explain(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help=f"One of: {NAMES}.", show_default=False)],
    ranks: Annotated[int | None, typer.Option(metavar="N", help="The number of ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Pipelines: microbatches per step.")] = None,
    elements: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Elements of a tensor (collectives), hidden channels (tp), tokens (ulysses, ring), or elements of an "
            "activation (pipelines).",
        ),
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(metavar="N", help="ddp, zero, fsdp: parameters of the model.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Show only this step.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an interactive page with pictures instead.")
    ] = None,
) -> None:
    """Draw a collective, a kind of parallelism or a schedule, step by step, with the bytes that each rank sends.

    Nothing is started: small lists are exchanged within this process, and schedules are the ones that runs execute.
    """
    from rich.console import Console

    from cornstarch.explain import explain
    from cornstarch.explain.page import render
    from cornstarch.explain.terminal import show

    story = explain(topic, ranks, microbatches, elements, parameters)
    if step is not None and not 1 <= step <= len(story.steps):
        raise ConfigError(f"--step {step}: {story.topic} has the steps 1 to {len(story.steps)}.")
    if html is not None:
        write_file("--html", html, render(story))
        print(html)
    else:
        show(story, Console(highlight=False), step)
