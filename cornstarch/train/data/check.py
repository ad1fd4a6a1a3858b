"""A look at all data before a run: what is there, what is broken, and what the model will learn to write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cornstarch.errors import ConfigError
from cornstarch.train.config import DataConfig, SourceConfig
from cornstarch.train.data.formats import open_source
from cornstarch.train.data.media import load_audio, load_image
from cornstarch.train.data.sample import BrokenSample, Media, Sample, SampleError

PERCENTILES = (0, 50, 90, 99, 100)
_SHOWN = 5
_LISTED = 20


@dataclass(frozen=True)
class Seen:
    """What there is to say about one good sample."""

    length: int
    trained: int | None
    """How much of the length is trained on; None if that is something else, such as a label."""
    items: Mapping[str, int]
    """Images and sounds, by modality."""
    pieces: tuple[tuple[str, bool], ...]
    """It as text, and whether it is trained on."""


class Look(Protocol):
    """Looks at a sample: reads all of it, as a run would."""

    @property
    def unit(self) -> str:
        """What lengths are counted in."""
        ...

    def __call__(self, sample: Sample) -> Seen:
        """Say what it is; SampleError if a run would leave it out, ConfigError if a run would stop at it."""
        ...


@dataclass(frozen=True)
class ShownSample:
    """A sample as the model meets it."""

    id: str
    pieces: tuple[tuple[str, bool], ...]
    """Text, and whether it is trained on."""


@dataclass
class SourceReport:
    """What one source holds."""

    name: str
    """`data.train.0`."""
    description: str = ""
    problem: str = ""
    """Why it cannot be opened; the rest is empty then."""
    samples: int = 0
    checked: int = 0
    lengths: list[int] = field(default_factory=list)
    """Of the good samples; tokens, or characters where there is no tokenizer."""
    trained: list[int] = field(default_factory=list)
    """How much of it is trained on, where that is a part of it."""
    items: dict[str, int] = field(default_factory=dict)
    """Images and sounds in the good samples."""
    skipped: list[BrokenSample] = field(default_factory=list)

    @property
    def broken(self) -> list[BrokenSample]:
        """Samples with something wrong."""
        return [sample for sample in self.skipped if not sample.too_long]

    @property
    def too_long(self) -> list[BrokenSample]:
        """Samples above the limit."""
        return [sample for sample in self.skipped if sample.too_long]

    def percentiles(self) -> list[int]:
        """Return the lengths at PERCENTILES."""
        return (
            [int(value) for value in np.percentile(self.lengths, PERCENTILES, method="nearest")] if self.lengths else []
        )


@dataclass
class DataReport:
    """What all sources hold."""

    unit: str
    """What lengths are counted in: tokens or characters."""
    skip_limit: float
    stops_at_long: bool = False
    """Whether a run stops at a sample that is too long."""
    sources: list[SourceReport] = field(default_factory=list)
    shown: list[ShownSample] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Why a run would stop: nothing if it would not."""
        found = [source.problem for source in self.sources if source.problem]
        for source in self.sources:
            if self.stops_at_long and source.too_long:
                found.append(
                    f"{source.name}: {source.too_long[0]}. `data.too_long` = error stops the run there; raise the "
                    "limit, or set it to skip or cut."
                )
            if source.checked and not source.lengths:
                found.append(f"{source.name}: none of {source.checked} samples can be used.")
            elif len(source.broken) > self.skip_limit * (source.checked - len(source.too_long)):
                found.append(
                    f"{source.name}: {len(source.broken)} of {source.checked} samples are broken, more than "
                    f"`data.skip_limit` = {self.skip_limit:g} allows."
                )
        return found


def check_data(data: DataConfig, look: Look | None = None, most: int | None = None) -> DataReport:
    """Read and decode all samples, tokenize them if `look` does, and report.

    Args:
        data: The sources and limits.
        look: `look_of` of a run's config: lengths are tokens, label masks are shown, and each item's number of features
            is checked against its placeholders. Without it only rows and media are checked, and torch is not needed.
        most: Look at so many samples of each source, evenly spread, instead of all.
    """
    look = look or RowLook(data)
    report = DataReport(look.unit, data.skip_limit, data.too_long == "error")
    for name, configs in (("train", data.train), ("evaluation", data.evaluation)):
        for number, config in enumerate(configs):
            report.sources.append(_check_source(f"data.{name}.{number}", config, look, most, report.shown))
    return report


def _check_source(
    name: str, config: SourceConfig, look: Look, most: int | None, shown: list[ShownSample]
) -> SourceReport:
    report = SourceReport(name)
    try:
        source = open_source(config)
    except ConfigError as error:
        report.problem = f"{name}: {error}"
        return report
    report.description, report.samples = source.description, len(source)
    for index in evenly(len(source), most):
        report.checked += 1
        try:
            seen = look(source[index])
        except SampleError as error:
            report.skipped.append(BrokenSample.of(source.name(index), error))
            continue
        except ConfigError as error:
            report.problem = report.problem or f"{name}: {error}"
            report.skipped.append(BrokenSample(source.name(index), str(error)))
            continue
        report.lengths.append(seen.length)
        report.trained += [] if seen.trained is None else [seen.trained]
        for kind, count in seen.items.items():
            report.items[kind] = report.items.get(kind, 0) + count
        if len(shown) < _SHOWN:
            shown.append(ShownSample(source.name(index), seen.pieces))
    return report


def evenly(length: int, most: int | None) -> Sequence[int]:
    """Return so many of the numbers below a length, evenly spread; all of them if `most` is None."""
    if most is None or most >= length:
        return range(length)
    return np.linspace(0, length - 1, most).astype(int).tolist()


@dataclass(frozen=True)
class RowLook:
    """Looks at rows and media alone: decodes them, and counts characters."""

    data: DataConfig
    unit: str = "characters"

    def __call__(self, sample: Sample) -> Seen:
        """Decode a sample's media, and count characters."""
        items: dict[str, int] = {}
        for media in sample.media:
            _decode(media, self.data)
            items[media.kind] = items.get(media.kind, 0) + 1
        pieces = tuple(_written(sample, self.data))
        lengths = [(len(text), trained) for text, trained in pieces]
        return Seen(sum(n for n, _ in lengths), sum(n for n, trained in lengths if trained), items, pieces)


def _decode(media: Media, data: DataConfig) -> Any:
    return load_image(media, data.max_pixels) if media.kind == "image" else load_audio(media, None)


def _written(sample: Sample, data: DataConfig) -> Iterator[tuple[str, bool]]:
    everything = data.train_on == "everything"
    for message in sample.messages:
        yield f"{message.role}: ", everything
        for part in message.content:
            is_text = isinstance(part, str)
            yield (
                part if isinstance(part, str) else f"<{part.kind}>",
                is_text and (everything or message.role == "assistant"),
            )
        yield "\n", everything
    for part in sample.document:
        yield part if isinstance(part, str) else f"<{part.kind}>", isinstance(part, str)


# ------------------------------------------------------------------------------------------------ on the screen


def render(report: DataReport) -> Group:
    """Return the report as something that rich prints."""
    parts: list[Any] = [Text(f"{source.name}  {source.description}") for source in report.sources if source.description]
    parts.append(_table(report))
    for source in report.sources:
        parts += [Text(line, style="red") for line in _listed(source)]
    if report.shown:
        parts.append(Text("\nSamples as the model meets them; what it learns to write is ⟦marked⟧.", style="bold"))
    for sample in report.shown:
        text = Text(f"{sample.id}\n", style="dim")
        for piece, trained in sample.pieces:
            text.append(f"⟦{piece}⟧" if trained else piece, style="not dim bold green" if trained else "not dim")
        parts.append(text)
    parts += [Text(problem, style="bold red") for problem in report.problems]
    return Group(*parts)


def _table(report: DataReport) -> Table:
    heads = ["samples", "broken", "too long", "media", "trained", *(f"p{place}" for place in PERCENTILES)]
    title = f"Lengths in {report.unit}; percentiles"
    table = Table("source", *heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for source in report.sources:
        some = "" if source.checked == source.samples else f"{source.checked:,} of "
        media = "\n".join(f"{count:,} {kind}" for kind, count in source.items.items())
        share = f"{sum(source.trained) / sum(source.lengths):.0%}" if source.trained and any(source.lengths) else "–"
        counts = [f"{some}{source.samples:,}", str(len(source.broken)), str(len(source.too_long)), media, share]
        table.add_row(source.name.removeprefix("data."), *counts, *map(str, source.percentiles()))
    return table


def _listed(source: SourceReport) -> list[str]:
    lines = [str(sample) for sample in source.skipped[:_LISTED]]
    more = len(source.skipped) - len(lines)
    return [*lines, f"… and {more:,} more of {source.name}"] if more else lines


__all__ = ["DataReport", "Look", "RowLook", "Seen", "ShownSample", "SourceReport", "check_data", "render"]
