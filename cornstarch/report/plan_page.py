"""The page of `cornstarch plan --html`: the best plan, a step over time, memory against the limit, and the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from cornstarch.plan.candidates import Candidate
from cornstarch.plan.predict import Prediction
from cornstarch.plan.search import SearchResult
from cornstarch.report import plan_text
from cornstarch.report.charts import Chart, ChartLine, draw_chart
from cornstarch.report.html import Table, TableCell, render_page
from cornstarch.report.number_format import format_bytes, format_count, format_percent, format_step_time, pluralize
from cornstarch.report.timelines import AFTER, KINDS, PipelineTimelines, StepTimeline, TimelineBar, draw_gantt

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.cost import RunCost
    from cornstarch.plan.search import OwnPlan, ScalingPoint

_MAX_PLACES = 64
_SECTIONS = {
    "why": "Why this plan",
    "timeline": "A step over time",
    "memory": "Memory",
    "time": "Where the time goes",
    "candidates": "Candidates",
    "sizes": "Other sizes",
    "file": "The plan",
}
_FILTERS = {  # traits of a plan
    "encoders": "encoders", "tp": "tp", "stages": "stages", "data": "data parallelism", "again": "checkpointing",
}  # fmt: skip
_MEMORY_COLOURS = {"parameters": 1, "optimizer": 2, "gathered and buffers": 3, "gradients": 4, "activations": 5}


@dataclass(frozen=True)
class PlanReport:
    """The result of a plan search, as the page and the terminal show it."""

    name: str
    """The run's name."""
    cluster: Cluster
    cost: RunCost
    found: SearchResult
    own: OwnPlan | None
    scaled: tuple[ScalingPoint, ...]
    plan: str
    """The plan as YAML."""
    price: float | None = None
    """Dollars per device and hour."""

    @property
    def best(self) -> Prediction:
        """The plan that was found."""
        assert self.found.best is not None
        return self.found.best

    @property
    def price_column(self) -> list[str]:
        """The header of the cells of `format_price`; none without a price, or if the model takes no tokens."""
        return ["$ per 1M\ntokens"] if self.format_price(self.best, 1) else []

    def format_price(self, one: Prediction, devices: int) -> list[str]:
        """Return a cell with the dollars for a million tokens."""
        if self.price is None or not one.tokens_per_second:
            return []
        return [f"{self.price * devices / 3600 / one.tokens_per_second * 1e6:.3g}"]


def render_plan(report: PlanReport) -> str:
    """Render the page."""
    cost, cluster = report.cost, report.cluster
    tokens = f" of {format_count(cost.tokens)} tokens" if cost.tokens else ""
    best, sizes = report.best, None
    if report.scaled:
        lead = f"The best plan of each size, for the same batch of {cost.batch:,} samples."
        sizes = {"lead": lead, "charts": _draw_scaling(report), "table": build_size_table(report)}
    why = {
        "The plan": [*plan_text.describe_choice(best.candidate), *plan_text.describe_layer_split(best)],
        "Reasons": plan_text.explain_choice(report.found),
        "Too large": [f"{text}." for text in report.found.refused],
    }
    times = sorted(((getattr(best.breakdown, name), text) for name, text in plan_text.TIME_PARTS.items()), reverse=True)
    command = plan_text.build_train_command(best, cluster, "CONFIG", "plan.yaml")
    return render_page(
        "plan.html",
        title=f"{report.name} on {cluster.name}",
        sections=[(id, title) for id, title in _SECTIONS.items() if id != "sizes" or sizes],
        titles=_SECTIONS,
        name=report.name[:200],
        cluster={"name": cluster.name[:80], "description": cluster.describe()},
        facts=[("batch", f"{cost.batch:,} samples{tokens}"), ("precision", cost.precision)],
        key_figures=list(_build_key_figures(report)),
        why=[(title, lines) for title, lines in why.items() if lines],
        timeline=_build_timeline(best),
        memory=_build_memory(report),
        times=[(text, time / best.step, format_step_time(time)) for time, text in times if time > 0],
        candidates=_build_candidates(report),
        sizes=sizes,
        file={"plan": report.plan, "lead": f"Save it as plan.yaml, and train with it: {command}"},
    )


def _build_key_figures(report: PlanReport) -> Iterator[tuple[str, str, str]]:
    best, devices = report.best, report.cluster.devices
    idle = devices - best.candidate.world
    yield "Step", plan_text.format_step(best), f"{best.samples_per_second:.3g} samples a second"
    unit = plan_text.select_rate_unit(best).capitalize()
    yield f"{unit} a second", plan_text.format_rate(best), "of the whole cluster"
    yield "MFU", format_percent(best.mfu), "of the peak FLOPs of the devices"
    yield "Memory", format_bytes(best.peak), f"of {format_bytes(best.limit)} on the fullest device"
    yield "Devices", f"{best.candidate.world:,}", f"{idle:,} more are idle" if idle else "all of them"
    if paid := report.format_price(best, devices):
        yield "A million tokens", f"${paid[0]}", f"at ${report.price:g} per device and hour"
    else:
        yield "Waiting", format_percent(best.timeline.bubble), "of the pipeline's time"


def _build_timeline(best: Prediction) -> dict[str, Any]:
    timeline, choice = best.timeline, best.candidate
    names = tuple(place.holds for place in best.memory)
    rows = []
    for own, other_work in zip(timeline.events, timeline.other_work, strict=True):
        bars = [TimelineBar(KINDS[e.kind], str(e.kind), e.stage, e.microbatch, e.start, e.end) for e in own]
        done = own[-1].end if own else 0.0
        end = max((stretch.end for stretch in other_work), default=done)
        if end > done:  # gradient sums and the optimizer
            bars.append(TimelineBar(AFTER, "", own[-1].stage if own else 0, choice.microbatches - 1, done, end))
        rows.append(tuple(bars))
    step = StepTimeline(timeline.step, timeline.bubble, timeline.bubbles, (0.0,) * len(rows), tuple(rows))
    stages = tuple(f"{node.module} {node.index}" for node in timeline.schedule.graph.nodes)
    timelines = PipelineTimelines(choice.schedule, choice.microbatches, names, ((),) * len(names), stages, ())
    lead = (
        f"One replica: {pluralize(len(names), 'place')}, "
        f"{pluralize(choice.microbatches, 'microbatch', 'microbatches')}; the same actions that a "
        "run carries out. Gradients are reduced over replicas during the last backward pass; the rest of that, and the "
        "optimizer, come at the end."
    )
    return {"lead": lead, "drawing": draw_gantt(timelines, {"Predicted": step})}


def _build_memory(report: PlanReport) -> dict[str, Any]:
    best = report.best
    most = max(best.peak, best.limit)
    shown = []
    for place in best.memory[:_MAX_PLACES]:
        states = place.states
        others = states.averages + states.buffers + states.buckets + states.gathered
        passing = max(0, place.peak - states.parameters - states.optimizer - others)
        activations = min(place.activations, passing)
        # Gradients that are allocated as activations are freed count as activations.
        sizes = (states.parameters, states.optimizer, others, passing - activations, activations)
        shown.append((place, [part for part in zip(_MEMORY_COLOURS, sizes, strict=True) if part[1]]))
    used = {name for _, parts in shown for name, _ in parts}
    omitted = len(best.memory) - len(shown)
    return {
        "lead": "Peak memory of a step on each rank of a place; the line marks the usable memory of a device, "
        f"{format_bytes(best.limit)} of {format_bytes(report.cluster.device.memory)}.",
        "legend": [(name, colour) for name, colour in _MEMORY_COLOURS.items() if name in used],
        "limit": f"{100 * best.limit / most:.2f}",
        "places": [
            {
                "name": place.holds[:60],
                "title": place.holds[:200],
                "description": ", ".join(f"{name} {format_bytes(size)}" for name, size in parts),
                "parts": [(_MEMORY_COLOURS[name], f"{100 * size / most:.2f}") for name, size in parts],
                "peak": format_bytes(place.peak),
            }
            for place, parts in shown
        ],
        "note": f"{omitted:,} more places are not drawn." if omitted > 0 else "",
    }


def _build_candidates(report: PlanReport) -> dict[str, Any]:
    """Return all plans that were found, with the traits by which the page filters them."""
    best, own = report.best, report.own
    found = [("best", best, "")]
    found += [(str(n), one.prediction, one.reason) for n, one in enumerate(report.found.runners_up, 2)]
    if own is not None and own.prediction is not None:
        found.append(("config", own.prediction, plan_text.compare_with_best(own.prediction, best)))
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "traits": _collect_traits(one.candidate),
            "lines": plan_text.describe_choice(one.candidate),
            "numbers": [
                f"{one.candidate.world:,}",
                format_step_time(one.step),
                plan_text.format_rate(one),
                format_percent(one.mfu),
                TableCell(format_bytes(one.peak), fraction=one.peak / one.limit, colour=1 if one.fits else 2),
            ],
            "reason": reason,
        }
        for name, one, reason in found
    ]

    def order(value: str) -> tuple[bool, int, str]:
        return not value.isdigit(), int(value) if value.isdigit() else 0, value

    filters = [(key, label, sorted({row["traits"][key] for row in rows}, key=order)) for key, label in _FILTERS.items()]
    unpredicted = own is not None and own.prediction is None
    return {
        "filters": [one for one in filters if len(one[2]) > 1],
        "numbers": ["devices", "a step", f"{plan_text.select_rate_unit(best)}/s", "MFU", "memory"],
        "rows": rows,
        "note": f"There is no prediction of the config's own plan: {own.trouble}" if own and unpredicted else "",
    }


def _collect_traits(choice: Candidate) -> dict[str, str]:
    last = choice.modules[-1][1]
    checkpointed = [name for name, plan in choice.modules if plan.activation_checkpointing]
    return {
        "encoders": plan_text.describe_encoder_ranks(choice) if len(choice.modules) > 1 else "",
        "tp": str(last.tp),
        "stages": str(last.stages),
        "data": choice.kind,
        "again": "all" if len(checkpointed) == len(choice.modules) else " and ".join(checkpointed) or "none",
    }


def build_size_table(report: PlanReport) -> Table:
    """Return the best plan of every size; the terminal shows the same table."""
    rate, price = plan_text.select_rate_unit(report.best), [f"{name}#" for name in report.price_column]
    columns = ["cluster", "step#", f"{rate}/s#", "efficiency#", "MFU#", "idle#", *price, "plan"]
    rows: list[list[str | TableCell]] = []
    for one in report.scaled:
        best, devices = one.best, one.cluster.devices
        if best is None:
            rows.append([one.cluster.name, *[""] * (len(columns) - 2), "nothing fits"])
            continue
        figures = [format_step_time(best.step), plan_text.format_rate(best)]
        figures += [format_percent(one.efficiency), format_percent(best.mfu), str(devices - best.candidate.world or "")]
        text = TableCell(best.candidate.describe(), "span", "text")
        rows.append([one.cluster.name, *figures, *report.format_price(best, devices), text])
    return Table(columns, rows, "Other sizes of the cluster")


def _draw_scaling(report: PlanReport) -> list[Markup]:
    fitting = [(one.cluster.devices, one.best, one.efficiency) for one in report.scaled if one.best is not None]
    if len(fitting) < 2:
        return []
    rates = [(float(devices), best.tokens_per_second or best.samples_per_second) for devices, best, _ in fitting]
    least, first = rates[0]
    ideal = [(devices, first * devices / least) for devices, _ in rates]
    efficiency = [(float(devices), fraction) for devices, _, fraction in fitting if fraction is not None]
    throughput = [ChartLine("predicted", rates, 1, "dots"), ChartLine("in proportion", ideal, 2, "raw")]
    per_device = [ChartLine("of a device", efficiency, 3, "dots")]
    unit = plan_text.select_rate_unit(report.best).capitalize()
    return [
        draw_chart(Chart(f"{unit} a second", throughput, "count", from_zero=True, across="devices")),
        draw_chart(Chart("Efficiency", per_device, "percent", range=(0.0, 1.0), across="devices")),
    ]
