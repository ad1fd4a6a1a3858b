"""Chat templates that make tokens of a conversation rather than a text: those of mistral-common.

There is no text whose characters could say which tokens are answers. A conversation that ends before an answer and the
same with the answer do: the tokens of the one begin those of the other.
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
    """Return what a processor's chat template needs that is not installed; None if there is no such thing."""
    if is_mistral_common_available() or not _has_tekken(str(original.tokenizer.name_or_path)):
        return None
    return (
        "Its tekken.json is read by mistral-common, which is missing or too old: "
        '`pip install "transformers[mistral-common]"`.'
    )


def _has_tekken(source: str) -> bool:
    if Path(source).is_dir():
        return Path(source, TEKKEN).exists()
    try:
        return isinstance(try_to_load_from_cache(source, TEKKEN), str)
    except ValueError:  # not a name on the hub
        return False


class TokenTemplate:
    """What a processor makes of conversations where its `apply_chat_template` makes tokens at once.

    Args:
        original: The processor.
        items: For each kind of item (image, audio), one of noise, and the token that stands for it.
        rates: The sampling rates of the kinds that are sounds.
    """

    def __init__(
        self, original: ProcessorMixin, items: Mapping[str, tuple[Any, int]], rates: Mapping[str, int]
    ) -> None:
        self._asked, self._answered = original, _with_answers(original)
        self._rates = rates
        self._forms: dict[str, Callable[[str, Any], Part]] = {}
        for kind, (noise, token) in items.items():
            self._forms[kind] = self._find_form(kind, noise, token)

    def _find_form(self, kind: str, noise: Any, token: int) -> Callable[[str, Any], Part]:
        """Return how the processor takes items of a kind; ConfigError if it takes none, or leaves them out."""
        problem = ""
        forms = [_as_it_is, *([self._as_file] if kind in self._rates else [])]
        for form in forms:
            try:
                made = self._apply(self._asked, [[{"role": "user", "content": [form(kind, noise)]}]], True)
            except Exception as error:  # whatever a template says to a part that it does not know
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            if token in made["input_ids"][0].tolist() and len(made) > 2:  # ids, a mask, and the item
                return form
            problem = "it leaves them out without a word"
        raise ConfigError(
            f"{type(self._asked).__name__} ({type(self._asked.tokenizer).__name__}) does not take {kind} items in "
            f"conversations: {problem}. {missing_library(self._asked) or ''}".rstrip()
        )

    def _as_file(self, kind: str, item: Any) -> Part:
        """Return a sound as the bytes of a file, for templates that read files: in fp32, so that nothing is lost."""
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
        """Return what the processor makes of conversations; of those with answers, filled up on the right.

        Args:
            conversations: With their items.
            prompt: Whether the model's answer is to follow.
        """
        worker = self._asked if prompt else self._answered
        return self._apply(worker, [self._convert_messages(messages) for messages in conversations], prompt)

    def tokens(self, messages: Messages, *, prompt: bool = False) -> list[int]:
        """Return the tokens of a conversation alone, which takes no item to be processed."""
        return self._tokens(self._convert_messages(messages), prompt)

    def _tokens(self, given: Messages, prompt: bool) -> list[int]:
        tokenizer: Any = (self._asked if prompt else self._answered).tokenizer
        made = tokenizer.apply_chat_template([given], tokenize=True, return_dict=True, add_generation_prompt=prompt)
        return list(made["input_ids"][0])

    def answers(self, messages: Messages, input_ids: list[int]) -> list[tuple[int, int]]:
        """Return where the answers of a conversation are among its tokens, each with what ends it.

        Args:
            messages: The conversation, with its items.
            input_ids: What the processor made of it.
        """
        given = self._convert_messages(messages)
        spans = []
        for number, message in enumerate(given):
            if message["role"] != "assistant":
                continue
            before, after = self._tokens(given[:number], True), self._tokens(given[: number + 1], False)
            if after[: len(before)] != before or input_ids[: len(after)] != after:
                raise ConfigError(
                    "the tokens of the conversation up to an answer are others than those that the whole conversation "
                    "begins with, so it is unknown which tokens the answer is; train on everything"
                )
            spans.append((len(before), len(after)))
        return spans


def _as_it_is(kind: str, item: Any) -> Part:
    return {"type": kind, kind: item}


def _with_answers(original: ProcessorMixin) -> Any:
    """Return a processor that takes conversations with an answer at their end.

    mistral-common's tokenizers take those, or those that the model is to continue: `mode` says which.
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


__all__ = ["TokenTemplate", "missing_library"]
