"""What a run tells while it runs, and what it leaves to read: progress, metrics, the summary, the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from rich.console import Console
from rich.table import Table

from cornstarch import __version__
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import processes
from cornstarch.plan.cluster import peak_flops
from cornstarch.report import write_report
from cornstarch.train.answers import collect_answers
from cornstarch.train.clock import StepClock
from cornstarch.train.config import RunConfig
from cornstarch.train.data.sample import BrokenSample
from cornstarch.train.loggers import Logger, flatten, open_loggers
from cornstarch.train.metrics import MetricsFile, Throughput
from cornstarch.train.parts import Part
from cornstarch.train.progress import Progress
from cornstarch.train.runs import METRICS, REPORT, RunFolder
from cornstarch.train.source import as_data

if TYPE_CHECKING:
    from cornstarch.train.features.keeping import KeptFeatures
    from cornstarch.train.results import Position, StepResult
    from cornstarch.train.trainer import Trainer

_SKIPPED_SHOWN = 5
_COLUMNS = ("parameters", "trained", "memory", "train", "rate", "decay")
_WIDE = 110


class Teller:
    """Tells one run."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, console: Console, command: str | None, speaks: bool = True
    ) -> None:
        self._config, self._folder, self._command = config, folder, command
        # Of several processes one speaks and writes; the others do all that needs them, in silence.
        self._speaks = speaks
        self._console = console if speaks else Console(quiet=True)
        self._progress: Progress | None = None
        self._metrics: MetricsFile | None = None
        self._loggers: list[Logger] = []
        self._throughput = Throughput()
        self._clock = StepClock(None)
        self._skipped = 0
        self._summary: dict[str, Any] = {}
        self._shown_at_end: Table | None = None
        self.last_evaluation: dict[str, Any] | None = None
        self.last_evaluation_step: int | None = None

    # ------------------------------------------------------------------ the beginning

    def begun(self, trainer: Trainer, resumed_from: int | None) -> None:
        """Open what is written to, and show what is trained on what."""
        self._clock = trainer.clock
        if self._speaks:
            self._open(trainer)
        self._summary = self._described(trainer)
        if resumed_from is not None:
            self._remember(self._folder.stored_summary(), trainer.position.step)
        self._write_summary()
        self._console.print(part_table(trainer.all_parts, self._console.width), soft_wrap=False)
        for kind, lines in self._summary["data"].items():
            for line in lines:
                self._console.print(f"{kind} data: {line}", markup=False, highlight=False)
        data = self._config.parallel.data
        how = data.kind if data.compression.kind == "none" else f"{data.kind}, {data.compression.kind}"
        several = f" in {trainer.ranks} processes ({how})" if trainer.ranks > 1 else ""
        self._console.print(
            f"{self._config.folder}: {trainer.total_steps:,} steps of {self._config.loop.batch_size} samples on "
            f"{trainer.placement.device} in {_precision(trainer)}{several}",
            markup=False,
            highlight=False,
        )
        if resumed_from is not None and not trainer.position.ended:
            self._event(resumed_from, "resumed", f"goes on after step {resumed_from}")

    def _open(self, trainer: Trainer) -> None:
        self._metrics = MetricsFile(self._folder / METRICS)
        self._metrics.rewind(trainer.position.step)
        self._loggers = open_loggers(
            self._config.logging.to,
            self._folder.path,
            self._config.name,
            as_data(self._config),
            step=trainer.position.step,
            warn=self.note,
        )

    def _write_summary(self) -> None:
        if self._speaks:
            self._folder.write_summary(self._summary)

    def _remember(self, earlier: Mapping[str, Any], step: int) -> None:
        """Keep what an earlier start of the run has found out, unless that was after the checkpoint."""
        if (earlier.get("evaluation") or {}).get("step", 0) > step:
            earlier = {"started": earlier.get("started")}
        kept = ("started", "evaluation", "best", "shuffled", "answers")
        self._summary.update({key: earlier[key] for key in kept if earlier.get(key)})
        evaluation = earlier.get("evaluation")
        if evaluation:
            self.last_evaluation_step = evaluation["step"]
            self.last_evaluation = {key: evaluation[key] for key in evaluation if key not in ("kind", "step", "time")}

    def _described(self, trainer: Trainer) -> dict[str, Any]:
        return {
            "name": self._config.name,
            "status": "running",
            "started": time.time(),
            "ended": None,
            "seconds": trainer.position.seconds,
            "step": trainer.position.step,
            "total_steps": trainer.total_steps,
            "device": _device_name(trainer.placement.device),
            "precision": _precision(trainer),
            "versions": versions(),
            "task": trainer.task.name,
            "command": self._command,
            "parts": [_part_entry(part) for part in trainer.all_parts],
            "data": {
                "train": trainer.sources.description.splitlines(),
                "evaluation": [source.description for source in trainer.evaluation_sources.values()],
            },
            "evaluation": None,
            "shuffled": [],
            "best": None,
            "skipped": {"broken": 0, "too_long": 0},
            "answers": [],
            "features": None if trainer.features is None else trainer.features.told(),
            "recomputation": None if trainer.recomputation is None else trainer.recomputation.told(),
            "buckets": trainer.buckets,
        }

    # ------------------------------------------------------------------ while it runs

    @contextmanager
    def telling(self, position: Position, total: int) -> Iterator[None]:
        """Show progress while a block runs."""
        with Progress(self._config.logging.progress, total, position.step, self._console) as progress:
            self._progress = progress
            self._throughput.start(position.seconds, position.tokens)
            try:
                yield
            finally:
                self._progress = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave a block out of the speed."""
        with self._throughput.paused():
            yield
        self._clock.rests()

    @property
    def seconds(self) -> float:
        """Time spent training, over all starts of the run."""
        return self._throughput.seconds

    def note(self, text: str) -> None:
        """Say something."""
        if self._progress is not None:
            self._progress.note(text)
        else:
            self._console.print(text, markup=False, highlight=False)

    def skipped(self, samples: Sequence[BrokenSample]) -> None:
        """Say which samples were left out, the first few of them."""
        for sample in samples:
            self._skipped += 1
            if self._skipped <= _SKIPPED_SHOWN:
                self.note(f"left out: {sample}")
            elif self._skipped == _SKIPPED_SHOWN + 1:
                self.note("… and more; they are counted")

    def stepped(self, result: StepResult, trainer: Trainer) -> None:
        """Count a step, and now and then write what there is to say."""
        totals = result.totals
        # Everything but the loss is of all processes already; of the loss each has its share.
        loss = result.loss * totals.trained_tokens
        self._throughput.add(
            totals.samples, totals.tokens, totals.trained_tokens, loss, totals.items, result.waited, totals.flops
        )
        if self._progress is not None:
            self._progress.step(result.step)
        if self.is_logged(result.step, trainer.total_steps):
            self._log_training(result, trainer)

    def is_logged(self, step: int, total: int) -> bool:
        """Say whether a step is written down."""
        return step % self._config.logging.every == 0 or step in (1, total)

    def _log_training(self, result: StepResult, trainer: Trainer) -> None:
        steps = self._throughput.steps
        line = self._throughput.line()
        own = [] if trainer.features is None else [trainer.features.hits, trainer.features.misses]
        timed = self._clock.read()
        if timed is not None and timed.steps:  # all of them: the loss of the last was waited for
            line["step_time"], line["data_wait"] = timed.seconds / timed.steps, timed.waited / timed.steps
        waits = [line["step_time"], line["data_wait"], trainer.feed.waited() / steps]
        loss, step_time, data_wait, copy_wait, *counts = _summed(trainer, [line["loss"], *waits, *own])
        line["loss"] = loss / trainer.replica.alike
        means = {"step_time": step_time, "data_wait": data_wait, "copy_wait": copy_wait}
        line |= {name: total / trainer.ranks for name, total in means.items()}
        record = {
            "kind": "train",
            "step": result.step,
            "time": time.time(),
            "epoch": self._epoch(trainer),
            "learning_rate": result.learning_rate,
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            **line,
            "memory": trainer.placement.memory(),
            "skipped": trainer.position.broken + trainer.position.too_long,
            **trainer.exchange.figures(),
        }
        peak = peak_flops(_device_name(trainer.placement.device), trainer.placement.precision)
        if peak is not None and "flops_per_second" in line:
            record["mfu"] = line["flops_per_second"] / (peak * trainer.ranks)
        if trainer.features is not None:
            record["features"] = self._features(trainer.features, *map(int, counts))
        self._write(record)
        if self._progress is not None:
            self._progress.metrics(record)

    def _features(self, kept: KeptFeatures, hits: int, misses: int) -> dict[str, Any]:
        """Return what is said of encoders' features, and say once if they can no longer be kept."""
        before, told = self._summary["features"], {**kept.told(), "hits": hits, "misses": misses}
        if told["problem"] is not None and before["problem"] is None:
            self.note(f"features are no longer kept: {told['problem']}")
        self._summary["features"] = told
        return {name: told[name] for name in ("hits", "misses", "bytes")}

    def _epoch(self, trainer: Trainer) -> float:
        steps = max(trainer.steps_of_epoch(trainer.position.epoch), 1)
        return round(trainer.position.epoch + min(trainer.position.batch / steps, 1.0), 4)

    def evaluated(self, record: Mapping[str, Any], position: Position, improved: bool) -> None:
        """Tell an evaluation."""
        line = {"kind": "evaluation", "step": position.step, "time": time.time(), **record}
        self.last_evaluation, self.last_evaluation_step = dict(record), position.step
        self._summary["evaluation"] = line
        self._summary["best"] = {
            "step": position.best_step, "metric": position.best, "name": self._config.checkpoint.best_by,
        }  # fmt: skip
        self._write(line)
        if improved:
            name = self._config.checkpoint.best_by
            self._event(position.step, "best", f"{name} {position.best:.4g}", aloud=False)
        self.note(f"step {position.step}: {_evaluation_text(record)}{', the best so far' if improved else ''}")

    def exchanged(self, modality: str, record: Mapping[str, Any], position: Position) -> None:
        """Tell an evaluation with one modality's items exchanged between samples."""
        line = {"kind": "shuffled", "step": position.step, "time": time.time(), "modality": modality, **record}
        others = [one for one in self._summary["shuffled"] if one.get("modality") != modality]
        self._summary["shuffled"] = [*others, line]
        self._write(line)
        self.note(f"with {modality} items exchanged between samples: {_evaluation_text(record)}")

    def saved(self, path: Path, step: int) -> None:
        """Tell of a checkpoint."""
        self._event(step, "saved", path.name, aloud=False)

    def _event(self, step: int, event: str, text: str, aloud: bool = True) -> None:
        self._write({"kind": "event", "step": step, "time": time.time(), "event": event, "text": text})
        if aloud:
            self.note(text)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.append(record)
        values = flatten(record) if self._loggers else {}
        if values:
            for logger in self._loggers:
                logger.log(int(record["step"]), values)

    # ------------------------------------------------------------------ the end

    def stopped(self, position: Position) -> None:
        """Tell that a signal has ended the run, and that nothing is lost."""
        self._event(position.step, "stopped", f"stopped and saved at step {position.step}; the same command goes on")
        self.ended("stopped", position)

    def show_at_end(self, table: Table | None) -> None:
        """Show a table when the run ends, after all else."""
        self._shown_at_end = table

    def asked(self, trainer: Trainer) -> None:
        """Ask the finished model about some samples, and count what its parts compute."""
        if trainer.features is not None:
            trainer.features.rest()  # what an encoder computes is counted on items that it encodes
        count = self._config.logging.samples
        # The stages of a pipeline answer together, token by token, where the model is one that talks.
        if trainer.pipeline is not None and not isinstance(trainer.model, MultimodalModel):
            count = 0
        if count and trainer.evaluation_sources:
            self._summary["answers"] = collect_answers(
                trainer.task,
                trainer.evaluation_sources,
                count,
                self._folder.path if self._speaks else None,
                self._config.data.max_pixels,
            )
        batch = trainer.some_batch()
        found = None if batch is None else trainer.flops.step(batch.inputs)
        if batch is not None and found is not None:
            for entry in self._summary["parts"]:
                part = found.parts.get(entry["name"])
                entry["flops"] = None if part is None else part.forward / max(len(batch.sample_ids), 1)

    def earlier_exchanges(self) -> dict[str, dict[str, Any]]:
        """Return, by modality, the evaluations with exchanged items of an earlier start."""
        told = ("kind", "step", "time", "modality")
        return {
            line["modality"]: {key: value for key, value in line.items() if key not in told}
            for line in self._summary["shuffled"]
        }

    def ended(
        self, status: Literal["finished", "stopped", "failed"], position: Position, aloud: bool = True
    ) -> Path | None:
        """Write the summary and the report; return where it is."""
        if not self._summary:
            return None  # it failed before it began
        self._summary.update(
            status=status,
            ended=time.time(),
            seconds=position.seconds,
            step=position.step,
            skipped={"broken": position.broken, "too_long": position.too_long},
        )
        if not self._speaks:
            return self._folder / REPORT if status != "failed" else None
        self._write_summary()
        for logger in self._loggers:
            logger.close(status)
        if status == "finished" and aloud:
            self._event(position.step, "finished", f"{position.step} steps", aloud=False)
        try:
            report = write_report(self._folder.path)
        except ConfigError as error:  # a full disk, say: the model is saved, which is what counts
            self.note(f"The report could not be written: {error}")
            return None
        if self._shown_at_end is not None:
            self._console.print(self._shown_at_end, soft_wrap=False)
        self.note(f"report: {report}")
        return report


def _summed(trainer: Trainer, values: Sequence[float]) -> list[float]:
    """Return numbers, the loss first, added up over all processes; where they do not wait for one another, of this one.

    Then each has a loss of its own, and the others are taken to be like this one.
    """
    if not trainer.exchange.is_apart:
        return processes.sum_over_ranks(values)
    loss, *others = values
    return [loss, *(value * trainer.ranks for value in others)]


# ---------------------------------------------------------------------------------------------------- texts


def part_table(parts: Sequence[Part], width: int) -> Table:
    """Return a table of what is trained, and how; the less important columns only if there is room for them."""
    wide = width >= _WIDE
    table = Table(title="model", title_justify="left")
    table.add_column("part", no_wrap=True)
    columns = ("class", *_COLUMNS) if wide else _COLUMNS
    for name in columns:
        table.add_column(name, justify="left" if name == "class" else "right", no_wrap=True)
    for part in parts:
        trains = part.trained_count > 0
        row = [f"{part.count:,}", f"{part.trained_count:,}", _megabytes(part.bytes), part.train]
        row.append(f"{part.learning_rate:g}" if trains else "–")
        row.append(f"{part.weight_decay:g}" if trains else "–")
        table.add_row(part.name, *([part.kind] if wide else []), *row)
    if len(parts) > 1:
        total, trained = sum(part.count for part in parts), sum(part.trained_count for part in parts)
        table.add_section()
        row = [f"{total:,}", f"{trained:,}", _megabytes(sum(part.bytes for part in parts))]
        table.add_row("all", *([""] if wide else []), *row)
    return table


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _part_entry(part: Part) -> dict[str, Any]:
    trains = part.trained_count > 0
    return {
        "name": part.name,
        "kind": part.kind,
        "parameters": part.count,
        "trainable": part.trained_count,
        "bytes": part.bytes,
        "train": part.train,
        "learning_rate": part.learning_rate if trains else None,
        "weight_decay": part.weight_decay if trains else None,
        "flops": None,
    }


def _evaluation_text(record: Mapping[str, Any]) -> str:
    sources = record.get("sources", {})
    lines = {"": record, **sources} if len(sources) > 1 else {"": record}
    texts = []
    for name, measures in lines.items():
        shown = [f"{'' if name else 'evaluation '}loss {measures['loss']:.4f}"] if "loss" in measures else []
        shown += [f"accuracy {measures['accuracy']:.1%}"] if "accuracy" in measures else []
        texts.append(f"{name} {', '.join(shown)}".strip())
    return "; ".join(texts)


def versions() -> dict[str, str]:
    """Return what the run was made with."""
    return {
        "cornstarch": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }


def _precision(trainer: Trainer) -> str:
    """Return what the run computes in, in words."""
    in_fp8 = f" and fp8 ({trainer.config.fp8})" if trainer.speed.fp8 else ""
    return f"{trainer.placement.precision}{in_fp8}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
