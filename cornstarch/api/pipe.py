"""`Pipe`: an `nn.Sequential` split over all processes, called and differentiated like any other module.

model = Pipe(nn.Sequential(...), chunks=8)       # in every process, with the same weights
loss = loss_fn(model(input), target)             # in every process, on the same batch
loss.backward()                                  # in every process: each has the gradients of its own layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.engine.context import DistributedContext
from cornstarch.engine.parallelize import ParallelizeOptions, parallelize
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.parallel.device import DevicePlacement
from cornstarch.pipeline.message import PayloadSpec, TensorSpec, flatten_payload
from cornstarch.pipeline.pipeline import Pipeline
from cornstarch.pipeline.runtime import Inputs, Runtime, StepExecution
from cornstarch.pipeline.sequential import (
    DeferredBatchNorm,
    SequentialLayers,
    build_chain_layout,
    build_chain_templates,
)
from cornstarch.pipeline.stage import call_with_single_input
from cornstarch.pipeline.stage_program import get_device
from cornstarch.pipeline.template import balance_stages
from cornstarch.schedule.actions import Kind
from cornstarch.schedule.policies import make_schedule

CheckpointMode = Literal["always", "except_last", "never"]

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
        self._stages: _TwoPhasePipeline | None = (
            _split_layers(self.module, chunks) if distributed.world_size() > 1 else None
        )
        self._statistics = DeferredBatchNorm(self.module) if deferred_batch_norm else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer, on every process."""
        parts = self._split_batch(input)
        if self._stages is None:
            outputs = []
            for chunk, part in enumerate(parts):
                self.module.interval = len(self.module) if self.recomputes(chunk) else 0
                outputs.append(self.module(part))
            self.commit_statistics()
            return torch.cat(outputs)
        if not torch.is_grad_enabled() or not self._stages.requires_grad(input):
            found: dict[int, Tensor] = {}
            self._stages.evaluate([{"input": one} for one in parts], found)
            return self._stages.broadcast_output(found, input)
        return _PipeFunction.apply(self, self._stages, input, torch.zeros((), requires_grad=True))

    def _split_batch(self, input: Tensor) -> list[Tensor]:
        if not isinstance(input, Tensor):
            raise ConfigError(f"Pipe is called with one tensor, a batch; found a {type(input).__name__}.")
        rows = input.shape[0] if input.dim() else 0
        if not rows or rows % self.chunks:
            raise ConfigError(
                f"A batch of {rows} samples cannot be cut into {self.chunks} chunks of the same size: a mean over "
                "chunks would not be the mean over samples. Choose a batch that chunks divides."
            )
        return list(input.chunk(self.chunks))

    def recomputes(self, chunk: int) -> bool:
        """Return whether the backward pass recomputes a chunk."""
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and chunk < self.chunks - 1)

    def commit_statistics(self) -> None:
        """Update the deferred batch-norm statistics after a batch."""
        if self._statistics is not None:
            self._statistics.commit()


def _split_layers(layers: SequentialLayers, chunks: int) -> _TwoPhasePipeline:
    """Keep the layers of this process."""
    stages = distributed.world_size()
    costs = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in layers]
    if stages > len(layers):
        raise ConfigError(
            f"{len(layers)} layers cannot be split over {stages} processes: each has one stage of the pipe, with at "
            f"least one layer. Start at most {len(layers)} processes."
        )
    starts = balance_stages(costs, range(1, len(layers)), stages, "The pipe")
    layout = build_chain_layout(stages, stages, "gpipe")
    options = ParallelizeOptions(microbatches=chunks, templates=build_chain_templates(layers, starts))
    parallel = parallelize(layers, DistributedContext(layout, DevicePlacement(get_device(layers), "fp32")), options)
    assert parallel.pipeline is not None
    return _TwoPhasePipeline(parallel.pipeline)


# ---------------------------------------------------------------------------------------------------- two phases


class _TwoPhaseRuntime(Runtime):
    """Stops between the last forward and the first backward, where the caller computes the loss."""

    def begin(self, microbatches: Sequence[Inputs], finish: Callable[[int, Any], Tensor]) -> StepExecution:
        """Run all forwards."""
        forwards = [action for action in self._actions if action.kind is Kind.F]
        run = StepExecution(self, forwards, microbatches, finish)
        self.run_guarded(run.run, run)
        return run

    def end(self, run: StepExecution) -> None:
        """Run all backwards."""
        run.actions = [action for action in self._actions if action.kind is not Kind.F]
        self.run_guarded(run.run, run)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast within the runtime's group, whose failures reach all ranks, so that nobody waits forever."""
        assert self.channel is not None
        group = self.channel.group
        self.run_guarded(lambda: dist.broadcast(tensor, source, group=group))


class _TwoPhasePipeline:
    """A chain of stages whose forward and backward passes are two calls."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.model, self.device = pipeline, pipeline.model, pipeline.device
        self.graph = pipeline.graph
        pipeline.set_call(call_with_single_input)
        self._output_forms: dict[Any, TensorSpec] = {}
        schedule = make_schedule(pipeline.graph, pipeline.microbatches, "gpipe")
        self._runtime = _TwoPhaseRuntime(schedule, pipeline.place, pipeline.programs, pipeline.edges, pipeline.channel)
        (program,) = pipeline.programs.values()
        program.register_forward_pre_hook(self._set_recompute)

    def _set_recompute(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        """Choose whether the layers recompute the next chunk."""
        assert isinstance(self.model, SequentialLayers)
        self.model.interval = len(self.model) if given[0].get(_RECOMPUTE) else 0

    def requires_grad(self, input: Tensor) -> bool:
        """Return whether the output depends on trained parameters."""
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

        return self._runtime.begin(parts, finish)

    def evaluate(self, parts: Sequence[Inputs], outputs: dict[int, Tensor]) -> None:
        """Run forward alone."""
        self._runtime.forward(parts, lambda m, output: outputs.__setitem__(m, _check_output(output)))

    def end(self, run: StepExecution) -> None:
        """Run all backwards, and sum the gradients of layers that several stages share."""
        with self._pipeline.gradients_meet():
            self._runtime.end(run)

    def broadcast_output(self, made: dict[int, Tensor], input: Tensor) -> Tensor:
        """Return the output of the last stage on all processes."""
        output = torch.cat([made[m] for m in sorted(made)]) if made else None
        key = (tuple(input.shape), input.dtype, self.model.training)
        if key not in self._output_forms:
            self._output_forms[key] = self._broadcast_form(output)
        found = self._output_forms[key].empty(self.device) if output is None else output
        self.broadcast(found, distributed.world_size() - 1)
        return found

    def _broadcast_form(self, output: Tensor | None) -> TensorSpec:
        """Return the dtype and shape of the output on all processes."""
        content = b"" if output is None else flatten_payload(output)[0].to_json()
        length = torch.tensor([len(content)], device=self.device)
        self.broadcast(length, distributed.world_size() - 1)
        buffer = torch.frombuffer(bytearray(content or bytes(int(length))), dtype=torch.uint8).to(self.device)
        self.broadcast(buffer, distributed.world_size() - 1)
        return PayloadSpec.from_json(bytes(buffer.cpu().numpy())).tensors[0]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Send a tensor of one process to all."""
        self._runtime.broadcast(tensor, source)


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
    def forward(ctx: Any, pipe: Pipe, stages: _TwoPhasePipeline, input: Tensor, _: Tensor) -> Tensor:
        outputs: dict[int, Tensor] = {}
        ctx.stages, ctx.gradients = stages, {}
        ctx.parts = [one.detach().requires_grad_(input.requires_grad) for one in input.chunk(pipe.chunks)]
        inputs = [{"input": one, _RECOMPUTE: pipe.recomputes(m)} for m, one in enumerate(ctx.parts)]
        with torch.enable_grad():
            ctx.run = stages.begin(inputs, outputs, ctx.gradients)
        pipe.commit_statistics()
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
            own = [torch.zeros_like(one) if one.grad is None else one.grad for one in ctx.parts]
            found = torch.cat(own)
            ctx.stages.broadcast(found, 0)
        return None, None, found, None
