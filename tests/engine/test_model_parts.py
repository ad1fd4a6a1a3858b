"""The parts of models of all kinds: each parameter in exactly one, trained as its description says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cornstarch.config import ModelConfig, OptimizerConfig
from cornstarch.engine.model_parts import ModelPart, cast_parts, split_into_parts
from cornstarch.errors import ConfigError
from cornstarch.tasks import build_task
from cornstarch.tasks.build_model import build_model
from tests.cli.small_runs import AUDIO
from tests.models import small
from tests.tasks.small_factory import Tied
from tests.tasks.small_tasks import BERT, T5, run_config, tokenizer_folder
from tests.trainer.tiny import tiny_config

PLAIN = OptimizerConfig(learning_rate=1e-3, weight_decay=0.05)
Shown = dict[str, tuple[str, str, int, int]]


def show_parts(parts: list[ModelPart]) -> Shown:
    return {part.name: (part.kind, part.train, part.count, part.trained_count) for part in parts}


def check(model: nn.Module, parts: list[ModelPart]) -> None:
    """Every parameter is in exactly one part."""
    held = [id(parameter) for part in parts for parameter in part.parameters.values()]
    assert len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in model.parameters()}
    assert sum(part.bytes for part in parts) == sum(p.nbytes for p in model.parameters())


def build_parts(folder: Path, **model: Any) -> tuple[nn.Module, list[ModelPart]]:
    config = tiny_config(folder, model=model)
    built = build_model(config.model)
    parts = split_into_parts(built, config.model, PLAIN)
    check(built, parts)
    return built, parts


def count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_a_composed_model(tmp_path: Path) -> None:
    model: Any
    model, parts = build_parts(tmp_path, encoders={"audio": AUDIO, "vision": {"train": "projector"}})
    vision, audio = model.encoders["vision"], model.encoders["audio"]
    # Whisper's encoder has sinusoids for positions, which no one trains.
    sinusoids = audio.module.get_parameter(small.WHISPER_SINUSOIDS).numel()
    assert show_parts(parts) == {
        "vision encoder": ("CLIPVisionModel", "frozen", count(vision.module), 0),
        "vision projector": (type(vision.projector).__name__, "full", *[count(vision.projector)] * 2),
        "audio encoder": ("WhisperEncoder", "full", count(audio.module), count(audio.module) - sinusoids),
        "audio projector": (type(audio.projector).__name__, "full", *[count(audio.projector)] * 2),
        "language model": ("LlamaForCausalLM", "full", *[count(model.language_model)] * 2),
    }


def test_rates_and_decays_come_from_the_nearest_word(tmp_path: Path) -> None:
    vision = {"learning_rate": 2e-4, "projector_learning_rate": 3e-4, "weight_decay": 0.0}
    _, parts = build_parts(
        tmp_path, encoders={"vision": vision, "audio": {**AUDIO, "learning_rate": 4e-4}},
        language_model={"weight_decay": 0.2},
    )  # fmt: skip
    assert {part.name: (part.learning_rate, part.weight_decay) for part in parts} == {
        "vision encoder": (2e-4, 0.0),
        "vision projector": (3e-4, 0.0),
        "audio encoder": (4e-4, 0.05),
        "audio projector": (4e-4, 0.05),  # the encoder's
        "language model": (1e-3, 0.2),
    }


def test_adapters_are_a_part_of_what_they_adapt(tmp_path: Path) -> None:
    model: Any
    lora = {"train": "lora", "lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}
    model, parts = build_parts(tmp_path, language_model=lora)
    assert show_parts(parts)["language model"][:2] == ("LlamaForCausalLM", "lora")
    # Two layers of 16 × 16, each with two matrices of 16 × 2.
    assert show_parts(parts)["language model"][3] == 2 * 2 * 16 * 2
    assert all("lora_" in name for name in parts[-1].trained)


def test_tied_weights_are_counted_once(tmp_path: Path) -> None:
    model: Any
    model, parts = build_parts(tmp_path, language_model={"config": {"tie_word_embeddings": True}})
    assert model.language_model.lm_head.weight is model.language_model.model.embed_tokens.weight
    assert parts[-1].count == count(model.language_model)
    module = Tied()
    (part,) = split_into_parts(module, ModelConfig(given="Tied"), PLAIN)
    check(module, [part])
    assert part.count == 4 * 4 + 4 + 4


@pytest.mark.parametrize(("config", "train"), [(T5, "full"), (BERT, "lora"), (BERT, "full")])
def test_a_whole_model_is_one_part(tmp_path: Path, config: dict[str, Any], train: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"source": "a", "target": "cat", "text": "a cat"}\n')
    run = run_config(rows, config=config, tokenizer=tokenizer_folder(tmp_path), train=train, learning_rate=5e-4)
    model = build_task(run).model
    (part,) = split_into_parts(model, run.model, PLAIN)
    check(model, [part])
    assert (part.name, part.train, part.learning_rate, part.weight_decay) == ("model", train, 5e-4, 0.05)
    assert (part.trained_count == part.count) == (train == "full") and part.trained_count > 0


def test_a_parameter_of_the_model_itself_has_a_place(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    model = build_model(config.model)
    model.register_parameter("temperature", nn.Parameter(torch.ones(3)))
    model.vision_encoder.register_parameter("scale", nn.Parameter(torch.ones(5)))
    parts = {part.name: part for part in split_into_parts(model, config.model, PLAIN)}
    check(model, list(parts.values()))
    assert "temperature" in parts["language model"].parameters
    assert "vision_encoder.scale" in parts["vision projector"].parameters


def test_nothing_trained_is_told() -> None:
    with pytest.raises(ConfigError, match="Nothing is trained"):
        split_into_parts(nn.Linear(2, 2).requires_grad_(False), ModelConfig(given="Linear"), PLAIN)


# ------------------------------------------------------------------------------------------------ precision


def test_what_changes_is_kept_in_full_and_what_does_not_in_what_is_computed_in(tmp_path: Path) -> None:
    model: Any
    model, parts = build_parts(
        tmp_path, encoders={"vision": {"train": "projector"}, "audio": {**AUDIO, "dtype": "bf16"}},
        language_model={"train": "frozen", "dtype": "fp16"},
    )  # fmt: skip
    model.language_model.register_buffer("counts", torch.arange(3, dtype=torch.int64))
    floats = {name: buffer.dtype for name, buffer in model.named_buffers()}
    cast_parts(parts, torch.bfloat16)
    kinds = {part.name: {parameter.dtype for parameter in part.parameters.values()} for part in parts}
    assert kinds == {
        "vision encoder": {torch.bfloat16},
        "vision projector": {torch.float32},
        "audio encoder": {torch.bfloat16},  # it says so
        "audio projector": {torch.bfloat16},
        "language model": {torch.float16},
    }
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == floats
    names = {id(parameter): name for part in parts for name, parameter in part.parameters.items()}
    assert all(names[id(parameter)] == name for name, parameter in model.named_parameters())  # the same objects
