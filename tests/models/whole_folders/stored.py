"""Writing a tiny multimodal model with its tokenizer, processor and chat template, as `save_pretrained` stores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

QUESTION_WORDS = tuple(f"q{number}" for number in range(12))
ANSWER_WORDS = tuple(f"a{number}" for number in range(12))
_TEMPLATE_WORDS = (
    *("system", "user", "assistant", "model", "User", "Assistant", "USER", "ASSISTANT", "Human", "You", "are", "a"),
    *("helpful", "Audio", "Image", "Picture", "0", "1", "2", "3", "4", "think", "im_start"),
)
# Newlines in a row are one token, and a word is joined with the space before it, as in most byte-level vocabularies:
# text on both sides of an image may be tokenized in another way than each side alone.
_PIECES = Regex(r" ?(?:[aq]\d+|[A-Za-z_]+|\d+)|\n+|\s|[^\w\s]")
_SPACES = (" ", *("\n" * count for count in range(1, 6)))
_PUNCTUATION = tuple(".,:;!?<>[]()/|_-'\"#")

Ids = Mapping[str, int]


@dataclass(frozen=True)
class StoredFamily:
    """One family of multimodal models: what its folder holds."""

    model_class: str
    config: Callable[[Ids], Any]
    """Builds the config from the ids of the tokens."""
    processor: Mapping[str, Any]
    """processor_config.json, with `processor_class`, and the image processor's or feature extractor's options in it."""
    template: str | None
    """The chat template; None: the published folders have none."""
    tokens: tuple[str, ...] = ()
    """Special tokens besides padding, start and end."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Tokens that are attributes of the tokenizer: `image_token`, …"""
    kinds: tuple[str, ...] = ("image",)
    """What the model reads besides text: image, audio."""
    pad: str = "<pad>"
    bos: str | None = "<s>"
    eos: str = "</s>"
    adds_bos: bool = False
    """The tokenizer puts the start token before each text."""
    padding_side: str = "left"
    """What the stored tokenizer says: for generation, as on the hub."""
    ends: tuple[str, ...] = ()
    """The tokens that end an answer in the template."""
    reserved: tuple[str, int] | None = None
    """A token whose id the processor's code fixes."""
    cases: tuple[str, ...] | None = None
    """Which conversations of the sweep are tried; None: all."""
    is_byte_level: bool = False
    """The tokenizer is one of bytes: transformers has a class for the family that makes one of any vocabulary."""

    def write(self, folder: Path) -> None:
        """Write config, weights, tokenizer, processor and chat template."""
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        self.model(tokenizer.get_vocab()).save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(dict(self.processor), indent=2))
        if self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Build a tokenizer of words, or of bytes, that has the family's special tokens."""
        special = [self.pad, self.bos or "<s>", self.eos, "<unk>"]
        words = [*_TEMPLATE_WORDS, *QUESTION_WORDS, *ANSWER_WORDS]
        pieces = [*_SPACES, *_PUNCTUATION, *words, *(f" {word}" for word in words)]
        if self.is_byte_level:
            pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = [*special, *pieces, *self.tokens]
        if self.reserved is not None:
            pieces.insert(self.reserved[1], self.reserved[0])
        vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        inner = _byte_level(vocabulary) if self.is_byte_level else _word_level(vocabulary)
        if self.adds_bos:
            assert self.bos is not None
            start = [(self.bos, vocabulary[self.bos])]
            inner.post_processor = processors.TemplateProcessing(f"{self.bos} $A", special_tokens=start)
        inner.add_special_tokens([*special, *self.tokens])
        return PreTrainedTokenizerFast(
            tokenizer_object=inner,
            pad_token=self.pad,
            bos_token=self.bos,
            eos_token=self.eos,
            unk_token="<unk>",
            padding_side=self.padding_side,
            additional_special_tokens=[token for token in self.tokens if token not in self.named.values()],
            extra_special_tokens=dict(self.named),
        )

    def model(self, ids: Ids) -> transformers.PreTrainedModel:
        """Build the model; its weights are random, with none of the zeros that new models have."""
        config = self.config(ids)
        text = config.get_text_config()
        text.vocab_size = len(ids)
        text.pad_token_id, text.eos_token_id = ids[self.pad], ids[self.eos]
        text.bos_token_id = None if self.bos is None else ids[self.bos]
        torch.manual_seed(0)
        model = getattr(transformers, self.model_class)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.nan_to_num(parameter).clamp(-8, 8) + 0.1 * torch.randn_like(parameter))
        return model.eval()


def _word_level(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_level(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def existing(name: str, **tokens: str) -> Callable[[Ids], Any]:
    """Take the config of a family in `tests.models.whole_models`, with the tokenizer's ids in the named fields."""
    from tests.models.whole_models import FAMILIES

    def build(ids: Ids) -> Any:
        config = FAMILIES[name].config()
        for key, token in tokens.items():
            assert hasattr(config, key), f"{type(config).__name__} has no {key}"
            setattr(config, key, ids[token])
        return config

    return build
