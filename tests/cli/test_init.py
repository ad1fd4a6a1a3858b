"""What `cornstarch init` tells to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.small_runs import Command

STEPS = ["cornstarch validate {config}", "cornstarch data check {config}", "cornstarch train {config}"]


@pytest.mark.parametrize(("name", "quoted"), [("my.yaml", "my.yaml"), ("my run.yaml", "'my run.yaml'")])
def test_the_next_commands_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, name: str, quoted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "train.json").write_text("[1]")
    code, said, _ = command("init", "--language-model", "org/llm", "--data", "train.json", "--output", name)
    assert code == 0
    head = (tmp_path / name).read_text().partition("\n\n")[0]
    for text in [step.format(config=quoted) for step in STEPS] + ["cornstarch generate runs/run"]:
        assert text in said and f"#   {text}  " in head
    assert command("validate", name)[0] == 0
