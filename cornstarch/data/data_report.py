"""`cornstarch data check`: statistics of all sources, broken samples, and the text that the model learns to write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cornstarch.config import DataConfig, SourceConfig
from cornstarch.data.formats import open_source
from cornstarch.data.media import load_audio, load_image
from cornstarch.data.sample import BrokenSample, Sample, SampleError
from cornstarch.errors import ConfigError, escape_controls

PERCENTILES = (0, 50, 90, 99, 100)
_EXCERPTS = 5
_LISTED = 20

Pieces = tuple[tuple[str, bool], ...]  # pieces of text, and whether each is trained on


@dataclass(frozen=True)
class SampleStats:
    length: int
    trained: int | None
    """The part of the length that is trained on; None if the target is something else, such as a label."""
    items: Mapping[str, int]  # the number of images and sounds, by modality
    pieces: Pieces


@dataclass(frozen=True)
class SampleInspector:
    """Reads whole samples as a run would: SampleError if it would skip one, ConfigError if it would stop there."""

    unit: str  # of lengths
    read: Callable[[Sample], SampleStats]

    def __call__(self, sample: Sample) -> SampleStats:
        return self.read(sample)


@dataclass
class SourceReport:
    name: str  # `data.train.0`
    description: str = ""
    problem: str = ""  # why the source cannot be opened; the rest is empty then
    samples: int = 0
    checked: int = 0
    lengths: list[int] = field(default_factory=list)  # of the valid samples: tokens, or characters without a tokenizer
    trained: list[int] = field(default_factory=list)  # the trained part of each length
    items: dict[str, int] = field(default_factory=dict)  # the number of images and sounds in the valid samples
    skipped: list[BrokenSample] = field(default_factory=list)

    @property
    def broken(self) -> list[BrokenSample]:
        return [sample for sample in self.skipped if not sample.too_long]

    @property
    def too_long(self) -> list[BrokenSample]:
        return [sample for sample in self.skipped if sample.too_long]


@dataclass
class DataReport:
    """The statistics of all sources."""

    unit: str  # the unit of lengths: tokens or characters
    skip_limit: float
    stops_at_long: bool = False  # whether a run stops at a sample that is too long
    sources: list[SourceReport] = field(default_factory=list)
    excerpts: list[tuple[str, Pieces]] = field(default_factory=list)
    """Ids and texts of the first valid samples, as the model sees them."""

    @property
    def problems(self) -> list[str]:
        """Why a run would stop; empty if it would not."""
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


def check_data(data: DataConfig, look: SampleInspector | None = None, most: int | None = None) -> DataReport:
    """Read and decode all samples, tokenize them if `look` does, and report.

    Args:
        data: The sources and limits.
        look: `build_preview` of a config: lengths are tokens, label masks are shown, and each item's number of features
            is checked against its placeholders. Without it only rows and media are checked, and torch is not needed.
        most: Check this many evenly spaced samples of each source instead of all.
    """
    look = look or SampleInspector("characters", partial(_inspect_row, data))
    report = DataReport(look.unit, data.skip_limit, data.too_long == "error")
    for name, configs in (("train", data.train), ("evaluation", data.evaluation)):
        for number, config in enumerate(configs):
            report.sources.append(_check_source(f"data.{name}.{number}", config, look, most, report.excerpts))
    return report


def _check_source(
    name: str, config: SourceConfig, look: SampleInspector, most: int | None, excerpts: list[tuple[str, Pieces]]
) -> SourceReport:
    report = SourceReport(name)
    try:
        source = open_source(config)
    except ConfigError as error:
        report.problem = f"{name}: {error}"
        return report
    report.description, report.samples = source.description, len(source)
    for index in select_evenly(len(source), most):
        report.checked += 1
        try:
            summary = look(source[index])
        except SampleError as error:
            report.skipped.append(BrokenSample.of(source.name(index), error))
            continue
        except ConfigError as error:
            report.problem = report.problem or f"{name}: {error}"
            report.skipped.append(BrokenSample(source.name(index), str(error)))
            continue
        report.lengths.append(summary.length)
        report.trained += [] if summary.trained is None else [summary.trained]
        for kind, count in summary.items.items():
            report.items[kind] = report.items.get(kind, 0) + count
        if len(excerpts) < _EXCERPTS:
            excerpts.append((source.name(index), summary.pieces))
    return report


def select_evenly(length: int, most: int | None) -> Sequence[int]:
    """Return `most` evenly spaced indices below a length; all of them if `most` is None."""
    if most is None or most >= length:
        return range(length)
    return np.linspace(0, length - 1, most).astype(int).tolist()


def _inspect_row(data: DataConfig, sample: Sample) -> SampleStats:
    """Check a row and its media alone: decode media and count characters."""
    items: dict[str, int] = {}
    for media in sample.media:
        if media.kind == "image":
            load_image(media, data.max_pixels)
        else:
            load_audio(media, None)
        items[media.kind] = items.get(media.kind, 0) + 1
    everything = data.train_on == "everything"
    pieces: list[tuple[str, bool]] = []
    for message in sample.messages:
        pieces.append((f"{message.role}: ", everything))
        for part in message.content:
            is_trained = isinstance(part, str) and (everything or message.role == "assistant")
            pieces.append((part if isinstance(part, str) else f"<{part.kind}>", is_trained))
        pieces.append(("\n", everything))
    for part in sample.document:
        pieces.append((part, True) if isinstance(part, str) else (f"<{part.kind}>", False))
    trained = sum(len(text) for text, is_trained in pieces if is_trained)
    return SampleStats(sum(len(text) for text, _ in pieces), trained, items, tuple(pieces))


def render(report: DataReport) -> Group:
    parts: list[Any] = [
        Text(escape_controls(f"{source.name}  {source.description}")) for source in report.sources if source.description
    ]
    heads = ["samples", "broken", "too long", "media", "trained", *(f"p{place}" for place in PERCENTILES)]
    title = f"Lengths in {report.unit}; percentiles"
    table = Table("source", *heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    parts.append(table)
    for source in report.sources:
        some = "" if source.checked == source.samples else f"{source.checked:,} of "
        media = "\n".join(f"{count:,} {kind}" for kind, count in source.items.items())
        fraction = f"{sum(source.trained) / sum(source.lengths):.0%}" if source.trained and any(source.lengths) else "–"
        counts = [f"{some}{source.samples:,}", str(len(source.broken)), str(len(source.too_long)), media, fraction]
        lengths = np.percentile(source.lengths, PERCENTILES, method="nearest").astype(int) if source.lengths else ()
        table.add_row(source.name.removeprefix("data."), *counts, *map(str, lengths))
        lines = [str(sample) for sample in source.skipped[:_LISTED]]
        if more := len(source.skipped) - len(lines):
            lines.append(f"… and {more:,} more of {source.name}")
        parts += [Text(line, style="red") for line in lines]
    if report.excerpts:
        parts.append(Text("\nSamples as the model sees them; text that it learns to write is ⟦marked⟧.", style="bold"))
    for id, pieces in report.excerpts:
        text = Text(f"{escape_controls(id)}\n", style="dim")
        for found, trained in pieces:
            piece = escape_controls(found)
            text.append(f"⟦{piece}⟧" if trained else piece, style="not dim bold green" if trained else "not dim")
        parts.append(text)
    parts += [Text(escape_controls(problem), style="bold red") for problem in report.problems]
    return Group(*parts)
