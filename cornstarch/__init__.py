"""Compose multimodal language models out of any Hugging Face parts, and train them."""

from typing import TYPE_CHECKING

from cornstarch.lazily import lazy_attributes

if TYPE_CHECKING:
    from cornstarch.attention import MaskSpec
    from cornstarch.booster import Booster
    from cornstarch.config.user_code import allow_code
    from cornstarch.errors import ConfigError
    from cornstarch.models.multimodal_language_model import (
        ModalEncoderModule,
        MultimodalModel,
        MultimodalModelProcessor,
        MultimodalProcessor,
        MultimodalProjector,
        MultimodalProjectorConfig,
        PrecomputedFeatureExtractor,
    )
    from cornstarch.pipeline.template import PipelineTemplate
    from cornstarch.plugin.multimodal_parallel_plugin import (
        EncodersColocatedPlugin,
        ModalParallelPlugin,
        MultimodalParallelPlugin,
    )
    from cornstarch.train import RunConfig, Trainer, load_config

__version__ = "0.1.0"

__all__ = [
    "Booster", "ConfigError", "EncodersColocatedPlugin", "MaskSpec", "ModalEncoderModule", "ModalParallelPlugin",
    "MultimodalModel", "MultimodalModelProcessor", "MultimodalParallelPlugin", "MultimodalProcessor",
    "MultimodalProjector", "MultimodalProjectorConfig", "PipelineTemplate", "PrecomputedFeatureExtractor", "RunConfig",
    "Trainer", "__version__", "allow_code", "load_config",
]  # fmt: skip

# Importing torch takes seconds, so a name is looked up in its room when it is first asked for (PEP 562).
_ROOMS = {
    "attention": "MaskSpec",
    "booster": "Booster",
    "config.user_code": "allow_code",
    "errors": "ConfigError",
    "models.multimodal_language_model": "ModalEncoderModule MultimodalModel MultimodalModelProcessor "
    "MultimodalProcessor MultimodalProjector MultimodalProjectorConfig PrecomputedFeatureExtractor",
    "pipeline.template": "PipelineTemplate",
    "plugin.multimodal_parallel_plugin": "EncodersColocatedPlugin ModalParallelPlugin MultimodalParallelPlugin",
    "train": "RunConfig Trainer load_config",
}

__getattr__, __dir__ = lazy_attributes(
    __name__, {name: f"cornstarch.{room}" for room, names in _ROOMS.items() for name in names.split()}
)
