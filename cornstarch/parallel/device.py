"""Where a run computes, and in which precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention.backends import AttentionChoice, check_attention, use_attention
from cornstarch.compat import multiply_all
from cornstarch.config import Precision
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.parallel.distributed import to_local_tensor

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
            if self.device.type == "cuda":
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


class LossScale:
    """A dynamic loss scale, which keeps small fp16 gradients from vanishing and backs off when large ones overflow.

    torch's `GradScaler` looks at one optimizer in one process. Here the norm of all gradients on all ranks decides, so
    that either all ranks step or none does: backward of `value` × loss, `unscale`, the norm, the optimizer's step if it
    is finite, `update`. After `growth_interval` steps with finite gradients the scale is multiplied by `growth_factor`,
    after `hysteresis` steps with infinite ones by `backoff_factor`; it stays between `least` and `most`.
    """

    def __init__(
        self,
        initial: float = 2**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        least: float = 1.0,
        most: float = 2**32,
    ) -> None:
        if not (0 < least <= initial <= most):
            raise ConfigError(
                f"min_scale = {least}, initial_scale = {initial}, max_scale = {most}: expected numbers above 0 in "
                "this order."
            )
        if not (growth_factor >= 1 and 0 < backoff_factor <= 1 and growth_interval >= 1 and hysteresis >= 1):
            raise ConfigError(
                f"growth_factor = {growth_factor}, backoff_factor = {backoff_factor}, growth_interval = "
                f"{growth_interval}, hysteresis = {hysteresis}: expected at least 1, at most 1 and above 0, at least "
                "1, at least 1."
            )
        self.value = float(initial)
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._hysteresis, self._least, self._most = hysteresis, float(least), float(most)
        self._finite_steps = self._infinite_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    @torch.no_grad()
    def unscale(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Divide the gradients of all parameters of this rank by the scale, and multiply them by `factor`."""
        gradients = [to_local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        multiply_all(gradients, torch.tensor(factor / self.value))

    def get_scale(self) -> float:  # the name that torch's `GradScaler` has for it
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the keys of torch's `GradScaler`."""
        return {
            "scale": self.value,
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._finite_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._finite_steps = float(state["scale"]), int(state["_growth_tracker"])
        self._growth, self._backoff = float(state["growth_factor"]), float(state["backoff_factor"])
        self._interval = int(state["growth_interval"])

    def update(self, is_finite: bool) -> None:
        """Adjust the scale after a step, given whether all gradients were finite."""
        if not is_finite:
            self._finite_steps, self._infinite_steps = 0, self._infinite_steps + 1
            if self._infinite_steps >= self._hysteresis:
                self.value = max(self._least, self.value * self._backoff)
                self._infinite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps >= self._interval:
            self.value = min(self._most, self.value * self._growth)
            self._finite_steps = self._infinite_steps = 0


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
