"""The top of the page: what the run is, how it stands, and the figures that everyone asks for first."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from cornstarch.report import figures
from cornstarch.report.document import masthead
from cornstarch.report.markup import Markup, element, join
from cornstarch.report.reading import Curve, Evaluation, Run
from cornstarch.report.values import mapping, text

# What a status looks like: a class and a sign, for those who do not see its colour.
_SIGNS = {"finished": ("good", "✓"), "running": ("busy", "▸"), "stopped": ("warn", "■"), "failed": ("bad", "✗")}


def header(run: Run) -> Markup:
    """Return the title with the status, and what was run where and when."""
    kind, sign = _SIGNS.get(run.status, ("", "?"))
    facts = [
        ("task", text(run.summary.get("task"))),
        ("started", figures.moment(run.number("started"))),
        ("ended", figures.moment(run.number("ended"))),
    ]
    command = text(run.summary.get("command"))
    return element(
        "header",
        masthead("Cornstarch run report"),
        element(
            "div",
            element("h1", run.name[:200]),
            element("span", element("span", sign, aria_hidden="true"), f" {run.status[:40]}", class_=f"pill {kind}"),
            class_="title",
        ),
        element(
            "p",
            [element("span", f"{name} ", element("b", value)) for name, value in facts if value.strip(figures.NOTHING)],
            class_="facts",
        ),
        element("pre", element("code", command[:2000]), class_="command", tabindex=0) if command else None,
        _progress(run),
    )


def _progress(run: Run) -> Markup | None:
    step, total = run.step, run.number("total_steps")
    if step is None or total is None or not 0 < total < float("inf"):
        return None
    share = min(1.0, max(0.0, step / total))
    return element(
        "div",
        element("div", element("i", style=f"width:{share * 100:.1f}%"), class_="track", aria_hidden="true"),
        element("span", f"step {step:,} of {total:,.0f}"),
        class_="progress",
    )


def cards(run: Run) -> Markup:
    """Return the key figures."""
    shown = [_loss(run), _speed(run), _time(run), _parameters(run), _device(run), _memory(run)]
    return element(
        "section",
        element("h2", "Overview", class_="unseen"),
        element("div", _accuracies(run), [card for card in shown if card], class_="cards"),
        id="overview",
    )


def _card(name: str, value: str, beside: str | None = None) -> Markup:
    return element(
        "div",
        element("h3", name),
        element("p", value, class_="figure"),
        element("p", beside, class_="beside") if beside else None,
        class_="card",
    )


def _loss(run: Run) -> Markup:
    trained = run.metrics.last("loss")
    evaluation = run.evaluation
    if evaluation is not None and "loss" in evaluation.measures:
        best = f" · best at step {run.best_step:,}" if run.best_step is not None else ""
        beside = f"training {figures.plain(trained)}{best}"
        return _card("Held-out loss", figures.plain(evaluation.measures["loss"]), beside)
    return _card("Training loss", figures.plain(trained), "nothing was logged" if trained is None else "no evaluation")


def _accuracies(run: Run) -> Markup | None:
    """Return the accuracy of each source as bars; of all, if the sources are not known."""
    evaluation = run.evaluation
    if evaluation is None:
        return None
    rows = [(name, measures["accuracy"], measures.get("count")) for name, measures in _known(evaluation)]
    if not rows:
        return None
    return element(
        "div",
        element("h3", f"Held-out accuracy at step {evaluation.step:,}"),
        element(
            "ul",
            [
                element(
                    "li",
                    element("span", name[:60], class_="name"),
                    bar(value),
                    element("b", figures.percent(value)),
                    element("small", f"of {number:,.0f}" if number else ""),
                )
                for name, value, number in rows[:12]
            ],
            class_="bars",
        ),
        class_="card wide",
    )


def _known(evaluation: Evaluation) -> list[tuple[str, dict[str, float]]]:
    sources = [(name, dict(measures)) for name, measures in evaluation.sources.items() if "accuracy" in measures]
    return sources or ([("all", dict(evaluation.measures))] if "accuracy" in evaluation.measures else [])


def bar(share: float | None, colour: int = 1) -> Markup:
    """Return a bar for a share of one; its number must stand beside it."""
    width = 0.0 if share is None or not share > 0 else min(1.0, share) * 100
    return element(
        "span", element("i", class_=f"c{colour}", style=f"width:{width:.1f}%"), class_="track", aria_hidden="true"
    )


def _speed(run: Run) -> Markup | None:
    rates = [value for _, value in run.metrics.train.get("tokens_per_second", [])]
    if not rates:
        return None
    items = [f"{figures.plain(_middle(curve))} {name}" for name, curve in run.metrics.items.items()][:3]
    return _card("Tokens per second", figures.count(median(rates)), " · ".join(["median", *_computing(run), *items]))


def _computing(run: Run) -> Iterator[str]:
    """Yield how much was multiplied in a second, and which share that is of what the devices can."""
    if rates := [value for _, value in run.metrics.train.get("flops_per_second", [])]:
        yield f"{figures.flops(median(rates))}/s"
    if shares := [value for _, value in run.metrics.train.get("mfu", [])]:
        yield f"{figures.percent(median(shares))} MFU"


def _middle(curve: Curve) -> float:
    return float(f"{median(value for _, value in curve):.3g}")


def _time(run: Run) -> Markup:
    step = run.step
    return _card("Training time", figures.duration(run.seconds), figures.several(step, "step") if step else None)


def _parameters(run: Run) -> Markup | None:
    parts = run.parts
    if not parts:
        return None
    total = sum(part.parameters or 0 for part in parts)
    trained = sum(part.trainable or 0 for part in parts)
    share = f" ({figures.percent(trained / total)})" if total else ""
    return _card("Parameters", figures.count(total), f"{figures.count(trained)} trained{share}")


def _device(run: Run) -> Markup | None:
    device, precision = text(run.summary.get("device")), text(run.summary.get("precision"))
    if not device and not precision:
        return None
    said = [f"precision {precision[:40]}"] if precision else []
    if buckets := text(run.summary.get("buckets")):
        said.append(f"gradients in {buckets[:120]}")
    return _card("Device", device[:40] or figures.NOTHING, " · ".join(said) or None)


def _memory(run: Run) -> Markup | None:
    used = [value for _, value in run.metrics.train.get("memory", [])]
    chosen = text(mapping(run.summary.get("recomputation")).get("line"))[:120]
    said = " · ".join(["as logged while training", *([chosen] if chosen else [])])
    return _card("Peak memory", figures.size(max(used)), said) if used else None


def notes(run: Run) -> Markup | None:
    """Return what was missing or damaged in the folder."""
    said = [*run.notes, *run.metrics.notes]
    if not said:
        return None
    return element("div", [join(element("p", note)) for note in said], class_="notes", role="note")
