"""Label masks against masks built by hand; lengths; batches that give the losses of their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerFast

from cornstarch.data.chat import PLAIN_TEMPLATE, RenderedText, mask_trained_tokens
from cornstarch.data.collate import ChatCollator, concatenate_inputs
from cornstarch.data.formats import open_source
from cornstarch.data.sample import Media, Message, Sample, SampleError, SampleTooLongError
from cornstarch.errors import ConfigError
from tests.data.small_data import data_config, mixed_rows, png, processor_for, write_rows
from tests.models.local_processors import image, sound, tokenizer
from tests.zoo import BOS, EOS, PAD

IGNORED = -100
CLIP, WHISPER = 5, 8  # tokens of an item
IMAGE, SOUND = Media("image", image()), Media("audio", sound())


def conversation(*turns: tuple[str, Any], id: str = "x:1") -> Sample:
    return Sample(id, tuple(Message(role, said if isinstance(said, tuple) else (said,)) for role, said in turns))


CHATML = (
    "{% for message in messages %}<|im_start|> {{ message.role }}\n{{ message.content | trim }} <|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)
# The last answer is written differently from the others, so that no text is the beginning of a longer one.
THINKING = (
    "{% for message in messages %}<|im_start|> {{ message.role }} "
    "{% if loop.last and message.role == 'assistant' %}now or now {% endif %}{{ message.content }} <|im_end|>"
    "{% endfor %}"
)
# An answer ends where the next question begins.
NO_END = (
    "{% for message in messages %}{{ '<|user|> ' if message.role == 'user' else '<|bot|> ' }}{{ message.content }} "
    "{% endfor %}"
)
LINES = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|bot|>"]


def words(template: str | None = None) -> PreTrainedTokenizerFast:
    made = tokenizer(extra_special_tokens=SPECIAL)
    made.chat_template = template
    return made


ASKED = (("user", "what is it"), ("assistant", "the cat"), ("user", "or"), ("assistant", " a dog \n"))

# template: pieces of the text, word by word, and whether they are trained on.
EXPECTED: dict[str, tuple[str, list[tuple[str, bool]]]] = {
    "chatml": (
        CHATML,
        [
            ("<|im_start|> user what is it <|im_end|> <|im_start|> assistant", False),
            ("the cat <|im_end|>", True),
            ("<|im_start|> user or <|im_end|> <|im_start|> assistant", False),
            ("a dog <|im_end|>", True),
        ],
    ),
    "thinking": (
        THINKING,
        [
            ("<|im_start|> user what is it <|im_end|> <|im_start|> assistant", False),
            ("the cat <|im_end|>", True),
            ("<|im_start|> user or <|im_end|> <|im_start|> assistant now or now", False),
            ("a dog <|im_end|>", True),
        ],
    ),
    "no end": (
        NO_END,
        [
            ("<|user|> what is it <|bot|>", False),
            ("the cat <|user|>", True),
            ("or <|bot|>", False),
            ("a dog", True),
        ],
    ),
    "lines": (
        LINES,
        [
            ("user: what is it assistant:", False),
            ("the cat", True),
            ("user: or assistant:", False),
            ("a dog", True),
        ],
    ),
    "plain": (
        PLAIN_TEMPLATE,
        [
            ("<s> user: what is it assistant:", False),
            ("the cat </s>", True),
            ("user: or assistant:", False),
            ("a dog </s>", True),
        ],
    ),
}


def tokenize_by_hand(made: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Look each word up; a placeholder is given as often as it must come."""
    ids: list[int] = []
    labels: list[int] = []
    for text, trained in pieces:
        found = [made.convert_tokens_to_ids(word) for word in text.split()]
        ids += found
        labels += found if trained else [IGNORED] * len(found)
    return ids, labels


@pytest.mark.parametrize("name", EXPECTED)
def test_answers_and_their_ends_are_trained_on(tmp_path: Path, name: str) -> None:
    template, pieces = EXPECTED[name]
    made = words(template if name != "plain" else None)
    processor, _ = processor_for(made)
    prepared = ChatCollator(processor, data_config("x")).prepare(conversation(*ASKED))
    ids, labels = tokenize_by_hand(made, pieces)
    assert prepared.input_ids.tolist() == ids
    assert prepared.labels.tolist() == labels
    given = ChatCollator(processor, data_config("x", chat_template=template)).prepare(conversation(*ASKED))
    assert torch.equal(given.labels, prepared.labels)
    everything = ChatCollator(processor, data_config("x", train_on="everything")).prepare(conversation(*ASKED))
    assert torch.equal(everything.labels, everything.input_ids)


def test_placeholders_are_never_trained_on() -> None:
    made = words(CHATML)
    processor, _ = processor_for(made, vision="clip", audio="whisper")
    sample = conversation(
        ("user", (IMAGE, IMAGE, " or ", SOUND, " what")), ("assistant", ("look ", IMAGE, " now")), ("user", "is it")
    )
    prompt = (
        f"<|im_start|> user {'<vision> ' * 2 * CLIP} or {'<audio> ' * WHISPER} what <|im_end|> <|im_start|> assistant"
    )
    pieces = [
        (prompt, False),
        ("look", True),
        ("<vision> " * CLIP, False),
        ("now <|im_end|>", True),
        ("<|im_start|> user is it <|im_end|>", False),
    ]
    ids, labels = tokenize_by_hand(made, pieces)
    prepared = ChatCollator(processor, data_config("x")).prepare(sample)
    assert prepared.input_ids.tolist() == ids and prepared.labels.tolist() == labels
    assert prepared.encoder_inputs["pixel_values"].shape[0] == 3
    everything = ChatCollator(processor, data_config("x", train_on="everything")).prepare(sample)
    tokens = set(processor.modality_token_ids.values())
    assert everything.labels.tolist() == [IGNORED if token in tokens else token for token in ids]


def test_system_message_of_the_config_is_inserted() -> None:
    made = words(CHATML)
    collator = ChatCollator(processor_for(made)[0], data_config("x", system="look now"))
    asked = (("user", "what"), ("assistant", "cat"))
    pieces = [
        ("<|im_start|> system look now <|im_end|> <|im_start|> user what <|im_end|> <|im_start|> assistant", False),
        ("cat <|im_end|>", True),
    ]
    ids, labels = tokenize_by_hand(made, pieces)
    prepared = collator.prepare(conversation(*asked))
    assert prepared.input_ids.tolist() == ids and prepared.labels.tolist() == labels
    own = collator.prepare(conversation(("system", "the dog"), *asked))
    assert own.text.count("system") == 1 and "the dog" in own.text


def test_documents_are_trained_on_whole() -> None:
    made = words(CHATML)
    processor, _ = processor_for(made, vision="clip")
    sample = Sample("x:1", document=("the cat ", IMAGE, " is loud"))
    ids, labels = tokenize_by_hand(made, [("<s> the cat", True), ("<vision> " * CLIP, False), ("is loud </s>", True)])
    prepared = ChatCollator(processor, data_config("x")).prepare(sample)
    assert prepared.input_ids.tolist() == ids and prepared.labels.tolist() == labels
    assert prepared.trained_tokens == 5  # without the first
    for packing in (False, True):
        collator = ChatCollator(processor, data_config("x", packing=packing))
        assert collator([sample, sample]).trained_tokens == 10


# ---------------------------------------------------------------------------------------- any tokenizer

TEXTS = [
    "the cat is on the mat",
    "what is this? ",
    "éàü ☃ 漢字 🎈🎈",
    "a  b\n\n c",
    "assistant: assistant:",
    "1+1=2",
] * 20


def byte_pairs(prefix_space: bool, trim: bool) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, trim_offsets=trim)
    inner.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


TOKENIZERS = [byte_pairs(False, True), byte_pairs(True, True), byte_pairs(False, False)]
BPE = [ChatCollator(processor_for(made)[0], data_config("x", max_length=10_000)) for made in TOKENIZERS]
WITH_SPACE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
)
anything = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Cn"]), min_size=1, max_size=12)
# Words that the tokenizers know together with the space before them.
known = st.lists(st.sampled_from("the cat is on mat what this ? assistant: é".split()), min_size=1).map(" ".join)
saying = st.one_of(known, anything).filter(lambda text: bool(text.strip()) and "<" not in text)


# (text, spans of answers, tokens by their characters, trained)
TOKENS: list[tuple[str, list[tuple[int, int]], list[tuple[int, int]], list[bool]]] = [
    ("q: cat!", [(3, 7)], [(0, 1), (1, 2), (2, 6), (6, 7)], [False, False, True, True]),  # " cat" with its space
    ("q: cat!", [(3, 7)], [(0, 1), (1, 6), (6, 7)], [False, False, True]),  # ": cat" has a part of the prompt
    ("q: cat!", [(3, 7)], [(0, 3), (3, 4), (4, 7)], [False, True, True]),
    ("q: cat!", [(3, 6)], [(0, 3), (3, 5), (5, 7)], [False, True, False]),  # "t!" has a part of what follows
    ("q: cat!", [(3, 6)], [(0, 0), (0, 3), (3, 6), (6, 7), (0, 0)], [False, False, True, False, False]),
    ("a\n\nb", [(2, 4)], [(0, 1), (1, 3), (3, 4)], [False, True, True]),  # white space over the border
    ("ab cd", [(0, 2), (3, 5)], [(0, 1), (1, 2), (2, 3), (3, 5)], [True, True, False, True]),
]


@pytest.mark.parametrize(("text", "spans", "tokens", "expected"), TOKENS)
def test_token_across_a_span_border(text: str, spans: Any, tokens: Any, expected: list[bool]) -> None:
    assert mask_trained_tokens(np.array(tokens), RenderedText(text, tuple(spans))).tolist() == expected


def test_a_word_joined_with_the_space_before_it_is_trained_on() -> None:
    made = TOKENIZERS[2]
    collator = ChatCollator(processor_for(made)[0], data_config("x", chat_template=WITH_SPACE))
    prepared = collator.prepare(conversation(("user", "what"), ("assistant", "the")))
    assert "Ġthe" in made.get_vocab()
    trained = [token for token in prepared.labels.tolist() if token != IGNORED]
    assert made.convert_ids_to_tokens(trained) == ["Ġthe", "</s>"]


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(st.tuples(saying, saying), min_size=1, max_size=3),
    which=st.integers(0, len(BPE) - 1),
    template=st.sampled_from([None, WITH_SPACE]),
)
def test_trained_tokens_decode_to_the_answers(turns: list[tuple[str, str]], which: int, template: str | None) -> None:
    """Whatever is said, and wherever the tokenizer puts the space before a word."""
    collator = BPE[which]
    if template is not None:
        collator = ChatCollator(collator.processor, data_config("x", max_length=10_000, chat_template=template))
    sample = conversation(*[turn for q, a in turns for turn in (("user", q), ("assistant", a))])
    prepared = collator.prepare(sample)
    runs: list[list[int]] = [[]]
    for token, label in zip(prepared.input_ids.tolist(), prepared.labels.tolist(), strict=True):
        if label == IGNORED:
            runs += [[]] if runs[-1] else []
        else:
            assert label == token
            runs[-1].append(token)
    spoken = [collator.processor.llm_tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs if run]
    assert [text.lstrip() for text in spoken] == [f"{answer.lstrip()}</s>" for _, answer in turns]


# ---------------------------------------------------------------------------------------- length


def long_sample() -> Sample:
    """BOS and 6 tokens, an image (5), 3 tokens, two images (10), a word, an answer of 4 and the end: 31 in all."""
    asked = ("look now the cat", " ", IMAGE, " a and or ", IMAGE, IMAGE, " what")
    return conversation(("user", asked), ("assistant", "it is the dog"))


@pytest.mark.parametrize("limit", range(2, 34))
def test_truncation_ends_before_an_item_that_crosses_the_limit(limit: int) -> None:
    """Every limit: the longest beginning that has no part of an image, and nothing if no answer is left."""
    processor, _ = processor_for(vision="clip")
    whole = ChatCollator(processor, data_config("x", train_on="everything")).prepare(long_sample())
    token = processor.modality_token_ids["vision"]
    ids = whole.input_ids.tolist()
    first, second = 6, 14
    assert len(ids) == 31 and [ids[first], ids[second], ids[first - 1], ids[second - 1]].count(token) == 2
    end = min(limit, len(ids))
    if first < end < first + CLIP:
        end = first
    if second < end < second + 2 * CLIP:
        end = second
    collator = ChatCollator(processor, data_config("x", train_on="everything", max_length=limit, too_long="cut"))
    cut = collator.prepare(long_sample())
    assert cut.input_ids.tolist() == ids[:end]
    items = (end >= first + CLIP) + 2 * (end >= second + 2 * CLIP)
    assert len(cut.items.get("vision", [])) == items
    assert ("pixel_values" in cut.encoder_inputs) == (items > 0)
    if items:
        assert torch.equal(cut.encoder_inputs["pixel_values"], whole.encoder_inputs["pixel_values"][:items])
    answers = ChatCollator(processor, data_config("x", max_length=limit, too_long="cut"))
    if limit < 27:
        with pytest.raises(SampleError, match="no token to train on"):
            answers.prepare(long_sample())
    else:
        assert answers.prepare(long_sample()).trained_tokens == min(limit, 31) - 26


def test_too_long_is_skipped_or_an_error() -> None:
    processor, _ = processor_for(vision="clip")
    with pytest.raises(SampleTooLongError, match="31 tokens, max_length is 30"):
        ChatCollator(processor, data_config("x", max_length=30)).prepare(long_sample())
    with pytest.raises(ConfigError, match=r"x:1: has 31 tokens, max_length is 30.*too_long"):
        ChatCollator(processor, data_config("x", max_length=30, too_long="error")).prepare(long_sample())
    assert len(ChatCollator(processor, data_config("x", max_length=31)).prepare(long_sample()).input_ids) == 31


def test_sound_longer_than_the_extractor_takes_is_refused() -> None:
    processor, _ = processor_for(audio="whisper")
    sample = conversation(("user", (Media("audio", sound(16001)),)), ("assistant", "dog"))
    with pytest.raises(SampleTooLongError, match="16001 samples, its feature extractor takes 16000"):
        ChatCollator(processor, data_config("x")).prepare(sample)
    assert ChatCollator(processor, data_config("x", too_long="cut")).prepare(sample).trained_tokens == 2


# ---------------------------------------------------------------------------------------- batches


def samples_of(folder: Path, count: int) -> list[Sample]:
    source = open_source(data_config(write_rows(folder / "d.jsonl", mixed_rows(folder, count))).train[0])
    return [source[i] for i in range(count)]


def sum_losses(model: Any, inputs: dict[str, Any], trained: int) -> Tensor:
    return model(**inputs).loss * trained


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_has_the_loss_of_its_samples(tmp_path: Path, packing: bool) -> None:
    processor, model = processor_for(vision="clip", audio="whisper")
    samples = samples_of(tmp_path, 8)
    collator = ChatCollator(processor, data_config("x", packing=packing, max_length=60))
    alone = ChatCollator(processor, data_config("x"))
    batch = collator(samples)
    singles = [alone([sample]) for sample in samples]
    assert batch.trained_tokens == sum(single.trained_tokens for single in singles)
    assert batch.tokens == sum(single.tokens for single in singles)
    assert batch.items == {"vision": 6, "audio": 2}
    assert sorted(batch.sample_ids) == sorted(sample.id for sample in samples)
    assert (len(batch.inputs["input_ids"]) < 8) == packing == ("documents" in batch.inputs)
    with torch.no_grad():
        expected = sum(sum_losses(model, single.inputs, single.trained_tokens) for single in singles)
        found = sum_losses(model, batch.inputs, batch.trained_tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_padded_batch_equals_one_built_by_hand() -> None:
    processor, _ = processor_for()
    batch = ChatCollator(processor, data_config("x"))(
        [
            conversation(("user", "what"), ("assistant", "cat")),
            conversation(("user", "a and or"), ("assistant", "the dog")),
        ]
    )
    made = processor.llm_tokenizer
    one = tokenize_by_hand(made, [("<s> user: what assistant:", False), ("cat </s>", True)])
    two = tokenize_by_hand(made, [("<s> user: a and or assistant:", False), ("the dog </s>", True)])
    assert batch.inputs["input_ids"].tolist() == [one[0] + [PAD] * 3, two[0]]
    assert batch.inputs["labels"].tolist() == [one[1] + [IGNORED] * 3, two[1]]
    assert batch.inputs["attention_mask"].tolist() == [[1] * 6 + [0] * 3, [1] * 9]
    assert (batch.tokens, batch.trained_tokens, batch.items) == (15, 5, {})
    assert (one[0][0], one[0][-1]) == (BOS, EOS)


@pytest.mark.parametrize("encoder", ["pixtral", "qwen2_vl", "siglip2", "wav2vec2", "clip", "whisper"])
@pytest.mark.parametrize("packing", [False, True])
def test_items_of_several_sizes_are_padded_by_the_processor(encoder: str, packing: bool) -> None:
    """What is put together is what the processor makes of all items at once, in the order of the rows."""
    modality = "audio" if encoder in ("wav2vec2", "whisper") else "vision"
    processor, model = processor_for(**{modality: encoder})
    media = (
        [Media("audio", sound(n, n)) for n in (800, 1200, 2000)]
        if modality == "audio"
        else [Media("image", image(w, h, w)) for w, h in ((20, 20), (40, 20), (20, 50))]
    )
    samples = [
        conversation(("user", (*media[:2], " what")), ("assistant", "the cat"), id="0"),
        conversation(("user", "what"), ("assistant", "the cat"), id="1"),
        conversation(("user", (media[2], " is it")), ("assistant", "dog and"), id="2"),
    ]
    batch = ChatCollator(processor, data_config("x", packing=packing, max_length=70))(samples)
    assert batch.items == {modality: 3}
    with torch.no_grad():
        assert model(**batch.inputs).loss.isfinite()
    order = [int(id) for id in batch.sample_ids]
    flat = [m.source for number in order for m in samples[number].media]
    options = {"audio": flat, "sampling_rate": 16000} if modality == "audio" else {"images": flat}
    if encoder == "wav2vec2":
        options["padding"] = True
    expected = dict(processor({modality: options}, return_tensors="pt"))
    found = {key: value for key, value in batch.inputs.items() if key in expected}
    assert_same(found, expected)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)


# ---------------------------------------------------------------------------------------- mistakes

ANSWER = ("assistant", "cat")
BROKEN: dict[str, tuple[Sample, dict[str, Any], str]] = {
    "no messages": (Sample("x:1"), {}, "no messages"),
    "no answer": (conversation(("user", "what")), {}, "no token to train on"),
    "an empty answer": (conversation(("user", "what"), ("assistant", "  ")), {}, "no token to train on"),
    "an image too few": (conversation(("user", ("<vision>", IMAGE)), ANSWER), {}, "2 placeholders"),
    "a missing image": (conversation(("user", (Media("image", "/no/x.png"),)), ANSWER), {}, "/no/x.png"),
    "too many pixels": (conversation(("user", (Media("image", png()),)), ANSWER), {"max_pixels": 9}, "20 × 20 pixels"),
    "no such modality": (conversation(("user", (SOUND,)), ANSWER), {}, "an audio, which fits none"),
    "a template that refuses": (
        conversation(("user", "what"), ANSWER),
        {"chat_template": "{{ raise_exception('roles must alternate') }}"},
        "roles must alternate",
    ),
    "a template that is wrong": (conversation(("user", "a"), ANSWER), {"chat_template": "{% if %}"}, "TemplateSyntax"),
    "a template that rewrites": (
        conversation(("user", "a"), ANSWER),
        {"chat_template": "{% for m in messages %}{{ m.content[:2] }} {% endfor %}"},
        "rewrites the answers",
    ),
    "a template that repeats": (
        conversation(("user", "a"), ANSWER),
        {"chat_template": "{% for m in messages %}{{ m.content }} {{ m.content }} {% endfor %}"},
        "rewrites the answers",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_sample_raises_sample_error(name: str) -> None:
    sample, options, message = BROKEN[name]
    processor, _ = processor_for(vision="clip")
    with pytest.raises(SampleError, match=message):
        ChatCollator(processor, data_config("x", **options)).prepare(sample)


def test_a_text_is_tokenized_once_as_its_expanded_text_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, _ = processor_for(words(CHATML), vision="clip", audio="whisper")
    collator = ChatCollator(processor, data_config("x", max_length=100))
    sample = conversation(("user", ("what", IMAGE, IMAGE, "now", SOUND)), ("assistant", "a cat"))
    expected = collator.prepare(sample)  # also tries the tokenizer with repeated placeholders
    calls: list[Any] = []
    encode = type(processor.llm_tokenizer).__call__

    def record(self: Any, *given: Any, **options: Any) -> Any:
        calls.append(given)
        return encode(self, *given, **options)

    monkeypatch.setattr(type(processor.llm_tokenizer), "__call__", record)
    prepared = collator.prepare(sample)
    assert len(calls) == 1
    monkeypatch.undo()
    items = {"vision": {"images": prepared.items["vision"]}, "audio": {"raw_speech": prepared.items["audio"]}}
    items["audio"]["sampling_rate"] = 16000
    by_hand = processor(items, {"text": [prepared.text], "add_special_tokens": False}, return_tensors="pt")
    assert torch.equal(prepared.input_ids, by_hand["input_ids"][0]) and torch.equal(expected.labels, prepared.labels)
    assert (prepared.input_ids == processor.modality_token_ids["vision"]).sum() == 2 * CLIP


def test_a_placeholder_that_is_no_whole_token_is_refused() -> None:
    whole_word = AddedToken("<vision>", single_word=True, special=True)  # `<vision><vision>` is one unknown word
    own = tokenizer(extra_special_tokens=[*SPECIAL, whole_word])
    own.chat_template = CHATML
    processor, _ = processor_for(own, vision="clip")
    collator = ChatCollator(processor, data_config("x", max_length=100))
    with pytest.raises(SampleError, match="in another way beside a repeated placeholder '<vision>'"):
        collator.prepare(conversation(("user", ("what", IMAGE, "now")), ("assistant", "a cat")))


@pytest.mark.parametrize(("text", "ends"), [("a cat", 1), ("a cat </s>", 1), ("a cat </s> ", 1), ("</s> a", 1)])
def test_a_document_ends_once(text: str, ends: int) -> None:
    processor, _ = processor_for(words=words())
    ids = ChatCollator(processor, data_config("x")).prepare(Sample("x:1", document=(text,))).input_ids.tolist()
    assert ids[-1] == EOS and ids[-2:] != [EOS, EOS]


class _Joined(torch.utils.data.Dataset[tuple[bool, Tensor]]):
    parts = [{"pixels": torch.arange(6.0).view(2, 3)}, {"pixels": torch.ones(1, 3)}]

    def __getitem__(self, count: int) -> tuple[bool, Tensor]:
        joined = concatenate_inputs(self.parts[:count])
        assert joined is not None
        return joined["pixels"].is_shared(), joined["pixels"]


def test_a_worker_concatenates_in_the_memory_that_it_shares() -> None:
    loader = torch.utils.data.DataLoader(_Joined(), batch_size=None, sampler=[1, 2], num_workers=1)
    found = list(loader)
    assert [is_shared for is_shared, _ in found] == [True, True]
    assert [pixels.tolist() for _, pixels in found] == [[[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5], [1, 1, 1]]]
    assert not _Joined()[2][0]
