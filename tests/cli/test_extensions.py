"""Parts that do not come with Cornstarch, through the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cornstarch.cli.main import COMMANDS, main
from cornstarch.config.config_file import dump_config
from tests import warm
from tests.cli.started import start
from tests.trainer.tiny import tiny_config

HERE = Path(__file__).parent
PARTS = ["--import", "parts_of_a_user"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    paths = f"{HERE}:{HERE.parents[1]}"
    return {"PYTHONPATH": paths, "USER_LOG": str(tmp_path / "log.jsonl"), "OMP_NUM_THREADS": "1"}


def test_an_imported_module_brings_an_optimizer_a_storage_and_a_launcher(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(tiny_config(tmp_path, "loop.steps=2")))
    options = ["run.yaml", "optimizer.name=sign_sgd", f"checkpoint.folder=logged://{tmp_path}/kept"]
    launch = (*PARTS, "train", *options, "--nproc", "2")
    code, said = start(*launch, folder=tmp_path, environment=environment, python=warm.interpreter()).ended()
    assert code == 0, said
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[0] == {"launched": 2}
    assert all(entry["wrote"].startswith(f"{tmp_path}/kept/") for entry in log[1:]) and len(log) > 2
    assert [folder.name for folder in (tmp_path / "kept").glob("step_*")] == ["step_00000002"]
    assert not (tmp_path / "run/checkpoints").exists()
    code, said = start(*PARTS, "checkpoint", "verify", "run", folder=tmp_path, environment=environment).ended()
    assert code == 0 and "step_00000002" in said
    code, said = start(*PARTS, "train", *options, "--restart", folder=tmp_path, environment=environment).ended()
    assert code == 2 and f"--restart: logged://{tmp_path}/kept (checkpoint.folder) has checkpoints" in said
    more = ["loop.steps=3", "--allow-changes"]
    code, said = start(*PARTS, "train", *options, *more, folder=tmp_path, environment=environment).ended()
    assert code == 0 and "loop.steps: 2 → 3" in said, said
    metrics = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [entry["step"] for entry in metrics if entry["kind"] == "train"] == [1, 2, 3]
    code, said = start("train", *options, folder=tmp_path).ended()
    assert code == 2 and "sign_sgd" in said


def test_a_module_that_cannot_be_imported_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--import", "no_such_module", "layout", "x.yaml"])
    assert ended.value.code == 2
    assert "--import no_such_module: the module cannot be imported" in capsys.readouterr().err


def test_a_command_is_a_file_and_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def greet(name: str) -> None:
        """Greet someone."""
        print(f"Hello {name}")

    module = ModuleType("cornstarch.cli.greeting")
    module.greet = greet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cornstarch.cli.greeting", module)
    monkeypatch.setitem(COMMANDS, "greet", "greeting:greet")
    for arguments, expected in ((["greet", "Ada"], "Hello Ada"), (["--help"], "Greet someone.")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0 and expected in capsys.readouterr().out
