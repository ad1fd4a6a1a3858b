"""Measure which fractions of a device's rates the kernels of a step reach, and how much measurements differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from cornstarch.launch.hardware_probe import SynchronizedTimer

_PRODUCTS = ((1, 0.5, 2), (1, 2, 0.5), (2, 0.5, 0.5), (1, 0.5, 0.25))
"""Rows, inner and outer dimension of products in layers, as multiples of the size of the square ones."""
_HEAD = 64  # channels of an attention head
_WIDTH = 1024  # numbers in a row that is normalized
_LEAST = 0.01


def measure_kernels(
    timer: SynchronizedTimer,
    device: torch.device,
    size: int,
    rates: Mapping[str, float],
    copied: int,
    bandwidth: float,
) -> dict[str, dict[str, float]]:
    """Return `reached` and `errors` by kind of kernel (`cornstarch.plan.cluster.REACHED`).

    `size` is that of the square products whose FLOP/s are `rates`; a copy of `copied` bytes has `bandwidth`. A
    fraction is the mean over kernels of several sizes; its error is how much these differ (`combine_errors`).
    """
    found: dict[str, dict[str, float]] = {"reached": {}, "errors": {}}
    is_half = device.type == "cuda" and "bf16" in rates
    dtype = "bf16" if is_half else "fp32"
    measures: dict[str, Callable[[], Iterator[float]]] = {
        "products": partial(_measure_products, timer, device, size, dtype, rates[dtype]),
        "attention": partial(_measure_attention, timer, device, size, dtype, rates[dtype], False),
        "attention_backward": partial(_measure_attention, timer, device, size, dtype, rates[dtype], True),
        "memory": partial(_measure_memory, timer, device, copied, bandwidth),
    }
    for name, measure in measures.items():
        timer.spreads.clear()
        fractions = list(measure())
        found["reached"][name] = min(1.0, max(_LEAST, mean(fractions)))
        found["errors"][name] = combine_errors(fractions, timer.spreads)
    return found


def combine_errors(values: list[float], spreads: list[float]) -> float:
    """Return the relative standard deviation of values, and of the repetitions of each, as one error."""
    return float((pstdev(values) / mean(values)) ** 2 + mean(one**2 for one in spreads or [0.0])) ** 0.5


def _get_dtype(name: str) -> torch.dtype:
    import torch

    return torch.bfloat16 if name == "bf16" else torch.float32


def _measure_products(
    timer: SynchronizedTimer, device: torch.device, size: int, dtype: str, rate: float
) -> Iterator[float]:
    import torch

    for factors in _PRODUCTS:
        rows, inner, columns = (max(1, int(size * factor)) for factor in factors)
        a = torch.randn(rows, inner, device=device).to(_get_dtype(dtype))
        b = torch.randn(inner, columns, device=device).to(a.dtype)
        yield 2 * rows * inner * columns / timer.time(partial(torch.mm, a, b)) / rate


def _measure_attention(
    timer: SynchronizedTimer, device: torch.device, size: int, dtype: str, rate: float, is_backward: bool
) -> Iterator[float]:
    """Yield the fractions that causal attention reaches; pairs that the mask excludes do not count."""
    import torch
    from torch.nn import functional

    heads = max(1, size // 256)
    for tokens in (max(64, size // 4), max(128, size // 2)):
        given = [torch.randn(1, heads, tokens, _HEAD, device=device).to(_get_dtype(dtype)) for _ in range(3)]
        q, k, v = (one.requires_grad_() for one in given)
        flops = 2.0 * heads * tokens**2 * _HEAD
        result = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        other = torch.ones_like(result)
        calls: dict[bool, Callable[[], Any]] = {
            False: partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True),
            True: partial(torch.autograd.grad, result, (q, k, v), other, retain_graph=True),
        }
        yield (2.5 if is_backward else 1.0) * flops / timer.time(calls[is_backward]) / rate


def _measure_memory(timer: SynchronizedTimer, device: torch.device, copied: int, bandwidth: float) -> Iterator[float]:
    """Yield the fractions of a copy's rate that other kernels reach, which read and write each number once."""
    import torch
    from torch.nn import functional

    a, b, out = (torch.ones(copied // (4 * _WIDTH), _WIDTH, device=device) for _ in range(3))
    kernels: list[tuple[int, Callable[[], Any]]] = [
        (3, lambda: torch.add(a, b, out=out)),
        (3, lambda: torch.mul(a, b, out=out)),
        (2, lambda: torch.relu_(a)),
        (2, lambda: functional.layer_norm(a, a.shape[-1:])),
    ]
    for tensors, kernel in kernels:
        yield tensors * a.numel() * a.element_size() / timer.time(kernel) / bandwidth
