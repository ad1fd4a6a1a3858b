"""Whether the files and folders that a config names are there; no torch, no network, nothing but looking."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from cornstarch.errors import ConfigError
from cornstarch.files import damaged_weights
from cornstarch.train import tree
from cornstarch.train.config import EncoderConfig, LanguageModelConfig, PartConfig, SourceConfig, WholeModelConfig
from cornstarch.train.tree import Mistake, Node

_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[\w.]+")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "cornstarch_model.json")


def path_mistakes(values: Node) -> list[Mistake]:
    """Return what is wrong with the paths in `values`, which may have other mistakes."""
    found = []
    problems = (_model_problems, _data_problems, _output_problems, _optimizer_problems)
    for path, problem in [found for look in problems for found in look(values)]:
        node = tree.descend(values, path)
        where, shown = (node.where, node.shown()) if node is not None else (values.where, None)
        found.append(Mistake(where, tree.dotted(path), shown, problem))
    return found


def is_hub_name(path: str) -> bool:
    """Say whether a path that is not there can be the name of a model on the hub."""
    return not os.path.exists(path) and _HUB_NAME.fullmatch(path) is not None and not ("/" in path and _near(path))


# ------------------------------------------------------------------------------------------------ models


def _model_problems(values: Node) -> Iterator[tuple[tree.Path, str]]:
    for path, part in _parts(values):
        if part.path is not None and (problem := model_problem(part.path, trained=True)):
            yield (*path, "path"), problem
        for name in ("tokenizer", "processor"):
            other = getattr(part, name, None)
            if other is not None and (problem := model_problem(other, trained=False)):
                yield (*path, name), problem
    start = tree.descend(values, ("model", "start_from"))
    if start is not None and isinstance(start.value, str) and not os.path.isdir(start.value):
        yield ("model", "start_from"), _not_there(start.value, "folder")


def _parts(values: Node) -> Iterator[tuple[tree.Path, PartConfig]]:
    """Yield every part that can be understood, whatever is wrong with the others."""
    places: list[tuple[tree.Path, type[PartConfig]]] = [
        (("model", "language_model"), LanguageModelConfig),
        (("model", "whole"), WholeModelConfig),
    ]
    encoders = tree.descend(values, ("model", "encoders"))
    if encoders is not None and isinstance(encoders.value, dict):
        places += [(("model", "encoders", name), EncoderConfig) for name in encoders.value]
    for path, kind in places:
        node = tree.descend(values, path)
        if node is not None and isinstance(node.value, dict):
            try:
                yield path, kind.model_validate(node.plain())
            except ValidationError:
                continue


def model_problem(path: str, trained: bool) -> str:
    """Return what is wrong with the folder or hub name of a model, tokenizer or processor; "" if nothing."""
    if is_hub_name(path):
        if _offline() and not _in_cache(path):
            return "It is no folder here and not in the cache, and HF_HUB_OFFLINE forbids to ask the hub."
        return ""
    if not os.path.isdir(path):
        return _not_there(path, "folder")
    names = set(os.listdir(path))
    if trained and not names & {"config.json", "cornstarch_model.json"}:
        return "The folder has no config.json.\nExpected a folder written by save_pretrained."
    if trained and not any(glob.glob(os.path.join(glob.escape(path), pattern)) for pattern in _WEIGHTS):
        return "The folder has a config.json but no weights (*.safetensors or *.bin)."
    if trained and (problem := damaged_weights(Path(path))):
        return problem
    return "" if names else "The folder is empty."


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _in_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME", os.path.join(os.path.expanduser("~"), ".cache", "huggingface"))
    cache = os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub"))
    return os.path.isdir(os.path.join(cache, f"models--{name.replace('/', '--')}"))


# ------------------------------------------------------------------------------------------------ data


def _data_problems(values: Node) -> Iterator[tuple[tree.Path, str]]:
    for name in ("train", "evaluation"):
        sources = tree.descend(values, ("data", name))
        many = sources.value if sources is not None and isinstance(sources.value, list) else []
        for index, node in enumerate(many):
            try:
                source = SourceConfig.model_validate(node.plain())
            except ValidationError:
                continue
            path = ("data", name, index)
            if problem := data_problem(source):
                yield (*path, "path"), problem
            if source.media is not None and not os.path.isdir(source.media):
                yield (*path, "media"), _not_there(source.media, "folder")


def data_problem(source: SourceConfig) -> str:
    """Return what is wrong with the path of a source of samples; "" if nothing."""
    from cornstarch.train.data.files import expand_braces

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
            return f"It matches no file, seen from {os.getcwd()}."
        if problem := next(filter(None, map(_file_problem, found)), ""):
            return problem if name == path else f"{name}: {problem}"
    return ""


def _file_problem(path: str) -> str:
    if not os.path.exists(path):
        return _not_there(path, "file")
    if os.path.isdir(path):
        return "" if os.listdir(path) else "The folder is empty."
    if not os.access(path, os.R_OK):
        return "The file cannot be read: no permission."
    return "" if os.path.getsize(path) else "The file is empty."


# ------------------------------------------------------------------------------------------------ everything else


def _output_problems(values: Node) -> Iterator[tuple[tree.Path, str]]:
    node = tree.descend(values, ("output",))
    folder = Path(node.value) if node is not None and isinstance(node.value, str) else Path("runs")
    there = next((one for one in (folder, *folder.absolute().parents) if os.path.exists(one)), Path("/"))
    if not there.is_dir():
        yield ("output",), f"{there} is a file; the run needs a folder."
    elif not os.access(there, os.W_OK):
        yield ("output",), f"The run cannot be written: no permission to write in {there.absolute()}."


def _optimizer_problems(values: Node) -> Iterator[tuple[tree.Path, str]]:
    node = tree.descend(values, ("optimizer", "name"))
    package, dot, _ = node.value.partition(".") if node is not None and isinstance(node.value, str) else ("", "", "")
    if dot and package.isidentifier() and find_spec(package) is None:
        yield (
            ("optimizer", "name"),
            f"There is no package `{package}` here.\nInstall it, or use adamw, sgd, torch.optim.…",
        )


def _not_there(path: str, kind: str) -> str:
    """Return that a path is missing, and what is there that looks like it."""
    if os.path.exists(path):
        return f"It is there, but it is no {kind}."
    if path.startswith("~"):
        return f"There is no such {kind}; `~` is not replaced in a config.\nWrite {os.path.expanduser(path)}."
    said = f"There is no such {kind}" + ("." if os.path.isabs(path) else f", seen from {os.getcwd()}.")
    parent = os.path.dirname(path.rstrip("/")) or "."
    if not os.path.isdir(parent):
        return f"{said}\nThe folder {parent} is not there either."
    near = _near(path)
    return f"{said}\nDid you mean {near}?" if near else said


def _near(path: str) -> str:
    """Return what stands in the same folder under a similar name, or an empty text."""
    parent, name = os.path.split(path.rstrip("/"))
    try:
        found = get_close_matches(name, os.listdir(parent or "."), n=1)
    except OSError:
        return ""
    return os.path.join(parent, found[0]) if found else ""
