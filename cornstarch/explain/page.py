"""An explanation as one HTML page: all steps, of which the script shows one at a time."""

from __future__ import annotations

from pathlib import Path

from cornstarch import __version__
from cornstarch.explain.drawing import Canvas
from cornstarch.explain.story import Step, Story, byte_count, sent_words
from cornstarch.report.document import head, masthead, write_html
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.script import SCRIPT
from cornstarch.report.sections import table

_STYLE = """
.steps { list-style: none; padding: 0; display: grid; grid-template-columns: minmax(0, 1fr); gap: 0.9rem; }
#sum tbody th { min-width: 12rem; }
.step { padding: 1.1rem 1.2rem; }
.step > h3 { font-size: 1.1rem; font-weight: 600; color: var(--ink); }
.step .says { max-width: 46rem; margin: 0.3rem 0 1rem; min-height: 3em; }
.picture { overflow-x: auto; }
.picture svg { display: block; width: 100%; font-size: 10.5px; }
.picture text { fill: var(--ink); text-anchor: middle; font-family: ui-monospace, "SF Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
.picture .over { fill: var(--soft); font-size: 9.5px; }
.picture .rank { text-anchor: start; font-weight: 600; }
.picture .beside { text-anchor: start; fill: var(--soft); font-size: 9px; }
.picture .lane { fill: var(--sunk); }
.picture .cell { fill: color-mix(in srgb, var(--c) 24%, var(--card)); stroke: var(--c); stroke-width: 1; }
.picture .n .cell { fill: var(--card); stroke: var(--edge); }
.picture .fresh .cell { stroke: var(--ink); stroke-width: 1.8; }
.picture .fresh text { font-weight: 700; }
.arrow { fill: none; stroke: var(--ink); stroke-width: 1.4; } .arrow.far { stroke: var(--soft); }
.sent { margin-top: 0.8rem; font-size: 0.88rem; color: var(--soft); }
.controls { display: flex; flex-wrap: wrap; align-items: center; gap: 0.6rem; margin-bottom: 0.9rem; }
.controls output { font-variant-numeric: tabular-nums; min-width: 4.5rem; text-align: center; }
.controls .keys { margin-left: auto; color: var(--soft); font-size: 0.85rem; }
button:disabled { opacity: 0.45; cursor: default; }
.remarks { margin: 1rem 0 0; padding: 0; list-style: none; display: grid; gap: 0.4rem; color: var(--soft); }
@media (max-width: 40rem) { .step { padding: 0.9rem 1rem; } .controls .keys { display: none; } }
@media print { .step { break-inside: avoid; } .step[hidden] { display: block !important; } }
"""

# The page is complete without it: then all steps stand below one another.
_SCRIPT = r"""
"use strict";
(() => {
  const steps = [...document.querySelectorAll(".step")], controls = document.querySelector(".controls");
  const back = document.getElementById("back"), next = document.getElementById("next");
  const where = controls.querySelector("output"), every = document.getElementById("every");
  let at = 0;
  const show = (wanted) => {
    at = Math.min(steps.length - 1, Math.max(0, wanted));
    steps.forEach((one, index) => { one.hidden = !every.checked && index !== at; });
    back.disabled = at === 0;
    next.disabled = at === steps.length - 1;
    where.textContent = `${at + 1} / ${steps.length}`;
    const box = steps[at].querySelector(".picture"), fresh = box.querySelector(".fresh");
    if (fresh) {
      const shift = fresh.getBoundingClientRect().right - box.getBoundingClientRect().right;
      box.scrollLeft = shift > 0 ? shift + 24 : 0;
    }
    if (every.checked) steps[at].scrollIntoView({ block: "nearest" });
  };
  back.addEventListener("click", () => show(at - 1));
  next.addEventListener("click", () => show(at + 1));
  every.addEventListener("change", () => show(at));
  addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
  controls.hidden = false;
  show(Number((/^#step-(\d+)$/.exec(location.hash) || [0, 1])[1]) - 1);
})();
"""


def render(story: Story) -> str:
    """Return the page."""
    canvas = Canvas(story.steps)
    body = element(
        "body",
        element("a", "Skip to the content", href="#main", class_="skip"),
        element(
            "div",
            element("header", masthead("Cornstarch explains"), element("h1", story.title)),
            element("p", story.lead, class_="lead", style="margin-top:0.8rem"),
            class_="page",
        ),
        element(
            "main",
            _controls(len(story.steps)),
            _legend(story),
            element("ol", [_step(number, step, canvas) for number, step in enumerate(story.steps, 1)], class_="steps"),
            _sum(story),
            id="main",
            class_="page",
        ),
        element("footer", f"Drawn by Cornstarch {__version__}: cornstarch explain {story.topic}", class_="page"),
        element("script", Markup(SCRIPT)),
        element("script", Markup(_SCRIPT)),
    )
    page = element("html", head(f"{story.title} · Cornstarch", _STYLE), body, lang="en")
    return f"<!doctype html>\n{page}\n"


def write_page(story: Story, path: Path) -> None:
    """Write the page into a file."""
    write_html(path, render(story))


def _controls(steps: int) -> Markup:
    return element(
        "div",
        element("button", "← Previous", type="button", id="back"),
        element("output", f"1 / {steps}", aria_live="polite"),
        element("button", "Next →", type="button", id="next"),
        element("label", element("input", type="checkbox", id="every"), "all steps", class_="switch", style="margin:0"),
        element("span", "← and → on the keyboard", class_="keys"),
        class_="controls",
        hidden=True,
    )


def _legend(story: Story) -> Markup | None:
    if not story.legend:
        return None
    items = [
        element("li", element("i", class_=f"block {tone}", aria_hidden="true"), meaning)
        for tone, meaning in story.legend
    ]
    return element("ul", items, class_="legend", style="margin-bottom:0.9rem")


def _step(number: int, step: Step, canvas: Canvas) -> Markup:
    return element(
        "li",
        element("h3", f"{number}. {step.title}"),
        element("p", step.says, class_="says"),
        element("div", canvas.draw(step), class_="picture", tabindex=0, role="region", aria_label="Picture"),
        element("p", sent_words(step.sent), class_="sent") if any(step.sent) else None,
        id=f"step-{number}",
        class_="step card",
    )


def _sum(story: Story) -> Markup:
    """Return the formulas beside what was counted, and what each rank has sent."""
    rows = [[one.name, one.symbols, one.numbers, one.result, one.counted] for one in story.formulas]
    columns = ["what", "formula", "with numbers", "is#", "counted step by step#"]
    total = ", ".join(f"rank {rank}: {byte_count(count)}" for rank, count in enumerate(story.sent))
    return element(
        "section",
        element("h2", "What it comes to"),
        join(table(columns, rows, "Formulas")),
        element("ul", [element("li", text) for text in (f"Sent by {total}.", *story.remarks)], class_="remarks"),
        id="sum",
    )
