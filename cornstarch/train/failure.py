"""What is said when training cannot go on: losses that are no numbers, memory that is not enough."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.train.config import RunConfig
from cornstarch.train.data.loader import StepBatch
from cornstarch.train.parts import Part
from cornstarch.train.precision import Placement, Reading

_SHOWN = 8
# What torch says with a plain RuntimeError: on a CPU, by CUDA itself, by cuBLAS.
_MEMORY_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class TrainingError(ConfigError):
    """Training cannot go on; the message says why, where, and what to try."""


# ---------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class _Watched:
    step: int
    sample_ids: Sequence[str]
    values: Reading
    """Loss and norm of the gradient."""


class LossWatch:
    """Stops the run when a loss, or the norm of a gradient, is NaN or infinite.

    Reading a number from a GPU waits until it has computed it. So there each step's numbers are read while the next one
    runs, and those of the last step before anything is saved; on a CPU, before the weights change.

    Args:
        config: The run.
        placement: Where it computes.
        late: Whether a step is judged in the next one. Default: on a GPU.
    """

    def __init__(self, config: RunConfig, placement: Placement, late: bool | None = None) -> None:
        self._config = config
        self._late = placement.device.type == "cuda" if late is None else late
        self._pending: list[_Watched] = []
        self.last = math.nan
        """The newest loss that has been read."""

    def add(self, step: int, batch: StepBatch, loss: Tensor, norm: Tensor | None) -> None:
        """Watch a step's numbers."""
        ids = [name for portion in batch.portions for name in portion.sample_ids]
        both = torch.stack([loss.float(), loss.new_zeros(()).float() if norm is None else norm.float()])
        self._pending.append(_Watched(step, ids, Reading(both)))
        self.check(all_steps=not self._late)

    def check(self, *, all_steps: bool = True) -> None:
        """Read what is waiting, the newest step's numbers only if all are asked for."""
        while len(self._pending) > (0 if all_steps else 1):
            self._judge(self._pending.pop(0))

    def _judge(self, watched: _Watched) -> None:
        loss, norm = watched.values.numbers()
        self.last = loss
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = f"The loss is {loss}" if not math.isfinite(loss) else f"The norm of the gradient is {norm}"
        shown = ", ".join(watched.sample_ids[:_SHOWN])
        more = len(watched.sample_ids) - _SHOWN
        raise TrainingError(
            f"{what} in step {watched.step}. Nothing was saved after it.\n"
            f"  Samples of this step: {shown}{f' and {more} more' if more > 0 else ''}.\n"
            f"  Try: {'; '.join(self._remedies())}. Look at these samples with `cornstarch data check`."
        )

    def _remedies(self) -> list[str]:
        config = self._config
        remedies = [f"a smaller optimizer.learning_rate (now {config.optimizer.learning_rate:g})"]
        if config.schedule.warmup == 0:
            remedies.append("a warm-up, schedule.warmup=0.03")
        if config.optimizer.clip is None:
            remedies.append("optimizer.clip=1.0")
        if config.precision == "fp16":
            remedies.append("precision=bf16 or fp32")
        return remedies


# ---------------------------------------------------------------------------------------------------- memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)


def out_of_memory(
    error: BaseException, model: nn.Module, parts: Sequence[Part], config: RunConfig, placement: Placement
) -> TrainingError:
    """Return what to tell the user: where memory ran out, what holds how much, what would fit."""
    where = _place(error.__traceback__, model, parts)
    gradients = sum(p.nbytes for part in parts for p in part.trained.values())
    states = gradients * (2 if "adam" in config.optimizer.name.lower() else 1)
    held = {f"weights of the {part.name}": part.bytes for part in parts}
    held |= {"gradients": gradients, "states of the optimizer (about)": states}
    lines = [f"  {name}: {_gigabytes(size)}" for name, size in held.items() if size]
    total = _capacity(placement)
    fixed = sum(held.values())
    if total is not None:
        lines.append(f"  together {_gigabytes(fixed)} of {_gigabytes(total)}; the rest is for activations")
    return TrainingError(
        f"Memory ran out {where}.\n" + "\n".join(lines) + "\n  Try: " + "; ".join(_remedies(config, fixed, total)) + "."
    )


def _place(trace: TracebackType | None, model: nn.Module, parts: Sequence[Part]) -> str:
    """Say in which part the innermost module of a traceback is."""
    names = {id(module): name for name, module in model.named_modules()}
    found, kind = None, "in the forward pass"
    for frame, _ in traceback.walk_tb(trace):
        function, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if function == "backward":
            kind = "in the backward pass"
        elif isinstance(owner, torch.optim.Optimizer):
            return "in the optimizer's step, when it made its states"
        elif function == "_apply" and isinstance(owner, nn.Module):
            return "when the model was moved to the device"
        if id(owner) in names:
            found = names[id(owner)]
    if found is None:
        return kind
    fitting = [(len(place), part.name) for part in parts for place in part.module_names if found.startswith(place)]
    inside = f", in {found}" if found else ""
    return f"{kind} of the {max(fitting)[1]}{inside}" if fitting else f"{kind}{inside}"


def _capacity(placement: Placement) -> int | None:
    if placement.device.type == "cuda":
        return int(torch.cuda.get_device_properties(placement.device).total_memory)
    with suppress(ImportError):
        import psutil

        return int(psutil.virtual_memory().total)
    return None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _remedies(config: RunConfig, fixed: int, total: int | None) -> list[str]:
    loop = config.loop
    portion = loop.batch_size // loop.accumulation
    if total is not None and fixed > total:
        return [
            "train fewer weights (`train: lora` or `projector`), because weights, gradients and optimizer states "
            "alone do not fit",
            *(["optimizer.name=sgd"] if "adam" in config.optimizer.name.lower() else []),
        ]
    remedies = []
    if portion > 1:
        smaller = next(n for n in range(loop.accumulation + 1, loop.batch_size + 1) if loop.batch_size % n == 0)
        while loop.batch_size // smaller > portion // 2 and smaller < loop.batch_size:
            smaller = next(n for n in range(smaller + 1, loop.batch_size + 1) if loop.batch_size % n == 0)
        remedies.append(
            f"loop.accumulation={smaller}, portions of {loop.batch_size // smaller} samples instead of {portion} "
            "(the same gradient)"
        )
    if not config.recomputes:
        remedies.append("loop.activation_checkpointing=true")
    if config.precision == "fp32":
        remedies.append("precision=bf16")
    remedies.append(f"a smaller data.max_length (now {config.data.max_length})")
    return remedies
