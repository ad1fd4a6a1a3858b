"""Writes the table of random cases into docs/parity.md."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.compare import FLOOR, HALF, TOLERANCE
from tests.fuzz.results import Result, count_mended, read_results
from tests.parity.page import PAGE, RUN_IT, WIDTH, random_cases_of
from tests.versions import versions_of

BEGIN, END = "<!-- random cases: written by `python -m tests.fuzz --page` -->", "<!-- end of random cases -->"
_MOST_REASONS, _LONGEST = 12, 160


def write_page(results: Path, page: Path = PAGE) -> str:
    """Put the section about the results of a file into the page; return what was done."""
    found = list(read_results(results).values())
    section = f"{BEGIN}\n{describe(found, count_mended(results))}\n{END}\n"
    text = page.read_text(encoding="utf-8")
    before = random_cases_of(text)
    text = text.replace(before, section) if before else text.replace(RUN_IT, f"{section}\n{RUN_IT}")
    page.write_text(text, encoding="utf-8")
    return f"{len(found)} cases written to {page}"


def describe(results: Sequence[Result], mended: int = 0) -> str:
    """Return the section.

    Args:
        results: Of all cases.
        mended: How many of them failed at first.
    """
    counts = Counter(one.verdict.kind for one in results)
    failed = sum(one.verdict.is_failure for one in results)
    seeds = Counter(str(one.case["name"]).partition("-")[0] for one in results)
    exact = [one.verdict.deviation for one in results if one.verdict.kind == "equal" and "precision" not in one.case]
    tools = versions_of("torch", "transformers", "peft")
    commands = "\n".join(f"python -m tests.fuzz --seed {seed} --count {n} --jobs 2 --into cases.jsonl"
                         for seed, n in sorted(seeds.items()))  # fmt: skip
    about = (
        f"**{len(results)} cases: {counts['equal']} equal, {counts['refused']} refused with a reason before any step, "
        f"{failed} failed** ({counts['wrong']} wrong, {counts['crashed']} crashed, {counts['hung']} hung). Run on "
        f"{datetime.now(UTC):%Y-%m-%d} with {tools} and Python {platform.python_version()} on the CPU; the mean case "
        f"took {sum(one.verdict.seconds for one in results) / max(len(results), 1):.1f} s."
    )
    if mended:
        about += f" {mended} of them failed at first and no longer do after fixes."
    how = (
        "Models, trained parts, plans, 2 to 6 ranks, batches and options are drawn at random "
        "(`tests/fuzz/generate.py`), and each run is compared with one process: the gradient norm of each step, all "
        "logged metrics, the evaluation and the model's answers, every parameter after 3 steps, and the weights that "
        "one process reads back from the checkpoint. In fp32, a parameter may deviate by "
        f"{TOLERANCE:g} of its update, where the update counts as at least {FLOOR:g} of the largest update in the "
        f"model (ten times that for the linear attention of Qwen3-Next). What deviates more is computed once more in "
        f"float64, where it must not: {sum(one.verdict.reason.startswith('rounding') for one in results)} of these "
        f"cases. The largest deviation of all is {max(exact, default=0.0):.0e}. In bf16 and fp16, it may deviate "
        f"by 4 times the distance between one process in half precision and one in fp32, or by {HALF:g}."
    )
    again = "A failing case prints the command that repeats it. Cases that once failed are in `tests/fuzz/cases.json` "
    again += "and run in `make test`, together with 40 random ones."
    parts = [
        "## Random cases", "", fill(about, WIDTH), "", fill(how, WIDTH), "", "```sh", commands, "```", "",
        fill(again, WIDTH), "", *_table("plan", _plans, results), "", *_table("language model", _models, results), "",
        *_table("option", _options, results), "", *_reasons(results),
    ]  # fmt: skip
    return "\n".join(parts).rstrip()


def _table(head: str, names: Callable[[Case], Iterator[str]], results: Sequence[Result]) -> list[str]:
    """Return how many of the cases with each name are equal, refused, failed."""
    counts: dict[str, Counter[str]] = {}
    for one in results:
        kind = "failed" if one.verdict.is_failure else one.verdict.kind
        for name in names(one.case):
            counts.setdefault(name, Counter()).update([kind])
    lines = [f"| {head} | cases | equal | refused | failed |", "|---|---|---|---|---|"]
    for name, found in sorted(counts.items(), key=lambda item: -item[1].total()):
        lines.append(f"| {name} | {found.total()} | {found['equal']} | {found['refused']} | {found['failed']} |")
    return lines


def _plans(case: Case) -> Iterator[str]:
    plan = case["parallel"]
    modules = plan.get("modules", {}).values()
    yield plan.get("data", {}).get("kind", "ddp")
    if any(module.get("stages", 1) > 1 for module in modules):
        yield f"stages, {plan['schedule']}"
    if plan.get("ranks") not in (None, "auto", "shared"):
        yield f"encoders: {plan['ranks'].replace('_', ' ')}"
    for axis, word in (("tp", "tensor parallelism"), ("cp", "context parallelism")):
        if any(module.get(axis, 1) > 1 for module in modules):
            yield word
    yield f"{case['world']} ranks"


def _models(case: Case) -> Iterator[str]:
    yield case["llm"]
    yield from (f"with {said['kind']}" for said in case["encoders"].values())


def _options(case: Case) -> Iterator[str]:
    data, loop, trained = case["data"], case.get("loop", {}), [case["llm_train"], *_trained(case)]
    said: Mapping[str, Any] = {
        "Booster": case.get("booster"),
        "resumed in another layout": "then" in case,
        "packing": data.get("packing"),
        "accumulation": case["accumulation"] > 1,
        "balance": data.get("balance"),
        "split images": data.get("balance_encoders"),
        "clipping": case["optimizer"].get("clip"),
        "moving average": loop.get("ema"),
        "LoRA": "lora" in trained,
        "something frozen": any(one in ("frozen", "projector") for one in trained),
        "activation checkpointing": loop.get("activation_checkpointing") or _recomputes(case),
        "activation budget": loop.get("activation_budget"),
        "feature cache": case.get("features", {}).get("cache"),
        "compiled layers": case.get("compile"),
        "evaluation": case.get("evaluated"),
        "samples without an answer": any(not answer for *_, answer in case["kinds"]),
        "fewer samples than a step": len(case["kinds"]) < case["batch_size"],
        case.get("precision", "fp32"): True,
    }
    yield from (name for name, value in said.items() if value)


def _trained(case: Case) -> list[str]:
    return [said["train"] for said in case["encoders"].values()]


def _recomputes(case: Case) -> bool:
    return any(one.get("activation_checkpointing") for one in case["parallel"].get("modules", {}).values())


def _reasons(results: Sequence[Result]) -> list[str]:
    reasons = Counter(_shorten(one.verdict.reason) for one in results if one.verdict.kind == "refused")
    if not reasons:
        return []
    lines = ["The most common reasons for refusal, as quoted:", "", "| reason | cases |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common(_MOST_REASONS)]
    rest = sum(count for _, count in reasons.most_common()[_MOST_REASONS:])
    return lines + ([f"| others | {rest} |"] if rest else [])


def _shorten(reason: str) -> str:
    """Return the sentence of a refusal that says why, without the numbers and names of the case."""
    lines = [line.strip() for line in reason.removeprefix("one process: ").splitlines() if line.strip()]
    is_heading = lines[0].endswith(("yet.", ":")) or re.fullmatch(r"[\w.]+ = [^.]+", lines[0])
    text = lines[1] if is_heading and len(lines) > 1 else lines[0]
    text = re.split(r"(?<=[.:]) (?=[A-Z])", text)[0]
    text = re.sub(r"(?<![A-Za-z])\d+([.,]\d+)*", "n", text).replace("|", "/")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0]} …"
