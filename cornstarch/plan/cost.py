"""The cost of layers: times, parameters and bytes of one microbatch, on one device and on one of several ranks.

Costs come from a trace or from measurements of one device without parallelism (tp = cp = 1). They are scaled to one
rank here, and communication inside a layer is added:

- tp: each forward pass all-reduces `sums` tensors as large as the output over the tensor-parallel ranks, and so does
  the backward pass of inputs. Nothing overlaps with that.
- cp: keys and values circulate once in a forward pass, and twice in a backward pass, with their gradients.
- activation checkpointing: a backward pass repeats the forward pass, including its communication.
- zero3: parameters are gathered before each pass while the previous layer computes, so the longer of both counts. zero2
  keeps them from forward to backward, and gathers them for the forward pass of the next microbatch. On the cores of one
  machine, which both move parameters and compute, the times add up. In bf16 on GPUs, what is stored in float32 is
  gathered in bf16, as in a run.
- ep: tokens go to the ranks of their experts and back, in each pass (`cornstarch.plan.expert_cost`). Nothing overlaps
  with that. Sums of tp inside experts are of the tokens that came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from cornstarch.errors import ConfigError
from cornstarch.plan.communication import all_gather, all_reduce
from cornstarch.plan.data_statistics import interpolate
from cornstarch.plan.expert_cost import ExpertCost, compute_exchange, share_out
from cornstarch.plan.plan import LANGUAGE_MODEL
from cornstarch.plan.rank_order import GroupLinks
from cornstarch.plan.stage_graph import best_parts

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Device

COPIES_REACH = 0.8
"""The fraction of a memory's bandwidth that copies and the optimizer reach: AdamW and the norm of 1.7 billion gradients
in bf16 take 8 ms on an H200."""
TensorSplit = Literal["always", "vocabulary", "never"]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class LayerCost:
    """One layer: the smallest unit of a stage."""

    name: str
    forward: float
    """Seconds of a microbatch's forward pass."""
    input_gradient: float
    """Seconds of the gradients of inputs."""
    weight_gradient: float
    """Seconds of the gradients of weights; counted where the layer is trained."""
    parameters: int
    parameter_bytes: int
    """Bytes of all parameters."""
    activation_bytes: int
    """Saved from the forward to the backward pass of a microbatch."""
    activation_bytes_recomputed: int
    """Saved with activation checkpointing."""
    output_bytes: int
    """Sent to the next layer."""
    trained: bool = True
    trained_parameters: int | None = None
    """The trained parameters of a layer that is trained only in part (adapters). Default: all, or none."""
    sums: int = 2
    """All-reduces of tp in a forward pass, each as large as the output: after attention and feed-forward."""
    sum_bytes: int | None = None
    """Bytes of each of them, where the layer adds results in half precision to wider ones. Default: of the output."""
    kv_bytes: int = 0
    """Keys and values, which cp circulates."""
    tp_cuts: TensorSplit = "always"
    """Whether tp shards the layer; `vocabulary`: only with `tp_vocabulary`."""
    whole_parameters: int = 0
    """Of the parameters, those that every rank of tp has: norms, routers."""
    table_parameters: int = 0
    """Of the parameters, those of embeddings and head, which tp shards only with `tp_vocabulary`."""
    whole_bytes: int = 0
    """Activations that tp does not shard without `tp_sequence`."""
    working_bytes: int = 0
    """Temporary memory of a pass beside the saved activations: gradients, the logits of a head."""
    again: float | None = None
    """Seconds of the forward pass that checkpointing repeats: all but a head's. Default: all of it."""
    shared_bytes: int = 0
    """Trained weights tied to an earlier layer (a tied head). Their gradients exist from this layer's backward on."""
    items: float = 0.0
    """Items of a microbatch that cp distributes whole: images or tiles of an encoder. 0: cp splits tokens evenly."""
    experts: ExpertCost | None = None
    """The part of all this that belongs to experts; None: it has none that could be shared out."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"Layer {self.name}: {name} = {value}; expected at least 0.")
        if max(self.activation_bytes_recomputed, self.whole_bytes) > self.activation_bytes:
            raise ConfigError(f"Layer {self.name}: its parts of the activations are larger than activation_bytes.")
        if self.whole_parameters + self.table_parameters > self.parameters:
            raise ConfigError(f"Layer {self.name}: tp leaves more parameters whole than it has.")

    @property
    def num_trainable(self) -> int:
        if not self.trained:
            return 0
        return self.parameters if self.trained_parameters is None else self.trained_parameters

    @property
    def gradient_bytes(self) -> float:
        return self.parameter_bytes * self.num_trainable / self.parameters if self.num_trainable else 0


@dataclass(frozen=True)
class ModuleCost:
    """An encoder with its projector, the language model, or a whole model."""

    name: str
    layers: tuple[LayerCost, ...]
    feeds: tuple[str, ...] = ()
    """The modules that take its output."""
    tp_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Sizes that divide its heads."""
    cp_sizes: tuple[int, ...] = (1,)
    """Sizes over which its sequences, or images, can be split."""
    tp_sequence: bool = True
    """Whether activations between its layers can be sharded along tokens."""
    ep_sizes: tuple[int, ...] = (1,)
    """Numbers of ranks over which its experts can be shared out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError(f"Module {self.name} has no layers.")

    @property
    def trained(self) -> bool:
        return any(layer.trained for layer in self.layers)


@dataclass(frozen=True)
class RunCost:
    """The costs of all modules, and the size of a step."""

    modules: tuple[ModuleCost, ...]
    """Encoders, then the language model; or a whole model."""
    samples: int = 1
    """Samples of the microbatch that the costs are of."""
    batch: int = 1
    """Samples of a step, over all replicas."""
    tokens: float = 0.0
    """Tokens of a sample in the language model."""
    flops: float = 0.0
    """FLOPs of a sample, forward and backward, without recomputation."""
    precision: str = "bf16"
    """The data type of matrix multiplications."""
    state_bytes: int = 8
    """Optimizer state per trained parameter: 8 for Adam on float32."""
    eager: tuple[ModuleCost, ...] = ()
    """The modules where their layers are not compiled, as with zero_bubble; empty: they cost the same."""
    gathered: tuple[ModuleCost, ...] = ()
    """The modules as sharded kinds compute them, with weights in half precision; empty: they cost the same."""
    gathered_eager: tuple[ModuleCost, ...] = ()
    """The same where layers are not compiled."""
    gathered_itemsize: int | None = None
    """Bytes of a gathered number with sharded kinds; None: as stored."""
    is_measured: bool = False
    """Whether the times of layers were measured (`cornstarch profile`)."""
    parts: tuple[RunCost, ...] = ()
    """On each kind of device of a cluster that has several."""
    straggler: tuple[tuple[int, float], ...] = ()
    """By number of replicas, ascending: the work of the slowest over the mean (`DataStatistics.straggler`)."""
    expert_imbalance: float = 1.0
    """With ep, the tokens of the busiest rank's experts over those of the mean: 1 / `expert_balance` of a run. It is
    assumed that they are equal."""

    def __post_init__(self) -> None:
        ordered = sorted(self.modules, key=lambda module: module.name == LANGUAGE_MODEL)  # stable, as in a Plan
        object.__setattr__(self, "modules", tuple(ordered))
        object.__setattr__(self, "straggler", tuple((count, factor) for count, factor in self.straggler))
        if not self.modules:
            raise ConfigError("There is no module to plan for.")
        if self.samples < 1 or self.batch < 1:
            raise ConfigError(f"samples = {self.samples}, batch = {self.batch}: expected at least 1.")
        if not 1 <= self.expert_imbalance < float("inf"):
            raise ConfigError(f"expert_imbalance = {self.expert_imbalance}: expected at least 1.")
        last = self.modules[-1].name
        for module in self.modules[:-1]:
            if module.feeds not in ((), (last,)):
                raise ConfigError(f"{module.name} feeds {', '.join(module.feeds)}; expected {last}, where all meet.")

    def module(self, name: str, compiled: bool = True, gathered: bool = False) -> ModuleCost:
        """Return a module as it is computed: with compiled layers or not, with weights that were gathered or not."""
        plain, halves = self.modules if compiled or not self.eager else self.eager, self.gathered
        halves = halves if compiled or not self.gathered_eager else self.gathered_eager
        modules = halves if gathered and halves else plain
        return next(module for module in modules if module.name == name)

    @property
    def encoders(self) -> tuple[ModuleCost, ...]:
        return self.modules[:-1]

    def straggler_factor(self, replicas: int) -> float:
        """Return the work of the slowest of this many replicas over the mean; 1: all are equal."""
        return interpolate(self.straggler, replicas)

    def has_trained_input(self, name: str) -> bool:
        """Return whether anything is trained before a module."""
        return name == self.modules[-1].name and any(module.trained for module in self.encoders)


@dataclass(frozen=True)
class ModuleSharding:
    """How the layers of a module are computed: everything that their costs depend on."""

    module: str
    tp: int
    cp: int
    samples: float
    """Of a microbatch, in multiples of the microbatch that the costs are of."""
    links: GroupLinks
    checkpointing: bool = False
    sequence: bool = False
    vocabulary: bool = False
    gathered_over: int = 1
    """zero2, zero3: ranks that parameters are gathered from."""
    gathered_again: bool = True
    """zero3: gather for the backward pass, too."""
    compiled: bool = True
    """Whether the layers are compiled, if the run compiles any."""
    gathered: bool = False
    """Whether the weights are gathered by a sharded kind, which computes in half precision."""
    ep: int = 1
    """Ranks that experts are shared out over."""


def scale_layer(layer: LayerCost, sharding: ModuleSharding, device: Device | None = None) -> LayerCost:
    """Return the cost of a layer on one rank: times over tp × cp, parameters over tp, tokens over cp."""
    cp, samples = sharding.cp, sharding.samples
    is_sharded = layer.tp_cuts == "always" or (layer.tp_cuts == "vocabulary" and sharding.vocabulary)
    over = sharding.tp if is_sharded else 1
    # No pass is faster than the device reads the layer's weights, so very small microbatches gain nothing.
    bandwidth = getattr(device, "bandwidth", None)
    least = layer.parameter_bytes / over / bandwidth if bandwidth else 0.0
    # Whole items cannot be divided: the rank with the most of them counts.
    tokens = ceil(layer.items * samples / cp) / layer.items if layer.items and cp > 1 else samples / cp
    whole = layer.activation_bytes if not is_sharded else 0 if sharding.sequence else layer.whole_bytes
    alike = layer.whole_parameters + (0 if sharding.vocabulary else layer.table_parameters)
    parameters = alike - (alike - layer.parameters) // over
    itemsize = layer.parameter_bytes / layer.parameters if layer.parameters else 0.0

    def scale_time(name: str, seconds: float) -> float:
        # All experts are read, however few tokens there are.
        fixed = min(seconds, layer.experts.get_weight_time(name)) if layer.experts is not None else 0.0
        return max(((seconds - fixed) * tokens + fixed) / over, least) if seconds else 0.0

    def scale_activations(size: int) -> int:
        left = min(whole, size)
        return round((left + (size - left) / over) * tokens)

    return replace(
        layer,
        forward=scale_time("forward", layer.forward),
        input_gradient=scale_time("input_gradient", layer.input_gradient),
        weight_gradient=scale_time("weight_gradient", layer.weight_gradient),
        again=None if layer.again is None else scale_time("forward", layer.again),
        parameters=parameters,
        parameter_bytes=ceil(itemsize * parameters),
        whole_parameters=0,
        table_parameters=0,
        trained_parameters=None if layer.trained_parameters is None else -(-layer.trained_parameters // over),
        activation_bytes=scale_activations(layer.activation_bytes),
        activation_bytes_recomputed=scale_activations(layer.activation_bytes_recomputed),
        output_bytes=round(layer.output_bytes * tokens),
        sum_bytes=None if layer.sum_bytes is None else round(layer.sum_bytes * tokens),
        working_bytes=round(layer.working_bytes * tokens / over),
        kv_bytes=round(layer.kv_bytes * samples / over),
        shared_bytes=-(-layer.shared_bytes // over),
        whole_bytes=0,
        sums=layer.sums if is_sharded else 0,
        experts=None if layer.experts is None else layer.experts.scale(tokens, over),
    )


@dataclass(frozen=True, eq=False)
class RankCost:
    """A module's costs by layer, for one microbatch on one rank. Times include the communication inside a layer."""

    layers: tuple[LayerCost, ...]
    """Scaled to the rank."""
    forward: Numbers
    inputs: Numbers
    """Gradients of inputs, and recomputation."""
    weights: Numbers
    tensor: Numbers
    """The communication of tp in all passes."""
    context: Numbers
    """The communication of cp in all passes."""
    exchange: Numbers
    """The communication of ep in all passes."""
    gather: Numbers
    """Gathering parameters, as far as computation does not hide it."""
    again: Numbers
    """Recomputation, without its communication."""
    kept: Numbers
    """Bytes saved for the backward pass; 0 where there is none."""
    working: Numbers
    """Bytes in use while one layer computes, beside the saved ones."""
    gradients: Numbers
    """Bytes of the gradients of its weights."""
    shared: Numbers
    """Bytes of gradients for weights tied to an earlier layer."""

    @cached_property
    def total(self) -> Numbers:
        return self.forward + self.inputs + self.weights

    @cached_property
    def sums(self) -> tuple[float, float, float]:
        """Forward, gradients of inputs and gradients of weights, of all layers."""
        return float(self.forward.sum()), float(self.inputs.sum()), float(self.weights.sum())

    @cached_property
    def slowest(self) -> float:
        """The seconds of the slowest layer."""
        return float(self.total.max())

    @cached_property
    def all_kept(self) -> float:
        return float(self.kept.sum())

    @cached_property
    def cut(self) -> Callable[[int, int, float], tuple[int, ...]]:
        """`best_parts` of these layers, by stages, virtual stages and time before; cached."""
        return lru_cache(maxsize=None)(partial(best_parts, self.total))


@dataclass(frozen=True)
class CommunicationPace:
    """What communication costs a device beside the time of its links."""

    slowdown: float
    """How much more time passes take while parameters or gradients move."""
    bandwidth: float | None
    """Bytes per second of copies; None: they cost nothing."""

    @classmethod
    def of(cls, device: Device) -> CommunicationPace:
        # On a CPU messages are copies: the link's bandwidth has them.
        bandwidth = None if getattr(device, "is_cpu", True) else device.bandwidth
        return cls(getattr(device, "slowdown", 0.0), bandwidth and bandwidth * COPIES_REACH)

    def copy(self, size: float) -> float:
        """Return the seconds of reading and writing `size` bytes: FSDP copies between parameters and its buffers."""
        return size / self.bandwidth if self.bandwidth else 0.0


def compute_rank_cost(cost: RunCost, sharding: ModuleSharding, device: Device) -> RankCost:
    upstream = cost.has_trained_input(sharding.module)
    rows: list[tuple[float, ...]] = []
    layers: list[LayerCost] = []
    known: dict[tuple[object, ...], tuple[LayerCost, tuple[float, ...]]] = {}
    pace = CommunicationPace.of(device)
    # Layers of a stack mostly differ only in their names. Experts that are shared out are not compiled.
    eager = cost.module(sharding.module, compiled=False, gathered=sharding.gathered).layers
    own = cost.module(sharding.module, sharding.compiled, sharding.gathered).layers
    for layer, plain in zip(own, eager, strict=True):
        key = (upstream, plain.experts, *[value for name, value in vars(layer).items() if name != "name"])
        if key not in known:
            one = scale_layer(share_out(layer, sharding.ep, cost.expert_imbalance, plain.experts), sharding, device)
            known[key] = one, _compute_row(one, sharding, upstream, cost.gathered_itemsize, pace)
        one, row = known[key]
        layers.append(one)
        rows.append(row)
        upstream = upstream or layer.trained
    return RankCost(tuple(layers), *np.array(rows, dtype=np.float64).T)


def count_gathered_bytes(one: LayerCost | ExpertCost, itemsize: int | None) -> int:
    """Return the bytes of a layer's parameters as sharded kinds gather them; itemsize: None: as they are stored."""
    return one.parameter_bytes if itemsize is None else min(one.parameter_bytes, itemsize * one.parameters)


def _compute_row(
    one: LayerCost, sharding: ModuleSharding, upstream: bool, itemsize: int | None, pace: CommunicationPace
) -> tuple[float, ...]:
    """Return the numbers of a layer, in the order of `RankCost`; upstream: whether anything before it is trained.

    `itemsize`: bytes of a number as it is gathered; None: as stored.
    """
    has_backward = upstream or one.trained
    links = sharding.links
    summed = one.output_bytes if one.sum_bytes is None else one.sum_bytes
    tensor = one.sums * all_reduce(summed, sharding.tp, links.tp) if sharding.tp > 1 else 0.0
    exchange = exchange_back = 0.0
    own = one.experts if sharding.ep > 1 else None
    if own is not None:
        assert links.experts is not None
        exchange, exchange_back, copied = compute_exchange(own, sharding.ep, links.experts)
        exchange, exchange_back = exchange + pace.copy(copied), exchange_back + pace.copy(copied)
        if sharding.tp > 1 and one.sums:  # the partial sums of experts are added up before the tokens return
            sent = all_reduce(own.sent_bytes / own.modules, sharding.tp, links.tp)
            tensor += own.modules * (sent - all_reduce(summed, sharding.tp, links.tp))
    context = all_gather(one.kv_bytes, sharding.cp, links.cp) if sharding.cp > 1 else 0.0
    # A layer whose activations are all saved anyway, such as a head, is not recomputed.
    saves_all = one.activation_bytes_recomputed >= one.activation_bytes
    recomputed = sharding.checkpointing and has_backward and not saves_all
    again = (one.forward if one.again is None else one.again) if recomputed else 0.0
    communication = tensor + context + exchange
    forward = one.forward + communication
    inputs = again + (communication if recomputed else 0.0)
    inputs += one.input_gradient + tensor if upstream else 0.0
    inputs += 2 * context + exchange_back if has_backward else 0.0
    weights = one.weight_gradient if one.trained else 0.0
    gather = 0.0
    if sharding.gathered_over > 1:
        gathered = count_gathered_bytes(one, itemsize)
        whole = _gather_layer(one, gathered, sharding, itemsize)
        hidden = (forward, inputs + weights) if links.overlaps else (0.0, 0.0)
        late, later = (
            max(0.0, whole - one) + pace.slowdown * min(whole, one) + pace.copy(2 * gathered) for one in hidden
        )
        later = later if has_backward and sharding.gathered_again else 0.0
        later += pace.copy(gathered + one.gradient_bytes) if one.num_trainable else 0.0
        forward, inputs, gather = forward + late, inputs + later, late + later
    times = 1 + recomputed
    tensor *= times + upstream
    context *= times + 2 * has_backward
    exchange = exchange * times + exchange_back * has_backward
    kept = one.activation_bytes_recomputed if sharding.checkpointing else one.activation_bytes
    kept = kept if has_backward else 0
    working = one.activation_bytes - kept + one.working_bytes
    memory = (kept, working, one.gradient_bytes, one.shared_bytes)
    return forward, inputs, weights, tensor, context, exchange, gather, again, *memory


def _gather_layer(one: LayerCost, gathered: int, sharding: ModuleSharding, itemsize: int | None) -> float:
    """Return the seconds of gathering a layer's parameters; those of shared experts from fewer ranks."""
    links, ranks = sharding.links, sharding.gathered_over
    if one.experts is None or sharding.ep == 1:
        return all_gather(gathered, ranks, links.data)
    experts = count_gathered_bytes(one.experts, itemsize)
    own = all_gather(experts, ranks // sharding.ep, links.expert_data or links.data)
    return all_gather(gathered - experts, ranks, links.data) + own
