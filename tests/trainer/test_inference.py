"""A run's model after training, loaded and exported from Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cornstarch import MultimodalModel
from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.errors import ConfigError
from cornstarch.train import Trainer, export_run, load_config, load_run
from tests.trainer.tiny import quiet, tiny_config, trainer_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A trainer that has trained in half precision, with a part frozen that is stored nowhere."""
    folder = tmp_path_factory.mktemp("trained")
    frozen = {"encoders": {"vision": {"train": "projector"}}}
    trainer = trainer_of(tiny_config(folder, "precision=bf16", "loop.steps=2", "seed=5", model=frozen))
    trainer.fit()
    return trainer


def test_the_loaded_model_equals_the_trained_one(trained: Trainer) -> None:
    run = load_run(trained.folder.path, "last", "cpu")
    assert (run.step, run.config, run.task.name) == (2, trained.config, "multimodal")
    assert (run.placement.precision, run.placement.device.type) == ("bf16", "cpu")
    assert not any(module.training for module in run.task.model.modules())
    theirs = named_parameters(trained.model)
    for name, parameter in named_parameters(run.task.model).items():
        assert parameter.dtype == theirs[name].dtype and torch.equal(parameter, theirs[name]), name


def test_loading_draws_no_random_numbers(trained: Trainer) -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    load_run(trained.folder.path)
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == expected


def test_half_precision_is_exported_unchanged(trained: Trainer, tmp_path: Path) -> None:
    run = load_run(trained.folder.path)
    difference = export_run(run, tmp_path / "new")
    assert difference is not None and difference <= 3e-2
    exported = dict(MultimodalModel.from_pretrained(tmp_path / "new").named_parameters())
    for name, parameter in named_parameters(run.task.model).items():
        assert exported[name].dtype == parameter.dtype and torch.equal(exported[name], parameter)
    with pytest.raises(ConfigError, match="exists already"):
        export_run(run, tmp_path / "new")
    assert export_run(run, tmp_path / "other", compare=False) is None


def test_an_export_with_other_weights_is_refused(trained: Trainer, tmp_path: Path, monkeypatch: Any) -> None:
    run = load_run(trained.folder.path)
    original = type(run.task).load

    def spoiled(task: Any, folder: Path) -> Any:
        model = original(task, folder)
        with torch.no_grad():
            next(iter(model.language_model.parameters())).mul_(1.5)
        return model

    monkeypatch.setattr(type(run.task), "load", spoiled)
    with pytest.raises(ConfigError, match=r"is not the run's: its logits differ by .* expected at most 3e-02"):
        export_run(run, tmp_path / "new")


def test_a_module_is_exported_with_its_factory(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"x": [1.0, 2.0, 3.0, 4.0], "y": [0.0, 1.0, 0.0, 1.0]}]')
    base = {
        "model": {"factory": {"function": "tests.tasks.small_factory:tied"}},
        "data": {"train": {"path": str(tmp_path / "rows.json"), "format": "rows"}},
        "loop": {"steps": 3, "batch_size": 1}, "logging": {"progress": "none"}, "output": str(tmp_path / "run"),
    }  # fmt: skip
    trainer = Trainer(load_config(None, base=base), console=quiet())
    trainer.fit()
    run = load_run(tmp_path / "run")
    assert export_run(run, tmp_path / "new") == 0
    loaded = run.task.load(tmp_path / "new")
    expected: dict[str, Tensor] = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())


def test_unusable_samples_are_skipped(trained: Trainer, tmp_path: Path) -> None:
    run = load_run(trained.folder.path)
    broken = tmp_path / "broken.json"
    turns = '[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a"}]'
    broken.write_text(f'[{{"image": "none.png", "conversations": {turns}}}]')
    data = run.config.data.model_copy(
        update={"train": [run.config.data.train[0].model_copy(update={"path": str(broken)})]}
    )
    other = type(run)(run.config.model_copy(update={"data": data}), run.task, run.placement, run.step)
    with pytest.raises(ConfigError, match="None of the first samples can be used.*--unchecked"):
        export_run(other, tmp_path / "new")
    assert not (tmp_path / "new").exists()
