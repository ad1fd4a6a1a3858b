"""A name that was registered is accepted in a config, and the run uses what is registered under it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from cornstarch.attention.backends import (
    ATTENTION_BACKENDS,
    AttentionBackend,
    register_attention_backend,
    run_attention,
)
from cornstarch.attention.mask import MaskSpec
from cornstarch.config.config_file import load_config
from cornstarch.config.sections import OPTIMIZER_NAMES
from cornstarch.data.formats import _SOURCE_FORMATS, open_rows, register_data_source
from cornstarch.engine.optimizer import OPTIMIZERS, register_optimizer
from cornstarch.errors import ConfigError
from cornstarch.metrics.trackers import TRACKERS, TrackedRun, register_tracker
from cornstarch.parallel.context.modes import MODES, GatherAttention, register_context_parallel_mode
from cornstarch.parallel.low_bandwidth.compressed_mean import SCHEMES, CastCodec, register_compression
from cornstarch.plan.data_options import REGISTERED
from cornstarch.schedule import Schedule, make_schedule, register_schedule
from cornstarch.schedule.policies import SCHEDULES
from cornstarch.tasks.conversation import build_causal_lm_task
from cornstarch.tasks.task import TASKS, register_task
from cornstarch.train import Trainer
from tests.models import local_processors
from tests.parity.pool import pool
from tests.trainer.test_pipelined_run import fit_run
from tests.trainer.tiny import tiny_config

NAME = "of_a_test"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget what a test has registered."""
    yield
    forget()


def forget() -> None:
    for registry in (_SOURCE_FORMATS, TRACKERS, MODES, SCHEMES, SCHEDULES, TASKS):
        registry.pop(NAME, None)  # type: ignore[attr-defined]
    ATTENTION_BACKENDS.pop(NamedMask, None)
    if OPTIMIZERS.pop(NAME, None) is not None:
        OPTIMIZER_NAMES.remove(NAME)
    for names in REGISTERED.values():
        names.discard(NAME)


# ------------------------------------------------------------------------------------------------ two processes


def register_a_schedule(used: list[str]) -> dict[str, Any]:
    def build(graph: Any, microbatches: int) -> Schedule:
        used.append("schedule")
        found = make_schedule(graph, microbatches, "gpipe")
        return Schedule(graph, microbatches, NAME, found.actions)

    register_schedule(NAME, build)
    stages = {"vision": {}, "language_model": {"stages": 2}}
    return {"modules": stages, "ranks": "first_stage", "schedule": NAME, "verify": "never"}


def register_a_mode(used: list[str]) -> dict[str, Any]:
    class CountedGather(GatherAttention):
        def __call__(self, *arguments: Any) -> Any:
            used.append("mode")
            return super().__call__(*arguments)

    register_context_parallel_mode(NAME, CountedGather)
    return {"modules": {"model": {"cp": 2, "cp_mode": NAME}}, "verify": "never"}


def register_a_compression(used: list[str]) -> dict[str, Any]:
    def build(how: Any, dtype: torch.dtype) -> CastCodec:
        used.append("compression")
        return CastCodec(torch.bfloat16)

    register_compression(NAME, build)
    return {"data": {"kind": "ddp", "compression": {"kind": NAME}}, "verify": "never"}


def fit_registered(register: Callable[[list[str]], dict[str, Any]], tokenizer: str, folder: str) -> tuple[int, int]:
    """Register on this rank, train for 2 steps, and return the last step and how often the new part was used."""
    used: list[str] = []
    try:
        found = fit_run(register(used), tokenizer, folder, 2)
    finally:
        forget()
    return found["step"], len(used)


@pytest.mark.parametrize("register", [register_a_schedule, register_a_mode, register_a_compression])
def test_a_registered_part_of_a_plan_runs(register: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    local_processors.tokenizer().save_pretrained(tmp_path / "tokenizer")
    for step, used in pool().run(2, fit_registered, register, str(tmp_path / "tokenizer"), str(tmp_path / "run")):
        assert step == 2 and used > 0


# ------------------------------------------------------------------------------------------------ one process


def fit(config: Any) -> int:
    return Trainer(config, console=Console(file=io.StringIO())).fit().step


def test_a_registered_tracker_runs(tmp_path: Path) -> None:
    logged: list[int] = []

    class ListTracker:
        run_id = None

        def __init__(self, run: TrackedRun) -> None:
            pass

        def log(self, step: int, values: dict[str, float]) -> None:
            logged.append(step)

        def close(self, status: str) -> None:
            pass

    register_tracker(NAME, ListTracker)
    assert fit(tiny_config(tmp_path, f"logging.to=[{NAME}]", "loop.steps=2")) == 2
    assert logged[:2] == [1, 2]


def test_a_registered_data_format_runs(tmp_path: Path) -> None:
    def open_verses(config: Any, given: Any) -> Any:
        verses = Path(config.path).read_text().split("\n\n")
        return open_rows(config, [{"text": verse} for verse in verses], "verses")

    register_data_source(NAME, open_verses)
    (tmp_path / "poem").write_text("\n\n".join(["what is it", "a cat", "a dog", "it is loud"] * 2))
    config = tiny_config(tmp_path, f"data.train.0={{path: {tmp_path}/poem, format: {NAME}}}", "loop.steps=2")
    assert config.data.train[0].format == NAME and fit(config) == 2


def test_a_registered_task_runs(tmp_path: Path) -> None:
    built: list[str] = []

    def build(config: Any, inputs: Any) -> Any:
        built.append("task")
        return build_causal_lm_task(config, inputs)

    register_task(NAME, build, ("CAUSAL_LM",), AutoModelForCausalLM)
    (tmp_path / "text.jsonl").write_text('{"text": "what is it"}\n{"text": "a cat"}\n' * 4)
    language_model = tiny_config(tmp_path).model.language_model
    assert language_model is not None
    config = load_config(
        None,
        ["loop.steps=2", "loop.batch_size=4", f"output={tmp_path}/run", "device=cpu", "logging.progress=none"],
        base={
            "model": {
                "whole": {"task": NAME, "config": language_model.config, "tokenizer": str(language_model.tokenizer)}
            },
            "data": {"train": str(tmp_path / "text.jsonl"), "max_length": 32},
        },
    )
    assert fit(config) == 2 and built


def test_a_registered_optimizer_runs(tmp_path: Path) -> None:
    steps: list[int] = []

    class CountedAdam(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            steps.append(len(steps))
            return super().step(closure)

    register_optimizer(NAME, CountedAdam)
    assert fit(tiny_config(tmp_path, f"optimizer.name={NAME}", "loop.steps=2")) == 2
    assert len(steps) >= 2


@dataclass
class NamedMask:
    """The mask of the kernel below."""

    spec: MaskSpec


class NamedBackend(AttentionBackend):
    """A kernel that computes what a dense mask asks for, and counts its calls."""

    name, mask_type, choices, devices = NAME, NamedMask, (NAME,), ("cpu",)
    calls = 0

    def is_available(self, device: torch.device, head_dim: int | None) -> bool:
        return True

    def build_mask(self, spec: MaskSpec) -> NamedMask:
        return NamedMask(spec)

    def supports(self, query: Any, value: Any, options: Any) -> bool:
        return options["dropout"] == 0

    def run(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        type(self).calls += 1
        return run_attention(module, query, key, value, mask.spec.dense(), **options)

    def convert_mask(self, mask: Any, query: Any, key: Any) -> Any:
        return mask.spec.dense()


def test_a_registered_attention_kernel_runs_and_changes_nothing(tmp_path: Path) -> None:
    # Rows of at least a block of tokens, without dropout.
    long = ["data.max_length=192", "data.packing=true", "loop.batch_size=16"]
    long += ["model.language_model.config.attention_dropout=0.0"]
    losses = []
    register_attention_backend(NamedBackend())
    for choice in (NAME, "auto"):
        config = tiny_config(tmp_path, *long, f"attention={choice}", "loop.steps=2", f"output={tmp_path}/{choice}")
        assert fit(config) == 2
        lines = (tmp_path / choice / "metrics.jsonl").read_text().splitlines()
        losses.append([entry["loss"] for entry in map(json.loads, lines) if "loss" in entry])
        if choice == NAME:
            assert NamedBackend.calls >= 2
            NamedBackend.calls = 0
    assert NamedBackend.calls == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 2


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("parallel.schedule", "Expected naive, gpipe, 1f1b, interleaved, zero_bubble or auto."),
        ("parallel.modules.model.cp_mode", "Expected ring_attn, all_to_all or gather."),
        ("parallel.data.compression.kind", "Expected none, bf16, fp16, topk, randomk, quantize or powersgd."),
        ("attention", "Expected auto, flex, sdpa, cudnn or varlen."),
        ("logging.to.0", "Expected tensorboard, trackio, wandb or mlflow."),
        ("data.train.0.format", "Expected auto, llava, sharegpt, text, pairs, rows, webdataset,"),
        ("model.whole.task", "Expected auto, multimodal, causal-lm, seq2seq-lm, masked-lm,"),
    ],
)
def test_a_name_that_nobody_registered_is_refused(key: str, message: str) -> None:
    base = {"model": {"whole": {"path": "x"}}, "data": {"train": "x"}}
    with pytest.raises(ConfigError) as raised:
        load_config(None, [f"{key}={NAME}"], base=base)
    assert f"{key} = {NAME}\n  {message}" in str(raised.value)
