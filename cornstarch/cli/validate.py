"""`cornstarch init` writes a starter config with every key explained; `validate` checks a config and the files that it
names, by looking only: no torch, no network; `schema` prints the JSON schema."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cornstarch.cli import ConfigPath, Overrides, read_checked_config
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.config import PartConfig, RunConfig, SourceConfig
    from cornstarch.config import yaml_tree as tree
    from cornstarch.config.yaml_tree import Node
    from cornstarch.plan.validation import Mistake

    _Get = Callable[[tree.Path], Node | None]  # the value at a path of the config, None if there is none

_WIDTH = 110  # of a starter config
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[\w.]+")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # names in configs
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "cornstarch_model.json")


def validate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check a config, and that the files and folders it names exist, and summarize the run.

    `cornstarch data check` checks the contents of the data.
    """
    from rich.console import Console
    from rich.table import Table

    run = read_checked_config(config, overrides)
    table = Table(title=f"{config} is valid", show_header=False, title_justify="left")
    for name, text in summarize(run):
        table.add_row(name, text)
    Console(markup=False, highlight=False).print(table)


def summarize(config: RunConfig) -> list[tuple[str, str]]:
    """Return a few (name, text) rows about a run."""
    loop, optimizer, schedule = config.loop, config.optimizer, config.schedule
    epochs = loop.epochs or 1
    length = f"{loop.steps} steps" if loop.steps is not None else f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
    count = loop.microbatches
    microbatches = f" in {count} microbatches" if count > 1 else ""
    model = config.model
    parts = [(f"{name} encoder", f"{_describe_part(e)}, {e.projector} projector") for name, e in model.encoders.items()]
    if model.factory is not None:
        parts = [("model", model.factory.function)]
    elif model.whole is not None:
        parts = [("model", f"{_describe_part(model.whole)}, task {model.whole.task}")]
    elif model.language_model is not None:
        parts.append(("language model", _describe_part(model.language_model)))
    return [
        ("run", f"{config.name}, seed {config.seed}, output {config.folder}"),
        *parts,
        *[("training data", f"{source.path} ({source.format})") for source in config.data.train],
        *[("evaluation data", f"{source.path} ({source.format})") for source in config.data.evaluation],
        ("samples", f"at most {config.data.max_length} tokens{', packed' if config.data.packing else ''}"),
        ("length", f"{length}, {loop.batch_size} samples per step{microbatches}"),
        ("optimizer", f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {schedule.name}"),
        ("device", f"{config.device}, precision {config.precision}"),
    ]


def _describe_part(part: PartConfig) -> str:
    if part.path is None:
        kind = (part.config or {}).get("model_type", part.class_name or "model")
        source = f"new {kind}, random weights"
    else:
        source = f"{part.path} (hub, not checked)" if is_hub_name(part.path) else part.path
    rate = f", learning rate {part.learning_rate:g}" if part.learning_rate is not None else ""
    return f"{source}, train: {part.train}{rate}"


def schema() -> None:
    """Print the JSON schema of a config. Editors complete and check YAML with it."""
    from cornstarch.config.json_schema import run_schema

    print(json.dumps(run_schema(), indent=2))


def init(
    language_model: Annotated[str, typer.Option(help="Folder or hub name of the language model.", show_default=False)],
    data: Annotated[str, typer.Option(help="The training data: JSON, JSONL, tars.", show_default=False)],
    vision: Annotated[str | None, typer.Option(help="Folder or hub name of a vision encoder.")] = None,
    audio: Annotated[str | None, typer.Option(help="Folder or hub name of an audio encoder.")] = None,
    output: Annotated[Path, typer.Option(help="The config to write.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a starter config: every key with its default and its meaning."""
    from cornstarch.config.config_file import load_config
    from cornstarch.config.yaml_tree import tree_of
    from cornstarch.plan.validation import COMMAND_LINE, raise_mistakes

    encoders = {name: path for name, path in (("vision", vision), ("audio", audio)) if path is not None}
    # With encoders, train only the new projectors first: that is cheap and harms neither model. The second stage is a
    # change of one word.
    values: dict[str, Any] = {
        "model": {
            "encoders": {name: {"path": path} for name, path in encoders.items()},
            "language_model": {"path": language_model, "train": "frozen" if encoders else "full"},
        },
        "data": {"train": [{"path": data}]},
    }
    raise_mistakes(find_path_mistakes(tree_of(values, COMMAND_LINE)))
    config = load_config(None, base=values)
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(format_starter(config, output.name))
    except FileExistsError as error:
        raise ConfigError(f"{output} exists already.\n  Use --force to overwrite it, or --output another.") from error
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.\n  Use --output another path.") from error
    print(f"Wrote {output}. Review it, then run:")
    for command, _ in _list_next_commands(str(output), str(config.folder)):
        print(f"  {command}")


def _list_next_commands(config: str, folder: str) -> list[tuple[str, str]]:
    """Return the commands to run with a config, in order, each with its purpose."""
    name, run = shlex.quote(config), shlex.quote(folder)
    return [
        (f"cornstarch validate {name}", "check the config and the files it names"),
        (f"cornstarch data check {name}", "check the data"),
        (f"cornstarch train {name}", "train; after an interruption the same command resumes"),
        (f"cornstarch generate {run}", "try the trained model"),
    ]


def format_starter(config: Any, name: str) -> str:
    """Return a config as YAML in which every key is explained."""
    from cornstarch.plan.validation import as_data

    commands = _list_next_commands(name, str(config.folder))
    longest = max(len(command) for command, _ in commands)
    head = [
        "# What is trained, on which data, and how. Every key is listed; those that you do not change can be removed.",
        *(f"#   {command:<{longest}}  {purpose}" for command, purpose in commands),
        "",
    ]
    return "\n".join([*head, *_format_section(as_data(config), (), "")]) + "\n"


def _format_section(values: dict[str, Any], path: tuple[str | int, ...], indent: str) -> Iterator[str]:
    from cornstarch.config.config_file import write_data

    for key, value in values.items():
        here = (*path, key)
        if not path and isinstance(value, dict):
            yield ""
        if isinstance(value, dict) and value:
            yield from _add_explanation(f"{indent}{key}:", here, indent)
            yield from _format_section(value, here, f"{indent}  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _add_explanation(f"{indent}{key}:", here, indent)
            for index, item in enumerate(value):
                lines = list(_format_section(item, (*here, index), f"{indent}    "))
                first = next(at for at, line in enumerate(lines) if not line.lstrip().startswith("#"))
                lines[first] = f"{indent}  - {lines[first].lstrip()}"  # a dash before the first key
                yield from lines
        else:
            yield from _add_explanation(f"{indent}{key}: {write_data(value, flow=True).strip()}", here, indent)


def _add_explanation(line: str, path: tuple[str | int, ...], indent: str) -> Iterator[str]:
    """Yield a line with its explanation: behind it if there is room, else above it."""
    text = explain_key(path)
    if len(line) + len(text) + 4 <= _WIDTH:
        yield f"{line}  # {text}"
    else:
        yield from (f"{indent}# {part}" for part in textwrap.wrap(text, _WIDTH - len(indent) - 2))
        yield line


def explain_key(path: tuple[str | int, ...]) -> str:
    """Return the meaning of a key: the documentation of the field, and the values it takes."""
    from cornstarch.config.json_schema import alternatives, describe, locate

    found = locate(path)
    assert found is not None
    choices = list(alternatives(found))
    sections = [choice for choice in choices if "properties" in choice]
    if sections:
        return found.get("description") or sections[0].get("description", "")
    document = found.get("description", "")
    if document and not any("enum" in choice or "enum" in choice.get("items", {}) for choice in choices):
        return document
    if any("patternProperties" in choice for choice in choices):
        return "One section per name."
    expected = describe(found)
    return f"{document} {expected[:1].upper()}{expected[1:]}.".strip()


def find_path_mistakes(values: Node) -> list[Mistake]:
    """Return the mistakes in the paths of a config, which may have other mistakes too."""
    from cornstarch.config import yaml_tree as tree

    found, get = [], partial(tree.descend, values)
    for check in (_check_models, _check_experts, _check_data, _check_output, _check_optimizer):
        for path, problem in check(get):
            node = get(path)
            where, shown = (node.where, node.format_value()) if node is not None else (values.where, None)
            found.append(tree.Mistake(path, shown, problem, where))
    return found


def is_hub_name(path: str) -> bool:
    """Return whether a path that does not exist can be the name of a model on the hub."""
    return not os.path.exists(path) and _HUB_NAME.fullmatch(path) is not None and not ("/" in path and _find_near(path))


def _check_models(get: _Get) -> Iterator[tuple[tree.Path, str]]:
    for path, part in _read_parts(get):
        if part.path is not None and (problem := find_model_problem(part.path, trained=True)):
            yield (*path, "path"), problem
        for name in ("tokenizer", "processor"):
            other = getattr(part, name, None)
            if other is not None and (problem := find_model_problem(other, trained=False)):
                yield (*path, name), problem
    start = get(("model", "start_from"))
    if start is not None and isinstance(start.value, str) and not os.path.isdir(start.value):
        yield ("model", "start_from"), _describe_missing(start.value, "folder")


def _check_experts(get: _Get) -> Iterator[tuple[tree.Path, str]]:
    from cornstarch.plan.expert_options import explain_expert_count

    for path, part in _read_parts(get):
        for name in (path[-1],) if "encoders" in path else ("language_model", "model"):
            node = get(("parallel", "modules", name, "ep"))
            if node is None or type(node.value) is not int or node.value < 2:
                continue
            count = _read_expert_count(part)
            if count is not None and (problem := explain_expert_count(count, node.value)) is not None:
                yield ("parallel", "modules", name, "ep"), f"{problem[:1].upper()}{problem[1:]}"


def _read_expert_count(part: PartConfig) -> int | None:
    """Return how many experts a layer of a model has, as its config says; None if that is not known."""
    config: Any = part.config
    if config is None:
        try:
            config = json.loads((Path(part.path or "") / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # another check reports it, or it is on the hub
            return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    for options in (one for one in (config, inner) if isinstance(one, dict)):
        for key in _EXPERT_COUNTS:
            if type(options.get(key)) is int and options[key] > 0:
                return int(options[key])
    return None


def _read_parts(get: _Get) -> Iterator[tuple[tree.Path, PartConfig]]:
    """Yield every part of the model that can be parsed, whatever is wrong with the others."""
    from pydantic import ValidationError

    from cornstarch.config import EncoderConfig, LanguageModelConfig, WholeModelConfig

    places: list[tuple[tree.Path, type[PartConfig]]] = [
        (("model", "language_model"), LanguageModelConfig),
        (("model", "whole"), WholeModelConfig),
    ]
    encoders = get(("model", "encoders"))
    if encoders is not None and isinstance(encoders.value, dict):
        places += [(("model", "encoders", name), EncoderConfig) for name in encoders.value]
    for path, kind in places:
        node = get(path)
        if node is not None and isinstance(node.value, dict):
            try:
                yield path, kind.model_validate(node.plain())
            except ValidationError:
                continue  # the reader of the config reports it


def find_model_problem(path: str, trained: bool) -> str:
    """Return the problem with a folder or hub name of a model (`trained`), tokenizer or processor; "" if none."""
    from cornstarch.files import find_damaged_weights

    if is_hub_name(path):
        home = os.environ.get("HF_HOME", os.path.join(os.path.expanduser("~"), ".cache", "huggingface"))
        cache = os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))
        is_cached = os.path.isdir(os.path.join(cache, f"models--{path.replace('/', '--')}"))
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE") and not is_cached:
            return "It is neither a folder nor in the cache, and HF_HUB_OFFLINE forbids a download."
        return ""
    if not os.path.isdir(path):
        return _describe_missing(path, "folder")
    names = set(os.listdir(path))
    if trained and not names & {"config.json", "cornstarch_model.json"}:
        return "The folder has no config.json.\nExpected a folder written by save_pretrained."
    if trained and not any(glob.glob(os.path.join(glob.escape(path), pattern)) for pattern in _WEIGHTS):
        return "The folder has a config.json but no weights (*.safetensors or *.bin)."
    if trained and (problem := find_damaged_weights(Path(path))):
        return problem
    return "" if names else "The folder is empty."


def _check_data(get: _Get) -> Iterator[tuple[tree.Path, str]]:
    from pydantic import ValidationError

    from cornstarch.config import SourceConfig

    for name in ("train", "evaluation"):
        sources = get(("data", name))
        for index, node in enumerate(sources.value if sources is not None and isinstance(sources.value, list) else []):
            try:
                source = SourceConfig.model_validate(node.plain())
            except ValidationError:
                continue
            path = ("data", name, index)
            if problem := _find_data_problem(source):
                yield (*path, "path"), problem
            if source.media is not None and not os.path.isdir(source.media):
                yield (*path, "media"), _describe_missing(source.media, "folder")


def _find_data_problem(source: SourceConfig) -> str:
    from cornstarch.data.file_formats import expand_braces

    path = source.path
    is_function = _FUNCTION.fullmatch(path) is not None
    if source.format == "callable" or (source.format == "auto" and is_function and not os.path.exists(path)):
        return "" if is_function else "Expected a function, as `package.module:function`."
    if source.format == "datasets" and is_hub_name(path):
        return ""
    try:
        names = [path] if os.path.exists(path) else [str(name) for name in expand_braces(path)]
    except ConfigError as error:
        return str(error)
    for name in names:
        found = glob.glob(name) if glob.has_magic(name) and not os.path.exists(name) else [name]
        if not found:
            return f"The pattern matches no file, relative to {os.getcwd()}."
        if problem := next(filter(None, map(_find_file_problem, found)), ""):
            return problem if name == path else f"{name}: {problem}"
    return ""


def _find_file_problem(path: str) -> str:
    if not os.path.exists(path):
        return _describe_missing(path, "file")
    if os.path.isdir(path):
        return "" if os.listdir(path) else "The folder is empty."
    if not os.access(path, os.R_OK):
        return "The file cannot be read: no permission."
    return "" if os.path.getsize(path) else "The file is empty."


def _check_output(get: _Get) -> Iterator[tuple[tree.Path, str]]:
    node = get(("output",))
    folder = Path(node.value) if node is not None and isinstance(node.value, str) else Path("runs")
    existing = next((one for one in (folder, *folder.absolute().parents) if os.path.exists(one)), Path("/"))
    if not existing.is_dir():
        yield ("output",), f"{existing} is a file; the run needs a folder."
    elif not os.access(existing, os.W_OK):
        yield ("output",), f"The run cannot be written: no permission to write in {existing.absolute()}."


def _check_optimizer(get: _Get) -> Iterator[tuple[tree.Path, str]]:
    node = get(("optimizer", "name"))
    package, dot, _ = node.value.partition(".") if node is not None and isinstance(node.value, str) else ("", "", "")
    if dot and package.isidentifier() and find_spec(package) is None:
        problem = f"The package `{package}` is not installed.\nInstall it, or use adamw, sgd, torch.optim.…"
        yield ("optimizer", "name"), problem


def _describe_missing(path: str, kind: str) -> str:
    """Return an error text for a path that is missing, with a similar path if there is one."""
    if os.path.exists(path):
        return f"The path exists, but it is not a {kind}."
    if path.startswith("~"):
        return f"There is no such {kind}; `~` is not expanded in a config.\nWrite {os.path.expanduser(path)}."
    text = f"There is no such {kind}" + ("." if os.path.isabs(path) else f", relative to {os.getcwd()}.")
    parent = os.path.dirname(path.rstrip("/")) or "."
    if not os.path.isdir(parent):
        return f"{text}\nThe folder {parent} does not exist either."
    near = _find_near(path)
    return f"{text}\nDid you mean {near}?" if near else text


def _find_near(path: str) -> str:
    """Return a path in the same folder with a similar name, or an empty text."""
    parent, name = os.path.split(path.rstrip("/"))
    try:
        found = get_close_matches(name, os.listdir(parent or "."), n=1)
    except OSError:
        return ""
    return os.path.join(parent, found[0]) if found else ""
