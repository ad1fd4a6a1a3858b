"""Compose a multimodal language model out of Hugging Face parts."""

from .configuration_multimodal_language_model import MultimodalProjectorConfig
from .encoder import ModalEncoderModule, MultimodalProjector
from .modeling_multimodal_language_model import MultimodalModel
from .preprocessing.modality_processors import PrecomputedFeatureExtractor
from .processing_multimodal_language_model import MultimodalModelProcessor, MultimodalProcessor

__all__ = [
    "ModalEncoderModule",
    "MultimodalModel",
    "MultimodalModelProcessor",
    "MultimodalProcessor",
    "MultimodalProjector",
    "MultimodalProjectorConfig",
    "PrecomputedFeatureExtractor",
]
