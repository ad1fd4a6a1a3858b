"""The fractions of their peak figures that devices reach in training steps (docs/costs.md has the sources)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cornstarch.plan.cluster import Device


@dataclass(frozen=True)
class Efficiency:
    """The fractions of a device's peak figures that programs reach."""

    matrices: float
    attention: float
    """Of the peak of matrices; the next one, too."""
    attention_backward: float
    memory: float
    start: float
    """Seconds to launch a kernel, or to call the next operation of a program that is not compiled."""
    few_tiles: float = 0.0
    """Results of this many tiles of 128 × 128 are computed at half the speed of large ones."""


# An H200's large products reach 747 of 989 TFLOP/s; those of a step 704; attention (cuDNN) 500 forward, 390 backward.
ON_GPU = Efficiency(matrices=0.70, attention=0.50, attention_backward=0.39, memory=0.86, start=7e-6, few_tiles=8.0)
ON_MEASURED_GPU = replace(ON_GPU, matrices=0.94, attention=0.66, attention_backward=0.52, memory=0.95)
ON_CPU = Efficiency(matrices=0.85, attention=0.35, attention_backward=0.35, memory=0.55, start=8e-6)

_A100 = replace(ON_GPU, matrices=0.76, attention=0.62, attention_backward=0.48)
_BY_DEVICE = {
    "H100": replace(ON_GPU, matrices=0.60),
    "A100-80": _A100,
    "A100-40": _A100,
    "A100-80-PCIe": replace(_A100, matrices=0.71),
    "A100-40-PCIe": replace(_A100, matrices=0.71),
    "MI300X": replace(ON_GPU, matrices=0.45),
}
"""Devices that differ from `ON_GPU`."""
_FIELDS = {"products": "matrices"}  # names in cluster files


def find_efficiency(device: Device, is_measured: bool = False) -> Efficiency:
    """Return the fractions that a device reaches: those of its file, or the known ones of its kind.

    A power limit slows products and attention down, but not the memory.
    """
    known = ON_MEASURED_GPU if is_measured else _BY_DEVICE.get(device.name, ON_GPU)
    known = ON_CPU if device.is_cpu else known
    known = replace(known, **{_FIELDS.get(name, name): value for name, value in device.reached})
    slow = ("matrices", "attention", "attention_backward")
    clock = 1.0 if is_measured else device.clock  # what was measured was measured under the limit
    return replace(known, **{name: getattr(known, name) * clock for name in slow})
