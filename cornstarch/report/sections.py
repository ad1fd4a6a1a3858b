"""The tables and lists of the page: model, data, samples, events, config, versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cornstarch.report import figures
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.media import medium
from cornstarch.report.overview import bar
from cornstarch.report.reading import Answer, Event, Part, Run
from cornstarch.report.values import entries, mapping, number, text

_MOST_SAMPLES = 60
_MOST_ROWS = 200
_MOST_TEXT = 2000  # characters of one text of a sample


def missing(why: str) -> Markup:
    """Return what stands where a section would be."""
    return element("p", why, class_="missing")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], label: str, foot: Sequence[str] = ()) -> Markup:
    """Return a table that scrolls in its own box; a column whose name ends in "#" holds numbers."""
    classes = ["number" if column.endswith("#") else None for column in columns]

    def row(cells: Sequence[str]) -> Markup:
        first, *rest = [join(cell) for cell in cells]
        return element(
            "tr",
            element("th", first, scope="row"),
            [element("td", cell, class_=kind) for cell, kind in zip(rest, classes[1:], strict=True)],
        )

    head = [element("th", c.rstrip("#"), scope="col", class_=kind) for c, kind in zip(columns, classes, strict=True)]
    return element(
        "div",
        element(
            "table",
            element("thead", element("tr", head)),
            element("tbody", [row(cells) for cells in rows]),
            element("tfoot", row(foot)) if foot else None,
        ),
        class_="scroll",
        role="region",
        aria_label=label,
        tabindex=0,
    )


# ------------------------------------------------------------------------------------------------ model


def model(run: Run) -> Markup:
    """Return the parts of the model: what they are, what of them is trained, and what they cost."""
    parts = run.parts
    if not parts:
        return missing("The parts of the model are not known: run.json does not list them.")
    weights = _total(parts, lambda part: part.parameters)
    work = _total(parts, lambda part: part.flops)
    foot = [
        "all parts", "", figures.count(weights), figures.count(_total(parts, lambda part: part.trainable)),
        figures.size(_total(parts, lambda part: part.bytes)), "", "", figures.flops(work),
    ]  # fmt: skip
    columns = [
        "part", "kind", "parameters#", "trained#", "memory#", "learning rate#", "weight decay#", "forward per sample#",
    ]  # fmt: skip
    return table(columns, [_part(part, weights, work) for part in parts], "The parts of the model", foot)


def _part(part: Part, weights: float | None, work: float | None) -> list[str]:
    trained = join(figures.count(part.trainable), element("small", part.train or figures.NOTHING))
    return [
        part.name,
        element("code", part.kind),
        _share(figures.count(part.parameters), part.parameters, weights),
        trained,
        figures.size(part.bytes),
        figures.plain(part.learning_rate),
        figures.plain(part.weight_decay),
        _share(figures.flops(part.flops), part.flops, work),
    ]


def _share(shown: str, value: float | None, total: float | None) -> Markup:
    if value is None or not total:
        return join(shown)
    return join(shown, element("small", figures.percent(value / total)), bar(value / total))


def _total(parts: list[Part], value: Callable[[Part], float | None]) -> float | None:
    known = [one for part in parts if (one := value(part)) is not None]
    return sum(known) if known else None


# ------------------------------------------------------------------------------------------------ data


def data(run: Run) -> Markup:
    """Return what was trained and evaluated on, and how much of it was left out."""
    described = mapping(run.summary.get("data"))
    blocks = [
        element("div", element("h3", name), _lines([text(line) for line in entries(described.get(key))]))
        for key, name in (("train", "Training"), ("evaluation", "Evaluation"))
    ]
    skipped = {name: number(count) for name, count in mapping(run.summary.get("skipped")).items()}
    if not skipped and run.metrics.last("skipped") is not None:
        skipped = {"of all kinds": run.metrics.last("skipped")}
    left_out = [f"{figures.count(count)} {name.replace('_', ' ')}" for name, count in skipped.items()]
    blocks.append(
        element(
            "div",
            element("h3", "Samples left out"),
            _lines(left_out) if left_out else missing("How many samples were left out is not known."),
        )
    )
    kept = mapping(run.summary.get("features"))
    if kept:
        blocks.append(element("div", element("h3", "Kept features"), _lines(_kept_features(kept))))
    return element("div", blocks, class_="columns")


def _kept_features(kept: Mapping[str, Any]) -> list[str]:
    """Return what is said of the cache of encoders' features."""
    hits, misses = (number(kept.get(name)) or 0 for name in ("hits", "misses"))
    lines = [
        f"{figures.count(hits)} of {figures.count(hits + misses)} items found",
        f"{figures.size(number(kept.get('bytes')))} in {text(kept.get('folder'))}",
    ]
    return [*lines, text(kept["problem"])] if kept.get("problem") else lines


def _lines(lines: list[str]) -> Markup:
    if not lines:
        return missing("Nothing is said about it in run.json.")
    more = len(lines) - _MOST_ROWS
    shown = [element("li", cut(line)) for line in lines[:_MOST_ROWS]]
    return element("ul", shown, element("li", f"and {more:,} more") if more > 0 else None, class_="plain")


# ------------------------------------------------------------------------------------------------ samples


def samples(run: Run) -> Markup:
    """Return samples with what they show, the truth and the answer."""
    answers = run.answers
    if not answers:
        return missing("There are no samples: the run has not ended, has no evaluation data, or its task no answers.")
    judged = [answer.right for answer in answers if answer.right is not None]
    said = f"{sum(judged):,} of these {len(judged):,} answers are right." if judged else ""
    if len(answers) > _MOST_SAMPLES:
        said += f" The first {_MOST_SAMPLES} of {len(answers):,} are shown."
    choices = ("all", "right", "wrong") if True in judged and False in judged else ()
    return join(
        element("p", said, class_="lead") if said else None,
        _choice(choices),
        element(
            "div",
            [_sample(run, answer, index) for index, answer in enumerate(answers[:_MOST_SAMPLES], 1)],
            class_="samples",
        ),
    )


def _choice(choices: Sequence[str]) -> Markup | None:
    if not choices:
        return None
    return element(
        "fieldset",
        element("legend", "Which samples are shown", class_="unseen"),
        [
            element(
                "label",
                element("input", type="radio", name="shown", value=choice, checked=choice == "all"),
                element("span", choice),
            )
            for choice in choices
        ],
        class_="choice",
    )


def _sample(run: Run, answer: Answer, index: int) -> Markup:
    kind, sign = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("", "")}[answer.right]
    mark = element("span", element("span", sign, aria_hidden="true"), f" {kind}", class_=f"pill {kind}")
    return element(
        "article",
        element(
            "header",
            element("h3", answer.source[:60] or f"sample {index}", element("small", f" {answer.id[:120]}")),
            mark if kind else None,
        ),
        element("div", [_piece(run, kind, value, index) for kind, value in answer.question], class_="question"),
        element(
            "dl",
            element("dt", "truth"),
            element("dd", cut(answer.truth) or figures.NOTHING),
            element("dt", "answer"),
            element("dd", cut(answer.answer) or element("i", "(nothing)")),
        ),
        class_=f"card sample {kind}".rstrip(),
    )


def _piece(run: Run, kind: str, value: str, index: int) -> Markup:
    if kind == "text":
        return element("span", cut(value))
    return medium(run.folder, kind[:40], value, index)


def cut(long: str) -> str:
    """Return a text, or its beginning and how much more there is."""
    if len(long) <= _MOST_TEXT:
        return long
    return f"{long[:_MOST_TEXT]} … ({len(long) - _MOST_TEXT:,} more characters)"


# ------------------------------------------------------------------------------------------------ the rest


def events(run: Run) -> Markup:
    """Return what happened and when."""
    found = run.metrics.events
    if not found:
        return missing("Nothing happened: the run was not resumed, saved or ended so far.")
    shown = found[-_MOST_ROWS:]
    started = run.number("started")
    note = f"The last {_MOST_ROWS} of {len(found):,}. " if len(found) > len(shown) else ""
    rows = [_event(event, started) for event in shown]
    return join(
        element("p", note, class_="note") if note else None,
        table(["event", "step#", "what", "after#", "time"], rows, "Events"),
    )


def _event(event: Event, started: float | None) -> list[str]:
    kind = {"failed": "bad", "stopped": "warn", "finished": "good", "best": "good"}.get(event.name, "")
    known = event.time is not None and started is not None
    after = figures.duration(max(0.0, event.time - started)) if known else figures.NOTHING  # type: ignore[operator]
    name = element("span", event.name[:40] or "event", class_=f"pill {kind}".rstrip())
    what = element("span", cut(event.text), class_="text")
    return [name, f"{event.step:,}", what, after, figures.moment(event.time)]


def config(run: Run) -> Markup:
    """Return the resolved config."""
    if run.config is None:
        return missing("There is no config.yaml in the run's folder.")
    return element(
        "details",
        element("summary", f"config.yaml, {figures.several(run.config.count(chr(10)), 'line')}"),
        element("pre", element("code", run.config), class_="scroll", tabindex=0),
    )


def versions(run: Run) -> Markup:
    """Return the versions of what the run was made with."""
    found = mapping(run.summary.get("versions"))
    if not found:
        return missing("The versions are not known: run.json does not list them.")
    pairs = [
        element("div", element("dt", name[:60]), element("dd", text(version)[:60])) for name, version in found.items()
    ]
    return element("dl", pairs, class_="versions")
