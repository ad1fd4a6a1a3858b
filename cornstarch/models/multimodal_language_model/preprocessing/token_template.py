"""Chat templates that return tokens instead of a text: those of mistral-common.

There is no text whose characters could locate the answers. Instead, the tokens of the conversation before an answer
are a prefix of the tokens with the answer.
"""

from __future__ import annotations

import base64
import copy
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from transformers import ProcessorMixin
from transformers.utils import is_mistral_common_available

from cornstarch.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
Part = dict[str, Any]
TEKKEN = "tekken.json"


def missing_library(original: ProcessorMixin) -> str | None:
    """Return which library a processor's chat template needs and lacks; None if there is none."""
    source = str(original.tokenizer.name_or_path)
    try:
        has_tekken = (
            Path(source, TEKKEN).exists()
            if Path(source).is_dir()
            else isinstance(try_to_load_from_cache(source, TEKKEN), str)
        )
    except ValueError:  # not a name on the hub
        has_tekken = False
    if is_mistral_common_available() or not has_tekken:
        return None
    return (
        "Its tekken.json is read by mistral-common, which is missing or too old: "
        '`pip install "transformers[mistral-common]"`.'
    )


class TokenTemplate:
    """Encodes conversations with a processor whose `apply_chat_template` returns tokens.

    Args:
        original: The processor.
        items: For each kind of item (image, audio), an item of noise, and its placeholder token.
        rates: The sampling rates of the kinds that are sounds.
    """

    def __init__(
        self, original: ProcessorMixin, items: Mapping[str, tuple[Any, int]], rates: Mapping[str, int]
    ) -> None:
        self._for_prompts, self._for_answers = original, _copy_for_answers(original)
        self._rates = rates
        self._forms: dict[str, Callable[[str, Any], Part]] = {}
        for kind, (noise, token) in items.items():
            self._forms[kind] = self._find_form(kind, noise, token)

    def _find_form(self, kind: str, noise: Any, token: int) -> Callable[[str, Any], Part]:
        """Return how the processor takes items of a kind; raise ConfigError if it takes none, or drops them."""
        problem = ""
        forms = [_as_part, *([self._as_file] if kind in self._rates else [])]
        for form in forms:
            try:
                encoded = self._apply(self._for_prompts, [[{"role": "user", "content": [form(kind, noise)]}]], True)
            except Exception as error:  # a template may raise any error at a part that it does not know
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            if token in encoded["input_ids"][0].tolist() and len(encoded) > 2:  # ids, a mask, and the item
                return form
            problem = "it silently leaves them out"
        raise ConfigError(
            f"{type(self._for_prompts).__name__} ({type(self._for_prompts.tokenizer).__name__}) does not take {kind} "
            f"items in conversations: {problem}. {missing_library(self._for_prompts) or ''}".rstrip()
        )

    def _as_file(self, kind: str, item: Any) -> Part:
        """Return a sound as the bytes of a lossless fp32 file, for templates that read files."""
        try:
            import soundfile
        except ImportError as error:
            raise ConfigError("sounds are given to this chat template as files: `pip install soundfile`") from error
        file = io.BytesIO()
        soundfile.write(file, np.asarray(item, dtype=np.float32), self._rates[kind], format="WAV", subtype="FLOAT")
        return {"type": kind, "base64": base64.b64encode(file.getvalue()).decode()}

    def _convert_messages(self, messages: Messages) -> list[dict[str, Any]]:
        def part(one: Mapping[str, Any]) -> Part:
            kind = one["type"]
            return self._forms[kind](kind, one[kind]) if kind in self._forms else dict(one)

        return [{**message, "content": [part(one) for one in message["content"]]} for message in messages]

    @staticmethod
    def _apply(worker: Any, conversations: Sequence[Messages], prompt: bool) -> Any:
        return worker.apply_chat_template(
            list(conversations), tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=prompt
        )

    def encode(self, conversations: Sequence[Messages], *, prompt: bool) -> Any:
        """Process conversations with their items; those with answers are padded on the right."""
        worker = self._for_prompts if prompt else self._for_answers
        return self._apply(worker, [self._convert_messages(messages) for messages in conversations], prompt)

    def tokens(self, messages: Messages, *, prompt: bool = False) -> list[int]:
        """Return the tokens of a conversation without processing its items."""
        return self._tokenize(self._convert_messages(messages), prompt)

    def _tokenize(self, given: Messages, prompt: bool) -> list[int]:
        tokenizer: Any = (self._for_prompts if prompt else self._for_answers).tokenizer
        encoded = tokenizer.apply_chat_template([given], tokenize=True, return_dict=True, add_generation_prompt=prompt)
        return list(encoded["input_ids"][0])

    def answers(self, messages: Messages, input_ids: list[int]) -> list[tuple[int, int]]:
        """Return the ranges of a conversation's answers in its `input_ids`, each including the end token."""
        given = self._convert_messages(messages)
        spans = []
        for number, message in enumerate(given):
            if message["role"] != "assistant":
                continue
            before, after = self._tokenize(given[:number], True), self._tokenize(given[: number + 1], False)
            if after[: len(before)] != before or input_ids[: len(after)] != after:
                raise ConfigError(
                    "the tokens of the conversation up to an answer are others than those that the whole conversation "
                    "begins with, so it is unknown which tokens the answer is; train on everything"
                )
            spans.append((len(before), len(after)))
        return spans


def _as_part(kind: str, item: Any) -> Part:
    return {"type": kind, kind: item}


def _copy_for_answers(original: ProcessorMixin) -> Any:
    """Return a copy of a processor that takes conversations ending with an answer.

    mistral-common's tokenizers take either these or prompts, depending on `mode`.
    """
    worker: Any = copy.copy(original)
    tokenizer: Any = original.tokenizer
    if hasattr(tokenizer, "mode"):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            worker.tokenizer = type(tokenizer).from_pretrained(folder, mode="finetuning", padding_side="right")
    else:
        worker.tokenizer = copy.copy(tokenizer)
        worker.tokenizer.padding_side = "right"
    return worker
