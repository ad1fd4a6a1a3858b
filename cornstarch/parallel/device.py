"""Where a run computes, and in which precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cornstarch.attention.backends import AttentionChoice, check_attention, use_attention
from cornstarch.config import Precision
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.gradients import LossScale

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What torch says with a plain RuntimeError: on a CPU, by CUDA itself, by cuBLAS.
_MEMORY_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class DevicePlacement:
    """A device, a precision, and which kernels attend."""

    device: torch.device
    precision: Precision
    attention: AttentionChoice = "auto"
    exact: bool = False
    """Compute in fp32 whatever the precision is, to compare runs number by number; losses are scaled all the same."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.exact else DTYPES[self.precision]

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run a block of forward passes in the precision and with the kernels of this placement."""
        with ExitStack() as stack:
            if self.dtype != torch.float32:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.dtype))
            if self.device.type == "cuda" or self.attention != "auto":
                stack.enter_context(use_attention(self.attention))
            yield

    def loss_scale(self) -> LossScale | None:
        """Return what keeps small gradients of fp16 from vanishing; other precisions need none."""
        # With the numbers of torch's GradScaler.
        return LossScale(growth_interval=2000, hysteresis=1) if self.precision == "fp16" else None

    def move_batch(self, value: Any) -> Any:
        """Return a batch on the device; what is in pinned memory is copied while other things go on."""
        if isinstance(value, Tensor | BatchFacts):
            return value.to(self.device, non_blocking=True)
        if isinstance(value, Mapping):
            return {key: self.move_batch(item) for key, item in value.items()}
        return [self.move_batch(item) for item in value] if isinstance(value, list) else value

    def memory(self) -> int:
        """Return the most bytes used so far: of the GPU, or of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return int(_get_process().memory_info().rss)


def pin_batch(value: Any) -> Any:
    """Return a batch in memory that a GPU can copy from by itself."""
    if isinstance(value, BatchFacts):
        return value.pin_memory()
    if isinstance(value, Tensor):
        return value if value.is_cuda or value.is_pinned() else value.pin_memory()
    if isinstance(value, Mapping):
        return {key: pin_batch(item) for key, item in value.items()}
    return [pin_batch(item) for item in value] if isinstance(value, list) else value


class Reading:
    """Numbers on their way from a device: whoever asks waits for them, and not for what was begun after them."""

    def __init__(self, values: Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._values = values
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(values.device))

    def numbers(self) -> list[float]:
        if self._there is not None:
            self._there.synchronize()
        return self._values.tolist()


@cache
def _get_process() -> Any:
    import psutil

    return psutil.Process()  # its start is looked up: once is enough


def choose_placement(device: str, precision: str, attention: AttentionChoice = "auto") -> DevicePlacement:
    """Return the device, precision and kernels that a config asks for, if this machine has them."""
    expected = "Expected auto, cpu, cuda or cuda:<number>."
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device = {device}\n  It cannot be used here: {reason}\n  {expected}") from error
    if chosen.type == "meta":
        raise ConfigError(f"device = meta\n  Nothing can be computed there. {expected}")
    if precision == "auto":
        has_bf16 = chosen.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if has_bf16 else "fp32"
    check_attention(attention, chosen, half=precision != "fp32")
    return DevicePlacement(chosen, precision, attention)  # type: ignore[arg-type]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)
