"""Common functions of the GPU benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments; exit with a message if there is no GPU."""
    given = arguments.parse_args()
    if not torch.cuda.is_available() and not getattr(given, "tiny", False):
        arguments.error("this benchmark needs a CUDA GPU, and torch finds none")
    return given


def listed(arguments: argparse.ArgumentParser, asked: str, known: Iterable[str]) -> list[str]:
    """Return comma-separated names; exit on an unknown one."""
    names = asked.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        arguments.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    return names
