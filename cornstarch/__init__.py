"""Compose multimodal language models out of any Hugging Face parts, and train them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cornstarch.attention import MaskSpec
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
    from cornstarch.train import RunConfig, Trainer, load_config

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "MaskSpec",
    "ModalEncoderModule",
    "MultimodalModel",
    "MultimodalModelProcessor",
    "MultimodalProcessor",
    "MultimodalProjector",
    "MultimodalProjectorConfig",
    "PrecomputedFeatureExtractor",
    "RunConfig",
    "Trainer",
    "__version__",
    "load_config",
]

# Importing torch takes seconds, so a name is looked up in its room when it is first asked for (PEP 562).
_ROOMS = {
    "ConfigError": "cornstarch.errors",
    "MaskSpec": "cornstarch.attention",
    "ModalEncoderModule": "cornstarch.models.multimodal_language_model",
    "MultimodalModel": "cornstarch.models.multimodal_language_model",
    "MultimodalModelProcessor": "cornstarch.models.multimodal_language_model",
    "MultimodalProcessor": "cornstarch.models.multimodal_language_model",
    "MultimodalProjector": "cornstarch.models.multimodal_language_model",
    "MultimodalProjectorConfig": "cornstarch.models.multimodal_language_model",
    "PrecomputedFeatureExtractor": "cornstarch.models.multimodal_language_model",
    "RunConfig": "cornstarch.train",
    "Trainer": "cornstarch.train",
    "load_config": "cornstarch.train",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
