"""Another door to `EncodersColocatedPlugin`, where Cornstarch 0.0.5 had it."""

from cornstarch.plugin.multimodal_parallel_plugin import EncodersColocatedPlugin

__all__ = ["EncodersColocatedPlugin"]
