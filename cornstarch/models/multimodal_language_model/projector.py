"""The projector between an encoder and the language model, and the widths on both of its sides."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
    get_encoder_width,
)
from cornstarch.models.multimodal_language_model.unwrap import unwrap

if TYPE_CHECKING:
    from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule


class MultimodalProjector(PreTrainedModel):
    """Maps an encoder's tokens to the width of the language model's embeddings.

    Args:
        config: Sizes and kind of the projection. With your own module, sizes that are set are checked when the
            model is composed; sizes left out are not.
        projection: Your own module, tensor in and tensor out. None builds what `config` describes.
    """

    config_class = MultimodalProjectorConfig
    config: MultimodalProjectorConfig
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    supports_gradient_checkpointing = True

    def __init__(self, config: MultimodalProjectorConfig | None = None, projection: nn.Module | None = None) -> None:
        if config is None:
            config = MultimodalProjectorConfig(projection_type="custom" if projection is not None else "linear")
        if not isinstance(config, MultimodalProjectorConfig):
            raise ConfigError(
                f"MultimodalProjector got a {type(config).__name__} as config; expected a "
                "MultimodalProjectorConfig (or None with your own projection)."
            )
        if projection is not None:
            config.projection_type = "custom"
        super().__init__(config)
        self.projection = _build_projection(config) if projection is None else projection
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep every weight as torch or the user initialized it."""

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        """Return the projected tokens as `last_hidden_state`."""
        parameter = next(self.projection.parameters(), None)
        if parameter is not None:
            device = parameter.device.type
            # Encoder and projector may have different dtypes; under autocast, autocast casts.
            if device == "meta" or not torch.is_autocast_enabled(device):
                inputs_embeds = inputs_embeds.to(parameter.dtype)
        return BaseModelOutput(last_hidden_state=self.projection(inputs_embeds))


def _build_projection(config: MultimodalProjectorConfig) -> nn.Module:
    if config.projection_type == "custom":
        raise ConfigError("A projector of type 'custom' needs its module: pass it as `projection`.")
    sizes = []
    for name, source in (("in_features", "encoder_config"), ("out_features", "text_config")):
        size = getattr(config, name)
        if size is None:
            raise ConfigError(
                f"MultimodalProjectorConfig has no {name}: no hidden size could be read from {source}. "
                f"Pass {name}=<size> to MultimodalProjectorConfig, or your own module as `projection`."
            )
        sizes.append(int(size))
    in_features, out_features = sizes
    first = nn.Linear(in_features, out_features)
    if config.projection_type == "linear":
        return first
    second = nn.Linear(out_features, out_features)
    return nn.Sequential(OrderedDict(in_proj=first, activation=ACT2FN[config.activation], out_proj=second))


def as_projector(module: nn.Module | None) -> nn.Module | None:
    """Wrap a bare tensor-to-tensor module in a `MultimodalProjector`; return projectors and PEFT models unchanged."""
    if module is None or hasattr(module, "get_base_model"):
        return module
    if isinstance(module, nn.Module) and isinstance(unwrap(module), MultimodalProjector):
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"projector is a {type(module).__name__}; expected a MultimodalProjector or a torch.nn.Module. For a kind "
            "by name use init_projector_type of MultimodalModel."
        )
    return MultimodalProjector(None, projection=module)


def build_projector(
    modality: str,
    encoder: ModalEncoderModule,
    width: int,
    projector_type: str,
    activation: str,
    language_model_type: str | None = None,
) -> MultimodalProjector:
    """Return a new projector from an encoder to embeddings of this width."""
    encoder_config = getattr(unwrap(encoder.module), "config", None)
    own = get_encoder_width(encoder_config)
    if own is None:
        raise ConfigError(
            f"No hidden size can be read from the config of the {modality} encoder "
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


def check_widths(modality: str, encoder: ModalEncoderModule, width: int) -> None:
    """Refuse a projector whose widths are not those of its encoder and of embeddings of this width."""
    config = None if encoder.projector is None else getattr(unwrap(encoder.projector), "config", None)
    own = get_encoder_width(getattr(unwrap(encoder.module), "config", None))
    found = getattr(config, "in_features", None)
    if found is not None and own is not None and found != own and not encoder.postprocess_module_callback:
        raise ConfigError(
            f"The {modality} projector takes tokens of width {found}, its encoder puts out {own} "
            "(in_features of MultimodalProjectorConfig; a postprocess_module_callback may change the width)."
        )
    found = getattr(config, "out_features", None)
    if found is not None and found != width and not encoder.postprocess_projector_callback:
        raise ConfigError(
            f"The {modality} projector puts out tokens of width {found}, the language model's embeddings have {width} "
            "(out_features of MultimodalProjectorConfig)."
        )
