"""The command line: what it prints, how it ends, and that it does not wait for torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cornstarch.cli import main as command_line
from cornstarch.errors import ConfigError
from cornstarch.train import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `cornstarch` and returns the exit code, stdout and stderr."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            command_line.main(list(arguments))
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run_command


Run = Callable[..., tuple[int, str, str]]


def python(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)


EMPTY = (2).to_bytes(8, "little") + b"{}"  # weights of no model


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(EMPTY)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with two models and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model_folder(tmp_path / "models/llm")
    model_folder(tmp_path / "models/clip")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.json").write_text("[1]")
    (tmp_path / "run.yaml").write_text("model: {language_model: {path: models/llm}}\ndata: {train: data/train.json}\n")
    return tmp_path


# ------------------------------------------------------------------------------------------------ the whole


COMMANDS = [["--help"], ["validate", "--help"], ["init", "--help"], ["doctor", "--help"], ["schema"], ["--version"]]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_quick_commands_do_not_import_torch(arguments: list[str]) -> None:
    heavy = ("torch", "transformers", "numpy")
    code = (
        "import sys\nfrom cornstarch.cli.main import main\n"
        f"try: main({arguments})\n"
        f"finally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    ended = python(code)
    assert ended.returncode == 0
    assert ended.stderr.strip() == "[]"


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for name in ("init", "validate", "schema", "doctor"):
        assert re.search(rf"\b{name}\b", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command"),
        (["schema", "--bogus"], "No such option"),
        (["validate"], "Missing argument"),
        (["init", "--data", "x"], "Missing option"),
    ],
)
def test_wrong_usage_ends_with_two(run: Run, arguments: list[str], message: str) -> None:
    code, _, error = run(*arguments)
    assert code == 2
    assert message in error


def test_a_mistake_ends_with_its_message_and_two(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(command_line, "make_app", lambda: raising(ConfigError("run.yaml:1  a = 1\n  Expected b.")))
    assert run("x") == (2, "", "ConfigError: run.yaml:1  a = 1\n  Expected b.\n")


def test_an_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(command_line, "make_app", lambda: raising(KeyboardInterrupt()))
    assert run("x")[0] == 130


def raising(error: BaseException) -> Callable[..., None]:
    def app(**_: Any) -> None:
        raise error

    return app


def test_an_interrupted_command_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")  # nobody writes it: reading waits
    command = [sys.executable, "-m", "cornstarch", "validate", "run.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    writer, error = None, None
    try:
        while writer is None:  # opens once the command has opened the other end
            try:
                writer = os.open(tmp_path / "run.yaml", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                assert started.poll() is None
        while error is None:
            started.send_signal(signal.SIGINT)
            try:
                _, error = started.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                continue  # it came between opening and reading, and reading waits
    finally:
        started.kill()
        if writer is not None:
            os.close(writer)
    assert started.returncode == 130
    assert "Traceback" not in error


def test_the_package_can_be_run_as_a_module() -> None:
    ended = subprocess.run([sys.executable, "-m", "cornstarch", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout.startswith("cornstarch ")


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["cornstarch"].partition(":")
    assert (module, getattr(command_line, function)) == (command_line.__name__, command_line.main)


# ------------------------------------------------------------------------------------------------ schema


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Say whether a JSON schema accepts a value: the part of the standard that our schema uses."""
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema and not any(accepts(choice, value, root) for choice in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"] or "const" in schema and value != schema["const"]:
        return False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict), "array": isinstance(value, list), "string": isinstance(value, str),
        "integer": isinstance(value, int) and number, "number": number, "boolean": isinstance(value, bool),
        "null": value is None,
    }  # fmt: skip
    if "type" in schema and not kinds[schema["type"]]:
        return False
    if number and not all(
        (value >= schema.get("minimum", value), value <= schema.get("maximum", value),
         value > schema.get("exclusiveMinimum", value - 1), value < schema.get("exclusiveMaximum", value + 1))
    ):  # fmt: skip
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        inner = [*first, *[schema.get("items", {})] * len(value)]
        pairs = zip(inner, value, strict=False)
        low, high = schema.get("minItems", 0), schema.get("maxItems", len(value))
        return low <= len(value) <= high and all(accepts(item, one, root) for item, one in pairs)
    if isinstance(value, dict):
        return set(schema.get("required", [])) <= set(value) and all(
            accepts_key(schema, key, one, root) for key, one in value.items()
        )
    return True


def accepts_key(schema: dict[str, Any], key: str, value: Any, root: dict[str, Any]) -> bool:
    if key in schema.get("properties", {}):
        return accepts(schema["properties"][key], value, root)
    for pattern, inner in schema.get("patternProperties", {}).items():
        if re.search(pattern, key):
            return accepts(inner, value, root)
    others = schema.get("additionalProperties", True)
    return accepts(others, value, root) if isinstance(others, dict) else bool(others)


RIGHT = {"model": {"language_model": {"path": "a"}, "encoders": {"vision": {"path": "b"}}}, "data": {"train": "x"}}
CONFIGS: list[tuple[dict[str, Any], bool]] = [
    (RIGHT, True),
    (RIGHT | {"data": {"train": ["x", {"path": "y", "weight": 2}], "evaluation": {"path": "z"}}}, True),
    (RIGHT | {"optimizer": {"betas": [0.5, 0.5], "clip": None}, "precision": "auto", "output": "x"}, True),
    (
        RIGHT
        | {
            "data": {"train": "x", "evaluation": "y"},
            "loop": {"evaluate_every": 5, "early_stopping": {"patience": 2}},
            "logging": {"to": ["wandb"]},
        },
        True,
    ),
    ({"data": {"train": "x"}}, False),
    (RIGHT | {"sed": 1}, False),
    (RIGHT | {"seed": -1}, False),
    (RIGHT | {"seed": True}, False),
    (RIGHT | {"precision": "fp8"}, False),
    (RIGHT | {"optimizer": {"betas": [0.5]}}, False),
    (RIGHT | {"data": {"train": []}}, False),
    (RIGHT | {"data": {"train": 5}}, False),
    (RIGHT | {"model": {"language_model": {"path": "a"}, "encoders": {"a-b": {"path": "b"}}}}, False),
]


def test_the_schema_accepts_the_same_configs_as_the_reader(run: Run) -> None:
    code, out, _ = run("schema")
    assert code == 0
    schema = json.loads(out)
    for config, right in CONFIGS:
        assert accepts(schema, config, schema) == right, config
        try:
            load_config(None, base=config)
            read = True
        except ConfigError:
            read = False
        assert read == right, config


def test_the_schema_is_valid(run: Run) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(run("schema")[1])
    jsonschema.Draft202012Validator.check_schema(schema)
    for config, right in CONFIGS:
        assert jsonschema.Draft202012Validator(schema).is_valid(config) == right


# ------------------------------------------------------------------------------------------------ validate


def test_a_valid_config_is_summarized(run: Run, here: Path) -> None:
    code, out, error = run("validate", "run.yaml", "loop.steps=7", "model.encoders.vision.path=org/clip")
    assert (code, error) == (0, "")
    for text in ("run.yaml is valid", "models/llm", "org/clip (hub, not checked)", "data/train.json", "7 steps"):
        assert text in out


def test_validating_does_not_import_torch(here: Path) -> None:
    code = (
        "import sys\nfrom cornstarch.cli.main import main\n"
        "try: main(['validate', 'run.yaml', 'data.train=data/{0..1}.tar'])\n"
        "except SystemExit as end: print(end.code, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert python(code, here).stdout.strip() == "2 []"


def test_config_and_files_are_checked_together(run: Run, here: Path) -> None:
    (here / "run.yaml").write_text(
        "model:\n  language_model: {path: models/lm/}\n"
        "  encoders: {vision: {path: ./models/clip, processor: /none/x}}\n"
        "data:\n  train: [data/trian.json, {path: data/train.json, media: media}]\nsed: 1\noutput: run.yaml/x\n"
    )
    code, out, error = run("validate", "run.yaml", "loop.steps=x")
    assert (code, out) == (2, "")
    assert "7 mistakes:" in error
    for text in (
        "run.yaml:2  model.language_model.path = models/lm/",
        "Did you mean models/llm?",
        "run.yaml:3  model.encoders.vision.processor = /none/x",
        "run.yaml:5  data.train.0.path = data/trian.json",
        "Did you mean data/train.json?",
        "run.yaml:5  data.train.1.media = media",
        "run.yaml:6  sed = 1",
        "run.yaml:7  output = run.yaml/x",
        "command line  loop.steps = x",
    ):
        assert text in error


FILES = [
    ("model.language_model.path=data", "The folder has no config.json.", None),
    ("model.language_model.path=half", "no weights", ["half/config.json"]),
    ("model.language_model.path=./none", "There is no such folder, relative to", None),
    ("model.language_model.path=models/llmm", "Did you mean models/llm?", None),
    ("model.language_model.path=models/other", "", None),  # the hub may have it
    ("model.language_model.path=run.yaml", "The path exists, but it is not a folder.", None),
    ("model.language_model.tokenizer=empty", "The folder is empty.", ["empty/"]),
    ("data.train=none.json", "There is no such file", None),
    ("data.train=none/none.json", "The folder none does not exist either.", None),
    ("data.train=void.json", "The file is empty.", ["void.json"]),
    ("data.train=empty", "The folder is empty.", ["empty/"]),
    ("data.train=data/{0..2}.tar", "data/0.tar: There is no such file", None),
    ("data.train=data/{5..2}.tar", "stands for no file", None),
    ("data.train=data/*.tar", "The pattern matches no file", None),
    ("data.train=~/none.json", "`~` is not expanded", None),
    ("data.train=[{path: x, format: callable}]", "Expected a function", None),
    ("data.train=[{path: data/train.json, media: run.yaml}]", "The path exists, but it is not a folder.", None),
    ("output=run.yaml", "run.yaml is a file", None),
    ("optimizer.name=adamw_8bit", "Did you mean `adamw`?", None),
    ("optimizer.name=nobits.optim.AdamW8bit", "The package `nobits` is not installed.", None),
    ("device=gpu", "Did you mean `cuda`?", None),
    ("data.train=some.module:function", "", None),
    ("data.train=data/*.json", "", None),
    ("data.train=data/{0..999999999}.tar", "more than 100,000 files", None),
    ("model.language_model.tokenizer=models/llm", "", None),
    ("output=new/deep/folder", "", None),
]


@pytest.mark.parametrize(("override", "message", "made"), FILES, ids=[row[0] for row in FILES])
def test_files_in_a_config_must_exist(
    run: Run, here: Path, override: str, message: str, made: list[str] | None
) -> None:
    for name in made or []:
        path = here / name
        (path if name.endswith("/") else path.parent).mkdir(exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    code, _, error = run("validate", "run.yaml", override)
    assert code == (2 if message else 0), error
    assert message in error


def test_offline_hub_names_must_be_cached(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    code, _, error = run("validate", "run.yaml", "model.language_model.path=org/llm")
    assert code == 2
    assert "HF_HUB_OFFLINE" in error
    (here / "hub/models--org--llm").mkdir(parents=True)
    assert run("validate", "run.yaml", "model.language_model.path=org/llm")[0] == 0


# ------------------------------------------------------------------------------------------------ init


def test_the_starter_config_is_a_run_and_explains_every_key(run: Run, here: Path) -> None:
    code, out, error = run(
        "init", "--language-model", "models/llm", "--vision", "models/clip", "--audio", "org/whisper",
        "--data", "data/train.json", "--output", "new.yaml",
    )  # fmt: skip
    assert (code, error) == (0, "")
    assert "cornstarch validate new.yaml" in out
    config = load_config(here / "new.yaml")
    assert config.model.language_model is not None
    assert (config.model.language_model.path, config.model.language_model.train) == ("models/llm", "frozen")
    assert {name: part.path for name, part in config.model.encoders.items()} == {
        "vision": "models/clip",
        "audio": "org/whisper",
    }
    assert config == load_config(
        None,
        base={
            "model": {
                "language_model": {"path": "models/llm", "train": "frozen"},
                "encoders": {"vision": {"path": "models/clip"}, "audio": {"path": "org/whisper"}},
            },
            "data": {"train": "data/train.json"},
        },
    )
    lines = (here / "new.yaml").read_text().splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if re.match(r"\s*(- )?\w+:", line):
            assert "  # " in line or before.lstrip().startswith("#"), line
        assert len(line) <= 110
    assert run("validate", "new.yaml")[0] == 0


def test_a_language_model_alone_is_trained(run: Run, here: Path) -> None:
    assert run("init", "--language-model", "models/llm", "--data", "data/train.json", "--output", "a.yaml")[0] == 0
    config = load_config(here / "a.yaml")
    assert config.model.language_model is not None
    assert config.model.language_model.train == "full"


def test_odd_names_survive(run: Run, here: Path) -> None:
    odd = "data/no: 'ä' #1.json"
    (here / odd).write_text("[1]")
    assert run("init", "--language-model", "models/llm", "--data", odd, "--output", "b.yaml")[0] == 0
    assert load_config(here / "b.yaml").data.train[0].path == odd


def test_a_file_is_overwritten_only_with_force(run: Run, here: Path) -> None:
    arguments = ["init", "--language-model", "models/llm", "--data", "data/train.json"]
    before = (here / "run.yaml").read_text()
    code, _, error = run(*arguments)
    assert code == 2
    assert "--force" in error
    assert (here / "run.yaml").read_text() == before
    assert run(*arguments, "--force")[0] == 0
    assert (here / "run.yaml").read_text() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--language-model", "./none", "--data", "none.json"], "2 mistakes:"),
        (["--language-model", "models/llm", "--data", "data/train.json", "--output", "no/a.yaml"], "cannot be written"),
        (["--language-model", "models/llm", "--data", "data/train.json", "--output", "data", "--force"], "be written"),
    ],
)
def test_init_refuses_missing_files(run: Run, here: Path, arguments: list[str], message: str) -> None:
    code, _, error = run("init", *arguments)
    assert code == 2
    assert message in error
