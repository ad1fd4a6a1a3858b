"""`cornstarch data check` on a run's own model and data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cornstarch.cli.main import main
from tests.documented.hub import make_hub
from tests.models.local_processors import image


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, five good samples and one whose image is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    hub = make_hub(tmp_path / "hub")
    image().save("a.png")
    talk = [{"from": "human", "value": "<image> What is it ?"}, {"from": "gpt", "value": "A digit ."}]
    names = ["a.png"] * 5 + ["missing.png"]
    Path("train.json").write_text(json.dumps([{"image": name, "conversations": talk} for name in names]))
    config = {
        "model": {
            "language_model": {"path": hub["meta-llama/Llama-3.2-1B"], "train": "frozen"},
            "encoders": {"vision": {"path": hub["openai/clip-vit-base-patch32"], "token": "<image>"}},
        },
        "data": {"train": "train.json", "skip_limit": 0.5},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", *arguments])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out + output.err


def test_tokens_labels_and_broken_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked(capsys, str(run))
    assert code == 0
    assert "Lengths in tokens" in said
    assert "<image>×5" in said  # 2 × 2 patches and the class token
    assert "⟦A digit . </s>⟧" in said
    assert "train.json:6: image missing.png cannot be read" in said


def test_rows_need_no_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked(capsys, str(run), "model.language_model.path=./nowhere", "--rows")
    assert code == 0 and "Lengths in characters" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.language_model.path=./nowhere"], "There is no such folder."),
        (["data.skip_limit=0.1"], "1 of 6 samples are broken"),
        (["data.max_lenght=5"], "Did you mean `max_length`?"),
    ],
)
def test_problems_end_in_a_message(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, said = checked(capsys, str(run), *arguments)
    assert code == 2 and message in said and "Traceback" not in said
