"""How stages work together: cutting a model into them, what they hand on, and running them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cornstarch.pipeline.engine import PipelineEngine, initialize
    from cornstarch.pipeline.module import LayerSpec, PipelineModule
    from cornstarch.pipeline.pipe import Pipe

__all__ = ["LayerSpec", "Pipe", "PipelineEngine", "PipelineModule", "initialize"]

# Looked up when first asked for (PEP 562): they import more than those need who only cut a model.
_MODULES = {
    "LayerSpec": "cornstarch.pipeline.module",
    "Pipe": "cornstarch.pipeline.pipe",
    "PipelineEngine": "cornstarch.pipeline.engine",
    "PipelineModule": "cornstarch.pipeline.module",
    "initialize": "cornstarch.pipeline.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
