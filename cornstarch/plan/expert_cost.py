"""What the experts of a layer cost, and what changes if they are shared out over ranks; arithmetic only, no torch.

With ep ranks, a rank keeps experts / ep of the experts, with their gradients and optimizer states, and computes as many
tokens as before: those that the ranks send each other. It is assumed that routers send every rank equally many; where
they do not, `RunCost.expert_imbalance` says how many the busiest gets. The rest of a layer is compiled as without ep,
the experts are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cornstarch.errors import ConfigError
from cornstarch.plan.communication import Link, all_gather, all_to_all

if TYPE_CHECKING:
    from cornstarch.plan.cost import LayerCost

_COUNT_BYTES = 8  # of the tokens for an expert, as ranks tell each other
_PASSES = ("forward", "input_gradient", "weight_gradient")
_COPIES = 2
"""Copies of all sent rows in a pass: into the order of experts, and back into that of tokens."""
_BUFFERS = 3
"""Rows in memory at once beside those that are kept: sent, received, and one more while they are put in order."""


@dataclass(frozen=True)
class ExpertCost:
    """The part of a layer's cost that belongs to its experts. The figures of the layer include it."""

    parameters: int
    """Of all experts."""
    parameter_bytes: int
    trained_parameters: int
    sent_bytes: int
    """Of a microbatch: tokens × experts of a token × channels. They are sent to the experts, and as many back."""
    experts: int = 1
    """Of all modules together."""
    modules: int = 1
    """Modules of experts: each exchanges tokens."""
    kept_bytes: int = 0
    """Activations inside of experts that are saved for the backward pass."""
    tokens_forward: float = 0.0
    """Seconds that grow with the tokens of the experts; of a microbatch's forward pass, and so on."""
    tokens_input_gradient: float = 0.0
    tokens_weight_gradient: float = 0.0
    weights_forward: float = 0.0
    """Seconds of reading and writing the weights of all experts that products do not hide."""
    weights_input_gradient: float = 0.0
    weights_weight_gradient: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"Experts: {name} = {value}; expected at least 0.")

    def __add__(self, other: ExpertCost) -> ExpertCost:
        return ExpertCost(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def scale_times(self, forward: float, backward: float) -> ExpertCost:
        """Return the same with other times: those of the forward pass by one factor, the others by another."""
        factors = dict(zip(_PASSES, (forward, backward, backward), strict=True))
        times = {
            f"{part}_{name}": getattr(self, f"{part}_{name}") * factor
            for part in ("tokens", "weights")
            for name, factor in factors.items()
        }
        return replace(self, **times)

    def scale(self, tokens: float, over: int) -> ExpertCost:
        """Return the same for another number of tokens, with channels of experts over tp ranks."""
        sizes = ("parameters", "parameter_bytes", "trained_parameters")
        few = {name: -(-getattr(self, name) // over) for name in sizes}
        return replace(self, **few, sent_bytes=round(self.sent_bytes * tokens))

    @property
    def gradient_bytes(self) -> float:
        return self.parameter_bytes * self.trained_parameters / self.parameters if self.trained_parameters else 0.0

    def get_weight_time(self, name: str) -> float:
        """Return the seconds that a pass moves weights, by the name that a layer has for the pass."""
        return float(getattr(self, f"weights_{name}"))


def share_out(layer: LayerCost, ep: int, imbalance: float = 1.0, eager: ExpertCost | None = None) -> LayerCost:
    """Return the cost of a layer on one of `ep` ranks, without what they send each other.

    `imbalance`: the tokens of the busiest rank's experts over those of the mean. `eager`: the experts as they are
    computed in layers that are not compiled. Default: as in this layer.
    """
    if layer.experts is None or ep == 1:
        return layer
    layer = _replace_experts(layer, layer.experts, eager or layer.experts)
    own = layer.experts
    assert own is not None
    few, rest = {}, 1 - 1 / ep
    for name in ("parameters", "parameter_bytes", "trained_parameters"):
        few[name] = -(-getattr(own, name) // ep)
    saved = {name: getattr(own, name) - few[name] for name in few}
    more = imbalance - 1
    times = {
        name: max(0.0, getattr(layer, name) + more * getattr(own, f"tokens_{name}") - rest * own.get_weight_time(name))
        for name in _PASSES
    }
    trained = layer.trained_parameters
    kept = layer.activation_bytes + round(more * own.kept_bytes)
    is_recomputed = layer.activation_bytes_recomputed < layer.activation_bytes
    sent = round(imbalance * own.sent_bytes)
    weights: dict[str, Any] = {f"weights_{name}": own.get_weight_time(name) / ep for name in _PASSES}
    return replace(
        layer,
        **times,
        again=None if layer.again is None else max(0.0, layer.again + times["forward"] - layer.forward),
        parameters=layer.parameters - saved["parameters"],
        parameter_bytes=layer.parameter_bytes - saved["parameter_bytes"],
        trained_parameters=None if trained is None else trained - saved["trained_parameters"],
        activation_bytes=kept,
        activation_bytes_recomputed=layer.activation_bytes_recomputed if is_recomputed else kept,
        working_bytes=layer.working_bytes + _BUFFERS * sent // own.modules,
        experts=replace(own, **few, **weights, sent_bytes=sent),
    )


def _replace_experts(layer: LayerCost, own: ExpertCost, eager: ExpertCost) -> LayerCost:
    """Return a layer whose experts are computed in another way."""
    more = {name: getattr(eager, f"tokens_{name}") - getattr(own, f"tokens_{name}") for name in _PASSES}
    times = {name: max(0.0, getattr(layer, name) + more[name]) for name in _PASSES}
    kept = max(0, layer.activation_bytes + eager.kept_bytes - own.kept_bytes)
    is_recomputed = layer.activation_bytes_recomputed < layer.activation_bytes
    same: dict[str, Any] = {f"weights_{name}": own.get_weight_time(name) for name in _PASSES}
    return replace(
        layer,
        **times,
        again=None if layer.again is None else max(0.0, layer.again + more["forward"]),
        activation_bytes=kept,
        activation_bytes_recomputed=layer.activation_bytes_recomputed if is_recomputed else kept,
        experts=replace(eager, **same),
    )


def compute_exchange(own: ExpertCost, ep: int, link: Link) -> tuple[float, float, int]:
    """Return the seconds in which tokens go to experts and back, of a forward and a backward pass; and copied bytes.

    Before the first of two all-to-alls, ranks tell each other how many tokens they send. Gradients go the same ways.
    The bytes are those that a pass copies beside: rows into the order of experts, and back.
    """
    sizes = all_gather(_COUNT_BYTES * ep * own.experts / own.modules, ep, link)
    both = 2 * all_to_all(own.sent_bytes / own.modules, ep, link)
    return own.modules * (sizes + both), own.modules * both, 2 * _COPIES * own.sent_bytes
