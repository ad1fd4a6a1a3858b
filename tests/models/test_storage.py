"""save_pretrained and from_pretrained: round trips, other libraries, refusals and crashes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, CLIPVisionModel

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import (
    ModalEncoderModule,
    MultimodalModel,
    MultimodalProjector,
    MultimodalProjectorConfig,
    model_part,
)
from cornstarch.models.multimodal_language_model import model_folder as folder
from tests.forked import run_in_child
from tests.models.small import VISION, clip, llama, ragged, whisper
from tests.models.whole_models import FAMILIES
from tests.zoo import ENCODERS, LANGUAGE_MODELS, MODALITY_TOKEN, RAGGED, item_count, text_batch

DESCRIPTION = "cornstarch_model.json"


def exact(first: nn.Module, second: nn.Module) -> None:
    """Both have the same tensors to the bit, saved or not, in the same precisions, and train the same."""
    for kind in ("state_dict", "named_buffers"):
        found, expected = dict(getattr(first, kind)()), dict(getattr(second, kind)())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name
    flags = [{name: p.requires_grad for name, p in model.named_parameters()} for model in (first, second)]
    assert flags[0] == flags[1]


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model.eval()(**{key: value for key, value in batch.items() if key != "labels"}).logits


def vision_model(**options: Any) -> MultimodalModel:
    model = MultimodalModel({"vision": clip()}, llama(), **options)
    model.set_modality_token_ids({"vision": VISION})
    return model


def rewrite(saved: Path, change: Callable[[dict[str, Any]], Any], sign: bool = True) -> None:
    """Change the description of a saved model; signed, it is what an attacker would leave, not an accident."""
    content = json.loads((saved / DESCRIPTION).read_text())
    change(content)
    if sign:
        content["sha256"] = folder.own_digest(content)
    (saved / DESCRIPTION).write_text(json.dumps(content))


def add_listed(saved: Path, name: str, text: str) -> None:
    """Put a file in the model's folder and in its manifest."""
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).write_text(text)
    entry = {"size": len(text.encode()), "sha256": folder.file_digests(saved, [name])[name]}
    rewrite(saved, lambda content: content["files"].update({name: entry}))


# ------------------------------------------------------------------------------------------------ coming back


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("encoder", "language_model"),
    [*((name, "llama") for name in ENCODERS), *(("clip", name) for name in LANGUAGE_MODELS if name != "llama")],
)
def test_every_part_is_loaded_bit_equal(encoder: str, language_model: str, dtype: str, tmp_path: Path) -> None:
    part = ENCODERS[encoder]
    model = MultimodalModel({part.modality: part.build()}, LANGUAGE_MODELS[language_model].build())
    # `to` also rounds what no state dict has: rotary tables.
    model.language_model.to(getattr(torch, dtype))
    model.encoders[part.modality].module.to(getattr(torch, dtype))
    model.set_modality_token_ids({part.modality: MODALITY_TOKEN})
    model.save_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(tmp_path / "model")
    exact(loaded, model)
    assert not loaded.training
    count = item_count(RAGGED)
    text = text_batch(RAGGED, part.feature_lengths(count))
    items = {
        key: value.to(getattr(torch, dtype)) if value.is_floating_point() else value
        for key, value in part.inputs(count).items()
    }
    assert torch.equal(logits(loaded, {**text, **items}), logits(model, {**text, **items}))


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_mixed_precisions_and_trainability_come_back(options: dict[str, Any], tmp_path: Path) -> None:
    model = MultimodalModel({"vision": clip(), "audio": whisper()}, llama(**options), init_projector_type="mlp")
    model.language_model.to(torch.bfloat16)
    model.language_model.model.layers[1].input_layernorm.to(torch.float32)
    model.audio_encoder.module.to(torch.float64)
    model.train(encoders_mode={"vision": (False, True), "audio": (True, False)}, llm_mode=True)
    model.language_model.model.layers[0].requires_grad_(False)
    model.save_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(tmp_path / "model")
    exact(loaded, model)
    tied = loaded.language_model.lm_head.weight is loaded.language_model.model.embed_tokens.weight
    assert tied == bool(options)
    # What stays fixed when a part is declared trained is remembered too (Whisper's sinusoids).
    for each in (model, loaded):
        each.train(encoders_mode={"vision": True, "audio": True}, llm_mode=True)
    exact(loaded, model)


def test_settings_are_loaded(tmp_path: Path) -> None:
    encoder = ModalEncoderModule(clip(), additional_args=["grid"], attention="item")
    model = MultimodalModel({"vision": encoder, "audio": whisper()}, llama(), init_activation="relu")
    model.set_modality_token_ids({"vision": 64, "audio": 65})
    model.trains_on_placeholders, model.positions_from_mask = True, False
    model.language_model.generation_config.max_new_tokens = 3
    model.language_model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(str(tmp_path / "model"))
    assert loaded.encoder_names == ("vision", "audio")
    assert loaded.modality_token_ids == {"vision": 64, "audio": 65}
    assert (loaded.trains_on_placeholders, loaded.positions_from_mask) == (True, False)
    assert (loaded.vision_encoder.additional_args, loaded.vision_encoder.attention) == (["grid"], "item")
    assert loaded.audio_encoder.attention == "causal"
    assert loaded.language_model.generation_config.max_new_tokens == 3
    assert loaded.language_model.config._attn_implementation == "eager"
    assert loaded.vision_encoder.projector.config.activation == "relu"
    batch = ragged()
    assert torch.equal(logits(loaded, batch), logits(model, batch))
    # By now the language model attends through our masks.
    model.save_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded, batch), logits(model, batch))
    ids = batch["input_ids"][2:3, :3]
    assert torch.equal(loaded.generate(ids, do_sample=False), model.generate(ids, do_sample=False))


def test_a_model_without_encoders(tmp_path: Path) -> None:
    model = MultimodalModel(language_model=llama())
    model.save_pretrained(tmp_path / "model")
    exact(MultimodalModel.from_pretrained(tmp_path / "model"), model)


def test_dtype_and_device_can_be_chosen_when_loading(tmp_path: Path) -> None:
    vision_model().save_pretrained(tmp_path / "model")
    for dtype in (torch.bfloat16, "bfloat16"):
        loaded = MultimodalModel.from_pretrained(tmp_path / "model", dtype=dtype, device="cpu")
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
        # as transformers itself loads it: the rotary table stays exact
        assert loaded.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
    with pytest.raises(ConfigError, match="'bfloat61'"):
        MultimodalModel.from_pretrained(tmp_path / "model", dtype="bfloat61")


def test_one_encoder_for_two_modalities_stays_one(tmp_path: Path) -> None:
    shared = clip()
    model = MultimodalModel({"vision": shared, "screen": shared}, llama())
    model.save_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(tmp_path / "model")
    assert loaded.vision_encoder.module is loaded.screen_encoder.module
    assert not (tmp_path / "model" / "screen_encoder").exists()
    exact(loaded, model)


@pytest.mark.parametrize("wrapper", ["compile", "ddp"])
def test_wrappers_are_not_saved(wrapper: str, tmp_path: Path) -> None:
    model = vision_model()
    plain = vision_model()
    if wrapper == "compile":
        model.language_model = torch.compile(model.language_model)
    else:

        class Replicated(DistributedDataParallel):  # the real one needs a process group
            def __init__(self, module: nn.Module) -> None:
                nn.Module.__init__(self)
                self.module = module

        model.vision_encoder.module = Replicated(model.vision_encoder.module)
    model.save_pretrained(tmp_path / "model")
    exact(MultimodalModel.from_pretrained(tmp_path / "model"), plain)


# ------------------------------------------------------------------------------------- what others can read


def test_transformers_loads_each_part(tmp_path: Path) -> None:
    model = vision_model(init_projector_type="mlp")
    model.language_model.generation_config.max_new_tokens = 7
    model.language_model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    encoder = CLIPVisionModel.from_pretrained(tmp_path / "vision_encoder")
    language_model = AutoModelForCausalLM.from_pretrained(tmp_path / "language_model")
    projector = MultimodalProjector.from_pretrained(tmp_path / "vision_projector")
    for loaded, saved in (
        (encoder, model.vision_encoder.module),
        (language_model, model.language_model),
        (projector, model.vision_encoder.projector),
    ):
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), saved.parameters(), strict=True))
        assert {p.dtype for p in loaded.parameters()} == {p.dtype for p in saved.parameters()}
    assert language_model.generation_config.max_new_tokens == 7
    # One weights file per folder: other programs read every *.safetensors they find there.
    for part in ("vision_encoder", "vision_projector", "language_model"):
        assert [path.name for path in (tmp_path / part).glob("*.safetensors")] == ["model.safetensors"]


def test_nothing_is_pickled_and_every_file_is_listed(tmp_path: Path) -> None:
    vision_model().save_pretrained(tmp_path / "model")
    files = {p.relative_to(tmp_path / "model").as_posix() for p in (tmp_path / "model").rglob("*") if p.is_file()}
    assert {Path(name).suffix for name in files} == {".json", ".safetensors"}
    content = json.loads((tmp_path / "model" / DESCRIPTION).read_text())
    assert files == {*content["files"], DESCRIPTION}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ------------------------------------------------------------------------------------- the user's own modules


class TinyEncoder(nn.Module):
    """An encoder that transformers knows nothing of, with a weight under two names."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inner = nn.Linear(12, width)
        self.again = nn.Linear(12, width)
        self.again.weight = self.inner.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("hidden", torch.tensor(3.0), persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        return self.inner(patches) * self.scale + self.again(patches) * self.hidden


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(24, 32, bias=False)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.proj(tokens))


def own_model() -> MultimodalModel:
    model = MultimodalModel({"vision": ModalEncoderModule(TinyEncoder(), Projection())}, llama())
    model.vision_encoder.projector.to(torch.bfloat16)
    model.vision_encoder.module.scale.fill_(5.0)
    model.vision_encoder.module.hidden.fill_(7.0)
    model.vision_encoder.module.again.bias.requires_grad_(False)
    model.set_modality_token_ids({"vision": VISION})
    return model


@pytest.mark.parametrize(
    "classes",
    [
        {"vision_encoder": TinyEncoder, "vision_projector": Projection},
        {"vision_encoder": lambda: TinyEncoder(24), "vision_projector": Projection()},
    ],
    ids=["classes", "function and module"],
)
def test_custom_modules_are_loaded_into_given_modules(classes: dict[str, Any], tmp_path: Path) -> None:
    model = own_model()
    model.save_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(tmp_path / "model", classes=classes)
    exact(loaded, model)
    assert loaded.vision_encoder.module.inner.weight is loaded.vision_encoder.module.again.weight
    batch = {"input_ids": torch.tensor([[3, VISION, VISION, 4]]), "patches": torch.randn(1, 2, 12)}
    assert torch.equal(logits(loaded, batch), logits(model, batch))


BOTH = {"vision_encoder": TinyEncoder, "vision_projector": Projection}


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({}, r"vision_encoder is your own module \(.*TinyEncoder\).*classes=\{'vision_encoder'"),
        ({"vision_encoder": TinyEncoder}, r"vision_projector is your own module.*classes=\{'vision_projector'"),
        ({**BOTH, "vision_encoder": lambda: TinyEncoder(16)}, r"does not fit the saved.*\[24, 12\].*\[16, 12\]"),
        ({**BOTH, "vision_encoder": lambda: 3}, "made a int"),
        ({**BOTH, "vision_encoder": nn.Linear}, "without arguments"),
        ({**BOTH, "visoin_encoder": TinyEncoder}, "'visoin_encoder'; this model has the parts vision_encoder"),
        ({**BOTH, "language_model": TinyEncoder}, "not a class of transformers models"),
    ],
)
def test_custom_modules_that_do_not_fit_are_refused(classes: dict[str, Any], message: str, tmp_path: Path) -> None:
    own_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        MultimodalModel.from_pretrained(tmp_path / "model", classes=classes)


class OwnLlama(transformers.LlamaForCausalLM):
    """A transformers model of the user's own."""


def test_a_custom_transformers_class_is_not_imported_from_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MultimodalModel({"vision": clip()}, OwnLlama(llama().config))
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"OwnLlama.*classes=\{'language_model': OwnLlama\}"):
        MultimodalModel.from_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(tmp_path / "model", classes={"language_model": OwnLlama})
    assert type(loaded.language_model) is OwnLlama
    exact(loaded, model)


class Newline(nn.Module):
    """A callback with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(24))

    def forward(self, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + self.row
        return output


def test_callbacks_must_be_passed_again_when_loading(tmp_path: Path) -> None:
    def halve(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"pixel_values": inputs["pixel_values"] / 2}

    def shift(position_ids: Any) -> dict[str, Any]:
        return {}

    newline = Newline()
    nn.init.normal_(newline.row)
    encoder = ModalEncoderModule(clip(), preprocess_callback=halve, postprocess_module_callback=newline)
    model = MultimodalModel({"vision": encoder}, llama(), preprocess_llm_callback=shift)
    model.set_modality_token_ids({"vision": VISION})
    model.save_pretrained(tmp_path / "model")
    again = {
        "vision": {"preprocess_callback": halve, "postprocess_module_callback": Newline()},
        "language_model": {"preprocess_llm_callback": shift},
    }
    loaded = MultimodalModel.from_pretrained(tmp_path / "model", callbacks=again)
    exact(loaded, model)
    batch = {"input_ids": torch.tensor([[3, *[VISION] * 5, 4]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    assert torch.equal(logits(loaded, batch), logits(model, batch))
    for callbacks, message in [
        (None, "callbacks={'vision': {'preprocess_callback': '…', 'postprocess_module_callback': '…'}, 'langu"),
        ({**again, "vision": {"preprocess_callback": halve}}, "'postprocess_module_callback': '…'"),
        ({**again, "vision": {**again["vision"], "postprocess_module_callback": halve}}, "is a function.*Newline"),
        ({**again, "visoin": {}}, r"callbacks\['visoin'\]"),
        ({**again, "vision": {"preproces": halve}}, r"callbacks\['vision'\]\['preproces'\]"),
    ]:
        with pytest.raises(ConfigError, match=message):
            MultimodalModel.from_pretrained(tmp_path / "model", callbacks=callbacks)


# --------------------------------------------------------------------------------- models that were taken apart


@pytest.mark.parametrize("name", FAMILIES)
def test_decomposed_models_are_loaded_bit_equal(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    whole = family.build()
    batch = family.batch(whole)
    try:
        model = MultimodalModel.from_multimodal(whole)
    except ConfigError as error:
        pytest.skip(f"cannot be taken apart: {error}")
    model.language_model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path / "model")
    loaded = MultimodalModel.from_pretrained(tmp_path / "model")
    exact(loaded, model)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, batch), logits(model, batch))
    assert torch.equal(loaded.generate(**batch, do_sample=False), model.generate(**batch, do_sample=False))


# -------------------------------------------------------------------------------------------- what is refused


def test_the_origin_class_is_not_imported_from_a_file(tmp_path: Path) -> None:
    whole = FAMILIES["llava"].build()
    MultimodalModel.from_multimodal(whole).save_pretrained(tmp_path / "model")
    rewrite(tmp_path / "model", lambda content: content["origin"].update(class_path="evil.Llava"))
    with pytest.raises(ConfigError, match="taken from a evil.Llava.*classes={'origin'"):
        MultimodalModel.from_pretrained(tmp_path / "model")
    MultimodalModel.from_pretrained(tmp_path / "model", classes={"origin": type(whole)})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    vision_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_projector_is_found_that_another_module_had_when_it_was_saved(saved: Path) -> None:
    path = "cornstarch.models.multimodal_language_model.projector.MultimodalProjector"
    rewrite(saved, lambda content: content["parts"]["vision_projector"].update(class_path=path))
    assert type(MultimodalModel.from_pretrained(saved).encoders["vision"].projector) is MultimodalProjector


def _no_folder(saved: Path) -> None:
    shutil.rmtree(saved)


def _a_file(saved: Path) -> None:
    shutil.rmtree(saved)
    saved.write_text("")


def _plain_hugging_face(saved: Path) -> None:
    os.remove(saved / DESCRIPTION)
    shutil.copytree(saved / "language_model", saved, dirs_exist_ok=True)


def _something_else(saved: Path) -> None:
    os.remove(saved / DESCRIPTION)


def _cut_description(saved: Path) -> None:
    (saved / DESCRIPTION).write_text((saved / DESCRIPTION).read_text()[:200])


def _deep_description(saved: Path) -> None:
    (saved / DESCRIPTION).write_text("[" * 100_000)


def _flip_description(saved: Path) -> None:
    text = (saved / DESCRIPTION).read_text()
    (saved / DESCRIPTION).write_text(text.replace('"vision": 64', '"vision": 65'))


def _newer(saved: Path) -> None:
    rewrite(saved, lambda content: content.update(format=folder.FORMAT + 1, unknown={}))


def _flip_bit(saved: Path) -> None:
    weights = bytearray((saved / "language_model/model.safetensors").read_bytes())
    weights[-17] ^= 4
    (saved / "language_model/model.safetensors").write_bytes(weights)


def _truncate(saved: Path) -> None:
    os.truncate(saved / "vision_encoder/model.safetensors", 5000)


def _missing_file(saved: Path) -> None:
    os.remove(saved / "vision_projector/model.safetensors")


def _edit_config(saved: Path) -> None:
    text = (saved / "language_model/config.json").read_text()
    (saved / "language_model/config.json").write_text(text.replace('"silu"', '"relu"'))


def _only_bin(saved: Path) -> None:
    part = saved / "language_model"
    os.rename(part / "model.safetensors", part / "pytorch_model.bin")

    def change(content: dict[str, Any]) -> None:
        content["files"]["language_model/pytorch_model.bin"] = content["files"].pop("language_model/model.safetensors")

    rewrite(saved, change)


def _list_pickle(saved: Path) -> None:
    add_listed(saved, "language_model/pytorch_model.bin", "x")


def _foreign_weights(saved: Path) -> None:
    (saved / "language_model/model.safetensors.index.json").write_text("{}")


def _auto_map(saved: Path) -> None:
    config = json.loads((saved / "vision_encoder/config.json").read_text())
    config["nested"] = [{"auto_map": {"AutoModel": "evil.Model"}}]
    add_listed(saved, "vision_encoder/config.json", json.dumps(config))


def _foreign_class(saved: Path) -> None:
    rewrite(saved, lambda content: content["parts"]["language_model"].update(class_path="os.system"))


def _smuggle_class(saved: Path) -> None:
    path = "transformers.modeling_utils.partial"
    rewrite(saved, lambda content: content["parts"]["language_model"].update(class_path=path))


def _unknown_class(saved: Path) -> None:
    path = "transformers.models.llama.modeling_llama.LlamaForNothing"
    rewrite(saved, lambda content: content["parts"]["language_model"].update(class_path=path))


def _other_class(saved: Path) -> None:
    path = "transformers.models.opt.modeling_opt.OPTForCausalLM"
    rewrite(saved, lambda content: content["parts"]["vision_projector"].update(class_path=path))


def _traversal_in_files(saved: Path) -> None:
    rewrite(saved, lambda content: content["files"].update({"../secret": {"size": 0, "sha256": ""}}))


def _absolute_file(saved: Path) -> None:
    rewrite(saved, lambda content: content["files"].update({"/etc/passwd": {"size": 0, "sha256": ""}}))


def _traversal_in_names(saved: Path) -> None:
    rewrite(saved, lambda content: content["encoders"].update({"../vision": content["encoders"]["vision"]}))


def _traversal_in_adapters(saved: Path) -> None:
    adapters = {"names": ["../.."], "active": ["../.."]}
    rewrite(saved, lambda content: content["parts"]["language_model"].update(adapters=adapters))


def _missing_adapter(saved: Path) -> None:
    adapters = {"names": ["default"], "active": ["default"]}
    rewrite(saved, lambda content: content["parts"]["language_model"].update(adapters=adapters))


def _traversal_in_shards(saved: Path) -> None:
    add_listed(saved, "language_model/model.safetensors.index.json", '{"weight_map": {"a": "../../x.safetensors"}}')


def _unlist_shard(saved: Path) -> None:
    add_listed(saved, "language_model/model.safetensors.index.json", '{"weight_map": {"a": "x.safetensors"}}')


def _missing_part(saved: Path) -> None:
    rewrite(saved, lambda content: content["parts"].pop("vision_projector"))


def _unknown_field(saved: Path) -> None:
    rewrite(saved, lambda content: content.update(surprise=1))


def _unknown_parameter(saved: Path) -> None:
    flags = {"all": True, "but": ["no.such.weight"]}
    rewrite(saved, lambda content: content["parts"]["language_model"].update(trainable=flags))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_folder, "There is no folder .*model .*nothing is downloaded"),
        (_a_file, "model is a file"),
        (_plain_hugging_face, "plain Hugging Face model.*compose it.*from_multimodal"),
        (_something_else, "cornstarch_model.json is missing"),
        (_cut_description, "cornstarch_model.json is damaged: it is not JSON"),
        (_deep_description, "cornstarch_model.json is damaged"),
        (_flip_description, "cornstarch_model.json is damaged or was edited.*verify=False"),
        (_newer, f"format {folder.FORMAT + 1} by a newer Cornstarch.*up to {folder.FORMAT}. Update"),
        (_flip_bit, "language_model/model.safetensors is damaged"),
        (_truncate, r"vision_encoder/model.safetensors has 5000 bytes, but \d+ were saved"),
        (_missing_file, "vision_projector/model.safetensors is missing"),
        (_edit_config, "language_model/config.json is damaged or was edited.*verify=False"),
        (_only_bin, "language_model/model.safetensors is missing: weights are read from safetensors files only"),
        (_list_pickle, "pytorch_model.bin may hold a pickle"),
        (_foreign_weights, "index.json is not a file of the saved model"),
        (_auto_map, "vision_encoder/config.json asks to run Python code.*auto_map.*trust_remote_code=True"),
        (_foreign_class, "language_model is a os.system.*not imported.*classes={'language_model'"),
        (_smuggle_class, "not imported because a file names it"),
        (_unknown_class, "LlamaForNothing does not exist in the installed version"),
        (_other_class, "OPTForCausalLM"),
        (_traversal_in_files, "'../secret', which does not lie in the model's folder"),
        (_absolute_file, "'/etc/passwd', which does not lie in the model's folder"),
        (_traversal_in_names, "'../vision' is not a plain name"),
        (_traversal_in_adapters, "'../..' is not a plain name"),
        (_missing_adapter, "language_model/adapter/adapter_config.json is missing"),
        (_traversal_in_shards, "'../../x.safetensors', which does not lie"),
        (_unlist_shard, "x.safetensors, which was not saved"),
        (_missing_part, "its parts do not match its encoders.*vision_projector"),
        (_unknown_field, "surprise"),
        (_unknown_parameter, "no.such.weight"),
    ],
)
def test_models_that_cannot_be_loaded_are_refused(
    saved: Path, spoil: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(saved)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        MultimodalModel.from_pretrained(saved)


def test_every_flipped_bit_is_detected(saved: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for path in sorted(p for p in saved.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for place in torch.randint(len(content), (6,), generator=generator).tolist():
            spoilt = bytearray(content)
            spoilt[place] ^= 1 << (place % 8)
            path.write_bytes(spoilt)
            with pytest.raises(ConfigError, match=path.name):
                MultimodalModel.from_pretrained(saved)
        path.write_bytes(content)
    MultimodalModel.from_pretrained(saved)


def test_edited_configs_are_read_without_verification(saved: Path) -> None:
    _edit_config(saved)
    _flip_description(saved)
    loaded = MultimodalModel.from_pretrained(saved, verify=False)
    assert loaded.language_model.config.hidden_act == "relu"
    assert loaded.modality_token_ids == {"vision": 65}
    _truncate(saved)
    with pytest.raises(ConfigError, match="5000 bytes"):
        MultimodalModel.from_pretrained(saved, verify=False)


def test_code_in_the_folder_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code/own_vision.py").write_text(
        "import os\n"
        "from transformers import CLIPVisionModel\n"
        "open(os.environ['RAN'], 'a').write('ran')\n"
        "class OwnVision(CLIPVisionModel):\n"
        "    pass\n"
    )
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    from own_vision import OwnVision

    OwnVision.register_for_auto_class("AutoModel")
    torch.manual_seed(0)
    model = MultimodalModel({"vision": OwnVision(clip().config)}, llama())
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model/vision_encoder/own_vision.py").is_file()
    os.remove(tmp_path / "ran")
    del sys.modules["own_vision"]
    with pytest.raises(ConfigError, match="auto_map.*trust_remote_code=True"):
        MultimodalModel.from_pretrained(tmp_path / "model")
    assert not (tmp_path / "ran").exists()
    loaded = MultimodalModel.from_pretrained(tmp_path / "model", trust_remote_code=True)
    exact(loaded, model)
    assert (tmp_path / "ran").exists()


def test_a_model_that_would_lose_weights_is_not_saved(tmp_path: Path) -> None:
    class Wider(ModalEncoderModule):
        pass

    with_weight = vision_model()
    with_weight.vision_encoder.extra = nn.Parameter(torch.zeros(1))
    on_meta = vision_model()
    on_meta.language_model.to("meta")
    across = vision_model()
    across.vision_encoder.projector.projection.bias = nn.Parameter(across.language_model.model.norm.weight.detach())

    class FullyShardedDataParallel(nn.Module):  # the real one needs a process group
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    sharded = vision_model()
    sharded.language_model.model.layers[0] = FullyShardedDataParallel(sharded.language_model.model.layers[0])
    within = vision_model()
    within.language_model.model.layers[1].mlp.up_proj.weight = within.language_model.model.layers[0].mlp.up_proj.weight
    for model, message in [
        (with_weight, "vision_encoder.extra belongs to no part"),
        (MultimodalModel({"vision": Wider(clip())}, llama()), "Wider is your own class"),
        (on_meta, r"language_model cannot.*\(model.embed_tokens.weight, a Parameter on meta\). Gather"),
        (sharded, r"language_model cannot.*\(model.layers.0\). Gather"),
        (across, "language_model.model.norm.weight shares its memory with a weight of vision_projector"),
        (within, "language_model cannot be saved.*shared tensors"),
    ]:
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            model.save_pretrained(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- where it is saved


def test_the_target_is_made_or_replaced_but_nothing_else_is_touched(tmp_path: Path) -> None:
    model = vision_model()
    model.save_pretrained(tmp_path / "a/b/model")
    (tmp_path / "empty").mkdir()
    model.save_pretrained(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    model.language_model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    exact(MultimodalModel.from_pretrained(tmp_path / "empty"), model)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("mine")
    shutil.copytree(tmp_path / "empty", tmp_path / "broken")
    (tmp_path / "broken" / DESCRIPTION).write_text("{")
    before = sorted(tmp_path.rglob("*"))
    for target, message in [
        ("file", "it is a file"),
        ("file/model", "cannot write in .*file"),
        ("notes", "not empty and holds no Cornstarch model"),
        ("broken", "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=message):
            model.save_pretrained(tmp_path / target)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mount_point_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(ConfigError, match="mount point.*Give a folder in it"):
        vision_model().save_pretrained(tmp_path)
    vision_model().save_pretrained(tmp_path / "model")


def test_other_files_in_the_folder_stay(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("tokens")
    (saved / "language_model/README.md").write_text("about")
    (saved / "processor").mkdir()
    (saved / "processor/model.safetensors").write_text("not ours")
    (saved / "latest").symlink_to("processor")
    # Files of a sharded save, and one that would be taken for weights of the part.
    add_listed(saved, "language_model/model-00001-of-00002.safetensors", "old")
    (saved / "vision_encoder/model.safetensors.index.json").write_text("{}")
    model = MultimodalModel({"audio": whisper()}, llama())
    model.save_pretrained(saved)
    exact(MultimodalModel.from_pretrained(saved), model)
    found = {p.relative_to(saved).as_posix() for p in saved.rglob("*") if not p.is_dir()}
    listed = set(json.loads((saved / DESCRIPTION).read_text())["files"])
    mine = {"tokenizer.json", "language_model/README.md", "processor/model.safetensors"}
    assert found == {*listed, *mine, DESCRIPTION}
    assert os.readlink(saved / "latest") == "processor"
    assert (saved / "tokenizer.json").read_text() == "tokens"


@pytest.mark.parametrize(("mode", "loads"), [(0o000, False), (0o555, True)], ids=["unreadable", "read-only"])
def test_no_permission(mode: int, loads: bool) -> None:
    model = vision_model()
    # Not tmp_path, into which nobody but its owner can look.
    with tempfile.TemporaryDirectory() as parent:
        saved = Path(parent) / "model"
        model.save_pretrained(saved)

        def without_rights() -> None:
            if os.geteuid() == 0:  # for whom there is no forbidden folder
                os.setuid(65534)
            with pytest.raises(ConfigError, match="(?i)permission"):
                model.save_pretrained(saved)
            if loads:  # others can: safetensors by itself writes files for their owner only
                exact(MultimodalModel.from_pretrained(saved), model)
            else:
                with pytest.raises(ConfigError, match="permission"):
                    MultimodalModel.from_pretrained(saved)

        os.chmod(parent, mode)
        status = run_in_child(without_rights)
        os.chmod(parent, 0o755)
        assert status == 0


# ---------------------------------------------------------------------------------------------------- crashes

STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "shutil.copyfile"}


def kill_at(step: int, place: Path) -> None:
    """Have this process killed at the n-th time that it changes something under `place`, just before it does."""
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        # A file that is opened for reading is about to be hashed, or synced: the file is complete, the folder not yet.
        reads = event == "open" and not writes
        if event in STEPS or ((writes or reads) and str(arguments[0]).startswith(str(place))):
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def which(path: Path, models: dict[str, nn.Module]) -> str:
    """Load a model and say which of these it is."""
    found = MultimodalModel.from_pretrained(path).language_model.lm_head.weight
    return next(name for name, model in models.items() if torch.equal(model.language_model.lm_head.weight, found))


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_a_model(tmp_path: Path) -> None:
    models = {"old": MultimodalModel(language_model=llama()), "new": MultimodalModel(language_model=llama())}
    nn.init.normal_(models["new"].language_model.lm_head.weight)
    models["old"].save_pretrained(tmp_path / "kept")
    (tmp_path / "kept/mine.txt").write_text("mine")
    seen = []
    for step in range(1, 500):
        place = tmp_path / f"{step}"
        target = place / "model"
        shutil.copytree(tmp_path / "kept", target)

        def save(step: int = step, place: Path = place, target: Path = target) -> None:
            kill_at(step, place)
            models["new"].save_pretrained(target)

        status = run_in_child(save)
        if target.exists():
            seen.append(which(target, models))
        else:
            with pytest.raises(ConfigError, match="Rename one of them to model") as caught:
                MultimodalModel.from_pretrained(target)
            assert {which(path, models) for path in place.iterdir() if str(path) in str(caught.value)} == {"old", "new"}
            seen.append("between")
        if status == 0:
            break
        assert status == -signal.SIGKILL
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an interrupted save left …
            models["new"].save_pretrained(target)
        assert which(target, models) == "new"
        shutil.rmtree(place)
    # First the old one, for a moment none in its place, then the new one; and every step was tried.
    order = [seen[0], *(after for before, after in zip(seen, seen[1:], strict=False) if before != after)]
    assert order == ["old", "between", "new"], seen
    assert status == 0
    assert [path.name for path in place.iterdir()] == ["model"]
    assert (target / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("failing", ["save_part", "finish_folder", "rename_away", "rename_in"])
def test_an_error_keeps_the_old_model_and_leaves_no_files(
    failing: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = vision_model(), vision_model()
    nn.init.normal_(new.language_model.lm_head.weight)
    rename = os.rename

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def fail_renaming(source: Path, target: Path) -> None:
        away = ".old." in str(target)
        if away == (failing == "rename_away") and ".old." not in str(source):
            fail()
        rename(source, target)

    with monkeypatch.context() as patch:
        if failing.startswith("rename"):
            patch.setattr(os, "rename", fail_renaming)
        else:
            patch.setattr(model_part if failing == "save_part" else folder, failing, fail)
        with pytest.raises(OSError, match="No space left"):
            new.save_pretrained(saved)
    exact(MultimodalModel.from_pretrained(saved), old)
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_leftovers_of_an_interrupted_save_are_reported(saved: Path) -> None:
    shutil.copytree(saved, saved.with_name("model.tmp.0123"))
    with pytest.warns(UserWarning, match="model.tmp.0123"):
        vision_model().save_pretrained(saved)
    assert saved.with_name("model.tmp.0123").exists()


def test_a_projector_stores_both_model_types(tmp_path: Path) -> None:
    vision_model(init_projector_type="mlp").save_pretrained(tmp_path)
    config = MultimodalProjector.from_pretrained(tmp_path / "vision_projector").config
    assert (config.encoder_model_type, config.language_model_type) == ("clip_vision_model", "llama")
    given = MultimodalProjectorConfig(clip().config, llama().config)
    assert (given.encoder_model_type, given.language_model_type) == ("clip_vision_model", "llama")


def test_a_projector_of_each_kind_describes_its_config(tmp_path: Path) -> None:
    config = MultimodalProjectorConfig(in_features=24, out_features=32)
    encoder = ModalEncoderModule(clip(), MultimodalProjector(config, projection=Projection()))
    MultimodalModel({"vision": encoder}, llama()).save_pretrained(tmp_path)
    content = json.loads((tmp_path / DESCRIPTION).read_text())
    part = content["parts"]["vision_projector"]
    assert (part["kind"], part["class_path"].rpartition(".")[2]) == ("projector", "Projection")
    assert content["parts"]["vision_encoder"]["class_path"] == "transformers.models.clip.modeling_clip.CLIPVisionModel"
    assert set(content["versions"]) == {"cornstarch", "torch", "transformers"}
    loaded = MultimodalModel.from_pretrained(tmp_path, classes={"vision_projector": Projection})
    assert loaded.vision_encoder.projector.config.in_features == 24
