"""Numbers with units, as people write them in files: `450 GB/s`, `3.4 us`, `989 TFLOP/s`; no torch."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, Literal

Unit = Literal["B", "B/s", "s", "FLOP/s"]

_BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS = {"kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8}
_UNITS: dict[Unit, dict[str, float]] = {
    "B": _BYTES,
    "B/s": {f"{name}/s": factor for name, factor in _BYTES.items()} | _BITS,
    "s": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "FLOP/s": {"FLOP/s": 1, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
}
_EXAMPLES: dict[Unit, str] = {
    "B": "a size such as `80 GB` or `79.1 GiB`",
    "B/s": "bytes a second such as `450 GB/s` or `400 Gbit/s`",
    "s": "a time such as `5 us`",
    "FLOP/s": "operations a second such as `989 TFLOP/s`",
}
_LARGEST = 10**300
_WRITTEN = re.compile(r"\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*([^\d\s].*?)?\s*")


def quantity(value: Any, unit: Unit, least: float | None = None) -> float:
    """Return a number in `unit`, from a number or a text with its unit; ValueError says what was expected.

    Args:
        value: What stands in a file.
        unit: What it is in.
        least: The least that is allowed; by default it must be above 0.
    """
    expected = f"Expected {_EXAMPLES[unit]}"
    number = value if isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST) else None
    if isinstance(value, str) and (found := _WRITTEN.fullmatch(value)):
        factor = _factor(found[2] or "", unit)
        if factor is None:
            raise ValueError(f"{expected}. The unit {found[2]!r} is none of {', '.join(_UNITS[unit])}.")
        number = float(Decimal(found[1]) * Decimal(str(factor)))  # 3.4 × 10⁻⁶ is no product of two floats
    if number is None:
        raise ValueError(f"{expected}.")
    if not (math.isfinite(number) and (number > 0 if least is None else number >= least)):
        raise ValueError(f"{expected}, {'more than 0' if least is None else f'at least {least:g}'}.")
    return float(number)


def _factor(written: str, unit: Unit) -> float | None:
    """Return what a unit stands for, however its letters are written where that is not ambiguous."""
    if not written:
        return 1.0
    known = _UNITS[unit]
    lowered = re.sub(r"flops$", "flop/s", written.lower())
    return known.get(written) or {name.lower(): factor for name, factor in known.items()}.get(lowered)


def written(value: float, unit: Unit) -> str:
    """Return a number with a unit that makes it short; without one where that would lose digits."""
    decimal = [(factor, name) for name, factor in _UNITS[unit].items() if "i" not in name and name != "µs"]
    factor, name = max((one for one in decimal if one[0] <= value), default=min(decimal))
    text = f"{value / factor:.6g} {name}"
    exact = quantity(text, unit, least=0) == value
    return text if exact else repr(value)
