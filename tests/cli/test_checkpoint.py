"""`cornstarch checkpoint`: list, verify and convert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cornstarch.checkpoint import CheckpointStore, state_hash
from cornstarch.checkpoint.reader import convert_checkpoint
from cornstarch.cli import main as command_line

STATE = {"parameters/w": torch.arange(30.0).reshape(10, 3), "step": torch.tensor(3.0), "empty": torch.empty(0, 2)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with one run of two checkpoints."""
    store = CheckpointStore(tmp_path / "runs/demo/checkpoints", keep=3)
    store.save(100, STATE, {"a": 1}, metric=0.25)
    store.save(200, STATE, {"a": 2})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["checkpoint", *arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return int(ended.value.code or 0), said.out + said.err


CHECKPOINTS = Path("runs/demo/checkpoints")
LAST = CHECKPOINTS / "step_00000200"
TENSORS = LAST / "tensors-00001.safetensors"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("folder", ["runs/demo", str(CHECKPOINTS)])
def test_list_shows_every_checkpoint(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "list", folder)
    assert code == 0
    heading, first, second = said.splitlines()
    assert heading.split() == ["step", "metric", "size", "layout", "versions", "files"]
    assert first.split()[:2] == ["100", "0.25"] and second.split()[0] == "200"
    for line in (first, second):
        assert "1 process, full" in line and f"torch {torch.__version__}" in line and "2 complete" in line


def test_list_shows_a_sharded_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    convert_checkpoint(CheckpointStore(CHECKPOINTS, keep=1).verify(200), Path("cut"), "sharded", 4)
    code, said = run(capsys, "list", "cut/step_00000200")
    assert code == 0 and "4 processes, sharded" in said and "5 complete" in said


def test_verify_accepts_intact_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "verify", "runs/demo")
    assert code == 0
    assert [line.partition(",")[0] for line in said.splitlines()] == [
        f"{CHECKPOINTS}/step_{step:08d}: intact" for step in (100, 200)
    ]
    assert run(capsys, "verify", "runs/demo", "--step", "100")[1].count("intact") == 1
    assert run(capsys, "verify", str(LAST))[0] == 0


def test_verify_finds_a_flipped_byte(capsys: pytest.CaptureFixture[str]) -> None:
    flip(TENSORS)
    assert run(capsys, "list", "runs/demo")[0] == 0  # it reads no bytes
    code, said = run(capsys, "verify", "runs/demo")
    assert code == 2 and "step_00000100: intact" in said
    assert f"damaged: {TENSORS} is damaged: its SHA-256" in said
    assert run(capsys, "verify", "runs/demo", "--step", "100")[0] == 0
    assert run(capsys, "verify", "runs/demo", "--step", "200")[0] == 2


def test_a_missing_file_and_a_damaged_manifest_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    TENSORS.unlink()
    flip(CHECKPOINTS / "step_00000100/checkpoint.json")
    for command in ("list", "verify"):
        code, said = run(capsys, command, "runs/demo")
        assert code == 2
        assert f"{TENSORS} is missing" in said and "step_00000100/checkpoint.json" in said


@pytest.mark.parametrize(
    ("options", "form"), [((), "1 process, full"), (("--form", "sharded", "--processes", "3"), "3 processes, sharded")]
)
def test_convert_keeps_every_tensor(options: tuple[str, ...], form: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "convert", "runs/demo", "new", "--step", "100", *options)
    assert code == 0 and said.startswith(f"new/step_00000100: step 100, {form}") and "equal to the original" in said
    found = CheckpointStore("new", keep=1).latest()
    assert found is not None and found.data() == {"a": 1} and found.metric == 0.25
    with found.tensors() as tensors:
        assert state_hash(tensors) == state_hash(STATE)


def test_convert_takes_the_newest_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "convert", "runs/demo", "new")[1].startswith("new/step_00000200")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "none"), "There is no folder none"),
        (("list", "runs"), "runs has no checkpoint"),
        (("verify", "runs/demo", "--step", "7"), "no checkpoint of step 7"),
        (("convert", "runs/demo", "new", "--step", "7"), "no intact checkpoint of step 7"),
        (("convert", "runs/demo", "runs"), "runs exists already"),
        (("convert", "runs/demo", "new", "--form", "local"), "form = 'local'; expected full or sharded"),
        (("convert", "runs/demo", "new", "--processes", "2"), "A full checkpoint is not cut"),
    ],
)
def test_mistakes_end_in_a_message(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(capsys, *arguments)
    assert code == 2 and told.startswith("ConfigError: ") and said in told
    assert not Path("new").exists()


def test_a_damaged_checkpoint_is_not_converted(capsys: pytest.CaptureFixture[str]) -> None:
    flip(TENSORS)
    code, said = run(capsys, "convert", "runs/demo", "new")
    assert code == 2 and "SHA-256" in said
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"]
