"""Pipeline parallelism: splitting a model into stages, communication between them, and running a schedule."""

from typing import TYPE_CHECKING

from cornstarch.lazily import lazy_attributes

if TYPE_CHECKING:
    from cornstarch.api.pipe import Pipe
    from cornstarch.api.pipeline_module import LayerSpec, PipelineEngine, PipelineModule, initialize

__all__ = ["LayerSpec", "Pipe", "PipelineEngine", "PipelineModule", "initialize"]

# Looked up when first asked for (PEP 562): they import more than those need who only cut a model.
_MODULES = dict.fromkeys(__all__, "cornstarch.api.pipeline_module") | {"Pipe": "cornstarch.api.pipe"}

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
