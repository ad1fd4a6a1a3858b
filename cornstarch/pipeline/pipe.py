"""`Pipe`: an `nn.Sequential` over all processes, called and differentiated like any other module.

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

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.pipeline.apply import Pipeline
from cornstarch.pipeline.balance import best_starts
from cornstarch.pipeline.chain import DeferredStatistics, Layers, chain_layout, chain_templates
from cornstarch.pipeline.payload import Form, TensorForm, take_apart
from cornstarch.pipeline.programs import device_of
from cornstarch.pipeline.runtime import Inputs, Run, Runtime
from cornstarch.pipeline.sequential import call_with_one
from cornstarch.schedule.actions import Kind
from cornstarch.schedule.policies import make_schedule

Checkpoint = Literal["always", "except_last", "never"]

_AGAIN = "recomputed"  # beside a chunk: whether it is computed again in the backward pass


class Pipe(nn.Module):
    """An `nn.Sequential` whose layers are dealt out to all processes, one stage each, and trained by GPipe.

    Every process gives it the same layers with the same weights, and calls it with the same input. Every process is
    returned the whole output, makes the same loss of it, and calls `backward`: parameters outside the pipe, in front of
    it or behind it, then have their gradients in every process. What other stages own is given up.

    Args:
        module: The layers; stages get about the same number of parameters.
        chunks: Microbatches that a batch is cut into; it must divide the batch.
        checkpoint: Which chunks are computed again in the backward pass, instead of keeping all activations: "always",
            "except_last" or "never".
        deferred_batch_norm: Update running statistics once for a batch, as if it were not cut, and not for each chunk.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: Checkpoint = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise ConfigError(f"Pipe takes an nn.Sequential, not {type(module).__name__}; PipelineModule takes a list.")
        if type(chunks) is not int or chunks < 1:
            raise ConfigError(f"chunks = {chunks!r}: expected a whole number of at least 1.")
        if checkpoint not in get_args(Checkpoint):
            raise ConfigError(f"checkpoint = {checkpoint!r}: expected one of {', '.join(get_args(Checkpoint))}.")
        self.chunks, self.checkpoint = chunks, checkpoint
        self.module = Layers.of({name: layer for name, layer in module._modules.items() if layer is not None})
        """This process's layers, under the names that they had."""
        self._halves: _Halves | None = _cut(self.module, chunks) if processes.size() > 1 else None
        self._statistics = DeferredStatistics(self.module) if deferred_batch_norm else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the last layer, in every process."""
        parts = self._parts(input)
        if self._halves is None:
            output = torch.cat([self._alone(m, one) for m, one in enumerate(parts)])
            self._commit()
            return output
        if not torch.is_grad_enabled() or not self._halves.takes_gradient(input):
            made: dict[int, Tensor] = {}
            self._halves.evaluated([{"input": one} for one in parts], made)
            return self._halves.everywhere(made, input)
        return _Passage.apply(self, self._halves, input, torch.zeros((), requires_grad=True))

    def _parts(self, input: Tensor) -> list[Tensor]:
        if not isinstance(input, Tensor):
            raise ConfigError(f"Pipe is called with one tensor, a batch; found a {type(input).__name__}.")
        rows = input.shape[0] if input.dim() else 0
        if not rows or rows % self.chunks:
            raise ConfigError(
                f"A batch of {rows} samples cannot be cut into {self.chunks} chunks of the same size: a mean over "
                "chunks would not be the mean over samples. Choose a batch that chunks divides."
            )
        return list(input.chunk(self.chunks))

    def _alone(self, chunk: int, part: Tensor) -> Tensor:
        """Return what all layers, which are in this process, make of a chunk."""
        self.module.interval = len(self.module) if self.recomputes(chunk) else 0
        made: Tensor = self.module(part)
        return made

    def recomputes(self, chunk: int) -> bool:
        """Whether a chunk is computed again in the backward pass."""
        return self.checkpoint == "always" or (self.checkpoint == "except_last" and chunk < self.chunks - 1)

    def _commit(self) -> None:
        if self._statistics is not None:
            self._statistics.commit()


def _cut(layers: Layers, chunks: int) -> _Halves:
    """Keep this process's layers."""
    stages = processes.size()
    costs = [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in layers]
    if stages > len(layers):
        raise ConfigError(
            f"{len(layers)} layers cannot be dealt out to {stages} processes: each has one stage of the pipe, with at "
            f"least one layer. Start at most {len(layers)} processes."
        )
    starts = best_starts(costs, range(1, len(layers)), stages, "The pipe")
    layout = chain_layout(stages, stages, "gpipe")
    return _Halves(layers, layout, device_of(layers), chunks, chain_templates(layers, starts))


# ---------------------------------------------------------------------------------------------------- two halves


class _HalvedRuntime(Runtime):
    """Stops between the last forward and the first backward, where the loss is made."""

    def begin(self, microbatches: Sequence[Inputs], finish: Callable[[int, Any], Tensor]) -> Run:
        """Do all forwards."""
        forwards = [action for action in self._actions if action.kind is Kind.F]
        run = Run(self, forwards, microbatches, finish)
        self.guarded(run.all, run)
        return run

    def end(self, run: Run) -> None:
        """Do all backwards."""
        run.actions = [action for action in self._actions if action.kind is not Kind.F]
        self.guarded(run.all, run)

    def share(self, tensor: Tensor, source: int) -> None:
        """Give all processes what one has; over the same lines, so that nobody waits for one that has failed."""
        assert self.post is not None
        group = self.post.group
        self.guarded(lambda: dist.broadcast(tensor, source, group=group))


class _Halves(Pipeline):
    """A chain of stages, forward and backward in two calls."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.set_call(call_with_one)
        self._output_forms: dict[Any, TensorForm] = {}
        schedule = make_schedule(self.graph, self.microbatches, "gpipe")
        self._halved = _HalvedRuntime(schedule, self.place, self.programs, self._edges, self.post)
        (program,) = self.programs.values()
        program.register_forward_pre_hook(self._choose)

    def _choose(self, _: nn.Module, given: tuple[Any, ...]) -> None:
        """Let the layers be recomputed, or not, in the chunk that comes."""
        assert isinstance(self.model, Layers)
        self.model.interval = len(self.model) if given[0].get(_AGAIN) else 0

    def takes_gradient(self, input: Tensor) -> bool:
        """Whether there is anything to take a gradient of."""
        if input.requires_grad and not self.graph.wants_gradient(0):
            raise ConfigError(
                "The input of the pipe takes a gradient, but nothing in its first stage is trained: no gradient is "
                "sent back there. Detach the input, or train the first layers."
            )
        return self.graph.wants_gradient(self.graph.sink)

    def begin(self, parts: Sequence[Inputs], outputs: dict[int, Tensor], gradients: dict[int, Tensor]) -> Run:
        """Do all forwards; `gradients` are read when the backwards begin."""

        def finish(m: int, output: Tensor) -> Tensor:
            outputs[m] = _checked(output).detach()
            return _Started.apply(output, lambda: gradients[m])

        return self._halved.begin(parts, finish)

    def evaluated(self, parts: Sequence[Inputs], outputs: dict[int, Tensor]) -> None:
        """Do forward alone."""
        self._halved.forward(parts, lambda m, output: outputs.__setitem__(m, _checked(output)))

    def end(self, run: Run) -> None:
        """Do all backwards, and add up the gradients of layers that several stages have."""
        with self.gradients_meet():
            self._halved.end(run)

    def everywhere(self, made: dict[int, Tensor], input: Tensor) -> Tensor:
        """Return the output of the last stage in all processes."""
        output = torch.cat([made[m] for m in sorted(made)]) if made else None
        key = (tuple(input.shape), input.dtype, self.model.training)
        if key not in self._output_forms:
            self._output_forms[key] = self._form_everywhere(output)
        found = self._output_forms[key].empty(self.device) if output is None else output
        self.share(found, self._last)
        return found

    def _form_everywhere(self, output: Tensor | None) -> TensorForm:
        """Return the form of the output in all processes."""
        content = b"" if output is None else take_apart(output)[0].encoded()
        length = torch.tensor([len(content)], device=self.device)
        self.share(length, self._last)
        told = torch.frombuffer(bytearray(content or bytes(int(length))), dtype=torch.uint8).to(self.device)
        self.share(told, self._last)
        return Form.decoded(bytes(told.cpu().numpy())).tensors[0]

    @property
    def _last(self) -> int:
        return processes.size() - 1

    def share(self, tensor: Tensor, source: int) -> None:
        """Give all processes what one has."""
        self._halved.share(tensor, source)


def _checked(output: Any) -> Tensor:
    if not isinstance(output, Tensor) or not output.dim():
        what = "a number" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ConfigError(f"The last layer of a Pipe returned {what}; expected a tensor with one row for each sample.")
    return output


class _Started(torch.autograd.Function):
    """Where the backward of a chunk begins: with the gradient that its part of the output has."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.gradient(), None


class _Passage(torch.autograd.Function):
    """The whole pipe, as the autograd of the process around it sees it."""

    @staticmethod
    def forward(ctx: Any, pipe: Pipe, halves: _Halves, input: Tensor, _: Tensor) -> Tensor:
        outputs: dict[int, Tensor] = {}
        ctx.halves, ctx.gradients = halves, {}
        ctx.parts = [one.detach().requires_grad_(input.requires_grad) for one in input.chunk(pipe.chunks)]
        inputs = [{"input": one, _AGAIN: pipe.recomputes(m)} for m, one in enumerate(ctx.parts)]
        with torch.enable_grad():
            ctx.run = halves.begin(inputs, outputs, ctx.gradients)
        pipe._commit()
        return halves.everywhere(outputs, input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.run is None:
            raise RuntimeError("Backward through a Pipe a second time: its activations are gone after the first.")
        run, ctx.run = ctx.run, None
        ctx.gradients.update(enumerate(gradients[0].chunk(len(ctx.parts))))
        ctx.halves.end(run)
        found = None
        if ctx.needs_input_grad[2]:
            own = [torch.zeros_like(one) if one.grad is None else one.grad for one in ctx.parts]
            found = torch.cat(own)
            ctx.halves.share(found, 0)
        return None, None, found, None


__all__ = ["Pipe"]
