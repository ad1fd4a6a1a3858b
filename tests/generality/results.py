"""Where the sweeps put what they found: the tested table, from which docs/models.md is written, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers

from cornstarch.parallel import tested
from cornstarch.parallel.tested import Sweep, Verdict
from tests.models import sweep

LANGUAGE_MODELS, ENCODERS = "language models", "encoders"


def group_of(name: str) -> str:
    """Return which kind of model a class is."""
    return LANGUAGE_MODELS if name in sweep.language_model_names() else ENCODERS


def all_names(*groups: str) -> list[str]:
    """Return the classes of some groups, in order."""
    names: list[str] = []
    if LANGUAGE_MODELS in groups:
        names += sorted(sweep.language_model_names())
    if ENCODERS in groups:
        names += [kind.__name__ for kind in sweep.encoder_classes(sweep.encoder_names())]
    return names


def entry(status: str, reason: str = "", whole: tuple[str, ...] = ()) -> Verdict:
    """Return a sweep's verdict as the table has it."""
    return Verdict({sweep.SUPPORTED: tested.PASSED}.get(status, status), reason, whole)


def keep(axis: str, found: Mapping[str, Verdict], whole_sweep: bool) -> None:
    """Put what a sweep found into the table; one of a few models leaves the others' verdicts as they were.

    Args:
        axis: The way to cut, as a plan calls it: tp, cp.
        found: By the name of the class.
        whole_sweep: Whether these are all models there are; else they join those that are in the table.
    """
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    table = tested.read_table()
    old = table.get(axis)
    if not whole_sweep and (old is None or dict(old.versions) != versions):
        print(f"The table has no {axis} of these versions yet: a few models alone are not put into it.")
        return
    known = {} if whole_sweep or old is None else old.verdicts
    said = {name: replace(one, reason=" ".join(one.reason.split())) for name, one in found.items()}
    merged = {**known, **said}
    groups = {
        group: {name: one for name, one in merged.items() if group_of(name) == group}
        for group in (LANGUAGE_MODELS, ENCODERS)
    }
    table[axis] = Sweep(versions, {group: inside for group, inside in groups.items() if inside})
    write_table(table)


def write_table(table: Mapping[str, Sweep], path: Path = tested.PATH) -> None:
    """Store the table, one model in a line, so that what a new release changes can be read in a diff."""
    axes = []
    for axis, one in table.items():
        groups = []
        for group, found in one.groups.items():
            facts = {name: {k: v for k, v in asdict(found[name]).items() if v} for name in sorted(found)}
            lines = [f"    {json.dumps(name)}: {json.dumps(stated)}" for name, stated in facts.items()]
            groups.append(f"   {json.dumps(group)}: {{\n" + ",\n".join(lines) + "\n   }")
        inside = ",\n".join(groups)
        versions = json.dumps(dict(one.versions))
        axes.append(f' {json.dumps(axis)}: {{\n  "versions": {versions},\n  "groups": {{\n{inside}\n  }}\n }}')
    path.write_text("{\n" + ",\n".join(axes) + "\n}\n", encoding="utf-8")
