"""What `Booster.boost` returns: this rank's part of a parallel model, one training step of it, and its optimizer.

The user's optimizer stays the same object, so that a learning-rate scheduler keeps its reference. While it steps, its
groups are split: by device mesh, because a fused kernel takes one mesh only, and with ZeRO-1 to the rank's parameters.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cornstarch.api.microbatches import MicrobatchSplitter, TokenCounter, count_samples, detach_output, join_outputs
from cornstarch.checkpoint.named_state import group_members
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.parallelize import ParallelModel
from cornstarch.engine.train_step import TrainStep
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import distributed
from cornstarch.parallel.ddp_fsdp import drop_idle_gradients

Inputs = Mapping[str, Any]
Criterion = Callable[[Any, Any], Tensor]  # takes the model's output and the microbatch; returns its mean loss


class _StepTotals(NamedTuple):
    """Sums over all replicas."""

    tokens: float
    samples: float
    items: Mapping[str, float]  # microbatches with inputs for each encoder


class BoostedModel(nn.Module):
    """A parallel model; `Booster.execute_pipeline` runs it. `weigh` says what microbatches are weighed by."""

    module: nn.Module
    parallel: ParallelModel

    def __init__(
        self,
        parallel: ParallelModel,
        context: DistributedContext,
        *,
        splitter: MicrobatchSplitter,
        tokens: TokenCounter,
        weigh: Literal["auto", "tokens", "samples"],
    ) -> None:
        super().__init__()
        module = self.module = parallel.module
        self.__dict__["parallel"] = parallel  # not a submodule: its parameters would have a second name
        self.distributed_context, self.layout = context, context.layout
        self.pipeline, self.device = parallel.pipeline, context.device
        self.replica, self.placement, self.weigh = context.replica, context.placement, weigh
        self._step = TrainStep(parallel, [])
        self._splitter, self._tokens = splitter, tokens
        self._has_stand_ins = isinstance(module, MultimodalModel) and any(
            module.stand_in(name, torch.device("cpu")) for name in module.encoder_names
        )
        self._random = _RandomStream(context.device, self.replica.token_shard)

        def call(model: nn.Module, inputs: Inputs) -> Any:
            with context.placement.forward_context():
                return model(**context.placement.move_batch(inputs))

        parallel.set_call(call)

    @property
    def has_loss(self) -> bool:
        return self.parallel.has_loss

    @property
    def wrapped(self) -> nn.Module:
        """The module that is called if there are no stages: with DDP or FSDP around the model."""
        return self.parallel.callable_module

    def unwrap(self) -> nn.Module:
        """Return the model inside."""
        return self.module

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Run a model without pipeline stages."""
        if self.pipeline is not None:
            raise ConfigError(
                "A model that is cut into stages is not called: no process has all of it. Use "
                "booster.execute_pipeline(iterator, model, criterion, optimizer)."
            )
        return self.wrapped(*arguments, **inputs)

    def train(self, mode: bool = True, **declared: Any) -> BoostedModel:
        """Set train or eval mode; `boost` has fixed which modules are trained."""
        if declared or not isinstance(mode, bool):
            raise ConfigError("What is trained is declared before boost: model.train(encoders_mode=…, llm_mode=…).")
        super().train(mode)
        for program in () if self.pipeline is None else self.pipeline.programs.values():
            program.train(mode)  # each of several stages of a module has a copy
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def step(
        self, batch: Any, criterion: Criterion, *, scale: float, loss: bool, outputs: bool, everywhere: bool
    ) -> dict[str, Any]:
        """Run forward and backward on a batch; under `torch.no_grad`, forward alone. The rest as `execute_pipeline`."""
        microbatches = self._splitter.split(batch)
        counts = [self._tokens(one) for one in microbatches]
        totals = self._sum_over_replicas(microbatches, counts)
        losses = _StepLosses(self, criterion, scale, outputs, microbatches, counts, totals)
        trains = torch.is_grad_enabled()
        # Gradients of earlier batches are set aside: they have been reduced once and must not be reduced again.
        earlier = [(p, p.grad) for p in self.module.parameters() if p.grad is not None] if trains else []
        for parameter, _ in earlier:
            parameter.grad = None
        with self._random.use():
            self._step.forward_backward(microbatches, len(microbatches), losses.compute, backward=trains)
        if trains and self._has_stand_ins:
            drop_idle_gradients(self.module, totals.items)
        with torch.no_grad():
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        total = losses.total
        if loss and self.layout.world > 1:  # the loss over the batches of all replicas
            total = total / self.replica.loss_copies
            dist.all_reduce(total)
        is_returned = loss and (self.has_loss or everywhere)
        parts = [losses.outputs[number] for number in sorted(losses.outputs)]
        joined = join_outputs(parts, losses.weights, losses.sizes) if parts else None
        return {"loss": total if is_returned else None, "outputs": joined}

    def _sum_over_replicas(self, microbatches: Sequence[Inputs], counts: Sequence[int]) -> _StepTotals:
        """Sum up the batches of all replicas; refuse batches that do not go together, on all ranks alike."""
        names = list(self.module.encoder_names) if isinstance(self.module, MultimodalModel) else []
        present = [self._splitter.modalities(one) for one in microbatches]
        own = [float(sum(counts)), float(sum(map(count_samples, microbatches)))]
        own += [float(sum(name in one for one in present)) for name in names]
        here, checksum, replica = len(microbatches), _checksum(microbatches), self.replica
        # All checks travel in one all-reduce: n ranks have the same x exactly if n * sum(x^2) = sum(x)^2.
        sums_by_replica = [0.0] * (2 * replica.count)
        sums_by_replica[2 * replica.index : 2 * replica.index + 2] = [float(checksum), float(checksum**2)]
        sums = distributed.sum_over_ranks(
            [*(own if replica.is_leader else [0.0] * len(own)), here, here**2, *sums_by_replica]
        )
        items = dict(zip(names, sums[2 : 2 + len(names)], strict=True))
        many, squares, *rest = (int(value) for value in sums[2 + len(names) :])
        for number in range(replica.count):
            if self.layout.plan.replica * rest[2 * number + 1] != rest[2 * number] ** 2:
                raise ConfigError(
                    f"The processes of replica {number} were given different batches. Give the dataloader to "
                    "booster.boost, or make it with plugin.prepare_dataloader: all of them then read the same samples."
                )
        # Ranks that communicate inside of microbatches must run the same modules in each. Stages with whole parameters
        # need not: their gradients are reduced after all passes.
        runs_in_step = self.layout.dp > 1 if self.pipeline is None else self.layout.exchanges_in_passes
        if runs_in_step:
            kind = self.layout.plan.data.kind
            if self.layout.world * squares != many**2:
                raise ConfigError(
                    f"Replicas have different numbers of microbatches ({here} here), and {kind} has them exchange in "
                    "each. Use num_microbatches, or leave out a last batch that is smaller (drop_last=True)."
                )
            for name, count in items.items():
                if count not in (0, here * replica.count) and not self._has_stand_ins:
                    raise ConfigError(
                        f"{int(count)} of {here * replica.count} microbatches have something for the {name} encoder, "
                        f"and {kind} needs it to run in all of them or in none. Give the plugin the processor "
                        "(MultimodalParallelPlugin(processor=…)), which makes something to stand in."
                    )
        elif isinstance(self.parallel.wrapped, DistributedDataParallel) and not self._has_stand_ins:
            # One replica with context parallelism: all its ranks run the same encoders, but DDP reduces gradients with
            # the last microbatch, and only of parameters that it uses.
            encoders = self.module.encoders if isinstance(self.module, MultimodalModel) else {}
            for name in {name for one in present for name in one}.difference(present[-1]):
                if not any(parameter.requires_grad for parameter in encoders[name].parameters()):
                    continue
                raise ConfigError(
                    f"The last of {here} microbatches has nothing for the {name} encoder, but an earlier one has, and "
                    f"{self.layout.plan.data.kind} exchanges gradients with the last. Give the plugin the processor "
                    "(MultimodalParallelPlugin(processor=…)), which makes something to stand in."
                )
        return _StepTotals(sums[0], sums[1], items)


@dataclass
class _StepLosses:
    """The losses of the microbatches of a step, on the last stage."""

    model: BoostedModel
    criterion: Criterion
    scale: float
    keeps_outputs: bool
    microbatches: Sequence[Inputs]
    counts: Sequence[int]  # trained tokens of each
    totals: _StepTotals

    def __post_init__(self) -> None:
        self.sizes = [count_samples(one) for one in self.microbatches]
        self.weights = [0.0] * len(self.microbatches)
        self.outputs: dict[int, Any] = {}
        self._by_tokens: bool | None = None
        self.total = torch.zeros((), device=self.model.device)

    def compute(self, number: int, output: Any) -> Tensor:
        """Return the weighed loss of a microbatch, scaled for the backward pass."""
        placement = self.model.placement
        with placement.forward_context():
            loss: Any = self.criterion(output, placement.move_batch(self.microbatches[number]))
        if loss is None:
            raise ConfigError(
                f"The criterion returned None for microbatch {number}; it must return the loss. A model's own loss is "
                "None if the batch has no labels; a function without `return` gives None, too."
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"The criterion returned {what} for microbatch {number}; expected one number: the loss.")
        loss = loss.reshape(())
        weight = self.weights[number] = self._weight(number, loss, output)
        if not weight:
            # A mean over no token is NaN. A zero that depends on the output sends gradients the same way as any loss.
            logits = getattr(output, "logits", None)
            if not isinstance(logits, Tensor):
                raise ConfigError("A microbatch has no token to train on, and the model's output has no logits.")
            loss = logits.float().sum() * 0.0
        part = loss * weight
        self.total = self.total + part.detach().float()
        if self.keeps_outputs:
            self.outputs[number] = detach_output(output)
        return part * (self.model.replica.token_shards * self.scale)

    def _weight(self, number: int, loss: Tensor, output: Any) -> float:
        how, own = self.model.weigh, getattr(output, "loss", None)
        is_own = isinstance(own, Tensor) and own.reshape(()).data_ptr() == loss.data_ptr()
        if not is_own and self.model.layout.plan.modules["language_model"].cp > 1:
            raise ConfigError(
                "The language model's sp_size is above 1, so this process has the logits of its own tokens only. "
                "Let the criterion return outputs.loss, or use sp_size = 1."
            )
        by_tokens = is_own if how == "auto" else how == "tokens"
        if self._by_tokens not in (None, by_tokens):
            raise ConfigError("The criterion returns the model's own loss for some microbatches only; say loss_weight.")
        self._by_tokens = by_tokens
        if by_tokens:
            return self.counts[number] / max(self.totals.tokens, 1.0)
        return self.sizes[number] / max(self.totals.samples, 1.0)


class _RandomStream:
    """Random numbers for the model, separate from those that choose data; ranks that compute the same draw the same."""

    def __init__(self, device: torch.device, number: int) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._seed = distributed.broadcast_json(torch.initial_seed() % 2**32) + number
        self._states: list[Tensor] = []  # of the CPU and of the device, after the last use

    @contextmanager
    def use(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self._devices):
            if self._states:
                torch.set_rng_state(self._states[0])
                for device, state in zip(self._devices, self._states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            else:
                torch.manual_seed(self._seed)
            yield
            self._states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]


def _checksum(microbatches: Sequence[Inputs]) -> int:
    """Return a number that most likely differs for other batches."""

    def describe(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): describe(one) for key, one in value.items()}
        return list(value.shape) if isinstance(value, Tensor) else type(value).__name__

    checksum = zlib.crc32(json.dumps([describe(one) for one in microbatches], sort_keys=True).encode())
    for one in microbatches:
        if isinstance(ids := one.get("input_ids"), Tensor):
            checksum = zlib.crc32(ids.detach().cpu().contiguous().numpy().tobytes(), checksum)
    return checksum % 2**20  # small, so that the squares of checksums add up exactly


# ---------------------------------------------------------------------------------------------------- the optimizer


def build_alike(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class with the same default options."""
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    built: torch.optim.Optimizer = kind(parameters, **{k: v for k, v in optimizer.defaults.items() if k in taken})
    return built


class BoostedOptimizer:
    """The user's optimizer, which has made no step yet; `parameters` are those of the whole model, by name."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"The optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{type(optimizer).__name__} computes the loss several times per step, which a pipeline does not."
            )
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise ConfigError(
                "The optimizer has made steps already, and its states cannot be cut with the model. Boost first, then "
                "load them: booster.load_optimizer."
            )
        self.optimizer = optimizer
        self._members = group_members(optimizer, parameters)
        self._labels: list[list[str] | None] = [group.get("param_names") for group in optimizer.param_groups]
        self._whole: list[dict[str, Any]] | None = None

    @property
    def names(self) -> list[str]:
        return [name for members in self._members for name in members]

    def attach(self, step: TrainStep) -> None:
        """Run the phases of a `TrainStep` around `optimizer.step()`: unscale and clip before, broadcast after."""

        def before(*_: Any) -> None:
            step.unscale()
            step.clip()
            if not step.is_finite:  # a step without gradients changes nothing
                step.zero_grad()
            self._enter_step()

        def after(*_: Any) -> None:
            self._leave_step()
            step.finish_update()

        self.optimizer.register_step_pre_hook(before)
        self.optimizer.register_step_post_hook(after)

    def replace_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Continue with what this rank steps in place of the whole parameters, by name."""
        for group, members, labels in zip(self.optimizer.param_groups, self._members, self._labels, strict=True):
            here = [number for number, name in enumerate(members) if name in parameters]
            group["params"] = [parameters[members[number]] for number in here]
            if labels is not None:
                group["param_names"] = [labels[number] for number in here]
        if self.optimizer.state:  # Adagrad builds states in its constructor
            self.optimizer.state.clear()
            with self.use_step_groups():
                groups = [dict(group) for group in self.optimizer.param_groups if group["params"]]
                kind: Any = type(self.optimizer)
                self.optimizer.state.update(kind(groups).state if groups else {})

    @contextmanager
    def use_step_groups(self) -> Iterator[None]:
        self._enter_step()
        try:
            yield
        finally:
            self._leave_step()

    def _enter_step(self) -> None:
        self._leave_step()  # a step that raised has left them split
        self._whole = self.optimizer.param_groups
        self.optimizer.param_groups = [part for group in self._whole for part in self._split(group)]

    def _leave_step(self) -> None:
        if self._whole is None:
            return
        parts = iter(self.optimizer.param_groups)
        for group in self._whole:
            changed = [next(parts) for _ in self._split(group)][0]
            group.update({key: value for key, value in changed.items() if key not in ("params", "param_names")})
        self.optimizer.param_groups, self._whole = self._whole, None

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a group as several, at least one: one for each mesh."""
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        options = {key: value for key, value in group.items() if key != "param_names"}
        return [{**options, "params": alike} for alike in by_mesh.values()] or [{**options, "params": []}]
