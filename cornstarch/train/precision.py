"""Where a run computes, and in which precision."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cornstarch.errors import ConfigError
from cornstarch.train.build import DTYPES
from cornstarch.train.config import Precision


@dataclass(frozen=True)
class Placement:
    """A device and a precision."""

    device: torch.device
    precision: Precision

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return DTYPES[self.precision]

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        """Return what keeps small gradients of fp16 from vanishing; other precisions need none."""
        return torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    def moved(self, value: Any) -> Any:
        """Return a batch on the device."""
        if isinstance(value, Tensor):
            return value.to(self.device, non_blocking=True)
        if isinstance(value, Mapping):
            return {key: self.moved(item) for key, item in value.items()}
        return [self.moved(item) for item in value] if isinstance(value, list) else value

    def nothing(self) -> Tensor:
        """Return a zero on the device."""
        return torch.zeros((), device=self.device)

    def memory(self) -> int:
        """Return the most bytes used so far: of the GPU, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return int(_process().memory_info().rss)


@cache
def _process() -> Any:
    import psutil

    return psutil.Process()  # its start is looked up: once is enough


def choose_placement(device: str, precision: str) -> Placement:
    """Return the device and precision that a config asks for, if this machine has them."""
    chosen = _device(device)
    if precision != "auto":
        return Placement(chosen, precision)  # type: ignore[arg-type]
    has_bf16 = chosen.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return Placement(chosen, "bf16" if has_bf16 else "fp32")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device = {name}\n  It cannot be used here: {reason}\n  Expected auto, cpu, cuda or cuda:<number>."
        ) from error
    if device.type == "meta":
        raise ConfigError("device = meta\n  Nothing can be computed there. Expected auto, cpu, cuda or cuda:<number>.")
    return device
