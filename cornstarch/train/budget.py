"""Which layers compute their activations again, so that what a step keeps for its backward pass fits a size.

What each layer keeps is found on the meta device, before anything is computed, for the largest portion that the run's
description allows: every row as long as `data.max_length`. Layers that free most for the work of computing them again
come first; layers that are alike are taken evenly spread, and the last one of them last: it is computed again while all
the others still keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.compute.recomputing import recompute_layer
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.preprocessing.shape_inference import copied_with
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.train.activations import LayerCall, counted, keep_as_fused_loss
from cornstarch.train.compiled_layers import compiled_bytes
from cornstarch.train.config import RunConfig, size_of_bytes
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.sample import SampleError
from cornstarch.train.layers_kept import LayerActivations
from cornstarch.train.on_meta import calls_of, is_frozen_encoder
from cornstarch.train.precision import Placement
from cornstarch.train.speed import compiles

_LOOKED_AT = 64  # samples of the training data, for how many items they have


@dataclass(frozen=True)
class Recomputation:
    """Which layers are computed again, and what that changes."""

    recomputed: tuple[str, ...]
    """Their names."""
    layers: int
    """How many there are that keep something."""
    before: int
    """Bytes of activations without it."""
    after: int
    """Bytes of activations with it."""
    budget: int

    def line(self) -> str:
        """Return it in words."""
        if not self.recomputed:
            return (
                f"no layer is recomputed: {size_of_bytes(self.before)} of activations fit {size_of_bytes(self.budget)}"
            )
        return (
            f"{len(self.recomputed)} of {self.layers} layers are recomputed: {size_of_bytes(self.before)} -> "
            f"{size_of_bytes(self.after)} of activations"
        )

    def told(self) -> dict[str, Any]:
        """Return what `run.json` says of it."""
        return {**asdict(self), "line": self.line()}


def fit_activations(
    model: nn.Module,
    config: RunConfig,
    placement: Placement,
    train: SampleSource,
    replicas: int,
    note: Callable[[str], None],
) -> Recomputation | None:
    """Let as few layers of a model compute their activations again as its run's budget needs; None: there is none.

    Args:
        model: What is trained: whole, in the precision in which it is kept, with what is frozen frozen.
        config: The run.
        placement: Where it computes, and in what.
        train: The training data, for how many items a sample has.
        replicas: Among how many the samples of a step are dealt out.
        note: Tells the user something.
    """
    budget = config.loop.activation_bytes
    if budget is None:
        return None
    rows = -(-config.loop.batch_size // (config.loop.accumulation * replicas))
    casts = config.parallel.plan().data.param_dtype != placement.precision
    shapes = Shapes(rows, config.data.max_length, items_of(model, train))
    try:
        found = layer_activations(model, shapes, placement, casts, compiles(config.compile, placement.device))
    except Exception as error:  # a model's own code, where it looks at numbers that are not there
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160].rstrip(".")
        raise ConfigError(
            f"loop.activation_budget = {config.loop.activation_budget}\n  What the layers of "
            f"{type(unwrap(model)).__name__} keep could not be found out: {reason}.\n  Use "
            "loop.activation_checkpointing=true instead."
        ) from error
    try:
        again = choose(found, budget)
    except ConfigError as error:
        raise ConfigError(f"loop.activation_budget = {config.loop.activation_budget}\n  {error}") from error
    names = tuple(found.names[layer] for layer in sorted(again))
    for name in names:
        recompute_layer(model.get_submodule(name))
    made = Recomputation(names, len(found.keeping()), found.most(), found.most(again), budget)
    note(made.line())
    return made


# ---------------------------------------------------------------------------------------------------- choosing


def choose(found: LayerActivations, budget: int) -> frozenset[int]:
    """Return the layers that are computed again: as few as fit, those first that free most for their work."""
    alike: dict[str, list[int]] = {}
    for layer, kind in enumerate(found.kinds):
        alike.setdefault(kind, []).append(layer)
    gains = {kind: found.gain(layers[0]) for kind, layers in alike.items()}
    worth = {kind: gains[kind] / max(found.work[layers[0]], 1.0) for kind, layers in alike.items()}
    kinds = sorted((kind for kind in alike if gains[kind] > 0), key=lambda kind: -worth[kind])
    counts = dict.fromkeys(kinds, 0)

    def taken() -> frozenset[int]:
        return frozenset(layer for kind in kinds for layer in spread(alike[kind], counts[kind]))

    def fits() -> bool:
        return found.kept(taken()) <= budget and found.most(taken()) <= budget

    for kind in kinds:
        while not fits() and counts[kind] < len(alike[kind]):
            counts[kind] += 1
    if not fits():
        smallest = min(found.most(taken()), found.most())
        raise ConfigError(
            f"The smallest possible is {size_of_bytes(smallest)}, with {len(taken())} of "
            f"{len(found.keeping())} layers computed again.\n  A larger loop.accumulation or a smaller "
            "data.max_length takes less."
        )
    for kind in kinds:  # what a later kind has made superfluous
        while counts[kind]:
            counts[kind] -= 1
            if not fits():
                counts[kind] += 1
                break
    return taken()


def spread(layers: Sequence[int], count: int) -> list[int]:
    """Return so many of the layers, evenly spread, the last one only if it is all of them."""
    return [layers[number * len(layers) // count] for number in range(count)]


# ---------------------------------------------------------------------------------------------------- what is kept


@dataclass(frozen=True)
class Shapes:
    """How large a portion is."""

    rows: int
    tokens: int
    """Of each row."""
    items: int = 1
    """Of each row, for every encoder."""


def layer_activations(
    model: nn.Module, shapes: Shapes, placement: Placement, casts_weights: bool = True, is_compiled: bool = False
) -> LayerActivations:
    """Return what the layers of a model keep, found on a copy of it without weights.

    Args:
        model: The model, on any device.
        shapes: Of a portion.
        placement: Where it computes, and in what.
        casts_weights: Whether autocast makes copies of the weights.
        is_compiled: Whether layers are compiled: then one of each kind is run to see what of it is kept.
    """
    bare = without_weights(model)
    names = {module: name for name, module in bare.named_modules()}
    for part in [bare.language_model] if isinstance(bare, MultimodalModel) else [bare]:
        keep_as_fused_loss(unwrap(part), placement.dtype)

    def of_part(part: nn.Module, call: Callable[[], Any]) -> LayerActivations:
        count = counted(part, call, placement.dtype, placement.device.type != "cpu", casts_weights)
        found = count.by_layer(names)
        return found.scaled(_compiled_shares(found, count.calls, placement)) if is_compiled else found

    total = LayerActivations((), (), (), ())
    for _, part, call in calls_of(bare, shapes.rows, shapes.tokens, shapes.items):
        if is_frozen_encoder(part):
            with suppress(Exception):  # its projector alone keeps something; how large images are may be unknown
                total += of_part(part, call)
        else:
            total += of_part(part, call)
    return total


def _compiled_shares(found: LayerActivations, calls: Sequence[LayerCall], placement: Placement) -> dict[int, float]:
    """Return, by layer, which share of what it saves is left when it is compiled."""
    by_kind: dict[str, float] = {}
    for layer, kind in enumerate(found.kinds):
        if kind not in by_kind:
            own, by_kind[kind] = found.own(layer), 1.0
            with suppress(Exception):  # a layer that cannot be run alone: plainly it keeps more, never less
                by_kind[kind] = min(compiled_bytes(calls[layer], placement) / own, 1.0) if own else 1.0
    return {layer: by_kind[kind] for layer, kind in enumerate(found.kinds)}


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; of its weights nothing is copied."""

    def instead(tensor: Tensor) -> Tensor:
        bare = torch.empty_like(tensor.detach(), device="meta")
        return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare

    return copied_with(model, instead)


def items_of(model: nn.Module, train: SampleSource) -> int:
    """Return how many items of one kind the first samples of the training data have at most."""
    if not isinstance(model, MultimodalModel) or not model.encoders:
        return 1
    return max((max(counts, default=1) for counts in _item_counts(train)), default=1)


def _item_counts(train: SampleSource) -> Iterator[list[int]]:
    for number in range(min(len(train), _LOOKED_AT)):
        with suppress(SampleError):
            kinds = [media.kind for media in train[number].media]
            yield [kinds.count(kind) for kind in set(kinds)]


__all__ = ["Recomputation", "Shapes", "choose", "fit_activations", "layer_activations", "without_weights"]
