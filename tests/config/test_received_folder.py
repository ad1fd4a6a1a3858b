"""A folder that somebody else has made: nothing outside of it is read or written, and what is damaged is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from cornstarch.checkpoint.reader import read_checkpoint
from cornstarch.cli.main import main
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import RunFolder
from cornstarch.data.sample import BrokenSample, SampleError
from cornstarch.errors import ConfigError, escape_controls
from cornstarch.files import check_weight_files, own_digest, replace_file
from cornstarch.metrics.metrics import MetricsFile
from cornstarch.train import Trainer
from tests.trainer.tiny import tiny_config

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("received")
    config = tiny_config(folder, "loop.steps=1", "checkpoint.every=1")
    Trainer(config).fit()
    return config.folder


@pytest.fixture
def received(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "received", symlinks=True))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_links_in_the_place_of_files_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "run").mkdir()
    os.symlink(outside, tmp_path / "run/run.json.tmp")
    RunFolder(tmp_path / "run").write_summary({"step": 1})
    assert outside.read_text() == "mine"
    assert RunFolder(tmp_path / "run").read_summary() == {"step": 1}
    os.symlink(outside, tmp_path / "run/config.yaml")
    replace_file(tmp_path / "run/config.yaml", b"new")
    assert outside.read_text() == "mine" and (tmp_path / "run/config.yaml").read_text() == "new"
    os.symlink(outside, tmp_path / "run/metrics.jsonl")
    with pytest.raises(ConfigError, match="metrics.jsonl is a link"):
        MetricsFile(tmp_path / "run/metrics.jsonl")
    assert outside.read_text() == "mine"


def test_an_index_of_weights_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    with pytest.raises(ConfigError, match="names the file '../secret.safetensors', which does not lie"):
        check_weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(DEEP)
    with pytest.raises(ConfigError, match="is damaged: it is not JSON"):
        check_weight_files(tmp_path)


def test_names_of_files_do_not_reach_the_terminal_as_commands(capsys: Any) -> None:
    name = "photo\x1b]0;owned\x07\x9b31m.png"
    said = str(BrokenSample.of(name, SampleError(f"image {name} is damaged")))
    assert said == r"photo\x1b]0;owned\x07\x9b31m.png: image photo\x1b]0;owned\x07\x9b31m.png is damaged"
    assert escape_controls("two\nlines\tand é 猫") == "two\nlines\tand é 猫"
    assert run("estimate", "no\x1b[31msuch.yaml") == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "..", "..."])
def test_a_name_of_dots_is_no_name(name: str, tmp_path: Path) -> None:
    data = tiny_config(tmp_path).model_dump(mode="json") | {"name": name}
    with pytest.raises(ValueError, match="name"):
        RunConfig.model_validate(data)
    assert RunConfig.model_validate(data | {"name": "v1.5"}).name == "v1.5"


def checkpoint_of(run_folder: Path) -> Path:
    return next((run_folder / "checkpoints").glob("step_*"))


def test_a_manifest_without_a_layout_is_damaged(received: Path, capsys: Any) -> None:
    folder = checkpoint_of(received)
    content = json.loads((folder / "checkpoint.json").read_text()) | {"layout": {}}
    content["sha256"] = own_digest(content)
    (folder / "checkpoint.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    with pytest.raises(ConfigError, match="checkpoint.json is damaged: layout is {}"):
        read_checkpoint(folder)
    assert run("checkpoint", "list", str(received)) == 2


@pytest.mark.parametrize("data", ["[]", "3", DEEP])
def test_data_of_another_kind_are_damaged(data: str, received: Path) -> None:
    folder = checkpoint_of(received)
    (folder / "data.json").write_text(data)
    with pytest.raises(ConfigError, match="data.json is damaged"):
        read_checkpoint(folder).data()


@pytest.mark.parametrize("file", ["run.json", "config.json", "tokenizer_config.json"])
def test_files_that_are_nested_too_deeply_are_named(file: str, received: Path, tmp_path: Path, capsys: Any) -> None:
    if file == "run.json":
        (received / file).write_text(DEEP)
        assert run("report", str(received)) == 0  # says what it could not read
        assert "could not be read" in (received / "report.html").read_text()
        return
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / file).write_text(DEEP)
    part = {"language_model": {"path": str(model)}}
    config = tiny_config(tmp_path).model_dump(mode="json", exclude_none=True) | {"model": part}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert run("train", str(tmp_path / "run.yaml")) == 2
    said = capsys.readouterr().err
    assert "model.language_model" in said and "Traceback" not in said
