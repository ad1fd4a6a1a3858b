"""`Pipe`: an `nn.Sequential` split over all processes, called and differentiated like any other module.

model = Pipe(nn.Sequential(...), chunks=8)       # in every process, with the same weights
loss = loss_fn(model(input), target)             # in every process, on the same batch
loss.backward()                                  # in every process: each has the gradients of its own layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_call

from cornstarch.attention.interface import build_checkpoint_contexts
from cornstarch.engine.context import DistributedContext
from cornstarch.engine.parallelize import ParallelizeOptions, ParallelModel, parallelize
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.parallel.device import DevicePlacement
from cornstarch.pipeline.message import PayloadSpec, TensorSpec, flatten_payload
from cornstarch.pipeline.model_analysis import count_parameters, has_parameters
from cornstarch.pipeline.runtime import Inputs, Runtime, StepExecution
from cornstarch.pipeline.stage import FunctionLayer, call_with_single_input
from cornstarch.pipeline.stage_program import get_device
from cornstarch.pipeline.template import PipelineTemplate, balance_stages
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import WHOLE_MODEL, ModulePlan, Plan
from cornstarch.schedule.actions import Kind
from cornstarch.schedule.policies import make_schedule

CheckpointMode = Literal["always", "except_last", "never"]

_is_recomputing: ContextVar[bool] = ContextVar("is_recomputing", default=False)
_RECOMPUTE = "recomputed"  # the key beside a chunk that says whether the backward pass recomputes it


class Pipe(nn.Module):
    """An `nn.Sequential` whose layers are split over all processes, one stage each, with the GPipe schedule.

    Every process passes the same layers with the same weights and calls the pipe with the same input. Every process
    gets the whole output, computes the same loss and calls `backward`: parameters outside of the pipe, before or after
    it, then have their gradients on every process. Layers of other stages are freed.

    Args:
        module: The layers; stages get about the same number of parameters.
        chunks: The number of microbatches; it must divide the batch.
        checkpoint: Which chunks are recomputed in the backward pass instead of keeping all activations: "always",
            "except_last" or "never".
        deferred_batch_norm: Update running statistics once per batch, as without chunks, and not for each chunk.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: CheckpointMode = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise ConfigError(f"Pipe takes an nn.Sequential, not {type(module).__name__}; PipelineModule takes a list.")
        if type(chunks) is not int or chunks < 1:
            raise ConfigError(f"chunks = {chunks!r}: expected a whole number of at least 1.")
        if checkpoint not in get_args(CheckpointMode):
            raise ConfigError(f"checkpoint = {checkpoint!r}: expected one of {', '.join(get_args(CheckpointMode))}.")
        self.chunks, self.checkpoint = chunks, checkpoint
        self.module = SequentialLayers.of({name: layer for name, layer in module._modules.items() if layer is not None})
        """The layers of this process, under their original names."""
        self._stages = _TwoPhaseRuntime(self.module, chunks) if distributed.world_size() > 1 else None
        self.statistics = DeferredBatchNorm(_find_batch_norms([self.module]) if deferred_batch_norm else [])

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor):
            raise ConfigError(f"Pipe is called with one tensor, a batch; found a {type(input).__name__}.")
        rows = input.shape[0] if input.dim() else 0
        if not rows or rows % self.chunks:
            raise ConfigError(
                f"A batch of {rows} samples cannot be cut into {self.chunks} chunks of the same size: a mean over "
                "chunks would not be the mean over samples. Choose a batch that chunks divides."
            )
        parts = input.chunk(self.chunks)
        if self._stages is None:
            outputs = []
            for chunk, part in enumerate(parts):
                self.module.interval = len(self.module) if self.recomputes(chunk) else 0
                outputs.append(self.module(part))
            self.statistics.commit()
            return torch.cat(outputs)
        if not torch.is_grad_enabled() or not self._stages.requires_grad(input):
            found: dict[int, Tensor] = {}
            self._stages.forward(
                [{"input": one} for one in parts], lambda m, output: found.__setitem__(m, _check_output(output))
            )
            return self._stages.broadcast_output(found, input)
        return _PipeFunction.apply(self, self._stages, input, torch.zeros((), requires_grad=True))

    def recomputes(self, chunk: int) -> bool:
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and chunk < self.chunks - 1)


class _TwoPhaseRuntime(Runtime):
    """Stops between the last forward and the first backward, where the caller computes the loss."""

    def __init__(self, layers: SequentialLayers, chunks: int) -> None:
        stages = distributed.world_size()
        if stages > len(layers):
            raise ConfigError(
                f"{len(layers)} layers cannot be split over {stages} processes: each has one stage of the pipe, with "
                f"at least one layer. Start at most {len(layers)} processes."
            )
        costs = [float(count_parameters(layer)) for layer in layers]
        starts = balance_stages(costs, range(1, len(layers)), stages, "The pipe")
        layout = build_chain_layout(stages, "gpipe")
        pipeline = parallelize_chain(layers, layout, starts, get_device(layers), microbatches=chunks).pipeline
        assert pipeline is not None
        schedule = make_schedule(pipeline.graph, chunks, "gpipe")
        super().__init__(schedule, pipeline.place, pipeline.programs, pipeline.edges, pipeline.channel)
        self._pipeline, self._group, self._device = pipeline, pipeline.channel.group, pipeline.device
        self._output_forms: dict[Any, TensorSpec] = {}
        pipeline.set_call(call_with_single_input)

        def set_recompute(_: nn.Module, given: tuple[Any, ...]) -> None:
            layers.interval = len(layers) if given[0].get(_RECOMPUTE) else 0

        (program,) = pipeline.programs.values()
        program.register_forward_pre_hook(set_recompute)

    def requires_grad(self, input: Tensor) -> bool:
        if input.requires_grad and not self.graph.wants_gradient(0):
            raise ConfigError(
                "The input of the pipe takes a gradient, but nothing in its first stage is trained: no gradient is "
                "sent back there. Detach the input, or train the first layers."
            )
        return self.graph.wants_gradient(self.graph.sink)

    def begin(self, parts: Sequence[Inputs], outputs: dict[int, Tensor], gradients: dict[int, Tensor]) -> StepExecution:
        """Run all forwards; `gradients` are read when the backwards begin."""

        def finish(m: int, output: Tensor) -> Tensor:
            outputs[m] = _check_output(output).detach()
            return _StartBackward.apply(output, lambda: gradients[m])

        forwards = [action for action in self._actions if action.kind is Kind.F]
        run = StepExecution(self, forwards, parts, finish)
        self.run_guarded(run.run, run)
        return run

    def end(self, run: StepExecution) -> None:
        """Run all backwards, and sum the gradients of layers that several stages share."""
        run.actions = [action for action in self._actions if action.kind is not Kind.F]
        with self._pipeline.gradients_meet():
            self.run_guarded(run.run, run)

    def broadcast_output(self, made: dict[int, Tensor], input: Tensor) -> Tensor:
        output = torch.cat([made[m] for m in sorted(made)]) if made else None
        last = distributed.world_size() - 1
        key = (tuple(input.shape), input.dtype, self._pipeline.model.training)
        if key not in self._output_forms:  # tell the other processes dtype and shape first
            content = b"" if output is None else flatten_payload(output)[0].to_json()
            length = torch.tensor([len(content)], device=self._device)
            self.broadcast(length, last)
            buffer = torch.frombuffer(bytearray(content or bytes(int(length))), dtype=torch.uint8).to(self._device)
            self.broadcast(buffer, last)
            self._output_forms[key] = PayloadSpec.from_json(bytes(buffer.cpu().numpy())).tensors[0]
        form = self._output_forms[key]
        found = torch.empty(form.shape, dtype=form.dtype, device=self._device) if output is None else output
        self.broadcast(found, last)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast within the runtime's group, whose failures reach all ranks, so that nobody waits forever."""
        self.run_guarded(lambda: dist.broadcast(tensor, source, group=self._group))


def _check_output(output: Any) -> Tensor:
    if not isinstance(output, Tensor) or not output.dim():
        what = "a number" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ConfigError(f"The last layer of a Pipe returned {what}; expected a tensor with one row for each sample.")
    return output


class _StartBackward(torch.autograd.Function):
    """Starts the backward of a chunk with the gradient of its part of the output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.gradient(), None


class _PipeFunction(torch.autograd.Function):
    """The whole pipe as one autograd function of the surrounding model."""

    @staticmethod
    def forward(ctx: Any, pipe: Pipe, stages: _TwoPhaseRuntime, input: Tensor, _: Tensor) -> Tensor:
        outputs: dict[int, Tensor] = {}
        ctx.stages, ctx.gradients = stages, {}
        ctx.parts = [one.detach().requires_grad_(input.requires_grad) for one in input.chunk(pipe.chunks)]
        inputs = [{"input": one, _RECOMPUTE: pipe.recomputes(m)} for m, one in enumerate(ctx.parts)]
        with torch.enable_grad():
            ctx.run = stages.begin(inputs, outputs, ctx.gradients)
        pipe.statistics.commit()
        return stages.broadcast_output(outputs, input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.run is None:
            raise RuntimeError("Backward through a Pipe a second time: its activations are gone after the first.")
        run, ctx.run = ctx.run, None
        ctx.gradients.update(enumerate(gradients[0].chunk(len(ctx.parts))))
        ctx.stages.end(run)
        found = None
        if ctx.needs_input_grad[2]:
            found = torch.cat([torch.zeros_like(one) if one.grad is None else one.grad for one in ctx.parts])
            ctx.stages.broadcast(found, 0)
        return None, None, found, None


# What `Pipe` and `PipelineModule` have in common.


class SequentialLayers(nn.Sequential):
    """An `nn.Sequential` with activation checkpointing of groups of layers."""

    interval: int = 0  # the number of layers that are recomputed together in the backward pass; 0: none are

    @classmethod
    def of(cls, layers: Mapping[str, nn.Module | Callable[..., Any]]) -> SequentialLayers:
        """Return layers and functions by name; the second occurrence of a module is wrapped, so that it has a name."""
        seen: set[int] = set()
        found = cls()
        for name, layer in layers.items():
            is_new = id(layer) not in seen
            found.add_module(name, layer if isinstance(layer, nn.Module) and is_new else FunctionLayer(layer))
            seen.add(id(layer))
        return found

    def forward(self, input: Any) -> Any:
        layers = list(self)
        if not self.interval or not torch.is_grad_enabled():
            return _call_layers(layers, input)
        for first in range(0, len(layers), self.interval):
            part = layers[first : first + self.interval]
            contexts = partial(_build_recompute_contexts, part)
            input = checkpoint_call(_call_layers, part, input, use_reentrant=False, context_fn=contexts)
        return input


def _call_layers(layers: Sequence[nn.Module], input: Any) -> Any:
    if isinstance(input, Tensor) and torch.is_grad_enabled() and _modify_input(layers):
        # A received input is a leaf, and a checkpointed input is needed again: neither may be modified.
        input = input.clone()
    for layer in layers:
        input = layer(input)
    return input


def _modify_input(layers: Sequence[nn.Module]) -> bool:
    """Return whether a layer up to the first with parameters works in place, as `nn.ReLU(inplace=True)` does."""
    last = next((number for number, layer in enumerate(layers) if has_parameters(layer)), len(layers))
    return any(getattr(part, "inplace", False) for layer in layers[: last + 1] for part in layer.modules())


def _build_recompute_contexts(layers: Sequence[nn.Module]) -> tuple[Any, Any]:
    first, again = build_checkpoint_contexts()
    return first, _freeze_statistics(layers, again)


@contextmanager
def _freeze_statistics(layers: Sequence[nn.Module], attending: AbstractContextManager[Any]) -> Iterator[None]:
    """Let batch norms not count values a second time when they are recomputed."""
    # A momentum of 0 instead of `track_running_stats = False`: checkpointing demands that the same tensors are saved.
    states = [(norm, norm.momentum, norm.num_batches_tracked) for norm in _find_batch_norms(layers)]
    token = _is_recomputing.set(True)
    for norm, _, _ in states:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with attending:
            yield
    finally:
        _is_recomputing.reset(token)
        for norm, momentum, count in states:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _find_batch_norms(layers: Iterable[nn.Module]) -> list[Any]:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [part for layer in layers for part in layer.modules() if isinstance(part, norms)]


class DeferredBatchNorm:
    """Updates the running statistics of batch norms once for all microbatches; each is still normalized by itself."""

    def __init__(self, norms: Iterable[Any]) -> None:
        self._sums: dict[Any, tuple[Tensor, Tensor, int]] = {}
        for norm in (one for one in norms if one.track_running_stats):
            norm.track_running_stats = False  # stops the layer's own updates; evaluation still uses the statistics
            norm.register_forward_pre_hook(self._count)

    def _count(self, norm: Any, inputs: tuple[Tensor, ...]) -> None:
        if not norm.training or _is_recomputing.get():
            return
        values = inputs[0].detach().transpose(0, 1).flatten(1)  # [channels, all else]
        total, squares, count = self._sums.get(norm, (0.0, 0.0, 0))
        self._sums[norm] = total + values.sum(1), squares + values.square().sum(1), count + values.shape[1]

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics from all microbatches since the last call."""
        for norm, (total, squares, count) in self._sums.items():
            norm.num_batches_tracked += 1
            momentum = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
            mean = total / count
            variance = (squares - count * mean.square()) / max(count - 1, 1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
            norm.running_var.lerp_(variance.to(norm.running_var.dtype), momentum)
        self._sums = {}


def build_chain_layout(stages: int, schedule: str) -> Layout:
    """Return the layout of a chain of stages; processes beyond them are further replicas."""
    plan = Plan(modules={WHOLE_MODEL: ModulePlan(stages=stages)}, schedule=schedule)  # type: ignore[arg-type]
    return Layout.of(plan, distributed.world_size())


def parallelize_chain(
    layers: SequentialLayers, layout: Layout, starts: Sequence[int], device: torch.device, microbatches: int = 1
) -> ParallelModel:
    """Apply a layout to a chain, given the index of the first layer of each stage."""
    names = [name for name, _ in layers.named_children()]
    stages = [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]
    template = PipelineTemplate(PipelineTemplate.get_model_name(layers), stages) if len(starts) > 1 else None
    options = ParallelizeOptions(microbatches=microbatches, templates={WHOLE_MODEL: template})
    return parallelize(layers, DistributedContext(layout, DevicePlacement(device, "fp32")), options)
