"""A question ends as the text before an answer did in training, whatever a template puts into its prompts."""

from __future__ import annotations

import pytest

from cornstarch.data.chat import PLAIN_TEMPLATE, ChatWriter
from cornstarch.data.sample import Message, Sample
from tests.models.local_processors import tokenizer

_TURN = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
_LAST = "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message.content + '<|im_end|>\n' }}"
TEMPLATES = {
    "plain": PLAIN_TEMPLATE,
    "turns": "{% for message in messages %}" + _TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "an empty thought in the last answer, none in prompts": "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.last %}" + _LAST + "{% else %}" + _TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "a thought begun in prompts": "{% for message in messages %}" + _TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
    "no prompts": "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}",
}
USER, ASSISTANT = Message("user", ("what is it",)), Message("assistant", ("a cat",))


@pytest.mark.parametrize("said", [(USER,), (USER, ASSISTANT, USER)], ids=["first", "later"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_prompt_equals_the_text_before_the_answer(template: str, said: tuple[Message, ...]) -> None:
    writer = ChatWriter(tokenizer(), template, None, True)
    trained = writer.write(Sample("trained", (*said, ASSISTANT)), str)
    before = trained.text[: trained.trained[-1][0]]
    asked = writer.prompt(Sample("asked", said), str).text
    assert asked == before.rstrip(" ")


def test_template_without_answers_uses_its_generation_prompt() -> None:
    template = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %} answer:"
    assert ChatWriter(tokenizer(), template, None, True).prompt(Sample("asked", (USER,)), str).text.endswith("answer:")
