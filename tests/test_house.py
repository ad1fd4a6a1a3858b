"""The rules of the house: names exist once, functions are verbs, nothing is written twice, no file holds two ideas."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "cornstarch"

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 78
# Published import paths have the names of the modules behind them; a command's file has the name of the command.
TWINS = {"__init__.py", "__main__.py", "booster.py"}
COMMANDS = "cli"
BLOCK = 6

NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
IRREGULAR = set(
    "begun bound brought built chosen done drawn found given gone held kept known laid left lent lost made meant met "
    "paid seen sent shown spent spoken taken taught told thought understood woven written".split()
)
# Names that torch gives to its own methods, which ours override or imitate.
NAMES_OF_TORCH = {"elapsed_time", "named_buffers", "named_modules", "named_parameters"}


@cache
def trees() -> dict[str, ast.Module]:
    """Return every file of the package, parsed, by its path."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def find_repeated(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_class_name_exists_once() -> None:
    found = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path}:{node.lineno}")
    assert find_repeated(found) == {}


def test_a_file_name_exists_once() -> None:
    found = defaultdict(list)
    for path in trees():
        room, *_, name = path.split("/") if "/" in path else ("", path)
        if name not in TWINS and room != COMMANDS:
            found[name].append(path)
    assert find_repeated(found) == {}


def is_participle(name: str) -> bool:
    """Say whether a function's name begins with a participle, so that it does not say what the function does."""
    word = name.strip("_").split("_")[0].lower()
    return word in IRREGULAR or (word.endswith("ed") and word not in NO_PARTICIPLES)


def test_participles_are_recognized() -> None:
    assert all(map(is_participle, ("_told", "joined_rows", "trained", "_made")))
    assert not any(map(is_participle, ("seed_all", "feed", "build_plan", "embed_tokens", "read", "is_joined")))


def test_functions_are_verbs_not_participles() -> None:
    found = []
    for path, tree in trees().items():
        for node in functions(tree):
            # A property is a noun, and may have an adjective in front.
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not is_property and node.name not in NAMES_OF_TORCH and is_participle(node.name):
                found.append(f"{path}:{node.lineno} {node.name}")
    assert found == []


def test_no_file_and_no_function_is_too_long() -> None:
    found = []
    for path, tree in trees().items():
        lines = len((PACKAGE / path).read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES_OF_A_FILE:
            found.append(f"{path}: {lines} lines")
        for node in functions(tree):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert found == []


def blocks(text: str) -> list[tuple[int, tuple[str, ...]]]:
    """Return every run of six lines that are not blank, with the number of its first line."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    found = []
    for start in range(len(lines) - BLOCK + 1):
        run = tuple(line for _, line in lines[start : start + BLOCK])
        if sum(len(re.findall(r"\w", line)) > 3 for line in run) == BLOCK:  # a lone bracket is no line
            found.append((lines[start][0], run))
    return found


def test_no_block_of_six_lines_stands_in_two_places() -> None:
    places = defaultdict(list)
    for path in trees():
        for number, run in blocks((PACKAGE / path).read_text(encoding="utf-8")):
            places[run].append(f"{path}:{number}")
    assert {" / ".join(run[:2]): where for run, where in places.items() if len(where) > 1} == {}
