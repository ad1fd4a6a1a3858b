"""Weights that go from one run to the next, stage after stage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.checkpoint.weights import CheckpointChoice, initialize_from, open_checkpoint
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import read_metrics
from cornstarch.tasks import build_task
from cornstarch.train import Trainer, export_run, load_config, load_run
from tests.trainer.tiny import quiet, tiny_config, trainer_of

PROJECTOR = {"encoders": {"vision": {"train": "projector"}}, "language_model": {"train": "frozen"}}
ENCODER = {"encoders": {"vision": {"train": "frozen"}}, "language_model": {"train": "full"}}
LORA = {"encoders": {"vision": {"train": "projector"}}, "language_model": {"train": "lora"}}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named_parameters(model).items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor], part: str) -> bool:
    names = [name for name in one if part in name]
    assert names
    return all(torch.equal(one[name], other[name]) for name in names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a first stage, `one`, that has trained the projector, with averages and four evaluations."""
    folder = tmp_path_factory.mktemp("stages")
    tiny_config(folder)
    evaluation = {"evaluation": [{"path": str(folder / "test.json")}]}
    trainer_of(
        tiny_config(folder, f"output={folder / 'one'}", "loop.steps=4", "loop.ema_decay=0.5", "loop.evaluate_every=1",
                    "checkpoint.keep=4", data=evaluation, model=PROJECTOR)
    ).fit()  # fmt: skip
    return folder


def stage(folder: Path, name: str, start: Path | str, model: dict[str, Any], *overrides: str) -> Trainer:
    output = [f"output={folder / name}", f"model.start_from={start}", "loop.steps=2"]
    return trainer_of(tiny_config(folder, *output, *overrides, model=model))


# ------------------------------------------------------------------------------------------------ checkpoints


def test_the_best_the_last_or_a_step_is_opened(folder: Path) -> None:
    evaluations = [line for line in read_metrics(folder / "one/metrics.jsonl") if line["kind"] == "evaluation"]
    best = min(evaluations, key=lambda line: line["loss"])["step"]
    wanted: dict[CheckpointChoice | int, int] = {"best": best, "last": 4, 2: 2}
    assert {which: open_checkpoint(folder / "one", which).step for which in wanted} == wanted
    with pytest.raises(ConfigError, match="has no step 9; it has 1, 2, 3, 4"):
        open_checkpoint(folder / "one", 9)


def test_a_run_without_checkpoints_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        open_checkpoint(tmp_path / "run")


# ------------------------------------------------------------------------------------------------ stages


def test_a_second_stage_begins_with_the_averages_of_the_best_checkpoint(folder: Path) -> None:
    second = stage(folder, "second", folder / "one", ENCODER)
    second.setup()
    with open_checkpoint(folder / "one").tensors() as tensors:
        averages = {name.removeprefix("ema/"): tensors[name] for name in tensors if name.startswith("ema/")}
        found = weights(second.model)
        assert averages and all(torch.equal(found[name], average) for name, average in averages.items())
        assert any(not torch.equal(found[name], tensors[f"parameters/{name}"]) for name in averages)


def test_a_third_stage_has_the_weights_that_the_first_trained(folder: Path, tmp_path: Path) -> None:
    """The second keeps the projector frozen, so its checkpoints do not have it."""
    second = stage(tmp_path, "two", folder / "one", ENCODER, f"data.train={folder / 'train.json'}")
    second.fit()
    third = stage(tmp_path, "three", tmp_path / "two", LORA, f"data.train={folder / 'train.json'}")
    third.setup()
    one, two, three = weights(load_run(folder / "one").task.model), weights(second.model), weights(third.model)
    assert equal(one, three, "projector")
    layer = "model.layers.0.mlp.up_proj"
    adapted = three[f"language_model.base_model.model.{layer}.base_layer.weight"]
    assert torch.equal(adapted, two[f"language_model.{layer}.weight"])
    assert not torch.equal(adapted, one[f"language_model.{layer}.weight"])  # the second has trained it
    third.fit()
    load_run(tmp_path / "three")  # with all that came before it


def test_a_run_starts_from_an_exported_model(folder: Path, tmp_path: Path) -> None:
    export_run(load_run(folder / "one"), tmp_path / "exported", compare=False)
    second = stage(folder, "from export", tmp_path / "exported", ENCODER)
    second.setup()
    assert equal(weights(load_run(folder / "one").task.model), weights(second.model), "")


def test_batch_norm_statistics_are_loaded(tmp_path: Path) -> None:
    """What a norm has counted belongs to the weights."""
    (tmp_path / "rows.json").write_text("[" + ", ".join('{"x": [1.0, 5.0], "y": 0.5}' for _ in range(8)) + "]")
    base = {
        "model": {"factory": {"function": f"{__name__}:normed", "loss": f"{__name__}:error"}},
        "data": {"train": {"path": str(tmp_path / "rows.json"), "format": "rows"}},
        "loop": {"steps": 3}, "logging": {"progress": "none"}, "output": str(tmp_path / "run"),
    }  # fmt: skip
    trainer = Trainer(load_config(None, base=base), console=quiet())
    trainer.fit()
    trained: Any = trainer.model
    fresh: Any = normed()
    initialize_from(fresh, tmp_path / "run")
    assert fresh[0].num_batches_tracked == 3
    assert torch.equal(fresh[0].running_mean, trained[0].running_mean)
    assert torch.equal(fresh[1].weight, trained[1].weight)


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))


def error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean()


# ------------------------------------------------------------------------------------------------ what does not fit


def test_weights_that_do_not_fit_are_refused_and_change_nothing(folder: Path, tmp_path: Path) -> None:
    wider = tiny_config(folder, model={"language_model": {"config": {"hidden_size": 32}}})
    model = build_task(wider).model
    before = weights(model)
    with pytest.raises(ConfigError, match=r"vision_encoder.projector\S+ is \[16, 16\] there, \[32, 16\] here; "):
        initialize_from(model, folder / "one")
    assert equal(before, weights(model), "")


def test_adapters_need_a_model_with_adapters(folder: Path, tmp_path: Path) -> None:
    stage(tmp_path, "adapted", folder / "one", LORA, f"data.train={folder / 'train.json'}").fit()
    with pytest.raises(ConfigError, match=r"lora_\S+ is not in this model; .* and \d+ more. Describe the same parts"):
        stage(tmp_path, "full", tmp_path / "adapted", ENCODER).setup()
    again = stage(tmp_path, "again", tmp_path / "adapted", LORA)
    again.setup()
    assert equal(weights(load_run(tmp_path / "adapted").task.model), weights(again.model), "lora_")
    # Merged they are plain weights.
    export_run(load_run(tmp_path / "adapted"), tmp_path / "exported", compare=False)
    stage(tmp_path, "full", tmp_path / "exported", ENCODER).setup()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.start_from = .*none\n  Expected the folder of a run"):
        initialize_from(nn.Linear(1, 1), tmp_path / "none")


def test_a_run_that_starts_from_itself_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one", tmp_path / "run")
    text = (tmp_path / "run/config.yaml").read_text().replace("start_from: null", f"start_from: {tmp_path / 'run'}")
    (tmp_path / "run/config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="with itself"):
        load_run(tmp_path / "run")
