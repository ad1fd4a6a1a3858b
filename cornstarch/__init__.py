"""Compose multimodal language models out of any Hugging Face parts, and train them."""

from typing import TYPE_CHECKING

from cornstarch.lazily import names_of

if TYPE_CHECKING:
    from cornstarch.attention import MaskSpec
    from cornstarch.booster import Booster
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
    "Booster",
    "ConfigError",
    "EncodersColocatedPlugin",
    "MaskSpec",
    "ModalEncoderModule",
    "ModalParallelPlugin",
    "MultimodalModel",
    "MultimodalModelProcessor",
    "MultimodalParallelPlugin",
    "MultimodalProcessor",
    "MultimodalProjector",
    "MultimodalProjectorConfig",
    "PipelineTemplate",
    "PrecomputedFeatureExtractor",
    "RunConfig",
    "Trainer",
    "__version__",
    "load_config",
]

# Importing torch takes seconds, so a name is looked up in its room when it is first asked for (PEP 562).
_ROOMS = {
    "Booster": "cornstarch.booster",
    "ConfigError": "cornstarch.errors",
    "EncodersColocatedPlugin": "cornstarch.plugin.multimodal_parallel_plugin",
    "MaskSpec": "cornstarch.attention",
    "ModalEncoderModule": "cornstarch.models.multimodal_language_model",
    "ModalParallelPlugin": "cornstarch.plugin.multimodal_parallel_plugin",
    "MultimodalModel": "cornstarch.models.multimodal_language_model",
    "MultimodalModelProcessor": "cornstarch.models.multimodal_language_model",
    "MultimodalParallelPlugin": "cornstarch.plugin.multimodal_parallel_plugin",
    "MultimodalProcessor": "cornstarch.models.multimodal_language_model",
    "MultimodalProjector": "cornstarch.models.multimodal_language_model",
    "MultimodalProjectorConfig": "cornstarch.models.multimodal_language_model",
    "PipelineTemplate": "cornstarch.pipeline.template",
    "PrecomputedFeatureExtractor": "cornstarch.models.multimodal_language_model",
    "RunConfig": "cornstarch.train",
    "Trainer": "cornstarch.train",
    "load_config": "cornstarch.train",
}

__getattr__, __dir__ = names_of(__name__, _ROOMS)
