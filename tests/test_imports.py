"""Rooms import only rooms to their right, and private names of torch and transformers stay in compat."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "cornstarch"

# From left to right: a room may import itself and every room to its right (docs/architecture.md).
ORDER = [
    "cli", "demo", "api", "trainer", "verify", "planner", "engine", "health", "launch", "explain", "tasks", "data",
    "metrics", "checkpoint", "cost", "pipeline", "parallel", "report", "kernels", "models", "attention", "config",
    "trees", "plan", "schedule", "compat", "files", "errors", "lazily",
]  # fmt: skip
# Files at the top of the package that are only another door to a room.
DOORS = {"__main__": "cli", "pipeline_template": "pipeline", "booster": "api", "plugin": "api", "train": "api"}
# Packages whose `__init__` publishes lazy names of a room to its left.
PUBLISHING = {"cornstarch.pipeline": "api"}
WITHOUT_COMPAT = {"schedule"}
WITHOUT_TORCH = {"explain", "schedule", "files", "errors", "lazily"}
GUARDED = ("torch", "transformers")


def room_of(module: str) -> str:
    """Return the room of a dotted module name; "" for the package itself, whose names are lazy."""
    parts = module.split(".")
    return DOORS.get(parts[1], parts[1]) if len(parts) > 1 else ""


def list_imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a file, at any depth; `from a import b` yields a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                here = parts if is_package else parts[:-1]
                kept = here[: len(here) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def direction_complaints(room: str, line: int, name: str) -> Iterator[str]:
    """Yield what is wrong with importing `name` into `room`."""
    top = name.split(".")[0]
    if top in GUARDED and room in WITHOUT_TORCH:
        yield f"line {line}: {room} must not import {top}"
    if top != "cornstarch" or name == "cornstarch.__version__":
        return
    target = room_of(name)
    if target not in ORDER:
        yield f"line {line}: imports {name}; import from a room ({', '.join(ORDER)}), not from the package"
    elif target == "compat" and room in WITHOUT_COMPAT:
        yield f"line {line}: {room} must not import compat"
    elif ORDER.index(target) < ORDER.index(room):
        yield f"line {line}: {room} must not import {target}, which stands to its left"


def is_private(dotted: str) -> bool:
    """Say whether a dotted name of a guarded library has a private part."""
    top, *rest = dotted.split(".")
    return top in GUARDED and any(p.startswith("_") and not p.startswith("__") for p in rest)


def library_names(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name of a guarded library stands for: {"F": "torch.nn.functional"}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {short: full for short, full in names.items() if full.split(".")[0] in GUARDED}


def library_attributes(part: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every attribute in `part` that is reached from a guarded library."""
    for node in ast.walk(part):
        path: list[str] = []
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            path.insert(0, root.attr)
            root = root.value
        if path and isinstance(root, ast.Name) and root.id in names:
            yield root.lineno, ".".join([names[root.id], *path])


def library_complaints(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield every private name and every comparison of a version: both belong in compat."""
    names = library_names(tree)
    for line, name in sorted({*list_imported(tree, module, is_package), *library_attributes(tree, names)}):
        if is_private(name):
            yield f"line {line}: {name} is private; reach it through compat"
    for comparison in ast.walk(tree):
        if isinstance(comparison, ast.Compare):
            for line, name in library_attributes(comparison, names):
                if name.endswith(".__version__"):
                    yield f"line {line}: branches on {name}; do that in compat"


def complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return everything that is wrong with one file of the package."""
    tree = ast.parse(source)
    room = PUBLISHING.get(module, room_of(module)) if is_package else room_of(module)
    if room and room not in ORDER:
        return [f"{module} stands in no room; add it to docs/architecture.md and to ORDER in this test"]
    found = []
    if room:
        for line, name in list_imported(tree, module, is_package):
            found += direction_complaints(room, line, name)
    if room != "compat":
        found += library_complaints(tree, module, is_package)
    return list(dict.fromkeys(found))


def test_every_file_keeps_to_the_rules() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("cornstarch", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        source = path.read_text(encoding="utf-8")
        found += [f"{module}, {complaint}" for complaint in complaints(source, module, is_package)]
    assert not found, "\n".join(found)


BAD = [
    ("plan/layout.py", "import cornstarch.models.multimodal_language_model", "plan must not import models"),
    ("plan/layout.py", "from cornstarch.models import x", "plan must not import models"),
    ("plan/layout.py", "from ..models import x", "plan must not import models"),
    ("plan/layout.py", "from .. import models", "plan must not import models"),
    ("plan/layout.py", "def f():\n    from cornstarch.train import Trainer", "plan must not import api"),
    ("plan/layout.py", "import_module('cornstarch.pipeline.split')", "plan must not import pipeline"),
    ("attention/mask.py", "from cornstarch.models import x", "attention must not import models"),
    ("schedule/graph.py", "from cornstarch import compat", "schedule must not import compat"),
    ("schedule/graph.py", "from torch import nn", "schedule must not import torch"),
    ("compat/__init__.py", "import cornstarch.plan.plan", "compat must not import plan"),
    ("errors.py", "from cornstarch.compat import x", "errors must not import compat"),
    ("trainer/a.py", "from cornstarch.api.booster import Booster", "trainer must not import api"),
    ("engine/a.py", "from cornstarch.booster import Booster", "engine must not import api"),
    ("models/a.py", "from cornstarch import MultimodalModel", "not from the package"),
    ("cellar/a.py", "import os", "stands in no room"),
    ("models/a.py", "from torch.distributed._tensor import DTensor", "_tensor.DTensor is private"),
    ("models/a.py", "from torch.nn import _reduction", "torch.nn._reduction is private"),
    ("models/a.py", "import transformers\ntransformers.models._x.y", "transformers.models._x is private"),
    ("models/a.py", "import torch.nn.functional as F\nF._pad(1)", "torch.nn.functional._pad is private"),
    ("models/a.py", "import torch\nif torch.__version__ >= '2.12': pass", "branches on torch.__version__"),
]
GOOD = [
    ("models/a.py", "from cornstarch.attention import MaskSpec\nfrom cornstarch import compat, errors"),
    ("models/a.py", "from .b import c\nfrom . import d\nfrom cornstarch.plan.plan import Plan"),
    ("cli/train.py", "from cornstarch.train import Trainer\nimport cornstarch.report"),
    (
        "booster.py",
        "from cornstarch.engine.model_parts import Part\nfrom cornstarch.api.boosted_model import BoostedModel",
    ),
    ("pipeline_template.py", "from cornstarch.pipeline.template import PipelineTemplate"),
    ("compat/__init__.py", "from torch.distributed._tensor import DTensor\nfrom cornstarch.errors import ConfigError"),
    ("models/a.py", "import torch\nversions = {'torch': torch.__version__}\nmodel._own = torch.zeros(1)"),
]


def module_name(path: str) -> str:
    return "cornstarch." + path.removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize(("path", "source", "complaint"), BAD)
def test_the_checker_finds(path: str, source: str, complaint: str) -> None:
    assert any(complaint in found for found in complaints(source, module_name(path)))


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_the_checker_lets_pass(path: str, source: str) -> None:
    assert complaints(source, module_name(path)) == []


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, cornstarch; dir(cornstarch); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_every_public_name_can_be_imported() -> None:
    import cornstarch

    for name in cornstarch.__all__:
        assert getattr(cornstarch, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        cornstarch.no_such_name  # noqa: B018
