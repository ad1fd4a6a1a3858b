"""From pydantic's errors to messages for users: every mistake at once, each with its place and a remedy; no torch.

`section` makes a frozen dataclass whose values pydantic checks. `validate_data` reads plain data as such a section, or
as a whole run, and returns the mistakes. A misspelt key is reported, corrected and read again, so that its value is
checked too. A wrong value is reported and left out, so that conflicts between the other options are found too.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Container, Mapping, Set
from difflib import get_close_matches
from functools import wraps
from pathlib import PurePath
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, WrapValidator
from pydantic_core import ErrorDetails

from cornstarch.errors import ConfigError
from cornstarch.plan.schema_words import Path, Schema, alternatives, constants, describe, locate, names_at, schema_of

T = TypeVar("T")

LONGEST_SHOWN = 60
MOST_SHOWN = 50

# Types that are checked strictly in Python as well: `true` and "2" are not numbers. Lists may stand for tuples.
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
NotNegative = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Rate = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Switch = StrictBool
# In Python True == 1, so Literal[0, 1] would accept it.
not_bool = BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)
as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


def or_registered(names: Container[str]) -> WrapValidator:
    """Let a field of a literal type accept registered names too; its schema and messages stay those of the type."""
    return WrapValidator(lambda value, check: value if isinstance(value, str) and value in names else check(value))


_PLAIN_NAME = re.compile(r"[A-Za-z_][\w./-]*")  # a text that every YAML reader takes for a text
_MISSING = object()
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")

# By name here: the names that other tools use for the same thing, where the spelling alone would not lead here.
_NAMES_ELSEWHERE = {
    "language_model": "llm lm text",
    "stages": "pp pp_size pipeline pipeline_parallel num_stages",
    "cp": "sp sp_size cp_size context_parallel sequence_parallel",
    "tp": "tp_size tensor_parallel",
    "ep": "ep_size expert_parallel expert_parallel_size expert_model_parallel_size",
    "zero": "zero_stage",
    "activation_checkpointing": "gradient_checkpointing recompute",
    "precision": "dtype",
    "kind": "strategy type",
    "replicate": "replicas",
    "bucket_mb": "bucket_cap_mb",
    "offload": "cpu_offload",
    "prefetch": "forward_prefetch",
    "wrap": "auto_wrap_policy",
    "wrap_min_parameters": "min_num_params",
    "data": "dp data_parallel",
    "ranks": "placement",
    "shared": "together",
    "own": "separate",
    "first_stage": "replicated",
    "virtual_stages": "vpp virtual_pipeline num_model_chunks",
    "schedule": "pipeline_schedule lr_scheduler",
    "1f1b": "one_f_one_b",
    "zero_bubble": "zb zbh1 zb_h1 zerobubble",
    "fsdp2": "fsdp",
    "bf16": "bfloat16",
    "fp16": "float16 half",
    "fp32": "float32",
    "compression": "gradient_compression comm_hook",
    "quantize": "int8 sign 1bit",
    "outer_learning_rate": "outer_lr",
    "staleness": "tau",
    "every": "local_steps",
    "graph": "topology",
    "exponential": "exp",
    "ring_attn": "ring",
    "all_to_all": "ulysses",
}
OTHER_NAMES = {other: name for name, others in _NAMES_ELSEWHERE.items() for other in others.split()}


# ------------------------------------------------------------------------------------------------ mistakes


class Where(NamedTuple):
    """The place of a value: a file and its line, or another source."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Where("command line")


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with the data."""

    path: Path
    """Empty for a file as a whole."""
    found: str | None
    """The value as a message shows it; None if the key itself is wrong, or the value is a mapping."""
    text: str
    """What was expected and what to do, one sentence per line."""
    where: Where | None = None

    def __str__(self) -> str:
        key = join_path(self.path) if self.found is None else f"{join_path(self.path)} = {self.found}"
        head = "  ".join([*([str(self.where)] if self.where is not None else []), *([key] if self.path else [])])
        return "\n".join([head, *(f"  {line}" for line in self.text.splitlines())])


def raise_mistakes(mistakes: list[Mistake]) -> None:
    """Raise one ConfigError that names every mistake, in the order of the file, if there is one."""
    if not mistakes:
        return
    ordered = sorted(mistakes, key=lambda one: (one.where == COMMAND_LINE, one.where and one.where.line or 0))
    texts = list(dict.fromkeys(map(str, ordered)))
    head = [f"{len(texts)} mistakes:"] if len(texts) > 1 else []
    rest = [f"… and {len(texts) - MOST_SHOWN} more"] if len(texts) > MOST_SHOWN else []
    raise ConfigError("\n".join([*head, *texts[:MOST_SHOWN], *rest]))


def join_path(path: Path) -> str:
    """Return a path as it is written on the command line: `data.train.0.path`."""
    return ".".join(shorten(str(step), 80) for step in path)


def format_value(value: Any) -> str | None:
    """Return a value as a message shows it; None for a mapping or a section, which would be too long."""
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return None
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, int) and abs(value) >= 2**64:  # Python refuses to write out very long numbers
        return "a number of more than 64 bits"
    is_name = isinstance(value, str) and _PLAIN_NAME.fullmatch(value) and value.lower() not in ("true", "false", "null")
    return shorten(value if is_name else json.dumps(value, ensure_ascii=False, default=str))


def shorten(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return `text` on one line, with its middle left out if it is long."""
    if len(text) > longest:
        text = f"{text[: longest - 20]}…{text[-19:]}"
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def nearest(name: str, names: list[str]) -> str | None:
    """Return the most similar of `names`, or None."""
    plain = name[:80].lower().replace("-", "_").replace(" ", "_")
    if OTHER_NAMES.get(plain) in names:
        return OTHER_NAMES[plain]
    return next(iter(get_close_matches(plain, names, n=1, cutoff=0.62)), None)


def suggestion(name: str, names: list[str], path: Path, whole: str = "") -> tuple[str | None, str]:
    """Return the name that was probably meant, and the message about an unknown one; `whole` names the root."""
    section = join_path(path) or whole
    problem = f"There is no `{shorten(name)}`{f' in {section}' if section else ''}."
    meant = nearest(name, names)
    options = f"Expected one of: {', '.join(names)}." if names else "Nothing can be set there."
    return meant, f"{problem}\n{f'Did you mean `{meant}`?' if meant is not None else options}"


# ------------------------------------------------------------------------------------------------ sections


class Conflicts(ValueError):
    """Options of a section that make no sense together."""

    def __init__(self, section: Any) -> None:
        super().__init__("\n".join(f"{join_path(path)}: {text}" for path, text in section.conflicts()))
        self.section = section


@dataclass_transform(frozen_default=True)
def section(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass that pydantic checks, and whose mistakes are a ConfigError.

    Its method `conflicts(broken)` yields (path, message) for options that make no sense together. `broken` has the
    paths of values that are wrong by themselves, about which it says nothing.
    """
    config = ConfigDict(extra="forbid", validate_default=False)
    own_eq, own_repr = kind.__eq__ is not object.__eq__, kind.__repr__ is not object.__repr__
    made: Any = pydantic.dataclasses.dataclass(kind, frozen=True, eq=not own_eq, repr=not own_repr, config=config)
    validated = made.__init__
    names = [field.name for field in dataclasses.fields(made)]

    # Only calls in Python come here: pydantic reads nested data without it, so that paths stay whole.
    @wraps(validated)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        given = dict(zip(names, args, strict=False)) | options
        if len(given) != len(args) + len(options):
            raise TypeError(f"{made.__name__}() got {len(args) + len(options)} arguments for {len(given)} fields")
        try:
            validated(self, **given)  # by name, so that pydantic reports names
        except ValidationError as error:
            mistakes, *_ = explain_errors(error, given, schema_of(made), made.__name__)
            prefix = getattr(made, "SHOWN_AS", (made.__name__,))
            raise_mistakes([dataclasses.replace(one, path=(*prefix, *one.path)) for one in mistakes])

    made.__init__ = __init__
    return made


def check_conflicts(self: T) -> T:
    """Raise `Conflicts` if options of a section make no sense together; for `model_validator(mode="after")`."""
    if next(iter(self.conflicts()), None) is not None:  # type: ignore[attr-defined]
        raise Conflicts(self)
    return self


def as_data(value: Any) -> Any:
    """Return sections, mappings and lists as plain mappings, lists and scalars."""
    if isinstance(value, BaseModel):
        return {name: as_data(getattr(value, name)) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value):
        return {field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


class Validated(NamedTuple):
    """What `validate_data` found."""

    value: Any
    """None if there are mistakes."""
    mistakes: list[Mistake]
    renames: list[tuple[Path, str | None]]
    """Unknown keys, and the names that were read instead; None: the key was left out."""


def validate_data(
    validate: Callable[[Any], Any],
    data: Any,
    schema: Schema,
    whole: str = "",
    broken: Set[Path] = frozenset(),
    advise: Callable[[Path], str | None] = lambda path: None,
) -> Validated:
    """Validate plain data, with a function that returns the section or raises ValidationError; collect every mistake.

    `whole`: what a message calls the whole. `broken`: paths of values that are known to be wrong, about which nothing
    more is said. `advise` returns what to say about an unknown key at a path, where a similar name would mislead.
    """
    data, found, renames = copy.deepcopy(data), list[Mistake](), list[tuple[Path, str | None]]()
    wrong = set(broken)
    while True:
        try:
            value = validate(data)
            return Validated(None if found else value, found, renames)
        except ValidationError as error:
            mistakes, unknown, bad = explain_errors(error, data, schema, whole, wrong, advise)
        reported = {mistake.path for mistake in found}
        found += [mistake for mistake in mistakes if mistake.path not in reported]
        wrong |= bad
        if not unknown:
            break
        for path, meant in unknown:
            parent = descend(data, path[:-1])
            kept = parent.pop(path[-1])
            if meant is not None:
                parent[meant] = kept
        renames += unknown
    # A section with a wrong value was not checked as a whole; without that value it is.
    for path in wrong:
        while path and not isinstance(parent := descend(data, path[:-1]), dict):
            path = path[:-1]  # an item of a list goes with the list
        if path:
            parent.pop(path[-1], None)
    try:
        validate(data)
    except ValidationError as error:
        reported = {mistake.path for mistake in found}
        for detail in error.errors(include_url=False):
            if isinstance(conflicts := detail.get("ctx", {}).get("error"), Conflicts):
                explained = _explain_conflicts(_real_path(detail["loc"], data), conflicts, wrong)
                found += [one for one in explained if one.path not in reported]
    return Validated(None, found, renames)


def descend(data: Any, path: Path) -> Any:
    """Return the value at a path of plain data; `_MISSING` if there is none."""
    for step in path:
        is_item = isinstance(data, list | tuple) and isinstance(step, int) and step < len(data)
        if is_item or (isinstance(data, Mapping) and step in data):
            data = data[step]
        elif dataclasses.is_dataclass(data) and isinstance(step, str) and hasattr(data, step):
            data = getattr(data, step)
        else:
            return _MISSING
    return data


# ------------------------------------------------------------------------------------------------ pydantic's errors


def explain_errors(
    error: ValidationError,
    data: Any,
    schema: Schema,
    whole: str = "",
    broken: Set[Path] = frozenset(),
    advise: Callable[[Path], str | None] = lambda path: None,
) -> tuple[list[Mistake], list[tuple[Path, str | None]], set[Path]]:
    """Return the mistakes, every unknown key with the name that was probably meant, and the paths of wrong values."""
    mistakes: list[Mistake] = []
    unknown: list[tuple[Path, str | None]] = []
    taken: set[Path] = set()
    groups: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        path = _real_path(detail["loc"], data)
        if detail["type"] in _UNKNOWN_KEY:
            # A suggestion takes a moment, and nobody reads thousands.
            if len(unknown) >= MOST_SHOWN:
                name, text = None, "There is no such key."
            elif (advice := advise(path)) is not None:
                name, text = None, f"{suggestion(str(path[-1]), [], path[:-1], whole)[1].splitlines()[0]}\n{advice}"
            else:
                name, text = suggestion(str(path[-1]), names_at(schema, path[:-1]), path[:-1], whole)
            instead = (*path[:-1], name) if name is not None else path
            if instead in taken or (name is not None and descend(data, instead) is not _MISSING):
                name = None
            taken.add(instead)
            unknown.append((path, name))
            mistakes.append(Mistake(path, format_value(descend(data, path)), text))
            continue
        if detail["type"] in ("missing", "missing_argument") and isinstance(detail["loc"][-1], str):
            path = (*path, detail["loc"][-1])
        groups.setdefault(path, []).append(detail)  # a union of types gives an error for each type
    wrong = set()
    for path, group in groups.items():
        if path in taken or path in broken:  # not missing but misspelt; already reported
            continue
        if any(path[:length] in groups for length in range(1, len(path))):  # one type of a union looked into a value
            continue
        if isinstance(conflicts := group[0].get("ctx", {}).get("error"), Conflicts):
            mistakes += _explain_conflicts(path, conflicts, broken)
            continue
        value = descend(data, path)
        found = None if value is _MISSING else format_value(value)
        mistakes.append(Mistake(path, found, _explain_value(path, group, schema, value)))
        if value is not _MISSING and (not isinstance(value, Mapping) or group[0]["type"] != "value_error"):
            wrong.add(path)
    return mistakes, unknown, wrong


def _explain_conflicts(path: Path, conflicts: Conflicts, broken: Set[Path]) -> list[Mistake]:
    inside = {one[len(path) :] for one in broken if one[: len(path)] == path}
    return [
        Mistake((*path, *inner), format_value(descend(conflicts.section, inner)), text)
        for inner, text in conflicts.section.conflicts(inside)
    ]


def _real_path(location: tuple[int | str, ...], data: Any) -> Path:
    """Return the steps of pydantic's location that exist in the data; the others are types in a union, say."""
    path: Path = ()
    for step in location:
        if descend(data, (*path, step)) is not _MISSING:
            path = (*path, step)
    return path


def _explain_value(path: Path, group: list[ErrorDetails], root: Schema, value: Any) -> str:
    detail = group[0]
    if detail["type"] == "value_error":  # a validator's own words
        text = str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
        if "." not in text.split(maxsplit=1)[0]:  # not the name of a key
            text = f"{text[:1].upper()}{text[1:]}"
        return f"{text.rstrip('.')}."
    if detail["loc"][-1:] == ("[key]",):
        pattern = detail.get("ctx", {}).get("pattern")
        return f"The name `{shorten(str(path[-1]))}` cannot be used; it must match {pattern}."
    schema = locate(root, path)
    expected = f"Expected {describe(schema)}." if schema is not None else f"{detail['msg']}."
    if value is _MISSING:
        return f"It is missing.\n{expected}"
    hint = _hint(value, schema or {})
    return f"{expected}\n{hint}" if hint else expected


def _hint(value: Any, schema: Schema) -> str:
    """Return what to write instead, if that is clear."""
    choices = list(alternatives(schema))
    types = {choice.get("type") for choice in choices if not constants(choice)}
    fixed = [str(option) for choice in choices for option in constants(choice)]
    if isinstance(value, str):
        if (near := nearest(value, fixed)) is not None:
            return f"Did you mean `{near}`?"
        if types & {"integer", "number"} and _is_numeric(value):
            return "Leave out the quotes."
        return f"Write a list: [{shorten(value)}]." if "array" in types and "string" not in types else ""
    if isinstance(value, int | float) and "string" in types and not fixed:
        return f'Put a text in quotes: "{format_value(value)}".'
    if isinstance(value, float) and "integer" in types and value.is_integer() and abs(value) < 2**63:
        return f"Write {int(value)}."
    return ""


def _is_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
