"""The pipeline benchmarks, as modules, and what the processes of a pool do for them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """Return a benchmark."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name)


def contenders(arguments: list[str]) -> dict[str, Any]:
    """Let all pipelines take turns in this process and another one."""
    module = script("pipeline_runtime")
    found: dict[str, Any] = module.compare(module.options(arguments))
    return found
