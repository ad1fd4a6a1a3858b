"""`cornstarch report`: writes the page and prints where it is, or says what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from cornstarch.cli import main as command_line
from tests.report.fake_run import write_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with one run."""
    write_run(tmp_path / "runs/demo", total=20)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["report", *arguments])
    return int(ended.value.code or 0)


def test_the_path_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("runs/demo") == 0
    assert capsys.readouterr().out == "runs/demo/report.html\n"
    assert Path("runs/demo/report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert Path("runs/demo/loss.png").exists()


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("none", "none does not exist; expected the folder of a run"),
        ("runs", "Its folders demo have one: name one of them."),
        ("runs/demo/run.json", "run.json is a file"),
        ("runs/demo/samples", "has no metrics.jsonl"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(folder: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ") and said in error and "Traceback" not in error
