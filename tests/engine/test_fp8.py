"""Runs in fp8: near bf16 however they are spread, the same checkpoints, and refused in words where they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cornstarch.config.run_folder import RunFolder
from cornstarch.engine.acceleration import accelerate_model
from cornstarch.errors import ConfigError
from cornstarch.train import RunConfig, load_config, load_run
from tests import zoo
from tests.engine.fp8_runs import NO_DROPOUT, small_on_cpu, train_run
from tests.parity.pool import pool
from tests.trainer.tiny import losses, tiny_config, trainer_of
from tests.versions import compile_counts

NEAR = 0.01  # of the loss, in each of six steps
VISION_LAYERS, LANGUAGE_LAYERS = 6, 7


def near(found: list[float], right: list[float]) -> None:
    assert found == pytest.approx(right, rel=NEAR)
    assert found[-1] < found[0]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with data, and what one process finds in bf16."""
    folder = tmp_path_factory.mktemp("bf16")
    return folder, train_run(str(folder), str(folder / "bf16"))


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_losses_are_near_those_of_bf16(scaling: str, bf16: tuple[Path, dict[str, Any]]) -> None:
    folder, right = bf16
    found = train_run(str(folder), str(folder / scaling), f"fp8={scaling}")
    near(found["losses"], right["losses"])
    assert found["losses"] != right["losses"]
    assert found["told"] == {"vision": VISION_LAYERS, "language_model": LANGUAGE_LAYERS}
    assert found["layers"] == VISION_LAYERS + LANGUAGE_LAYERS
    assert found["parameters"] == right["parameters"]


WAYS = {
    "compiled": ["compile=layers"],
    "in microbatches, computed again": ["loop.gradient_accumulation_steps=2", "loop.activation_checkpointing=true"],
}


@pytest.mark.parametrize("way", WAYS)
def test_with_what_else_a_run_does(way: str, bf16: tuple[Path, dict[str, Any]]) -> None:
    folder, right = bf16
    graphs = compile_counts()["graphs"]
    found = train_run(str(folder), str(folder / way.split(",")[0]), "fp8=rowwise", *WAYS[way])
    near(found["losses"], right["losses"])
    assert (compile_counts()["graphs"] > graphs) == (way == "compiled")
    slower = [note for note in found["notes"] if "slower than in bf16" in note]
    assert bool(slower) == (way != "compiled")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_in_two_processes(kind: str, bf16: tuple[Path, dict[str, Any]]) -> None:
    folder, right = bf16
    for found in pool().run(2, train_run, str(folder), str(folder / kind), "fp8=rowwise", f"parallel.data.kind={kind}"):
        near(found["losses"], right["losses"])
        assert found["layers"] == VISION_LAYERS + LANGUAGE_LAYERS


@pytest.mark.parametrize("more", [[], ["parallel.modules.language_model.tp_sequence=true"]], ids=["tp", "sequence"])
def test_shards_of_tensor_parallelism(more: list[str], bf16: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = bf16
    wider = [f"model.language_model.config.{name}=32" for name in ("hidden_size", "intermediate_size")]
    right = train_run(str(folder), str(tmp_path / "wider"), *wider)
    sizes = ["parallel.modules.vision.tp=1", "parallel.modules.language_model.tp=2", "parallel.ranks=shared", *more]
    pool().renew()  # torch remembers meshes of an earlier job
    for found in pool().run(2, train_run, str(folder), str(tmp_path / "tp"), "fp8=rowwise", *wider, *sizes):
        near(found["losses"], right["losses"])
        assert found["losses"] != right["losses"]
        assert found["told"] == {"vision": VISION_LAYERS, "language_model": LANGUAGE_LAYERS}
    pool().renew()


def test_compiled_under_context_parallelism(bf16: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, right = bf16
    sizes = [f"parallel.modules.{name}.cp=2" for name in ("vision", "language_model")]
    more = [*sizes, "parallel.ranks=shared", "compile=layers", "loop.activation_checkpointing=true"]
    pool().renew()  # torch remembers meshes of an earlier job
    for found in pool().run(2, train_run, str(folder), str(tmp_path / "cp"), "fp8=rowwise", *more):
        near(found["losses"], right["losses"])
        assert found["layers"] == VISION_LAYERS + LANGUAGE_LAYERS
        assert not any("not compiled" in note for note in found["notes"])
        parts = {part["part"]: part for part in found["compiled"]["parts"]}
        assert parts.keys() == {"vision", "language_model"}
        assert all(part["compiled"] and not part["eager"] for part in parts.values())
        assert all(0 < count <= 3 for part in parts.values() for count in part["variants"].values())
    pool().renew()


def test_in_two_stages(bf16: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = bf16
    more = ["loop.gradient_accumulation_steps=2", "model.language_model.config.num_hidden_layers=2"]
    right = train_run(str(folder), str(folder / "two layers"), *more)
    stages = ["parallel.modules.vision.stages=1", "parallel.modules.language_model.stages=2"]
    pool().renew()  # torch remembers meshes of an earlier job
    for found in pool().run(
        2, train_run, str(folder), str(folder / "pp"), "fp8=rowwise", *more, *stages, "parallel.ranks=first_stage"
    ):
        near(found["losses"], right["losses"])
        assert found["told"]["language_model"] == LANGUAGE_LAYERS  # one of two layers
    pool().renew()


def ran(folder: Path, output: str, fp8: str, steps: int) -> dict[int, float]:
    """Train to a step, from where the folder's run is; return the losses of all its steps."""
    rate = ("schedule.name=constant", "schedule.warmup=0")
    options = ("precision=bf16", f"fp8={fp8}", f"loop.steps={steps}", f"output={folder / output}", *rate, *NO_DROPOUT)
    with small_on_cpu():
        trainer_of(tiny_config(folder, *options), allow_changes=True).fit()
    return losses(folder / output)


@pytest.mark.parametrize(("first", "second"), [("rowwise", "off"), ("off", "rowwise")])
def test_a_checkpoint_loads_with_and_without(first: str, second: str, tmp_path: Path) -> None:
    ran(tmp_path, "run", first, 3)
    found, right = ran(tmp_path, "run", second, 6), ran(tmp_path, "plain", "off", 6)
    assert list(found) == list(right) == [1, 2, 3, 4, 5, 6]
    near(list(found.values()), list(right.values()))


def test_what_is_in_fp8_is_told_and_the_model_is_plain_afterwards(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "precision=bf16", "fp8=tensorwise", "loop.steps=2")
    with small_on_cpu():
        trainer_of(config).fit()
    assert RunFolder(tmp_path / "run").read_summary()["precision"] == "bf16 and fp8 (tensorwise)"
    loaded = load_run(tmp_path / "run").task.model
    assert {type(module).__name__ for module in loaded.modules() if isinstance(module, torch.nn.Linear)} == {"Linear"}


# ---------------------------------------------------------------------------------------------------- refusals


def describe_run(*overrides: str) -> RunConfig:
    base = {"model": {"given": "Linear"}, "data": {"train": [{"path": "train_data", "format": "given"}]}}
    return load_config(None, overrides, base={**base, "loop": {"steps": 1}})


@pytest.mark.parametrize(("said", "meant"), [("off", "off"), ("false", "off"), ("rowwise", "rowwise")])
def test_fp8_is_said_as_people_say_it(said: str, meant: str) -> None:
    assert describe_run(f"fp8={said}").fp8 == meant


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision=fp32"], r"`precision` = fp32.*Use bf16 or auto"),
        (["precision=fp16"], r"`precision` = fp16.*set `fp8` to off"),
        (["parallel.modules.model.precision=fp32"], r"`parallel.modules.model.precision` = fp32"),
        (["parallel.modules.model.stages=2", "parallel.schedule=zero_bubble"], r"zero_bubble.*Use 1f1b"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)`fp8` = rowwise with .*{words}"):
        describe_run("fp8=rowwise", *overrides)
    describe_run(*overrides)  # without fp8 it is fine


def test_a_cpu_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "fp8=rowwise", "model.language_model.tokenizer=nowhere"))
    with pytest.raises(ConfigError, match=r"(?s)fp8 = rowwise.*compute capability 8.9.*device is cpu.*precision: bf16"):
        trainer.setup()


def test_a_model_without_large_layers_hears_so() -> None:
    told: list[str] = []
    with small_on_cpu():
        model = zoo.LANGUAGE_MODELS["llama"].build().requires_grad_(False)
        speed = accelerate_model(model, torch.device("cpu"), fp8="rowwise", log=told.append)
    assert speed.fp8 == {} and told == speed.notes and "nothing is computed in fp8" in told[0]
