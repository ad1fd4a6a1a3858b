"""Tiny real models, built from their configs without any download, and batches for them.

Every builder is deterministic. The models have two layers, 32 channels and 64 known tokens, so that a
forward and a backward pass take milliseconds; no builder uses dropout, so `train` and `eval` agree.

Shape letters: N items (images, clips), B samples, S positions, D channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.internvl.configuration_internvl import InternVLVisionConfig
from transformers.models.internvl.modeling_internvl import InternVLVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_audio.configuration_qwen2_audio import Qwen2AudioEncoderConfig
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cornstarch.models import twin

VOCABULARY = 64
HIDDEN = 32
LAYERS = 2
HEADS = 4
ENCODER_HIDDEN, ENCODER_HEADS = 48, 6  # unlike the language models', so that no size fits by chance
MERGED = 40  # what the mergers of the Qwen towers make of it
PAD, BOS, EOS = 0, 1, 2
MODALITY_TOKEN = VOCABULARY  # just outside the embedding table, where an added token of a tokenizer lands
IGNORED = -100

Inputs = dict[str, Tensor]

IMAGE, PATCH = 16, 8  # 2 x 2 patches
MEL_BINS, MEL_FRAMES = 8, 16
SAMPLES_PER_CLIP = 400


def generator(seed: int) -> torch.Generator:
    """Return a random generator of its own, so that the order of calls never matters."""
    return torch.Generator().manual_seed(seed)


def disturb(model: nn.Module, seed: int = 0, scale: float = 0.1) -> None:
    """Add noise to every parameter; what a model left as memory happened to be is zero."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    twin.add_noise(model, seed, scale)


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Make what a block builds depend on `seed` alone, and leave the global random state as it was."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    # Some models leave parameters as memory happens to be; in this mode torch fills such memory with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


def build(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Build a model whose weights depend on `seed` alone."""
    with reproducible(seed):
        model = model_class(config)
    disturb(model, seed)
    return model


# ---------------------------------------------------------------------------------------- language models


@dataclass(frozen=True)
class LanguageModelPart:
    """A language model of the zoo: its class, and what its config says beyond the common sizes."""

    model_class: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]
    options: Mapping[str, Any]

    def build(self, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        """Build the tiny model."""
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "max_position_embeddings": 128,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }
        return build(self.model_class, self.config_class(**{**sizes, **self.options, **overrides}), seed)


GROUPED = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
WINDOWED = {**GROUPED, "sliding_window": 8}

LANGUAGE_MODELS: dict[str, LanguageModelPart] = {
    "llama": LanguageModelPart(transformers.LlamaForCausalLM, transformers.LlamaConfig, GROUPED),
    "llama4": LanguageModelPart(
        transformers.Llama4ForCausalLM,
        transformers.Llama4TextConfig,
        {
            **GROUPED,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
        },
    ),
    "qwen2": LanguageModelPart(
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config,
        {
            "intermediate_size": 64,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": LanguageModelPart(transformers.Qwen3ForCausalLM, transformers.Qwen3Config, GROUPED),
    "qwen3_moe": LanguageModelPart(
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mistral": LanguageModelPart(transformers.MistralForCausalLM, transformers.MistralConfig, WINDOWED),
    "mixtral": LanguageModelPart(
        transformers.MixtralForCausalLM, transformers.MixtralConfig, {**GROUPED, "num_local_experts": 4}
    ),
    "gemma2": LanguageModelPart(transformers.Gemma2ForCausalLM, transformers.Gemma2Config, WINDOWED),
    "gemma3": LanguageModelPart(
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": LanguageModelPart(
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config,
        {"intermediate_size": 64, "num_key_value_heads": 2},
    ),
    "gpt2": LanguageModelPart(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "opt": LanguageModelPart(
        transformers.OPTForCausalLM,
        transformers.OPTConfig,
        {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
    ),
}


# ------------------------------------------------------------------------------------------------ encoders


def every_token(output: Any, inputs: Inputs) -> Tensor:
    """Take what comes out, item after item."""
    return output.last_hidden_state.flatten(0, 1)


def count_unpadded_tokens(output: Any, inputs: Inputs) -> Tensor:
    """Leave out the patches that only fill an image up to the size of the largest."""
    return output.last_hidden_state[inputs["pixel_attention_mask"].bool()]


def count_merged_tokens(output: Any, inputs: Inputs) -> Tensor:
    """Take what the tower's own merger made of neighbouring patches."""
    return output.pooler_output


@dataclass(frozen=True)
class EncoderPart:
    """An encoder of the zoo, what it reads, and how many features it makes of each item.

    `lengths` repeats when more items are asked for; `select` takes from an output the features [total, D] that the
    encoder's authors hand to a language model.
    """

    modality: str
    model_class: type[PreTrainedModel]
    config: Callable[[], PreTrainedConfig]
    items: Callable[[int, torch.Generator], Inputs]
    lengths: tuple[int, ...]
    select: Callable[[Any, Inputs], Tensor] = every_token

    def build(self, seed: int = 1) -> PreTrainedModel:
        """Build the tiny encoder."""
        return build(self.model_class, self.config(), seed)

    def inputs(self, count: int, seed: int = 2) -> Inputs:
        """Make the forward arguments for `count` items."""
        return self.items(count, generator(seed))

    def feature_lengths(self, count: int) -> list[int]:
        """Return the number of features of each of `count` items."""
        return [self.lengths[item % len(self.lengths)] for item in range(count)]


def tower_sizes(**options: Any) -> dict[str, Any]:
    """Return the sizes that most vision configs share."""
    sizes = {"hidden_size": ENCODER_HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": ENCODER_HEADS}
    return {**sizes, "intermediate_size": 64, "image_size": IMAGE, "patch_size": PATCH, **options}


def speech_sizes() -> dict[str, Any]:
    """Return the sizes of an encoder that reads mel spectrograms."""
    sizes = {"d_model": ENCODER_HIDDEN, "encoder_layers": LAYERS, "encoder_attention_heads": ENCODER_HEADS}
    limits = {"num_mel_bins": MEL_BINS, "max_source_positions": MEL_FRAMES // 2}
    return {**sizes, **limits, "encoder_ffn_dim": 64, "dropout": 0.0}


def dinov2_config() -> PreTrainedConfig:
    """DINOv2 writes its feed-forward size as a ratio."""
    sizes = tower_sizes(mlp_ratio=2)
    del sizes["intermediate_size"]
    return transformers.Dinov2Config(**sizes)


def siglip2_config() -> PreTrainedConfig:
    """SigLIP2 counts patches instead of pixels."""
    sizes = tower_sizes(num_patches=4, patch_size=PATCH)
    del sizes["image_size"]
    return transformers.Siglip2VisionConfig(**sizes)


def wav2vec2_config() -> PreTrainedConfig:
    """Wav2Vec2 with three convolutions instead of seven."""
    front: dict[str, Any] = {
        "conv_dim": (16, 16, 16),
        "conv_stride": (5, 4, 4),
        "conv_kernel": (10, 4, 4),
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }
    sizes = tower_sizes(layerdrop=0.0, apply_spec_augment=False, **front)
    no_dropout: dict[str, Any] = dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0
    )
    del sizes["image_size"], sizes["patch_size"]
    return transformers.Wav2Vec2Config(**sizes, **no_dropout)


def qwen_vision_sizes(**options: Any) -> dict[str, Any]:
    """Return the sizes that the Qwen vision towers share."""
    sizes = {"depth": LAYERS, "hidden_size": ENCODER_HIDDEN, "num_heads": ENCODER_HEADS, "in_channels": 3}
    return {**sizes, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, **options}


def images(count: int, noise: torch.Generator) -> Inputs:
    """Make square images."""
    return {"pixel_values": torch.randn(count, 3, IMAGE, IMAGE, generator=noise)}


def draw_sized_images(count: int, noise: torch.Generator) -> Inputs:
    """Make images of two sizes, padded to the larger one."""
    sizes = [(IMAGE, IMAGE) if item % 2 == 0 else (PATCH, IMAGE) for item in range(count)]
    return {**images(count, noise), "image_sizes": torch.tensor(sizes).reshape(count, 2)}


def patch_rows(count: int, noise: torch.Generator) -> Inputs:
    """Make images that were cut into patches and filled up to four of them."""
    shapes = torch.tensor([((2, 2), (1, 2))[item % 2] for item in range(count)]).reshape(count, 2)
    return {
        "pixel_values": torch.randn(count, 4, 3 * PATCH * PATCH, generator=noise),
        "pixel_attention_mask": (torch.arange(4) < shapes.prod(-1, keepdim=True)).long(),
        "spatial_shapes": shapes,
    }


def patch_grids(count: int, noise: torch.Generator) -> Inputs:
    """Make images that were cut into patches and lie end to end, with one grid per image."""
    grids = [((1, 4, 4), (1, 2, 4))[item % 2] for item in range(count)]
    patches = sum(frames * height * width for frames, height, width in grids)
    return {
        "hidden_states": torch.randn(patches, 3 * 2 * PATCH * PATCH, generator=noise),
        "grid_thw": torch.tensor(grids).reshape(count, 3),
    }


def spectrograms(count: int, noise: torch.Generator) -> Inputs:
    """Make mel spectrograms."""
    return {"input_features": torch.randn(count, MEL_BINS, MEL_FRAMES, generator=noise)}


def waveforms(count: int, noise: torch.Generator) -> Inputs:
    """Make raw audio."""
    return {"input_values": torch.randn(count, SAMPLES_PER_CLIP, generator=noise)}


ENCODERS: dict[str, EncoderPart] = {
    "clip": EncoderPart(
        "vision",
        transformers.CLIPVisionModel,
        lambda: transformers.CLIPVisionConfig(**tower_sizes()),
        images,
        (5,),
    ),
    "siglip": EncoderPart(
        "vision",
        transformers.SiglipVisionModel,
        lambda: transformers.SiglipVisionConfig(**tower_sizes()),
        images,
        (4,),
    ),
    "siglip2": EncoderPart(
        "vision", transformers.Siglip2VisionModel, siglip2_config, patch_rows, (4, 2), count_unpadded_tokens
    ),
    "dinov2": EncoderPart("vision", transformers.Dinov2Model, dinov2_config, images, (5,)),
    "dinov3": EncoderPart(
        "vision",
        transformers.DINOv3ViTModel,
        lambda: transformers.DINOv3ViTConfig(**tower_sizes(num_register_tokens=2, pos_embed_rescale=None)),
        images,
        (7,),
    ),
    "vit": EncoderPart(
        "vision",
        transformers.ViTModel,
        lambda: transformers.ViTConfig(**tower_sizes(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        images,
        (5,),
    ),
    "pixtral": EncoderPart(
        "vision",
        transformers.PixtralVisionModel,
        lambda: transformers.PixtralVisionConfig(**tower_sizes()),
        draw_sized_images,
        (4, 2),
    ),
    "internvl": EncoderPart(
        "vision",
        InternVLVisionModel,
        lambda: InternVLVisionConfig(
            **tower_sizes(image_size=[IMAGE, IMAGE], patch_size=[PATCH, PATCH], projection_dropout=0.0)
        ),
        images,
        (5,),
    ),
    "qwen2_vl": EncoderPart(
        "vision",
        Qwen2VisionTransformerPretrainedModel,
        lambda: Qwen2VLVisionConfig(**qwen_vision_sizes(embed_dim=ENCODER_HIDDEN, hidden_size=MERGED, mlp_ratio=2)),
        patch_grids,
        (4, 2),
        count_merged_tokens,
    ),
    "qwen2_5_vl": EncoderPart(
        "vision",
        Qwen2_5_VisionTransformerPretrainedModel,
        lambda: Qwen2_5_VLVisionConfig(
            **qwen_vision_sizes(intermediate_size=64, window_size=32, out_hidden_size=MERGED, fullatt_block_indexes=[1])
        ),
        patch_grids,
        (4, 2),
        count_merged_tokens,
    ),
    "qwen3_vl": EncoderPart(
        "vision",
        Qwen3VLVisionModel,
        lambda: Qwen3VLVisionConfig(
            **qwen_vision_sizes(
                intermediate_size=64,
                out_hidden_size=MERGED,
                num_position_embeddings=16,
                deepstack_visual_indexes=[0],
            )
        ),
        patch_grids,
        (4, 2),
        count_merged_tokens,
    ),
    "whisper": EncoderPart(
        "audio",
        WhisperEncoder,
        lambda: transformers.WhisperConfig(**speech_sizes()),
        spectrograms,
        (8,),
    ),
    "qwen2_audio": EncoderPart(
        "audio",
        Qwen2AudioEncoder,
        lambda: Qwen2AudioEncoderConfig(**speech_sizes()),
        spectrograms,
        (4,),
    ),
    "wav2vec2": EncoderPart("audio", transformers.Wav2Vec2Model, wav2vec2_config, waveforms, (4,)),
}


# ------------------------------------------------------------------------------------------------- batches

# One string per sample. "t" is a token of text, "*" stands for all the tokens of the next item, and "+" for those of
# an item of a second modality.
RAGGED = ("ttt*tttt*ttt", "tttttt", "*ttttt")  # two items, none, one that comes first
TEXT_ONLY = ("tttttttt", "ttt")


def text_batch(
    rows: Sequence[str],
    lengths: Sequence[int] = (),
    token_id: int = MODALITY_TOKEN,
    padding: str = "right",
    seed: int = 3,
) -> Inputs:
    """Make `input_ids`, `attention_mask` and `labels` [B, S] of rows whose items have `lengths` features.

    Labels are the ids themselves, also on the items' tokens: not training on those is the model's task. Only the
    first token of a row has none, because nothing is before it that could predict it (but padding, on the left).
    """
    noise = generator(seed)
    item_lengths = iter(lengths)
    ids = [_row_ids(row, item_lengths, token_id, noise) for row in rows]
    assert next(item_lengths, None) is None, "the rows have fewer items than there are lengths"
    longest = max(len(row) for row in ids)
    batch = {
        "input_ids": torch.full((len(rows), longest), PAD),
        "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
        "labels": torch.full((len(rows), longest), IGNORED),
    }
    for index, row in enumerate(ids):
        place = slice(0, len(row)) if padding == "right" else slice(longest - len(row), longest)
        batch["input_ids"][index, place] = row
        batch["attention_mask"][index, place] = 1
        batch["labels"][index, place] = row
        batch["labels"][index, place.start] = IGNORED
    return batch


def _row_ids(row: str, lengths: Iterator[int], token_id: int, noise: torch.Generator) -> Tensor:
    parts = []
    item_ids = {"*": token_id, "+": token_id + 1}
    for sign in row:
        if sign in item_ids:
            parts.append(torch.full((next(lengths),), item_ids[sign]))
        else:
            parts.append(torch.randint(EOS + 1, VOCABULARY, (1,), generator=noise))
    return torch.cat(parts)


def item_count(rows: Sequence[str]) -> int:
    """Return how many items the rows ask for."""
    return sum(row.count("*") for row in rows)
