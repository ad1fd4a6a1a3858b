"""Values of JSON that may be anything, as what they should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number(value: object) -> float | None:
    """Return a JSON value if it is a number; NaN and infinities are numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def text(value: object) -> str:
    """Return a JSON value as text; "" for null."""
    return "" if value is None else str(value)


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def entries(value: object) -> list[Any]:
    """Return a JSON value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
