"""Scale the FLOPs of a trace to any batch: by rows, tokens, visible pairs of tokens, and items (images, sounds).

The mask of a row of S tokens has S × S entries. The number of visible pairs follows from the lengths of documents and
the positions of spans, in the time that sorting the tokens takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.attention.mask import CAUSAL, MaskPattern, MaskSpec
from cornstarch.cost.tracer import Operation, Trace, trace_flops
from cornstarch.kernels.shape_tracing import convert_to_shapes, copy_as_shapes
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.facts import CACHED_FEATURES, EncoderFeatures
from cornstarch.models.multimodal_language_model.shape_inference import is_float
from cornstarch.trees import tensors_in

_TOKENS = 256  # length of the traced row; a second one is twice as long
_MOST_TRACED = 16  # sizes of items that are traced; the work of other sizes is extrapolated
_FEW = 8  # a tensor of at most this many integers gives the size of an item
_FAR = np.int64(1) << 40  # more than any position
PROJECTOR, HEAD = "projector", "head"
"""Sections of a trace that are counted separately."""

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class PartFlops:
    """FLOPs of one part of a model, or of one operation, in a step."""

    forward: float = 0.0
    backward_inputs: float = 0.0
    backward_weights: float = 0.0
    attention: float = 0.0
    """Attention's part of these three."""
    recomputed: float = 0.0
    """Recomputed in the backward pass; not in `total`."""
    untrained_head: float = 0.0
    """The head for tokens without a label, which many programs compute; not in `total`."""
    wasted: float = 0.0
    """Padding, and experts that were not chosen; not in `total`."""

    @classmethod
    def of_operation(cls, operation: Operation) -> PartFlops:
        forward, own, idle = operation.flops, 1 - operation.idle, operation.idle
        if operation.is_recomputed:
            return cls(recomputed=forward * own, wasted=forward * idle)
        inputs = sum(count for count, is_weight in operation.gradients if not is_weight)
        weights = sum(count for count, is_weight in operation.gradients if is_weight)
        total = forward + inputs + weights
        attention = total * own if operation.attention is not None else 0.0
        return cls(forward * own, inputs * own, weights * own, attention, wasted=total * idle)

    @property
    def total(self) -> float:
        """The FLOPs that the model needs: MFU is computed from them."""
        return self.forward + self.backward_inputs + self.backward_weights

    @property
    def hardware(self) -> float:
        """The FLOPs of a program that skips nothing."""
        return self.total + self.recomputed + self.untrained_head + self.wasted

    def __add__(self, other: PartFlops) -> PartFlops:
        return PartFlops(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, factor: float) -> PartFlops:
        return PartFlops(*(factor * one for one in vars(self).values()))


def on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


class RowWork:
    """The work of a model of tokens per row, per token and per pair of tokens, from traces of one row."""

    # `pattern` is what tokens see where neither a mask nor a layer says it.
    def __init__(self, trace: Callable[[int], Trace], pattern: MaskPattern) -> None:
        short, long = trace(_TOKENS), trace(2 * _TOKENS)
        assert len(short.operations) == len(long.operations), "a row twice as long is computed in another way"
        self._row, self._token, self._head = PartFlops(), PartFlops(), PartFlops()
        self._pairs: dict[MaskPattern, PartFlops] = {}
        patterns = set(short.patterns)
        own_code = next(iter(patterns)) if len(patterns) == 1 else pattern
        for one, other in zip(short.operations, long.operations, strict=True):
            work, twice = PartFlops.of_operation(one), PartFlops.of_operation(other)
            # Attention grows with the square of the length: also in a model's own code, as products without weights.
            if one.attention is not None and other.attention is not None:
                is_pairs, seen = other.attention.pairs > 3 * one.attention.pairs, one.attention.pattern
            else:
                is_pairs = not one.has_weights and twice.hardware > 3 * max(work.hardware, 1.0)
                work, seen = replace(work, attention=work.total if is_pairs else 0.0), own_code
            if is_pairs:
                self._pairs[seen] = self._pairs.get(seen, PartFlops()) + work * (1 / _TOKENS**2)
            elif one.section == HEAD:
                self._head += work * (1 / _TOKENS)
            else:  # the part that does not grow with the length is work per row
                self._row += work * 2 + twice * -1
                self._token += (twice + work * -1) * (1 / _TOKENS)

    def part(self, spec: MaskSpec, trained: int | None = None) -> PartFlops:
        """Return the work of rows of tokens; `trained`: how many have a label (None: all)."""
        rows, tokens = len(spec.documents), int((spec.documents > 0).sum())
        trained = tokens if trained is None else trained
        part = self._row * rows + self._token * tokens + self._head * trained
        for pattern, work in self._pairs.items():
            part += work * visible_pairs(spec, pattern)
        padding = (self._token + self._head) * (spec.documents.numel() - tokens)
        untrained = self._head * (tokens - trained)
        return replace(part, untrained_head=untrained.hardware, wasted=part.wasted + padding.hardware)


@dataclass(frozen=True)
class _ItemFlops:
    sections: Mapping[str, PartFlops]
    lengths: list[int]
    """Tokens in the result."""
    needs_gradient: bool


class ItemWork:
    """The work of items; `trace` traces each size once, and `lengths` returns the numbers of tokens in a result."""

    def __init__(self, trace: Callable[[Mapping[str, Any]], Trace], lengths: Callable[[Any], list[int]] | None = None):
        self._trace, self._lengths = trace, lengths
        self._known: dict[Any, _ItemFlops] = {}
        self._sizes: dict[Any, int] = {}

    def list_items(self, inputs: dict[str, Any]) -> list[_ItemFlops]:
        return [self._count_item(item) for item in _split_items(inputs)]

    def _count_item(self, item: dict[str, Any]) -> _ItemFlops:
        key = tuple((name, _size_key(name, value)) for name, value in sorted(item.items()))
        if key not in self._known:
            if len(self._known) >= _MOST_TRACED:
                return self._extrapolate(item)
            self._known[key] = self._read_trace(self._trace(convert_to_shapes(item)))
            self._sizes[key] = _count_numbers(item)
        return self._known[key]

    def _read_trace(self, trace: Trace) -> _ItemFlops:
        sections: dict[str, PartFlops] = {}
        for one in trace.operations:
            work = PartFlops.of_operation(one)
            if (call := one.attention) is not None and call.queries == call.keys:
                spec = call.spec or MaskSpec.from_documents(torch.ones(1, call.queries, dtype=torch.long))
                visible = visible_pairs(spec, call.pattern) * call.rows / len(spec.documents)
                # All pairs have the same whole number of FLOPs, so the division is exact.
                work = PartFlops(*(flops / call.pairs for flops in vars(work).values())) * visible
            sections[one.section] = sections.get(one.section, PartFlops()) + work
        result = trace.result
        lengths = [] if self._lengths is None else self._lengths(result)
        outputs = result.tensors() if isinstance(result, EncoderFeatures) else result
        return _ItemFlops(sections, lengths, any(tensor.requires_grad for tensor in tensors_in(outputs)))

    def _extrapolate(self, item: dict[str, Any]) -> _ItemFlops:
        """Return the work of an item of a new size, fitted to known sizes: a linear and a quadratic term."""
        size = _count_numbers(item)
        known = [(self._sizes[key], one) for key, one in self._known.items()]
        nearest = min(known, key=lambda one: abs(one[0] - size))[1]
        lengths = [round(_fit([(n, [one.lengths[0]]) for n, one in known if one.lengths], size)[0])]
        sections = {}
        for section in nearest.sections:
            points = [(n, list(vars(one.sections.get(section, PartFlops())).values())) for n, one in known]
            sections[section] = PartFlops(*_fit(points, size))
        return _ItemFlops(sections, lengths if nearest.lengths else [], nearest.needs_gradient)


class EncoderWork(ItemWork):
    def __init__(self, encoder: ModalEncoderModule) -> None:
        self._select, self._arguments = encoder.select_inputs, encoder.rename_inputs
        keep, encoder.keep = encoder.keep, None  # a feature cache must not be copied
        try:
            copied: Any = copy_as_shapes(encoder)
        finally:
            encoder.keep = keep
        sections = {PROJECTOR: copied.projector} if copied.projector is not None else {}
        super().__init__(
            lambda inputs: trace_flops(
                copied, lambda: copied.features(dict(inputs)), lambda found: found.tensors(), sections
            ),
            lambda found: found.lengths if found.lengths is not None else [len(found.tokens)],
        )

    def select_inputs(self, name: str, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the encoder's inputs in a batch; None if there are none."""
        nested = batch.get(name)
        return self._arguments(dict(nested)) if isinstance(nested, Mapping) else self._select(batch)

    def list_items(self, inputs: dict[str, Any]) -> list[_ItemFlops]:
        """Return the work of each item of a batch; items with cached features need the projector only."""
        if CACHED_FEATURES not in inputs:
            return super().list_items(inputs)
        known = inputs[CACHED_FEATURES]
        rest = {name: value for name, value in inputs.items() if name != CACHED_FEATURES}
        fresh = iter(super().list_items(rest) if rest else [])
        width = 0 if known.get("tokens") is None else known["tokens"].shape[-1]
        return [
            self._count_item(
                {CACHED_FEATURES: {"lengths": [length], "is_known": [True], "tokens": torch.empty(length, width)}}
            )
            if is_known
            else next(fresh)
            for length, is_known in zip(known["lengths"], known["is_known"], strict=True)
        ]


def _split_items(inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of each item; all inputs at once if they cannot be assigned to items."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    grid = next((value for name, value in tensors.items() if name.endswith("grid_thw")), None)
    patches = None if grid is None else on_cpu(grid).prod(-1).tolist()
    count = len(next(iter(tensors.values()), ())) if patches is None else len(patches)
    pieces: dict[str, Sequence[Tensor]] = {}
    for name, value in tensors.items():
        if len(value) == count:
            pieces[name] = value.split(1)
        elif patches is not None and len(value) == sum(patches):
            pieces[name] = value.split(patches)
    if len(pieces) < len(tensors) or not count:
        yield inputs
        return
    for item in range(count):
        yield {**inputs, **{name: cut[item] for name, cut in pieces.items()}}


def _size_key(name: str, value: Any) -> Any:
    """Return the properties of an item's input that its FLOPs depend on."""
    if not isinstance(value, Tensor):
        return tuple(_size_key(name, one) for one in tensors_in(value))
    if is_float(value):
        return tuple(value.shape)
    if value.numel() <= _FEW and "ids" not in name and name != "labels":
        return tuple(value.flatten().tolist())
    return (*value.shape, int((value != 0).sum()) if name.endswith("mask") else None)


def _count_numbers(item: Mapping[str, Any]) -> int:
    tensors = tensors_in(item)
    return sum(t.numel() for t in tensors if is_float(t)) or sum(t.numel() for t in tensors)


def _fit(points: Sequence[tuple[int, Sequence[float]]], size: int) -> list[float]:
    if not points:
        return [0.0]
    sizes = np.array([[n, n**2] for n, _ in points], dtype=np.float64) / size
    found, *_ = np.linalg.lstsq(sizes, np.array([values for _, values in points], dtype=np.float64), rcond=None)
    return [max(float(one), 0.0) for one in np.array([1.0, size]) @ found]


def visible_pairs(spec: MaskSpec, pattern: MaskPattern = CAUSAL) -> int:
    """Return the number of visible pairs of a query and a key over all rows, without padding."""
    documents, spans = _integers(spec.documents), _integers(spec.spans)
    rows = np.arange(len(documents), dtype=np.int64)[:, None]
    real = documents > 0
    groups = (rows * (documents.max(initial=0) + 1) + documents)[real]
    lengths, chunk = _counts(groups), pattern.chunk
    if chunk is None:
        seen = int(_in_one_chunk(lengths, pattern).sum())
    else:
        whole = _in_one_chunk(np.array([chunk], dtype=np.int64), pattern)
        seen = int((lengths // chunk * whole + _in_one_chunk(lengths % chunk, pattern)).sum())
    in_span = spans[real] >= 0
    if not in_span.any():
        return seen
    # All tokens of a span see each other; the pairs that the pattern shows are counted already.
    numbers = groups[in_span] * (spans.max(initial=0) + 1) + spans[real][in_span]
    if pattern.causal and pattern.window is None and pattern.chunk is None:
        sizes = _counts(numbers)
        return seen + int((sizes * (sizes - 1) // 2).sum())
    positions = _integers(spec.positions())[real][in_span]
    return seen + int((_counts(numbers) ** 2).sum()) - _count_in_groups(numbers, positions, pattern)


def _integers(tensor: Tensor) -> Integers:
    return tensor.detach().cpu().numpy().astype(np.int64)


def _counts(groups: Integers) -> Integers:
    return np.unique(groups, return_counts=True)[1].astype(np.int64)


def _in_one_chunk(lengths: Integers, pattern: MaskPattern) -> Integers:
    near = lengths if pattern.window is None else np.minimum(lengths, pattern.window)
    back = near * (near + 1) // 2 + (lengths - near) * near
    return back if pattern.causal else 2 * back - lengths


def _count_in_groups(groups: Integers, positions: Integers, pattern: MaskPattern) -> int:
    """Return the number of pairs inside groups that a pattern shows."""
    low = np.zeros_like(positions)
    high = positions if pattern.causal else np.full_like(positions, _FAR - 1)
    if pattern.window is not None:
        low, high = np.maximum(low, positions - pattern.window + 1), np.minimum(high, positions + pattern.window - 1)
    if pattern.chunk is not None:
        start = positions // pattern.chunk * pattern.chunk
        low, high = np.maximum(low, start), np.minimum(high, start + pattern.chunk - 1)
    _, numbers = np.unique(groups, return_inverse=True)
    offset = numbers.astype(np.int64) * _FAR
    order = np.sort(offset + positions)
    return int((np.searchsorted(order, offset + high, "right") - np.searchsorted(order, offset + low, "left")).sum())
