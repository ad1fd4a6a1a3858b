"""A config becomes the model and the processor that it describes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPVisionModel,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SiglipVisionModel,
    WhisperConfig,
    WhisperModel,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cornstarch.cli.validate import find_model_problem
from cornstarch.config import EncoderConfig, LanguageModelConfig, ModelConfig
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.tasks.build_model import PartShard, build_model, load_part
from cornstarch.tasks.task import build_processor
from tests.documented.hub import make_hub
from tests.models.local_processors import image


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_hub(tmp_path_factory.mktemp("hub"))


def make_config(hub: dict[str, str], vision: dict[str, Any] | None = None, **llm: Any) -> ModelConfig:
    encoder = {"path": hub["openai/clip-vit-base-patch32"], **(vision or {})}
    text = {"path": hub["meta-llama/Llama-3.2-1B"], **llm}
    return ModelConfig.model_validate({"language_model": text, "encoders": {"vision": encoder}})


def get_requires_grad(module: torch.nn.Module) -> set[bool]:
    return {parameter.requires_grad for parameter in module.parameters()}


def test_parts_are_loaded_with_their_weights(hub: dict[str, str]) -> None:
    model = build_model(make_config(hub))
    assert isinstance(model.language_model, LlamaForCausalLM)
    assert isinstance(model.vision_encoder.module, CLIPVisionModel)
    original = LlamaForCausalLM.from_pretrained(hub["meta-llama/Llama-3.2-1B"])
    for name, parameter in original.named_parameters():
        assert torch.equal(model.language_model.get_parameter(name), parameter), name
    assert [type(m).__name__ for m in model.vision_encoder.projector.projection][::2] == ["Linear", "Linear"]  # mlp


@pytest.mark.parametrize(
    ("vision", "llm", "expected"),
    [
        ("projector", "frozen", (False, True, False)),
        ("full", "full", (True, True, True)),
        ("frozen", "full", (False, False, True)),
    ],
)
def test_requires_grad_follows_the_train_option(
    hub: dict[str, str], vision: str, llm: str, expected: tuple[bool, bool, bool]
) -> None:
    model = build_model(make_config(hub, {"train": vision}, train=llm))
    parts = (model.vision_encoder.module, model.vision_encoder.projector, model.language_model)
    assert tuple(get_requires_grad(part) for part in parts) == tuple({one} for one in expected)


def test_adapters_are_trained_and_their_base_is_not(hub: dict[str, str]) -> None:
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    model = build_model(make_config(hub, {"train": "lora", "lora": lora}, train="lora", lora=lora))
    for part in (model.vision_encoder.module, model.language_model):
        flags = {name: p.requires_grad for name, p in part.named_parameters()}
        assert any(flags.values()) and all(flag == ("lora_" in name) for name, flag in flags.items())
    assert get_requires_grad(model.vision_encoder.projector) == {True}


def test_parts_have_their_own_precision(hub: dict[str, str]) -> None:
    model = build_model(make_config(hub, {"dtype": "bf16"}))
    assert {p.dtype for p in model.vision_encoder.module.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.language_model.parameters()} == {torch.float32}


def test_a_meta_model_reads_no_weights(hub: dict[str, str]) -> None:
    config = make_config(hub)
    model = build_model(config, weights=False)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    processor = build_processor(config, model)
    batch = processor(text="Describe <vision> .", images=image(), return_tensors="pt")
    assert int((batch["input_ids"] == processor.modality_token_ids["vision"]).sum()) == (32 // 16) ** 2 + 1


def test_the_processor_fits_the_model(hub: dict[str, str]) -> None:
    config = make_config(hub, {"token": "<image>"})
    model = build_model(config)
    processor = build_processor(config, model)
    batch = processor(text="Describe <image> .", images=image(), return_tensors="pt")
    assert model(**batch, labels=batch["input_ids"]).loss.isfinite()
    assert model.modality_token_ids == processor.modality_token_ids


def test_the_encoder_of_a_two_tower_model_is_loaded(tmp_path: Path, hub: dict[str, str]) -> None:
    """An encoder-decoder gives its encoder; a config with random weights works too."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 10, "vocab_size": 20,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
    WhisperModel(WhisperConfig(**sizes)).save_pretrained(tmp_path / "whisper")
    siglip = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
    model = build_model(
        ModelConfig.model_validate(
            {
                "language_model": {"path": hub["meta-llama/Llama-3.2-1B"]},
                "encoders": {"audio": {"path": str(tmp_path / "whisper")}, "vision": {"config": siglip}},
            }
        )
    )
    assert isinstance(model.audio_encoder.module, WhisperEncoder)
    assert isinstance(model.vision_encoder.module, SiglipVisionModel)
    assert list(model.encoders) == ["audio", "vision"]


_TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 16}  # fmt: skip
_PATCHES = {"depth": 1, "num_heads": 2, "patch_size": 4}
WHOLE = {
    "qwen2_vl": (
        {**_PATCHES, "embed_dim": 24, "hidden_size": 16, "mlp_ratio": 2}, "Qwen2VisionTransformerPretrainedModel"
    ),
    "qwen2_5_vl": (
        {**_PATCHES, "hidden_size": 24, "out_hidden_size": 16, "intermediate_size": 16},
        "Qwen2_5_VisionTransformerPretrainedModel",
    ),
    "llava": (
        {"model_type": "clip_vision_model", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 16, "image_size": 8, "patch_size": 4},
        "CLIPVisionModel",
    ),
}  # fmt: skip
"""By type: the sizes of the tower of a whole model, and its class."""


@pytest.mark.parametrize("kind", WHOLE)
def test_the_vision_tower_of_a_whole_model_is_loaded(kind: str, tmp_path: Path) -> None:
    """It is named by its sizes, or by the folder of the whole model, which has its weights under other names."""
    sizes, name = WHOLE[kind]
    text = {**_TEXT, "model_type": "llama"} if kind == "llava" else _TEXT
    whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, vision_config=sizes, text_config=text))
    whole.save_pretrained(tmp_path)
    configs = [{"config": {"model_type": kind, "vision_config": sizes}}, {"path": str(tmp_path)}]
    for one in [*configs, {**configs[0], "class_name": name}]:
        tower = load_part("model.encoders.vision", EncoderConfig.model_validate(one))
        assert type(tower).__name__ == name
    tower = load_part("model.encoders.vision", EncoderConfig.model_validate(configs[1]))
    stored = whole.model.vision_tower if kind == "llava" else whole.model.visual
    for key, parameter in tower.named_parameters():
        assert torch.equal(parameter, stored.get_parameter(key)), key


def test_a_folder_without_the_weights_is_refused(hub: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="has none of the weights of ViTModel"):
        part = {"path": hub["openai/clip-vit-base-patch32"], "class_name": "ViTModel"}
        load_part("model.encoders.vision", EncoderConfig.model_validate(part))


def test_no_encoders_is_a_plain_language_model(hub: dict[str, str]) -> None:
    text = {"path": hub["meta-llama/Llama-3.2-1B"], "train": "full"}
    model = build_model(ModelConfig.model_validate({"language_model": text}))
    assert isinstance(model, MultimodalModel) and not model.encoders and get_requires_grad(model) == {True}


@pytest.mark.parametrize(
    ("vision", "llm", "message"),
    [
        ({"path": "nowhere/at-all"}, {}, r"model.encoders.vision.path = nowhere/at-all"),
        ({}, {"path": "./missing"}, r"model.language_model.path = ./missing"),
        ({"path": None, "config": {"hidden_size": 3}}, {}, r"no `model_type`"),
        ({"path": None, "config": {"model_type": "clop"}}, {}, r"model.encoders.vision.config"),
        ({"class_name": "transformers.ClipVision"}, {}, r"no class of this name"),
        ({}, {"train": "lora", "lora": {"targets": ["nonsense"]}}, r"model.language_model.lora.targets"),
    ],
)
def test_errors_name_the_part(hub: dict[str, str], vision: dict[str, Any], llm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(make_config(hub, vision, **llm))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[: len(content) // 2], r"model.safetensors is cut off: it has [\d,]+ of [\d,]+ bytes"),
        (lambda content: content[:4], r"model.safetensors is cut off: it has 4 bytes, too few for its own header"),
        (lambda content: content[:8] + b"x" + content[9:], r"model.safetensors is damaged: its header cannot be read"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1", r"model.safetensors is a pointer of Git LFS"),
    ],
)
def test_errors_name_the_damaged_file(
    hub: dict[str, str], tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    folder = Path(shutil.copytree(hub["meta-llama/Llama-3.2-1B"], tmp_path / "llm"))
    weights = folder / "model.safetensors"
    assert find_model_problem(str(folder), trained=True) == ""
    weights.write_bytes(change(weights.read_bytes()))
    with pytest.raises(ConfigError, match=rf"model.language_model.path = .*\n  {message}"):
        build_model(make_config(hub, path=str(folder)))
    assert re.match(message, find_model_problem(str(folder), trained=True))  # as `cornstarch validate` tells it


@pytest.mark.parametrize(
    ("vision", "llm", "message"),
    [
        ({"path": "google/vit-base"}, {}, r"no settings of an image processor"),
        ({"processor_config": {"class_name": "NoProcessor"}}, {}, r"no processor 'NoProcessor'"),
        ({}, {"tokenizer": "./missing"}, r"model.language_model.tokenizer = ./missing"),
    ],
)
def test_a_missing_processor_is_reported_with_its_part(
    hub: dict[str, str], vision: dict[str, Any], llm: dict[str, Any], message: str
) -> None:
    if "path" in vision:
        vision = {**vision, "path": hub[vision["path"]]}
    config = make_config(hub, vision, **llm)
    with pytest.raises(ConfigError, match=message):
        build_processor(config, build_model(config, weights=False))


@pytest.mark.parametrize("names", [frozenset(), frozenset({"model.embed_tokens.weight"})], ids=["nothing", "a table"])
def test_random_numbers_after_loading_do_not_depend_on_the_shard(next_folder: str, names: frozenset[str]) -> None:
    def draw_after(shard: PartShard | None) -> torch.Tensor:
        torch.manual_seed(0)
        load_part("model.language_model", LanguageModelConfig(path=next_folder), shard=shard)
        return torch.rand(3)

    assert torch.equal(draw_after(PartShard(parameters=names)), draw_after(None))


@pytest.fixture(scope="module")
def next_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model whose `_init_weights` draws numbers for weights that are stored, too."""
    config = Qwen3NextConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=32, vocab_size=64,
        num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_key_head_dim=4, linear_value_head_dim=4, linear_num_key_heads=2,
        linear_num_value_heads=4,
    )  # fmt: skip
    folder = str(tmp_path_factory.mktemp("next"))
    Qwen3NextForCausalLM(config).save_pretrained(folder)
    return folder
