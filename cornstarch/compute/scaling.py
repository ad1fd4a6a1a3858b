"""From what a part multiplies once to what it multiplies for any batch: by row, token, pair of tokens, and item."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cornstarch.attention.mask import MaskPattern, MaskSpec
from cornstarch.compute.pairs import visible_pairs
from cornstarch.compute.shadows import as_shapes, shadow
from cornstarch.compute.tracing import Attention, Trace, Work, trace
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.items import KNOWN, Features
from cornstarch.models.multimodal_language_model.preprocessing.shape_inference import is_float
from cornstarch.trees import tensors_in

_TOKENS = 256  # of the row that a model of tokens is run on; then of one twice as long
_MOST_TRACED = 16  # sizes of items that are run on shapes; of the others the work follows from them
_FEW = 8  # integers of an item that say how large it is
PROJECTOR, HEAD = "projector", "head"
"""Sections of what is run that are told apart."""


@dataclass(frozen=True)
class PartFlops:
    """Floating-point operations of one part in a step."""

    forward: float = 0.0
    backward_inputs: float = 0.0
    backward_weights: float = 0.0
    attention: float = 0.0
    """How much of these three is attention."""
    recomputed: float = 0.0
    """Computed again in the backward pass; not in `total`."""
    untrained_head: float = 0.0
    """The head for tokens that are not trained on, which many programs compute; not in `total`."""
    wasted: float = 0.0
    """Computed for padding, and for experts that were not chosen; not in `total`."""

    @property
    def total(self) -> float:
        """What the model needs."""
        return self.forward + self.backward_inputs + self.backward_weights

    @property
    def hardware(self) -> float:
        """What is computed by a program that leaves nothing out."""
        return self.total + self.recomputed + self.untrained_head + self.wasted

    def __add__(self, other: PartFlops) -> PartFlops:
        return PartFlops(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


# ---------------------------------------------------------------------------------------------------- rows of tokens


class RowWork:
    """The work of a model of tokens for a row, a token and a pair of tokens.

    Args:
        traced: Runs it on one row of so many tokens.
        pattern: What its tokens see, where neither a mask nor a layer says it.
    """

    def __init__(self, traced: Callable[[int], Trace], pattern: MaskPattern) -> None:
        short, long = traced(_TOKENS), traced(2 * _TOKENS)
        self._row, self._token, self._head = Work(), Work(), Work()  # of matrices
        self._attention_row, self._attention_token = Work(), Work()
        self._pairs: dict[MaskPattern, Work] = {}
        made = set(short.patterns)
        own_code = next(iter(made)) if len(made) == 1 else pattern
        for one, other in _paired(short.products, long.products):
            if not one.has_weights and _times(one.work, other.work) > 3:
                self._see(own_code, one.work * (1 / _TOKENS**2))  # attention in a model's own code: queries × keys
            elif one.section == HEAD:
                self._head = self._head + one.work * (1 / _TOKENS)
            else:
                self._row, self._token = _split(one.work, other.work, self._row, self._token)
        for one_call, other_call in _paired(short.attentions, long.attentions):
            first, second = _all_pairs(one_call), _all_pairs(other_call)
            if second > 3 * first:
                self._see(one_call.pattern, one_call.per_pair * (first / _TOKENS**2))
            else:
                works = (one_call.per_pair * first, other_call.per_pair * second)
                self._attention_row, self._attention_token = _split(*works, self._attention_row, self._attention_token)

    def _see(self, pattern: MaskPattern, work: Work) -> None:
        self._pairs[pattern] = self._pairs.get(pattern, Work()) + work

    def part(self, spec: MaskSpec, trained: int | None = None) -> PartFlops:
        """Return the work for rows of tokens, of which some are trained on (None: all)."""
        rows, tokens = len(spec.documents), int((spec.documents > 0).sum())
        trained = tokens if trained is None else trained
        matrices = self._row * rows + self._token * tokens + self._head * trained
        attention = self._attention_row * rows + self._attention_token * tokens
        for pattern, work in self._pairs.items():
            attention = attention + work * visible_pairs(spec, pattern)
        padding = (self._token + self._head + self._attention_token) * (spec.documents.numel() - tokens)
        head = self._head * (tokens - trained)
        return _part(matrices, attention, sum(head.numbers), sum(padding.numbers))


def _paired(short: Sequence[Any], long: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield what is the same in a short row and one of twice its length."""
    assert len(short) == len(long), "a row twice as long is computed in another way"
    return zip(short, long, strict=True)


def _times(short: Work, long: Work) -> float:
    return sum(long.numbers) / max(sum(short.numbers), 1.0)


def _split(short: Work, long: Work, row: Work, token: Work) -> tuple[Work, Work]:
    """Add the work of a row and of a token, from that of a row and of one twice as long."""
    return row + short * 2 + long * -1, token + (long + short * -1) * (1 / _TOKENS)


def _all_pairs(attention: Attention) -> float:
    return float(attention.rows * attention.queries * attention.keys)


def _part(matrices: Work, attention: Work, head: float = 0.0, padding: float = 0.0) -> PartFlops:
    both = matrices + attention
    own = attention.forward + attention.inputs + attention.weights
    return PartFlops(both.forward, both.inputs, both.weights, own, both.again, head, both.idle + padding)


# ---------------------------------------------------------------------------------------------------- items


@dataclass(frozen=True)
class _Unit:
    """What one item, or one sample, takes."""

    matrices: Mapping[str, Work]
    attention: Mapping[str, Work]
    lengths: list[int]
    """Tokens that come out."""
    needs_gradient: bool

    def part(self, section: str) -> PartFlops:
        return _part(self.matrices.get(section, Work()), self.attention.get(section, Work()))


class ItemWork:
    """The work for items, each size of which is run on shapes once.

    Args:
        traced: Runs the inputs of one item.
        lengths: Returns how many tokens come out, from the result.
    """

    def __init__(self, traced: Callable[[Mapping[str, Any]], Trace], lengths: Callable[[Any], list[int]] | None = None):
        self._traced, self._lengths = traced, lengths
        self._known: dict[Any, _Unit] = {}
        self._sizes: dict[Any, int] = {}

    def units(self, inputs: dict[str, Any]) -> list[_Unit]:
        """Return the work for each item of a batch."""
        return [self._unit(item) for item in _items_in(inputs)]

    def _unit(self, item: dict[str, Any]) -> _Unit:
        key = tuple((name, _size_of(name, value)) for name, value in sorted(item.items()))
        if key not in self._known:
            if len(self._known) >= _MOST_TRACED:
                return self._fitted(item)
            self._known[key] = self._counted(self._traced(as_shapes(item)))
            self._sizes[key] = _numbers_in(item)
        return self._known[key]

    def _counted(self, trace: Trace) -> _Unit:
        matrices: dict[str, Work] = {}
        attention: dict[str, Work] = {}
        for product in trace.products:
            matrices[product.section] = matrices.get(product.section, Work()) + product.work
        for one in trace.attentions:
            attention[one.section] = attention.get(one.section, Work()) + one.per_pair * _seen_pairs(one)
        lengths = [] if self._lengths is None else self._lengths(trace.result)
        return _Unit(matrices, attention, lengths, any(t.requires_grad for t in tensors_in(_outputs(trace.result))))

    def _fitted(self, item: dict[str, Any]) -> _Unit:
        """Return the work for an item of a new size, from that for others: so much per number, and per its square."""
        size = _numbers_in(item)
        known = [(self._sizes[key], unit) for key, unit in self._known.items()]
        nearest = min(known, key=lambda one: abs(one[0] - size))[1]
        lengths = [round(_extrapolated([(n, [u.lengths[0]]) for n, u in known if u.lengths], size)[0])]

        def work(kind: str, section: str) -> Work:
            points = [(n, getattr(unit, kind).get(section, Work()).numbers) for n, unit in known]
            return Work(*_extrapolated(points, size))

        return _Unit(
            {section: work("matrices", section) for section in nearest.matrices},
            {section: work("attention", section) for section in nearest.attention},
            lengths if nearest.lengths else [],
            nearest.needs_gradient,
        )


class EncoderWork(ItemWork):
    """An encoder with its projector."""

    def __init__(self, encoder: ModalEncoderModule) -> None:
        self._select, self._arguments = encoder.select_inputs, encoder.as_arguments
        keep, encoder.keep = encoder.keep, None  # whoever keeps features is no part of what is copied
        try:
            made: Any = shadow(encoder)
        finally:
            encoder.keep = keep
        sections = {PROJECTOR: made.projector} if made.projector is not None else {}
        super().__init__(
            lambda inputs: trace(made, lambda: made.features(dict(inputs)), lambda found: found.given(), sections),
            lambda found: found.lengths if found.lengths is not None else [len(found.tokens)],
        )

    def inputs(self, name: str, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what of a batch the encoder is run on; None if it is not run."""
        nested = batch.get(name)
        return self._arguments(dict(nested)) if isinstance(nested, Mapping) else self._select(batch)

    def units(self, inputs: dict[str, Any]) -> list[_Unit]:
        """Return the work for each item of a batch; items whose features are known need their projector alone."""
        if KNOWN not in inputs:
            return super().units(inputs)
        known = inputs[KNOWN]
        rest = {name: value for name, value in inputs.items() if name != KNOWN}
        fresh = iter(super().units(rest) if rest else [])
        width = 0 if known.get("tokens") is None else known["tokens"].shape[-1]
        return [
            self._unit({KNOWN: {"lengths": [length], "is_known": [True], "tokens": torch.empty(length, width)}})
            if is_known
            else next(fresh)
            for length, is_known in zip(known["lengths"], known["is_known"], strict=True)
        ]


def _outputs(result: Any) -> Any:
    return result.given() if isinstance(result, Features) else result


def _seen_pairs(attention: Attention) -> float:
    if attention.queries != attention.keys:
        return _all_pairs(attention)
    spec = attention.spec
    if spec is None:
        spec = MaskSpec.from_documents(torch.ones(1, attention.queries, dtype=torch.long))
    return visible_pairs(spec, attention.pattern) * attention.rows / len(spec.documents)


def _items_in(inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the inputs of each item; all of them where it is unknown which belongs to which."""
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


def _size_of(name: str, value: Any) -> Any:
    """Return what of an input of one item decides how much is computed."""
    if not isinstance(value, Tensor):
        return tuple(_size_of(name, one) for one in tensors_in(value))
    if is_float(value):
        return tuple(value.shape)
    if value.numel() <= _FEW and "ids" not in name and name != "labels":
        return tuple(value.flatten().tolist())
    return (*value.shape, int((value != 0).sum()) if name.endswith("mask") else None)


def _numbers_in(item: Mapping[str, Any]) -> int:
    tensors = tensors_in(item)
    return sum(t.numel() for t in tensors if is_float(t)) or sum(t.numel() for t in tensors)


def _extrapolated(points: Sequence[tuple[int, Sequence[float]]], size: int) -> list[float]:
    if not points:
        return [0.0]
    sizes = np.array([[n, n**2] for n, _ in points], dtype=np.float64) / size
    found, *_ = np.linalg.lstsq(sizes, np.array([values for _, values in points], dtype=np.float64), rcond=None)
    return [max(float(one), 0.0) for one in np.array([1.0, size]) @ found]


__all__ = ["HEAD", "PROJECTOR", "EncoderWork", "ItemWork", "PartFlops", "RowWork", "on_cpu"]
