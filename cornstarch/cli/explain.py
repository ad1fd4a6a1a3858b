"""`cornstarch explain`: how ranks work together, step by step, with real numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NAMES = (
    "allreduce, allgather, reducescatter, ddp, zero1, zero2, zero3, fsdp, tp, ulysses, ring, naive, gpipe, 1f1b, "
    "interleaved, zero-bubble"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help=f"One of: {NAMES}.", show_default=False)],
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", help="How many ranks take part.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", metavar="M", help="Pipelines: microbatches of a step.")
    ] = None,
    elements: Annotated[
        int | None,
        typer.Option(
            "--elements",
            metavar="N",
            help="Numbers of a list (collectives), hidden channels (tp), tokens (ulysses, ring), or numbers of an "
            "activation (pipelines).",
        ),
    ] = None,
    parameters: Annotated[
        int | None, typer.Option("--parameters", metavar="N", help="ddp, zero, fsdp: parameters of the model.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Show this step only.")] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with pictures instead, to click through."),
    ] = None,
) -> None:
    """Draw a collective, a kind of parallelism or a schedule, step by step, with the bytes that each rank sends.

    Nothing is started: small lists are sent around in this process, and schedules are those that a run carries out.
    """
    from rich.console import Console

    from cornstarch.errors import ConfigError
    from cornstarch.explain import explain as tell
    from cornstarch.explain.page import write_page
    from cornstarch.explain.terminal import show

    story = tell(topic, ranks, microbatches, elements, parameters)
    if step is not None and not 1 <= step <= len(story.steps):
        raise ConfigError(f"--step {step}: {story.topic} has the steps 1 to {len(story.steps)}.")
    if html is not None:
        write_page(story, html)
        print(html)
    else:
        show(story, Console(highlight=False), step)
