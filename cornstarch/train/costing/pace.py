"""How quickly a device does what is asked of it: matrices, attention, memory.

A kernel takes as long as the slower of two things: multiplying, at a share of what the device multiplies at best, and
reading and writing, at a share of what its memory moves at best; and a little to begin. The shares are measured ones
(docs/costs.md): makers' figures are not reached by any program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Device
from cornstarch.plan.devices import device_or_unknown
from cornstarch.train.costing.operations import Movement, Operation


@dataclass(frozen=True)
class Shares:
    """What of a device's figures programs reach."""

    matrices: float
    attention: float
    """Of what matrices would take at best; and so the next."""
    attention_backward: float
    memory: float
    start: float
    """Seconds until a kernel runs, or until the next operation of a program that is not compiled is called."""
    few_tiles: float = 0.0
    """Results of so many pieces of 128 × 128 are multiplied at half of the speed of large ones."""


# An H200's large products reach 747 of 989 TFLOP/s; those of a step 704; attention (cuDNN) 500 forward, 390 backward.
ON_GPU = Shares(matrices=0.70, attention=0.50, attention_backward=0.39, memory=0.86, start=7e-6, few_tiles=8.0)
ON_MEASURED_GPU = Shares(matrices=0.94, attention=0.66, attention_backward=0.52, memory=0.95, start=7e-6, few_tiles=8.0)
ON_CPU = Shares(matrices=0.85, attention=0.35, attention_backward=0.35, memory=0.55, start=8e-6)


@dataclass(frozen=True)
class Pace:
    """A device, and what of its figures is reached on it."""

    device: Device
    shares: Shares

    @classmethod
    def of(cls, device: Device, is_measured: bool = False) -> Pace:
        """Return the pace of a device.

        Args:
            device: With figures of its maker, or measured ones (`cornstarch doctor --measure`).
            is_measured: Which of them.
        """
        if device.bandwidth is None:  # as a driver tells it: by name and memory
            known = device_or_unknown(device.name)
            device = replace(device, flops=known.flops, rates=known.rates, bandwidth=known.bandwidth)
        if device.bandwidth is None:
            raise ConfigError(
                f"How quickly {device.name} reads its memory is not known. Describe it in a file with "
                "`device.bandwidth`, or measure it: cornstarch doctor --measure."
            )
        if device.is_cpu:
            return cls(device, ON_CPU)
        return cls(device, ON_MEASURED_GPU if is_measured else ON_GPU)

    def product(self, one: Operation, flops: float | None = None) -> float:
        """Return the seconds of a product, or of one of its gradients."""
        shares, asked = self.shares, one.flops if flops is None else flops
        if not asked:
            return 0.0
        filled = one.tiles / (one.tiles + shares.few_tiles)
        work = asked / (self.device.flops_of(one.dtype) * shares.matrices * filled)
        return max(work, self._moving(sum(piece.bytes for piece in (*one.reads, *one.writes)))) + shares.start

    def attention(self, one: Operation, is_backward: bool = False) -> float:
        """Return the seconds of attention; backward it multiplies two and a half times as much."""
        share = self.shares.attention_backward if is_backward else self.shares.attention
        work = one.flops * (2.5 if is_backward else 1.0) / (self.device.flops_of(one.dtype) * share)
        return work + self.shares.start

    def forward(self, one: Movement) -> float:
        """Return the seconds of a kernel that moves."""
        return self.moved(one.read + one.written)

    def backward(self, one: Movement) -> float:
        """Return the seconds of its backward pass, without what is written for gradients of weights."""
        return self.moved(one.backward)

    def moved(self, size: float) -> float:
        """Return the seconds in which so many bytes are read and written."""
        return self._moving(size) + self.shares.start if size else 0.0

    def _moving(self, size: float) -> float:
        assert self.device.bandwidth is not None
        return size / (self.device.bandwidth * self.shares.memory)


__all__ = ["ON_CPU", "ON_GPU", "ON_MEASURED_GPU", "Pace", "Shares"]
