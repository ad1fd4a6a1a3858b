"""`cornstarch layout`: which rank holds what, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cornstarch.plan import Plan
    from cornstarch.train.tree import Mistake, Node


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("layout")(layout)


def layout(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan, or a config with `parallel`: a YAML file.", show_default=False),
    ],
    world: Annotated[int, typer.Option("--world", metavar="N", help="The number of ranks.", show_default=False)],
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", metavar="N", help="Ranks on each node.")] = 8,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Also draw a picture into this file.")
    ] = None,
) -> None:
    """Show which rank holds which part of a model under a plan: module, stage, replica, and its shares.

    Nothing is started, and no GPU is needed. Also told are groups that cross nodes, and what cannot be run yet.
    """
    meant = read_plan_file(plan)  # mistakes are told before anything is drawn
    from cornstarch.plan.layout import Layout
    from cornstarch.plan.picture import as_svg, as_text

    found = Layout.of(meant, world, ranks_per_node)
    print(f"{meant.describe()}\n\n{as_text(found)}")
    if svg is not None:
        _write(svg, as_svg(found))
        print(f"\n{svg}")


def read_plan_file(path: Path) -> Plan:
    """Return the plan in a YAML file; ConfigError that names every mistake, each with its line."""
    from cornstarch.plan.plan import read_plan
    from cornstarch.train import tree

    values, mistakes = _read(path)
    if values is None:
        tree.raise_mistakes(mistakes)
        raise AssertionError("what cannot be read is a mistake")
    key, section = _plan_of(values)
    plan, wrong = read_plan(section.plain())
    for mistake in wrong:
        node = _nearest_node(section, mistake.path)
        if not node.broken:  # already told
            mistakes.append(tree.Mistake(node.where, tree.dotted((*key, *mistake.path)), mistake.found, mistake.text))
    tree.raise_mistakes(mistakes)
    assert plan is not None
    return plan


def _read(path: Path) -> tuple[Node | None, list[Mistake]]:
    """Return the values of a YAML file, None if it cannot be read, and what is wrong with it."""
    from cornstarch.train import tree

    def unreadable(text: str) -> tuple[None, list[Mistake]]:
        return None, [tree.Mistake(tree.Where(str(path)), "", None, text)]

    try:
        with path.open("rb") as file:
            text = file.read(tree.LARGEST_FILE + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return unreadable(f"It is no UTF-8 text ({error.reason}).\nSave the file as UTF-8.")
    except (OSError, ValueError) as error:
        return unreadable(f"It cannot be read: {getattr(error, 'strerror', None) or error}.")
    if len(text) > tree.LARGEST_FILE:
        return unreadable(f"It has more than {tree.LARGEST_FILE} bytes; expected a plan.")
    if not text.strip():
        return unreadable("It is empty.\nExpected keys such as `modules:` and `data:`.")
    values, mistakes = tree.read_yaml(text, tree.Where(str(path)))
    if values is not None and not isinstance(values.value, dict):
        kind = "a list" if isinstance(values.value, list) else "a single value"
        return unreadable(f"It holds {kind}; expected keys such as `modules:` and `data:`.")
    return values, mistakes


def _plan_of(values: Node) -> tuple[tuple[str, ...], Node]:
    """Return the plan in a file and the way to it: the file itself, or the section `parallel` of a config.

    A config without modules there has those of its model.
    """
    from cornstarch.errors import ConfigError
    from cornstarch.train.source import UNDECIDED
    from cornstarch.train.tree import Node, descend, tree_of

    assert isinstance(values.value, dict)
    if not {"parallel", "model"} & {*values.value}:
        return (), values
    section = values.value.get("parallel", Node({}, values.where))
    auto = descend(section, ("auto",))
    if section.value == "auto" or (auto is not None and auto.value is True):
        raise ConfigError(UNDECIDED)
    if section.value is None:
        section = Node({}, section.where)
    if isinstance(section.value, dict):  # how a run goes about it is no part of the plan
        others = ("verify", "auto", "cluster", "costs")
        section = Node({name: node for name, node in section.value.items() if name not in others}, section.where)
    if isinstance(section.value, dict) and "modules" not in section.value:
        modules = tree_of(_modules_of(values.value.get("model")), section.where)
        section = Node({**section.value, "modules": modules}, section.where)
    return ("parallel",), section


def _modules_of(model: Node | None) -> dict[str, Any]:
    """Return the modules of a config's model, with nothing said about them."""
    parts = model.value if model is not None and isinstance(model.value, dict) else {}
    if "language_model" not in parts:
        return {"model": {}}
    encoders = parts["encoders"].value if "encoders" in parts else None
    return {name: {} for name in [*(encoders if isinstance(encoders, dict) else ()), "language_model"]}


def _nearest_node(values: Node, path: tuple[str | int, ...]) -> Node:
    """Return the node at a path, or the last one on the way to it."""
    from cornstarch.train.tree import descend

    for length in range(len(path), 0, -1):
        if (node := descend(values, path[:length])) is not None:
            return node
    return values


def _write(path: Path, text: str) -> None:
    from cornstarch.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {path}: it cannot be written ({error.strerror}).") from error
