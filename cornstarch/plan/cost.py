"""What the layers of a run cost: times, parameters and bytes of one microbatch on one device; no torch.

    cost = RunCost((vision, language_model), samples=1, batch=64, tokens=4096)
    scaled(layer, tp=2, cp=1, samples=2, device)

Costs are counted from a trace, or measured; they are those of one device that has everything (tp = cp = 1). Here they
are scaled to what one of several ranks has. What ranks exchange is added later (`cornstarch.plan.passes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal

from cornstarch.errors import ConfigError
from cornstarch.plan.facts import between
from cornstarch.plan.plan import LANGUAGE_MODEL

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Device

Cut = Literal["always", "vocabulary", "never"]


@dataclass(frozen=True)
class LayerCost:
    """One layer: the least that a stage can hold."""

    name: str
    forward: float
    """Seconds of a microbatch, of the forward pass; so are the next two."""
    input_gradient: float
    """Of the gradients of what goes in."""
    weight_gradient: float
    """Of the gradients of the weights; counted where the layer is trained."""
    parameters: int
    parameter_bytes: int
    """Of all of them."""
    activation_bytes: int
    """Kept from the forward to the backward of a microbatch."""
    activation_bytes_recomputed: int
    """What is kept of them if the rest is computed again."""
    output_bytes: int
    """What goes to the next layer."""
    trained: bool = True
    trained_parameters: int | None = None
    """Those that change, where the layer is trained only in part (adapters). Default: all, or none."""
    sums: int = 2
    """How often tp sums a tensor as large as the output in a forward pass: after attention and feed-forward."""
    kv_bytes: int = 0
    """Keys and values, which cp sends round."""
    tp_cuts: Cut = "always"
    """Whether tp cuts the layer; `vocabulary`: with `tp_vocabulary` only."""
    whole_bytes: int = 0
    """Those of the activations that tp leaves whole, if `tp_sequence` does not cut them either."""
    working_bytes: int = 0
    """What is there for a moment while a pass is computed, beside what is kept: gradients, a head's logits."""
    again: float | None = None
    """Seconds of the forward pass that checkpointing computes again: all but a head's. Default: all of it."""
    shared_bytes: int = 0
    """Of trained weights that an earlier layer has: a tied head's. Their gradients are there from its backward on."""
    items: float = 0.0
    """What cp deals out whole, of a microbatch: an encoder's images or tiles. 0: it cuts tokens, evenly."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"Layer {self.name}: {name} = {value}; expected at least 0.")
        if max(self.activation_bytes_recomputed, self.whole_bytes) > self.activation_bytes:
            raise ConfigError(f"Layer {self.name}: more is kept of its activations than there is.")

    @property
    def changing(self) -> int:
        """The parameters that are trained."""
        if not self.trained:
            return 0
        return self.parameters if self.trained_parameters is None else self.trained_parameters


@dataclass(frozen=True)
class ModuleCost:
    """An encoder with its projector, the language model, or a whole model."""

    name: str
    layers: tuple[LayerCost, ...]
    feeds: tuple[str, ...] = ()
    """The modules that take its output."""
    tp_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Those that divide its heads."""
    cp_sizes: tuple[int, ...] = (1,)
    """Those over which its sequences, or images, can be spread."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError(f"Module {self.name} has no layers.")

    @property
    def trained(self) -> bool:
        """Whether anything in it is."""
        return any(layer.trained for layer in self.layers)


@dataclass(frozen=True)
class RunCost:
    """All modules, and what a step is."""

    modules: tuple[ModuleCost, ...]
    """Encoders, then the language model; or a whole model."""
    samples: int = 1
    """Those of the microbatch that the costs are of."""
    batch: int = 1
    """Samples of a step, over all replicas."""
    tokens: float = 0.0
    """Of a sample, in the language model."""
    flops: float = 0.0
    """Operations that a sample needs, forward and backward; nothing that is computed twice."""
    precision: str = "bf16"
    """What matrices are multiplied in."""
    state_bytes: int = 8
    """What the optimizer has for each trained parameter: 8 for Adam on float32."""
    straggler: tuple[tuple[int, float], ...] = ()
    """By number of replicas, ascending: the work of the slowest over an even share (`DataFacts.straggler`)."""

    def __post_init__(self) -> None:
        ordered = sorted(self.modules, key=lambda module: module.name == LANGUAGE_MODEL)  # stable, as in a Plan
        object.__setattr__(self, "modules", tuple(ordered))
        object.__setattr__(self, "straggler", tuple((count, share) for count, share in self.straggler))
        if not self.modules:
            raise ConfigError("There is no module to plan for.")
        if self.samples < 1 or self.batch < 1:
            raise ConfigError(f"samples = {self.samples}, batch = {self.batch}: expected at least 1.")
        last = self.modules[-1].name
        for module in self.modules[:-1]:
            if module.feeds not in ((), (last,)):
                raise ConfigError(f"{module.name} feeds {', '.join(module.feeds)}; expected {last}, where all meet.")

    def module(self, name: str) -> ModuleCost:
        """Return a module by name."""
        return next(module for module in self.modules if module.name == name)

    @property
    def encoders(self) -> tuple[ModuleCost, ...]:
        """All modules but the last."""
        return self.modules[:-1]

    def straggling(self, replicas: int) -> float:
        """Return how much more than an even share the slowest of so many replicas has to do; 1: nothing."""
        return between(self.straggler, replicas)

    def trained_before(self, name: str) -> bool:
        """Say whether something is trained whose results go into a module."""
        return name == self.modules[-1].name and any(module.trained for module in self.encoders)


def scaled(
    layer: LayerCost,
    tp: int = 1,
    cp: int = 1,
    samples: float = 1.0,
    device: Device | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
) -> LayerCost:
    """Return what one rank has of a layer.

    Times are spread over tp × cp, parameters over tp, tokens over cp. No pass is faster than the device reads the
    layer's weights from its memory, so very small microbatches gain nothing.

    Args:
        layer: With tp = cp = 1.
        tp: Ranks that its matrices are cut over.
        cp: Ranks that its tokens are cut over.
        samples: Those of a microbatch, in microbatches that the costs are of.
        device: Whose memory is read. Default: reading costs nothing.
        sequence: Whether tp cuts activations along tokens, too.
        vocabulary: Whether tp cuts tables of words, too.
    """
    cuts = layer.tp_cuts == "always" or (layer.tp_cuts == "vocabulary" and vocabulary)
    over = tp if cuts else 1
    bandwidth = getattr(device, "bandwidth", None)
    least = layer.parameter_bytes / over / bandwidth if bandwidth else 0.0
    tokens = ceil(layer.items * samples / cp) / layer.items if layer.items and cp > 1 else samples / cp
    whole = layer.activation_bytes if not cuts else 0 if sequence else layer.whole_bytes

    def seconds(one: float) -> float:
        return max(one * tokens / over, least) if one else 0.0

    def kept(size: int) -> int:
        left = min(whole, size)
        return round((left + (size - left) / over) * tokens)

    return replace(
        layer,
        forward=seconds(layer.forward),
        input_gradient=seconds(layer.input_gradient),
        weight_gradient=seconds(layer.weight_gradient),
        again=None if layer.again is None else seconds(layer.again),
        parameters=-(-layer.parameters // over),
        parameter_bytes=-(-layer.parameter_bytes // over),
        trained_parameters=None if layer.trained_parameters is None else -(-layer.trained_parameters // over),
        activation_bytes=kept(layer.activation_bytes),
        activation_bytes_recomputed=kept(layer.activation_bytes_recomputed),
        output_bytes=round(layer.output_bytes * tokens),
        working_bytes=round(layer.working_bytes * tokens / over),
        kv_bytes=round(layer.kv_bytes * samples / over),
        shared_bytes=-(-layer.shared_bytes // over),
        whole_bytes=0,
        sums=layer.sums if cuts else 0,
    )
