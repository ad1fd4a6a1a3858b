"""How stages work together: cutting a model into them, what they hand on, and running them."""

from typing import TYPE_CHECKING

from cornstarch.lazily import names_of

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

__getattr__, __dir__ = names_of(__name__, _MODULES)
