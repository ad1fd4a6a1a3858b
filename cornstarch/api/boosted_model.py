"""The model that `Booster.boost` returns: this rank's part of a parallel model, and one training step of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.api.microbatches import MicrobatchSplitter, TokenCounter, count_samples, detach_output, join_outputs
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.parallelize import ParallelModel
from cornstarch.engine.train_step import TrainStep
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import distributed
from cornstarch.parallel.data import drop_idle_gradients

Inputs = Mapping[str, Any]
Criterion = Callable[[Any, Any], Tensor]
"""Takes the model's output and the microbatch; returns its mean loss."""

_MAX_CHECKSUM = 2**20  # checksums of batches are smaller, so that their squares add up exactly


@dataclass(frozen=True)
class StepOptions:
    """The arguments of one step."""

    criterion: Criterion
    scale: float = 1.0
    """The loss scale of fp16."""
    outputs: bool = False
    loss: bool = True
    everywhere: bool = False
    """Whether ranks without the last stage return the loss, too."""


@dataclass(frozen=True)
class _StepTotals:
    """Sums over all replicas."""

    tokens: float
    samples: float
    items: Mapping[str, float]
    """Microbatches with inputs for each encoder."""


class BoostedModel(nn.Module):
    """A parallel model; `Booster.execute_pipeline` runs it. `weigh` says what microbatches are weighed by."""

    module: nn.Module

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
        self.layout, self.pipeline, self.device = context.layout, parallel.pipeline, context.device
        self.replica, self.placement, self.weigh = context.replica, context.placement, weigh
        self._step = TrainStep(parallel, [])
        self._splitter, self._tokens = splitter, tokens
        self._has_stand_ins = isinstance(module, MultimodalModel) and any(
            module.stand_in(name, torch.device("cpu")) for name in module.encoder_names
        )
        self._random = _RandomStream(context.device, self.replica.token_shard)
        parallel.set_call(self._call)

    # -------------------------------------------------------------------------------------------- the model

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return bool(self.parallel.has_loss)

    @property
    def wrapped(self) -> nn.Module:
        """The module that is called if there are no stages: with DDP or FSDP around the model."""
        parallel: ParallelModel = self.__dict__["parallel"]
        return parallel.callable_module

    @property
    def is_in_step(self) -> bool:
        """Whether ranks must run the same modules in every microbatch, because they communicate meanwhile."""
        # Stages with whole parameters need not: their gradients are reduced after all passes.
        return self.layout.dp > 1 if self.pipeline is None else self.layout.exchanges_in_passes

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
        """Return an attribute of the model inside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # -------------------------------------------------------------------------------------------- a step

    def step(self, batch: Any, options: StepOptions) -> dict[str, Any]:
        """Run forward and backward on a batch; under `torch.no_grad`, forward alone."""
        microbatches = self._splitter.split(batch)
        counts = [self._tokens(one) for one in microbatches]
        totals = self._sum_over_replicas(microbatches, counts)
        losses = _StepLosses(options, microbatches, counts, totals, self)
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
        return {"loss": self._reduce_loss(losses.total, options), "outputs": losses.join_outputs()}

    def _call(self, model: nn.Module, inputs: Inputs) -> Any:
        with self.placement.forward_context():
            return model(**self.placement.move_batch(inputs))

    def _reduce_loss(self, total: Tensor, options: StepOptions) -> Tensor | None:
        """Return the loss over the batches of all replicas, on the ranks that want it."""
        if not options.loss:
            return None
        if self.layout.world > 1:
            total = total / self.replica.loss_copies
            dist.all_reduce(total)
        return total if self.has_loss or options.everywhere else None

    def _sum_over_replicas(self, microbatches: Sequence[Inputs], counts: Sequence[int]) -> _StepTotals:
        """Sum up the batches of all replicas; refuse batches that do not go together, on all ranks alike."""
        names = list(self.module.encoder_names) if isinstance(self.module, MultimodalModel) else []
        present = [self._splitter.modalities(one) for one in microbatches]
        own = [float(sum(counts)), float(sum(map(count_samples, microbatches)))]
        own += [float(sum(name in one for one in present)) for name in names]
        many, checksum = len(microbatches), _checksum(microbatches)
        # All checks travel in one all-reduce: n ranks have the same x exactly if n * sum(x^2) = sum(x)^2.
        sums_by_replica = [0.0] * (2 * self.replica.count)
        sums_by_replica[2 * self.replica.index : 2 * self.replica.index + 2] = [float(checksum), float(checksum**2)]
        sums = distributed.sum_over_ranks(
            [*(own if self.replica.is_leader else [0.0] * len(own)), many, many**2, *sums_by_replica]
        )
        items = dict(zip(names, sums[2 : 2 + len(names)], strict=True))
        rest = [int(value) for value in sums[2 + len(names) :]]
        for replica in range(self.replica.count):
            total, squares = rest[2 + 2 * replica : 4 + 2 * replica]
            if self.layout.plan.replica * squares != total**2:
                raise ConfigError(
                    f"The processes of replica {replica} were given different batches. Give the dataloader to "
                    "booster.boost, or make it with plugin.prepare_dataloader: all of them then read the same samples."
                )
        if self.is_in_step:
            self._check_in_step(rest[:2], items, many)
        return _StepTotals(sums[0], sums[1], items)

    def _check_in_step(self, many: Sequence[int], items: Mapping[str, float], here: int) -> None:
        kind = self.layout.plan.data.kind
        if self.layout.world * many[1] != many[0] ** 2:
            raise ConfigError(
                f"Replicas have different numbers of microbatches ({here} here), and {kind} has them exchange in each. "
                "Use num_microbatches, or leave out a last batch that is smaller (drop_last=True)."
            )
        for name, count in items.items():
            if count not in (0, here * self.replica.count) and not self._has_stand_ins:
                raise ConfigError(
                    f"{int(count)} of {here * self.replica.count} microbatches have something for the {name} encoder, "
                    f"and {kind} needs it to run in all of them or in none. Give the plugin the processor "
                    "(MultimodalParallelPlugin(processor=…)), which makes something to stand in."
                )


class _StepLosses:
    """The losses of the microbatches of a step, on the last stage."""

    def __init__(
        self,
        options: StepOptions,
        microbatches: Sequence[Inputs],
        counts: Sequence[int],
        totals: _StepTotals,
        model: BoostedModel,
    ) -> None:
        self._options, self._microbatches, self._model = options, microbatches, model
        self._counts, self._totals = counts, totals
        self._sizes = [count_samples(one) for one in microbatches]
        self._weights = [0.0] * len(microbatches)
        self._outputs: dict[int, Any] = {}
        self._by_tokens: bool | None = None
        self.total = torch.zeros((), device=model.device)

    def compute(self, number: int, output: Any) -> Tensor:
        """Return the weighed loss of a microbatch, scaled for the backward pass."""
        placement = self._model.placement
        with placement.forward_context():
            loss = self._options.criterion(output, placement.move_batch(self._microbatches[number]))
        loss = _check_loss(number, loss)
        weight = self._weights[number] = self._weight(number, loss, output)
        if not weight:
            # A mean over no token is NaN. A zero that depends on the output sends gradients the same way as any loss.
            logits = getattr(output, "logits", None)
            if not isinstance(logits, Tensor):
                raise ConfigError("A microbatch has no token to train on, and the model's output has no logits.")
            loss = logits.float().sum() * 0.0
        part = loss * weight
        self.total = self.total + part.detach().float()
        if self._options.outputs:
            self._outputs[number] = detach_output(output)
        return part * (self._model.replica.token_shards * self._options.scale)

    def _weight(self, number: int, loss: Tensor, output: Any) -> float:
        how, own = self._model.weigh, getattr(output, "loss", None)
        is_own = isinstance(own, Tensor) and own.reshape(()).data_ptr() == loss.data_ptr()
        if not is_own and self._model.layout.plan.modules["language_model"].cp > 1:
            raise ConfigError(
                "The language model's sp_size is above 1, so this process has the logits of its own tokens only. "
                "Let the criterion return outputs.loss, or use sp_size = 1."
            )
        by_tokens = is_own if how == "auto" else how == "tokens"
        if self._by_tokens not in (None, by_tokens):
            raise ConfigError("The criterion returns the model's own loss for some microbatches only; say loss_weight.")
        self._by_tokens = by_tokens
        if by_tokens:
            return self._counts[number] / max(self._totals.tokens, 1.0)
        return self._sizes[number] / max(self._totals.samples, 1.0)

    def join_outputs(self) -> Any:
        """Return the outputs of this replica's batch; None if they were not asked for."""
        ordered = [self._outputs[number] for number in sorted(self._outputs)]
        return join_outputs(ordered, self._weights, self._sizes) if ordered else None


def _check_loss(number: int, loss: Any) -> Tensor:
    if loss is None:
        raise ConfigError(
            f"The criterion returned None for microbatch {number}; it must return the loss. A model's own loss is "
            "None if the batch has no labels; a function without `return` gives None, too."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(f"The criterion returned {what} for microbatch {number}; expected one number: the loss.")
    return loss.reshape(())


class _RandomStream:
    """Random numbers for the model, separate from those that choose data; ranks that compute the same draw the same."""

    def __init__(self, device: torch.device, number: int) -> None:
        self._devices = [device] if device.type == "cuda" else []
        seed = distributed.broadcast_json(torch.initial_seed() % 2**32)
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(seed + number)
            self._keep()

    def _keep(self) -> None:
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def use(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._cpu_state)
            for device, state in zip(self._devices, self._cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._keep()


def _checksum(microbatches: Sequence[Inputs]) -> int:
    """Return a number that most likely differs for other batches."""
    shapes = [_describe_shapes(one) for one in microbatches]
    checksum = zlib.crc32(json.dumps(shapes, sort_keys=True).encode())
    for one in microbatches:
        if isinstance(ids := one.get("input_ids"), Tensor):
            checksum = zlib.crc32(ids.detach().cpu().contiguous().numpy().tobytes(), checksum)
    return checksum % _MAX_CHECKSUM


def _describe_shapes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _describe_shapes(one) for key, one in value.items()}
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__
