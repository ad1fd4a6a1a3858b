"""A decomposed Hugging Face multimodal model gives bit-equal results."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.import_hf.decompose import (
    DecomposedModel,
    DecomposedOrigin,
    rebuild,
)
from cornstarch.models.multimodal_language_model.packing import find_spans
from tests.models.shrink import shrunken_configs
from tests.models.whole_models import AUDIO, FAMILIES, IMAGE, TEXT, VIDEO, Family, Inputs, text_batch, why_not_here

SIDES = ("left", "right", "none")


def pair(name: str) -> tuple[Family, PreTrainedModel, DecomposedModel]:
    """Return a family, its model, and a copy of that model taken apart."""
    family = FAMILIES[name]
    whole = family.build()
    why_not = why_not_here(name, whole)
    if why_not is not None:
        pytest.skip(why_not)
    parts = MultimodalModel.from_multimodal(copy.deepcopy(whole))
    assert isinstance(parts, DecomposedModel)
    return family, whole, parts


def label_rows(batch: Inputs) -> Inputs:
    """Add labels at every token, placeholders and padding too, but one."""
    labels = batch["input_ids"].clone()
    labels[0, -2] = -100
    return {**batch, "labels": labels}


def original_gradients(parts: DecomposedModel) -> dict[str, Tensor | None]:
    """Return the gradients by the names that the weights have in the whole model."""
    return {name: parameter.grad for name, parameter in parts.whole().named_parameters()}


def assert_same_step(whole: PreTrainedModel, parts: MultimodalModel, batch: Inputs) -> None:
    """Compare logits, loss and every gradient, also "is None".

    Behind a convolution over tokens (Qwen3.5) gradients may differ by rounding: some processors add them up otherwise
    if tensors lie elsewhere in memory.
    """
    assert isinstance(parts, DecomposedModel)
    convolves = any(isinstance(module, nn.Conv1d) for module in whole.modules())
    whole.zero_grad()
    parts.zero_grad()
    expected, found = whole(**batch), parts(**batch)
    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.loss, found.loss)
    expected.loss.backward()
    found.loss.backward()
    gradients = original_gradients(parts)
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        gradient = gradients[name]
        if parameter.grad is None or gradient is None:
            assert parameter.grad is gradient, name
        else:
            bounds = {"rtol": 1e-5, "atol": 1e-7} if convolves else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(gradient, parameter.grad, **bounds, msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_are_equal(name: str) -> None:
    family, whole, parts = pair(name)
    for side in SIDES:
        assert_same_step(whole, parts, label_rows(family.batch(whole, side)))
    assert_same_step(whole, parts, label_rows(text_batch()))


@pytest.mark.parametrize("name", FAMILIES)
def test_generated_text_is_equal(name: str) -> None:
    family, whole, parts = pair(name)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    for batch in (family.batch(whole, "left"), family.batch(whole, "none"), text_batch()):
        expected = whole.generate(**batch, **options)
        assert torch.equal(expected, parts.generate(**batch, **options))
        assert expected.shape[1] > batch["input_ids"].shape[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_weight_is_lost_copied_or_doubled(name: str) -> None:
    whole = FAMILIES[name].build()
    named = {key: value.data_ptr() for key, value in whole.state_dict().items()}
    try:
        parts = MultimodalModel.from_multimodal(whole)
    except UnsupportedModelError:
        assert why_not_here(name, whole) is not None
        return
    owned = [parameter.data_ptr() for parameter in parts.parameters()]
    assert sorted(owned) == sorted({parameter.data_ptr() for parameter in whole.parameters()})
    assert isinstance(parts, DecomposedModel)
    assert {key: value.data_ptr() for key, value in parts.whole().state_dict().items()} == named


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2-audio", "gemma3"])
def test_training_with_gradient_checkpointing_is_equal(name: str) -> None:
    family, whole, parts = pair(name)
    whole.train()
    parts.train()
    whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parts.gradient_checkpointing_enable()
    assert_same_step(whole, parts, label_rows(family.batch(whole)))


def test_experts_are_balanced_as_in_the_original() -> None:
    family, whole, parts = pair("qwen3-vl-moe")
    if "output_router_logits" not in inspect.signature(type(whole).forward).parameters:
        pytest.skip("this transformers does not name the argument")
    batch = label_rows(family.batch(whole))
    expected = whole(**batch, output_router_logits=True)
    found = parts(**batch, output_router_logits=True)
    assert torch.equal(expected.loss, found.loss)
    assert not torch.equal(expected.loss, whole(**batch).loss)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llava", "qwen2-vl"])
def test_tied_embeddings_stay_tied(name: str, tied: bool) -> None:
    config = FAMILIES[name].config()
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    whole = getattr(transformers, FAMILIES[name].model_class)(config).eval()
    batch = label_rows(FAMILIES[name].batch(whole))
    parts = MultimodalModel.from_multimodal(copy.deepcopy(whole))
    language_model: Any = parts.language_model
    table, head = language_model.get_input_embeddings(), language_model.get_output_embeddings()
    assert (table.weight is head.weight) == tied == language_model.config.tie_word_embeddings
    assert_same_step(whole, parts, batch)


# ---------------------------------------------------------------------- using the parts


def test_decoding_by_hand_continues_with_the_right_positions() -> None:
    family, whole, parts = pair("qwen2-vl")
    batch = family.batch(whole, "none")
    del batch["attention_mask"]
    logits = []
    for model in (whole, parts):
        first = model(**batch, use_cache=True)
        token = first.logits[:, -1:].argmax(-1)
        logits.append(model(input_ids=token, past_key_values=first.past_key_values).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v"])
def test_token_types_are_found_where_the_batch_has_none(name: str) -> None:
    family, whole, parts = pair(name)
    batch = family.batch(whole)
    bare = {key: value for key, value in batch.items() if key != "mm_token_type_ids"}
    assert torch.equal(whole(**batch).logits, parts(**bare).logits)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(whole.generate(**batch, **options), parts.generate(**bare, **options))


def test_text_about_a_video() -> None:
    family, whole, parts = pair("qwen2-vl")
    batch = family.batch(whole, "none")
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, VIDEO)
    video = {
        "input_ids": ids,
        "attention_mask": batch["attention_mask"],
        "mm_token_type_ids": 2 * (ids == VIDEO).int(),
        "pixel_values_videos": batch["pixel_values"],
        "video_grid_thw": batch["image_grid_thw"],
    }
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(whole.generate(**video, **options), parts.generate(**video, **options))


@pytest.mark.parametrize("name", ["llava-next", "qwen2-vl", "qwen2-audio"])
def test_nested_batches(name: str) -> None:
    family, whole, parts = pair(name)
    batch = family.batch(whole)
    (encoder,) = parts.encoder_names
    keys = [key for key in parts.encoders[encoder].input_names if key in batch]
    nested: dict[str, Any] = {key: value for key, value in batch.items() if key not in keys}
    nested[encoder] = {key: batch[key] for key in keys}
    assert torch.equal(whole(**batch).logits, parts(**nested).logits)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(whole.generate(**batch, **options), parts.generate(**nested, **options))


@pytest.mark.parametrize("trained", ["encoder", "projector", "language model"])
def test_freezing(trained: str) -> None:
    family, whole, parts = pair("llava-next")
    modes = {"vision": (trained == "encoder", trained == "projector")}
    parts.train(encoders_mode=modes, llm_mode=trained == "language model")
    parts(**label_rows(family.batch(whole))).loss.backward()
    prefixes = {
        "encoder": ("vision_encoder.module.",),
        "projector": ("vision_encoder.projector.",),
        "language model": ("language_model.",),
    }
    with_gradient = {name for name, parameter in parts.named_parameters() if parameter.grad is not None}
    assert with_gradient and all(name.startswith(prefixes[trained]) for name in with_gradient)
    assert ("vision_encoder.projector.image_newline" in with_gradient) == (trained == "projector")


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2-audio"])
def test_adapters_on_the_parts(name: str) -> None:
    family, whole, parts = pair(name)
    batch = label_rows(family.batch(whole))
    before = parts(**batch).logits
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    parts.language_model = peft.get_peft_model(parts.language_model, config)
    output = parts(**batch)
    assert not torch.equal(before, output.logits)
    assert torch.equal(parts.whole()(**batch).logits, output.logits)
    output.loss.backward()
    trained = [key for key, value in parts.language_model.named_parameters() if value.grad is not None]
    assert trained and all("lora_" in key for key in trained)
    prompt = family.batch(whole)
    text = parts.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, parts.whole().generate(**prompt, max_new_tokens=4, do_sample=False))


def test_adapters_on_a_tower() -> None:
    family, whole, parts = pair("llava")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    encoder = parts.encoders["vision"]
    encoder.module = peft.get_peft_model(encoder.module, config)
    batch = family.batch(whole)
    found = parts(**batch).logits
    assert not torch.equal(whole(**batch).logits, found)
    assert torch.equal(parts.whole()(**batch).logits, found)


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    family, whole, parts = pair("qwen2-vl")
    twin = copy.deepcopy(parts)
    with torch.no_grad():
        for parameter in parts.parameters():
            parameter.zero_()
    assert_same_step(whole, twin, label_rows(family.batch(whole)))


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2-audio", "qwen3-vl", "gemma3"])
def test_packed_documents_are_as_if_alone(name: str) -> None:
    family, whole, parts = pair(name)
    batch = family.batch(whole, "right")
    mask = batch["attention_mask"].bool()
    samples = [ids[keep] for ids, keep in zip(batch["input_ids"], mask, strict=True)]
    packed: dict[str, Any] = {
        "input_ids": torch.cat([*samples, torch.zeros(3, dtype=torch.long)])[None],
        "documents": torch.cat([torch.full((len(s),), i + 1) for i, s in enumerate(samples)] + [torch.zeros(3)])[None],
    }
    packed["documents"] = packed["documents"].long()
    packed |= family.text(packed["input_ids"])
    items = {key: batch[key] for encoder in parts.encoders.values() for key in encoder.input_names if key in batch}
    found = parts(**packed, **items).logits[0, : sum(map(len, samples))]
    expected = parts(**batch).logits[mask]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_masks_are_read_as_spans() -> None:
    places = torch.arange(6)
    causal = places[:, None] >= places
    spans = torch.tensor([[-1, 1, 1, -1, 4, 4], [0, 0, 0, -1, -1, -1]])
    together = (spans[:, :, None] == spans[:, None]) & (spans >= 0)[:, :, None]
    lengths = torch.tensor([6, 4])
    full = (causal | together)[:, None]
    near = places > places[:, None] - 3
    assert torch.equal(find_spans({"full_attention": full, "sliding_attention": full & near}, lengths), spans)
    assert torch.equal(find_spans(None, lengths), torch.full((2, 6), -1))
    for name, masks in {
        "not causal with spans": full & (places != 0),
        "let other spans": {"full_attention": full, "sliding_attention": causal.expand(2, 1, 6, 6)},
        "not ones of booleans": full.float(),
    }.items():
        with pytest.raises(UnsupportedModelError, match=name):
            find_spans(masks, lengths)


def test_callbacks_around_the_encoder() -> None:
    family, whole, parts = pair("llava")
    batch = family.batch(whole)
    encoder = parts.encoders["vision"]
    encoder.preprocess_callback = lambda inputs: {"pixel_values": inputs["pixel_values"] * 0.5}
    halved = {**batch, "pixel_values": batch["pixel_values"] * 0.5}
    assert torch.equal(whole(**halved).logits, parts(**batch).logits)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(whole.generate(**halved, **options), parts.generate(**batch, **options))
    encoder.postprocess_module_callback = lambda inputs, output: output
    with pytest.raises(ConfigError, match="postprocess_module_callback cannot be used here"):
        parts(**batch)


def test_verify() -> None:
    family, whole, parts = pair("llava")
    batch = family.batch(whole)
    parts.verify(**batch)
    parts.encoders["vision"].preprocess_callback = lambda inputs: {"pixel_values": inputs["pixel_values"] * 0.5}
    with pytest.raises(UnsupportedModelError, match="its parts give other logits, by up to"):
        parts.verify(**batch)


# ---------------------------------------------------------------------- bad batches


def test_bad_batches_are_refused() -> None:
    family, whole, parts = pair("qwen2-vl")
    batch: dict[str, Any] = dict(family.batch(whole))
    with pytest.raises(ConfigError, match="'pixel_values_videos' is a video input"):
        parts(**batch, pixel_values_videos=batch["pixel_values"], video_grid_thw=batch["image_grid_thw"])
    with pytest.raises(ConfigError, match="'pixel_value'"):
        parts(**batch, pixel_value=1)
    with pytest.raises(ConfigError, match="'mm_encoder_outputs'"):
        parts(**batch, mm_encoder_outputs={})
    without = {key: value for key, value in batch.items() if key != "pixel_values"}
    with pytest.raises(ConfigError, match="no input for the vision encoder"):
        parts(**without)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 7)
    with pytest.raises(ConfigError, match="Sample 0 has 0 vision tokens|no tokens"):
        parts(**batch)


def test_audio_without_its_mask_is_refused() -> None:
    family, whole, parts = pair("qwen2-audio")
    batch = family.batch(whole)
    del batch["feature_attention_mask"]
    with pytest.raises(ConfigError, match="needs a mask over its input"):
        parts(**batch)
    unexpanded = family.batch(whole, "none")
    ids = torch.tensor([[5, 6, AUDIO, 7, AUDIO, 8, AUDIO, 9]])
    unexpanded.update(input_ids=ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(ConfigError, match="Sample 0 has 3 audio tokens"):
        parts(**unexpanded)


# ---------------------------------------------------------------------- building the parts again


@pytest.mark.parametrize("name", ["llava-next", "qwen2-vl", "qwen2-audio", "llava-next-video"])
def test_rebuilding_from_the_origin(name: str) -> None:
    family, whole, parts = pair(name)
    origin = DecomposedOrigin(**json.loads(json.dumps(asdict(parts.origin))))
    frame = rebuild(origin)
    assert all(parameter.is_meta for parameter in frame.parameters())
    assert [(n, p.shape) for n, p in frame.named_parameters()] == [(n, p.shape) for n, p in parts.named_parameters()]
    assert type(frame.language_model).__name__ == type(parts.language_model).__name__
    again = rebuild(origin, device="cpu")
    again.load_state_dict(parts.state_dict())
    assert_same_step(whole, again.eval(), label_rows(family.batch(whole)))


@pytest.mark.parametrize("name", ["llava", "qwen2-vl"])
def test_parts_can_be_replaced(name: str) -> None:
    family, whole, parts = pair(name)
    frame = rebuild(parts.origin)
    for key, encoder in parts.encoders.items():
        frame.encoders[key].module, frame.encoders[key].projector = encoder.module, encoder.projector
    frame.language_model = parts.language_model
    batch = family.batch(whole)
    assert torch.equal(whole(**batch).logits, frame.eval()(**batch).logits)
    assert torch.equal(whole.generate(**batch, max_new_tokens=4), frame.generate(**batch, max_new_tokens=4))


def test_rebuilding_a_class_from_elsewhere_needs_the_class() -> None:
    origin = pair("llava")[2].origin
    with pytest.raises(ConfigError, match="pass it as model_class"):
        rebuild(DecomposedOrigin("elsewhere.Model", origin.config))
    with pytest.raises(ConfigError, match="has no model"):
        rebuild(DecomposedOrigin("transformers.models.llava.modeling_llava.Absent", origin.config))
    frame = rebuild(
        DecomposedOrigin("elsewhere.Model", origin.config), "meta", transformers.LlavaForConditionalGeneration
    )
    assert frame.encoder_names == ("vision",)


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2-audio"])
def test_transformers_loads_a_saved_language_model(name: str, tmp_path: Path) -> None:
    family, whole, parts = pair(name)
    language_model: Any = parts.language_model
    language_model.save_pretrained(tmp_path / "language_model")
    text_model = type(language_model.base_model).from_pretrained(tmp_path / "language_model")
    for key, value in language_model.base_model.state_dict().items():
        assert torch.equal(value, text_model.state_dict()[key]), key
    loaded = type(language_model).from_pretrained(tmp_path / "language_model")
    parts.language_model = loaded.eval()
    batch = family.batch(whole)
    assert torch.equal(whole(**batch).logits, parts(**batch).logits)


@pytest.mark.parametrize("name", ["llava", "qwen2-audio"])
def test_the_whole_saves_as_the_original(name: str, tmp_path: Path) -> None:
    family, whole, parts = pair(name)
    parts.whole().save_pretrained(tmp_path)
    loaded = type(whole).from_pretrained(tmp_path).eval()
    batch = family.batch(whole)
    assert torch.equal(whole(**batch).logits, loaded(**batch).logits)


# ---------------------------------------------------------------------- what is refused


def _text_only() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


REFUSED: dict[str, tuple[str, str]] = {
    "MllamaForConditionalGeneration": ("MllamaConfig", "no get_image_features"),
    "Llama4ForConditionalGeneration": ("Llama4Config", "not a head on one inner model"),
    "Blip2ForConditionalGeneration": ("Blip2Config", "not a head on one inner model"),
    "Florence2ForConditionalGeneration": ("Florence2Config", "not a head on one inner model"),
    "GraniteSpeechForConditionalGeneration": ("GraniteSpeechConfig", "its forward uses input_features_mask"),
    "MusicFlamingoForConditionalGeneration": ("MusicFlamingoConfig", "get_audio_features needs input_ids"),
    "JanusForConditionalGeneration": ("JanusConfig", "neither its encoders nor its language model use"),
    "VideoLlavaForConditionalGeneration": ("VideoLlavaConfig", "2 image towers"),
    "Ovis2ForConditionalGeneration": ("Ovis2Config", "its forward"),
    "LlavaModel": ("LlavaConfig", "expected a Hugging Face multimodal model with a head"),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", "holds no text model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_state_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config)())
    with pytest.raises(UnsupportedModelError, match=f"cannot be taken apart: .*{reason}"):
        MultimodalModel.from_multimodal(model)


def test_other_modules_are_refused() -> None:
    wrapped = peft.get_peft_model(FAMILIES["llava"].build(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for model in (nn.Linear(2, 2), wrapped):
        with pytest.raises(UnsupportedModelError, match="expected a Hugging Face multimodal model"):
            MultimodalModel.from_multimodal(model)
    with pytest.raises(UnsupportedModelError, match="holds no text model"):
        MultimodalModel.from_multimodal(_text_only())


def _generative_classes() -> list[type[PreTrainedModel]]:
    """Return every class of transformers that writes text about other modalities."""
    found = []
    for file in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        if "GenerationMixin" not in source or "_features(" not in source:  # importing all of them takes a minute
            continue
        try:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        except ImportError:  # a library that is not here
            continue
        members = [member for member in vars(module).values() if inspect.isclass(member)]
        own = [member for member in members if member.__module__ == module.__name__]
        found += [m for m in own if issubclass(m, PreTrainedModel) and issubclass(m, GenerationMixin)]
    return [m for m in found if len(getattr(m, "input_modalities", "")) > 1 and "text" in m.input_modalities]


def _on_meta(model_class: type[PreTrainedModel]) -> PreTrainedModel | None:
    """Return a model without weights, small if that is easy, or None if its config has no defaults that work."""
    config_class: Any = model_class.config_class
    for configs in (shrunken_configs(config_class, []), [config_class]):
        with contextlib.suppress(Exception), torch.device("meta"):
            config = next(iter(configs))
            return model_class(config if not isinstance(config, type) else config())
    return None


@pytest.mark.slow
def test_every_multimodal_model_is_decomposed_or_refused_with_a_reason() -> None:
    taken = []
    for model_class in _generative_classes():
        model = _on_meta(model_class)
        if model is None:
            continue
        try:
            parts = MultimodalModel.from_multimodal(model)
        except UnsupportedModelError as error:
            assert "cannot be taken apart: " in str(error)
        else:
            assert sum(p.numel() for p in parts.parameters()) == sum(p.numel() for p in model.parameters())
            taken.append(model_class.__name__)
    assert len(taken) >= 30, taken
