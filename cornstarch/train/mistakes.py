"""What pydantic found, told as a user needs it: place, value, what was expected, the nearest valid name; no torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cornstarch.train.schema import alternatives, describe, leaves, locate, names_at
from cornstarch.train.tree import MOST_SHOWN, Mistake, Node, Path, descend, dotted, shorten

# What the same thing is called elsewhere, where the spelling alone would not lead here.
OTHER_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulation",
    "grad_accum": "accumulation",
    "max_grad_norm": "clip",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "num_workers": "workers",
    "max_seq_length": "max_length",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "output_dir": "output",
    "llm": "language_model",
    "eval": "evaluation",
    "gradient_checkpointing": "activation_checkpointing",
    "lr_scheduler": "schedule",
    "save_steps": "every",
    "logging_steps": "every",
}
# What other programs have a section for, and where the same is said here.
OTHER_PLACES = {
    "deepspeed": "parallel.data.kind: zero1, zero2 or zero3",
    "fsdp": "parallel.data.kind: fsdp2",
    "fsdp_config": "parallel.data",
    "ddp": "parallel.data.kind: ddp",
    "strategy": "parallel.data.kind",
    "accelerator": "device",
    "bf16": "precision: bf16",
    "fp16": "precision: fp16",
    "report_to": "logging.to",
}


def explain(error: ValidationError, tree: Node) -> tuple[list[Mistake], list[tuple[Path, str | None]]]:
    """Return the mistakes, and every unknown key with the name in the same section that was probably meant."""
    details = error.errors(include_url=False)
    unknown = [real_path(detail["loc"], tree) for detail in details if detail["type"] == "extra_forbidden"]
    meant: list[tuple[Path, str | None]] = []
    taken: set[Path] = set()
    mistakes = []
    for number, path in enumerate(unknown):
        # A suggestion takes a moment, and nobody reads thousands.
        name, advice = _suggest(path, tree) if number < MOST_SHOWN else (None, "There is no such key.")
        if name is not None and (*path[:-1], name) in taken:
            name = None
        taken |= {(*path[:-1], name)} if name is not None else set()
        meant.append((path, name))
        mistakes.append(_mistake(path, tree, advice))
    for path, group in _by_path(details, tree).items():
        node = descend(tree, path)
        if path not in taken and not (node is not None and node.broken):  # not missing but misspelt; already told
            mistakes.append(_explain_one(path, group, tree))
    return mistakes, meant


def _by_path(details: list[ErrorDetails], tree: Node) -> dict[Path, list[ErrorDetails]]:
    """Return all but unknown keys by the value they are about: a choice of types gives an error for each type."""
    groups: dict[Path, list[ErrorDetails]] = {}
    for detail in details:
        if detail["type"] != "extra_forbidden":
            path = real_path(detail["loc"], tree)
            if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
                path = (*path, detail["loc"][-1])
            groups.setdefault(path, []).append(detail)
    return groups


def real_path(location: tuple[int | str, ...], tree: Node) -> Path:
    """Return the steps of pydantic's location that exist in the tree.

    The others stand for a type in a choice of types, or for the list that one source was put into.
    """
    path: Path = ()
    for step in location:
        if descend(tree, (*path, step)) is not None:
            path = (*path, step)
    return path


def _mistake(path: Path, tree: Node, text: str) -> Mistake:
    node = descend(tree, path)
    place = node
    for length in range(len(path) - 1, -1, -1):
        place = place or descend(tree, path[:length])
    assert place is not None
    return Mistake(place.where, dotted(path), node.shown() if node is not None else None, text)


# ------------------------------------------------------------------------------------------------ unknown keys


def _suggest(path: Path, tree: Node) -> tuple[str | None, str]:
    """Return the name in the same section that an unknown key probably means, and what to tell the user."""
    *parent, last = path
    name = shorten(str(last))
    section = dotted(tuple(parent)) or "a run's description"
    names = names_at(tuple(parent))
    here = descend(tree, tuple(parent))
    given = here.value if here is not None and isinstance(here.value, dict) else {}
    said = f"There is no `{name}` in {section}."
    steps = tuple(name.split("."))
    if len(steps) > 1 and locate((*parent, *steps)) is not None:
        return None, f"{said}\nIn a file, nest it: one line for each of {', '.join(f'`{step}:`' for step in steps)}"
    place = OTHER_PLACES.get(name.lower()) if not parent else None
    if place is not None:
        return None, f"{said}\nHere that is `{place}`."
    near = nearest(name, names)
    if near is not None:
        return (near if near not in given else None), f"{said}\nDid you mean `{near}`?"
    elsewhere = _elsewhere(name)
    if elsewhere:
        return None, f"{said}\nDid you mean `{'` or `'.join(elsewhere)}`?"
    return None, f"{said}\nExpected one of: {', '.join(names)}." if names else f"{said}\nNothing can be set there."


def nearest(name: str, names: list[str]) -> str | None:
    """Return the most similar of `names`, or None."""
    plain = name.lower().replace("-", "_").replace(" ", "_")
    if OTHER_NAMES.get(plain) in names:
        return OTHER_NAMES[plain]
    close = get_close_matches(plain, names, n=1, cutoff=0.66)
    return close[0] if close else None


def _elsewhere(name: str) -> list[str]:
    """Return where else in the description a key of that name stands."""
    wanted = {name, OTHER_NAMES.get(name.lower(), name)}
    paths = sorted((path for path in leaves() if path[-1] in wanted), key=len)
    return list(dict.fromkeys(map(dotted, paths)))[:3]


# ------------------------------------------------------------------------------------------------ wrong values


def _explain_one(path: Path, group: list[ErrorDetails], tree: Node) -> Mistake:
    detail = group[0]
    if detail["type"] == "value_error":  # the description's own words
        said = str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
        if "." not in said.split(maxsplit=1)[0]:  # not the name of a key
            said = f"{said[:1].upper()}{said[1:]}"
        return _mistake(path, tree, f"{said.rstrip('.')}.")
    if detail["loc"][-1:] == ("[key]",):
        pattern = detail.get("ctx", {}).get("pattern")
        return _mistake(path, tree, f"The name `{shorten(str(path[-1]))}` cannot be used; it must match {pattern}.")
    schema = locate(path)
    expected = f"Expected {describe(schema)}." if schema is not None else f"{detail['msg']}."
    node = descend(tree, path)
    if node is None:
        return _mistake(path, tree, f"It is missing.\n{expected}")
    hint = _hint(node, schema or {})
    return _mistake(path, tree, f"{expected}\n{hint}" if hint else expected)


def _hint(node: Node, schema: dict[str, Any]) -> str:
    """Return what to write instead, where that can be told."""
    choices = list(alternatives(schema))
    types = {choice.get("type") for choice in choices}
    value = node.value
    fixed = [str(option) for choice in choices for option in (choice.get("enum") or [choice.get("const")]) if option]
    if isinstance(value, str) and fixed:
        near = nearest(value[:80], fixed)
        return f"Did you mean `{near}`?" if near is not None else ""
    if isinstance(value, int | float) and "string" in types and not fixed:
        return f'Put a text in quotes: "{node.shown()}".'
    if isinstance(value, float) and "integer" in types and value.is_integer() and abs(value) < 2**63:
        return f"Write {int(value)}."
    if isinstance(value, str) and types & {"integer", "number"} and node.written != value:
        return "Leave out the quotes."
    return ""
