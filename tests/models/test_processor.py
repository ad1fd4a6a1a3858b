"""Texts and items into a batch: both documented ways, for every encoder, and every mistake with its message."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoFeatureExtractor, AutoTokenizer, BatchFeature

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import (
    ModalEncoderModule,
    MultimodalModel,
    MultimodalModelProcessor,
    MultimodalProcessor,
)
from tests.models import local_processors as local
from tests.models.local_processors import image, processor_of, sound, tokenizer
from tests.models.whole_models import FAMILIES
from tests.zoo import BOS, ENCODERS, LANGUAGE_MODELS, PAD, VOCABULARY

CLIP_TOKENS, WHISPER_TOKENS = 5, 8


def model_of(**encoders: str) -> MultimodalModel:
    """Compose encoders of the zoo, by modality, with a small Llama."""
    built = {name: ENCODERS[encoder].build() for name, encoder in encoders.items()}
    return MultimodalModel(built, LANGUAGE_MODELS["llama"].build()).eval()


def vision(**options: Any) -> MultimodalProcessor:
    """Make a processor for CLIP, with its model unless a function says how many tokens there are."""
    if "num_feature_calculation_funcs" not in options:
        options.setdefault("model", model_of(vision="clip"))
    options.setdefault("llm_tokenizer", tokenizer())
    return MultimodalProcessor({"vision": processor_of("clip")}, **options)


def both() -> MultimodalProcessor:
    """Make a processor for images and sounds."""
    processors = {"vision": processor_of("clip"), "audio": processor_of("whisper")}
    return MultimodalProcessor(processors, tokenizer(), model_of(vision="clip", audio="whisper"))


def ids_of(processor: MultimodalProcessor, *pieces: str | tuple[str, int]) -> list[int]:
    """Return the ids of a text given word by word; (token, n) is a token n times."""
    ids = [BOS]
    for piece in pieces:
        word, times = piece if isinstance(piece, tuple) else (piece, 1)
        ids += processor.tokenizer.convert_tokens_to_ids([word]) * times
    return ids


# ---------------------------------------------------------------------------------------- the documented ways


def test_tokenizer_and_image_processor() -> None:
    processor = MultimodalModelProcessor(
        tokenizer=tokenizer(), image_processor=processor_of("clip"), model=model_of(vision="clip")
    )
    batch = processor(text="look <vision> now", images=image(), return_tensors="pt")
    assert isinstance(batch, BatchFeature)
    assert batch["input_ids"].tolist() == [ids_of(processor, "look", ("<vision>", CLIP_TOKENS), "now")]
    assert batch["pixel_values"].shape == (1, 3, 16, 16)


def test_tokenizer_image_processor_and_feature_extractor() -> None:
    processor = MultimodalModelProcessor(
        tokenizer=tokenizer(),
        image_processor=processor_of("clip"),
        feature_extractor=processor_of("whisper"),
        model=model_of(vision="clip", audio="whisper"),
    )
    batch = processor(
        text=["this <vision> or <audio>", "the cat"],
        images=[image()],
        audio=[sound()],
        sampling_rate=local.SOUND_RATE,
        padding=True,
        return_tensors="pt",
    )
    first = ids_of(processor, "this", ("<vision>", CLIP_TOKENS), "or", ("<audio>", WHISPER_TOKENS))
    second = ids_of(processor, "the", "cat")
    assert batch["input_ids"].tolist() == [first, second + [PAD] * (len(first) - len(second))]
    assert batch["attention_mask"].sum(-1).tolist() == [len(first), len(second)]
    assert set(batch) == {"input_ids", "attention_mask", "pixel_values", "input_features"}


@pytest.mark.parametrize("keyword", ["num_feature_calculation_funcs", "num_features_calculation_funcs"])
def test_processors_and_functions_by_modality(keyword: str) -> None:
    functions = {
        "vision": lambda *args, **kwargs: (16 // 8) ** 2 + 1,
        "audio": lambda *args, **kwargs: WHISPER_TOKENS,
    }
    mllm = model_of(vision="clip", audio="whisper")
    mm = MultimodalProcessor(
        encoder_processors={"vision": processor_of("clip"), "audio": processor_of("whisper")},
        llm_tokenizer=tokenizer(),
        model=mllm,
        predefined_tokens={"vision": "<image>"},
        **{keyword: functions},
    )
    texts = ["<image> and <image>", "look <image>"]
    batch = mm(
        encoder_inputs={"vision": {"images": [image(seed=seed) for seed in range(3)]}},
        llm_inputs={"text": texts, "padding": True},
        return_tensors="pt",
    ).to("cpu", torch.float64)
    assert mm.modality_tokens == {"vision": "<image>", "audio": "<audio>"}
    assert mllm.modality_token_ids == mm.modality_token_ids == {"vision": VOCABULARY, "audio": VOCABULARY + 1}
    assert batch["input_ids"][0].tolist() == ids_of(mm, ("<image>", 5), "and", ("<image>", 5))
    assert batch["pixel_values"].dtype == torch.float64 and batch["input_ids"].dtype == torch.int64


def test_processor_classes_are_built_with_their_defaults() -> None:
    mm = MultimodalProcessor(
        encoder_processors={
            "vision": transformers.CLIPImageProcessor,
            "audio": transformers.WhisperFeatureExtractor,
        },
        llm_tokenizer=tokenizer(),
        num_feature_calculation_funcs={"vision": lambda *a, **k: 3, "audio": lambda *a, **k: 2},
    )
    batch = mm(
        encoder_inputs={"vision": {"images": [image()]}, "audio": {"raw_speech": [sound()], "sampling_rate": 16000}},
        llm_inputs={"text": ["<vision> is <audio>"]},
        return_tensors="pt",
    )
    assert batch["input_ids"].tolist() == [ids_of(mm, ("<vision>", 3), "is", ("<audio>", 2))]
    assert batch["pixel_values"].shape == (1, 3, 224, 224) and batch["input_features"].shape == (1, 80, 3000)


@pytest.mark.parametrize("encoder_inputs", [None, {}, {"vision": None}, {"vision": {}}, {"vision": {"images": []}}])
def test_texts_without_images(encoder_inputs: Any) -> None:
    processor = vision()
    batch = processor(encoder_inputs, {"text": ["the cat", "a dog is loud"], "padding": True}, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][1].tolist() == ids_of(processor, "a", "dog", "is", "loud")


def test_one_class_has_two_names() -> None:
    assert MultimodalModelProcessor is MultimodalProcessor


# ---------------------------------------------------------------------------------------- every encoder


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_the_batch_fits_the_model(name: str, side: str) -> None:
    modality = ENCODERS[name].modality
    model = model_of(**{modality: name})
    processor = MultimodalProcessor({modality: processor_of(name)}, tokenizer(padding_side=side), model)
    images = [image(20, 20), image(40, 20), image(20, 50)]
    sounds = [sound(800), sound(1200), sound(2000)]
    inputs: dict[str, Any] = {"images": images} if modality == "vision" else {"audio": sounds}
    if name == "wav2vec2":
        inputs["padding"] = True
    texts = [f"what is <{modality}>", f"look <{modality}> and <{modality}> now", "the cat"]
    batch = processor({modality: inputs}, {"text": texts, "padding": True}, return_tensors="pt")

    nested = {modality: batch[modality]} if modality in batch else dict(batch)
    encoder = model.encoders[modality]
    arguments = encoder.rename_inputs(dict(nested[modality])) if modality in nested else encoder.select_inputs(nested)
    lengths = encoder.features(arguments).lengths
    counts = (batch["input_ids"] == processor.modality_token_ids[modality]).sum(-1).tolist()
    assert counts == [lengths[0], lengths[1] + lengths[2], 0]
    column = 0 if side == "left" else -1
    assert batch["input_ids"][2, column] == PAD and batch["attention_mask"][2, column] == 0
    with torch.no_grad():
        assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


def test_a_mask_of_the_encoder_is_nested() -> None:
    model = model_of(audio="wav2vec2")
    processor = MultimodalProcessor({"audio": processor_of("wav2vec2")}, tokenizer(), model)
    inputs = {"raw_speech": [sound(800), sound(2000)], "padding": True}
    batch = processor({"audio": inputs}, {"text": ["<audio>", "<audio>"], "padding": True}, "pt")
    assert set(batch) == {"input_ids", "attention_mask", "audio"}
    assert set(batch["audio"]) == {"input_values", "attention_mask"}
    moved = batch.to(torch.bfloat16)
    assert moved is batch and batch["audio"]["input_values"].dtype == torch.bfloat16
    assert batch["audio"]["attention_mask"].dtype == torch.int32
    assert batch["attention_mask"].shape == batch["input_ids"].shape


def test_equal_names_of_two_encoders_are_nested() -> None:
    model = model_of(left="clip", right="siglip")
    processors = {"left": processor_of("clip"), "right": processor_of("siglip")}
    processor = MultimodalProcessor(processors, tokenizer(), model)
    one = processor({"left": {"images": [image()]}}, {"text": "<left>"}, "pt")
    two = processor({"left": {"images": [image()]}, "right": {"images": [image()]}}, {"text": "<left><right>"}, "pt")
    assert set(one) == {"input_ids", "attention_mask", "left"}
    assert set(two) == {"input_ids", "attention_mask", "left", "right"}
    assert two["input_ids"].tolist() == [ids_of(processor, ("<left>", 5), ("<right>", 4))]
    with torch.no_grad():
        assert model(**one).logits.shape[1] == 6 and model(**two).logits.shape[1] == 10


def test_outputs_that_the_encoder_does_not_take_are_dropped() -> None:
    model = model_of(vision="siglip2")
    processor = MultimodalProcessor({"vision": lambda images: {**made, "num_crops": [1]}}, tokenizer(), model)
    made = dict(processor_of("siglip2")(images=[image()], return_tensors="np"))
    batch = processor({"vision": {"images": [image()]}}, {"text": "<vision>"}, "pt")
    assert set(batch) == {"input_ids", "attention_mask", *made}


def whole(family: str) -> tuple[MultimodalModel, Any]:
    """Take a whole model apart, and make the processor that belongs to it."""
    model = MultimodalModel.from_multimodal(FAMILIES[family].build())
    if family == "qwen2-audio":
        return model, transformers.WhisperFeatureExtractor(feature_size=8, hop_length=500, chunk_length=1, n_fft=400)
    if family == "qwen2-vl":
        return model, transformers.Qwen2VLImageProcessor(patch_size=4, min_pixels=64, max_pixels=1024)
    size = {"height": 16, "width": 16}
    grids = [[16, 32], [32, 16], [32, 32]]
    if family == "llava-next":
        return model, transformers.LlavaNextImageProcessor(size=size, crop_size=size, image_grid_pinpoints=grids)
    return model, processor_of("clip")


@pytest.mark.parametrize("family", ["llava", "llava-next", "qwen2-vl", "qwen2-audio"])
def test_the_batch_fits_a_decomposed_model(family: str) -> None:
    model, processor = whole(family)
    (modality,) = model.encoders
    mm = MultimodalProcessor({modality: processor}, tokenizer(), model)
    items: dict[str, Any] = {"images": [image(20, 20), image(40, 20), image(20, 50)]}
    if modality == "audio":
        items = {"audio": [sound(16000), sound(8000), sound(2000)], "return_attention_mask": True}
    texts = [f"look <{modality}>", f"<{modality}> or <{modality}>"]
    batch = mm({modality: items}, {"text": texts, "padding": True}, return_tensors="pt")
    lengths = model.encoders[modality].features(model.encoders[modality].select_inputs(batch)).lengths
    counts = (batch["input_ids"] == mm.modality_token_ids[modality]).sum(-1).tolist()
    assert counts == [lengths[0], lengths[1] + lengths[2]]
    with torch.no_grad():
        assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


# ---------------------------------------------------------------------------------------- the items


IMAGES = [image(seed=seed) for seed in range(3)]
ARRAYS = np.stack([np.asarray(one) for one in IMAGES])


@pytest.mark.parametrize(
    "items",
    [IMAGES, tuple(IMAGES), [IMAGES[:1], [], IMAGES[1:]], ARRAYS, list(ARRAYS)],
    ids=["list", "tuple", "per sample", "array", "arrays"],
)
def test_ways_to_give_items(items: Any) -> None:
    processor = vision()
    texts = ["<vision> now", "the cat", "<vision> or <vision>"]
    batch = processor(text=texts, images=items, padding=True, return_tensors="pt")
    counts = (batch["input_ids"] == processor.modality_token_ids["vision"]).sum(-1).tolist()
    assert counts == [5, 0, 10]
    expected = processor_of("clip")(images=IMAGES, return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"], expected)


@pytest.mark.parametrize("items", [sound(), sound().tolist(), [sound()], sound()[None]])
def test_ways_to_give_one_sound(items: Any) -> None:
    processor = both()
    batch = processor(text="<audio>", audio=items, return_tensors="pt")
    assert batch["input_ids"].shape == (1, 1 + WHISPER_TOKENS)


@pytest.mark.parametrize(
    ("said", "expected"),
    [(2, [2, 4]), ([1, 2, 3], [1, 5]), ([[1], [2, 3]], [1, 5]), (torch.tensor([1, 2, 3]), [1, 5]), ([0, 2, 3], [0, 5])],
)
def test_results_of_feature_functions_are_parsed(said: Any, expected: list[int]) -> None:
    seen: list[Any] = []
    processor = vision(num_feature_calculation_funcs={"vision": lambda *given: seen.append(given) or said})
    batch = processor(text=["a <vision>", "<vision> <vision>"], images=IMAGES)
    counts = [row.count(processor.modality_token_ids["vision"]) for row in batch["input_ids"]]
    assert counts == expected
    ((inputs, outputs),) = seen
    assert inputs["images"] is IMAGES and outputs["pixel_values"].shape[0] == 3


def test_crops_of_one_image_are_one_item() -> None:
    crops = processor_of("internvl")
    crops.crop_to_patches, crops.max_patches = True, 4
    processor = MultimodalProcessor({"vision": crops}, tokenizer(), model_of(vision="internvl"))
    batch = processor(text="<vision>", images=[image(64, 32)], return_tensors="pt")
    n_crops = len(batch["pixel_values"])
    assert n_crops > 1 and batch["input_ids"].shape == (1, 1 + 5 * n_crops)
    with pytest.raises(ConfigError, match="made .* items out of 2"):
        processor(text="<vision><vision>", images=[image(64, 32)] * 2)


@pytest.mark.parametrize(("return_tensors", "kind"), [("pt", torch.Tensor), ("np", np.ndarray), (None, list)])
def test_kinds_of_tensors(return_tensors: str | None, kind: type) -> None:
    batch = vision()(text="<vision>", images=image(), return_tensors=return_tensors)
    assert isinstance(batch["input_ids"], kind)
    assert isinstance(batch["pixel_values"], kind if return_tensors else torch.Tensor)


def test_keywords_go_where_they_are_known() -> None:
    processor = both()
    texts = ["<vision> <audio> look now"]
    batch = processor(
        text=texts,
        images=image(),
        audio=sound(),
        do_rescale=False,  # the image processor's
        sampling_rate=local.SOUND_RATE,  # the feature extractor's
        max_length=20,  # everyone's, but the sound must not be cut
        padding="max_length",
        truncation=True,
        return_tensors="pt",
    )
    assert batch["pixel_values"].abs().max() > 100
    assert batch["input_ids"].shape == (1, 20) and batch["input_features"].shape == (1, 8, 16)
    with pytest.raises(ValueError, match="sampling rate"):
        processor(text=texts, images=image(), audio=sound(), sampling_rate=8000)


# ---------------------------------------------------------------------------------------- tokens


def test_tokens_are_special_tokens_beside_those_that_exist() -> None:
    words = tokenizer(extra_special_tokens=["<kept>"])
    processor = vision(llm_tokenizer=words)
    assert words is processor.llm_tokenizer is processor.tokenizer
    assert words.extra_special_tokens == ["<kept>", "<vision>"]
    assert processor.modality_token_ids == {"vision": VOCABULARY + 1} and len(words) == VOCABULARY + 2
    again = vision(llm_tokenizer=words)
    assert again.modality_token_ids == processor.modality_token_ids and len(words) == VOCABULARY + 2


def test_a_word_of_the_vocabulary_can_be_the_token() -> None:
    processor = vision(predefined_tokens={"vision": "word30"})
    assert processor.modality_token_ids == {"vision": 30} and len(processor.tokenizer) == VOCABULARY
    assert processor(text="word30", images=image())["input_ids"] == [[BOS] + [30] * 5]


def test_nothing_is_shared_between_processors() -> None:
    first, second = vision(), vision(predefined_tokens={"vision": "<image>"})
    assert first.modality_tokens == {"vision": "<vision>"}
    assert second.modality_tokens == {"vision": "<image>"}
    assert "<image>" not in first.tokenizer.all_special_tokens
    third = MultimodalProcessor(llm_tokenizer=tokenizer())
    assert third.encoder_processors == third.modality_tokens == {}
    assert third(text="the cat")["input_ids"] == [ids_of(third, "the", "cat")]


def test_decoding() -> None:
    processor = vision()
    ids = processor(text=["look <vision> now", "the <vision>"], images=IMAGES[:2])["input_ids"]
    assert processor.decode(ids[0], skip_special_tokens=True) == "look now"
    assert processor.batch_decode(ids, skip_special_tokens=True) == ["look now", "the"]
    assert processor.decode(ids[1]).count("<vision>") == CLIP_TOKENS


CHAT = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this"}, {"type": "audio"}]},
    {"role": "assistant", "content": "a cat"},
]


def test_chat_templates_render_text_and_placeholders() -> None:
    processor = both()
    processor.tokenizer.chat_template = local.CHAT_TEMPLATE
    written = "user: <vision>what is this<audio> assistant: a cat "
    assert processor.apply_chat_template(CHAT) == written
    assert processor.apply_chat_template([CHAT, CHAT[1:]], add_generation_prompt=True) == [
        written + "assistant:",
        "assistant: a cat assistant:",
    ]
    named = [{"role": "user", "content": [{"type": "vision"}]}]
    assert processor.apply_chat_template(named) == "user: <vision> "
    batch = processor(text=written, images=image(), audio=sound(), add_special_tokens=False, return_tensors="pt")
    assert batch["input_ids"].shape == (1, 1 + 5 + 3 + 8 + 3)
    assert CHAT[0]["content"][0] == {"type": "image"}


# ---------------------------------------------------------------------------------------- the context limit


@pytest.mark.parametrize(
    ("text", "limit", "side", "expected"),
    [
        ("look <vision> now the cat", 8, "right", ["look", ("<vision>", 5), "now"]),
        ("look <vision> now the cat", 7, "right", ["look", ("<vision>", 5)]),
        ("look now the <vision> cat", 8, "left", ["the", ("<vision>", 5), "cat"]),
    ],
)
def test_text_outside_images_may_be_truncated(text: str, limit: int, side: str, expected: list[Any]) -> None:
    processor = vision(llm_tokenizer=tokenizer(truncation_side=side))
    ids = processor(text=text, images=image(), truncation=True, max_length=limit)["input_ids"]
    assert ids == [ids_of(processor, *expected)]


@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_an_image_is_never_truncated(limit: int) -> None:
    message = f"Sample 1 has 8 tokens, the limit is {limit}: truncation would leave {max(limit - 2, 0)} of its 5 vision"
    texts = ["the", "look <vision> now"]
    with pytest.raises(ConfigError, match=message):
        vision()(text=texts, images=image(), truncation=True, max_length=limit)
    with pytest.raises(ConfigError, match=message):  # the tokenizer's own limit
        vision(llm_tokenizer=tokenizer(model_max_length=limit))(text=texts, images=image(), truncation=True)


# ---------------------------------------------------------------------------------------- mistakes


def says(tokens: Any) -> dict[str, Any]:
    """Make the argument of a processor with a function."""
    return {"num_feature_calculation_funcs": {"vision": lambda *given: tokens}}


Call = Callable[[], Any]
CALLS: dict[str, tuple[Call, str]] = {
    "wrong number": (
        lambda: vision(model=model_of(vision="clip"), **says(4))(text="<vision>", images=image()),
        r"num_feature_calculation_funcs\['vision'\] says 4 tokens for item 0, but CLIPVisionModel .* makes 5",
    ),
    "no number": (
        lambda: vision(model=None)(text="<vision>", images=image()),
        "How many tokens a vision item takes is unknown. Pass model=",
    ),
    "not a number": (
        lambda: vision(**says("5"))(text="<vision>", images=image()),
        r"num_feature_calculation_funcs\['vision'\] returned '5'; expected",
    ),
    "a fraction": (lambda: vision(**says([2.5]))(text="<vision>", images=image()), r"returned \[2.5\]; expected"),
    "too many numbers": (lambda: vision(**says([2, 2]))(text="<vision>", images=image()), "2 numbers for 1 items"),
    "no placeholder": (
        lambda: vision()(text=["the cat", "a dog"], images=IMAGES),
        r"0 placeholders '<vision>' \(per sample: \[0, 0\]\), but 3 vision items.*does not say where.*'<vision>'",
    ),
    "too many placeholders": (
        lambda: vision()(text=["<vision>", "<vision> <vision>"], images=IMAGES[:2]),
        r"3 placeholders '<vision>' \(per sample: \[1, 2\]\), but 2 vision items are given: sample 1 runs out",
    ),
    "too few placeholders": (
        lambda: vision()(text=["<vision>", "<vision>"], images=IMAGES),
        r"2 placeholders .* but 3 vision items are given: 1 items are left over",
    ),
    "placeholder without items": (lambda: vision()(text="<vision>"), "1 placeholders .* but 0 vision items"),
    "items of another sample": (
        lambda: vision()(text=["<vision>", "<vision> <vision>"], images=[IMAGES[:2], IMAGES[2:]]),
        "Sample 0 has 1 placeholders '<vision>' in its text, but 2 vision items",
    ),
    "items of more samples": (
        lambda: vision()(text=["<vision>"], images=[IMAGES[:1], IMAGES[1:2]]),
        "There are 1 texts, but vision items for 2 samples",
    ),
    "unknown modality": (
        lambda: vision()({"visoin": {"images": image()}}, {"text": "a"}),
        r"There is no modality 'visoin' \(did you mean 'vision'\?\); this processor has \['vision'\]",
    ),
    "items without their name": (
        lambda: vision()({"vision": image()}, {"text": "<vision>"}),
        r"encoder_inputs\['vision'\] is a Image; expected the arguments of its processor: {'images'",
    ),
    "items under another name": (
        lambda: vision()({"vision": {"pictures": image()}}, {"text": "<vision>"}),
        r"takes its items as 'images', but got \['pictures'\]",
    ),
    "items given twice": (
        lambda: vision()({"vision": {"images": image()}}, images=image(), text="<vision>"),
        "vision items are given twice",
    ),
    "sounds without a modality": (lambda: vision()(text="a", audio=sound()), "'audio' fits none of the modalities"),
    "images of two modalities": (
        lambda: MultimodalProcessor({"a": processor_of("clip"), "b": processor_of("vit")}, tokenizer())(
            text="<a>", images=image()
        ),
        r"'images' fits \['a', 'b'\]",
    ),
    "text given twice": (lambda: vision()(llm_inputs={"text": "a"}, text="a"), "llm_inputs and text are names of one"),
    "no text": (lambda: vision()(llm_inputs={"padding": True}), r"\['padding'\] but no 'text'"),
    "text of tokens": (lambda: vision()(text=[["a", "b"]]), "a list of strings, one per sample"),
    "unknown keyword": (
        lambda: vision()(text="a", truncaton=True),
        r"Neither the tokenizer nor a processor takes 'truncaton' \(did you mean 'truncation'\?\)",
    ),
    "overflow": (
        lambda: vision()(llm_inputs={"text": "a", "return_overflowing_tokens": True}),
        "return_overflowing_tokens would split an item",
    ),
    "token taken apart": (
        lambda: vision()(llm_inputs={"text": "<vision>", "split_special_tokens": True}, images=image()),
        "has 0 tokens '<vision>' instead of 5: the tokenizer does not keep this token whole",
    ),
    "items that do not fit": (
        lambda: MultimodalProcessor({"vision": processor_of("siglip2")}, tokenizer(), model_of(vision="clip"))(
            text="<vision>", images=image()
        ),
        r"CLIPVisionModel does not take what the processor made \({'pixel_values': \(1, 4, 192\)}\)",
    ),
    "images of another size": (
        lambda: MultimodalProcessor(
            {"vision": transformers.CLIPImageProcessor(size={"height": 24, "width": 24}, do_center_crop=False)},
            tokenizer(),
            model_of(vision="clip"),
        )(text="<vision>", images=image()),
        r"Its config has image_size = \d+, and the images are 24 × 24: use the processor of this encoder",
    ),
    "chat without a template": (lambda: vision().apply_chat_template(CHAT[1:]), "no chat template"),
    "chat with an unknown part": (
        lambda: vision().apply_chat_template(CHAT, chat_template=local.CHAT_TEMPLATE),
        "'audio' fits none of the modalities",
    ),
    "chat as tokens": (lambda: vision().apply_chat_template(CHAT, tokenize=True), "write it with tokenize=False"),
    "no tokenizer": (lambda: MultimodalProcessor({"vision": processor_of("clip")}), "needs the language model's token"),
    "two tokenizers": (
        lambda: MultimodalProcessor({}, tokenizer(), tokenizer=tokenizer()),
        "llm_tokenizer and tokenizer are names of one argument",
    ),
    "two image processors": (
        lambda: vision(image_processor=processor_of("clip")),
        r"image_processor and encoder_processors\['vision'\] are two",
    ),
    "a processor that is none": (lambda: MultimodalProcessor({"vision": 3}, tokenizer()), "is a int, which cannot be"),
    "a function for no one": (
        lambda: vision(num_feature_calculation_funcs={"vison": len}),
        r"no modality 'vison' \(did you mean 'vision'\?\)",
    ),
    "a token for no one": (lambda: vision(predefined_tokens={"audio": "<a>"}), "no modality 'audio'"),
    "one token for two": (
        lambda: MultimodalProcessor(
            {"a": processor_of("clip"), "b": processor_of("vit")}, tokenizer(), predefined_tokens={"b": "<<a>>"}
        ),
        "The tokens of a and b, '<a>' and '<<a>>', cannot be told apart",
    ),
    "a processor without an encoder": (
        lambda: vision(model=model_of(audio="whisper")),
        r"The processor has \['vision'\], the model has encoders \['audio'\]",
    ),
    "a model that is none": (lambda: vision(model=torch.nn.Linear(1, 1)), "model is a Linear; expected a Multimodal"),
}


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_raise_errors_that_name_them(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ConfigError, match=message):
        call()


# ---------------------------------------------------------------------------------------- storing and sending


def test_a_saved_processor_gives_equal_batches(tmp_path: Path) -> None:
    model = model_of(vision="clip", audio="whisper")
    processors = {"vision": processor_of("clip"), "audio": processor_of("whisper")}
    saved = MultimodalProcessor(processors, tokenizer(), model, predefined_tokens={"vision": "<image>"})
    saved.save_pretrained(tmp_path / "new")
    loaded = MultimodalProcessor.from_pretrained(tmp_path / "new", model=model)

    assert loaded.modality_token_ids == saved.modality_token_ids
    given = {"text": ["<image> <audio>", "a"], "images": image(), "audio": sound(), "padding": True}
    first, second = saved(**given, return_tensors="pt"), loaded(**given, return_tensors="pt")
    assert list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)

    # transformers loads the parts by itself
    assert "<image>" in AutoTokenizer.from_pretrained(tmp_path / "new" / "tokenizer").all_special_tokens
    sounds = AutoFeatureExtractor.from_pretrained(tmp_path / "new" / "audio_processor")
    assert sounds.to_dict() == processors["audio"].to_dict()
    images = transformers.CLIPImageProcessor.from_pretrained(tmp_path / "new" / "vision_processor")
    assert images.to_dict() == processors["vision"].to_dict()


def test_functions_are_passed_again(tmp_path: Path) -> None:
    vision(**says(3)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its own function for the tokens of vision.*num_feature_calculation_funcs="):
        MultimodalProcessor.from_pretrained(tmp_path)
    loaded = MultimodalProcessor.from_pretrained(tmp_path, **says(3))
    assert len(loaded(text="<vision>", images=image())["input_ids"][0]) == 4
    measured = MultimodalProcessor.from_pretrained(tmp_path, model=model_of(vision="clip"))
    assert len(measured(text="<vision>", images=image())["input_ids"][0]) == 6


class OwnProcessor(transformers.CLIPImageProcessor):  # type: ignore[misc,valid-type]
    """A processor that transformers does not have."""


def test_custom_classes_are_passed_again(tmp_path: Path) -> None:
    own = OwnProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    MultimodalProcessor({"vision": own}, tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="OwnProcessor, which is not in transformers.*classes={'vision': OwnProc"):
        MultimodalProcessor.from_pretrained(tmp_path)
    loaded = MultimodalProcessor.from_pretrained(tmp_path, classes={"vision": OwnProcessor})
    assert type(loaded.encoder_processors["vision"]) is OwnProcessor


def test_a_plain_function_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vision processor .* has no save_pretrained"):
        MultimodalProcessor({"vision": lambda images: {}}, tokenizer()).save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def brings_code(folder: Path) -> None:
    config = folder / "tokenizer" / "tokenizer_config.json"
    content = {**json.loads(config.read_text()), "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    config.write_text(json.dumps(content))


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / "cornstarch_processor.json").unlink(), "cannot be read.*save_pretrained"),
    "damaged": (lambda folder: (folder / "cornstarch_processor.json").write_text('{"format'), "is damaged"),
    "a list": (lambda folder: (folder / "cornstarch_processor.json").write_text("[]"), "holds a list"),
    "newer": (lambda folder: (folder / "cornstarch_processor.json").write_text('{"format": 2}'), "has format 2"),
    "with code": (brings_code, "brings its own code. Pass trust_remote_code=True"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_bad_folders_are_refused(name: str, tmp_path: Path) -> None:
    spoil, message = FOLDERS[name]
    vision().save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=message):
        MultimodalProcessor.from_pretrained(tmp_path)


@pytest.mark.parametrize("send", [lambda p: pickle.loads(pickle.dumps(p)), copy.deepcopy], ids=["pickled", "copied"])
def test_a_pickled_processor_has_no_model(send: Callable[[Any], Any]) -> None:
    processor = both()
    travelled = send(processor)
    given = {"text": "<vision> <audio>", "images": image(), "audio": sound(), "return_tensors": "pt"}
    assert torch.equal(processor(**given)["input_ids"], travelled(**given)["input_ids"])


def test_an_adapted_encoder_is_counted() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    encoder = ModalEncoderModule(peft.get_peft_model(ENCODERS["clip"].build(), config))
    processor = vision(model=MultimodalModel({"vision": encoder}, LANGUAGE_MODELS["llama"].build()))
    assert processor(text="<vision>", images=image(), return_tensors="pt")["input_ids"].shape == (1, 6)
