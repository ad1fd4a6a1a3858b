"""Tokenizers, image processors and feature extractors built in code, in the sizes of the models in `tests.zoo`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.zoo import BOS, EOS, IMAGE, MEL_BINS, MEL_FRAMES, PAD, PATCH, VOCABULARY

SOUND_RATE = 16000
HOP = SOUND_RATE // MEL_FRAMES  # one second fills the spectrogram
WORDS = ["a", "and", "cat", "dog", "is", "it", "loud", "look", "now", "or", "sound", "the", "this", "what", "user:"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """Build a tokenizer of whole words that puts a start token before each text, with as many words as the zoo knows.

    The first token that is added gets the first id outside the models' embedding tables.
    """
    special = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": 3}
    words = dict(zip(WORDS, range(len(special), VOCABULARY), strict=False))
    filling = {f"word{number}": number for number in range(len(special) + len(WORDS), VOCABULARY)}
    inner = Tokenizer(models.WordLevel({**special, **words, **filling}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **{**names, **options})


def image(width: int = 20, height: int = 20, seed: int = 0) -> Image.Image:
    """Make a picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def sound(samples: int = 800, seed: int = 0) -> np.ndarray:
    """Make a piece of noise."""
    return np.random.default_rng(seed).standard_normal(samples).astype(np.float32)


def square(name: str, **options: Any) -> Any:
    """Build an image processor that scales every image to one square."""
    size = {"height": IMAGE, "width": IMAGE}
    return getattr(transformers, name)(size=size, crop_size=size, do_resize=True, **options)


def patch_grid() -> Any:
    """Build an image processor that cuts images of any shape into patches."""
    smallest, largest = (2 * PATCH) ** 2, (6 * PATCH) ** 2
    return transformers.Qwen2VLImageProcessor(
        patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=smallest, max_pixels=largest
    )


def spectrogram() -> Any:
    """Build a feature extractor that makes mel spectrograms of one length."""
    return transformers.WhisperFeatureExtractor(
        feature_size=MEL_BINS, sampling_rate=SOUND_RATE, hop_length=HOP, chunk_length=1, n_fft=400
    )


def waveform() -> Any:
    """Build a feature extractor that pads waves and says where."""
    return transformers.Wav2Vec2FeatureExtractor(sampling_rate=SOUND_RATE, return_attention_mask=True)


def processor_of(encoder: str) -> Any:
    """Build the processor that belongs to an encoder of the zoo."""
    if encoder.startswith("qwen") and encoder.endswith("vl"):
        return patch_grid()
    builders: dict[str, Any] = {
        "clip": lambda: square("CLIPImageProcessor"),
        "siglip": lambda: square("SiglipImageProcessor"),
        "siglip2": lambda: transformers.Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=4),
        "dinov2": lambda: square("BitImageProcessor"),
        "dinov3": lambda: square("ViTImageProcessor"),  # its own needs torchvision and does the same
        "vit": lambda: square("ViTImageProcessor"),
        "pixtral": lambda: transformers.PixtralImageProcessor(patch_size=PATCH, size={"longest_edge": IMAGE}),
        "internvl": lambda: square("GotOcr2ImageProcessor", crop_to_patches=False),
        "whisper": spectrogram,
        "qwen2_audio": spectrogram,
        "wav2vec2": waveform,
    }
    return builders[encoder]()
