"""Numbers for readers: few digits, a unit, and a dash where there is no value."""

from __future__ import annotations

import math
from datetime import UTC, datetime

MISSING = "–"
_SPACE = "\u00a0"  # no line break between a number and its unit
_STEPS = ("", "k", "M", "B", "T", "P")
_FLOPS = ("", "k", "M", "G", "T", "P", "E")
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_number(value: float | None) -> str:
    """Return a number with four significant digits: 0.07123, 2.1, 12,346, 3e-05."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value == 0:
        return "0"
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{_trim_zeros(mantissa)}e{int(exponent)}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return _trim_zeros(f"{value:,.{decimals}f}")


def format_percent(value: float | None) -> str:
    """Return a fraction in percent."""
    if value is None or not math.isfinite(value):
        return format_number(value)
    return f"{value * 100:.1f}{_SPACE}%"


def format_count(value: float | None) -> str:
    """Return a whole number: exact below 100,000, else with a letter (B is 10⁹)."""
    if value is None or not math.isfinite(value):
        return format_number(value)
    return f"{value:,.0f}" if abs(value) < 1e5 else _format_scaled(value, _STEPS)


def format_tick(value: float) -> str:
    """Return a number as short as possible, for an axis."""
    if abs(value) >= 10_000:
        return _format_scaled(value, _STEPS).replace(_SPACE, "")
    return format_number(value)


def format_flops(value: float | None) -> str:
    """Return a number of floating-point operations."""
    if value is None or not math.isfinite(value):
        return format_number(value)
    scaled = _format_scaled(value, _FLOPS)
    return scaled + ("FLOPs" if scaled[-1].isalpha() else f"{_SPACE}FLOPs")


def format_bytes(value: float | None) -> str:
    """Return a number of bytes."""
    if value is None or not math.isfinite(value):
        return format_number(value)
    power = 0
    while abs(value) >= 1024 and power < len(_SIZES) - 1:
        value, power = value / 1024, power + 1
    return f"{_trim_zeros(f'{value:.1f}')}{_SPACE}{_SIZES[power]}"


def format_duration(seconds: float | None) -> str:
    """Return a time span with its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return format_number(seconds)
    if seconds < 60:
        return f"{_trim_zeros(f'{seconds:.1f}')} s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def format_step_time(seconds: float) -> str:
    """Return a time with three digits: 2.14 s, 310 ms."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def format_error(error: float | None) -> str:
    """Return an error bar, after a space; nothing if there is none."""
    return "" if error is None else f" ±{_SPACE}{error * 100:.0f}{_SPACE}%"


def format_timestamp(unix: float | None) -> str:
    """Return a point in time, in UTC so that a page is the same everywhere."""
    if unix is None or not math.isfinite(unix):
        return MISSING
    try:
        return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):  # a clock that was far off
        return MISSING


def pluralize(number: int, one: str, many: str | None = None) -> str:
    """Return "1 step", "3 steps"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _trim_zeros(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _format_scaled(value: float, letters: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(letters) - 1:
        value, power = value / 1000, power + 1
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{_trim_zeros(f'{value:,.{decimals}f}')}{_SPACE}{letters[power]}".rstrip()
