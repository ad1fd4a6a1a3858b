"""Render conversations with a chat template, and find the characters that the model learns to write. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cornstarch.data.sample import Content, Media, Message, Sample, SampleError, describe_formats
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cornstarch.models.multimodal_language_model.preprocessing.hf_processor import WholeModelProcessor

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message.role }}: {{ message.content }}{% if message.role == 'assistant' %}{{ eos_token or '' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\nassistant:' }}{% endif %}"
)
"""For tokenizers without a chat template: `user: …`, `assistant: …`, and the end token after each answer."""

# Two noncharacters, which Unicode reserves for internal use: no text contains them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARKS = OPEN + CLOSE
_MARK = re.compile(f"[{MARKS}]")

Placeholder = Callable[[Media], str]
Conversation = list[dict[str, Any]]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RenderedText:
    text: str
    trained: Spans  # spans of characters that the model learns to write
    is_document: bool = False  # plain text: the tokenizer adds its special tokens around it


class ChatWriter:
    """Renders samples with a chat template.

    Trained on are each answer and its end: the white space and the first special token after it. Answers are enclosed
    in marks before the template is applied, so they are found in any template's output; the text without the marks must
    equal the output for the unmarked conversation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, system: str | None, answers_only: bool
    ):
        self._tokenizer = tokenizer
        self._template = template or tokenizer.chat_template or PLAIN_TEMPLATE
        self._system, self._answers_only = system, answers_only

    def write(self, sample: Sample, placeholder: Placeholder) -> RenderedText:
        """Return the text of a sample; `placeholder` returns the text of an image or a sound."""
        if sample.document:
            text = _join_parts(sample.document, placeholder)
            eos = self._tokenizer.eos_token
            if eos and not self._adds_eos and not self._ends_with_eos(text, eos):
                text += eos
            return RenderedText(text, ((0, len(text)),), is_document=True)
        turns = self._turns(sample, placeholder)
        text = self._apply_template(turns)
        if not self._answers_only:
            return RenderedText(text, ((0, len(text)),))
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        expected = sum(bool(turn["content"].strip()) for turn in answers)
        for turn in answers:
            turn["content"] = mark_answer(turn["content"])
        marked = self._apply_template(turns)
        _check_marks(marked, text, expected)
        return RenderedText(text, find_answers(marked, self._turn_end))

    @cached_property
    def _adds_eos(self) -> bool:
        """Whether the tokenizer itself ends every text with the end token."""
        return bool(self._tokenizer("a")["input_ids"][-1:] == [self._tokenizer.eos_token_id])

    def _ends_with_eos(self, text: str, eos: str) -> bool:
        # Texts without the token at their end, which are nearly all, need not be tokenized to know it.
        return text.rstrip().endswith(eos.strip()) and (
            self._tokenizer(text, verbose=False)["input_ids"][-1:] == [self._tokenizer.eos_token_id]
        )

    def prompt(self, sample: Sample, placeholder: Placeholder) -> RenderedText:
        turns = self._turns(sample, placeholder)
        text = self._apply_template(turns, answer_follows=True)
        marked = self._apply_template([*turns, {"role": "assistant", "content": mark_answer("a")}])
        before, mark, _ = marked.partition(OPEN)
        # The prompt must be what precedes an answer in training. Templates may put more or less into a generation
        # prompt: an empty thought (Qwen3), no role. White space does not matter: a space belongs to the first token.
        return RenderedText(text if not mark or text.rstrip() == before.rstrip() else before.rstrip(" "), ())

    def _turns(self, sample: Sample, placeholder: Placeholder) -> list[dict[str, str]]:
        messages = messages_of(sample, self._system)
        return [{"role": one.role, "content": _join_parts(one.content, placeholder)} for one in messages]

    def _apply_template(self, turns: Sequence[Mapping[str, str]], answer_follows: bool = False) -> str:
        try:
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": answer_follows}
            messages = [dict(turn) for turn in turns]
            return str(self._tokenizer.apply_chat_template(messages, chat_template=self._template, **options))
        except Exception as error:  # templates refuse conversations with any exception
            raise SampleError(f"the chat template refuses it: {type(error).__name__}: {error}") from error

    @cached_property
    def _turn_end(self) -> re.Pattern[str]:
        return turn_end(special_tokens(self._tokenizer).values(), self._apply_template)


class WholeChatWriter:
    """Converts samples to conversations for the chat template of a whole model's processor, as `ChatWriter` does."""

    def __init__(self, processor: WholeModelProcessor, system: str | None, answers_only: bool) -> None:
        self._processor, self._system, self._answers_only = processor, system, answers_only

    def conversation(self, sample: Sample, items: Iterable[Any] | None = None) -> Conversation:
        """Return a sample as messages with typed parts; `items` are its decoded media in order, None omits them."""
        left = None if items is None else iter(items)

        def part(content: str | Media) -> dict[str, Any]:
            if isinstance(content, str):
                return {"type": "text", "text": content}
            return {"type": content.kind, **({} if left is None else {content.kind: next(left)})}

        messages = messages_of(sample, self._system)
        return [{"role": m.role, "content": [part(one) for one in _merge_texts(m.content)]} for m in messages]

    def mark_answers(self, conversation: Conversation) -> tuple[Conversation, str | None]:
        """Return a conversation with marks around its answers, and its text if there are any.

        A template that changes the text for the marks is refused.
        """
        if not self._answers_only or self._processor.style in ("suffix", "tokens"):  # these find answers without marks
            return conversation, None
        marked: Conversation = [{**turn, "content": [{**part} for part in turn["content"]]} for turn in conversation]
        for part in (part for turn in marked if turn["role"] == "assistant" for part in turn["content"]):
            if part["type"] == "text":
                part["text"] = mark_answer(part["text"])
        expected = sum(OPEN in part.get("text", "") for turn in marked for part in turn["content"])
        text = self.write(marked)
        _check_marks(text, self.write(conversation), expected)
        return marked, text

    def write(self, conversation: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation; SampleError if the template refuses it."""
        try:
            return self._processor.write(conversation, prompt=prompt)
        except ConfigError as error:
            raise SampleError(str(error)) from error
        except Exception as error:  # templates refuse conversations with any exception
            raise SampleError(f"the chat template refuses it: {type(error).__name__}: {error}") from error

    def find_trained(self, text: str) -> RenderedText:
        """Return a text without its marks, and the spans that the model learns to write."""
        plain = _MARK.sub("", text)
        if not self._answers_only:
            return RenderedText(plain, ((0, len(plain)),))
        return RenderedText(plain, find_answers(text, self._turn_end))

    @cached_property
    def _turn_end(self) -> re.Pattern[str]:
        items = self._processor.modality_token_ids.values()
        special = special_tokens(self._processor.llm_tokenizer)

        def render(turns: Sequence[Mapping[str, str]]) -> str:
            parts = [[{"type": "text", "text": turn["content"]}] for turn in turns]
            return self.write([{"role": turn["role"], "content": p} for turn, p in zip(turns, parts, strict=True)])

        return turn_end([token for number, token in special.items() if number not in items], render)


def messages_of(sample: Sample, system: str | None) -> list[Message]:
    """Return the messages of a sample, with a system prompt before them if they have none."""
    if not sample.messages:
        raise SampleError(f"has no messages, but {sorted(map(str, sample.fields))}; expected {describe_formats()}")
    if system is None or sample.messages[0].role == "system":
        return list(sample.messages)
    return [Message("system", (system,)), *sample.messages]


def _join_parts(content: Content, placeholder: Placeholder) -> str:
    return "".join(part if isinstance(part, str) else placeholder(part) for part in content)


def _merge_texts(content: Content) -> Content:
    """Merge adjacent texts of a message; drop line breaks beside media, where templates write their own separators."""
    parts: list[str | Media] = []
    for number, part in enumerate(content):
        neighbors = [*content[max(number - 1, 0) : number], *content[number + 1 : number + 2]]
        if part == "\n" and any(isinstance(other, Media) for other in neighbors):
            continue
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return tuple(parts)


def mark_answer(content: str) -> str:
    """Enclose an answer in marks, inside its white space, which templates trim."""
    inner = content.strip()
    if not inner:
        return content
    start = content.index(inner)
    return f"{content[:start]}{OPEN}{inner}{CLOSE}{content[start + len(inner) :]}"


def _check_marks(marked: str, plain: str, expected: int) -> None:
    if _MARK.sub("", marked) != plain or marked.count(OPEN) != expected or marked.count(CLOSE) != expected:
        raise SampleError(
            "the chat template rewrites the answers, so it is unknown which tokens they are; give another with "
            "`data.chat_template`, or train on everything"
        )


def find_answers(marked: str, end: re.Pattern[str]) -> Spans:
    """Return the spans of the answers, each with its end, in the text without marks."""
    plain = _MARK.sub("", marked)
    spans, start = [], 0
    for marks_before, found in enumerate(_MARK.finditer(marked)):
        place = found.start() - marks_before
        if found.group() == OPEN:
            start = place
        else:
            stop = end.match(plain, place)
            spans.append((start, place if stop is None else stop.end()))
    return tuple(spans)


def mask_trained_tokens(offsets: np.ndarray, rendered: RenderedText) -> np.ndarray:
    """Return a mask of the trained tokens, given the characters [S, 2] of each token."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    added = starts == ends  # special tokens that the tokenizer adds around a text
    trained = added & rendered.is_document
    for first, last in rendered.trained:
        inside = ~added & (ends <= last) & (ends > first)
        # Many tokenizers merge a word with the space before it, with which a template may end a prompt.
        for token in np.flatnonzero(inside & (starts < first)):
            inside[token] = not rendered.text[starts[token] : first].strip()
        trained |= inside
    return trained


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return a tokenizer's special tokens by id, also those without a name, as `<end_of_turn>` often is."""
    decoder: Any = tokenizer.added_tokens_decoder
    if not isinstance(decoder, Mapping):  # a method that raises: mistral-common's tokenizers name all of theirs
        decoder = {}
    added = {number: str(token) for number, token in decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True)
    return {**added, **dict(named)}


def turn_end(special: Iterable[str], render: Callable[[Sequence[Mapping[str, str]]], str]) -> re.Pattern[str]:
    """Return the pattern of an answer's end: the special tokens that `render` writes after every answer."""
    ordered = sorted(special, key=len, reverse=True)
    token = "|".join(map(re.escape, ordered))
    ending = ""
    if ordered:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark_answer("a")}] * 2
        try:
            first, last = (after.partition(OPEN)[0] for after in render(turns).split(CLOSE)[1:])
        except (SampleError, ValueError):
            first = last = ""
        # The next turn may begin with special tokens, too, and a conversation may end with some: what is common to
        # both places ends the answer.
        found = re.match(rf"\s*(?:{token})+", os.path.commonprefix([first, last]))
        ending = found.group() if found else ""
    # If the template writes none there, or refuses text alone: white space and the first special token after it.
    single = rf"\s*(?:{token})?" if ordered else r"\s*"
    return re.compile(f"{re.escape(ending)}|{single}" if ending else single)
