"""Where costs are measured, and where they go."""

from __future__ import annotations

from pathlib import Path

import torch

from cornstarch.errors import ConfigError
from cornstarch.train.config import RunConfig
from cornstarch.train.precision import choose_placement


def check_place(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file.")
    if not folder.is_dir():
        raise ConfigError(f"{path}: there is no folder {folder}.")


def device_name(config: RunConfig) -> str:
    """Return what this machine calls the device of a run; `cpu` for its processor."""
    place = choose_placement(config.device, config.precision, config.attention).device
    return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type


__all__ = ["check_place", "device_name"]
