"""Configs of projectors and of whole models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from cornstarch.errors import ConfigError

PROJECTION_TYPES = ("linear", "mlp")


def get_encoder_width(config: Any) -> int | None:
    """Return the width of the output tokens of an encoder with this config; None if the config does not state it."""
    # An encoder whose last module changes the width (a patch merger) states it in `out_hidden_size`.
    names = ("out_hidden_size", "hidden_size", "d_model", "embed_dim", "n_embd", "hidden_dim", "dim")
    if (width := _read_first(config, names)) is not None:
        return width
    # Hierarchical encoders widen from stage to stage; the output has the width of the last stage.
    widths = getattr(config, "hidden_sizes", None)
    if isinstance(widths, (list, tuple)) and widths and isinstance(widths[-1], int):
        return widths[-1]
    return None


def _read_first(config: Any, names: Sequence[str]) -> int | None:
    return next((width for name in names if isinstance(width := getattr(config, name, None), int)), None)


class MultimodalProjectorConfig(PreTrainedConfig):
    """Sizes and kind of the projector between one encoder and the language model.

    Sizes are read from the two configs; `in_features` and `out_features` override them. Only the sizes and the names
    of the two architectures are stored, so that a saved projector does not carry copies of the two configs.
    """

    model_type = "multimodal_projector"

    def __init__(
        self,
        encoder_config: Any = None,
        text_config: Any = None,
        projection_type: str = "linear",
        activation: str = "gelu",
        in_features: int | None = None,
        out_features: int | None = None,
        encoder_model_type: str | None = None,
        language_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        if projection_type not in (*PROJECTION_TYPES, "custom"):
            raise ConfigError(
                f"projection_type = {projection_type!r}: expected one of {', '.join(PROJECTION_TYPES)}. "
                "For any other projector pass your own module: MultimodalProjector(config, projection=module)."
            )
        if activation not in ACT2FN:
            raise ConfigError(
                f"activation = {activation!r} is not known to transformers; use one of {', '.join(sorted(ACT2FN))}."
            )
        if in_features is None and encoder_config is not None:
            in_features = get_encoder_width(encoder_config)
        if out_features is None and text_config is not None:
            inner = text_config.get_text_config() if hasattr(text_config, "get_text_config") else text_config
            names = ("word_embed_proj_dim", "embedding_size", "hidden_size", "n_embd", "d_model")
            out_features = _read_first(inner, names)
        self.projection_type = projection_type
        self.activation = activation
        self.in_features = in_features
        self.out_features = out_features
        self.encoder_model_type = encoder_model_type or getattr(encoder_config, "model_type", None)
        self.language_model_type = language_model_type or getattr(text_config, "model_type", None)
        super().__init__(**kwargs)


class MultimodalModelConfig(PreTrainedConfig):
    """The configs of a model's parts, under the names that Hugging Face libraries expect (`text_config`, …).

    It holds the parts' own config objects, not copies.
    """

    model_type = "multimodal_language_model"

    def __init__(self, text_config: Any = None, **kwargs: Any) -> None:
        self.text_config = text_config
        self.encoder_names: list[str] = []
        super().__init__(**kwargs)

    def describe(self, text_config: Any, encoders: Mapping[str, Any]) -> None:
        """Replace the parts' configs by these; an encoder without a config has None."""
        for name in self.encoder_names:
            vars(self).pop(f"{name}_config", None)
        self.text_config, self.encoder_names = text_config, list(encoders)
        for name, config in encoders.items():
            setattr(self, f"{name}_config", config)
        self.tie_word_embeddings = bool(getattr(text_config, "tie_word_embeddings", False))
