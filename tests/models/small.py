"""A tiny model with two encoders, and a ragged batch for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cornstarch import MultimodalModel

VISION, AUDIO = 64, 65  # outside the table of 64 tokens
PATCHES = 5  # 2 × 2 and the class token
CLIP_TOKENS = 8
WHISPER_SINUSOIDS = "embed_positions.weight"


def llama(**overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides}))


def clip(seed: int = 1) -> CLIPVisionModel:
    torch.manual_seed(seed)
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
        )
    )


def whisper() -> WhisperEncoder:
    torch.manual_seed(2)
    return WhisperEncoder(
        WhisperConfig(
            d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, num_mel_bins=4,
            max_source_positions=CLIP_TOKENS, dropout=0.0,
        )
    )  # fmt: skip


def compose_model(**options: Any) -> MultimodalModel:
    model = MultimodalModel(encoders={"vision": clip(), "audio": whisper()}, language_model=llama(), **options)
    model.set_modality_token_ids({"vision": VISION, "audio": AUDIO})
    return model


def row(*pieces: int | tuple[int, int], length: int = 40, left: bool = False) -> tuple[list[int], list[int]]:
    """Ids and mask of one sample: an int is a text token, (token, n) is n placeholders."""
    ids: list[int] = []
    for piece in pieces:
        ids += [piece] if isinstance(piece, int) else [piece[0]] * piece[1]
    padding = length - len(ids)
    mask = [1] * len(ids)
    return ([0] * padding + ids, [0] * padding + mask) if left else (ids + [0] * padding, mask + [0] * padding)


def ragged(left: bool = False) -> dict[str, Tensor]:
    """Two images and a sound; a sound only; text only; one image."""
    rows = [
        row(3, (VISION, PATCHES), 4, 5, (VISION, PATCHES), 6, (AUDIO, CLIP_TOKENS), 7, left=left),
        row(8, 9, (AUDIO, CLIP_TOKENS), 10, left=left),
        row(11, 12, 13, left=left),
        row((VISION, PATCHES), 14, 15, left=left),
    ]
    input_ids, mask = (torch.tensor(part) for part in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(5)
    labels = input_ids.masked_fill(mask == 0, -100)
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "labels": labels,
        "pixel_values": torch.randn(3, 3, 8, 8, generator=generator),
        "input_features": torch.randn(2, 4, 2 * CLIP_TOKENS, generator=generator),
    }
