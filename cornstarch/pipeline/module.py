"""`PipelineModule`: a list of layers, functions and descriptions of layers, cut into stages.

layers = [LayerSpec(nn.Linear, 64, 128), nn.ReLU(), LayerSpec(nn.Linear, 128, 10)]
model = PipelineModule(layers, num_stages=2, loss_fn=nn.CrossEntropyLoss())
engine = initialize(model, optimizer=torch.optim.Adam, microbatches=4)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel import processes
from cornstarch.pipeline.apply import Pipeline
from cornstarch.pipeline.balance import best_starts
from cornstarch.pipeline.chain import Layers, chain_layout, chain_templates
from cornstarch.pipeline.programs import device_of
from cornstarch.pipeline.sequential import call_with_one


class LayerSpec:
    """A layer that is built only where it is needed: by the processes of its stage.

    Args:
        cls: What makes it: a class, or a function that returns a module.
        args: What that is called with.
        kwargs: The same, by name.
    """

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(cls) or isinstance(cls, nn.Module):
            raise ConfigError(f"LayerSpec({cls!r}): expected a class of layers, such as torch.nn.Linear.")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    @property
    def name(self) -> str:
        """What the class is called."""
        return getattr(self.cls, "__name__", type(self.cls).__name__)

    def build(self) -> nn.Module:
        """Return the layer."""
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"LayerSpec({', '.join([self.name, *given])})"


Layer = nn.Module | LayerSpec | Callable[..., Any]


class PipelineModule(nn.Module):
    """Layers that are called one on the result of the other, in stages; `initialize` makes what trains them.

    All processes must make it, after the process group. There are as many replicas as the stages fit into the
    processes. Afterwards it has this process's layers alone, under their numbers in the list: `parameters()` are its
    own. What is built from a `LayerSpec` depends on torch's random state and its number, not on the number of stages.

    Args:
        layers: Modules, functions and `LayerSpec`s.
        num_stages: So many processes hold one replica of the layers.
        loss_fn: Takes the output of the last layer and the labels; returns the mean over a microbatch.
        partition_method: What stages have about the same number of: "parameters" that are trained; "uniform": layers;
            "type:REGEX": layers whose class has a name that the expression is found in, in any case of letters.
        activation_checkpoint_interval: So many layers are recomputed together in the backward pass; 0: none are.
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
        _check(layers, num_stages, activation_checkpoint_interval)
        self.loss_fn, self.num_stages = loss_fn, num_stages
        layout = chain_layout(num_stages, processes.size(), "1f1b")
        self.replicas, self.replica = layout.dp, layout.place(processes.rank()).dp
        """How many replicas there are, and which of them this process belongs to."""
        stage = layout.place(processes.rank()).stage
        seed = int(torch.randint(2**31, ()))
        outline = [_outline(layer) for layer in layers]
        costs = _costs(layers, outline, partition_method)
        self.starts = best_starts(costs, range(1, len(layers)), num_stages, "The list of layers")
        """The numbers of the layers with which stages begin."""
        own = range(self.starts[stage], [*self.starts[1:], len(layers)][stage])
        for number, layer in enumerate(layers):
            if number in own and isinstance(layer, LayerSpec):
                outline[number] = _built(layer, seed + number)
        self.layers = Layers.of({str(number): layer for number, layer in enumerate(outline)})
        """This process's own."""
        device = device_of(nn.ModuleList([one for one in list(self.layers)[own.start : own.stop]]))
        self.pipeline: Pipeline | None = None
        if processes.size() > 1:
            templates = chain_templates(self.layers, self.starts)
            self.pipeline = Pipeline(self.layers, layout, device, templates=templates)
            self.pipeline.set_call(call_with_one)
        self.device = device
        self.layers.interval = activation_checkpoint_interval

    @property
    def has_loss(self) -> bool:
        """Whether the last layer is in this process."""
        return self.pipeline is None or self.pipeline.has_loss

    def forward(self, input: Any) -> Any:
        """Run all layers, where one process has them."""
        if self.num_stages > 1:
            raise ConfigError(
                "A PipelineModule of several stages is not called: cornstarch.pipeline.initialize makes an engine of "
                "it, with train_batch and eval_batch."
            )
        return self.layers(input)


def _check(layers: Sequence[Layer], stages: int, interval: int) -> None:
    if not layers:
        raise ConfigError("layers is empty: a pipeline needs a layer.")
    for number, layer in enumerate(layers):
        if not callable(layer) and not isinstance(layer, LayerSpec):
            raise ConfigError(f"layers[{number}] = {layer!r}: expected a module, a function or a LayerSpec.")
    if type(stages) is not int or stages < 1:
        raise ConfigError(f"num_stages = {stages!r}: expected a whole number of at least 1.")
    if type(interval) is not int or interval < 0:
        raise ConfigError(f"activation_checkpoint_interval = {interval!r}: expected a whole number of at least 0.")
    world = processes.size()
    if world % stages:
        raise ConfigError(
            f"num_stages = {stages} does not fit {world} process{'' if world == 1 else 'es'}: each replica takes one "
            f"process for each stage. Start {stages} processes, or a multiple of that: torchrun --nproc-per-node="
            f"{stages}."
        )


def _outline(layer: Layer) -> nn.Module | Callable[..., Any]:
    """Return a layer without memory: what it weighs, and what of it is trained."""
    if not isinstance(layer, LayerSpec):
        return layer
    with torch.random.fork_rng():
        try:
            with torch.device("meta"):
                return _module(layer)
        except (RuntimeError, NotImplementedError):  # it looks at numbers while it is made, and there are none
            return _module(layer).to("meta")


def _built(layer: LayerSpec, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _module(layer)


def _module(layer: LayerSpec) -> nn.Module:
    made = layer.build()
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{layer!r} makes a {type(made).__name__}: expected a module.")
    return made


def _costs(layers: Sequence[Layer], outline: Sequence[Any], method: str) -> list[float]:
    """Return what each layer counts for the balance of stages."""
    if method == "uniform":
        return [1.0] * len(layers)
    if method == "parameters":
        return [float(_trained(one)) if isinstance(one, nn.Module) else 0.0 for one in outline]
    if not method.startswith("type:"):
        raise ConfigError(f'partition_method = {method!r}: expected "parameters", "uniform" or "type:REGEX".')
    pattern = method.removeprefix("type:")
    try:
        found = [re.search(pattern, _name(layer), re.IGNORECASE) is not None for layer in layers]
    except re.error as error:
        raise ConfigError(f"partition_method = {method!r}: {pattern!r} is no regular expression: {error}.") from error
    if not any(found):
        names = ", ".join(dict.fromkeys(map(_name, layers)))
        raise ConfigError(f"partition_method = {method!r}: no layer has such a name; there are {names}.")
    return [float(one) for one in found]


def _trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _name(layer: Layer) -> str:
    if isinstance(layer, LayerSpec):
        return layer.name
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


__all__ = ["LayerSpec", "PipelineModule"]
