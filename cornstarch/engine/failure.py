"""What ends a run early: losses that are NaN, memory that runs out, an error of another rank, a signal."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from cornstarch.compat import process_groups
from cornstarch.config import RunConfig
from cornstarch.data.loader import StepBatch
from cornstarch.engine.model_parts import ModelPart
from cornstarch.errors import ConfigError
from cornstarch.health.evidence import write_evidence
from cornstarch.health.watch import HealthWatch
from cornstarch.launch.failure_report import record_failure
from cornstarch.launch.stop_guard import STOPPED, WITHOUT_SAVING
from cornstarch.parallel import distributed
from cornstarch.parallel.activity import here
from cornstarch.parallel.device import DevicePlacement, Reading, is_out_of_memory
from cornstarch.pipeline.p2p import FailureSignal, abort_channels, abort_group

_SHOWN = 8
_LEAVE_SECONDS = 10.0  # that the training thread has to raise once a rank was found that does not go on


class TrainingError(ConfigError):
    """Training cannot go on; the message says why, where, and what to try."""


class RankError(TrainingError):
    """A rank hangs, is out of step with the others, or holds other weights: a restart may help."""


class LossWatch:
    """Stops the run when a loss, or the norm of a gradient, is NaN or infinite.

    Reading a number from a GPU waits until it has computed it. So there each step's numbers are read `late`: while the
    next one runs, and those of the last step before anything is saved; on a CPU, before the weights change.

    The norm is the same on all ranks, the loss is each rank's own. So where the norm is not finite, all ranks stop in
    the same step, and tell one another whose loss and samples it came from, if steps are shared (`is_shared`).
    """

    def __init__(
        self,
        config: RunConfig,
        placement: DevicePlacement,
        late: bool | None = None,
        is_shared: bool = True,
    ) -> None:
        self._config, self._is_shared = config, is_shared
        self._late = placement.device.type == "cuda" if late is None else late
        self._pending: list[tuple[int, list[str], Reading]] = []  # step, sample ids, loss and norm of the gradient
        self.last = math.nan
        """The newest loss that has been read."""

    def add(self, step: int, batch: StepBatch, loss: Tensor, norm: Tensor | None) -> None:
        ids = [name for microbatch in batch.microbatches for name in microbatch.sample_ids]
        both = torch.stack([loss.float(), loss.new_zeros(()).float() if norm is None else norm.float()])
        self._pending.append((step, ids, Reading(both)))
        self.check(all_steps=not self._late)

    def check(self, *, all_steps: bool = True) -> None:
        """Read what is waiting, the newest step's numbers only if all are asked for."""
        while len(self._pending) > (0 if all_steps else 1):
            step, ids, values = self._pending.pop(0)
            self.last, norm = values.numbers()
            if not math.isfinite(norm):
                own = [self.last, ids]
                raise self._explain(step, distributed.all_gather_json(own) if self._is_shared else [own], norm)
            if not math.isfinite(self.last):  # this rank alone knows: nothing is exchanged
                raise self._explain(step, [[self.last, ids]], norm)

    def _explain(self, step: int, ranks: Sequence[Any], norm: float) -> TrainingError:
        """Return what to tell the user; `ranks` has the loss and the samples of each."""
        wrong = {rank: (loss, ids) for rank, (loss, ids) in enumerate(ranks) if not math.isfinite(loss)}
        what = f"The loss is {next(iter(wrong.values()))[0]}" if wrong else f"The norm of the gradient is {norm}"
        names = list(dict.fromkeys(name for _, ids in wrong.values() or ranks for name in ids))
        told = describe_samples(list(wrong) if len(ranks) > 1 else [], names, "Nothing was saved after it.")
        return TrainingError(
            f"{what} in step {step}{told}\n  Try: {'; '.join(list_remedies(self._config))}. Look at these samples with "
            "`cornstarch data check`."
        )


def describe_samples(ranks: Sequence[int], names: Sequence[str], then: str = "") -> str:
    """Return the ranks (none: all of them) and the first samples of a bad step, as the end of a sentence."""
    several = "s" if len(ranks) > 1 else ""
    where = f" on rank{several} {', '.join(map(str, ranks))}" if ranks else ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    then = f" {then}" if then else ""
    return f"{where}.{then}\n  Samples of this step{where}: {', '.join(names[:_SHOWN])}{more}."


def list_remedies(config: RunConfig) -> list[str]:
    """Return what may help against losses that are NaN, infinite or spikes, and is not done yet."""
    optimizer = config.optimizer
    remedies = {
        f"a smaller optimizer.learning_rate (now {optimizer.learning_rate:g})": True,
        "a warm-up, schedule.warmup=0.03": config.schedule.warmup == 0,
        "optimizer.max_grad_norm=1.0": optimizer.max_grad_norm is None,
        "precision=bf16 or fp32": config.precision == "fp16",
    }
    return [text for text, helps in remedies.items() if helps]


_NO_MEMORY_TO_EXPLAIN = (
    "Memory ran out, also for saying where.\n  Try: a larger loop.gradient_accumulation_steps, "
    "loop.activation_checkpointing=true, precision=bf16, or a smaller data.max_length."
)


def out_of_memory(
    error: BaseException, model: nn.Module, parts: Sequence[ModelPart], config: RunConfig, placement: DevicePlacement
) -> TrainingError:
    """Return what to tell the user: where memory ran out, what holds how much, what would fit.

    The traceback of the error is dropped: its frames hold the tensors of the failed step, and there is no memory left
    to explain anything with.
    """
    calls: list[tuple[str, int, bool, bool]] = []
    with suppress(MemoryError):
        calls = _read_calls(error)
    _drop_frames(error)
    try:
        return TrainingError(_explain_memory(_place(calls, model, parts), parts, config, placement))
    except Exception as second:
        if isinstance(second, MemoryError) or is_out_of_memory(second):
            return TrainingError(_NO_MEMORY_TO_EXPLAIN)
        raise


def _explain_memory(where: str, parts: Sequence[ModelPart], config: RunConfig, placement: DevicePlacement) -> str:
    gradients = sum(p.nbytes for part in parts for p in part.trained.values())
    states = gradients * (2 if "adam" in config.optimizer.name.lower() else 1)
    held = {f"weights of the {part.name}": part.bytes for part in parts}
    held |= {"gradients": gradients, "states of the optimizer (about)": states}
    lines = [f"  {name}: {size / 1e9:.2f} GB" for name, size in held.items() if size]
    fixed, total = sum(held.values()), int(psutil.virtual_memory().total)
    if placement.device.type == "cuda":
        total = int(torch.cuda.get_device_properties(placement.device).total_memory)
    lines.append(f"  together {fixed / 1e9:.2f} GB of {total / 1e9:.2f} GB; the rest is for activations")
    remedies = "; ".join(_remedies(config, fixed > total))
    return "\n".join([f"Memory ran out {where}.", *lines, f"  Try: {remedies}."])


def _read_calls(error: BaseException) -> list[tuple[str, int, bool, bool]]:
    """Return the calls of a traceback: function, id of its `self`, and whether that is an optimizer, or a module."""
    calls = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        kinds = isinstance(owner, torch.optim.Optimizer), isinstance(owner, nn.Module)
        calls.append((frame.f_code.co_name, id(owner), *kinds))
    return calls


def _drop_frames(error: BaseException) -> None:
    """Release what the frames of an error, and of those it came from, hold."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            pending += [one.__cause__, one.__context__]
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None


def _place(calls: Sequence[tuple[str, int, bool, bool]], model: nn.Module, parts: Sequence[ModelPart]) -> str:
    """Say in which part the innermost module of some calls is."""
    names = {id(module): name for name, module in model.named_modules()}
    found, kind = None, "in the forward pass"
    for function, owner, is_optimizer, is_module in calls:
        if function == "backward":
            kind = "in the backward pass"
        elif is_optimizer:
            return "in the optimizer's step, when it made its states"
        elif function == "_apply" and is_module:
            return "when the model was moved to the device"
        if owner in names:
            found = names[owner]
    if found is None:
        return kind
    fitting = [(len(place), part.name) for part in parts for place in part.module_names if found.startswith(place)]
    inside = f", in {found}" if found else ""
    return f"{kind} of the {max(fitting)[1]}{inside}" if fitting else f"{kind}{inside}"


def _remedies(config: RunConfig, is_too_large: bool) -> list[str]:
    loop = config.loop
    microbatch = loop.batch_size // loop.microbatches
    if is_too_large:  # without any activations
        return [
            "train fewer weights (`train: lora` or `projector`), because weights, gradients and optimizer states "
            "alone do not fit",
            *(["optimizer.name=sgd"] if "adam" in config.optimizer.name.lower() else []),
        ]
    remedies = []
    if microbatch > 1:
        # The next divisor of the batch size that at least halves the microbatch.
        more = range(loop.microbatches + 1, loop.batch_size + 1)
        divisors = [steps for steps in more if loop.batch_size % steps == 0]
        smaller = next(n for n in divisors if loop.batch_size // n <= microbatch // 2)
        remedies.append(
            f"loop.gradient_accumulation_steps={smaller}, microbatches of {loop.batch_size // smaller} samples "
            f"instead of {microbatch} (the same gradient)"
        )
    if not config.recomputes:
        remedies.append("loop.activation_checkpointing=true")
    if config.precision == "fp32":
        remedies.append("precision=bf16")
    remedies.append(f"a smaller data.max_length (now {config.data.max_length})")
    return remedies


_CUT = ("connection closed", "connection reset", "connection refused", "socket closed", "timeout", "timed out", "abort")


class SharedFailure:
    """Lets all ranks of a run fail with the same words. All ranks must build theirs at the same point of the run.

    A rank that raises says why in the store that all ranks share, and aborts its process groups. A rank that waits for
    it is woken by that, or by a thread that reads the store, and raises the same. Ranks that neither raise nor go on
    are found by their heartbeats.

    Args:
        hang_timeout: Seconds in which a rank must move, or "auto"; "off": no heartbeats.
        folder: Of the run, where stacks and collectives are written when a rank does not move.
    """

    def __init__(self, hang_timeout: float | str = "off", folder: Path | None = None) -> None:
        self._alarm = None if distributed.is_single_process() else FailureSignal(self._wake)
        self._hang_timeout, self._folder = hang_timeout, folder
        self._is_inside = False
        self._hang: str | None = None  # what a thread of this rank has found
        self._is_leaving = False
        self.watch: HealthWatch | None = None
        """The heartbeats, inside of the block."""
        self.extra_groups: list[Any] = []
        """Process groups that torch does not list, and that are to be aborted, too."""

    @contextmanager
    def share(self) -> Iterator[None]:
        """Run a block that all ranks run; one inside another is the same block."""
        if self._alarm is None or self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self._alarm.watch(), self._watch_ranks():
                yield
            said = self._hang or self._alarm.get_report()
        except Exception as error:
            is_refusal, words = isinstance(error, ConfigError), str(error)
            what = words if is_refusal else f"{type(error).__name__}: {words}"
            own = json.dumps([is_refusal, what, distributed.rank(), type(error).__name__])
            # An error of a line that another rank has cut is an echo of that rank's own error.
            is_cut = any(one in words.lower() for one in _CUT)
            is_echo = isinstance(error, RuntimeError) and not is_refusal and is_cut
            said = self._hang
            if said is None:
                if not is_echo:
                    record_failure(error)  # before others fail because of it: the launcher shows the first
                said = self._alarm.report(own, is_echo)
                self._wake(said)
            if said == own:
                raise
            raise _decode(said) from None
        finally:
            self._is_inside = False
        if said is not None:  # there was nothing left to wait for
            raise _decode(said)

    @contextmanager
    def _watch_ranks(self) -> Iterator[None]:
        if self._hang_timeout == "off":
            yield
            return
        limit = None if isinstance(self._hang_timeout, str) else float(self._hang_timeout)
        self.watch = HealthWatch(here, limit, self._end_hang)
        self.watch.start()
        try:
            yield
        finally:
            self.watch.stop()

    def _end_hang(self, text: str, has_store: bool) -> None:
        """End the block on all ranks, from a thread, with a message about a rank that does not go on."""
        assert self._alarm is not None
        own = json.dumps([True, text, distributed.rank(), "hang"])
        self._hang = self._alarm.report(own, False) if has_store else own
        self._wake(self._hang)

    def _wake(self, words: str) -> None:
        """End all waiting: here, and in ranks that wait for this one."""
        _, text, _, kind = json.loads(words)
        if kind == "hang" and not self._is_leaving:
            self._is_leaving = True
            threading.Thread(target=self._leave, args=(words,), name="leave", daemon=True).start()
            if self._folder is not None:
                write_evidence(self._folder, distributed.rank(), here, text)
        abort_channels(text)
        for group in (*process_groups(), *self.extra_groups):
            abort_group(group)

    def _leave(self, words: str) -> None:
        """End the process if the training thread does not raise: it is stuck in something that cannot be aborted."""
        end = time.monotonic() + _LEAVE_SECONDS
        while self._is_inside and time.monotonic() < end:
            time.sleep(0.1)
        if self._is_inside:
            error = _decode(words)
            record_failure(error)
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)


_KINDS = {"hang": RankError, "RankError": RankError, "TrainingError": TrainingError}


def _decode(said: str) -> Exception:
    is_refusal, what, rank, kind = json.loads(said)
    found = _KINDS.get(kind)
    if found is not None:
        return found(what)
    return ConfigError(what) if is_refusal else RuntimeError(f"Rank {rank} has failed. {what}")


class StopSignal:
    """Whether this process received a signal to end: after the step that is running, so that the run can be saved."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @property
    def is_set(self) -> bool:
        return self._signal is not None

    @property
    def by_keyboard(self) -> bool:
        return self._signal == signal.SIGINT

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Remember the first SIGTERM or Ctrl-C while a block runs; a second signal ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        process = os.getpid()

        def remember(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:  # a data worker, which has inherited the handler and ends with this process
                return
            if self._signal is not None:
                self._signal = number
                if number == signal.SIGINT:
                    raise KeyboardInterrupt
                print(WITHOUT_SAVING, file=sys.stderr, flush=True)
                raise SystemExit(STOPPED)
            self._signal = number

        before: dict[int, Any] = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
