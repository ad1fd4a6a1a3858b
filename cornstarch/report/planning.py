"""A plan as one HTML page: its figures, a step over time, memory against the limit, and everything that lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cornstarch import __version__
from cornstarch.plan.predict import PlaceMemory, Prediction
from cornstarch.plan.search import Found
from cornstarch.plan.simulate import Timeline
from cornstarch.report import figures
from cornstarch.report.charts import Chart, Line, draw
from cornstarch.report.document import head, masthead, write_html
from cornstarch.report.gantt import drawn
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.overview import bar
from cornstarch.report.plan_candidates import candidates
from cornstarch.report.plan_look import SCRIPT, STYLE
from cornstarch.report.plan_words import (
    SHARES,
    cuts_of,
    dollars,
    lines_of,
    rate,
    seconds,
    sentence,
    train_command,
    unit,
    why_best,
)
from cornstarch.report.script import SCRIPT as PAGE_SCRIPT
from cornstarch.report.sections import table
from cornstarch.report.timelines import AFTER, KINDS, Bar, Picture, Timelines

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.compared import Own, Scaled
    from cornstarch.plan.cost import RunCost

_MOST_PLACES = 64


@dataclass(frozen=True)
class Page:
    """What a page shows."""

    name: str
    """The run's."""
    cluster: Cluster
    cost: RunCost
    found: Found
    own: Own | None
    scaled: tuple[Scaled, ...]
    plan: str
    """The plan as YAML."""
    price: float | None = None
    """Dollars of a device for an hour."""

    @property
    def best(self) -> Prediction:
        """The plan that it is about."""
        assert self.found.best is not None
        return self.found.best

    @property
    def sentence(self) -> str:
        """The plan on one line."""
        return sentence(self.best, self.cluster)


def render(page: Page) -> str:
    """Return the page."""
    shown = [
        ("why", "Why this plan", _why(page)),
        ("timeline", "A step over time", _timeline(page)),
        ("memory", "Memory", _memory(page)),
        ("time", "Where the time goes", _shares(page)),
        ("candidates", "Candidates", candidates(page.found, page.own)),
        ("sizes", "Other sizes", _sizes(page)),
        ("file", "The plan", _file(page)),
    ]
    sections = [(key, title, content) for key, title, content in shown if content is not None]
    links = [element("a", title, href=f"#{key}") for key, title, _ in sections]
    body = element(
        "body",
        element("a", "Skip to the content", href="#main", class_="skip"),
        element("div", _header(page), class_="page"),
        element("nav", element("div", links, class_="page"), aria_label="Sections"),
        element(
            "main",
            _cards(page),
            [element("section", element("h2", title), content, id=key) for key, title, content in sections],
            id="main",
            class_="page",
        ),
        element("footer", f"Predicted by Cornstarch {__version__}; nothing here was run.", class_="page"),
        element("script", Markup(PAGE_SCRIPT)),
        element("script", Markup(SCRIPT)),
    )
    document = element("html", head(f"{page.name} on {page.cluster.name} · Cornstarch", STYLE), body, lang="en")
    return f"<!doctype html>\n{document}\n"


def write_page(page: Page, path: Path) -> None:
    """Write the page into a file."""
    write_html(path, render(page))


# ------------------------------------------------------------------------------------------------ the top


def _header(page: Page) -> Markup:
    tokens = f" of {figures.count(page.cost.tokens)} tokens" if page.cost.tokens else ""
    facts = [("batch", f"{page.cost.batch:,} samples{tokens}"), ("precision", page.cost.precision)]
    return element(
        "header",
        masthead("Cornstarch plan"),
        element(
            "div",
            element("h1", page.name[:200]),
            element("span", page.cluster.name[:80], class_="pill busy"),
            class_="title",
        ),
        element("p", page.cluster.describe(), class_="facts"),
        element("p", [element("span", f"{name} ", element("b", value)) for name, value in facts], class_="facts"),
    )


def _cards(page: Page) -> Markup:
    best, devices = page.best, page.cluster.devices
    idle = devices - best.choice.world
    shown = [
        ("Step", seconds(best.step), f"{best.samples_per_second:.3g} samples a second"),
        (f"{unit(best).capitalize()} a second", rate(best), "of the whole cluster"),
        ("MFU", figures.percent(best.mfu), "of what the devices could multiply at best"),
        ("Memory", figures.size(best.peak), f"of {figures.size(best.limit)} on the fullest device"),
        ("Devices", f"{best.choice.world:,}", f"{idle:,} more have nothing to do" if idle else "all of them"),
    ]
    paid = None if page.price is None else dollars(best, devices, page.price)
    if paid is not None:
        shown.append(("A million tokens", f"${paid:.3g}", f"at ${page.price:g} for a device and an hour"))
    else:
        shown.append(("Waiting", figures.percent(best.timeline.bubble), "of the pipeline's time"))
    cards = [
        element(
            "div",
            element("h3", name),
            element("p", value, class_="figure"),
            element("p", beside, class_="beside"),
            class_="card",
        )
        for name, value, beside in shown
    ]
    heading = element("h2", "Overview", class_="unseen")
    return element("section", heading, element("div", cards, class_="cards"), id="overview")


def _why(page: Page) -> Markup:
    lines = [element("li", line) for line in [*lines_of(page.best.choice), *cuts_of(page.best)]]
    reasons = [element("li", text) for text in why_best(page.found)]
    refused = [element("li", f"{text}.") for text in page.found.refused]
    return element(
        "div",
        element("div", element("h3", "It is"), element("ul", lines, class_="plain")),
        element("div", element("h3", "Because"), element("ul", reasons, class_="plain")) if reasons else None,
        element("div", element("h3", "Too large"), element("ul", refused, class_="plain")) if refused else None,
        class_="columns",
    )


# ------------------------------------------------------------------------------------------------ time and memory


def _timeline(page: Page) -> Markup:
    best, timeline = page.best, page.best.timeline
    nodes = timeline.schedule.graph.nodes
    names = tuple(place.holds for place in best.memory)
    rows = tuple(tuple(_bars(timeline, place)) for place in range(len(timeline.events)))
    picture = Picture(timeline.step, timeline.bubble, timeline.bubbles, (0.0,) * len(rows), rows)
    stages = tuple(f"{node.module} {node.index}" for node in nodes)
    read = Timelines(best.choice.schedule, best.choice.microbatches, names, ((),) * len(names), stages, ())
    lead = (
        f"One replica: {figures.several(len(names), 'place')}, "
        f"{figures.several(best.choice.microbatches, 'microbatch', 'microbatches')}; the same lists of actions that a "
        "run carries out. Sums of gradients over replicas go on during the last backward pass; what is left of them, "
        "and the optimizer, is at the end."
    )
    return join(element("p", lead, class_="lead"), drawn(read, {"Predicted": picture}))


def _bars(timeline: Timeline, place: int) -> Iterator[Bar]:
    """Yield the passes of a place, and what follows the last of them."""
    own = timeline.events[place]
    for event in own:
        yield Bar(KINDS[event.kind], str(event.kind), event.stage, event.microbatch, event.start, event.end)
    done = own[-1].end if own else 0.0
    end = max((stretch.end for stretch in timeline.stretches[place]), default=done)
    if end > done:
        yield Bar(AFTER, "", own[-1].stage if own else 0, timeline.schedule.microbatches - 1, done, end)


def _memory(page: Page) -> Markup:
    best = page.best
    most = max(best.peak, best.limit)
    shown = best.memory[:_MOST_PLACES]
    kinds = dict.fromkeys(name for place in shown for name, size in _pieces(place) if size)
    order = ["parameters", "optimizer", "gathered and buffers", "gradients", "activations"]
    colours = {name: number for number, name in enumerate(order, 1)}
    legend = [
        element("li", element("i", class_=f"block c{colours[name]}", aria_hidden="true"), name)
        for name in order
        if name in kinds
    ]
    rows = []
    for place in shown:
        said = ", ".join(f"{name} {figures.size(size)}" for name, size in _pieces(place) if size)
        parts = [
            element("i", class_=f"c{colours[name]}", style=f"width:{100 * size / most:.2f}%")
            for name, size in _pieces(place)
            if size
        ]
        limit = element("u", style=f"left:{100 * best.limit / most:.2f}%")
        rows.append(
            element(
                "li",
                element("span", place.holds[:60], title=place.holds[:200], class_="name"),
                element("span", parts, limit, class_="stack", role="img", aria_label=said, title=said),
                element("b", figures.size(place.peak)),
            )
        )
    hidden = len(best.memory) - len(shown)
    lead = (
        "The fullest moment of a step on each rank of a place; the line is what a device has to plan with, "
        f"{figures.size(best.limit)} of {figures.size(page.cluster.device.memory)}."
    )
    return join(
        element("p", lead, class_="lead"),
        element("div", element("ul", legend, class_="legend"), element("ul", rows, class_="memory"), class_="card"),
        element("p", f"{hidden:,} more places are not drawn.", class_="note") if hidden > 0 else None,
    )


def _pieces(place: PlaceMemory) -> list[tuple[str, int]]:
    """Return what the bytes of a place are; gradients that come as activations go stand in their place."""
    states = place.states
    others = states.averages + states.buffers + states.buckets + states.gathered
    lasting = states.parameters + states.optimizer + others
    passing = max(0, place.peak - lasting)
    activations = min(place.activations, passing)
    return [
        ("parameters", states.parameters),
        ("optimizer", states.optimizer),
        ("gathered and buffers", others),
        ("gradients", passing - activations),
        ("activations", activations),
    ]


def _shares(page: Page) -> Markup:
    best = page.best
    parts = sorted(((getattr(best.shares, name), words) for name, words in SHARES.items()), reverse=True)
    rows = [
        element("li", element("span", words, class_="name"), bar(value / best.step), element("b", seconds(value)))
        for value, words in parts
        if value > 0
    ]
    lead = "Of the busiest place, in one step."
    return join(element("p", lead, class_="lead"), element("div", element("ul", rows, class_="bars"), class_="card"))


# ------------------------------------------------------------------------------------------------ the rest


def _sizes(page: Page) -> Markup | None:
    fitting = [(one.cluster.devices, one.best, one.efficiency) for one in page.scaled if one.best is not None]
    if not page.scaled:
        return None
    rows = []
    for one in page.scaled:
        best = one.best
        paid = dollars(best, one.cluster.devices, page.price) if best is not None and page.price is not None else None
        cells = ["", "", "", "", "nothing fits"]
        if best is not None:
            text = element("span", best.choice.describe(), class_="text")
            cells = [seconds(best.step), rate(best), figures.percent(one.efficiency), figures.percent(best.mfu), text]
        price = [figures.NOTHING if paid is None else f"${paid:.3g}"] if page.price is not None else []
        rows.append([one.cluster.name, *cells[:4], *price, cells[4]])
    named = f"{unit(page.best)}/s#"
    cost = ["a million tokens#"] if page.price is not None else []
    columns = ["cluster", "a step#", named, "efficiency#", "MFU#", *cost, "plan"]
    return join(
        element("p", f"The best plan of each size, for the same batch of {page.cost.batch:,} samples.", class_="lead"),
        element("div", _scaling(fitting, unit(page.best)), class_="charts") if len(fitting) > 1 else None,
        element("div", table(columns, rows, "Other sizes of the cluster"), style="margin-top:0.9rem"),
    )


def _scaling(fitting: Sequence[tuple[int, Prediction, float | None]], what: str) -> Markup:
    rates = [(float(devices), best.tokens_per_second or best.samples_per_second) for devices, best, _ in fitting]
    least, first = rates[0]
    ideal = [(devices, first * devices / least) for devices, _ in rates]
    shares = [(float(devices), share) for devices, _, share in fitting if share is not None]
    throughput = [Line("predicted", rates, 1, "dots"), Line("in proportion", ideal, 2, "raw")]
    return join(
        draw(Chart(f"{what.capitalize()} a second", throughput, "count", from_zero=True, across="devices")),
        draw(
            Chart("Efficiency", [Line("of a device", shares, 3, "dots")], "percent", range=(0.0, 1.0), across="devices")
        ),
    )


def _file(page: Page) -> Markup:
    best = page.found.best
    command = "" if best is None else train_command(best, page.cluster, "CONFIG", "plan.yaml")
    lead = f"Save it as plan.yaml, and train with it: {command}"
    return join(
        element("p", lead, class_="lead"), element("pre", element("code", page.plan), class_="command", tabindex=0)
    )
