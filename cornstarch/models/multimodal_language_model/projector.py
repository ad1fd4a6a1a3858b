"""The module between an encoder and the language model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
)
from cornstarch.models.multimodal_language_model.unwrap import unwrap


def _known_size(config: MultimodalProjectorConfig, name: str, source: str) -> int:
    size = getattr(config, name)
    if size is None:
        raise ConfigError(
            f"MultimodalProjectorConfig has no {name}: no hidden size could be read from {source}. "
            f"Pass {name}=<size> to MultimodalProjectorConfig, or your own module as `projection`."
        )
    return int(size)


def _built_projection(config: MultimodalProjectorConfig) -> nn.Module:
    if config.projection_type == "custom":
        raise ConfigError("A projector of type 'custom' needs its module: pass it as `projection`.")
    in_features = _known_size(config, "in_features", "encoder_config")
    out_features = _known_size(config, "out_features", "text_config")
    if config.projection_type == "linear":
        return nn.Linear(in_features, out_features)
    return nn.Sequential(
        OrderedDict(
            in_proj=nn.Linear(in_features, out_features),
            activation=ACT2FN[config.activation],
            out_proj=nn.Linear(out_features, out_features),
        )
    )


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
        self.projection = _built_projection(config) if projection is None else projection
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave every weight as it was made: by torch, or by the user."""

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        """Return the projected tokens as `last_hidden_state`."""
        parameter = next(self.projection.parameters(), None)
        # Encoder and projector may be kept in different precisions; under autocast that is autocast's business.
        if parameter is not None and not _autocasts(parameter.device):
            inputs_embeds = inputs_embeds.to(parameter.dtype)
        return BaseModelOutput(last_hidden_state=self.projection(inputs_embeds))


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def as_projector(module: nn.Module | None) -> nn.Module | None:
    """Return `module` as a projector: a bare tensor-to-tensor module is wrapped, anything else is kept."""
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
