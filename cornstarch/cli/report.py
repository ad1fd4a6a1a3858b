"""`cornstarch report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a run: runs/<name>.", show_default=False)
    ],
) -> None:
    """Write report.html and loss.png into a run's folder, also while it is running, and print the page's path."""
    from cornstarch.report import write_report

    print(write_report(run))
