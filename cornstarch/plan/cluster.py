"""What the machines are: devices, their memory and how much they multiply; no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from cornstarch.errors import ConfigError

KEPT_FREE = 0.05
"""The share of a device's memory that is not planned with: the driver, libraries, gaps between tensors."""


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

    @property
    def usable(self) -> int:
        """Bytes to plan with."""
        return int(self.memory * (1 - KEPT_FREE))


# Gibibytes as torch reports them (`total_memory`), rounded down.
_GIBIBYTES = {
    "B200": 178.0, "H200": 139.8, "H100": 79.1, "A100-80": 79.1, "A100-40": 39.4, "L40S": 44.4, "L4": 22.0, "A40": 44.4,
    "A10": 22.0, "RTX-A6000": 47.4, "RTX-5090": 31.3, "RTX-4090": 23.5, "RTX-3090": 23.5, "V100-32": 31.7,
    "V100-16": 15.7, "T4": 14.5, "MI300X": 191.0,
}  # fmt: skip
_WITHOUT_BF16 = ("V100-32", "V100-16", "T4")
# Tera-operations per second from the makers' data sheets, without sparsity.
_TERA = {
    "B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100-80": 312.0, "A100-40": 312.0, "L40S": 362.0, "L4": 121.0,
    "A40": 149.7, "A10": 125.0, "RTX-A6000": 154.8, "RTX-5090": 209.5, "RTX-4090": 165.2, "RTX-3090": 71.0,
    "V100-32": 125.0, "V100-16": 125.0, "T4": 65.0, "MI300X": 1307.4,
}  # fmt: skip
# Cards of the same name with less power, by what else their names say.
_SLOWER = {("H100", "pcie"): 756.0, ("H100", "nvl"): 835.0}

DEVICES = {
    name: Device(name, int(size * 2**30), name not in _WITHOUT_BF16, _TERA[name] * 1e12)
    for name, size in _GIBIBYTES.items()
}
"""The catalogue."""


def device(name: str) -> Device:
    """Return a device of the catalogue, however its name is written; `cpu` is this machine's memory."""
    wanted = _plain(name)
    if wanted == "cpu":
        return this_cpu()
    known = {_plain(one): found for one, found in DEVICES.items()}
    without_size = _plain(re.sub(r"\d+\s*gi?b\b", "", name.lower()))
    for plain in (wanted, f"rtx{wanted}", without_size):  # `4090` is an RTX-4090, `H100 80GB` an H100
        if plain in known:
            return known[plain]
    several = [found.name for plain, found in known.items() if wanted and plain.startswith(wanted)]
    close = several or [known[plain].name for plain in get_close_matches(wanted, list(known), n=1, cutoff=0.5)]
    advice = f"Did you mean {' or '.join(close)}?" if close else f"Known are {', '.join([*DEVICES, 'cpu'])}."
    raise ConfigError(f"There is no GPU {name!r} in the catalogue. {advice}")


def peak_flops(name: str, precision: str) -> float | None:
    """Return what a device multiplies at best, in operations per second; None if that is not known.

    Args:
        name: The device, as its driver calls it.
        precision: bf16 or fp16. How fast float32 goes depends on what a program allows (TF32), so it is not told.
    """
    lowered = name.lower()
    plain = re.sub(r"\bnvl\b", "", lowered)
    try:
        found = device(plain)
    except ConfigError:
        return None
    if precision not in ("bf16", "fp16") or (precision == "bf16" and not found.has_bf16):
        return None
    slower = (tera * 1e12 for (one, word), tera in _SLOWER.items() if one == found.name and word in lowered)
    return next(slower, found.flops)


def this_cpu() -> Device:
    """Return this machine's memory as a device."""
    import psutil

    return Device("cpu", int(psutil.virtual_memory().total), has_bf16=False)


def _plain(name: str) -> str:
    """Return a name without what people write in several ways: `NVIDIA A100 80GB` is `a10080`."""
    lowered = re.sub(r"nvidia|geforce|amd|instinct|tesla|sxm\d?|pcie|hbm\d?e?|(?<=\d)\s*gi?b\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", lowered)
