"""Conversions of JSON values of unknown type to the types that the report expects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def as_number(value: object) -> float | None:
    """Return a JSON value if it is a number; NaN and infinities are numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_finite(value: object) -> float:
    """Return a JSON value that must be a finite number; raise ValueError for any other."""
    known = as_number(value)
    if known is None or not math.isfinite(known):
        raise ValueError(f"{value!r} is not a finite number")
    return known


def as_text(value: object) -> str:
    """Return a JSON value as text; "" for null."""
    return "" if value is None else str(value)


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a JSON value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
