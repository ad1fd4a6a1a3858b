"""The published import path of the plugins."""

from cornstarch.api.plugin import EncodersColocatedPlugin, ModalParallelPlugin, MultimodalParallelPlugin, StageManager

__all__ = ["EncodersColocatedPlugin", "ModalParallelPlugin", "MultimodalParallelPlugin", "StageManager"]
