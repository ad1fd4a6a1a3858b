"""What is wrong with plain data that should describe a dataclass: every mistake, each with its place; no torch."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from cornstarch.errors import ConfigError

Path = tuple[str | int, ...]
"""The way to a value: names of keys, positions in lists."""

_NAME = re.compile(r"[A-Za-z_][\w./-]*")  # a text that no reader of YAML takes for anything else

LONGEST_SHOWN = 60
MOST_SHOWN = 50

# What the same thing is called elsewhere, where the spelling alone would not lead here.
OTHER_NAMES = {
    "llm": "language_model",
    "lm": "language_model",
    "text": "language_model",
    "pp": "stages",
    "pp_size": "stages",
    "pipeline": "stages",
    "pipeline_parallel": "stages",
    "num_stages": "stages",
    "sp": "cp",
    "sp_size": "cp",
    "cp_size": "cp",
    "context_parallel": "cp",
    "sequence_parallel": "cp",
    "tp_size": "tp",
    "tensor_parallel": "tp",
    "zero_stage": "zero",
    "gradient_checkpointing": "activation_checkpointing",
    "recompute": "activation_checkpointing",
    "dtype": "precision",
    "strategy": "kind",
    "type": "kind",
    "replicas": "replicate",
    "bucket_cap_mb": "bucket_mb",
    "cpu_offload": "offload",
    "forward_prefetch": "prefetch",
    "auto_wrap_policy": "wrap",
    "min_num_params": "wrap_min_parameters",
    "dp": "data",
    "data_parallel": "data",
    "placement": "ranks",
    "together": "shared",
    "separate": "own",
    "replicated": "first_stage",
    "vpp": "virtual_stages",
    "virtual_pipeline": "virtual_stages",
    "num_model_chunks": "virtual_stages",
    "pipeline_schedule": "schedule",
    "one_f_one_b": "1f1b",
    "zb": "zero_bubble",
    "zbh1": "zero_bubble",
    "zb_h1": "zero_bubble",
    "zerobubble": "zero_bubble",
    "fsdp": "fsdp2",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "gradient_compression": "compression",
    "comm_hook": "compression",
    "int8": "quantize",
    "sign": "quantize",
    "1bit": "quantize",
    "outer_lr": "outer_learning_rate",
    "tau": "staleness",
    "local_steps": "every",
    "topology": "graph",
    "exp": "exponential",
    "ring": "ring_attn",
    "ulysses": "all_to_all",
}


class Mistake(NamedTuple):
    """One thing that is wrong with the data."""

    path: Path
    found: str | None
    """The value as a message shows it; None if the key itself is what is wrong, or the value is a mapping."""
    text: str
    """What was expected and what to do, one sentence per line."""

    def __str__(self) -> str:
        head = dotted(self.path) if self.found is None else f"{dotted(self.path)} = {self.found}"
        return "\n".join([head, *(f"  {line}" for line in self.text.splitlines())])


def raise_mistakes(mistakes: list[Mistake]) -> None:
    """Raise one ConfigError that names every mistake, if there is one."""
    if not mistakes:
        return
    said = [str(mistake) for mistake in mistakes[:MOST_SHOWN]]
    if len(mistakes) > 1:
        said.insert(0, f"{len(mistakes)} mistakes:")
    if len(mistakes) > MOST_SHOWN:
        said.append(f"… and {len(mistakes) - MOST_SHOWN} more")
    raise ConfigError("\n".join(said))


def dotted(path: Path) -> str:
    """Return a path as it is written on the command line: `modules.vision.tp`."""
    return ".".join(shorten(str(step)) for step in path)


def shown(value: Any) -> str | None:
    """Return a value as a message shows it; None for a mapping or a section, which would be too long."""
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return None
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, int) and abs(value) >= 2**64:  # Python refuses to write out very long ones
        return "a number of more than 64 bits"
    is_name = isinstance(value, str) and _NAME.fullmatch(value) and value.lower() not in ("true", "false", "null")
    return shorten(value if is_name else json.dumps(value, ensure_ascii=False, default=str))


def shorten(text: str) -> str:
    """Return `text` on one line, its middle left out if it is long."""
    if len(text) > LONGEST_SHOWN:
        text = f"{text[: LONGEST_SHOWN - 20]}…{text[-19:]}"
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def nearest(name: str, names: list[str]) -> str | None:
    """Return the most similar of `names`, or None."""
    plain = name[:80].lower().replace("-", "_").replace(" ", "_")
    if OTHER_NAMES.get(plain) in names:
        return OTHER_NAMES[plain]
    close = get_close_matches(plain, names, n=1, cutoff=0.6)
    return close[0] if close else None


# ------------------------------------------------------------------------------------------------ fields


class Fields(NamedTuple):
    """What data says about the fields of a dataclass."""

    values: dict[str, Any]
    """Those that are right."""
    broken: set[str]
    """The names of those that are given, but wrong."""
    mistakes: list[Mistake]


def read_fields(kind: type, data: Any, path: Path) -> Fields:
    """Look at every key of `data` as a field of a dataclass.

    A misspelt key is told, and its value is then looked at as if the name had been right.
    """
    read = Fields({}, set(), [])
    known = fields_of(kind)
    parts = parts_of(kind)
    if data is None:  # `audio:` with nothing behind it
        return read
    if not isinstance(data, Mapping):
        text = f"Expected a mapping with some of these keys: {', '.join(known)}."
        read.mistakes.append(Mistake(path, shown(data), text))
        read.broken.update(known)
        return read
    for key, value in data.items():
        name: str | None = str(key)
        if name not in known:
            name, text = suggestion(str(key), list(known), path)
            read.mistakes.append(Mistake((*path, str(key)), shown(value), text))
            if name is None or name in data or name in read.values:
                continue
        if name in parts:
            _read_part(read, name, parts[name], value, (*path, str(key)))
            continue
        problem = known[name].problem(value)
        if problem is None:
            read.values[name] = value
        else:
            read.broken.add(name)
            read.mistakes.append(Mistake((*path, str(key)), shown(value), problem))
    return read


class Part(NamedTuple):
    """A field that is a dataclass itself: a section in a section."""

    kind: type
    mistakes: Callable[[Fields, Path], list[Mistake]]
    """Returns what is wrong with its fields, alone and together (`metadata={"mistakes": ...}`)."""


@cache
def parts_of(kind: type) -> dict[str, Part]:
    """Return the fields of a dataclass that are dataclasses themselves, by name."""
    hints = get_type_hints(kind)
    return {
        field.name: Part(hints[field.name], field.metadata.get("mistakes", lambda read, path: read.mistakes))
        for field in dataclasses.fields(kind)
        if dataclasses.is_dataclass(hints[field.name])
    }


def _read_part(read: Fields, name: str, part: Part, value: Any, path: Path) -> None:
    """Look at a section in a section; one that is made already is right."""
    if isinstance(value, part.kind):
        read.values[name] = value
        return
    inner = read_fields(part.kind, value, path)
    if mistakes := part.mistakes(inner, path):
        read.broken.add(name)
        read.mistakes.extend(mistakes)
    else:
        read.values[name] = part.kind(**inner.values)


def suggestion(name: str, names: list[str], path: Path) -> tuple[str | None, str]:
    """Return the name that was probably meant, and what to say about an unknown one."""
    where = f" in {dotted(path)}" if path else ""
    said = f"There is no `{shorten(name)}`{where}."
    meant = nearest(name, names)
    advice = f"Did you mean `{meant}`?" if meant is not None else f"Expected one of: {', '.join(names)}."
    return meant, f"{said}\n{advice}"


class FieldType(NamedTuple):
    """What a field of a dataclass takes: its annotation, and the least number (`metadata={"least": 1}`)."""

    hint: Any
    least: float | None

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with `value`, None if nothing."""
        options = list(_options(self.hint))
        if any(self._fits(value, option) for option in options):
            return None
        expected = f"Expected {_either([word for option in options for word in self._words(option)])}"
        expected += ", or nothing." if type(None) in options else "."
        hint = self._hint(value, options)
        return f"{expected}\n{hint}" if hint else expected

    def _fits(self, value: Any, option: Any) -> bool:
        if get_origin(option) is Literal:
            return any(type(value) is type(choice) and value == choice for choice in get_args(option))
        if get_origin(option) is tuple:
            names = value if isinstance(value, list | tuple) else ()
            if get_args(option)[0] is int:
                return bool(names) and all(self._fits(one, int) for one in names)
            return bool(names) and all(isinstance(one, str) and one for one in names) and len({*names}) == len(names)
        if option is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and float("-inf") < value < float("inf") and self._is_enough(value)
        if option is int:
            return type(value) is int and value < 2**63 and self._is_enough(value)
        return type(value) is option

    def _is_enough(self, value: float) -> bool:
        return self.least is None or value >= self.least

    def _words(self, option: Any) -> list[str]:
        enough = f" of at least {self.least:g}" if self.least is not None else ""
        if option is type(None):
            return []
        if get_origin(option) is Literal:
            return [str(choice) for choice in get_args(option)]
        if get_origin(option) is tuple:
            return [f"a list of numbers{enough}" if get_args(option)[0] is int else "a list of different names"]
        if option is bool:
            return ["true", "false"]
        return [f"a whole number{enough}" if option is int else f"a number{enough}"]

    def _hint(self, value: Any, options: list[Any]) -> str:
        """Return what to write instead, where that can be told."""
        if isinstance(value, str):
            texts = [c for option in options for c in get_args(option) if isinstance(c, str)]
            if (near := nearest(value, texts)) is not None:
                return f"Did you mean `{near}`?"
            if any(get_origin(option) is tuple for option in options):
                return f"Write a list: [{shorten(value)}]."
            if int in options and value.strip().isascii() and value.strip().isdigit():
                return "Leave out the quotes."
        if isinstance(value, float) and int in options and value.is_integer():
            return f"Write {int(value)}."
        return ""


@cache
def fields_of(kind: type) -> dict[str, FieldType]:
    """Return what the fields of a dataclass take, by name."""
    hints = get_type_hints(kind)
    return {field.name: FieldType(hints[field.name], field.metadata.get("least")) for field in dataclasses.fields(kind)}


def _options(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type that `hint` is."""
    if get_origin(hint) in (types.UnionType, Union):
        for option in get_args(hint):
            yield from _options(option)
    else:
        yield hint


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
