"""The FLOP counter: the FLOPs of a step by part, as the model needs them, whatever the kernels do.

    counter = FlopCounter(model)
    counter.step(batch).total

A multiply-add in a product of matrices, a convolution or attention counts as two FLOPs. Frozen parts count their
forward pass; if something before them is trained, also the gradients of their inputs. Trained parts also count the
gradients of their weights; the first trained layers need no gradients of inputs. Attention counts the pairs that its
mask shows. The head counts for tokens with a label: the loss needs no others. Lookups, norms, activation functions and
the optimizer count nothing. Padding, the head for other tokens, experts that were not chosen and recomputation
(activation checkpointing) are not work of the model and are counted separately.

Each part is traced once (`cornstarch.cost.tracer`) and then scaled to the tokens, items and pairs of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention.mask import CAUSAL, MaskSpec
from cornstarch.cost.meta_kernels import EVERYTHING
from cornstarch.cost.scaling import HEAD, PROJECTOR, EncoderWork, ItemWork, PartFlops, RowWork, on_cpu
from cornstarch.cost.tracer import Trace, trace_flops
from cornstarch.kernels.shape_tracing import copy_as_shapes
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX, EncoderFeatures
from cornstarch.models.multimodal_language_model.merge import TEXT, build_mask_spec, find_placeholders, mark_spans
from cornstarch.models.multimodal_language_model.shape_inference import ShapeTensor, is_float
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument, unwrap
from cornstarch.trees import tensors_in

Loss = Callable[[nn.Module, Mapping[str, Any]], Any]
"""(model, batch) -> the loss, or an output that has one."""


@dataclass(frozen=True)
class StepFlops(PartFlops):
    """FLOPs of a step: the sum of its parts."""

    parts: Mapping[str, PartFlops] = field(default_factory=dict)
    """By name: `vision encoder`, `vision projector`, `language model`; `model`."""

    @classmethod
    def of(cls, parts: Mapping[str, PartFlops]) -> StepFlops:
        return cls(**vars(sum(parts.values(), PartFlops())), parts=parts)

    def __add__(self, other: PartFlops) -> StepFlops:
        assert isinstance(other, StepFlops)
        names, none = {**self.parts, **other.parts}, PartFlops()
        return StepFlops.of({name: self.parts.get(name, none) + other.parts.get(name, none) for name in names})


class FlopCounter:
    """Counts the FLOPs of training steps; `loss` runs a model that is no `MultimodalModel` (default: `model(**batch)`).

    It copies the model without weights, so later changes of the model (sharding, compiling, freezing) do not count.
    Build it from the whole model, on any device, after `requires_grad` is set.
    """

    def __init__(self, model: nn.Module, loss: Loss | None = None) -> None:
        self._parts: _Multimodal | _Whole
        if isinstance(model, MultimodalModel):
            self._parts = _Multimodal(model)
        else:
            self._parts = _Whole(model, loss or (lambda whole, batch: whole(**batch)))

    def step(self, batch: Mapping[str, Any]) -> StepFlops:
        """Return the FLOPs of both passes of a batch; raise UnsupportedModelError if it cannot be run on shapes."""
        return StepFlops.of(self._parts.step(batch))


class _Multimodal:
    def __init__(self, model: MultimodalModel) -> None:
        self._encoders = {name: EncoderWork(encoder) for name, encoder in model.encoders.items()}
        self._attention = {name: encoder.attention for name, encoder in model.encoders.items()}
        self._model = model  # its placeholder tokens may be set later
        self._language_model = copy_as_shapes(model.language_model)
        self._by_upstream: dict[bool, RowWork] = {}

    def step(self, batch: Mapping[str, Any]) -> dict[str, PartFlops]:
        parts: dict[str, PartFlops] = {}
        lengths: dict[str, list[int]] = {}
        is_trained = False
        for name, encoder in self._encoders.items():
            inputs = encoder.select_inputs(name, batch)
            if inputs is None:
                continue
            items = encoder.list_items(inputs)
            for part, section in (("encoder", ""), ("projector", PROJECTOR)):
                work = (item.sections.get(section, PartFlops()) for item in items)
                parts[f"{name} {part}"] = sum(work, PartFlops())
            lengths[name] = [length for item in items for length in item.lengths]
            is_trained = is_trained or any(item.needs_gradient for item in items)
        spec = self._build_spec(batch, lengths)
        if is_trained not in self._by_upstream:
            self._by_upstream[is_trained] = RowWork(lambda tokens: self._trace(tokens, is_trained), CAUSAL)
        parts["language model"] = self._by_upstream[is_trained].part(spec, self._count_labels(batch, spec))
        return parts

    def _build_spec(self, batch: Mapping[str, Any], lengths: Mapping[str, list[int]]) -> MaskSpec:
        ids = on_cpu(batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"][..., 0])
        mask, documents = (on_cpu(batch.get(name)) for name in ("attention_mask", "documents"))
        spans, first = torch.full(ids.shape, TEXT), 0
        places = find_placeholders(ids, self._model.modality_token_ids)
        for name, counts in lengths.items():
            # The model itself refuses a batch whose placeholders do not fit.
            if name in places and int(places[name].sum()) == sum(counts):
                features = EncoderFeatures(torch.empty(sum(counts), 0), counts)
                first = mark_spans(spans, name, self._attention[name], places[name], features, first)
        return build_mask_spec(ids, mask, documents, spans)

    def _count_labels(self, batch: Mapping[str, Any], spec: MaskSpec) -> int | None:
        """Return the number of tokens with a label; None without labels."""
        labels, ids = on_cpu(batch.get("labels")), on_cpu(batch.get("input_ids"))
        if labels is None or labels.shape != spec.documents.shape:
            return None
        is_trained = (labels != IGNORE_INDEX) & (spec.documents > 0)
        if ids is not None and not self._model.trains_on_placeholders:
            for mask in find_placeholders(ids, self._model.modality_token_ids).values():
                is_trained &= ~mask
        # No token predicts the first token of a document.
        return int((is_trained[:, 1:] & (spec.documents[:, 1:] == spec.documents[:, :-1])).sum())

    def _trace(self, tokens: int, upstream: bool) -> Trace:
        model: Any = self._language_model
        ids = torch.zeros(1, tokens, dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": ids}
        if self._encoders:
            table = model.get_input_embeddings().weight
            embedded = ShapeTensor.of((1, tokens, table.shape[1]), table.dtype)
            inputs = {"inputs_embeds": embedded.requires_grad_(upstream or table.requires_grad)}
        if accepts_argument(model, "use_cache"):
            inputs["use_cache"] = False
        inputs["attention_mask"] = torch.ones_like(ids)
        head = model.get_output_embeddings()
        sections = {} if head is None else {HEAD: head}
        return trace_flops(model, lambda: model(**inputs), lambda output: output[0], sections)


class _Whole:
    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._loss, self._model = loss, copy_as_shapes(model)
        self._has_decoder = bool(getattr(getattr(unwrap(model), "config", None), "is_encoder_decoder", False))
        self._rows: dict[tuple[Any, ...], RowWork] = {}
        self._items = ItemWork(self._trace)

    def step(self, batch: Mapping[str, Any]) -> dict[str, PartFlops]:
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or self._has_decoder or any(map(is_float, tensors_in(batch))):
            items = self._items.list_items(dict(batch))
            return {"model": sum((item.sections.get("", PartFlops()) for item in items), PartFlops())}
        rows, tokens = ids.shape
        forms = {name: value.shape for name, value in batch.items() if isinstance(value, Tensor)}
        # Tokens come before rows, because rows are traced at other lengths.
        letters = {rows: "B", tokens: "S"}
        kinds = {name: tuple(letters.get(size, size) for size in form) for name, form in forms.items()}
        key = tuple(kinds.items())
        if key not in self._rows:
            self._rows[key] = RowWork(lambda length: self._trace(_build_row(batch, kinds, length)), EVERYTHING)
        mask = on_cpu(batch.get("attention_mask"))
        return {"model": self._rows[key].part(build_mask_spec(on_cpu(ids), mask, None, None))}

    def _trace(self, inputs: Mapping[str, Any]) -> Trace:
        def get_loss(output: Any) -> Any:
            loss = output.get("loss") if isinstance(output, Mapping) else None
            return output if loss is None else loss

        return trace_flops(self._model, lambda: self._loss(self._model, inputs), get_loss, {})


def _build_row(batch: Mapping[str, Any], kinds: Mapping[str, tuple[Any, ...]], length: int) -> dict[str, Any]:
    """Return a batch of one row of `length` tokens."""
    sizes = {"B": 1, "S": length}
    made = dict(batch)
    for name, kind in kinds.items():
        form = [sizes.get(size, size) for size in ("B", *kind[1:])]
        made[name] = torch.full(form, int("mask" in name), dtype=batch[name].dtype)
    return made
