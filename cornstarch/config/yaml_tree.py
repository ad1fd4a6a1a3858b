"""YAML as a tree whose every value knows its file and line; no torch.

YAML is read more strictly than PyYAML reads it: values that YAML readers disagree about (`no`, `010`, a key given
twice) are refused instead of guessed, and no text, however hostile, takes long to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from cornstarch.plan.validation import COMMAND_LINE, Mistake, Path, Where, raise_mistakes, shorten

LARGEST_FILE = 256 * 1024
DEEPEST = 32
MOST_VALUES = 10_000


@dataclass
class Node:
    """One value of a configuration: a mapping or a list of nodes, or a scalar."""

    value: dict[str, Node] | list[Node] | str | int | float | bool | None
    where: Where
    written: str | None = None
    """A scalar as it was written."""
    broken: bool = False
    """A mistake about it is known, so that its value, None, means nothing."""

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def format_value(self) -> str | None:
        """Return the value as a message shows it; None for a mapping, which would be too long."""
        if isinstance(self.value, dict):
            return None
        text = json.dumps(self.plain(), ensure_ascii=False, default=str) if self.written is None else self.written
        return shorten(text)


_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_AMBIGUOUS = re.compile(r"(?:yes|no|on|off)", re.IGNORECASE)
_INT = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)")
_OTHER_BASE = re.compile(r"[-+]?0(?:x[0-9a-fA-F]+|o[0-7]+|b[01]+)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# Keys for which `off` can mean only one thing.
_UNAMBIGUOUS: dict[Path, tuple[str, ...]] = {("compile",): ("off",), ("fp8",): ("off",), ("mixed_precision",): ("no",)}


def scalar(text: str, path: Path = ()) -> str | int | float | bool | None:
    """Return what an unquoted `text` stands for; ValueError, with what to do, where readers of YAML disagree."""
    if text in _UNAMBIGUOUS.get(path, ()):
        return text
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _AMBIGUOUS.fullmatch(text):
        meant = "true" if text.lower() in ("yes", "on") else "false"
        raise ValueError(f'`{text}` is text to some and a switch to others.\nWrite {meant}, or "{text}" for the text.')
    if _INT.fullmatch(text) or _OTHER_BASE.fullmatch(text):
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits[0] == "0" and digits[1].isdigit():
            raise ValueError(
                "A leading zero means base 8 to some and nothing to others.\nLeave it out, or put a text in quotes."
            )
        whole = int(text.replace("_", ""), 0) if len(digits) <= 70 else 2**64
        if not -(2**63) <= whole < 2**63:
            raise ValueError(f"Whole numbers go from {-(2**63)} to {2**63 - 1}.\nPut a text in quotes.")
        return whole
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError("The number is too large.\nWrite .inf if you mean infinity.")
        return number
    if special := _SPECIAL.fullmatch(text):
        return float(f"{special[1] or ''}{special[2] or special[3]}")
    return check_unicode(text)


def check_unicode(text: str) -> str:
    """Return `text` if it can be stored as UTF-8; ValueError, with what to do, if not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("It holds half a character (a lone surrogate).\nWrite the character itself.") from error
    return text


class _Composer(yaml.SafeLoader):
    """PyYAML's composer, with bounds: it recurses once per level, and would die of depth."""

    # `scalar` tells the types apart.
    yaml_implicit_resolvers: dict[Any, Any] = {}

    depth = values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        self.depth += 1
        self.values += 1
        if self.depth > DEEPEST:
            raise _refusal(f"nested more than {DEEPEST} levels deep", event.start_mark)
        if self.values > MOST_VALUES:
            raise _refusal(f"more than {MOST_VALUES} values", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"the tag `{shorten(str(event.tag))}`; tags are not read here", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=f"found {problem}", problem_mark=mark)


@dataclass
class _Builder:
    """Turns composed YAML into nodes, and collects what is wrong on the way."""

    source: Where
    mistakes: list[Mistake] = field(default_factory=list)
    values: int = 0

    def build(self, node: yaml.Node, path: Path = (), line: int | None = None) -> Node:
        """Return the node of a composed YAML node; an alias is built anew wherever it stands."""
        self.values += 1
        if self.values > MOST_VALUES:
            raise _refusal(f"more than {MOST_VALUES} values once every alias is written out", node.start_mark)
        if len(path) > DEEPEST:  # an alias of something that holds it
            raise _refusal(f"nested more than {DEEPEST} levels deep once every alias is written out", node.start_mark)
        where = _at(self.source, line or node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return Node(self._build_mapping(node, path), where)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.build(item, (*path, index)) for index, item in enumerate(node.value)], where)
        assert isinstance(node, yaml.ScalarNode)
        text, plain = node.value, node.style is None
        written = text if plain else json.dumps(text, ensure_ascii=False)
        try:
            return Node(scalar(text, path) if plain else check_unicode(text), where, written)
        except ValueError as error:
            self.mistakes.append(Mistake(path, shorten(written), str(error), where))
            return Node(None, where, written, broken=True)

    def _build_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Node]:
        built: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            try:  # a key is always text, as in JSON
                if not isinstance(key_node, yaml.ScalarNode):
                    raise ValueError("A key is a list or a mapping; expected a name.")
                key = check_unicode(key_node.value)
                if key_node.style is None and key in ("", "<<"):
                    name = "Merge keys (`<<`) are not read here." if key else "There is no name before the colon."
                    raise ValueError(f"{name}\nWrite every key out.")
            except ValueError as error:
                self.mistakes.append(Mistake(path, None, str(error), _at(self.source, line)))
                continue
            value = self.build(value_node, (*path, key), line)
            if key in built:
                text = f"It is given twice, first in line {built[key].where.line}.\nKeep one."
                self.mistakes.append(Mistake((*path, key), value.format_value(), text, value.where))
            built.setdefault(key, value)
        return built


# In our words where PyYAML's are hard to read: a part of its message, and what to say instead.
_ADVICE = [
    ("'\\t'", "A tab cannot indent.\nUse spaces."),
    ("mapping values are not allowed", "A second `key: value` on one line.\nPut a text that holds `: ` in quotes."),
    ("but found another document", "There are two documents (`---`) in one file.\nKeep one."),
    ("undefined alias", "A `*` begins an alias, and no such anchor was set before.\nPut a text in quotes."),
]


def read_yaml(text: str, source: Where, path: Path = ()) -> tuple[Node | None, list[Mistake]]:
    """Return the tree of a YAML text, the value of the key `path` (None if it cannot be read), and what is wrong."""

    def unreadable(problem: str, where: Where = source) -> tuple[None, list[Mistake]]:
        return None, [Mistake(path, shorten(text) if path else None, problem, where)]

    builder = _Builder(source)
    loader: _Composer | None = None
    try:
        loader = _Composer(text)
        composed = loader.get_single_node()
        if composed is None:
            return unreadable("It is empty.\nExpected keys such as `model:` and `data:`.")
        tree = builder.build(composed, path)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"It holds the control character {error.character:#04x}, which no text has.\nRemove it."
        return unreadable(problem, _at(source, line))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or "it cannot be parsed"
        context = f" {error.context}" if error.context else ""
        plain = shorten(f"It cannot be read as YAML: {problem}{context}.", 300)
        advice = next((advice for sign, advice in _ADVICE if sign in problem), plain)
        return unreadable(advice, _at(source, mark.line + 1 if mark else None))
    except (ValueError, RecursionError) as error:  # PyYAML: `"\U00110000"`, a version of thousands of digits
        return unreadable(f"It cannot be read as YAML: {shorten(str(error))}")
    finally:
        if loader is not None:
            loader.dispose()
    return tree, builder.mistakes


def _at(source: Where, line: int | None) -> Where:
    return source if source == COMMAND_LINE else Where(source.source, line)


def tree_of(value: Any, where: Where) -> Node:
    if isinstance(value, Mapping):
        return Node({str(key): tree_of(item, where) for key, item in value.items()}, where)
    if isinstance(value, list | tuple):
        return Node([tree_of(item, where) for item in value], where)
    if value is None or isinstance(value, str | int | float | bool):
        return Node(value, where)
    return Node(str(value), where)  # a Path


def merge(lower: Node, upper: Node) -> Node:
    """Return `lower` with `upper` on top: mappings are merged key by key, all else is replaced."""
    if not (isinstance(lower.value, dict) and isinstance(upper.value, dict)):
        return upper
    both = dict(lower.value)
    for key, node in upper.value.items():
        both[key] = merge(both[key], node) if key in both else node
    return Node(both, upper.where)


def descend(node: Node, path: Path) -> Node | None:
    for step in path:
        if isinstance(node.value, dict) and step in node.value:
            node = node.value[str(step)]
        elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        else:
            return None
    return node


def find_broken(node: Node, path: Path = ()) -> set[Path]:
    """Return the paths of all values that could not be read."""
    children: dict[Any, Node] = dict(enumerate(node.value)) if isinstance(node.value, list) else {}
    children = node.value if isinstance(node.value, dict) else children
    found = {inner for step, child in children.items() for inner in find_broken(child, (*path, step))}
    return found | {path} if node.broken else found


__all__ = [  # also what every reader of a tree needs
    "LARGEST_FILE", "Mistake", "Node", "Path", "Where", "descend", "find_broken", "merge", "raise_mistakes",
    "read_yaml", "scalar", "tree_of",
]  # fmt: skip
