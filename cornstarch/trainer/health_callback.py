"""`HealthCallback`: says where each rank is, and compares what ranks do and hold."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from cornstarch.data.loader import StepBatch
from cornstarch.engine.failure import RankError
from cornstarch.health.comparison_group import ComparisonGroup
from cornstarch.health.heartbeat import StepTimer
from cornstarch.health.replica_check import ReplicaCheck
from cornstarch.health.step_comparison import RankComparison
from cornstarch.metrics.metrics import Status, StepResult
from cornstarch.parallel.activity import here
from cornstarch.parallel.mesh import Replica
from cornstarch.trainer.callbacks import Callback

if TYPE_CHECKING:
    from cornstarch.trainer.trainer import Trainer

_SHARE = 0.001  # of the time that checks of replicas may take (`loop.check_replicas: auto`)
_MEASURED = 3  # step since the start after which the first check is done and timed
_SELDOM = 10_000  # steps between checks, at most


class HealthCallback(Callback):
    """Keeps `cornstarch.parallel.activity` up to date, and compares the ranks of a run.

    Before the weights of a step change, ranks compare what they did. From time to time, and before every checkpoint,
    they compare what they hold. A difference ends the run on all ranks, with the same message.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._watch, self._timer = trainer.failure.watch, StepTimer()
        self._counts_data_waits = bool(trainer.data_workers)
        here.begin_run(trainer.position.step)
        if self._watch is not None and trainer.rank == 0:
            self._watch.log = trainer.logger.log
        self._steps: RankComparison | None = None
        self._replicas: ReplicaCheck | None = None
        if not trainer.context.is_unsynchronized:  # else ranks do not wait for one another, and may differ
            group = ComparisonGroup()
            trainer.failure.extra_groups.append(group.group)
            self._steps = RankComparison(group, here, _find_replica(trainer), _find_symmetric_groups(trainer))
            trainer.train_step.before_update = self._compare_step
            if trainer.config.loop.check_replicas != "off" and trainer.config.parallel.data.kind != "fsdp1":
                self._replicas = ReplicaCheck(group, _list_modules(trainer), _describe_place(trainer))
        every = trainer.config.loop.check_replicas
        self._every = every if isinstance(every, int) else _SELDOM
        self._checked_at = -1

    def on_train_begin(self, trainer: Trainer) -> None:
        here.enter("between")

    def on_batch_begin(self, trainer: Trainer) -> None:
        self._timer.begin()
        here.enter("data")

    def on_step_begin(self, trainer: Trainer, batch: StepBatch) -> None:
        here.step, self._checked_at = trainer.position.step + 1, -1
        here.enter("step")
        if self._counts_data_waits:  # without workers it is the training thread's own CPU time
            here.data_seconds += batch.waited
        if self._steps is not None:
            names = [name for microbatch in batch.microbatches for name in microbatch.sample_ids]
            self._steps.begin_step(here.step, batch.epoch, batch.index, names, _sum_tokens(batch))

    def _compare_step(self) -> None:
        if self._steps is not None and self._steps.is_due() and (said := self._steps.check()) is not None:
            raise RankError(said)

    def on_step_end(self, trainer: Trainer, result: StepResult, batch: StepBatch, is_logged: bool) -> None:
        here.enter("between")
        here.steps += 1
        here.seconds = self._timer.end()
        self._log_slow_ranks(trainer)
        if trainer.config.loop.check_replicas == "auto" and here.steps == _MEASURED:
            self._check_replicas(trainer, with_states=False)
            self._choose_interval()
        elif result.step % self._every == 0:
            self._check_replicas(trainer, with_states=False)
        peer = trainer.config.checkpoint.peer
        if peer is not None and result.step % peer == 0:  # a copy in memory is made of this step, too
            self._check_once(trainer)

    def on_pause(self, trainer: Trainer) -> None:
        """Check before an evaluation or a checkpoint: none is written of a weight that has changed by itself."""
        here.enter("pause")
        self._check_once(trainer)

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        here.enter("between")

    def on_save(self, trainer: Trainer, path: Path) -> None:
        here.enter("between")

    def on_train_end(self, trainer: Trainer, status: Status) -> None:
        here.enter("end")

    def _check_once(self, trainer: Trainer) -> None:
        if self._checked_at != trainer.position.step:
            self._checked_at = trainer.position.step
            self._check_replicas(trainer, with_states=True)

    def _check_replicas(self, trainer: Trainer, with_states: bool) -> None:
        if self._replicas is None or not self._replicas.has_replicas:
            return
        if trainer.placement.device.type == "cuda":
            torch.cuda.synchronize(trainer.placement.device)  # or the check would seem to take as long as the step
        said = self._replicas.check(trainer.position.step, trainer.optimizer if with_states else None)
        if said is not None:
            raise RankError(said)

    def _choose_interval(self) -> None:
        """Set how often replicas are compared, from what it took; the slowest rank's time decides, on all ranks."""
        if self._replicas is None or not self._replicas.has_replicas:
            return
        # Ranks measure steps of slightly different length, and must not disagree.
        (wish, *_), *_ = self._replicas.group.gather([math.ceil(self._replicas.seconds / (_SHARE * here.seconds))])
        self._every = min(max(wish, 1), _SELDOM)

    def _log_slow_ranks(self, trainer: Trainer) -> None:
        if self._watch is None or trainer.rank != 0:
            return
        for note in self._watch.read_notes():
            trainer.logger.log_event(note.step, "slow", note.text, is_shown=False)  # printed when it was noted
        for straggler, host in self._watch.read_stragglers():
            trainer.logger.log_event(straggler.step, "slow", straggler.describe(host))


def _find_replica(trainer: Trainer) -> list[int]:
    """Return the ranks that train on the same samples as this one."""
    layout, own = trainer.context.layout, trainer.replica.index
    return [rank for rank in range(trainer.ranks) if Replica.of(layout, rank).index == own]


def _find_symmetric_groups(trainer: Trainer) -> set[str]:
    """Return the names of groups in which every rank of the run begins the same number of collectives."""
    assert dist.group.WORLD is not None
    found = {str(dist.group.WORLD.group_name)}
    if not trainer.context.is_pipeline and "meshes" in vars(trainer.context):
        meshes = trainer.context.meshes
        for mesh in (meshes.data, meshes.tensor):
            if mesh is not None:
                found |= {str(group.group_name) for group in mesh.get_all_groups()}
    return found


def _list_modules(trainer: Trainer) -> dict[str, torch.nn.Module]:
    if trainer.pipeline is None:
        return {"": trainer.model}
    return {f"stage {number}: ": program for number, program in trainer.pipeline.programs.items()}


def _describe_place(trainer: Trainer) -> str:
    """Return what distinguishes the shards of this rank beside their boxes."""
    place = trainer.context.layout.place(trainer.rank)
    return f"{','.join(place.modules)} {place.stage} {place.tp}"


def _sum_tokens(batch: StepBatch) -> int:
    """Return a checksum of the tokens of a batch, where they are in CPU memory."""
    total = 0
    for microbatch in batch.microbatches:
        tokens = microbatch.inputs.get("input_ids")
        if isinstance(tokens, torch.Tensor) and tokens.device.type == "cpu":
            total = zlib.crc32(tokens.contiguous().numpy().data, total)
    return total
