"""Configuration text as a tree whose every value knows where it was written; no torch.

YAML is read more strictly than PyYAML reads it: what readers of YAML disagree about (`no`, `010`, a key given
twice) is refused instead of guessed, and no text, however hostile, costs more than a moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from cornstarch.errors import ConfigError

LARGEST_FILE = 256 * 1024
DEEPEST = 32
MOST_VALUES = 10_000
MOST_SHOWN = 50
LONGEST_SHOWN = 60


Path = tuple[str | int, ...]
"""The way to a value: names of keys, positions in lists."""


class Where(NamedTuple):
    """The place of a value: a file and its line, or what else it comes from."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Where("command line")


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
        """Return the value as ordinary Python data."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def shown(self) -> str | None:
        """Return the value as a message shows it; None for a mapping, which would be too long."""
        if isinstance(self.value, dict):
            return None
        text = self.written
        if text is None:
            text = json.dumps(self.plain(), ensure_ascii=False, default=str)
        return shorten(text)


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with a configuration."""

    where: Where
    key: str
    """`optimizer.learning_rate`; empty for the text as a whole."""
    found: str | None
    text: str
    """What was expected and what to do, one sentence per line."""

    def __str__(self) -> str:
        head = str(self.where)
        if self.key:
            head += f"  {self.key}" if self.found is None else f"  {self.key} = {self.found}"
        return "\n".join([head, *(f"  {line}" for line in self.text.splitlines())])


def raise_mistakes(mistakes: list[Mistake]) -> None:
    """Raise one ConfigError that names every mistake, if there is one."""
    if not mistakes:
        return
    ordered = sorted(mistakes, key=lambda mistake: (mistake.where == COMMAND_LINE, mistake.where.line or 0))
    said = list(dict.fromkeys(str(mistake) for mistake in ordered))
    parts = said[:MOST_SHOWN]
    if len(said) > 1:
        parts.insert(0, f"{len(said)} mistakes:")
    if len(said) > MOST_SHOWN:
        parts.append(f"… and {len(said) - MOST_SHOWN} more")
    raise ConfigError("\n".join(parts))


def shorten(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return `text` on one line, its middle left out if it is long."""
    if len(text) > longest:
        text = f"{text[: longest - 20]}…{text[-19:]}"
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def dotted(path: Path) -> str:
    """Return a path as it is written on the command line: `data.train.0.path`."""
    return ".".join(shorten(str(step), 80) for step in path)


# ------------------------------------------------------------------------------------------------ scalars

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_UNSURE = re.compile(r"(?:yes|no|on|off)", re.IGNORECASE)
_INT = re.compile(r"[-+]?(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)")
_OTHER_BASE = re.compile(r"[-+]?0(?:x[0-9a-fA-F]+|o[0-7]+|b[01]+)")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


# Where a switch can mean only one thing.
_SURE: dict[Path, tuple[str, ...]] = {("compile",): ("off",), ("fp8",): ("off",)}


def scalar(text: str, path: Path = ()) -> str | int | float | bool | None:
    """Return what an unquoted `text` stands for; ValueError, with what to do, where readers of YAML disagree."""
    if text in _SURE.get(path, ()):
        return text
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _UNSURE.fullmatch(text):
        meant = "true" if text.lower() in ("yes", "on") else "false"
        raise ValueError(f'`{text}` is text to some and a switch to others.\nWrite {meant}, or "{text}" for the text.')
    if _INT.fullmatch(text) or _OTHER_BASE.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError("The number is too large.\nWrite .inf if you mean infinity.")
        return number
    if special := _SPECIAL.fullmatch(text):
        return float(f"{special[1] or ''}{special[2] or special[3]}")
    return whole(text)


def _integer(text: str) -> int:
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits[1].isdigit():
        raise ValueError(
            "A leading zero means base 8 to some and nothing to others.\nLeave it out, or put a text in quotes."
        )
    number = int(text.replace("_", ""), 0) if len(digits) <= 70 else 2**64
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"Whole numbers go from {-(2**63)} to {2**63 - 1}.\nPut a text in quotes.")
    return number


def whole(text: str) -> str:
    """Return `text` if it can be stored as UTF-8; ValueError, with what to do, if not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("It holds half a character (a lone surrogate).\nWrite the character itself.") from error
    return text


# ------------------------------------------------------------------------------------------------ YAML


class _Composer(yaml.SafeLoader):
    """PyYAML's composer, with bounds: it recurses once per level, and would die of depth."""

    # Scalars are told apart by `scalar`.
    yaml_implicit_resolvers: dict[Any, Any] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.values = 0

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
            return Node(self._mapping(node, path), where)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.build(item, (*path, index)) for index, item in enumerate(node.value)], where)
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path, where)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Node]:
        built: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._key(key_node, path, line)
            if key is None:
                continue
            here = (*path, key)
            value = self.build(value_node, here, line)
            if key in built:
                said = f"It is given twice, first in line {built[key].where.line}.\nKeep one."
                self._complain(value.where, here, value.shown(), said)
            else:
                built[key] = value
        return built

    def _key(self, node: yaml.Node, path: Path, line: int) -> str | None:
        """Return a key, which is always text (as in JSON); None if it is none."""
        where = _at(self.source, line)
        if not isinstance(node, yaml.ScalarNode):
            self._complain(where, path, None, "A key is a list or a mapping; expected a name.")
            return None
        if node.style is None and node.value in ("", "<<"):
            name = "There is no name before the colon." if not node.value else "Merge keys (`<<`) are not read here."
            self._complain(where, path, None, f"{name}\nWrite every key out.")
            return None
        try:
            return whole(node.value)
        except ValueError as error:
            self._complain(where, path, None, str(error))
            return None

    def _scalar(self, node: yaml.ScalarNode, path: Path, where: Where) -> Node:
        text = node.value
        plain = node.style is None
        written = text if plain else json.dumps(text, ensure_ascii=False)
        try:
            return Node(scalar(text, path) if plain else whole(text), where, written)
        except ValueError as error:
            self._complain(where, path, shorten(written), str(error))
            return Node(None, where, written, broken=True)

    def _complain(self, where: Where, path: Path, found: str | None, text: str) -> None:
        self.mistakes.append(Mistake(where, dotted(path), found, text))


def read_yaml(text: str, source: Where, path: Path = ()) -> tuple[Node | None, list[Mistake]]:
    """Return the tree of a YAML text (None if it cannot be read at all) and what is wrong with it.

    `source` says where the text comes from, and `path` which key it is the value of.
    """
    builder = _Builder(source)
    key = dotted(path)
    found = shorten(text) if path else None
    loader: _Composer | None = None
    try:
        loader = _Composer(text)
        composed = loader.get_single_node()
        if composed is None:
            return None, [Mistake(source, key, found, "It is empty.\nExpected keys such as `model:` and `data:`.")]
        tree = builder.build(composed, path)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        said = f"It holds the control character {error.character:#04x}, which no text has.\nRemove it."
        return None, [Mistake(_at(source, line), key, found, said)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return None, [Mistake(_at(source, mark.line + 1 if mark else None), key, found, _syntax(error))]
    except (ValueError, RecursionError) as error:  # PyYAML: `"\U00110000"`, a version of thousands of digits
        return None, [Mistake(source, key, found, f"It cannot be read as YAML: {shorten(str(error))}")]
    finally:
        if loader is not None:
            loader.dispose()
    return tree, builder.mistakes


def _at(source: Where, line: int | None) -> Where:
    """Return a line of `source`; the command line has none."""
    return source if source == COMMAND_LINE else Where(source.source, line)


_ADVICE: list[tuple[str, str]] = [
    ("'\\t'", "A tab cannot indent.\nUse spaces."),
    ("mapping values are not allowed", "A second `key: value` on one line.\nPut a text that holds `: ` in quotes."),
    ("but found another document", "There are two documents (`---`) in one file.\nKeep one."),
    ("undefined alias", "A `*` begins an alias, and no such anchor was set before.\nPut a text in quotes."),
]


def _syntax(error: yaml.MarkedYAMLError) -> str:
    """Return what is wrong with the YAML itself, in our words where PyYAML's are hard to read."""
    problem = error.problem or "it cannot be parsed"
    for sign, advice in _ADVICE:
        if sign in problem:
            return advice
    context = f" {error.context}" if error.context else ""
    return shorten(f"It cannot be read as YAML: {problem}{context}.", 300)


# ------------------------------------------------------------------------------------------------ other sources


def tree_of(value: Any, where: Where) -> Node:
    """Return the tree of ordinary Python data."""
    if isinstance(value, Mapping):
        return Node({str(key): tree_of(item, where) for key, item in value.items()}, where)
    if isinstance(value, list | tuple):
        return Node([tree_of(item, where) for item in value], where)
    if value is None or isinstance(value, str | int | float | bool):
        return Node(value, where)
    return Node(str(value), where)  # a Path


def merged(lower: Node, upper: Node) -> Node:
    """Return `lower` with everything that `upper` says on top: mappings key by key, all else replaced."""
    if not (isinstance(lower.value, dict) and isinstance(upper.value, dict)):
        return upper
    both = dict(lower.value)
    for key, node in upper.value.items():
        both[key] = merged(both[key], node) if key in both else node
    return Node(both, upper.where)


def descend(node: Node, path: Path) -> Node | None:
    """Return the node at `path`, or None."""
    for step in path:
        if isinstance(node.value, dict) and step in node.value:
            node = node.value[str(step)]
        elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        else:
            return None
    return node
