"""What the last stage put out for each microbatch, as the output of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput


def detached(output: Any) -> Any:
    """Return an output without what backward passes need, nor the cache of a text that could go on."""
    if isinstance(output, ModelOutput):
        output = type(output)(**{key: value for key, value in output.items() if key != "past_key_values"})
    return _each([output], lambda tensors: tensors[0].detach())


def joined(outputs: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    """Return the outputs of microbatches as one.

    Tensors with a row for each sample are put one behind the other; single numbers, such as losses, are averaged as
    the microbatches weigh. What is neither stays a list with an entry for each microbatch.

    Args:
        outputs: Of the microbatches, in order.
        weights: Of the microbatches.
        sizes: Their samples.
    """

    def join(tensors: Sequence[Tensor]) -> Any:
        if not tensors[0].dim():
            total = sum(weights) or 1.0
            return sum(tensor * (weight / total) for tensor, weight in zip(tensors, weights, strict=True))
        fit = all(len(tensor) == size for tensor, size in zip(tensors, sizes, strict=True))
        if fit and len({tensor.shape[1:] for tensor in tensors}) == 1:
            return torch.cat(list(tensors))
        return list(tensors)

    return _each(outputs, join)


def _each(outputs: Sequence[Any], change: Any) -> Any:
    """Return one output, of which each tensor is made of those at its place in all outputs."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return change(outputs)
    if isinstance(first, ModelOutput):
        return type(first)(**{key: _each([one[key] for one in outputs], change) for key in first})
    if isinstance(first, Mapping):
        return {key: _each([one[key] for one in outputs], change) for key in first}
    if type(first) in (list, tuple):
        return type(first)(_each(list(ones), change) for ones in zip(*outputs, strict=True))
    return first if len(outputs) == 1 or all(one is first or one == first for one in outputs) else list(outputs)


__all__ = ["detached", "joined"]
