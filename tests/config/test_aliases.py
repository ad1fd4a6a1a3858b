"""Names of earlier versions and of other tools become the names of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cornstarch.config import LoopConfig, OptimizerConfig, RunConfig
from cornstarch.config.config_file import config_difference, dump_config, load_config
from cornstarch.errors import ConfigError
from cornstarch.plan.validation import as_data

SMALL = {"model": {"language_model": {"path": "llm"}}, "data": {"train": "a.json", "evaluation": "b.json"}}


def value_at(config: RunConfig, key: str) -> Any:
    found: Any = as_data(config)
    for step in key.split("."):
        found = found[step]
    return found


ALIASES = [
    # as it is written, the key, the value
    ("learning_rate: 1e-3", "optimizer.learning_rate", 1e-3),
    ("optimizer: {lr: 1e-3}", "optimizer.learning_rate", 1e-3),
    ("optimizer: {clip: 5}", "optimizer.max_grad_norm", 5.0),
    ("gradient_clip_val: 5", "optimizer.max_grad_norm", 5.0),
    ("max_grad_norm: null", "optimizer.max_grad_norm", None),
    ("optim: adamw_torch", "optimizer.name", "adamw"),
    ("schedule: {final: 0.1}", "schedule.min_lr_ratio", 0.1),
    ("lr_scheduler_type: constant_with_warmup", "schedule.name", "constant"),
    ("warmup_steps: 100", "schedule.warmup", 100.0),
    ("warmup_ratio: 0.1", "schedule.warmup", 0.1),
    ("max_steps: 50", "loop.steps", 50),
    ("max_steps: -1", "loop.steps", None),
    ("num_train_epochs: 3", "loop.epochs", 3.0),
    ("max_epochs: 3", "loop.epochs", 3.0),
    ("loop: {accumulation: 4}", "loop.gradient_accumulation_steps", 4),
    ("gradient_accumulation_steps: 4", "loop.gradient_accumulation_steps", 4),
    ("accumulate_grad_batches: 4", "loop.gradient_accumulation_steps", 4),
    ("loop: {ema: 0.9}", "loop.ema_decay", 0.9),
    ("loop: {evaluate_every: 5, early_stopping: {least: 0.5}}", "loop.early_stopping.min_delta", 0.5),
    ("gradient_checkpointing: true", "loop.activation_checkpointing", True),
    ("eval_steps: 5", "loop.evaluate_every", 5),
    ("save_steps: 5", "checkpoint.every", 5),
    ("save_total_limit: 5", "checkpoint.keep", 5),
    ("logging_steps: 5", "logging.every", 5),
    ("report_to: wandb", "logging.to", ["wandb"]),
    ("report_to: none", "logging.to", []),
    ("data: {split_images: true, train: a.json}", "data.balance_encoders", True),
    ("dataloader_num_workers: 2", "data.workers", 2),
    ("output_dir: here", "output", "here"),
    ("run_name: mine", "name", "mine"),
    ("bf16: true", "precision", "bf16"),
    ("bf16: false", "precision", "auto"),
    ("fp16: true", "precision", "fp16"),
    ("mixed_precision: no", "precision", "fp32"),
    ("precision: bf16-mixed", "precision", "bf16"),
    ("torch_compile: false", "compile", "off"),
]


@pytest.mark.parametrize(("text", "key", "value"), ALIASES)
def test_another_name_sets_the_key(tmp_path: Path, text: str, key: str, value: Any) -> None:
    model = "{language_model: {path: llm}, encoders: {vision: {path: clip}}}"
    (tmp_path / "run.yaml").write_text(f"model: {model}\n{text}\n")
    base = {"data": SMALL["data"]}
    config = load_config(tmp_path / "run.yaml", base=base)
    assert value_at(config, key) == value
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert config_difference(load_config(tmp_path / "again.yaml"), config) == []


OVERRIDES = [
    ("lr=1e-3", "optimizer.learning_rate", 1e-3),
    ("loop.accumulation=2", "loop.gradient_accumulation_steps", 2),
    ("loop={accumulation: 2}", "loop.gradient_accumulation_steps", 2),
    ("bf16=true", "precision", "bf16"),
    ("bf16=false", "precision", "auto"),
    ("max_steps=7", "loop.epochs", None),
]


@pytest.mark.parametrize(("override", "key", "value"), OVERRIDES)
def test_an_override_by_another_name_wins_over_the_file(override: str, key: str, value: Any) -> None:
    base = SMALL | {
        "loop": {"gradient_accumulation_steps": 4, "epochs": 2.0}, "optimizer": {"learning_rate": 1.0}
    }  # fmt: skip
    assert value_at(load_config(None, [override], base), key) == value


def test_two_names_with_different_values_are_refused_with_both_places(tmp_path: Path) -> None:
    text = "model: {language_model: {path: llm}}\ndata: {train: a.json}\nloop:\n  accumulation: 2\n"
    (tmp_path / "run.yaml").write_text(f"{text}  gradient_accumulation_steps: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    message = str(caught.value).replace(f"{tmp_path}/", "")
    assert message.startswith("run.yaml:4  loop.accumulation = 2\n  It is another name of ")
    assert "`gradient_accumulation_steps`, which is 4 (run.yaml:5)" in message
    (tmp_path / "run.yaml").write_text(f"{text}  gradient_accumulation_steps: 2\n")
    assert load_config(tmp_path / "run.yaml").loop.gradient_accumulation_steps == 2


def test_a_mistake_under_another_name_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {language_model: {path: llm}}\ndata: {train: a.json}\n\nlr: fast\n")
    with pytest.raises(ConfigError, match=r"run.yaml:4  optimizer.learning_rate = fast\n  Expected a number above 0."):
        load_config(tmp_path / "run.yaml")


def test_sections_in_python_take_earlier_names() -> None:
    assert LoopConfig.model_validate({"accumulation": 2, "ema": 0.5}) == LoopConfig(
        gradient_accumulation_steps=2, ema_decay=0.5
    )
    with pytest.raises(ValueError, match="`clip` and `max_grad_norm` are the same option"):
        OptimizerConfig.model_validate({"clip": 1.0, "max_grad_norm": 2.0})


def test_the_config_of_an_earlier_run_equals_todays() -> None:
    earlier = SMALL | {
        "optimizer": {"clip": 1.0},
        "schedule": {"final": 0.0},
        "loop": {"accumulation": 2, "ema": None},
        "data": SMALL["data"] | {"split_images": False},
        "parallel": {"modules": {}, "data": {"kind": "zero1"}, "ranks": "auto", "schedule": "1f1b", "verify": "auto"},
    }
    today = SMALL | {"gradient_accumulation_steps": 2, "parallel": {"data": {"kind": "zero1"}}}
    assert config_difference(load_config(None, base=earlier), load_config(None, base=today)) == []
    assert load_config(None, base=earlier) == load_config(None, base=today)
