"""Activation checkpointing: compute activations again in the backward pass instead of keeping them.

`recompute_planned` does so for the modules that a plan names. `fit_activations` chooses the layers, so that a step's
activations fit a number of bytes (`loop.activation_budget`). The bytes that each layer saves are traced on the meta
device for the largest microbatch that the config allows: every row has `data.max_length` tokens. Layers that free the
most bytes per recomputed FLOP come first. Of equal layers, the chosen ones are at even distances and the last one comes
last: it is recomputed while all others still keep theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cornstarch.attention.interface import build_checkpoint_contexts
from cornstarch.config import RunConfig, format_size
from cornstarch.cost.activations import LayerActivations, measure_compiled_bytes
from cornstarch.cost.meta_kernels import use_fused_loss
from cornstarch.cost.tracer import trace_memory
from cornstarch.data.formats import DataSource
from cornstarch.data.sample import SampleError
from cornstarch.engine.acceleration import compiles
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile import checkpoint_layer
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.hugging_face import checkpoint_activations
from cornstarch.models.multimodal_language_model.shape_inference import copy_with_tensors
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.device import DevicePlacement
from cornstarch.parallel.passes import iter_planned_modules
from cornstarch.plan.layout import Layout
from cornstarch.tasks.build import build_calls, is_frozen_encoder

_INSPECTED = 64  # samples of the training data whose items are counted


def recompute_planned(model: nn.Module, layout: Layout) -> None:
    """Recompute the activations of the modules for which a plan says so; before they are sharded."""
    for module, plan in iter_planned_modules(model, layout):
        if plan.activation_checkpointing:
            recompute_activations(module.module if isinstance(module, ModalEncoderModule) else module)


def recompute_activations(model: nn.Module) -> None:
    """Recompute all layers: by the model's own means if it has them, else each layer of its lists of layers."""
    plain = unwrap(model)
    options = {"use_reentrant": False, "context_fn": build_checkpoint_contexts}
    if isinstance(model, MultimodalModel):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    elif getattr(plain, "supports_gradient_checkpointing", False):
        checkpoint_activations(plain, options)
    elif layers := list(_iter_layers(model)):
        for layer in layers:
            checkpoint_layer(layer)
    else:
        raise ConfigError(
            f"activation_checkpointing: {type(plain).__name__} has no list of layers (nn.Sequential or "
            "nn.ModuleList) whose activations could be computed again."
        )


def _iter_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of the outermost lists."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        yield from module
    else:
        for child in module.children():
            yield from _iter_layers(child)


@dataclass(frozen=True)
class Recomputation:
    """The names of the recomputed layers, and the bytes of activations without and with recomputation."""

    recomputed: tuple[str, ...]
    layers: int
    """The number of layers that save something."""
    before: int
    after: int
    budget: int

    def line(self) -> str:
        if not self.recomputed:
            return f"no layer is recomputed: {format_size(self.before)} of activations fit {format_size(self.budget)}"
        return (
            f"{len(self.recomputed)} of {self.layers} layers are recomputed: {format_size(self.before)} -> "
            f"{format_size(self.after)} of activations"
        )


def fit_activations(
    model: nn.Module,
    config: RunConfig,
    placement: DevicePlacement,
    train: DataSource,
    replicas: int,
    log: Callable[[str], None],
) -> Recomputation | None:
    """Recompute as few layers of a whole model as `loop.activation_budget` requires; None without a budget in bytes."""
    budget = config.loop.activation_bytes
    if budget is None:
        return None
    rows = -(-config.rows_per_step // (config.loop.microbatches * replicas))
    casts = config.parallel.data.param_dtype != placement.precision
    items = 1  # the most of one kind in a sample of the training data
    if isinstance(model, MultimodalModel) and model.encoders:
        for number in range(min(len(train), _INSPECTED)):
            with suppress(SampleError):
                items = max([items, *Counter(media.kind for media in train[number].media).values()])
    shape = rows, config.data.max_length, items
    try:
        found = trace_layers(model, shape, placement, casts, compiles(config.compile, placement.device))
    except Exception as error:  # model code that needs values, which meta tensors do not have
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160].rstrip(".")
        raise ConfigError(
            f"loop.activation_budget = {config.loop.activation_budget}\n  The activations of the layers of "
            f"{type(unwrap(model)).__name__} cannot be computed: {reason}.\n  Use "
            "loop.activation_checkpointing=true instead."
        ) from error
    try:
        again = choose_layers(found, budget)
    except ConfigError as error:
        raise ConfigError(f"loop.activation_budget = {config.loop.activation_budget}\n  {error}") from error
    names = tuple(found.names[layer] for layer in sorted(again))
    for name in names:
        checkpoint_layer(model.get_submodule(name))
    decision = Recomputation(names, len(found.recomputable_layers()), found.peak(), found.peak(again), budget)
    log(decision.line())
    return decision


def choose_layers(found: LayerActivations, budget: int) -> frozenset[int]:
    """Return the fewest layers whose recomputation fits the budget, those first that free the most bytes per FLOP."""
    alike: dict[str, list[int]] = {}
    for layer, kind in enumerate(found.kinds):
        alike.setdefault(kind, []).append(layer)
    gains = {kind: found.gain(layers[0]) for kind, layers in alike.items()}
    worth = {kind: gains[kind] / max(found.work[layers[0]], 1.0) for kind, layers in alike.items()}
    kinds = sorted((kind for kind in alike if gains[kind] > 0), key=lambda kind: -worth[kind])
    counts = dict.fromkeys(kinds, 0)

    def list_chosen() -> frozenset[int]:
        return frozenset(layer for kind in kinds for layer in pick_evenly(alike[kind], counts[kind]))

    def fits() -> bool:
        chosen = list_chosen()
        # The peak is never below this, and slower to compute.
        return found.bytes_after_forward(chosen) <= budget and found.peak(chosen) <= budget

    for kind in kinds:
        while not fits() and counts[kind] < len(alike[kind]):
            counts[kind] += 1
    if not fits():
        chosen = list_chosen()
        smallest = min(found.peak(chosen), found.peak())
        raise ConfigError(
            f"The smallest possible is {format_size(smallest)}, with {len(chosen)} of "
            f"{len(found.recomputable_layers())} layers recomputed.\n  A larger "
            "loop.gradient_accumulation_steps or a smaller data.max_length takes less."
        )
    for kind in kinds:  # a later kind may have made some of an earlier one superfluous
        while counts[kind]:
            counts[kind] -= 1
            if not fits():
                counts[kind] += 1
                break
    return list_chosen()


def pick_evenly(layers: Sequence[int], count: int) -> list[int]:
    """Return `count` of the layers at even distances; the last one only if all are returned."""
    return [layers[number * len(layers) // count] for number in range(count)]


def trace_layers(
    model: nn.Module,
    shape: tuple[int, int, int],
    placement: DevicePlacement,
    casts_weights: bool = True,
    is_compiled: bool = False,
) -> LayerActivations:
    """Return the activations of the layers of a model, traced on a copy without weights.

    `shape` of a microbatch: rows, tokens of each row, items of each row for every encoder.
    """
    bare = copy_to_meta(model)
    names = {module: name for name, module in bare.named_modules()}
    use_fused_loss(unwrap(bare.language_model if isinstance(bare, MultimodalModel) else bare), placement.dtype)

    total = LayerActivations((), (), (), ())
    for _, part, call in build_calls(bare, *shape):
        # Of a frozen encoder only the projector saves something, and the size of images may be unknown.
        with suppress(*([Exception] if is_frozen_encoder(part) else [])):
            saved = trace_memory(part, call, placement.dtype, placement.device.type != "cpu", casts_weights).saved
            found = saved.by_layer(names)
            by_kind: dict[str, float] = {}  # the fraction of its bytes that a layer saves if it is compiled
            for layer, kind in enumerate(found.kinds if is_compiled else ()):
                if kind not in by_kind:  # one layer of each kind is compiled and run
                    own, by_kind[kind] = found.own_bytes(layer), 1.0
                    with suppress(Exception):  # a layer that cannot run alone: not compiled, it saves more, never less
                        compiled = measure_compiled_bytes(saved.calls[layer], placement) if own else 0
                        by_kind[kind] = min(compiled / max(own, 1), 1.0)
            total += found.scale({layer: by_kind.get(kind, 1.0) for layer, kind in enumerate(found.kinds)})
    return total


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; no weights are copied."""

    def build(tensor: Tensor) -> Tensor:
        bare = torch.empty_like(tensor.detach(), device="meta")
        return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare

    return copy_with_tensors(model, build)
