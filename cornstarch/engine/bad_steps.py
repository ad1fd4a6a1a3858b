"""Steps whose loss is NaN, infinite or a spike: found by all ranks in the same step, and left out if wanted.

A step that is left out leaves no trace: weights, states of the optimizer, averages, buffers and random numbers are as
before it, and it does not count. So the run goes on like one whose data lacks the batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.checkpoint.state_values import random_state, restore_random_state
from cornstarch.config import RunConfig
from cornstarch.config.run_folder import RunFolder
from cornstarch.data.loader import RunData, StepBatch
from cornstarch.engine.failure import TrainingError, describe_samples, list_remedies
from cornstarch.errors import escape_controls
from cornstarch.files import own_digest, parse_json
from cornstarch.metrics.metrics import Position
from cornstarch.parallel import distributed
from cornstarch.parallel.mesh import Replica

FILE = "left_out.json"
"""In the run's folder: the batches that are left out, also after a resume."""

WINDOW, WARM_UP = 64, 32  # losses that a spike is compared with, and how many there must be
DEVIATIONS = 10.0  # of the window, robustly estimated
_SIGMA = 1.4826  # standard deviations in a median absolute deviation
MOST, WITHIN = 3, 100  # steps that may be left out, within so many steps
_KEPT_SAMPLES = 4096  # ids in the file


def is_spike(loss: float, earlier: Sequence[float]) -> bool:
    """Return whether a loss is far above those of the last steps.

    It is if it exceeds their median by more than each of: ten standard deviations (estimated by the median absolute
    deviation, which spikes in the window do not change), twice what the largest of them exceeds it by, and half of its
    size. The rule does not depend on the scale of the loss, and losses with rare large values raise its second bound.
    """
    if len(earlier) < WARM_UP:
        return False
    middle = median(earlier)
    spread = _SIGMA * median(abs(one - middle) for one in earlier)
    return loss - middle > max(DEVIATIONS * spread, 2 * (max(earlier) - middle), abs(middle) / 2)


@dataclass(frozen=True)
class BadStep:
    """A step that is left out, and why."""

    epoch: int
    batch: int
    step: int
    """The step that it would have been, counted from 1."""
    reason: str
    ranks: list[int]
    """The ranks whose loss is not finite; none if that of all together is a spike, or the gradient is not finite."""
    samples: list[str]
    """Of these ranks; of all, if none is named."""

    def describe(self, then: str = "") -> str:
        """Return what happened, in which step, on which ranks, with which samples; and what was done then."""
        return f"{self.reason} in step {self.step}{describe_samples(self.ranks, self.samples, then)}"


class StepSnapshot:
    """What a step changes before its loss is known: buffers of the model, such as running means, and random numbers."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
        self._random: Mapping[str, Any] = {}

    @torch.no_grad()
    def take(self) -> None:
        # All of them: which ones a step changes cannot be told, batch norm does not count versions of its means.
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            copy.copy_(buffer)
        self._random = random_state()

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, copy in zip(self._buffers, self._copies, strict=True):
            buffer.copy_(copy)
        restore_random_state(self._random)


class BadStepGuard:
    """Finds bad steps, with the same result on all ranks, and remembers which batches are left out.

    All ranks must call its methods together. A step waits until its loss is known on all ranks: on a GPU that is one
    wait and one exchange of two numbers per step, which `on_bad_loss: stop` does not need.
    """

    def __init__(
        self, config: RunConfig, data: RunData, folder: RunFolder, replica: Replica, models: Sequence[nn.Module]
    ) -> None:
        self.rewinds = config.loop.on_bad_loss == "rewind"
        self._config, self._folder, self._replica = config, folder, replica
        self._order = _describe_order(config, data)
        self._snapshot = StepSnapshot(models)
        self._left_out: list[BadStep] = []
        self.found: BadStep | None = None
        """What is wrong with the step that was checked last."""

    def load(self, is_resumed: bool) -> None:
        """Read which batches an earlier start has left out; a run that begins anew forgets them."""
        stored: list[Any] = []
        if distributed.rank() == 0 and is_resumed and (path := self._folder / FILE).is_file():
            stored = _read_entries(parse_json(path, path.read_bytes()), self._order)
        self._left_out = [BadStep(**entry) for entry in distributed.broadcast_json(stored)]
        if distributed.rank() == 0 and not self._left_out:
            (self._folder / FILE).unlink(missing_ok=True)

    def find(self, batch: StepBatch) -> BadStep | None:
        """Return why a batch is left out, if it was before."""
        place = (batch.epoch, batch.index)
        return next((one for one in self._left_out if (one.epoch, one.batch) == place), None)

    def before_step(self) -> None:
        """Remember what the step may change before its loss is known."""
        self._snapshot.take()

    def check(self, position: Position, batch: StepBatch, loss: Tensor, norm: Tensor | None) -> bool:
        """Return whether a step whose gradients are ready is bad; if not, its loss counts for later ones."""
        self.found = self._examine(position, batch, loss, norm)
        return self.found is not None

    def _examine(self, position: Position, batch: StepBatch, loss: Tensor, norm: Tensor | None) -> BadStep | None:
        own = torch.stack([loss.detach().float(), loss.new_zeros(()).float() if norm is None else norm.float()])
        own = own.cpu().double()
        every = [own.tolist()] if distributed.is_single_process() else [o.tolist() for o in distributed.all_gather(own)]
        total = math.fsum(one for one, _ in every) / self._replica.loss_copies if _all_finite(every) else math.nan
        wrong = [rank for rank, (one, _) in enumerate(every) if not math.isfinite(one)]
        norms = [one for _, one in every if not math.isfinite(one)]
        if wrong:
            reason = f"The loss is {every[wrong[0]][0]}"
        elif norms:
            reason = f"The norm of the gradient is {norms[0]}"
        elif is_spike(total, position.losses):
            reason = f"The loss is {total:.4g}, a spike (median of the last {len(position.losses)}: "
            reason += f"{median(position.losses):.4g})"
        else:
            position.losses = (*position.losses, total)[-WINDOW:]
            return None
        ids = [name for microbatch in batch.microbatches for name in microbatch.sample_ids]
        gathered = distributed.all_gather_json(list(map(escape_controls, ids)))
        names = dict.fromkeys(name for rank in wrong or range(len(every)) for name in gathered[rank])
        ranks = wrong if len(every) > 1 else []
        return BadStep(batch.epoch, batch.index, position.step + 1, reason, ranks, list(names)[:_KEPT_SAMPLES])

    def undo(self) -> None:
        """Restore what the step has changed before its loss was known."""
        self._snapshot.restore()

    def leave_out(self, bad: BadStep) -> None:
        """Remember that a batch is left out from now on; TrainingError if there were too many."""
        recent = [one for one in self._left_out if bad.step - WITHIN < one.step <= bad.step]
        if len(recent) >= MOST:
            more = "; ".join(list_remedies(self._config))
            raise TrainingError(
                f"{bad.describe()}\n  {MOST} steps within {WITHIN} were left out before it "
                f"(loop.on_bad_loss = {self._config.loop.on_bad_loss}), the last because: {recent[-1].reason} in step "
                f"{recent[-1].step}. The run ends; its newest checkpoint is kept.\n  Try: {more}. Look at these "
                "samples with `cornstarch data check`."
            )
        self._left_out.append(bad)
        if distributed.rank() == 0:
            content = {"order": self._order, "batches": [asdict(one) for one in self._left_out]}
            self._folder.write(FILE, json.dumps(content, indent=1) + "\n")


def _all_finite(every: Sequence[Sequence[float]]) -> bool:
    return all(math.isfinite(one) for one, _ in every)


def _describe_order(config: RunConfig, data: RunData) -> str:
    """Return a digest of what decides which samples are in which batch of which epoch."""
    told = {"lengths": list(data.train.lengths), "weights": [source.weight for source in config.data.train]}
    told |= {"seed": config.seed, "size": config.loop.batch_size, "shuffle": config.data.shuffle}
    told |= {"packing": config.data.packing, "rows": config.rows_per_step, "longest": config.data.max_length}
    return own_digest(told)


def _read_entries(content: Any, order: str) -> list[dict[str, Any]]:
    """Return the entries of the file; none if batches have other samples now, or it is damaged."""
    if not isinstance(content, dict) or content.get("order") != order:
        return []
    kinds = {"epoch": int, "batch": int, "step": int, "reason": str, "ranks": list, "samples": list}
    entries = content.get("batches")
    return [
        {name: entry[name] for name in kinds}
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in kinds.items())
    ]
