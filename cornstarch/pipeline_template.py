"""Another door to `cornstarch.pipeline.template`, where published documents look for it."""

from cornstarch.pipeline.template import PipelineTemplate

__all__ = ["PipelineTemplate"]
