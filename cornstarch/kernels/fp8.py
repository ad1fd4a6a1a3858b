"""Linear layers with FP8 matrix products, on GPUs that have them: at best twice as fast as bf16.

Weights, activations and gradients keep their precision. Just before each product both factors are scaled to the range
of FP8, by a power of two, so that scaling itself is exact; the product is scaled back in bf16. All three products of a
layer use FP8: its output, the gradient of its input and the gradient of its weight.

Layers stay the same objects with the same parameters; only their class changes. They are fast only when compiled:
scaling is then fused into the kernels before a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cornstarch.compat import multiply_scaled

Scaling = Literal["rowwise", "tensorwise"]
"""Granularity of scales: one per row and column of a product, or one per matrix."""

MIN_DIM = 2048
"""Default minimum of both dimensions of a weight: smaller products gain less time than scaling takes."""

_BLOCK = 16  # dimensions of FP8 products must be multiples of it
_CAPABILITY = (8, 9)
_TINY = 1e-12  # smaller maxima are scaled as if they were this large


def explain_no_fp8(device: torch.device) -> str | None:
    """Return why a device has no FP8 products; None if it has them."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found >= _CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"


def multiply_in_fp8(layers: Iterable[nn.Module], scaling: Scaling, least: int | None = None) -> int:
    """Switch the large linear layers inside of layers to FP8 products, in place; return how many.

    Frozen layers, other subclasses of `nn.Linear`, and layers with a dimension below `least` (default: `MIN_DIM`) or
    not divisible by 16 do not change. Under tensor parallelism the dimensions are those of a rank's shard. Call it
    before compilation. `rowwise` is closer to bf16, `tensorwise` is faster.
    """
    least = MIN_DIM if least is None else least
    count = 0
    for layer in layers:
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            continue
        for module in layer.modules():
            if type(module) is nn.Linear:
                sizes = (module.in_features, module.out_features)  # a sharded weight has another shape
            elif isinstance(module, LocalProduct):
                sizes = module.local_sizes
            else:
                continue
            if min(sizes) < least or any(size % _BLOCK for size in sizes):
                continue
            if isinstance(module, LocalProduct):
                module.multiply = partial(linear_in_fp8, scaling=scaling)
            else:
                module.__class__ = Fp8Linear
                module.scaling = scaling  # type: ignore[assignment]
            count += 1
    return count


class LocalProduct:
    """A linear layer with a class of its own, which multiplies with this rank's part of its weight."""

    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)

    @property
    def local_sizes(self) -> tuple[int, int]:
        """The inputs and outputs of this rank."""
        raise NotImplementedError


def linear_in_fp8(input: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """Return the output of a linear layer in the precision that it would have without FP8."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    if not input.numel():  # an empty tensor has no maximum
        return F.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
    output = _product(input.reshape(-1, weight.shape[1]), weight, scaling)
    output = output.reshape(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias.to(output.dtype)


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 products. `multiply_in_fp8` turns a plain one into it."""

    scaling: Scaling

    def forward(self, input: Tensor) -> Tensor:
        """Return the output in the precision that a plain layer would have."""
        return linear_in_fp8(input, self.weight, self.bias, self.scaling)


# Both factors of a product are given with the summed dimension last: a [M, K] and b [N, K] make a · bᵀ. FP8 kernels
# need this layout in memory, too.


class _Fp8Matrix(NamedTuple):
    """A matrix in FP8 and the factor to scale it back: one number, or one per row."""

    data: Tensor
    scale: Tensor


def _quantize(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> _Fp8Matrix:
    missing = -matrix.shape[1] % _BLOCK
    if missing:
        matrix = F.pad(matrix, (0, missing))
    # In fp32 although the values are bf16: a compiled kernel would otherwise continue with a value that is not rounded
    # yet while other kernels read the rounded one, which may be on the other side of a power of two.
    sizes = matrix.float().abs()
    largest = sizes.amax(1, keepdim=True) if scaling == "rowwise" else sizes.amax()
    # No clamping, neither here nor of the scaled values, which cannot leave the range: Triton may write wrong FP8
    # values next to a clamp (triton-lang/triton#11111).
    factor, back = compute_scales(torch.where(largest > _TINY, largest, _TINY), dtype)
    # Some conversions to FP8 make the largest number of an infinity, and the loss would not show it.
    back = torch.where(largest.isfinite(), back, torch.nan)
    return _Fp8Matrix((matrix * factor.to(matrix.dtype)).to(dtype).contiguous(), back)


def compute_scales(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest powers of two that keep positive numbers in the range of a type, and their inverses."""
    # Computed from the bits of the numbers alone. A division is not exact in compiled kernels: where it decides between
    # two powers of two, one kernel would scale by one of them and another kernel scale back by the other.
    # Both FP8 types end at 1.75 · 2^top. `power` is a number's exponent, plus one if it is above 1.75 · 2^exponent.
    top = math.frexp(torch.finfo(dtype).max)[1] - 1
    power = (largest.view(torch.int32) + 0x1FFFFF) >> 23
    return ((254 + top - power) << 23).view(torch.float32), ((power - top) << 23).view(torch.float32)


def _multiply(a: _Fp8Matrix, b: _Fp8Matrix, exactly: bool) -> Tensor:
    """Return a · bᵀ in bf16; `exactly` accumulates in full precision, as gradients need it."""
    if a.scale.dim() and exactly:
        # The kernel for row scales is slow then. Multiplying by powers of two afterwards is exact as well.
        one = torch.ones_like(a.scale[0, 0])
        product = multiply_scaled(a.data, b.data.t(), one, one, fast=False)
        return product * a.scale.to(product.dtype) * b.scale.t().to(product.dtype)
    scale = b.scale.reshape(1, -1) if b.scale.dim() else b.scale
    return multiply_scaled(a.data, b.data.t(), a.scale, scale, fast=not exactly)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.scaling = scaling
        fine = torch.float8_e4m3fn
        return _multiply(_quantize(rows, fine, scaling), _quantize(weight, fine, scaling), exactly=False).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        fine = torch.float8_e4m3fn
        # With one scale for a whole matrix, gradients need e5m2's range: some are far smaller than others.
        wide = fine if scaling == "rowwise" else torch.float8_e5m2
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            product = _multiply(_quantize(gradient, wide, scaling), _quantize(weight.t(), fine, scaling), exactly=True)
            grad_rows = product.to(rows.dtype)
        if ctx.needs_input_grad[1]:
            columns = _quantize(gradient.t(), wide, scaling)
            product = _multiply(columns, _quantize(rows.t(), fine, scaling), exactly=True)
            grad_weight = product.to(weight.dtype)
        return grad_rows, grad_weight, None


@torch.compiler.allow_in_graph
def _product(rows: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    # When torch 2.11 compiles an autograd function itself, it treats the output as a constant, because an FP8 product
    # has no gradient of its own. As one call in the graph, the function is traced with its backward pass.
    product: Tensor = _Product.apply(rows, weight, scaling)
    return product
