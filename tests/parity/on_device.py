"""The part of the matrix that is run on a GPU: the ways to spread a model that move tensors differently.

All processes share the one GPU and talk through gloo. What is compared, and with what, is as in the whole matrix: the
same steps in one process on the same device. In fp32 every number is compared. In bf16 the rounding of a sum depends on
how it was cut, so only whole sets of numbers can be: the norm of all differences as a share of the norm of all values.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill

from cornstarch.attention import cudnn_attention as cudnn
from cornstarch.attention import flash_attention as flash
from tests.parity.cell import STEPS, Deviation, Matrix, Mismatch, Place
from tests.parity.columns import COLUMNS, LOADS
from tests.parity.pool import Failed, Pool
from tests.parity.rows import row_of
from tests.versions import versions_of

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu_parity.md"

ROWS = ("llm", "frozen_vision", "projector", "lora", "packed", "long")
WAYS = ("ddp", "fsdp2", "tp", "ring", "gather", "ulysses", "pp", "pp_gpipe")
LOAD = "mixed"
PRECISIONS = ("fp32", "bf16")
PARTS = [f"{row} {precision}" for precision in PRECISIONS for row in reversed(ROWS)]
"""What can be run apart, the longest first."""

_WIDTH = 120


@dataclass(frozen=True)
class Bounds:
    """How far several processes may be from one, and from one another."""

    loss: float
    """Of losses, and of the norm of all gradients."""
    gradients: float
    parameters: float
    processes: float

    def exceeded(self, found: Deviation) -> list[str]:
        """Return what is too far off."""
        return [name for name, most in vars(self).items() if getattr(found, name) > most]


BOUNDS: Mapping[str, Bounds] = {
    # Rounding of sums that are added up in another order, |a - b| / (|b| + 1 % of the largest |b|). On the CPU, where
    # 1e-4 is allowed, the largest is 5e-5; the attention kernels of a GPU compute exp to some bits less.
    "fp32": Bounds(1e-4, 3e-4, 3e-4, 1e-4),
    # A number of bf16 is off by up to 2^-9 = 0.2 %, and what is added up over processes is rounded once more in each: a
    # few of those in every layer. That a gradient is 1 % off says nothing about which way, so norms are less so. Of the
    # parameters only the steps are off: 3 of 2e-3, by AdamW, which makes a full step also of a small gradient.
    "bf16": Bounds(2e-2, 5e-2, 5e-3, 5e-2),
}

Results = dict[tuple[str, str, str], "Deviation | str"]
"""By row, column and precision: how far a cell is off, or what went wrong."""


def run_part(part: str, device: str) -> Results:
    """Run one row in one precision, in processes of its own."""
    row, precision = part.split(" ")
    workers, found = Pool(device), Results()
    try:
        with tempfile.TemporaryDirectory() as folder:
            matrix = Matrix(workers, Path(folder), place_of(device, precision))
            for column in WAYS:
                start = time.monotonic()
                found[row, column, precision] = result = cell(matrix, row, column)
                told = f"{result.worst:.0e}" if isinstance(result, Deviation) else result
                print(f"{time.monotonic() - start:5.1f} s  {row} / {column} / {precision}: {told}", flush=True)
    finally:
        workers.close()
    return found


def place_of(device: str, precision: str) -> Place:
    """Return where and in what a cell is computed.

    Runs are to be equal there, which lets `auto` attend by FlexAttention; in half precision others are asked for.
    """
    if device != "cuda":
        return Place(device, precision)
    asked = precision != "fp32" and (flash.has_flash() or cudnn.has_cudnn())
    return Place("cuda:0", precision, "varlen" if asked else "auto")


def cell(matrix: Matrix, row: str, column: str) -> Deviation | str:
    """Run one cell; return how far it is off, or what went wrong."""
    try:
        return matrix.cell(row, column, LOAD)
    except (Failed, Mismatch) as error:
        return str(error)


def broken_off(part: str) -> Results:
    """Return what is known of a part that ended without results."""
    row, precision = part.split(" ")
    return {(row, column, precision): "the process that runs this row ended without a result" for column in WAYS}


def problem(result: Deviation | str, precision: str) -> str | None:
    """Return what is wrong with a result."""
    if isinstance(result, str):
        return result
    exceeded = BOUNDS[precision].exceeded(result)
    return f"{', '.join(exceeded)} too far off: {result}" if exceeded else None


# ------------------------------------------------------------------------------------------------ the page


def page(found: Results, device: str, command: str, seconds: float) -> str:
    """Return the page."""
    wrong = sum(problem(result, precision) is not None for (_, _, precision), result in found.items())
    tools = versions_of("torch", "transformers", "peft", "flash-attn-4", "nvidia-cudnn-frontend")
    head = (
        f"**{len(found)} cells: {len(found) - wrong} passed, {wrong} failed.** {datetime.now(UTC):%Y-%m-%d}, "
        f"{_device_name(device)}, {tools}, Python {platform.python_version()}, {seconds / 60:.0f} minutes. "
        "All processes share the one device and talk through gloo; nothing is compiled but FlexAttention; no "
        f"TensorFloat-32. Each cell: {STEPS} steps of {LOADS[LOAD].title.lower()} in several processes against the "
        "same steps in one on the same device."
    )
    lines = ["# Parity on a GPU", "", f"`{command}`", "", fill(head, _WIDTH), ""]
    for precision in PRECISIONS:
        lines += ["", f"## {precision}", "", fill(_about(precision), _WIDTH), "", *_table(found, precision), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _about(precision: str) -> str:
    most = BOUNDS[precision]
    bounds = (
        f"Bounds: losses and norms of gradients {most.loss:g}, gradients {most.gradients:g}, parameters "
        f"{most.parameters:g}; what several processes have differs between them by at most {most.processes:g}."
    )
    measure = (
        "Of gradients and parameters the largest |a − b| / (|b| + 1 % of the largest |b|) of any number."
        if precision == "fp32"
        else "Weights in fp32, autocast to bf16; long rows take FlashAttention-4's or cuDNN's kernels if they are "
        "installed. Of all gradients of a step, and of all parameters, the norm of the "
        "differences as a share of the norm of the values."
    )
    cells = f"A cell has: losses and norms, gradients, parameters after {STEPS} steps; processes (0: equal to the bit)."
    return f"{measure} {bounds} {cells}"


def _table(found: Results, precision: str) -> list[str]:
    heads = " | ".join(COLUMNS[column].title for column in WAYS)
    lines = [f"| | {heads} |", "|---" * (len(WAYS) + 1) + "|"]
    for row in ROWS:
        shown = [_show(found.get((row, column, precision)), precision) for column in WAYS]
        lines.append(f"| {row_of(row).title} | {' | '.join(shown)} |")
    return lines


def _show(result: Deviation | str | None, precision: str) -> str:
    if result is None:
        return ""
    if isinstance(result, str):
        return "**failed**"
    numbers = (result.loss, result.gradients, result.parameters)
    text = f"{' '.join(f'{number:.0e}' for number in numbers)}; {result.processes:.0e}".replace("0e+00", "0")
    return f"**{text}**" if problem(result, precision) else text


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(0) if device == "cuda" else f"{platform.machine()} CPU"


def failures(found: Results) -> Sequence[str]:
    """Return what failed."""
    told = [(cell, problem(result, cell[2])) for cell, result in found.items()]
    return [f"{' / '.join(cell)}: {what}" for cell, what in told if what is not None]
