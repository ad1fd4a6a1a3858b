"""Logs a run: progress on the console, metrics.jsonl, trackers, run.json and the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from cornstarch import __version__
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import METRICS, REPORT, RunFolder
from cornstarch.data.sample import BrokenSample
from cornstarch.engine.acceleration import Acceleration
from cornstarch.engine.model_parts import ModelPart
from cornstarch.errors import ConfigError
from cornstarch.launch.attempt_record import describe_restart
from cornstarch.metrics.metrics import MetricsFile, Position, StepClock, StepResult, Throughput
from cornstarch.metrics.progress import Progress
from cornstarch.metrics.trackers import Tracker, TrackerStatus, flatten, open_trackers
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import distributed
from cornstarch.plan.cluster import peak_flops
from cornstarch.plan.validation import as_data
from cornstarch.planner.expected_step import expect_step
from cornstarch.report import write_report
from cornstarch.trainer.evaluator import collect_answers
from cornstarch.trainer.prediction_check import PredictionCheck

if TYPE_CHECKING:
    from cornstarch.trainer.trainer import Trainer

_SKIPPED_SHOWN = 5
_WARM_UP = 10  # steps in which layers are compiled; later compilations are printed
_COLUMNS = ("parameters", "trained", "memory", "train", "rate", "decay")
_WIDE = 110
_RECORD_KEYS = ("kind", "step", "time", "modality")


class MetricsLogger:
    """Logs one run. Only the main process prints and writes; the others take part in its collectives."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, console: Console, command: str | None, is_main_process: bool = True
    ) -> None:
        self._config, self._folder, self._command = config, folder, command
        self._is_main_process = is_main_process
        self._console = console if is_main_process else Console(quiet=True)
        self._progress: Progress | None = None
        self._metrics: MetricsFile | None = None
        self._trackers: list[Tracker] = []
        self._throughput = Throughput()
        self._skipped = 0
        self._summary: dict[str, Any] = {}
        self._final_table: Table | None = None
        self._prediction: PredictionCheck | None = None
        self.clock = StepClock(None)
        self.last_evaluation: dict[str, Any] | None = None
        self.last_evaluation_step: int | None = None

    # ------------------------------------------------------------------ start

    def log_start(self, trainer: Trainer, resumed_from: int | None) -> None:
        """Open the files and trackers, and print the model, the data and the plan of the run."""
        self.clock = trainer.clock
        step = trainer.position.step
        if self._is_main_process:
            self._metrics = MetricsFile(self._folder / METRICS)
            self._metrics.rewind(step)
            to, data = self._config.logging.to, as_data(self._config)
            self._trackers = open_trackers(to, self._folder.path, self._config.name, data, step=step, warn=self.log)
        self._summary = self._describe_run(trainer)
        self._expect_steps(trainer)
        if resumed_from is not None:
            self._restore_summary(self._folder.read_summary(), step)
        if self._is_main_process:
            self._folder.write_summary(self._summary)
        self._console.print(part_table(trainer.run_model.all_parts, self._console.width), soft_wrap=False)
        for kind, lines in self._summary["data"].items():
            for line in lines:
                self.log(f"{kind} data: {line}")
        kind, compression = self._config.parallel.data.kind, self._config.parallel.data.compression.kind
        how = kind if compression == "none" else f"{kind}, {compression}"
        several = f" in {trainer.ranks} processes ({how})" if trainer.ranks > 1 else ""
        self.log(
            f"{self._config.folder}: {trainer.total_steps:,} steps of "
            f"{trainer.data.describe_steps(trainer.replica.count)} on "
            f"{trainer.placement.device} in {_precision(trainer)}{several}"
        )
        if resumed_from is not None and not trainer.position.ended:
            self._write_event(resumed_from, "resumed", f"resumes after step {resumed_from}", is_shown=True)
        if self._is_main_process and (restart := describe_restart(self._folder.path, step, trainer.ranks)) is not None:
            text, figures = restart
            self._write_event(step, "restarted", text, is_shown=True, **figures)

    def _expect_steps(self, trainer: Trainer) -> None:
        """From now on, compare the steps with what was predicted of them, if anything was."""
        if not self._is_main_process or not trainer.counts_flops:
            return
        expected = trainer.auto_plan.expected if trainer.auto_plan is not None else None
        expected = expected or expect_step(self._config, trainer.ranks, distributed.ranks_per_node())
        self._prediction = None if expected is None else PredictionCheck(expected, trainer.position.step)

    def _restore_summary(self, previous: Mapping[str, Any], step: int) -> None:
        """Keep the results of earlier starts of the run, unless they are newer than the checkpoint."""
        if (previous.get("evaluation") or {}).get("step", 0) > step:
            previous = {"started": previous.get("started")}
        kept = ("started", "evaluation", "best", "shuffled", "answers")
        self._summary.update({key: previous[key] for key in kept if previous.get(key)})
        if evaluation := previous.get("evaluation"):
            self.last_evaluation_step = evaluation["step"]
            self.last_evaluation = _strip_record(evaluation)

    def _describe_run(self, trainer: Trainer) -> dict[str, Any]:
        model, again = trainer.run_model, trainer.run_model.recomputation
        versions = {"cornstarch": __version__, "torch": str(torch.__version__)}
        versions |= {"transformers": transformers.__version__, "python": sys.version.split()[0]}
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
            "versions": versions,
            "task": trainer.task.name,
            "command": self._command,
            "parts": [_describe_part(part) for part in model.all_parts],
            "data": {
                "train": trainer.sources.description.splitlines(),
                "evaluation": [source.description for source in trainer.evaluation_sources.values()],
            },
            "evaluation": None,
            "shuffled": [],
            "best": None,
            "skipped": {"broken": 0, "too_long": 0},
            "answers": [],
            "features": None if model.features is None else model.features.describe(),
            "recomputation": None if again is None else {**asdict(again), "line": again.line()},
            "buckets": model.parallel.bucket_size,
            "compilation": model.acceleration.describe_compilation(),
        }

    # ------------------------------------------------------------------ training

    @contextmanager
    def show_progress(self, position: Position, total: int) -> Iterator[None]:
        with Progress(self._config.logging.progress, total, position.step, self._console) as progress:
            self._progress = progress
            self._throughput.start(position.seconds, position.tokens)
            try:
                yield
            finally:
                self._progress = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude a block from the throughput."""
        with self._throughput.pause():
            yield
        self.clock.pause()

    @property
    def seconds(self) -> float:
        """Time spent training, over all starts of the run."""
        return self._throughput.seconds

    def log(self, text: str) -> None:
        if self._progress is not None:
            self._progress.log(text)
        else:
            self._console.print(text, markup=False, highlight=False)

    def log_skipped(self, samples: Sequence[BrokenSample]) -> None:
        """Print the first few samples that were skipped."""
        for sample in samples:
            self._skipped += 1
            if self._skipped <= _SKIPPED_SHOWN:
                self.log(f"skipped: {sample}")
            elif self._skipped == _SKIPPED_SHOWN + 1:
                self.log("… and more; the report has their number")

    def log_step(self, result: StepResult, trainer: Trainer) -> None:
        """Count a step; log the metrics if it is one of those that are logged."""
        totals = result.totals
        # The totals are of all ranks already; the loss is this rank's summand.
        loss = result.loss * totals.trained_tokens
        counts = totals.samples, totals.tokens, totals.trained_tokens
        self._throughput.add(*counts, loss, totals.items, result.waited, totals.flops)
        if self._progress is not None:
            self._progress.step(result.step)
        if self.is_logged(result.step, trainer.total_steps):
            self._log_training(result, trainer)

    def is_logged(self, step: int, total: int) -> bool:
        return step % self._config.logging.every == 0 or step in (1, total)

    def _log_training(self, result: StepResult, trainer: Trainer) -> None:
        steps = self._throughput.steps
        line = self._throughput.line()
        features = trainer.run_model.features
        lookups = [] if features is None else [features.hits, features.misses]
        times = self.clock.read()
        if times is not None and times.steps:  # of all steps: reading the last loss waited for the device
            line["step_time"], line["data_wait"] = times.seconds / times.steps, times.waited / times.steps
        waits = [line["step_time"], line["data_wait"], trainer.feed.wait_seconds() / steps]
        own, ranks = [line["loss"], *waits, *lookups], trainer.ranks
        if trainer.context.is_unsynchronized:
            # These ranks must not wait for each other: each logs its own loss, and the others are taken to be alike.
            sums = [own[0], *(value * ranks for value in own[1:])]
        else:
            sums = distributed.sum_over_ranks(own)
        loss, step_time, data_wait, copy_wait, *counts = sums
        line["loss"] = loss / trainer.replica.loss_copies
        line |= {"step_time": step_time / ranks, "data_wait": data_wait / ranks, "copy_wait": copy_wait / ranks}
        if self._prediction is not None:
            tokens = line["tokens_per_second"] * line["step_time"]
            line["predicted_step_time"] = self._prediction.add(result.step, steps, line["step_time"], tokens)
            self._summary["prediction"] = self._prediction.describe()
            if told := self._prediction.read_new():
                self._write_event(result.step, "prediction", told, is_shown=True)
        position = trainer.position
        epoch_steps = max(trainer.data.steps_of_epoch(position.epoch), 1)
        record = {
            "kind": "train",
            "step": result.step,
            "time": time.time(),
            "epoch": round(position.epoch + min(position.batch / epoch_steps, 1.0), 4),
            "learning_rate": result.learning_rate,
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            **line,
            "memory": trainer.placement.memory(),
            "skipped": position.broken + position.too_long,
            **trainer.run_model.acceleration.figures(),
            **trainer.run_model.measure_experts(),
            **trainer.replica_sync.figures(),
        }
        peak = peak_flops(_device_name(trainer.placement.device), trainer.placement.precision)
        if peak is not None and "flops_per_second" in line:
            record["mfu"] = line["flops_per_second"] / (peak * trainer.ranks)
        if features is not None:
            now = {**features.describe(), "hits": int(counts[0]), "misses": int(counts[1])}
            if now["problem"] is not None and self._summary["features"]["problem"] is None:  # reported once
                self.log(f"features are no longer cached: {now['problem']}")
            self._summary["features"] = now
            record["features"] = {name: now[name] for name in ("hits", "misses", "bytes")}
        self._write(record)
        if self._progress is not None:
            self._progress.metrics(record)

    def log_evaluation(self, record: Mapping[str, Any], position: Position, improved: bool) -> None:
        line = {"kind": "evaluation", "step": position.step, "time": time.time(), **record}
        name = self._config.checkpoint.best_by
        self.last_evaluation, self.last_evaluation_step = dict(record), position.step
        self._summary["evaluation"] = line
        self._summary["best"] = {"step": position.best_step, "metric": position.best, "name": name}
        self._write(line)
        if improved:
            self._write_event(position.step, "best", f"{name} {position.best:.4g}")
        self.log(f"step {position.step}: {_format_evaluation(record)}{', the best so far' if improved else ''}")

    def log_shuffled(self, modality: str, record: Mapping[str, Any], position: Position) -> None:
        """Log an evaluation with one modality's items shuffled between samples."""
        line = {"kind": "shuffled", "step": position.step, "time": time.time(), "modality": modality, **record}
        others = [one for one in self._summary["shuffled"] if one.get("modality") != modality]
        self._summary["shuffled"] = [*others, line]
        self._write(line)
        self.log(f"with {modality} items shuffled between samples: {_format_evaluation(record)}")

    def metric_at(self, step: int) -> float | None:
        """Return the metric that decides which checkpoint is the best, if the last evaluation was at this step."""
        if self.last_evaluation is None or self.last_evaluation_step != step:
            return None
        return self.last_evaluation.get(self._config.checkpoint.best_by)

    def read_shuffled(self) -> dict[str, dict[str, Any]]:
        """Return, by modality, the evaluations with shuffled items of an earlier start."""
        return {line["modality"]: _strip_record(line) for line in self._summary["shuffled"]}

    def log_compilations(self, acceleration: Acceleration, step: int) -> None:
        """Log the layers that torch compiled since the last call, and why it compiled one again."""
        for one in acceleration.compile_log.read_new():
            is_late = one.is_again and step > _WARM_UP
            text = f"compiled again at step {step}: {one.describe()}" if is_late else one.describe()
            self._write_event(step, "recompiled" if one.is_again else "compiled", text, is_shown=is_late)
        self._summary["compilation"] = acceleration.describe_compilation()

    def log_checkpoint(self, path: Path, step: int) -> None:
        self._write_event(step, "saved", path.name)

    def _write_event(self, step: int, event: str, text: str, is_shown: bool = False, **figures: float) -> None:
        self._write({"kind": "event", "step": step, "time": time.time(), "event": event, "text": text, **figures})
        if is_shown:
            self.log(text)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.append(record)
        if self._trackers and (values := flatten(record)):
            for tracker in self._trackers:
                tracker.log(int(record["step"]), values)

    # ------------------------------------------------------------------ end

    def log_stop(self, position: Position) -> None:
        text = f"stopped and saved at step {position.step}; the same command resumes"
        self._write_event(position.step, "stopped", text, is_shown=True)
        self.finish("stopped", position)

    def show_at_end(self, table: Table | None) -> None:
        self._final_table = table

    def log_answers(self, trainer: Trainer) -> None:
        """Generate answers to some samples with the finished model, and count the FLOPs of its parts."""
        if trainer.run_model.features is not None:
            trainer.run_model.features.stop_lookups()  # FLOPs of encoders are counted on items that they encode
        count = self._config.logging.samples
        # The stages of a pipeline generate together, token by token; only a MultimodalModel can do that.
        if trainer.pipeline is not None and not isinstance(trainer.model, MultimodalModel):
            count = 0
        if count and trainer.evaluation_sources:
            folder = self._folder.path if self._is_main_process else None
            self._summary["answers"] = collect_answers(
                trainer.task, trainer.evaluation_sources, count, folder, self._config.data.max_pixels
            )
        batch = trainer.data.peek_batch(trainer.task.collator)
        found = None if batch is None else trainer.run_model.flops.step(batch.inputs)
        if batch is not None and found is not None:
            for entry in self._summary["parts"]:
                part = found.parts.get(entry["name"])
                entry["flops"] = None if part is None else part.forward / max(len(batch.sample_ids), 1)

    def finish(self, status: TrackerStatus, position: Position, write_event: bool = True) -> Path | None:
        """Write the summary and the report; return the path of the report."""
        if not self._summary:
            return None  # the run failed before it started
        skipped = {"broken": position.broken, "too_long": position.too_long}
        ended = {"ended": time.time(), "seconds": position.seconds, "step": position.step}
        self._summary |= {"status": status, **ended, "skipped": skipped}
        if not self._is_main_process:
            return self._folder / REPORT if status != "failed" else None
        self._folder.write_summary(self._summary)
        for tracker in self._trackers:
            tracker.close(status)
        if status == "finished" and write_event:
            self._write_event(position.step, "finished", f"{position.step} steps")
        try:
            report = write_report(self._folder.path)
        except ConfigError as error:  # a full disk, say: the model is saved already
            self.log(f"The report could not be written: {error}")
            return None
        if self._final_table is not None:
            self._console.print(self._final_table, soft_wrap=False)
        self.log(f"report: {report}")
        return report


def _strip_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in _RECORD_KEYS}


def part_table(parts: Sequence[ModelPart], width: int) -> Table:
    """Return a table of the parts and how each is trained; a narrow console has fewer columns."""
    wide = width >= _WIDE
    table = Table(title="model", title_justify="left")
    table.add_column("part", no_wrap=True)
    for name in ("class", *_COLUMNS) if wide else _COLUMNS:
        table.add_column(name, justify="left" if name == "class" else "right", no_wrap=True)
    for part in parts:
        trains = part.trained_count > 0
        row = [f"{part.count:,}", f"{part.trained_count:,}", f"{part.bytes / 1e6:,.1f} MB", part.train]
        row += [f"{value:g}" if trains else "–" for value in (part.learning_rate, part.weight_decay)]
        table.add_row(part.name, *([part.kind] if wide else []), *row)
    if len(parts) > 1:
        totals = [(part.count, part.trained_count, part.bytes) for part in parts]
        count, trained, size = map(sum, zip(*totals, strict=True))
        table.add_section()
        table.add_row("all", *([""] if wide else []), f"{count:,}", f"{trained:,}", f"{size / 1e6:,.1f} MB")
    return table


def _describe_part(part: ModelPart) -> dict[str, Any]:
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


def _format_evaluation(record: Mapping[str, Any]) -> str:
    sources = record.get("sources", {})
    texts = []
    for name, measures in {"": record, **(sources if len(sources) > 1 else {})}.items():
        shown = [f"{'' if name else 'evaluation '}loss {measures['loss']:.4f}"] if "loss" in measures else []
        shown += [f"accuracy {measures['accuracy']:.1%}"] if "accuracy" in measures else []
        texts.append(f"{name} {', '.join(shown)}".strip())
    return "; ".join(texts)


def _precision(trainer: Trainer) -> str:
    in_fp8 = f" and fp8 ({trainer.config.fp8})" if trainer.run_model.acceleration.fp8 else ""
    return f"{trainer.placement.precision}{in_fp8}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
