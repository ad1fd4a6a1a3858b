"""`PipelineModule`, a list of layers split into stages, and the `PipelineEngine` that trains it.

layers = [LayerSpec(nn.Linear, 64, 128), nn.ReLU(), LayerSpec(nn.Linear, 128, 10)]
model = PipelineModule(layers, num_stages=2, loss_fn=nn.CrossEntropyLoss())
engine = initialize(model, optimizer=torch.optim.Adam, microbatches=4)
loss = engine.train_batch(iter(pairs))
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from cornstarch.api.microbatches import ReplicaSampler
from cornstarch.api.pipe import SequentialLayers, build_chain_layout, parallelize_chain
from cornstarch.engine.parallelize import ParallelModel
from cornstarch.engine.train_step import TrainStep
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from cornstarch.pipeline.stage import call_with_single_input
from cornstarch.pipeline.stage_program import get_device
from cornstarch.pipeline.template import balance_stages
from cornstarch.trees import map_tensors

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

# Arguments of `deepspeed.initialize` that this `initialize` does not have, and what to do instead.
_DEEPSPEED_ARGUMENTS = {
    "args": "leave it out: nothing is read from the command line",
    "config": "give microbatches=, microbatch_size= and gradient_clipping= themselves",
    "config_params": "give microbatches=, microbatch_size= and gradient_clipping= themselves",
    "model_parameters": "give optimizer= a class, which is called with model.parameters(), or an optimizer of them",
    "mpu": "give PipelineModule a plan",
    "dist_init_required": "start the process group first",
    "distributed_port": "start the process group first",
}


class LayerSpec:
    """A layer that is built only by the ranks of its stage: `cls(*args, **kwargs)`, where `cls` returns a module."""

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(cls) or isinstance(cls, nn.Module):
            raise ConfigError(f"LayerSpec({cls!r}): expected a class of layers, such as torch.nn.Linear.")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def name(self) -> str:
        return getattr(self.cls, "__name__", type(self.cls).__name__)

    def build(self) -> nn.Module:
        layer = self.cls(*self.args, **self.kwargs)
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"{self!r} makes a {type(layer).__name__}: expected a module.")
        return layer

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"LayerSpec({', '.join([self.name, *given])})"


Layer = nn.Module | LayerSpec | Callable[..., Any]


class PipelineModule(nn.Module):
    """Layers that are called one after the other, in stages; `initialize` returns an engine that trains them.

    All processes must build it, after the process group. There are as many replicas as the stages fit into the
    processes. Afterwards it has only the layers of this process, under their numbers in the list. The weights of a
    `LayerSpec` depend on torch's random state and on its number, not on the number of stages.

    Args:
        layers: Modules, functions and `LayerSpec`s.
        num_stages: The number of processes of one replica.
        loss_fn: Takes the output of the last layer and the labels; returns the mean over a microbatch.
        partition_method: How stages are balanced: "parameters": by trained parameters; "uniform": by layers;
            "type:REGEX": by layers whose class name matches the expression, ignoring case.
        activation_checkpoint_interval: The number of layers that are recomputed together in the backward pass; 0: none.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int = 1,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
    ) -> None:
        super().__init__()
        _check_arguments(layers, num_stages, activation_checkpoint_interval)
        self.loss_fn, self.num_stages = loss_fn, num_stages
        layout = build_chain_layout(num_stages, "1f1b")
        here = layout.place(distributed.rank())
        self.replicas, self.replica = layout.dp, here.dp  # their number, and the index of this process's
        seed = int(torch.randint(2**31, ()))
        built = [_build_on_meta(layer) for layer in layers]
        costs = _layer_costs(layers, built, partition_method)
        # The first layer of each stage.
        self.starts = balance_stages(costs, range(1, len(layers)), num_stages, "The list of layers")
        own = range(self.starts[here.stage], [*self.starts[1:], len(layers)][here.stage])
        for number, layer in enumerate(layers):
            if number in own and isinstance(layer, LayerSpec):
                with torch.random.fork_rng():
                    torch.manual_seed(seed + number)
                    built[number] = layer.build()
        self.layers = SequentialLayers.of({str(number): layer for number, layer in enumerate(built)})
        self.device = get_device(nn.ModuleList(list(self.layers)[own.start : own.stop]))
        self.parallel = ParallelModel(self.layers)
        if distributed.world_size() > 1:
            self.parallel = parallelize_chain(self.layers, layout, self.starts, self.device)
        self.parallel.set_call(call_with_single_input)
        self.layers.interval = activation_checkpoint_interval

    def forward(self, input: Any) -> Any:
        """Run all layers, if one process has them."""
        if self.num_stages > 1:
            raise ConfigError(
                "A PipelineModule of several stages is not called: cornstarch.pipeline.initialize makes an engine of "
                "it, with train_batch and eval_batch."
            )
        return self.layers(input)


def _check_arguments(layers: Sequence[Layer], stages: int, interval: int) -> None:
    if not layers:
        raise ConfigError("layers is empty: a pipeline needs a layer.")
    for number, layer in enumerate(layers):
        if not callable(layer) and not isinstance(layer, LayerSpec):
            raise ConfigError(f"layers[{number}] = {layer!r}: expected a module, a function or a LayerSpec.")
    if type(stages) is not int or stages < 1:
        raise ConfigError(f"num_stages = {stages!r}: expected a whole number of at least 1.")
    if type(interval) is not int or interval < 0:
        raise ConfigError(f"activation_checkpoint_interval = {interval!r}: expected a whole number of at least 0.")
    world = distributed.world_size()
    if world % stages:
        raise ConfigError(
            f"num_stages = {stages} does not fit {world} process{'' if world == 1 else 'es'}: each replica takes one "
            f"process for each stage. Start {stages} processes, or a multiple of that: torchrun --nproc-per-node="
            f"{stages}."
        )


def _build_on_meta(layer: Layer) -> nn.Module | Callable[..., Any]:
    """Return a layer without memory, which has the number and the `requires_grad` of its parameters."""
    if not isinstance(layer, LayerSpec):
        return layer
    with torch.random.fork_rng():
        try:
            with torch.device("meta"):
                return layer.build()
        except (RuntimeError, NotImplementedError):  # its constructor looks at values, which meta tensors do not have
            return layer.build().to("meta")


def _layer_costs(layers: Sequence[Layer], built: Sequence[Any], method: str) -> list[float]:
    if method == "uniform":
        return [1.0] * len(layers)
    if method == "parameters":
        modules = [one if isinstance(one, nn.Module) else nn.Identity() for one in built]
        return [float(sum(p.numel() for p in one.parameters() if p.requires_grad)) for one in modules]
    if not method.startswith("type:"):
        raise ConfigError(f'partition_method = {method!r}: expected "parameters", "uniform" or "type:REGEX".')
    pattern = method.removeprefix("type:")
    kinds = [layer.cls if isinstance(layer, LayerSpec) else layer for layer in layers]
    names = [type(k).__name__ if isinstance(k, nn.Module) else getattr(k, "__name__", type(k).__name__) for k in kinds]
    try:
        found = [re.search(pattern, name, re.IGNORECASE) is not None for name in names]
    except re.error as error:
        raise ConfigError(f"partition_method = {method!r}: {pattern!r} is no regular expression: {error}.") from error
    if not any(found):
        there = ", ".join(dict.fromkeys(names))
        raise ConfigError(f"partition_method = {method!r}: no layer has such a name; there are {there}.")
    return [float(one) for one in found]


def initialize(
    model: PipelineModule | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    *,
    microbatches: int = 1,
    training_data: Dataset[Any] | None = None,
    microbatch_size: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    lr_scheduler: Callable[[Optimizer], Any] | None = None,
    gradient_clipping: float | None = None,
    **unknown: Any,
) -> PipelineEngine:
    """Return an engine that trains a `PipelineModule`. All processes must call it.

    Args:
        model: The module, with the layers of this process.
        optimizer: Made from `model.parameters()`, or a function that makes one: `torch.optim.Adam`, a `partial`. None:
            only `eval_batch` is used.
        microbatches: The number of microbatches of a step, per replica.
        training_data: Pairs of inputs and labels, for `train_batch` without an iterator.
        microbatch_size: The samples of `training_data` in a microbatch.
        collate_fn: Makes a microbatch of a list of samples. Default: they are stacked.
        lr_scheduler: Makes a learning-rate scheduler of the optimizer.
        gradient_clipping: The largest norm of the gradients of all stages together.
        unknown: Refused; for arguments of `deepspeed.initialize` the error says what to do instead.
    """
    if unknown:
        lines = [f"{name}: {_DEEPSPEED_ARGUMENTS.get(name, 'there is no such argument')}." for name in unknown]
        raise ConfigError("\n  ".join([f"initialize does not take {', '.join(unknown)}.", *lines]))
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"initialize takes a PipelineModule, not a {type(model).__name__}.")
    if type(microbatches) is not int or microbatches < 1:
        raise ConfigError(f"microbatches = {microbatches!r}: expected a whole number of at least 1.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = optimizer if isinstance(optimizer, Optimizer) or optimizer is None or not trained else optimizer(trained)
    used = made if isinstance(made, Optimizer) else None
    data = None if training_data is None else _iterate_forever(model, training_data, microbatch_size, collate_fn)
    scheduler = lr_scheduler(used) if lr_scheduler and used is not None else None
    return PipelineEngine(model, used, microbatches, gradient_clipping, optimizer is not None, scheduler, data)


@dataclass(eq=False)
class PipelineEngine:
    """Trains the stages of a `PipelineModule`; `initialize` returns one."""

    module: PipelineModule
    optimizer: Optimizer | None
    microbatches: int
    gradient_clipping: float | None = None
    is_trained: bool = True
    lr_scheduler: Any = None
    data: Iterator[Any] | None = None
    step: int = 0  # the number of optimizer steps so far

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        clipping = self.gradient_clipping
        self._train_step = TrainStep(self.module.parallel, trained, self.optimizer, max_grad_norm=clipping)

    @property
    def global_steps(self) -> int:
        """The same as `step`."""
        return self.step

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one step on the next `microbatches` pairs of inputs and labels; return their mean loss, on every process.

        All processes of a replica must draw the same pairs, each from its own iterator. Without `data_iter`, pairs
        come from `training_data`.
        """
        if not self.is_trained:
            raise ConfigError("train_batch needs an optimizer: initialize(model, optimizer=torch.optim.Adam).")
        self.module.train()
        loss = self._run(data_iter, self._train_step)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.step += 1
        return loss

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Return the mean loss of the next `microbatches` pairs, on every process; nothing is trained."""
        was_training = self.module.training
        self.module.eval()
        forward = partial(self._train_step.forward_backward, count=self.microbatches, backward=False)
        try:
            return self._run(data_iter, lambda inputs, loss_of: forward(inputs, loss_of=loss_of))
        finally:
            self.module.train(was_training)

    def _run(self, data_iter: Iterator[Any] | None, run: Callable[..., Any]) -> Tensor:
        pairs = self._draw(data_iter if data_iter is not None else self.data)
        move = partial(map_tensors, lambda tensor: tensor.to(self.module.device))
        losses: list[Tensor] = []

        def finish(m: int, output: Any) -> Tensor:
            loss = self._compute_loss(output, move(pairs[m][1]))
            losses.append(loss.detach())
            return loss / len(pairs)

        run([{"input": move(inputs)} for inputs, _ in pairs], finish)
        own = float(torch.stack(losses).mean()) if losses else 0.0
        (total,) = distributed.sum_over_ranks([own])
        return torch.tensor(total / self.module.replicas)

    def _draw(self, source: Iterator[Any] | None) -> list[tuple[Any, Any]]:
        if source is None:
            raise ConfigError("There is nothing to draw from: give an iterator, or initialize(…, training_data=…).")
        if not isinstance(source, Iterator):
            raise ConfigError(f"train_batch draws from an iterator; found a {type(source).__name__}: use iter(…).")
        found = []
        for number in range(self.microbatches):
            pair = next(source, None)
            if pair is None:
                raise ConfigError(
                    f"The data ended after {number} of the {self.microbatches} microbatches of a step. Repeat it."
                )
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ConfigError(f"Expected pairs of inputs and labels; found a {type(pair).__name__}.")
            found.append((pair[0], pair[1]))
        return found

    def _compute_loss(self, output: Any, labels: Any) -> Tensor:
        loss = output if self.module.loss_fn is None else self.module.loss_fn(output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            source = "The last layer" if self.module.loss_fn is None else "loss_fn"
            shape = f"a tensor of the shape {list(loss.shape)}" if isinstance(loss, Tensor) else None
            what = shape or ("nothing" if loss is None else f"a {type(loss).__name__}")
            raise ConfigError(f"{source} returned {what}; expected the loss, a tensor with one number.")
        return loss


def _iterate_forever(
    model: PipelineModule, data: Dataset[Any], size: int, collate: Callable[[list[Any]], Any] | None
) -> Iterator[Any]:
    """Return an endless iterator over this replica's microbatches, shuffled anew in each epoch."""
    samples = len(data)  # type: ignore[arg-type]
    if samples < size * model.replicas:
        raise ConfigError(
            f"training_data has {samples} samples: too few for a microbatch of {size} on {model.replicas} replicas."
        )
    sampler = ReplicaSampler(data, model.replicas, model.replica, drop_last=True)
    loader = DataLoader(data, size, sampler=sampler, collate_fn=collate, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))
