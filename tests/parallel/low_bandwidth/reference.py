"""Compression, and the mean of what was compressed, once more: in one process, with loops, as the formulas say."""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray

from cornstarch.plan import Compression

Vector = NDArray[np.float64]


def said(how: Compression, wanted: Vector) -> Vector:
    """Return what is understood of a vector that is sent; what is rounded by chance is not for here."""
    if how.kind in ("bf16", "fp16"):
        dtype = torch.bfloat16 if how.kind == "bf16" else torch.float16
        return torch.from_numpy(wanted).float().to(dtype).double().numpy()
    if how.kind == "randomk":
        return torch.from_numpy(wanted).float().double().numpy()
    found = np.zeros_like(wanted)
    for start in range(0, len(wanted), how.block):
        block = wanted[start : start + how.block]
        padded = np.zeros(how.block)
        padded[: len(block)] = block
        found[start : start + how.block] = _block(how, padded)[: len(block)]
    return found


def _block(how: Compression, block: Vector) -> Vector:
    found = np.zeros_like(block)
    if how.kind == "topk":
        for place in sorted(range(len(block)), key=lambda i: -abs(block[i]))[: max(1, round(how.ratio * how.block))]:
            found[place] = torch.tensor(block[place]).to(torch.bfloat16).double().item()
        return found
    if how.bits == 1:
        return np.where(block >= 0, 1.0, -1.0) * np.abs(block).mean()
    most = {8: 127, 4: 7}[how.bits]
    scale = np.abs(block).max() / most
    return np.rint(block / scale) * scale if scale else found


def picks(how: Compression, numbers: int, step: int, place: int = 0) -> NDArray[np.int64]:
    """Return what randomk chooses; which chance it is, is the product's own matter."""
    from cornstarch.parallel.low_bandwidth.compressed_mean import combine_seeds, select_random_indices

    generator = torch.Generator().manual_seed(combine_seeds(how.seed, step, place, 0))
    return select_random_indices(how, numbers, generator).numpy()


def means(how: Compression, given: list[list[Vector]]) -> tuple[list[Vector], list[Vector]]:
    """Return the mean of each step, and what each rank has not sent in the end; `given` is by step and rank."""
    ranks, numbers = len(given[0]), len(given[0][0])
    memory = [np.zeros(numbers) for _ in range(ranks)]
    found = []
    for step, vectors in enumerate(given):
        if ranks == 1 or how.kind == "none" or step < how.warmup:
            found.append(np.mean(vectors, axis=0))
            continue
        wanted = [x + e if how.error_feedback else x for x, e in zip(vectors, memory, strict=True)]
        mean, left = _step(how, wanted, step)
        found.append(mean)
        memory = left if how.error_feedback else memory
    return found, memory


def _step(how: Compression, wanted: list[Vector], step: int) -> tuple[Vector, list[Vector]]:
    if how.kind != "randomk":
        return _bring_together(how, wanted)
    places = picks(how, len(wanted[0]), step)
    factor = 1.0 if how.error_feedback else how.cell
    of_chosen, left_of_chosen = _bring_together(how, [x[places] * factor for x in wanted])
    mean = np.zeros_like(wanted[0])
    mean[places] = of_chosen
    left = [x.copy() for x in wanted]
    for own, values in zip(left, left_of_chosen, strict=True):
        own[places] = values
    return mean, left


def _bring_together(how: Compression, wanted: list[Vector]) -> tuple[Vector, list[Vector]]:
    ranks, numbers = len(wanted), len(wanted[0])
    if ranks == 2 and how.kind != "randomk":
        heard = [said(how, x) for x in wanted]
        return np.mean(heard, axis=0), [x - y for x, y in zip(wanted, heard, strict=True)]
    unit = how.block if how.kind in ("topk", "quantize") else 1
    size = ceil(ceil(numbers / unit) / ranks) * unit
    mean, left = np.zeros(numbers), [np.zeros(numbers) for _ in wanted]
    for owner in range(ranks):
        part = slice(owner * size, min((owner + 1) * size, numbers))
        heard = [x[part] if rank == owner else said(how, x[part]) for rank, x in enumerate(wanted)]
        own = np.mean(heard, axis=0)
        mean[part] = said(how, own)
        for rank, x in enumerate(wanted):
            left[rank][part] = x[part] - heard[rank]
        left[owner][part] = ranks * (own - mean[part])
    return mean, left
