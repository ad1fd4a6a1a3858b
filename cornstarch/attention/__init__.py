"""Multimodal attention masks as data, and how they enter a transformers model."""

from cornstarch.attention.interface import IMPLEMENTATION, use_mask
from cornstarch.attention.mask import MaskPattern, MaskSpec
from cornstarch.attention.verify import attend_through_masks

__all__ = ["IMPLEMENTATION", "MaskPattern", "MaskSpec", "attend_through_masks", "use_mask"]
