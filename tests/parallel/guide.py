"""The guide's page, run by one of several processes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.test_docs import DOCS, run_page

PAGE = DOCS / "ddp_to_fsdp.md"


@dataclass(frozen=True)
class Said:
    """The numbers that the page computes."""

    losses: list[list[float]]
    """Of each way to wrap, step by step."""
    norms: list[float]
    trained: dict[str, list[float]]
    """Norms of the gradients of the Trainer's steps, by kind."""


def run_guide(folder: str) -> Said:
    """Run the page in `folder`, with the group that this process is in already."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch("cornstarch.launch.start_process_group", _the_group_that_is_there):
            found = run_page(PAGE.read_text(encoding="utf-8"), str(PAGE))
    finally:
        os.chdir(before)
    return Said(found["results"], [norm.item() for norm in found["norms"]], found["run_norms"])


def _the_group_that_is_there(*_: Any) -> AbstractContextManager[torch.device]:
    return nullcontext(torch.device("cpu"))


def lay_links(hub: Path, folder: Path) -> None:
    """Put what a reader has into a folder where the page may write."""
    folder.mkdir(exist_ok=True)
    for thing in hub.iterdir():
        (folder / thing.name).symlink_to(thing)
