"""What makes parts fit: the projector between an encoder and a language model, and the widths on both of its sides."""

from __future__ import annotations

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
    encoder_width,
)
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.projector import MultimodalProjector
from cornstarch.models.multimodal_language_model.unwrap import unwrap


def make_projector(
    name: str,
    encoder: ModalEncoderModule,
    width: int,
    projector_type: str,
    activation: str,
    language_model_type: str | None = None,
) -> MultimodalProjector:
    """Return a new projector for an encoder that came without one.

    Args:
        name: The encoder's modality.
        encoder: It.
        width: Of the language model's embeddings.
        projector_type: "linear" or "mlp".
        activation: The activation inside an "mlp" projector.
        language_model_type: The architecture of the language model, which its projector remembers.
    """
    encoder_config = getattr(unwrap(encoder.module), "config", None)
    own = encoder_width(encoder_config)
    if own is None:
        raise ConfigError(
            f"No hidden size can be read from the config of the {name} encoder "
            f"({type(unwrap(encoder.module)).__name__}). Pass ModalEncoderModule(model, projector="
            "MultimodalProjector(MultimodalProjectorConfig(in_features=<its width>, out_features="
            f"{width}, projection_type={projector_type!r})))."
        )
    return MultimodalProjector(
        MultimodalProjectorConfig(
            encoder_config,
            projection_type=projector_type,
            activation=activation,
            in_features=own,
            out_features=width,
            language_model_type=language_model_type,
        )
    )


def check_widths(name: str, encoder: ModalEncoderModule, width: int) -> None:
    """Refuse a projector whose widths are not those of its encoder and of the language model's embeddings.

    Args:
        name: The encoder's modality.
        encoder: It, with its projector.
        width: Of the language model's embeddings.
    """
    config = None if encoder.projector is None else getattr(unwrap(encoder.projector), "config", None)
    own = encoder_width(getattr(unwrap(encoder.module), "config", None))
    found = getattr(config, "in_features", None)
    if found is not None and own is not None and found != own and not encoder.postprocess_module_callback:
        raise ConfigError(
            f"The {name} projector takes tokens of width {found}, its encoder puts out {own} "
            "(in_features of MultimodalProjectorConfig; a postprocess_module_callback may change the width)."
        )
    found = getattr(config, "out_features", None)
    if found is not None and found != width and not encoder.postprocess_projector_callback:
        raise ConfigError(
            f"The {name} projector puts out tokens of width {found}, the language model's embeddings have {width} "
            "(out_features of MultimodalProjectorConfig)."
        )


__all__ = ["check_widths", "make_projector"]
