"""What an encoder's features depend on beside the item: one digest of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import PIL
import torch
import transformers
from torch import Tensor, nn

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.train.precision import Placement

_FORMAT = 1
# Where a config was read from, and by whom it was written: a model does not compute otherwise for it.
_UNIMPORTANT = ("_name_or_path", "transformers_version", "architectures")


def encoder_key(module: nn.Module, processor: Any, reading: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """Return all that features depend on beside the item, as data.

    Args:
        module: The encoder, with its weights.
        processor: What makes its inputs.
        reading: What else decides how an item is read.
        placement: Where it computes, and in which precision.
    """
    inner = unwrap(module)
    config: Any = getattr(inner, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else repr(config)
    if isinstance(settings, dict):
        settings = {name: value for name, value in settings.items() if name not in _UNIMPORTANT}
    return {
        "format": _FORMAT,
        "encoder": _name(inner),
        "config": settings,
        "attention": getattr(config, "_attn_implementation", None),
        "weights": weights_digest(inner),
        "processor": _name(processor),
        "settings": _settings(processor),
        "reading": dict(reading),
        "device": placement.device.type,
        "precision": placement.precision,
        "matmul": torch.get_float32_matmul_precision(),
        "versions": {
            "cornstarch": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "pillow": PIL.__version__,
        },
    }


def key_digest(key: Mapping[str, Any]) -> str:
    """Return the digest of what features depend on."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers: names, types, shapes and values, one tensor at a time."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(module):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    both: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    yield from sorted((name.replace("_orig_mod.", ""), tensor) for name, tensor in both.items())  # torch.compile's


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _settings(processor: Any) -> Any:
    """Return the settings of a processor; of one around others, theirs."""
    inner = [getattr(processor, name, None) for name in ("image_processor", "feature_extractor")]
    found = [one.to_dict() for one in (processor, *inner) if hasattr(one, "to_dict")]
    if not found:
        raise ConfigError(
            f"features.cache: a {type(processor).__name__} does not say how it is set (it has no `to_dict`), so it "
            "cannot be told when features are out of date. Use a processor of transformers, or leave the cache out."
        )
    return found
