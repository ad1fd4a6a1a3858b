"""Compose a multimodal language model out of Hugging Face parts."""

from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
)
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule, MultimodalProjector
from cornstarch.models.multimodal_language_model.modeling_multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.preprocessing.modality_processors import PrecomputedFeatureExtractor
from cornstarch.models.multimodal_language_model.processing_multimodal_language_model import (
    MultimodalModelProcessor,
    MultimodalProcessor,
)

__all__ = [
    "ModalEncoderModule",
    "MultimodalModel",
    "MultimodalModelProcessor",
    "MultimodalProcessor",
    "MultimodalProjector",
    "MultimodalProjectorConfig",
    "PrecomputedFeatureExtractor",
]
