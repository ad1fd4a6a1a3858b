"""The types of a config's values: numbers, fractions, sizes; and `Section`, which accepts other names of fields."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

TrainMode = Literal["full", "projector", "frozen", "lora"]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
false_as_off = BeforeValidator(lambda value: "off" if value is False else value)  # YAML's `off`

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
Size = Annotated[str, Field(pattern=rf"^\d+(\.\d+)? ?({'|'.join(_UNITS)})$", examples=["20 GB"])]
"""`500 MB`, `20 GB`, `1.5 TB`."""


def parse_size(size: Size) -> int:
    """Return the bytes of a size."""
    digits = size.rstrip("BkMGT ")
    return int(float(digits) * _UNITS[size[len(digits) :].strip()])


def format_size(count: int) -> Size:
    """Return `count` bytes as a size, rounded up."""
    unit = max((name for name in _UNITS if count >= _UNITS[name]), key=_UNITS.__getitem__, default="B")
    return f"{math.ceil(10 * count / _UNITS[unit]) / 10:g} {unit}"


class Also(tuple[str, ...]):
    """Other names of a field: those of earlier versions, of Transformers, Accelerate and Lightning."""

    def __new__(cls, *names: str) -> Also:
        return super().__new__(cls, names)


class Section(BaseModel):
    """A section of a config: unknown names are refused, values are checked, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _rename_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not (data.keys() & aliases_of(cls).keys()):
            return data
        renamed = {name: value for name, value in data.items() if name not in aliases_of(cls)}
        for alias, name in aliases_of(cls).items():
            if alias in data and renamed.setdefault(name, data[alias]) != data[alias]:
                raise ValueError(f"`{alias}` and `{name}` are the same option, with different values; keep one")
        return renamed


@cache
def aliases_of(kind: type[Section]) -> dict[str, str]:
    """Return {other name: name of the field}."""
    fields = kind.model_fields.items()
    return {alias: name for name, field in fields for one in field.metadata if isinstance(one, Also) for alias in one}
