"""Write docs/models.md from the tested table: `python -m tests.generality.page`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from cornstarch.parallel import tested
from cornstarch.parallel.tested import NOT_BUILT, PASSED, REFUSED, WRONG, Sweep, Verdict
from tests.models.mixtures import MIXTURES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
# By axis: its column title and its description. To add a sweep, add an entry.
AXES = {
    "tp": ("tp 2", "tensor parallelism: matrices sharded over two ranks"),
    "cp": ("cp 2", "context parallelism: tokens of a language model, or items of an encoder, sharded over two ranks"),
    "pp": ("pp 2", "pipeline parallelism: layers split into two stages"),
    "ep": ("ep 2", "expert parallelism: experts shared out over two ranks, each with rows of its own"),
}
TITLES = {"language models": "Language models", "encoders": "Encoders"}
COMMANDS = {"tp": "tests.generality.tensor", "cp": "tests.generality.context", "pp": "tests.generality.split",
            "ep": "tests.generality.experts"}  # fmt: skip

INTRODUCTION = """# Models that can be split

This page lists every causal language model, vision encoder and audio encoder of transformers that can be built as a
tiny model from its config. Each model is split in two, and its loss and every gradient are compared with one process.

{ways}

*passed*: the results are equal, up to rounding; *in part*: some kinds of layers are replicated, for the reasons below.
*refused*: Cornstarch raises an error with the reason before training. *not built*: no small working model is available
for the test, so the model may work. A sweep with any other outcome fails.

{totals}

Mixture-of-experts models are also split with their published number of experts. A small copy keeps four of them and
routes tokens as the model does: {mixtures} (`python -m tests.models.mixtures`).

A run that splits a model without a *passed* entry is verified on a tiny twin of the model at start-up, see
[Splitting a model](splitting.md#verifying-a-plan). [Supported models](supported_models.md) lists the models that can be
composed.

`python -m tests.generality.page` writes this page from `cornstarch/parallel/tested.json`. These sweeps write the
table: {commands}.
"""


def page(table: Mapping[str, Sweep]) -> str:
    """Return the page."""
    axes = [axis for axis in AXES if axis in table]
    ways = "\n".join(f"- **{AXES[axis][0]}**: {AXES[axis][1]}{_versions(table[axis])}." for axis in axes)
    text = INTRODUCTION.format(
        ways=ways,
        totals=_totals(table, axes),
        mixtures=", ".join(MIXTURES),
        commands=", ".join(f"`python -m {COMMANDS[axis]}`" for axis in axes),
    )
    groups = dict.fromkeys(group for axis in axes for group in table[axis].groups)
    return "\n".join([text, *(_section(group, table, axes) for group in groups), _list_left_whole(table, axes)])


def _versions(sweep: Sweep) -> str:
    return f" (transformers {sweep.versions['transformers']}, torch {sweep.versions['torch']})"


def _totals(table: Mapping[str, Sweep], axes: list[str]) -> str:
    lines = ["| | axis | passed | of these in part | refused | not built |", "|---|---|---|---|---|---|"]
    for group, title in TITLES.items():
        for axis in axes:
            found = table[axis].groups.get(group, {})
            counts = Counter(verdict.status for verdict in found.values())
            part = sum(verdict.status == PASSED and bool(verdict.whole) for verdict in found.values())
            numbers = [counts[PASSED], part, counts[REFUSED], counts[NOT_BUILT]]
            lines.append(f"| {title} | {AXES[axis][0]} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def _section(group: str, table: Mapping[str, Sweep], axes: list[str]) -> str:
    columns = [table[axis].groups.get(group, {}) for axis in axes]
    names = sorted({name for column in columns for name in column})
    tried = [name for name in names if any(c[name].status != NOT_BUILT for c in columns if name in c)]
    lines = [f"| model | {' | '.join(AXES[axis][0] for axis in axes)} |", "|---" * (len(axes) + 1) + "|"]
    for name in tried:
        cells = [_cell(name, column.get(name)) for column in columns]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    rest = ", ".join(f"`{name}`" for name in names if name not in tried)
    return "\n".join([f"## {TITLES[group]}", "", *lines, "", f"**Not built**: {rest}.", ""])


def _cell(name: str, verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.status == PASSED:
        return "passed, in part" if verdict.whole else PASSED
    if verdict.status in (REFUSED, WRONG):
        return f"{verdict.status}: {_short(name, verdict.reason)}"
    return verdict.status


def _short(name: str, reason: str) -> str:
    """Return the first sentence of a reason, without the model name."""
    first = re.split(r"(?<=[.)]) (?=[A-Z])", reason)[0].rstrip(".")
    first = re.sub(rf"^{name} (cannot be cut along its tokens: )?", "", first)
    first = re.sub(r" \(relative difference [^)]*\)", "", first)
    return first.replace("|", "\\|")


def _list_left_whole(table: Mapping[str, Sweep], axes: list[str]) -> str:
    lines = ["| model | axis | replicated layers and reasons |", "|---|---|---|"]
    for axis in axes:
        for name, verdict in sorted(table[axis].verdicts.items()):
            if verdict.status == PASSED and verdict.whole:
                said = "; ".join(line.replace("|", "\\|") for line in verdict.whole)
                lines.append(f"| `{name}` | {AXES[axis][0]} | {said} |")
    about = "These layers are replicated: every process has them and computes the same result."
    return "\n".join(["## Replicated layers", "", about, "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(tested.read_table()), encoding="utf-8")
