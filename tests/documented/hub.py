"""Tiny local folders that stand in for the hub names of the documented snippets."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
    WhisperFeatureExtractor,
)

WORDS = [
    "<unk>", "<s>", "</s>", '"', "human", "gpt", "Describe", "this", "image", ".", "A", "digit", "sound", ":", "?",
    "What", "is", "it", "the",
]  # fmt: skip
IMAGE = {"image_size": 32, "patch_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {
    "vocab_size": 19, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def make_hub(root: Path) -> dict[str, str]:
    """Write the models and processors, and return the folder of each documented name."""
    torch.manual_seed(0)
    hub = {}

    def put(name: str, *things: object) -> None:
        hub[name] = str(root / name.replace("/", "--"))
        for thing in things:
            thing.save_pretrained(hub[name])  # type: ignore[attr-defined]

    vision = {"hidden_size": 24, "intermediate_size": 48, **IMAGE}
    pixels = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    put("openai/clip-vit-base-patch32", CLIPVisionModel(CLIPVisionConfig(**vision)), pixels)
    put("openai/clip-vit-large-patch14", CLIPVisionModel(CLIPVisionConfig(**vision)), pixels)
    put("google/vit-base", ViTModel(ViTConfig(**vision)))
    put("google/siglip-so400m-patch14-384", SiglipVisionModel(SiglipVisionConfig(**vision)))
    put("meta-llama/Llama-3.2-1B", LlamaForCausalLM(LlamaConfig(**TEXT)), tokenizer())
    put("meta-llama/Llama-3.1-8B-Instruct", LlamaForCausalLM(LlamaConfig(**TEXT)), tokenizer())
    put("mistralai/Mistral-7B-Instruct-v0.3", MistralForCausalLM(MistralConfig(**TEXT)))
    put("openai/whisper-large-v3", WhisperFeatureExtractor(feature_size=8, chunk_length=1))
    return hub


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
