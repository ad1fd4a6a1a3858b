"""`cornstarch export`: folders that transformers and Cornstarch load, with the logits of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionModel,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cornstarch import MultimodalModel, MultimodalModelProcessor
from cornstarch.checkpoint.weights import open_checkpoint
from cornstarch.data.formats import open_sources
from cornstarch.tasks import build_task
from cornstarch.train import Trainer, load_config, load_run
from cornstarch.trainer.checkpointer import LoadedRun
from tests.cli.small_runs import AUDIO, Command, add_sounds
from tests.models import local_processors, small
from tests.tasks.small_tasks import LLAMA, T5, tokenizer_folder
from tests.trainer.tiny import quiet, tiny_config, write_data

LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def fit(config: Any) -> Trainer:
    trainer = Trainer(config, console=quiet())
    trainer.fit()
    return trainer


def whole_run(folder: Path, rows: Path, **whole: Any) -> Path:
    """Train a whole model for three steps on a file of rows, and return the run's folder."""
    base = {
        "output": str(folder), "device": "cpu", "model": {"whole": whole}, "data": {"train": str(rows)},
        "loop": {"steps": 3, "batch_size": 4}, "optimizer": {"learning_rate": 1e-2}, "logging": {"progress": "none"},
    }  # fmt: skip
    fit(load_config(None, base=base))
    return folder


def inputs_of(run: LoadedRun, count: int = 3) -> dict[str, Any]:
    """Return a batch of the run's first and last training samples."""
    source, collator = open_sources(run.config.data.train), run.task.collator
    numbers = [0, *range(len(source) - count + 1, len(source))]
    return collator.join([collator.prepare(source[number]) for number in numbers]).inputs


def logits(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(**inputs).logits
    mask = inputs.get("attention_mask")
    return found if mask is None or found.shape[:2] != mask.shape else found[mask.bool()]


def assert_same(one: nn.Module, other: nn.Module, inputs: dict[str, Any], **tolerance: float) -> None:
    found, expected = logits(one, inputs), logits(other, inputs)
    assert expected.std() > 0
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose composed model sees and hears."""
    folder = tmp_path_factory.mktemp("sees")
    tiny_config(folder)
    add_sounds(folder)
    audio = {"encoders": {"audio": AUDIO}}
    fit(tiny_config(folder, "loop.steps=4", "checkpoint.every=2", "loop.ema_decay=0.5", model=audio))
    return folder / "run"


# ------------------------------------------------------------------------------------------------ composed models


def test_a_composed_model_and_each_of_its_parts(sees: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "deep/model"
    code, said, error = command("export", sees, folder)
    assert (code, error) == (0, "")
    assert "the multimodal model of step 4; loaded again, largest difference of logits 0.0e+00" in said
    run = load_run(sees)
    model: Any = run.task.model
    inputs = inputs_of(run)
    assert {"pixel_values", "input_features"} <= set(inputs)
    loaded: Any = MultimodalModel.from_pretrained(folder)
    assert_same(loaded, model, inputs)

    language_model = LlamaForCausalLM.from_pretrained(folder / "language_model")
    assert_same(language_model, model.language_model, {"input_ids": torch.arange(1, 20)[None]})
    vision = CLIPVisionModel.from_pretrained(folder / "vision_encoder")
    pixels = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model.encoders["vision"].module.eval()(pixels).last_hidden_state
        assert torch.equal(vision.eval()(pixels).last_hidden_state, expected)
    audio = WhisperEncoder.from_pretrained(folder / "audio_encoder")
    sounds = torch.randn(2, 8, 10)
    with torch.no_grad():
        expected = model.encoders["audio"].module.eval()(sounds).last_hidden_state
        assert torch.equal(audio.eval()(sounds).last_hidden_state, expected)

    processor = MultimodalModelProcessor.from_pretrained(folder / "processor", model=loaded)
    made = processor(
        {"vision": {"images": [local_processors.image()]}}, {"text": ["what is <image>"]}, return_tensors="pt"
    )
    assert (made["input_ids"] == loaded.modality_token_ids["vision"]).sum() == 5  # 2 × 2 patches and the class token


def test_averaged_weights_are_exported(sees: Path, tmp_path: Path, command: Command) -> None:
    assert command("export", sees, tmp_path / "two", "--checkpoint", 2)[0] == 0
    assert command("export", sees, tmp_path / "four", "--checkpoint", "last")[0] == 0
    two, four = (dict(MultimodalModel.from_pretrained(tmp_path / name).named_parameters()) for name in ("two", "four"))
    with open_checkpoint(sees, 2).tensors() as tensors:
        averages = {name.removeprefix("ema/"): tensors[name] for name in tensors if name.startswith("ema/")}
        assert averages and all(torch.equal(two[name], average) for name, average in averages.items())
        assert any(not torch.equal(two[name], tensors[f"parameters/{name}"]) for name in averages)
    assert any(not torch.equal(two[name], four[name]) for name in averages)


def test_impossible_exports_are_refused(sees: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    cases = [
        ([sees, tmp_path / "there"], "exists already"),
        ([tmp_path / "none", tmp_path / "new"], "There is no folder"),
        ([tmp_path / "there", tmp_path / "new"], "is no run"),
        ([sees, tmp_path / "new", "--checkpoint", 3], "has no step 3; it has 2, 4"),
        ([sees, tmp_path / "file/new"], "cannot be written: Not a directory"),
    ]
    for arguments, message in cases:
        code, out, error = command("export", *arguments)
        assert (code, out) == (2, "") and message in error, arguments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_an_export_without_data_needs_unchecked(tmp_path: Path, command: Command) -> None:
    fit(tiny_config(tmp_path, "loop.steps=1"))
    (tmp_path / "train.json").unlink()
    code, _, error = command("export", tmp_path / "run", tmp_path / "new")
    assert code == 2 and "train.json does not exist" in error and "--unchecked" in error
    assert not (tmp_path / "new").exists()
    code, said, _ = command("export", tmp_path / "run", tmp_path / "new", "--unchecked")
    assert code == 0 and "not compared" in said
    assert MultimodalModel.from_pretrained(tmp_path / "new").encoders


def test_adapters_are_merged(tmp_path: Path, command: Command) -> None:
    lora = {
        "encoders": {"vision": {"train": "lora", "lora": {"rank": 2, "targets": ["q_proj"]}}},
        "language_model": {"train": "lora", "lora": {"rank": 2}},
    }
    fit(tiny_config(tmp_path, "loop.steps=4", "optimizer.learning_rate=0.05", model=lora))
    code, said, _ = command("export", tmp_path / "run", tmp_path / "new")
    assert code == 0 and "largest difference" in said
    run = load_run(tmp_path / "run")
    loaded = MultimodalModel.from_pretrained(tmp_path / "new")
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    inputs = inputs_of(run)
    assert_same(loaded, run.task.model, inputs, rtol=1e-4, atol=1e-5)
    # By hand: a layer's weight and its adapter's product, scaled by alpha / rank.
    trained = {name: p.detach() for name, p in run.task.model.named_parameters()}
    merged = {name: p.detach() for name, p in loaded.named_parameters()}
    layer = "language_model.base_model.model.model.layers.0.mlp.up_proj"
    product = trained[f"{layer}.lora_B.default.weight"] @ trained[f"{layer}.lora_A.default.weight"]
    assert product.abs().max() > 1e-3
    expected = trained[f"{layer}.base_layer.weight"] + 32 / 2 * product
    torch.testing.assert_close(merged["language_model.model.layers.0.mlp.up_proj.weight"], expected)


# ------------------------------------------------------------------------------------------------ whole models


def test_a_causal_model_is_exported(tmp_path: Path, command: Command) -> None:
    words = tokenizer_folder(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "one two three four"}) + "\n")
    small_llama = {**LLAMA, "tie_word_embeddings": True}
    run = whole_run(tmp_path / "run", tmp_path / "rows.jsonl", config=small_llama, tokenizer=words)
    assert load_run(run).task.name == "causal-lm"  # `task: auto`
    code, said, _ = command("export", run, tmp_path / "new")
    assert code == 0 and "the causal-lm model of step 3" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    inputs = AutoTokenizer.from_pretrained(tmp_path / "new")("one two cat", return_tensors="pt")
    plain: Any = load_run(run).task.model
    assert_same(model, plain.language_model, {"input_ids": inputs["input_ids"]})
    again = whole_run(tmp_path / "again", tmp_path / "rows.jsonl", path=str(tmp_path / "new"))
    assert load_run(again).task.name == "causal-lm"


def test_a_t5_is_exported(tmp_path: Path, command: Command) -> None:
    words = tokenizer_folder(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"source": "a cat and a dog", "target": "cat"}) + "\n")
    run = whole_run(tmp_path / "run", tmp_path / "rows.jsonl", config=T5, tokenizer=words)
    assert command("export", run, tmp_path / "new")[0] == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new")
    loaded = load_run(run)
    assert_same(model, loaded.task.model, inputs_of(loaded, 1))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer("a cat")["input_ids"] == AutoTokenizer.from_pretrained(words)("a cat")["input_ids"]


# ------------------------------------------------------------------------------------------------ LLaVA


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `llava`, a Hugging Face LLaVA with its processor, and `train.json` with images."""
    folder = tmp_path_factory.mktemp("llava")
    write_data(folder)
    tokenizer = local_processors.tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    token = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    text = {**small.llama().config.to_dict(), "vocab_size": len(tokenizer)}
    config = LlavaConfig(
        vision_config=small.clip().config, text_config=text, image_token_id=token, vision_feature_layer=-1
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder / "llava")
    tokenizer.save_pretrained(folder / "llava")
    size = {"height": 8, "width": 8}
    images = CLIPImageProcessor(size=size, crop_size=size)
    described = {"patch_size": 4, "vision_feature_select_strategy": "default", "chat_template": LLAVA_TEMPLATE}
    LlavaProcessor(images, tokenizer, num_additional_image_tokens=1, **described).save_pretrained(folder / "llava")
    return folder


def test_a_hugging_face_llava_is_trained_and_exported(llava: Path, tmp_path: Path, command: Command) -> None:
    run = whole_run(tmp_path / "run", llava / "train.json", path=str(llava / "llava"))
    parts = {part["name"]: part for part in json.loads((run / "run.json").read_text())["parts"]}
    assert list(parts) == ["vision encoder", "vision projector", "language model"]
    assert all(part["trainable"] == part["parameters"] > 0 for part in parts.values())
    loaded = load_run(run)
    model: Any = loaded.task.model
    inputs = inputs_of(loaded)

    # It began as what transformers makes of the folder, and was trained.
    theirs = LlavaForConditionalGeneration.from_pretrained(llava / "llava")
    assert_same(build_task(loaded.config).model, theirs, inputs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(model, inputs), logits(theirs, inputs), rtol=1e-2, atol=1e-2)

    assert command("export", run, tmp_path / "new")[0] == 0
    again: Any = MultimodalModel.from_pretrained(tmp_path / "new")
    assert_same(again, model, inputs)
    photo = llava / "images/train.json-0.png"
    assert command("generate", run, "what is this <image>", "--image", photo, "--max-tokens", 4)[0] == 0

    # And the saved folder is a whole model of its own.
    second = whole_run(tmp_path / "second", llava / "train.json", path=str(tmp_path / "new"))
    assert load_run(second).task.name == "multimodal"
    assert command("export", second, tmp_path / "newer")[0] == 0


def test_adapters_of_a_hugging_face_llava_are_exported(llava: Path, tmp_path: Path, command: Command) -> None:
    run = whole_run(tmp_path / "run", llava / "train.json", path=str(llava / "llava"), train="lora")
    parts = {part["name"]: part["train"] for part in json.loads((run / "run.json").read_text())["parts"]}
    assert parts == {"vision encoder": "frozen", "vision projector": "frozen", "language model": "lora"}
    assert command("export", run, tmp_path / "new")[0] == 0
