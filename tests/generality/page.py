"""The page docs/models.md, written from the tested table: `python -m tests.generality.page`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from cornstarch.parallel import tested
from cornstarch.parallel.tested import NOT_BUILT, PASSED, REFUSED, WRONG, Sweep, Verdict
from tests.models.mixtures import MIXTURES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
# By the way to cut: its column, and what is compared. Another sweep is another entry.
AXES = {
    "tp": ("tp 2", "matrices cut over two processes"),
    "cp": ("cp 2", "tokens of a language model, or items of an encoder, cut over two processes"),
    "pp": ("pp 2", "layers cut into two stages"),
}
TITLES = {"language models": "Language models", "encoders": "Encoders"}
COMMANDS = {"tp": "tests.generality.tensor", "cp": "tests.generality.context", "pp": "tests.generality.split"}

INTRODUCTION = """# Models that are cut

Every causal language model and every vision and audio encoder of transformers that can be built tiny from its config is
cut in two and compared with itself in one process: the loss, and every gradient.

{ways}

*passed*: they are equal, up to rounding; *in part*: some kinds of layers are left whole, for the reason below.
*refused*: it is said why it cannot be cut, before anything is trained. *not built*: there is no small working model to
try, which says nothing against it. Nothing else may happen; a sweep that finds something else fails.

{totals}

Mixtures of experts are cut with as many experts as published, too, of which a small copy keeps four and chooses among
them as the model does: {mixtures} (`python -m tests.models.mixtures`).

A run that cuts a model which has not passed here is verified on a tiny twin of it when it starts, see
[Splitting a model](splitting.md#verifying-a-plan). Which models can be composed is on
[another page](supported_models.md).

This page is written by `python -m tests.generality.page` from `cornstarch/parallel/tested.json`, which the sweeps
write: {commands}.
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
    return "\n".join([text, *(_section(group, table, axes) for group in groups), _left_whole(table, axes)])


def _versions(sweep: Sweep) -> str:
    return f" (transformers {sweep.versions['transformers']}, torch {sweep.versions['torch']})"


def _totals(table: Mapping[str, Sweep], axes: list[str]) -> str:
    lines = ["| | way | passed | of them in part | refused | not built |", "|---|---|---|---|---|---|"]
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
    """Return the first sentence of a reason, without what the table says already."""
    first = re.split(r"(?<=[.)]) (?=[A-Z])", reason)[0].rstrip(".")
    first = re.sub(rf"^{name} (cannot be cut along its tokens: )?", "", first)
    first = re.sub(r" \(relative difference [^)]*\)", "", first)
    return first.replace("|", "\\|")


def _left_whole(table: Mapping[str, Sweep], axes: list[str]) -> str:
    lines = ["| model | way | what is whole, and why |", "|---|---|---|"]
    for axis in axes:
        for name, verdict in sorted(table[axis].verdicts.items()):
            if verdict.status == PASSED and verdict.whole:
                said = "; ".join(line.replace("|", "\\|") for line in verdict.whole)
                lines.append(f"| `{name}` | {AXES[axis][0]} | {said} |")
    about = "These layers are on every process, and compute the same there."
    return "\n".join(["## Left whole", "", about, "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(tested.read()), encoding="utf-8")
