"""What the benchmarks of a GPU have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what is asked for; refuse in words where there is no GPU."""
    given = arguments.parse_args()
    if not torch.cuda.is_available() and not getattr(given, "tiny", False):
        arguments.error("this measures a CUDA GPU, and torch finds none here")
    return given


def listed(arguments: argparse.ArgumentParser, asked: str, known: Iterable[str]) -> list[str]:
    """Return names that are separated by commas; one that is not known ends the command."""
    names = asked.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        arguments.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return names
