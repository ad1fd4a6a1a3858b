"""What the values of a config are: numbers, shares, sizes; and what a section of it is."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["fp32", "bf16", "fp16"]
TrainMode = Literal["full", "projector", "frozen", "lora"]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
Size = Annotated[str, Field(pattern=rf"^\d+(\.\d+)? ?({'|'.join(_UNITS)})$", examples=["20 GB"])]
"""`500 MB`, `20 GB`, `1.5 TB`."""


def size_in_bytes(size: Size) -> int:
    """Return the bytes of a size."""
    digits = size.rstrip("BkMGT ")
    return int(float(digits) * _UNITS[size[len(digits) :].strip()])


def size_of_bytes(count: int) -> Size:
    """Return a size of at least so many bytes, as one writes it."""
    unit = max((name for name in _UNITS if count >= _UNITS[name]), key=_UNITS.__getitem__, default="B")
    return f"{math.ceil(10 * count / _UNITS[unit]) / 10:g} {unit}"


class Section(BaseModel):
    """A part of the description: unknown names are refused, values are checked, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())
