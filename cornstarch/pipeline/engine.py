"""What trains a `PipelineModule`: whole batches in, the loss out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from cornstarch.errors import ConfigError
from cornstarch.parallel import clip_gradients, processes
from cornstarch.pipeline.module import PipelineModule
from cornstarch.pipeline.runtime import Inputs, Runtime
from cornstarch.schedule.graph import StageGraph
from cornstarch.schedule.policies import make_schedule

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


# What `deepspeed.initialize` takes besides, and what takes its place.
_OF_DEEPSPEED = {
    "args": "leave it out: nothing is read from the command line",
    "config": "give microbatches=, microbatch_size= and gradient_clipping= themselves",
    "config_params": "give microbatches=, microbatch_size= and gradient_clipping= themselves",
    "model_parameters": "give optimizer= a class, which is called with model.parameters(), or an optimizer of them",
    "mpu": "give PipelineModule a plan",
    "dist_init_required": "start the process group first",
    "distributed_port": "start the process group first",
}


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
    """Return what trains a `PipelineModule`. All processes must call it.

    Args:
        model: The layers of this process.
        optimizer: Made of `model.parameters()`, or what makes one of parameters: `torch.optim.Adam`, a `partial`. None:
            only `eval_batch` is used.
        microbatches: Of a step and a replica.
        training_data: What `train_batch` draws from if it is given nothing: pairs of inputs and labels.
        microbatch_size: Samples of a microbatch of it.
        collate_fn: Makes a microbatch of a list of its samples. Default: they are stacked.
        lr_scheduler: Makes what sets the learning rate, of the optimizer.
        gradient_clipping: The largest norm of the gradients of all stages together.
        unknown: Refused; arguments of `deepspeed.initialize` with what takes their place.
    """
    if unknown:
        lines = [f"{name}: {_OF_DEEPSPEED.get(name, 'there is no such argument')}." for name in unknown]
        raise ConfigError("\n  ".join([f"initialize does not take {', '.join(unknown)}.", *lines]))
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"initialize takes a PipelineModule, not a {type(model).__name__}.")
    if type(microbatches) is not int or microbatches < 1:
        raise ConfigError(f"microbatches = {microbatches!r}: expected a whole number of at least 1.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = optimizer if isinstance(optimizer, Optimizer) or optimizer is None or not trained else optimizer(trained)
    engine = PipelineEngine(model, made if isinstance(made, Optimizer) else None, microbatches)
    engine.lr_scheduler = lr_scheduler(engine.optimizer) if lr_scheduler and engine.optimizer is not None else None
    engine.gradient_clipping, engine.is_trained = gradient_clipping, optimizer is not None
    if training_data is not None:
        engine.data = _repeated(model, training_data, microbatch_size, collate_fn)
    return engine


class PipelineEngine:
    """Trains the stages of a `PipelineModule`; made by `initialize`."""

    lr_scheduler: Any = None
    gradient_clipping: float | None = None
    is_trained: bool = True
    data: Iterator[Any] | None = None

    def __init__(self, model: PipelineModule, optimizer: Optimizer | None, microbatches: int) -> None:
        self.module, self.optimizer, self.microbatches = model, optimizer, microbatches
        self.step = 0
        """Steps of the optimizer so far."""
        self._stages: Any = model.pipeline if model.pipeline is not None else _alone(model, microbatches)

    @property
    def global_steps(self) -> int:
        """The same as `step`."""
        return self.step

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Do one step on the next `microbatches` pairs of inputs and labels; return their mean loss, in every process.

        All processes of a replica must draw the same pairs, each from its own iterator.

        Args:
            data_iter: Yields pairs. Default: what `training_data` has.
        """
        if not self.is_trained:
            raise ConfigError("train_batch needs an optimizer: initialize(model, optimizer=torch.optim.Adam).")
        self.module.train()
        loss = self._pass(data_iter, self._stages.train)
        self._change_weights()
        self.step += 1
        return loss

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """Return the mean loss of the next `microbatches` pairs, in every process; nothing changes."""
        was_training = self.module.training
        self.module.eval()
        try:
            return self._pass(data_iter, self._stages.forward)
        finally:
            self.module.train(was_training)

    def _pass(self, data_iter: Iterator[Any] | None, run: Callable[..., None]) -> Tensor:
        pairs = self._drawn(data_iter if data_iter is not None else self.data)
        losses: list[Tensor] = []

        def finish(m: int, output: Any) -> Tensor:
            loss = self._loss(output, _moved(pairs[m][1], self.module.device))
            losses.append(loss.detach())
            return loss / len(pairs)

        run([{"input": _moved(inputs, self.module.device)} for inputs, _ in pairs], finish)
        own = float(torch.stack(losses).mean()) if losses else 0.0
        (total,) = processes.sum_over_ranks([own])
        return torch.tensor(total / self.module.replicas)

    def _drawn(self, source: Iterator[Any] | None) -> list[tuple[Any, Any]]:
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

    def _loss(self, output: Any, labels: Any) -> Tensor:
        loss = output if self.module.loss_fn is None else self.module.loss_fn(output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = "The last layer" if self.module.loss_fn is None else "loss_fn"
            raise ConfigError(f"{what} returned {_told(loss)}; expected the loss, a tensor with one number.")
        return loss

    def _change_weights(self) -> None:
        pipeline = self.module.pipeline
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if self.gradient_clipping is not None:
            holders, copies = (None, []) if pipeline is None else (pipeline.holders, pipeline.copies())
            clip_gradients(None, trained, self.gradient_clipping, holders, copies, self.module.device)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        for parameter in trained:
            parameter.grad = None


def _alone(model: PipelineModule, microbatches: int) -> Runtime:
    """Return what runs all layers in one process."""
    layers = model.layers
    trains = any(parameter.requires_grad for parameter in layers.parameters())
    schedule = make_schedule(StageGraph.chain(1, trains=trains), microbatches)

    def run(inputs: Inputs, received: Any) -> Any:
        return layers(inputs["input"])

    return Runtime(schedule, 0, {0: run}, {}, None)


def _repeated(
    model: PipelineModule, data: Dataset[Any], size: int, collate: Callable[[list[Any]], Any] | None
) -> Iterator[Any]:
    """Yield microbatches for ever, in another order each time, to each replica its own."""
    samples = len(data)  # type: ignore[arg-type]
    if samples < size * model.replicas:
        raise ConfigError(
            f"training_data has {samples} samples: too few for a microbatch of {size} on {model.replicas} replicas."
        )
    order: DistributedSampler[Any] = DistributedSampler(data, model.replicas, model.replica, drop_last=True)
    loader = DataLoader(data, size, sampler=order, collate_fn=collate, drop_last=True)

    def yielded() -> Iterator[Any]:
        epoch = 0
        while True:
            order.set_epoch(epoch)
            yield from loader
            epoch += 1

    return yielded()


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return type(value)(_moved(one, device) for one in value) if isinstance(value, list | tuple) else value


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of the shape {list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


__all__ = ["PipelineEngine", "initialize"]
