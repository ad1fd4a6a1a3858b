"""What the benchmarks of a GPU have in common."""

from __future__ import annotations

import argparse

import torch


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Return what is asked for; refuse in words where there is no GPU."""
    given = arguments.parse_args()
    if not torch.cuda.is_available() and not getattr(given, "tiny", False):
        arguments.error("this measures a CUDA GPU, and torch finds none here")
    return given
