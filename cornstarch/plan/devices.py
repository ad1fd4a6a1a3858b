"""What one rank computes on: memory, and how quickly it reads and multiplies; no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from cornstarch.errors import ConfigError

KEPT_FREE = 0.05
"""The share of a device's memory that is not planned with: the driver, libraries, gaps between tensors."""
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""What matrices are multiplied in; tf32 is float32 with fewer digits, which a program must allow."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on."""

    name: str
    memory: int
    """Bytes, as programs find them: a little less than what is sold, for the driver and error correction."""
    has_bf16: bool = True
    """Whether it computes in bfloat16 by itself."""
    flops: float | None = None
    """Operations per second at best, of dense matrices in half precision added up in float32; None: unknown."""
    rates: tuple[tuple[str, float], ...] = ()
    """Operations per second by dtype (`DTYPES`), where they are known."""
    bandwidth: float | None = None
    """Bytes per second that are read from its memory or written to it; None: unknown."""
    link: str | None = None
    """What joins several of them in a node, by its name in `cornstarch.plan.links.LINKS`."""

    @property
    def is_cpu(self) -> bool:
        """Whether it is cores of a machine, which also carry what ranks on that machine exchange."""
        return self.name == "cpu"

    @property
    def usable(self) -> int:
        """Bytes to plan with."""
        return int(self.memory * (1 - KEPT_FREE))

    def flops_of(self, dtype: str) -> float:
        """Return the operations per second of matrices in a dtype.

        What a device does not multiply by itself it multiplies in something wider, and as slowly: fp8 in half
        precision, the rest in fp32.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}.")
        known = dict(self.rates)
        if self.flops is not None:
            known = {**({"bf16": self.flops} if self.has_bf16 else {}), "fp16": self.flops, **known}
        for one in (dtype, *(("bf16", "fp16") if dtype == "fp8" else ()), "fp32"):
            if one in known:
                return known[one]
        raise ConfigError(
            f"How quickly {self.name} multiplies in {dtype} is not known. Describe it in a file with `device.flops`, "
            "or measure it: cornstarch doctor --measure."
        )


# Gibibytes as torch reports them (`total_memory`), rounded down. GB/s of the memory, and tera-operations per second in
# fp32, tf32, half precision and fp8, from the makers' data sheets, without sparsity (docs/clusters.md has the sources).
_Row = tuple[str, float, float, float, float | None, float, float | None, str]
_ROWS: list[_Row] = [
    ("B200", 178.0, 8000, 80, 1100, 2250, 4500, "NVLink 5"),
    ("H200", 139.8, 4800, 67, 494.5, 989, 1979, "NVLink 4"),
    ("H100", 79.1, 3350, 67, 494.5, 989, 1979, "NVLink 4"),
    ("A100-80", 79.1, 2039, 19.5, 156, 312, None, "NVLink 3"),
    ("A100-40", 39.4, 1555, 19.5, 156, 312, None, "NVLink 3"),
    ("L40S", 44.4, 864, 91.6, 183, 362, 733, "PCIe 4"),
    ("L4", 22.0, 300, 30.3, 60, 121, 242.5, "PCIe 4"),
    ("A40", 44.4, 696, 37.4, 74.8, 149.7, None, "PCIe 4"),
    ("A10", 22.0, 600, 31.2, 62.5, 125, None, "PCIe 4"),
    ("RTX-A6000", 47.4, 768, 38.7, 77.4, 154.8, None, "PCIe 4"),
    ("RTX-5090", 31.3, 1792, 104.8, 104.8, 209.5, 419, "PCIe 5"),
    ("RTX-4090", 23.5, 1008, 82.6, 82.6, 165.2, 330.3, "PCIe 4"),
    ("RTX-3090", 23.5, 936, 35.6, 35.6, 71, None, "PCIe 4"),
    ("V100-32", 31.7, 900, 15.7, None, 125, None, "NVLink 2"),
    ("V100-16", 15.7, 900, 15.7, None, 125, None, "NVLink 2"),
    ("T4", 14.5, 320, 8.1, None, 65, None, "PCIe 3"),
    ("MI300X", 191.0, 5300, 163.4, 653.7, 1307.4, 2614.9, "Infinity Fabric"),
]  # fmt: skip
# Cards of the same name with less power, by what else their names say. Bridges join only two of them: a node has PCIe.
_OTHER_ROWS: dict[tuple[str, str], _Row] = {
    ("H100", "pcie"): ("H100-PCIe", 79.1, 2000, 51, 378, 756, 1513, "PCIe 5"),
    ("H100", "nvl"): ("H100-NVL", 93.0, 3900, 60, 417.5, 835, 1670.5, "PCIe 5"),
    ("A100-80", "pcie"): ("A100-80-PCIe", 79.1, 1935, 19.5, 156, 312, None, "PCIe 4"),
    ("A100-40", "pcie"): ("A100-40-PCIe", 39.4, 1555, 19.5, 156, 312, None, "PCIe 4"),
}
_WITHOUT_BF16 = ("V100-32", "V100-16", "T4")


def _of_row(row: _Row) -> Device:
    name, gibibytes, memory, fp32, tf32, half, fp8, link = row
    has_bf16 = name not in _WITHOUT_BF16
    tera = {"fp32": fp32, "tf32": tf32, "bf16": half if has_bf16 else None, "fp16": half, "fp8": fp8}
    rates = tuple((dtype, rate * 1e12) for dtype, rate in tera.items() if rate is not None)
    return Device(name, int(gibibytes * 2**30), has_bf16, half * 1e12, rates, memory * 1e9, link)


DEVICES = {row[0]: _of_row(row) for row in _ROWS}
"""The catalogue."""
_VARIANTS = {key: _of_row(row) for key, row in _OTHER_ROWS.items()}

# What one core of a server was measured to do: an AMD EPYC of family 25, model 17 (docs/clusters.md says how).
_CORE_RATES = {"fp32": 94e9, "bf16": 200e9}
_CORE_BANDWIDTH = 19.6e9


def device(name: str) -> Device:
    """Return a device of the catalogue, however its name is written; `cpu` is this machine's memory."""
    wanted = _plain(name)
    if wanted == "cpu":
        return this_cpu()
    known = {_plain(one): found for one, found in DEVICES.items()}
    without_size = _plain(re.sub(r"\d+\s*gi?b?\b", "", name.lower()))
    for plain in (wanted, f"rtx{wanted}", without_size):  # `4090` is an RTX-4090, `H100 80GB` an H100
        if plain in known:
            return _variant(known[plain], name.lower())
    several = [found.name for plain, found in known.items() if wanted and plain.startswith(wanted)]
    close = several or [known[plain].name for plain in get_close_matches(wanted, list(known), n=1, cutoff=0.5)]
    advice = f"Did you mean {' or '.join(close)}?" if close else f"Known are {', '.join([*DEVICES, 'cpu'])}."
    raise ConfigError(f"There is no GPU {name!r} in the catalogue. {advice}")


def device_or_unknown(name: str) -> Device:
    """Return a device of the catalogue, or one of which nothing but its name is known."""
    try:
        return device(name)
    except ConfigError:
        return Device(name, 0)


def with_rates(one: Device, rates: Mapping[str, float]) -> Device:
    """Return a device that multiplies as quickly as told, and of which the catalogue says nothing more about that."""
    half = [rate for dtype, rate in rates.items() if dtype in ("bf16", "fp16")]
    return replace(one, rates=tuple(rates.items()), flops=max(half, default=None))


def _variant(found: Device, lowered: str) -> Device:
    return next((one for (name, word), one in _VARIANTS.items() if name == found.name and word in lowered), found)


def peak_flops(name: str, precision: str) -> float | None:
    """Return what a device multiplies at best, in operations per second; None if that is not known.

    Args:
        name: The device, as its driver calls it.
        precision: bf16 or fp16. How fast float32 goes depends on what a program allows (TF32), so it is not told.
    """
    try:
        found = device(name)
    except ConfigError:
        return None
    if precision not in ("bf16", "fp16") or (precision == "bf16" and not found.has_bf16):
        return None
    return found.flops


def this_cpu(processes: int = 1) -> Device:
    """Return this machine's CPU as a device, or the equal share of each of several processes.

    The memory is this machine's. How quickly a core multiplies is not: that is what one was measured to do.
    """
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores / processes
    rates = tuple((dtype, rate * share) for dtype, rate in _CORE_RATES.items())
    memory = int(psutil.virtual_memory().total) // processes
    return Device("cpu", memory, False, None, rates, _CORE_BANDWIDTH * share, "loopback")


def _plain(name: str) -> str:
    """Return a name without what people write in several ways: `NVIDIA A100 80GB` is `a10080`."""
    written = r"nvidia|geforce|amd|instinct|tesla|sxm\d?|pcie|\bnvl\b|hbm\d?e?|(?<=\d)\s*gi?b?\b"
    return re.sub(r"[^a-z0-9]", "", re.sub(written, "", name.lower()))
