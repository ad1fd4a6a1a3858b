"""Samples as conversations for a whole model's own chat template, and which characters are the model's to write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.whole_processing import WholeModelProcessor
from cornstarch.train.data.chat import CLOSE, OPEN, Rendered, mark_answer, special_tokens, turn_end
from cornstarch.train.data.rows import describe_formats
from cornstarch.train.data.sample import Content, Media, Message, Sample, SampleError

MARKS = OPEN + CLOSE
_MARK = re.compile(f"[{MARKS}]")

Conversation = list[dict[str, Any]]


class WholeChatWriter:
    """Translates samples to what a processor's chat template takes, with marks around the answers.

    What is trained on is each answer and what ends it, as in `ChatWriter`.

    Args:
        processor: The whole model's processor.
        system: The system prompt of conversations that have none.
        answers_only: Whether answers alone are trained on.
    """

    def __init__(self, processor: WholeModelProcessor, system: str | None, answers_only: bool) -> None:
        self._processor, self._system, self._answers_only = processor, system, answers_only
        items = processor.modality_token_ids.values()
        special = special_tokens(processor.llm_tokenizer)
        self._special = [token for number, token in special.items() if number not in items]
        self._turn_end: re.Pattern[str] | None = None

    def conversation(self, sample: Sample, items: Iterable[Any] | None = None) -> Conversation:
        """Return a sample as messages with typed parts.

        Args:
            sample: A conversation.
            items: Its decoded media, in order; None leaves them out.
        """
        if not sample.messages:
            raise SampleError(f"has no messages, but {sorted(map(str, sample.fields))}; expected {describe_formats()}")
        messages = list(sample.messages)
        if self._system is not None and messages[0].role != "system":
            messages.insert(0, Message("system", (self._system,)))
        left = None if items is None else iter(items)

        def part(content: str | Media) -> dict[str, Any]:
            if isinstance(content, str):
                return {"type": "text", "text": content}
            return {"type": content.kind, **({} if left is None else {content.kind: next(left)})}

        return [{"role": m.role, "content": [part(one) for one in _parts(m.content)]} for m in messages]

    def marked(self, conversation: Conversation) -> Conversation:
        """Return a conversation with marks around its answers; the template must leave all else as it is."""
        if not self._answers_only or self._processor.style in ("suffix", "tokens"):  # answers are found otherwise
            return conversation
        marked = [
            {**turn, "content": [_marked(part) for part in turn["content"]]} if turn["role"] == "assistant" else turn
            for turn in conversation
        ]
        plain, text = self.write(conversation), self.write(marked)
        expected = sum(OPEN in part.get("text", "") for turn in marked for part in turn["content"])
        if _MARK.sub("", text) != plain or text.count(OPEN) != expected or text.count(CLOSE) != expected:
            raise SampleError(
                "the chat template rewrites the answers, so it is unknown which tokens they are; give another with "
                "`data.chat_template`, or train on everything"
            )
        return marked

    def write(self, conversation: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation; what the template refuses raises SampleError."""
        try:
            return self._processor.write(conversation, prompt=prompt)
        except ConfigError as error:
            raise SampleError(str(error)) from error
        except Exception as error:  # a template refuses conversations with whatever exception it likes
            raise SampleError(f"the chat template refuses it: {type(error).__name__}: {error}") from error

    def _write_texts(self, turns: Sequence[Mapping[str, str]]) -> str:
        content = [[{"type": "text", "text": turn["content"]}] for turn in turns]
        return self.write([{"role": turn["role"], "content": c} for turn, c in zip(turns, content, strict=True)])

    def rendered(self, text: str) -> Rendered:
        """Return a text without its marks, and the characters that the model learns to write."""
        plain = _MARK.sub("", text)
        if not self._answers_only:
            return Rendered(plain, ((0, len(plain)),))
        if self._turn_end is None:
            self._turn_end = turn_end(self._special, self._write_texts)
        spans, start = [], 0
        for marks_before, found in enumerate(_MARK.finditer(text)):
            place = found.start() - marks_before
            if found.group() == OPEN:
                start = place
            else:
                stop = self._turn_end.match(plain, place)
                spans.append((start, place if stop is None else stop.end()))
        return Rendered(plain, tuple(spans))


def _parts(content: Content) -> Content:
    """Return a message's parts, its texts joined, without the line breaks that set marks apart from the text.

    A mark on a line of its own, `<image>\\nWhat is this?`, says where an image stands; templates write what stands
    between an image and a text themselves.
    """
    parts: list[str | Media] = []
    for number, part in enumerate(content):
        beside = [*content[max(number - 1, 0) : number], *content[number + 1 : number + 2]]
        if part == "\n" and any(isinstance(other, Media) for other in beside):
            continue
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return tuple(parts)


def _marked(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "text": mark_answer(part["text"])} if part["type"] == "text" else part
