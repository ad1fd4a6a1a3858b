"""The one FLOP counter: what a step multiplies, part by part, as the model needs it and not as a kernel does it.

    counter = FlopCounter(model)
    counter.step(batch).total

What is counted: two operations for each multiplication of matrices, convolutions and attention. Of what is frozen the
forward pass alone, unless something before it is trained: then the gradients of its inputs, too. Of what is trained
also the gradients of weights; the first trained layers need none of their inputs. Attention counts the pairs that its
mask shows. The head counts for tokens that are trained on: the loss needs no others. Lookups, norms, activations and
the optimizer count nothing. Padding, the head for other tokens, experts that were not chosen and what activation
checkpointing computes again are no work of the model: they are told apart.

Each part is run on shapes once (`tracing`); a step is then a matter of multiplying by its tokens, items and pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention.mask import CAUSAL, MaskSpec
from cornstarch.compute.pairs import EVERYTHING
from cornstarch.compute.scaling import HEAD, PROJECTOR, EncoderWork, ItemWork, PartFlops, RowWork, on_cpu
from cornstarch.compute.shadows import shadow
from cornstarch.compute.tracing import Trace, trace
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.items import Features
from cornstarch.models.multimodal_language_model.merge import IGNORED, TEXT, mark_spans, mask_spec, placeholder_masks
from cornstarch.models.multimodal_language_model.preprocessing.shape_inference import Shape, is_float
from cornstarch.models.multimodal_language_model.unwrap import accepts, unwrap
from cornstarch.trees import tensors_in

Loss = Callable[[nn.Module, Mapping[str, Any]], Any]
"""(model, batch) -> the loss, or an output that has one."""


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of a step."""

    parts: Mapping[str, PartFlops] = field(default_factory=dict)
    """By name: `vision encoder`, `vision projector`, `language model`; `model`."""

    @cached_property
    def all(self) -> PartFlops:
        """All parts together."""
        return sum(self.parts.values(), PartFlops())

    @property
    def total(self) -> float:
        """What the model needs: what MFU is made of."""
        return self.all.total

    @property
    def attention(self) -> float:
        """How much of the total is attention."""
        return self.all.attention

    @property
    def recomputed(self) -> float:
        """What is computed again in the backward pass; not in the total."""
        return self.all.recomputed

    @property
    def untrained_head(self) -> float:
        """The head for tokens that are not trained on; not in the total."""
        return self.all.untrained_head

    @property
    def hardware(self) -> float:
        """What is computed by a program that leaves nothing out."""
        return self.all.hardware

    def __add__(self, other: StepFlops) -> StepFlops:
        names = {**self.parts, **other.parts}
        none = PartFlops()
        return StepFlops({name: self.parts.get(name, none) + other.parts.get(name, none) for name in names})


def flops_of_step(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None = None) -> StepFlops:
    """Return what one step multiplies; for more than one step keep a `FlopCounter`."""
    return FlopCounter(model, loss).step(batch)


class FlopCounter:
    """Counts what steps of a model multiply.

    It keeps a copy of the model without weights: later changes of the model are not seen, be it cut, compiled or
    frozen. Make it of the whole model, once what is trained is set. The model may be on the meta device.

    Args:
        model: The model.
        loss: How a model that is no `MultimodalModel` is run; default: `model(**batch)`.
    """

    def __init__(self, model: nn.Module, loss: Loss | None = None) -> None:
        self._parts: _Multimodal | _Whole
        self._parts = _Multimodal(model) if isinstance(model, MultimodalModel) else _Whole(model, loss or _called)

    def step(self, batch: Mapping[str, Any]) -> StepFlops:
        """Return what forward and backward of a batch multiply.

        A part that cannot be run on shapes raises UnsupportedModelError.
        """
        return StepFlops(self._parts.step(batch))


def _called(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    return model(**batch)


# ---------------------------------------------------------------------------------------------------- whole models


class _Multimodal:
    """Encoders, projectors and a language model."""

    def __init__(self, model: MultimodalModel) -> None:
        self._encoders = {name: EncoderWork(encoder) for name, encoder in model.encoders.items()}
        self._attention = {name: encoder.attention for name, encoder in model.encoders.items()}
        self._model = model  # may be told its tokens after this
        self._language_model = shadow(model.language_model)
        self._by_upstream: dict[bool, RowWork] = {}

    def step(self, batch: Mapping[str, Any]) -> dict[str, PartFlops]:
        parts: dict[str, PartFlops] = {}
        lengths: dict[str, list[int]] = {}
        is_trained = False
        for name, encoder in self._encoders.items():
            inputs = encoder.inputs(name, batch)
            if inputs is None:
                continue
            units = encoder.units(inputs)
            parts[f"{name} encoder"] = sum((unit.part("") for unit in units), PartFlops())
            parts[f"{name} projector"] = sum((unit.part(PROJECTOR) for unit in units), PartFlops())
            lengths[name] = [length for unit in units for length in unit.lengths]
            is_trained = is_trained or any(unit.needs_gradient for unit in units)
        spec = self._spec(batch, lengths)
        parts["language model"] = self._rows(is_trained).part(spec, self._trained(batch, spec))
        return parts

    def _spec(self, batch: Mapping[str, Any], lengths: Mapping[str, list[int]]) -> MaskSpec:
        ids = on_cpu(batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"][..., 0])
        mask, documents = (on_cpu(batch.get(name)) for name in ("attention_mask", "documents"))
        spans, first = torch.full(ids.shape, TEXT), 0
        places = placeholder_masks(ids, self._model.modality_token_ids)
        for name, counts in lengths.items():
            # A batch whose placeholders do not fit is refused by the model, which says what is wrong.
            if name in places and int(places[name].sum()) == sum(counts):
                features = Features(torch.empty(sum(counts), 0), counts)
                first = mark_spans(spans, name, self._attention[name], places[name], features, first)
        return mask_spec(ids, mask, documents, spans)

    def _trained(self, batch: Mapping[str, Any], spec: MaskSpec) -> int | None:
        """Return how many tokens are trained on; None if nothing says it."""
        labels, ids = on_cpu(batch.get("labels")), on_cpu(batch.get("input_ids"))
        if labels is None or labels.shape != spec.documents.shape:
            return None
        is_trained = (labels != IGNORED) & (spec.documents > 0)
        if ids is not None and not self._model.trains_on_placeholders:
            for mask in placeholder_masks(ids, self._model.modality_token_ids).values():
                is_trained &= ~mask
        # The first token of a text is predicted from nothing.
        return int((is_trained[:, 1:] & (spec.documents[:, 1:] == spec.documents[:, :-1])).sum())

    def _rows(self, upstream: bool) -> RowWork:
        if upstream not in self._by_upstream:
            self._by_upstream[upstream] = RowWork(lambda tokens: self._traced(tokens, upstream), CAUSAL)
        return self._by_upstream[upstream]

    def _traced(self, tokens: int, upstream: bool) -> Trace:
        model: Any = self._language_model
        ids = torch.zeros(1, tokens, dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": ids}
        if self._encoders:
            table = model.get_input_embeddings().weight
            embedded = Shape.of((1, tokens, table.shape[1]), table.dtype)
            inputs = {"inputs_embeds": embedded.requires_grad_(upstream or table.requires_grad)}
        if accepts(model, "use_cache"):
            inputs["use_cache"] = False
        inputs["attention_mask"] = torch.ones_like(ids)
        head = model.get_output_embeddings()
        return trace(model, lambda: model(**inputs), lambda output: output[0], {} if head is None else {HEAD: head})


class _Whole:
    """One model, of whatever kind."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._loss, self._model = loss, shadow(model)
        self._has_decoder = bool(getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", False))
        self._rows: dict[tuple[Any, ...], RowWork] = {}
        self._items = ItemWork(self._traced)

    def step(self, batch: Mapping[str, Any]) -> dict[str, PartFlops]:
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or self._has_decoder or any(map(is_float, tensors_in(batch))):
            units = self._items.units(dict(batch))
            return {"model": sum((unit.part("") for unit in units), PartFlops())}
        rows, tokens = ids.shape
        forms = {name: value.shape for name, value in batch.items() if isinstance(value, Tensor)}
        kinds = {name: tuple(_letter(size, rows, tokens) for size in form) for name, form in forms.items()}
        key = tuple(kinds.items())
        if key not in self._rows:
            self._rows[key] = RowWork(lambda length: self._traced(_of_length(batch, kinds, length)), EVERYTHING)
        mask = on_cpu(batch.get("attention_mask"))
        return {"model": self._rows[key].part(mask_spec(on_cpu(ids), mask, None, None))}

    def _traced(self, inputs: Mapping[str, Any]) -> Trace:
        return trace(self._model, lambda: self._loss(self._model, inputs), _loss_in, {})


def _letter(size: int, rows: int, tokens: int) -> str | int:
    """Return what a size stands for; one of tokens is looked for first, because a row is cut to another length."""
    return "S" if size == tokens else "B" if size == rows else size


def _of_length(batch: Mapping[str, Any], kinds: Mapping[str, tuple[Any, ...]], length: int) -> dict[str, Any]:
    """Return a batch of one row of so many tokens."""
    sizes = {"B": 1, "S": length}
    made = dict(batch)
    for name, kind in kinds.items():
        form = [sizes.get(size, size) for size in ("B", *kind[1:])]
        made[name] = torch.full(form, int("mask" in name), dtype=batch[name].dtype)
    return made


def _loss_in(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return output if loss is None else loss


__all__ = ["FlopCounter", "Loss", "PartFlops", "StepFlops", "flops_of_step"]
