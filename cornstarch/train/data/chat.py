"""A conversation into one text, and which of its characters are the model's to write. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cornstarch.train.data.rows import describe_formats
from cornstarch.train.data.sample import Content, Media, Message, Sample, SampleError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message.role }}: {{ message.content }}{% if message.role == 'assistant' %}{{ eos_token or '' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\nassistant:' }}{% endif %}"
)
"""For tokenizers without a chat template: `user: …`, `assistant: …`, and the end token after each answer."""

# Two characters that Unicode sets apart for a program's own use; no text has them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
_ANSWER = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)

Placeholder = Callable[[Media], str]


@dataclass(frozen=True)
class Rendered:
    """A text, ready for the tokenizer."""

    text: str
    trained: tuple[tuple[int, int], ...]
    """Spans of characters that the model learns to write."""
    is_document: bool = False
    """Plain text: the tokenizer adds what it puts around texts."""


class ChatWriter:
    """Writes samples as text with a chat template.

    What is trained on is each answer and what ends it: the white space and the first special token after it. The
    answers are found by marks set around them before the template is applied, so they are found however a template
    writes turns; the text without the marks must be what the template makes of the unmarked conversation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, system: str | None, answers_only: bool
    ):
        self._tokenizer = tokenizer
        self._template = template or tokenizer.chat_template or PLAIN_TEMPLATE
        self._system, self._answers_only = system, answers_only
        self._turn_end: re.Pattern[str] | None = None

    def write(self, sample: Sample, placeholder: Placeholder) -> Rendered:
        """Return the text of a sample; `placeholder` says what stands for a medium."""
        if sample.document:
            return self._document(_joined(sample.document, placeholder))
        turns = self._turns(sample, placeholder)
        text = self._applied(turns)
        if not self._answers_only:
            return Rendered(text, ((0, len(text)),))
        return Rendered(text, self._answers(text, turns))

    def prompt(self, sample: Sample, placeholder: Placeholder) -> Rendered:
        """Return the text of a conversation that the model is to continue."""
        turns = self._turns(sample, placeholder)
        text = self._applied(turns, answer_follows=True)
        before, mark, _ = self._applied([*turns, {"role": "assistant", "content": mark_answer("a")}]).partition(OPEN)
        # What stands before an answer in training. Templates may put more or less into a prompt: an empty thought
        # (Qwen3), no role. White space alone decides nothing: a space belongs to the answer's first token.
        return Rendered(text if not mark or text.rstrip() == before.rstrip() else before.rstrip(" "), ())

    def _turns(self, sample: Sample, placeholder: Placeholder) -> list[dict[str, str]]:
        if not sample.messages:
            raise SampleError(f"has no messages, but {sorted(map(str, sample.fields))}; expected {describe_formats()}")
        messages = list(sample.messages)
        if self._system is not None and messages[0].role != "system":
            messages.insert(0, Message("system", (self._system,)))
        return [{"role": message.role, "content": _joined(message.content, placeholder)} for message in messages]

    def _document(self, text: str) -> Rendered:
        eos = self._tokenizer.eos_token
        if eos and self._tokenizer(text)["input_ids"][-1:] != [self._tokenizer.eos_token_id]:
            text += eos
        return Rendered(text, ((0, len(text)),), is_document=True)

    def _applied(self, turns: Sequence[Mapping[str, str]], answer_follows: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(turn) for turn in turns],
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=answer_follows,
                )
            )
        except Exception as error:  # a template refuses conversations with whatever exception it likes
            raise SampleError(f"the chat template refuses it: {type(error).__name__}: {error}") from error

    def _end_of_answers(self) -> re.Pattern[str]:
        if self._turn_end is None:
            special = special_tokens(self._tokenizer).values()
            self._turn_end = turn_end(special, lambda turns: self._applied(turns))
        return self._turn_end

    def _answers(self, text: str, turns: Sequence[Mapping[str, str]]) -> tuple[tuple[int, int], ...]:
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        marked = self._applied(
            [
                {**turn, "content": mark_answer(turn["content"])} if turn["role"] == "assistant" else turn
                for turn in turns
            ]
        )
        expected = sum(bool(said.strip()) for said in answers)
        found = list(_ANSWER.finditer(marked))
        if marked.replace(OPEN, "").replace(CLOSE, "") != text or len(found) != expected:
            raise SampleError(
                "the chat template rewrites the answers, so it is unknown which tokens they are; give another with "
                "`data.chat_template`, or train on everything"
            )
        spans = []
        for number, answer in enumerate(found):
            start = answer.start() - 2 * number  # two marks have been before it
            end = start + len(answer.group(1))
            stop = self._end_of_answers().match(text, end)
            spans.append((start, stop.end() if stop else end))
        return tuple(spans)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return a tokenizer's special tokens by id, also those that it has no name for.

    `all_special_tokens` has the named ones only; `<end_of_turn>` and `<|eot_id|>` often have none.
    """
    decoder: Any = tokenizer.added_tokens_decoder
    if not isinstance(decoder, Mapping):  # a method that raises: mistral-common's tokenizers name all of theirs
        decoder = {}
    added = {number: str(token) for number, token in decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True)
    return {**added, **dict(named)}


def turn_end(special: Iterable[str], render: Callable[[Sequence[Mapping[str, str]]], str]) -> re.Pattern[str]:
    """Return the pattern of what ends an answer: the special tokens behind each answer, with white space before them.

    Where a template puts none there, or cannot write a conversation of text alone: white space, and the first special
    token after it.

    Args:
        special: All special tokens.
        render: Writes turns, of which each has a role and a text, as the template does.
    """
    ordered = sorted(special, key=len, reverse=True)
    token = "|".join(map(re.escape, ordered))
    ending = ""
    if ordered:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark_answer("a")}] * 2
        try:
            first, last = (after.partition(OPEN)[0] for after in render(turns).split(CLOSE)[1:])
        except (SampleError, ValueError):
            first = last = ""
        # The beginning of the next turn may be special tokens, too, and so may the end of a conversation.
        found = re.match(rf"\s*(?:{token})+", os.path.commonprefix([first, last]))
        ending = found.group() if found else ""
    single = rf"\s*(?:{token})?" if ordered else r"\s*"
    return re.compile(f"{re.escape(ending)}|{single}" if ending else single)


def _joined(content: Content, placeholder: Placeholder) -> str:
    return "".join(part if isinstance(part, str) else placeholder(part) for part in content)


def mark_answer(content: str) -> str:
    """Return an answer with marks inside its white space, which templates trim."""
    inner = content.strip()
    if not inner:
        return content
    start = content.index(inner)
    return f"{content[:start]}{OPEN}{inner}{CLOSE}{content[start + len(inner) :]}"
