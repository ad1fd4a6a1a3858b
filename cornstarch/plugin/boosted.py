"""A model that several processes train together, as one of them has it, and a step of it."""

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

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel import clip_gradients, processes
from cornstarch.parallel.data import forget_idle_gradients, gradients_kept_here
from cornstarch.parallel.mesh import Replica
from cornstarch.pipeline.apply import Pipeline
from cornstarch.plan.layout import Layout
from cornstarch.plugin.microbatches import BatchCutter, count_samples
from cornstarch.plugin.outputs import detached, joined
from cornstarch.plugin.weighing import TokenCount

Inputs = Mapping[str, Any]
Criterion = Callable[[Any, Any], Tensor]
"""Takes the model's output and the microbatch; returns its loss, a mean."""

_CHECKED = 2**20  # fingerprints of batches are smaller, so that their squares add up exactly


@dataclass(frozen=True)
class Asked:
    """What a step is to do."""

    criterion: Criterion
    scale: float = 1.0
    """What losses are multiplied with before gradients are taken."""
    outputs: bool = False
    loss: bool = True
    everywhere: bool = False
    """Whether processes without the last stage are told the loss, too."""


@dataclass(frozen=True)
class _Totals:
    """What all replicas have in a step."""

    tokens: float
    samples: float
    items: Mapping[str, float]
    """Microbatches with something for each encoder."""


class BoostedModel(nn.Module):
    """What stands for a model once it is boosted; `Booster.execute_pipeline` runs it.

    Args:
        module: The model, of which this process has its part.
        layout: Who has which.
        pipeline: Its stages, if it is cut into such.
        wrapped: What is called instead of the model, if it is not.
        cutter: Makes microbatches.
        tokens: Counts what a microbatch trains.
        moved: Brings a batch to the device.
        computing: Makes the context in which forward passes run.
        weigh: What microbatches weigh by.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        pipeline: Pipeline | None,
        wrapped: nn.Module,
        *,
        device: torch.device,
        cutter: BatchCutter,
        tokens: TokenCount,
        moved: Callable[[Inputs], dict[str, Any]],
        computing: Callable[[], Any],
        weigh: Literal["auto", "tokens", "samples"],
    ) -> None:
        super().__init__()
        self.module = module
        self.__dict__["_wrapped"] = wrapped  # the same parameters again: they have one name here
        self.layout, self.pipeline, self.device = layout, pipeline, device
        self.replica = Replica.of(layout, processes.rank())
        self._cutter, self._tokens, self._moved, self._computing, self._weigh = cutter, tokens, moved, computing, weigh
        self._stands_in = bool(_stand_ins(module))
        self._random = _RandomNumbers(device, self.replica.share)
        if pipeline is not None:
            pipeline.set_call(self._call)

    # -------------------------------------------------------------------------------------------- the model

    @property
    def has_loss(self) -> bool:
        """Whether this process has the last stage."""
        return self.pipeline is None or self.pipeline.has_loss

    @property
    def wrapped(self) -> nn.Module:
        """What is called instead of the model, where it is not cut into stages."""
        wrapped: nn.Module = self.__dict__["_wrapped"]
        return wrapped

    @property
    def is_in_step(self) -> bool:
        """Whether ranks must run the same modules in every microbatch, because they exchange while they do."""
        # Stages whose parameters are whole need not: their gradients meet after all passes.
        return self.layout.dp > 1 if self.pipeline is None else self.layout.exchanges_in_passes

    def unwrap(self) -> nn.Module:
        """Return the model inside."""
        return self.module

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        """Run a model that is not cut into stages."""
        if self.pipeline is not None:
            raise ConfigError(
                "A model that is cut into stages is not called: no process has all of it. Use "
                "booster.execute_pipeline(iterator, model, criterion, optimizer)."
            )
        return self.wrapped(*arguments, **inputs)

    def train(self, mode: bool = True, **declared: Any) -> BoostedModel:
        """Set train or eval mode; what is trained was declared before the model was boosted."""
        if declared or not isinstance(mode, bool):
            raise ConfigError("What is trained is declared before boost: model.train(encoders_mode=…, llm_mode=…).")
        super().train(mode)
        for program in () if self.pipeline is None else self.pipeline.programs.values():
            program.train(mode)  # of several stages of a module, each has a copy
        return self

    def __getattr__(self, name: str) -> Any:
        """Return what the model inside has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def clip(self, most: float) -> Tensor:
        """Scale all gradients, wherever they are, so that their norm is at most `most`; return what it was."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if self.pipeline is None:
            return clip_gradients(self.wrapped, trained, most)
        holders, copies = self.pipeline.holders, self.pipeline.copies()
        return clip_gradients(None, trained, most, holders, copies, self.pipeline.device)

    # -------------------------------------------------------------------------------------------- a step

    def step(self, batch: Any, asked: Asked) -> dict[str, Any]:
        """Do forward and backward of a batch; without gradients (`torch.no_grad`) forward alone."""
        microbatches = self._cutter.cut(batch)
        counts = [self._tokens(one) for one in microbatches]
        totals = self._exchanged(microbatches, counts)
        losses = _Losses(asked, microbatches, counts, totals, self)
        trains = torch.is_grad_enabled()
        before = self._set_aside() if trains else []
        with self._random():
            if self.pipeline is not None:
                run = self.pipeline.train if trains else self.pipeline.forward
                run(microbatches, losses.finish)
            else:
                self._run(microbatches, losses.finish, trains)
        if trains:
            if self._stands_in:
                forget_idle_gradients(self.module, totals.items)
            _add_back(before)
        return {"loss": self._told(losses, asked), "outputs": losses.outputs()}

    def _call(self, model: nn.Module, inputs: Inputs) -> Any:
        with self._computing():
            return model(**self._moved(inputs))

    def _run(self, microbatches: Sequence[Inputs], finish: Callable[[int, Any], Tensor], trains: bool) -> None:
        """Run microbatches where every process has all of the model."""
        for number, inputs in enumerate(microbatches):
            with gradients_kept_here(self.wrapped, trains and number + 1 < len(microbatches)):
                loss = finish(number, self._call(self.wrapped, inputs))
                if trains and loss.requires_grad:
                    loss.backward()

    def _told(self, losses: _Losses, asked: Asked) -> Tensor | None:
        """Return the loss of all replicas' batches together, to whom it is due."""
        if not asked.loss:
            return None
        total = losses.total
        if self.layout.world > 1:
            total = total / self.replica.alike
            dist.all_reduce(total)
        return total if self.has_loss or asked.everywhere else None

    def _set_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take gradients of earlier batches away: what is exchanged is exchanged once."""
        found = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        for parameter, _ in found:
            parameter.grad = None
        return found

    # -------------------------------------------------------------------------------------------- what all have

    def _exchanged(self, microbatches: Sequence[Inputs], counts: Sequence[int]) -> _Totals:
        """Add up what replicas have, and refuse what they could not do together: all processes see it alike."""
        names = list(self.module.encoder_names) if isinstance(self.module, MultimodalModel) else []
        speaks = self.replica.leads
        present = [self._cutter.modalities(one) for one in microbatches]
        own = [float(sum(counts)), float(sum(map(count_samples, microbatches)))]
        own += [float(sum(name in one for one in present)) for name in names]
        many, mark = len(microbatches), _fingerprint(microbatches)
        marks = [0.0] * (2 * self.replica.count)
        marks[2 * self.replica.index : 2 * self.replica.index + 2] = [float(mark), float(mark**2)]
        sums = processes.sum_over_ranks([*(own if speaks else [0.0] * len(own)), many, many**2, *marks])
        items = dict(zip(names, sums[2 : 2 + len(names)], strict=True))
        rest = [int(value) for value in sums[2 + len(names) :]]
        self._check_replicas(rest[2:])
        if self.is_in_step:
            self._check_in_step(rest[:2], items, many)
        return _Totals(sums[0], sums[1], items)

    def _check_replicas(self, marks: Sequence[int]) -> None:
        size = self.layout.plan.replica
        for replica in range(self.replica.count):
            total, squares = marks[2 * replica : 2 * replica + 2]
            if size * squares != total**2:  # equal only if all are
                raise ConfigError(
                    f"The processes of replica {replica} were given different batches. Give the dataloader to "
                    "booster.boost, or make it with plugin.prepare_dataloader: all of them then read the same samples."
                )

    def _check_in_step(self, many: Sequence[int], items: Mapping[str, float], here: int) -> None:
        kind = self.layout.plan.data.kind
        if self.layout.world * many[1] != many[0] ** 2:
            raise ConfigError(
                f"Replicas have different numbers of microbatches ({here} here), and {kind} has them exchange in each. "
                "Use num_microbatches, or leave out a last batch that is smaller (drop_last=True)."
            )
        for name, count in items.items():
            if count not in (0, here * self.replica.count) and not self._stands_in:
                raise ConfigError(
                    f"{int(count)} of {here * self.replica.count} microbatches have something for the {name} encoder, "
                    f"and {kind} needs it to run in all of them or in none. Give the plugin the processor "
                    "(MultimodalParallelPlugin(processor=…)), which makes something to stand in."
                )


class _Losses:
    """The losses of the microbatches of a step, on the last stage."""

    def __init__(
        self, asked: Asked, microbatches: Sequence[Inputs], counts: Sequence[int], totals: _Totals, model: BoostedModel
    ) -> None:
        self._asked, self._microbatches, self._counts, self._totals = asked, microbatches, counts, totals
        self._model = model
        self._sizes = [count_samples(one) for one in microbatches]
        self._weights = [0.0] * len(microbatches)
        self._made: dict[int, Any] = {}
        self._by_tokens: bool | None = None
        self.total = torch.zeros((), device=model.device)

    def finish(self, number: int, output: Any) -> Tensor:
        """Return what a microbatch adds to the loss of the step, as gradients are to be taken of it."""
        model = self._model
        with model._computing():
            loss = self._asked.criterion(output, model._moved(self._microbatches[number]))
        loss = self._checked(number, loss)
        weight = self._weights[number] = self._weight(number, loss, output)
        if not weight:
            loss = _nothing(output)  # a mean over no token is no number
        part = loss * weight
        self.total = self.total + part.detach().float()
        if self._asked.outputs:
            self._made[number] = detached(output)
        return part * (model.replica.shares * self._asked.scale)

    def _checked(self, number: int, loss: Any) -> Tensor:
        if loss is None:
            raise ConfigError(
                f"The criterion returned None for microbatch {number}; it must return the loss. A model's own loss is "
                "None if the batch has no labels; a function without `return` gives None, too."
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"The criterion returned {what} for microbatch {number}; expected one number: the loss.")
        return loss.reshape(())

    def _weight(self, number: int, loss: Tensor, output: Any) -> float:
        how, own = self._model._weigh, getattr(output, "loss", None)
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

    def outputs(self) -> Any:
        """Return what the last stage put out for the whole batch of this replica, if it was asked for."""
        if not self._made:
            return None
        made = [self._made[number] for number in sorted(self._made)]
        return joined(made, self._weights, self._sizes)


class _RandomNumbers:
    """Random numbers of this process's own, drawn apart: those that choose its data stay as they were.

    Processes that compute the same draw the same.
    """

    def __init__(self, device: torch.device, share: int) -> None:
        self._devices = [device] if device.type == "cuda" else []
        seed = processes.broadcast_data(torch.initial_seed() % 2**32)
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(seed + share)
            self._keep()

    def _keep(self) -> None:
        self._here = torch.get_rng_state()
        self._there = [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._here)
            for device, state in zip(self._devices, self._there, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._keep()


def _add_back(before: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _nothing(output: Any) -> Tensor:
    """Return a zero that depends on the output: gradients take the same way as from any loss."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError("A microbatch has no token to train on, and the model's output has no logits.")
    return logits.float().sum() * 0.0


def _fingerprint(microbatches: Sequence[Inputs]) -> int:
    """Return a number that other batches have not, most likely."""
    shapes = [{key: _form(value) for key, value in one.items()} for one in microbatches]
    mark = zlib.crc32(json.dumps(shapes, sort_keys=True).encode())
    for one in microbatches:
        if isinstance(ids := one.get("input_ids"), Tensor):
            mark = zlib.crc32(ids.detach().cpu().contiguous().numpy().tobytes(), mark)
    return mark % _CHECKED


def _form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _form(one) for key, one in value.items()}
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _stand_ins(module: nn.Module) -> Mapping[str, Any]:
    if not isinstance(module, MultimodalModel):
        return {}
    return {name: found for name in module.encoder_names if (found := module.stand_in(name, torch.device("cpu")))}


__all__ = ["Asked", "BoostedModel", "Criterion"]
