"""The pipeline of a run: what each place did when in one step, under what it was predicted to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from cornstarch.report import figures
from cornstarch.report.curves import Axis, linear_axis
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.reading import Run
from cornstarch.report.sections import table
from cornstarch.report.timelines import AFTER, BUBBLE, KINDS, WAIT, Bar, Compared, Picture, Timelines

_WIDTH = 1000  # of a drawing, in its own units
_ROW, _BAR = 20, 16
_MOST_BARS = 3000  # of one drawing that have a text of their own
_MOST_PLACES = 64
_LETTER = 0.022  # the width of a digit as a share of the drawing's, on a narrow screen
_CLASSES = {
    "forward": "f",
    "backward": "b",
    "input gradient": "i",
    "weight gradient": "w",
    WAIT: "t",
    AFTER: "o",
    BUBBLE: "n",
}


def pipeline(run: Run) -> Markup | None:
    """Return the section; None if the run has no pipeline."""
    read = run.timelines
    if read is None:
        return None
    *earlier, last = read.steps
    return join(
        element(
            "p",
            f"{figures.several(len(read.places), 'place')} with the schedule {read.schedule[:40]} and "
            f"{figures.several(read.microbatches, 'microbatch', 'microbatches')}. The prediction is a simulation of "
            "the same schedule with the mean costs of that step, and transfers that take no time.",
            class_="lead",
        ),
        _step(read, last),
        [
            element("details", element("summary", f"Step {step.step:,}"), _step(read, step), class_="earlier")
            for step in reversed(earlier)
        ],
    )


def _step(read: Timelines, step: Compared) -> Markup:
    return join(_facts(step), drawn(read, {"Predicted": step.predicted, "Real": step.real}), _places(read, step))


def drawn(read: Timelines, pictures: Mapping[str, Picture]) -> Markup:
    """Return steps as drawings below one another, over the same axis.

    Args:
        read: Whose places and stages they are of.
        pictures: The steps, by their titles.
    """
    across = linear_axis(0.0, 1e3 * max(1e-6, *(picture.seconds for picture in pictures.values())))
    return element(
        "figure",
        _legend([*pictures.values()]),
        [_drawing(title, read, picture, across) for title, picture in pictures.items()],
        _axis(across),
        class_="gantt",
    )


def _facts(step: Compared) -> Markup:
    real, predicted = step.real, step.predicted
    longer = f"{abs(step.difference) * 100:.1f}\u00a0% {'longer' if step.difference >= 0 else 'shorter'}"
    facts = [
        ("Step time", _time(real.seconds), f"step {step.step:,}"),
        ("Predicted", _time(predicted.seconds), f"the real one is {longer}"),
        ("Bubble", figures.percent(real.bubble), f"predicted {figures.percent(predicted.bubble)}"),
    ]
    return element(
        "div",
        [
            element(
                "article",
                element("h3", name),
                element("p", value, class_="figure"),
                element("p", beside, class_="beside"),
                class_="card",
            )
            for name, value, beside in facts
        ],
        class_="cards",
    )


def _legend(pictures: Sequence[Picture]) -> Markup:
    used = {bar.kind for picture in pictures for row in picture.rows for bar in row}
    names = [name for name in (*KINDS.values(), WAIT, AFTER) if name in used]
    return element(
        "figcaption",
        element(
            "ul",
            [
                element("li", element("i", class_=f"block {_CLASSES[name]}", aria_hidden="true"), name)
                for name in (*names, BUBBLE)
            ],
            class_="legend",
        ),
    )


def _drawing(title: str, read: Timelines, picture: Picture, across: Axis) -> Markup:
    names = read.places[:_MOST_PLACES]
    rows = [_row(read, picture, place, across) for place in range(len(names))]
    hidden = len(read.places) - len(names)
    return join(
        element("h3", title, element("small", f" {_time(picture.seconds)}")),
        element(
            "div",
            element("div", [_name(name) for name in names], class_="places"),
            element(
                "svg",
                rows,
                viewBox=f"0 0 {_WIDTH} {_ROW * len(names)}",
                preserveAspectRatio="none",
                role="img",
                aria_label=_description(title, read, picture),
                style=f"height:{1.5 * len(names):g}rem",
            ),
            class_="rows",
        ),
        element("p", f"{hidden:,} more places are not drawn; the table has them.", class_="note") if hidden else None,
    )


def _name(name: str) -> Markup:
    """Return the name of a place, whose end stays to be seen where there is no room for all of it."""
    words, _, last = name.rpartition(" ")
    return element("span", element("span", words[:60]), f"\u00a0{last[:20]}", title=name[:200])


def _row(read: Timelines, picture: Picture, place: int, across: Axis) -> Markup:
    """Return what a place does: what is left of its row is bubble."""
    row, top = picture.rows[place], place * _ROW
    free = element(
        "rect",
        element("title", f"{read.places[place][:60]}: {BUBBLE} {figures.percent(picture.bubbles[place])}"),
        x=0,
        y=top + (_ROW - _BAR) / 2,
        width=f"{_x(across, picture.seconds):.2f}",
        height=_BAR,
        class_="n",
    )
    separate = sum(map(len, picture.rows)) <= _MOST_BARS
    drawn = [_bar(read, bar, across, top) for bar in row] if separate else list(_runs(row, across, top))
    return element("g", free, drawn)


def _bar(read: Timelines, bar: Bar, across: Axis, top: int) -> Markup:
    stage = read.stages[bar.stage] if bar.stage < len(read.stages) else str(bar.stage)
    said = f"{bar.kind}, microbatch {bar.microbatch}, {stage[:60]}: {_time(bar.lasts)} from {_time(bar.start)}"
    left, right = _x(across, bar.start), _x(across, bar.end)
    return element(
        "rect",
        element("title", said),
        x=f"{left:.2f}",
        y=top + (_ROW - _BAR) / 2,
        width=f"{max(right - left, 0.3):.2f}",
        height=_BAR,
        class_=_CLASSES[bar.kind],
    )


def _runs(row: Sequence[Bar], across: Axis, top: int) -> Iterator[Markup]:
    """Yield one shape for each kind: too many bars for a text each."""
    y = top + (_ROW - _BAR) / 2
    for kind, bars in groupby(sorted(row, key=lambda bar: bar.kind), key=lambda bar: bar.kind):
        ends = [(_x(across, bar.start), _x(across, bar.end)) for bar in bars]
        shapes = [f"M{left:.2f} {y}V{y + _BAR}H{max(right, left + 0.1):.2f}V{y}z" for left, right in ends]
        yield element("path", element("title", kind), d="".join(shapes), class_=_CLASSES[kind])


def _axis(across: Axis) -> Markup:
    """Return the marks, without those that would run out of the picture."""
    ticks = [tick for tick in across.ticks if across.place(tick) <= 1 - _LETTER]
    marks = [element("span", figures.tick(tick), style=f"left:{100 * across.place(tick):.2f}%") for tick in ticks]
    return element("div", element("span", "ms", class_="unit"), element("div", marks, class_="marks"), class_="times")


def _places(read: Timelines, step: Compared) -> Markup:
    columns = ["place", "ranks", "bubble, predicted#", "bubble, real#", "of it transfer#"]
    rows = [
        [
            name[:200],
            _ranks(read.ranks[place]),
            figures.percent(step.predicted.bubbles[place]),
            figures.percent(step.real.bubbles[place]),
            figures.percent(step.real.transfers[place] / step.real.seconds if step.real.seconds else 0.0),
        ]
        for place, name in enumerate(read.places)
    ]
    return table(columns, rows, f"Places of step {step.step}")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, … ({len(ranks):,})" if len(ranks) > 8 else shown


def _description(title: str, read: Timelines, picture: Picture) -> str:
    shares = [f"{name[:60]} {figures.percent(b)}" for name, b in zip(read.places, picture.bubbles, strict=True)]
    return f"{title}: a step of {_time(picture.seconds)}. Bubble: {', '.join(shares[:_MOST_PLACES])}."


def _x(across: Axis, seconds: float) -> float:
    return min(max(_WIDTH * across.place(1e3 * seconds), 0.0), float(_WIDTH))


def _time(seconds: float) -> str:
    if seconds >= 1:
        return figures.duration(seconds)
    return f"{figures.plain(float(f'{1e3 * seconds:.3g}'))}\u00a0ms"
