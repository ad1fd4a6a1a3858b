"""A config runs no code that its user has not allowed outside of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cornstarch import allow_code
from cornstarch.cli.main import main
from cornstarch.config import LanguageModelConfig, RunConfig
from cornstarch.config.config_file import dump_config
from cornstarch.config.user_code import ALLOWED, import_named
from cornstarch.errors import ConfigError
from tests.cli.started import start
from tests.trainer.tiny import tiny_config

SECRET = "made by the config"


def config_of(folder: Path, **sections: Any) -> RunConfig:
    return tiny_config(folder).model_copy(update=sections)


def write_run(folder: Path, where: str) -> Path:
    """Write the folder of a run whose config wants to make a file `marker`."""
    (folder / "run").mkdir()
    text = dump_config(tiny_config(folder, "loop.steps=2"))
    command = f"touch {folder}/marker"
    found = RunConfig.model_validate(json.loads(json.dumps(load(text))) | sections_of(where, command))
    (folder / "run/config.yaml").write_text(dump_config(found))
    return folder / "run"


def load(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def sections_of(where: str, command: str) -> dict[str, Any]:
    if where == "model":
        return {"model": {"factory": {"function": "os:system", "arguments": {"command": command}}}}
    source = {"path": "os:system", "arguments": {"command": command}}
    return {"data": {"train": [source], "max_length": 64}}


@pytest.mark.parametrize("where", ["model", "data"])
@pytest.mark.parametrize(
    "command",
    [
        ("generate", "run", "hello"),
        ("export", "run", "exported"),
        ("data", "check", "run/config.yaml"),
        ("estimate", "run/config.yaml", "--gpu", "H100"),
        ("inspect-data", "run/config.yaml"),
        ("train", "run/config.yaml"),
    ],
    ids=lambda command: command[0],
)
def test_a_received_run_folder_runs_nothing(
    where: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    write_run(tmp_path, where)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ALLOWED)
    with pytest.raises(SystemExit) as ended:
        main(list(command))
    said = capfd.readouterr()
    assert not (tmp_path / "marker").exists()
    reads_no_data = (command[0], where) == ("estimate", "data")
    assert ended.value.code == (0 if reads_no_data else 2), said
    assert "Traceback" not in said.out + said.err


def test_a_module_is_allowed_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text(
        "import os\ndef rows():\n    return [{'text': 'a b c d e f', 'id': str(n)} for n in range(8)]\n"
    )
    text = dump_config(tiny_config(tmp_path, "loop.steps=1"))
    data = load(text)
    data["model"].pop("encoders", None)
    data["data"] = {"train": [{"path": "my_rows:rows"}], "max_length": 64}
    (tmp_path / "run.yaml").write_text(dump_config(RunConfig.model_validate(data)))
    environment = {ALLOWED: "[]", "OMP_NUM_THREADS": "1"}
    code, said = start("data", "check", "run.yaml", folder=tmp_path, environment=environment).ended()
    assert code == 2 and "my_rows:rows" in said and "--allow-code my_rows" in said
    allowed = ["data", "check", "run.yaml", "--allow-code", "my_rows"]
    code, said = start(*allowed, folder=tmp_path, environment=environment).ended()
    assert code == 0, said


def test_what_a_module_imports_is_not_its_code() -> None:
    allow_code("tests")
    for path in ("tests.config.test_user_code:os.system", "tests.config.test_user_code:load_from_library"):
        with pytest.raises(ConfigError, match="os is another module|It is code of json"):
            import_named(f"data.train = {path}", path)
    assert import_named("here", "tests.config.test_user_code:load") is load


load_from_library = json.loads


def test_a_part_of_the_name_of_a_package_is_not_the_package() -> None:
    allow_code("test")
    os.environ[ALLOWED] = json.dumps(["test"])
    with pytest.raises(ConfigError, match="--allow-code tests"):
        import_named("here", "tests.config.test_user_code:load")


def test_code_of_models_is_allowed_by_its_folder(tmp_path: Path) -> None:
    part = LanguageModelConfig(path=str(tmp_path), trust_remote_code=True)
    with pytest.raises(ConfigError, match="trust_remote_code = true for (.|\n)*--allow-code"):
        part.may_run_code()
    allow_code(str(tmp_path))
    assert part.may_run_code()
    with pytest.raises(ConfigError, match="trust_remote_code = true for elsewhere"):
        part.may_run_code("elsewhere")
    assert not LanguageModelConfig(path="elsewhere").may_run_code()
