"""Names of a package that are looked up when they are first asked for (PEP 562); nothing else is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, given the modules that its names come from."""
    own = vars(sys.modules[package])

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        own[name] = getattr(import_module(homes[name]), name)
        return own[name]

    return look_up, lambda: sorted({*own, *homes})
