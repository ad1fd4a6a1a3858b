"""Parts that are PEFT models: trainability, saving and loading."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, CLIPVisionModel

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from tests.models.small import VISION, clip, llama
from tests.models.test_storage import exact, logits
from tests.zoo import LANGUAGE_MODELS

QUERY = {"r": 2, "target_modules": ["q_proj"]}


def move_trained(model: nn.Module) -> nn.Module:
    """Move whatever is trained away from where it was initialised."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.1)
    return model


def compose_model(language_model: nn.Module, encoder: nn.Module | None = None) -> MultimodalModel:
    model = MultimodalModel({"vision": encoder or clip()}, language_model)
    model.set_modality_token_ids({"vision": VISION})
    return model


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    ids = [[3, *[VISION] * 5, 4, 5, 6]]
    return {"input_ids": torch.tensor(ids), "pixel_values": torch.randn(1, 3, 8, 8, generator=generator)}


def round_trip(model: MultimodalModel, folder: Path) -> MultimodalModel:
    model.save_pretrained(folder)
    loaded = MultimodalModel.from_pretrained(folder)
    exact(loaded, model)
    assert torch.equal(logits(loaded, batch()), logits(model, batch()))
    return loaded


# ------------------------------------------------------------------------------------------ what is trained


def test_only_adapters_and_projector_are_trained() -> None:
    model = compose_model(get_peft_model(llama(), LoraConfig(**QUERY)), get_peft_model(clip(), LoraConfig(**QUERY)))
    model.train(encoders_mode={"vision": True}, llm_mode=True)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or ".projector." in name for name in names)
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == names
    model.train(encoders_mode={"vision": (False, True)}, llm_mode=False)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names and all(".projector." in name for name in names)


def test_generate_runs_through_the_adapters() -> None:
    base, adapted = compose_model(llama()), compose_model(move_trained(get_peft_model(llama(), LoraConfig(**QUERY))))
    options = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    expected, found = base.generate(**batch(), **options), adapted.generate(**batch(), **options)
    assert found.sequences.shape == expected.sequences.shape
    assert not torch.equal(found.scores[0], expected.scores[0])


# ---------------------------------------------------------------------------------------- saved and loaded

METHODS: dict[str, Callable[[], Any]] = {
    "attention": lambda: LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    "all linear": lambda: LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    "embeddings": lambda: LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]),
    "head trained whole": lambda: LoraConfig(**QUERY, modules_to_save=["lm_head"]),
    "embeddings trained whole": lambda: LoraConfig(**QUERY, modules_to_save=["embed_tokens"]),
    "new tokens": lambda: LoraConfig(**QUERY, trainable_token_indices=[3, 4]),
    "biases": lambda: LoraConfig(**QUERY, bias="all", layers_to_transform=[0]),
    "dora": lambda: LoraConfig(**QUERY, use_dora=True),
    # These change the base weights when the adapter is made; doing it again when loading would be wrong.
    "pissa": lambda: LoraConfig(**QUERY, init_lora_weights="pissa"),
    "olora": lambda: LoraConfig(**QUERY, init_lora_weights="olora"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["norm"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("method", METHODS)
def test_adapters_on_the_language_model_come_back(method: str, tied: bool, tmp_path: Path) -> None:
    language_model = llama(tie_word_embeddings=tied)
    plain_names = set(language_model.state_dict())
    model = compose_model(move_trained(get_peft_model(language_model, METHODS[method]())))
    loaded = round_trip(model, tmp_path / "model")
    assert type(loaded.language_model) is type(model.language_model)
    # transformers loads the base, PEFT the adapter on it; neither knows of Cornstarch.
    base, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model/language_model", output_loading_info=True)
    assert not any(report.values())
    assert set(base.state_dict()) == plain_names
    adapted = PeftModel.from_pretrained(base, tmp_path / "model/language_model/adapter")
    text = {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    assert torch.equal(logits(adapted, text), logits(model.language_model, text))
    assert list((tmp_path / "model").rglob("*.bin")) == []


@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_precisions_of_adapters_come_back(base: torch.dtype, adapters: torch.dtype, tmp_path: Path) -> None:
    language_model = get_peft_model(llama().to(base), LoraConfig(**QUERY, modules_to_save=["lm_head"]))
    for parameter in language_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(adapters)
    model = compose_model(llama())
    model.language_model = move_trained(language_model)
    model.save_pretrained(tmp_path / "model")
    exact(MultimodalModel.from_pretrained(tmp_path / "model"), model)


def test_adapters_on_encoder_and_projector_come_back(tmp_path: Path) -> None:
    saved = LoraConfig(**QUERY, modules_to_save=["post_layernorm"])
    model = compose_model(llama(), move_trained(get_peft_model(clip(), saved)))
    adapters = LoraConfig(r=2, target_modules=["projection"])
    model.vision_encoder.projector = move_trained(get_peft_model(model.vision_encoder.projector, adapters))
    loaded = round_trip(model, tmp_path / "model")
    assert isinstance(loaded.vision_encoder.module, PeftModel)
    assert isinstance(loaded.vision_encoder.projector, PeftModel)
    base = CLIPVisionModel.from_pretrained(tmp_path / "model/vision_encoder")
    adapted = PeftModel.from_pretrained(base, tmp_path / "model/vision_encoder/adapter").eval()
    images = {"pixel_values": batch()["pixel_values"]}
    expected = model.vision_encoder.module(**images).last_hidden_state
    assert torch.equal(adapted(**images).last_hidden_state, expected)


def test_adapters_on_experts_come_back(tmp_path: Path) -> None:
    config = LoraConfig(**QUERY, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    experts = move_trained(get_peft_model(LANGUAGE_MODELS["qwen3_moe"].build(), config))
    round_trip(compose_model(experts), tmp_path / "model")


@pytest.mark.parametrize("active", [["one"], ["two"], ["default"], ["one", "two"]])
def test_all_adapters_and_the_active_ones_are_restored(active: list[str], tmp_path: Path) -> None:
    language_model = get_peft_model(llama(), LoraConfig(**QUERY), adapter_name="one")
    language_model.add_adapter("two", LoraConfig(r=3, target_modules=["v_proj"]))
    if active == ["default"]:
        language_model.add_adapter("default", LoraConfig(r=1, target_modules=["k_proj"]))
    language_model.base_model.set_adapter(active)
    loaded = round_trip(compose_model(move_trained(language_model)), tmp_path / "model")
    assert loaded.language_model.active_adapters == active
    assert list(loaded.language_model.peft_config) == list(language_model.peft_config)


def test_disabled_adapters_stay_disabled(tmp_path: Path) -> None:
    model = compose_model(move_trained(get_peft_model(llama(), LoraConfig(**QUERY))))
    enabled = logits(model, batch())
    model.language_model.base_model.disable_adapter_layers()
    loaded = round_trip(model, tmp_path / "model")
    loaded.language_model.base_model.enable_adapter_layers()
    assert torch.equal(logits(loaded, batch()), enabled)


def test_a_frozen_model_trains_its_adapters_again(tmp_path: Path) -> None:
    model = compose_model(get_peft_model(llama(), LoraConfig(**QUERY)), get_peft_model(clip(), LoraConfig(**QUERY)))
    model.train(encoders_mode={"vision": (False, True)}, llm_mode=False)
    loaded = round_trip(model, tmp_path / "model")
    for each in (model, loaded):
        each.train(encoders_mode={"vision": True}, llm_mode=True)
    exact(loaded, model)
    assert any(p.requires_grad for p in loaded.language_model.parameters())


def test_a_loaded_model_can_be_saved_again(tmp_path: Path) -> None:
    model = compose_model(move_trained(get_peft_model(llama(), LoraConfig(**QUERY))))
    model.save_pretrained(tmp_path / "first")
    MultimodalModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    exact(MultimodalModel.from_pretrained(tmp_path / "second"), model)
    # The description of what was trained is small: adapters or the rest, whichever is shorter.
    content = json.loads((tmp_path / "second/cornstarch_model.json").read_text())
    assert len(content["parts"]["language_model"]["trainable"]["but"]) == 4


def test_an_unloaded_adapter_is_gone_from_the_next_save(tmp_path: Path) -> None:
    model = compose_model(move_trained(get_peft_model(llama(), LoraConfig(**QUERY))))
    model.save_pretrained(tmp_path / "model")
    model.language_model = model.language_model.merge_and_unload()
    round_trip(model, tmp_path / "model")
    assert not (tmp_path / "model/language_model/adapter").exists()


# -------------------------------------------------------------------------------------------- what is refused


def _merge() -> nn.Module:
    language_model = get_peft_model(llama(), LoraConfig(**QUERY))
    language_model.merge_adapter()
    return language_model


def _prompts() -> nn.Module:
    return get_peft_model(llama(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def _adaption_prompt() -> nn.Module:
    config = peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    return get_peft_model(llama(), config)


def _quantise() -> nn.Module:
    language_model = get_peft_model(llama(), LoraConfig(**QUERY))
    language_model.get_base_model().hf_quantizer = object()
    return language_model


def _inject() -> nn.Module:
    language_model = llama()
    language_model.add_adapter(LoraConfig(**QUERY))
    return language_model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_merge, "merged into the base weights. Call unmerge_adapter"),
        (_prompts, "Prompt learning .* cannot be saved"),
        (_adaption_prompt, "cannot be told from adapter weights in PEFT's AdaptedAttention"),
        (_quantise, "base under the adapters is quantised"),
        (_inject, "language_model has adapters inside.*get_peft_model"),
    ],
)
def test_adapters_that_cannot_be_loaded_are_not_saved(
    build: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    model = compose_model(llama())
    model.language_model = build()
    with pytest.raises(ConfigError, match=message):
        model.save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_without_peft_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compose_model(get_peft_model(llama(), LoraConfig(**QUERY))).save_pretrained(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="language_model has PEFT adapters.*pip install peft"):
        MultimodalModel.from_pretrained(tmp_path / "model")


def test_a_flipped_bit_in_an_adapter_is_detected(tmp_path: Path) -> None:
    compose_model(get_peft_model(llama(), LoraConfig(**QUERY))).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/language_model/adapter/adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="adapter_model.safetensors is damaged"):
        MultimodalModel.from_pretrained(tmp_path / "model")
