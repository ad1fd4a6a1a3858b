"""Multimodal attention masks as data, how they enter a transformers model, and the kernels that run them."""

# Importing a backend's module registers it.
from cornstarch.attention import cudnn_attention, flash_attention, item_attention  # noqa: F401
from cornstarch.attention.backends import AttentionBackend, register_attention_backend, use_attention
from cornstarch.attention.interface import IMPLEMENTATION, use_mask
from cornstarch.attention.mask import MaskPattern, MaskSpec
from cornstarch.attention.mask_verification import attend_through_masks

__all__ = [
    "IMPLEMENTATION", "AttentionBackend", "MaskPattern", "MaskSpec", "attend_through_masks",
    "register_attention_backend", "use_attention", "use_mask",
]  # fmt: skip
