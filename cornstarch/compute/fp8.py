"""Linear layers that multiply in 8 bits, where a GPU can: at best twice as quick as in bf16.

Weights, activations and gradients stay as they are. Just before each product its two factors are scaled to the range of
8 bits, by a power of two, so that scaling itself loses nothing; right after it the product is scaled back, in bf16. All
three products of a layer are computed so: its output, the gradients of its input and those of its weights.

Layers stay the same objects with the same parameters; only their class changes. To be quick they must be compiled:
scaling is then part of the kernels before a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cornstarch.compat import scaled_product

Scaling = Literal["rowwise", "tensorwise"]
"""What has a scale of its own: each row and column that is multiplied, or each matrix."""

LEAST = 2048
"""The least that both dimensions of a layer's matrix must be: the products of smaller ones gain less than scaling
takes."""

_BLOCK = 16  # GPUs multiply numbers of 8 bits in blocks of so many
_CAPABILITY = (8, 9)
_TINY = 1e-12  # what is smaller than this everywhere is scaled as if it were so large


def why_not(device: torch.device) -> str | None:
    """Return why a device cannot multiply in 8 bits; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found >= _CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"


def multiply_in_fp8(layers: Iterable[nn.Module], scaling: Scaling, least: int | None = None) -> int:
    """Let the large linear layers inside of layers multiply in 8 bits, in place; return how many do.

    Left as they are: layers in which nothing is trained, linear layers of classes of their own, and those whose
    dimensions are small or no multiples of 16.

    Args:
        layers: The layers of a part, before they are compiled.
        scaling: What has a scale of its own. `rowwise` is closer to bf16, `tensorwise` is quicker.
        least: The least that both dimensions of a matrix must be. Default: `LEAST`.
    """
    least = LEAST if least is None else least
    count = 0
    for layer in layers:
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            continue
        for module in layer.modules():
            if type(module) is nn.Linear and _fits(module, least):
                module.__class__ = Fp8Linear
                module.scaling = scaling  # type: ignore[assignment]
                count += 1
    return count


def _fits(linear: nn.Linear, least: int) -> bool:
    # Not the shape of the weight: what is sharded has another.
    sizes = (linear.in_features, linear.out_features)
    return min(sizes) >= least and not any(size % _BLOCK for size in sizes)


class Fp8Linear(nn.Linear):
    """A linear layer whose products are computed in 8 bits. `multiply_in_fp8` makes it of a plain one."""

    scaling: Scaling

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` times the weight, plus the bias, in the precision that a plain layer would have."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        if not input.numel():  # nothing has no scale
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return F.linear(input, self.weight.to(input.dtype), bias)
        output = _product(input.reshape(-1, self.in_features), self.weight, self.scaling)
        output = output.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)


# ---------------------------------------------------------------------------------------------------- the products
#
# Both factors of a product are given as lines along which it sums: a of (M, K) and b of (N, K) make a · bᵀ. That is how
# they must lie in memory, too.


class _Lines(NamedTuple):
    """A matrix in 8 bits, and what to multiply it by: one number, or one for each line."""

    data: Tensor
    scale: Tensor


def _lines(matrix: Tensor, dtype: torch.dtype, scaling: Scaling) -> _Lines:
    """Return a matrix, whose lines are multiplied, in 8 bits."""
    missing = -matrix.shape[1] % _BLOCK
    if missing:
        matrix = F.pad(matrix, (0, missing))
    # In fp32, though all of it is bf16: a compiled kernel would else go on with a number that is not rounded yet, and
    # leave the rounded one to others, which may be the other side of a power of two.
    sizes = matrix.float().abs()
    largest = sizes.amax(1, keepdim=True) if scaling == "rowwise" else sizes.amax()
    # No clamping, neither here nor of what is scaled, which cannot leave the range. Triton may write numbers of 8 bits
    # wrongly beside it (triton-lang/triton#11111).
    factor, back = _powers_of_two(torch.where(largest > _TINY, largest, _TINY), dtype)
    return _Lines((matrix * factor.to(matrix.dtype)).to(dtype).contiguous(), back)


def _powers_of_two(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest powers of two that keep positive numbers in the range of a type, and one divided by them.

    From the bits of the numbers alone. A division is not exact in compiled kernels; where it decides between two powers
    of two, one kernel would scale by one of them and another kernel scale back by the other.
    """
    # Both types end at 1.75 · 2^top. `power` is the exponent of a number, one more if it is above 1.75 · 2^exponent.
    top = math.frexp(torch.finfo(dtype).max)[1] - 1
    power = (largest.view(torch.int32) + 0x1FFFFF) >> 23
    return ((254 + top - power) << 23).view(torch.float32), ((power - top) << 23).view(torch.float32)


def _multiplied(a: _Lines, b: _Lines, exactly: bool) -> Tensor:
    """Return a · bᵀ in bf16; exactly: with sums in full precision, as gradients need them."""
    if a.scale.dim() and exactly:
        # The kernel for scales of lines is slow then. Powers of two can as well be multiplied afterwards.
        one = torch.ones_like(a.scale[0, 0])
        product = scaled_product(a.data, b.data.t(), one, one, fast=False)
        return product * a.scale.to(product.dtype) * b.scale.t().to(product.dtype)
    scale = b.scale.reshape(1, -1) if b.scale.dim() else b.scale
    return scaled_product(a.data, b.data.t(), a.scale, scale, fast=not exactly)


class _Product(torch.autograd.Function):
    """Rows times a weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        """Return the output of the layer, of the type of its rows."""
        ctx.save_for_backward(rows, weight)
        ctx.scaling = scaling
        fine = torch.float8_e4m3fn
        return _multiplied(_lines(rows, fine, scaling), _lines(weight, fine, scaling), exactly=False).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients of rows and weight, if they are needed."""
        rows, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        fine = torch.float8_e4m3fn
        # One scale for all gradients of a matrix: some are far smaller than others.
        wide = fine if scaling == "rowwise" else torch.float8_e5m2
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            product = _multiplied(_lines(gradient, wide, scaling), _lines(weight.t(), fine, scaling), exactly=True)
            of_rows = product.to(rows.dtype)
        if ctx.needs_input_grad[1]:
            product = _multiplied(_lines(gradient.t(), wide, scaling), _lines(rows.t(), fine, scaling), exactly=True)
            of_weight = product.to(weight.dtype)
        return of_rows, of_weight, None


@torch.compiler.allow_in_graph
def _product(rows: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    """Return rows times a weight.

    When torch 2.11 compiles an autograd function itself it takes its output for a constant, because a product in 8 bits
    has no gradient of its own; left in the graph as one call, it is traced with its backward pass.
    """
    product: Tensor = _Product.apply(rows, weight, scaling)
    return product


__all__ = ["LEAST", "Fp8Linear", "Scaling", "multiply_in_fp8", "why_not"]
