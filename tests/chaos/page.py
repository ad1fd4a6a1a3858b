"""Writes benchmarks/results/chaos.md from the files of results; it says nothing that they do not say."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from tests.chaos import hangs, run_kills
from tests.chaos.kills import LAUNCHER, Outcome, Verdict
from tests.versions import versions_of

PAGE = Path(__file__).resolve().parents[2] / "benchmarks/results/chaos.md"
_WIDTH = 120
_ABOUT = """`python -m tests.chaos` starts runs of a tiny model (an image encoder and a language model with dropout,
fp32, gloo) in real processes, and disturbs them with real signals. Everything below was written from its results by
`python -m tests.chaos page`."""
_KILLS = """One run is killed up to five times with SIGKILL: a rank, several, all, or the launcher, in a phase that is
drawn. Then it is left alone until its end. Every logged loss, gradient norm and evaluation, and the SHA-256 of the last
checkpoint's files, must equal those of a run that nothing disturbed. Checkpoints are due every 4 steps."""


def add_command(commands: Any) -> None:
    """Add the command and its options."""
    reader = commands.add_parser("page", help="write benchmarks/results/chaos.md from files of results")
    reader.add_argument("files", type=Path, nargs="+", help="that other commands have written with --into")
    reader.add_argument("--to", type=Path, default=PAGE)
    reader.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    """Write the page."""
    lines = [json.loads(text) for file in asked.files for text in file.read_text(encoding="utf-8").splitlines()]
    asked.to.write_text(write(lines, run_kills.read_all(asked.files)), encoding="utf-8")
    print(f"{len(lines)} results written to {asked.to}")
    return 0


def write(lines: Sequence[Mapping[str, Any]], kills: Sequence[tuple[Mapping[str, Any], Verdict]]) -> str:
    """Return the page.

    Args:
        lines: All results.
        kills: The cases of kills among them, and what came of each.
    """
    parts = ["# Runs that are disturbed", "", _fill(_ABOUT), ""]
    parts += [*_describe_where(lines), ""]
    if kills:
        parts += _describe_kills(kills)
    for command, title in (("stops", "Stopped ranks"), ("cuts", "Cut links")):
        # Of two results with a name the later one counts.
        found = {line["name"]: hangs.read_found(line) for line in lines if line.get("command") == command}
        if found:
            parts += [f"## {title}", "", _fill(f"{hangs.describe(list(found.values()))}."), "", *_table_of_hangs(found)]
    for command, title in (
        ("busy", "False alarms"), ("goodput", "Goodput"), ("elastic", "Other numbers of ranks"), ("soak", "Soak"),
    ):  # fmt: skip
        said = [line for line in lines if line.get("command") == command]
        if said:
            parts += [f"## {title}", "", *(f"- {_describe_result(line)}" for line in said), ""]
    parts += ["```bash", *_commands(lines, kills), "```", ""]
    return "\n".join(parts)


def _fill(text: str) -> str:
    return fill(" ".join(text.split()), _WIDTH)


def _describe_where(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = list(lines)
    machines = [line["machine"] for line in lines if "machine" in line]
    if not machines:
        return [""]
    dates, loads = sorted({one["date"] for one in machines}), sorted(one["load"] for one in machines)
    cores = " or ".join(map(str, sorted({one["cores"] for one in machines})))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    text = (
        f"{when}, Python {platform.python_version()}, {versions_of('torch', 'transformers')}; {cores} cores with a "
        f"load of {loads[0]:g} to {loads[-1]:g} (median {statistics.median(loads):g}; recorded for {len(loads)} of "
        f"{len(lines)} results) from these and other programs: counts do not depend on it, seconds do."
    )
    return [_fill(text)]


def _describe_kills(kills: Sequence[tuple[Mapping[str, Any], Verdict]]) -> list[str]:
    parts = ["## Kills", "", _fill(_KILLS), ""]
    for is_restarting, title in ((True, "restarts itself (`--restarts`)"), (False, "is started again by its command")):
        own = [(case, verdict) for case, verdict in kills if bool(case.get("restarts")) == is_restarting]
        if not own:
            continue
        said = run_kills.describe([verdict for _, verdict in own])
        parts += [_fill(f"**The run {title}**: {said}."), ""]
        by_layout: dict[str, list[Outcome]] = {}
        by_phase: dict[str, list[Outcome]] = {}
        by_victim: dict[str, list[Outcome]] = {}
        for case, verdict in own:
            for one in verdict.kills:
                by_layout.setdefault(str(case["layout"]), []).append(one)
                by_phase.setdefault(one.phase, []).append(one)
                who = "the launcher" if LAUNCHER in one.victims else f"ranks: {len(one.victims)}"
                by_victim.setdefault(who, []).append(one)
        for head, groups in (("layout", by_layout), ("phase", by_phase), ("killed", by_victim)):
            parts += [*_table_of_kills(head, groups), ""]
    return parts


def _table_of_kills(head: str, groups: Mapping[str, Sequence[Outcome]]) -> list[str]:
    lines = [
        f"| {head} | kills | most steps lost | ranks gone after, s (most) | training again after, s (most) |",
        "|---|---|---|---|---|",
    ]
    for name, kills in sorted(groups.items()):
        ends = [one.ended for one in kills]
        backs = [one.back for one in kills if one.back is not None] or [0.0]
        lines.append(
            f"| {name} | {len(kills)} | {max(one.lost for one in kills)} | {statistics.median(ends):.2f} "
            f"({max(ends):.2f}) | {statistics.median(backs):.1f} ({max(backs):.1f}) |"
        )
    return lines


def _table_of_hangs(found: Mapping[str, hangs.Found]) -> list[str]:
    lines = ["| layout | ranks | named rightly | seconds until named (most) |", "|---|---|---|---|"]
    for layout in dict.fromkeys(one.layout for one in found.values()):
        own = [one for one in found.values() if one.layout == layout]
        times = [one.seconds for one in own if one.seconds is not None] or [0.0]
        lines.append(
            f"| {layout} | {len(own)} | {sum(one.is_right for one in own)} | {statistics.median(times):.1f} "
            f"({max(times):.1f}) |"
        )
    return [*lines, ""]


def _describe_result(line: Mapping[str, Any]) -> str:
    asked, said = line.get("asked", {}), line.get("line") or line["result"]["line"]
    how = [asked["layout"]] if asked.get("layout") else []
    if asked:
        how += ["the command is given again"] if asked.get("restarts") == "0" else ["the run restarts itself"]
        how += ["processes are forked with imports done"] if asked.get("warm") == "True" else ["processes start cold"]
    return f"{', '.join(how)}: {said}" if how else str(said)


def _commands(lines: Iterable[Mapping[str, Any]], kills: Sequence[tuple[Mapping[str, Any], Verdict]]) -> list[str]:
    """Return the commands with their full counts."""
    there = {line.get("command") for line in lines} | ({"kills"} if kills else set())
    known = {
        "kills": "kills --count 200 --restarts 50 --jobs 2 --into chaos.jsonl",
        "stops": "stops --count 50 --into chaos.jsonl",
        "cuts": "cuts --count 20 --into chaos.jsonl",
        "busy": "busy --minutes 60 --into chaos.jsonl",
        "goodput": "goodput --minutes 30 --every 60 --into chaos.jsonl",
        "elastic": "elastic --into chaos.jsonl",
        "soak": "soak --hours 2 --every 30 --into chaos.jsonl",
    }
    return [f"python -m tests.chaos {text}" for name, text in known.items() if name in there]
