"""Linear layers that are sharded over ranks, and the collectives between them, each with the one its gradient needs.

    column: each rank has some of the outputs            row: each rank has some of the inputs

        x (full)                                              x (sharded)
        |  copy_to_ranks: gradients of x are summed           |
        x @ W[my outputs]                                     x @ W[my inputs]
        |                                                     |  reduce_from_ranks
        y (sharded), or full after gather_from_ranks          y (full), + bias

A column layer followed by a row layer needs one collective in the forward pass and one in the backward pass. Weights
are DTensors; computation is on plain local tensors, because a DTensor's operations cost several times a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.pytorch_utils import Conv1D

from cornstarch.errors import ConfigError
from cornstarch.kernels.fp8 import LocalProduct
from cornstarch.parallel.collective_ops import (
    RankGroup,
    SequenceShards,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    scatter_to_ranks,
)
from cornstarch.parallel.tensor.shard_boxes import ShardSpec, shard_parameter, to_local_parameter

Use = Callable[[Tensor], Tensor]

# ------------------------------------------------------------------------------------------------ linear layers


class SharedInput:
    """One copy of an activation for queries, keys and values: with three, its gradient would be reduced three times."""

    def __init__(self) -> None:
        self.readers = 0
        self._left = 0
        self._given: Tensor | None = None
        self._copy: Tensor | None = None

    def copy(self, x: Tensor, group: RankGroup) -> Tensor:
        """Return the copy of `x`; it is released with the last reader."""
        if self._given is not x or self._copy is None:
            self._given, self._copy, self._left = x, copy_to_ranks(x, group), self.readers
        copied = self._copy
        self._left -= 1
        if self._left <= 0:
            self._given = self._copy = None
        return copied


class ShardedLayer(nn.Module):
    """A layer of which each rank computes a part. Layers become sharded by a change of class, in place."""

    group: RankGroup
    is_transposed = False  # whether the weight is [inputs, outputs], as in GPT-2

    def _create(self: Any, mesh: DeviceMesh, *options: Any) -> None:
        _check_mesh(mesh, type(self).__name__)
        nn.Linear.__init__(self, *options)
        for parameter in self.parameters():
            if not parameter.is_meta:
                dist.broadcast(parameter.detach(), group=mesh.get_group(), group_src=0)

    @classmethod
    def _convert(cls, linear: nn.Module, mesh: DeviceMesh, **attributes: Any) -> Self:
        _check_mesh(mesh, cls.__name__)
        if isinstance(linear, Conv1D):
            inputs, outputs = linear.weight.shape
            linear.__dict__.update(in_features=inputs, out_features=outputs, is_transposed=True)
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear.__dict__.update(group=RankGroup.of(mesh.get_group()), **attributes)
        return linear

    def _local_weight(self) -> Tensor:
        weight = to_local_parameter(self.weight)
        return weight.t() if self.is_transposed else weight

    def _shard_parameters(self, mesh: DeviceMesh, dims: dict[str, int], parts: tuple[int, ...], what: str) -> None:
        """Shard parameters along their dims; `what` the parts are is for the message where they do not divide."""
        for size in parts:
            if size % mesh.size():
                raise ConfigError(f"{size} {what} cannot be cut evenly over {mesh.size()} ranks.")
        for name, dim in dims.items():
            if self._parameters[name] is not None:
                shard_parameter(self, name, ShardSpec(dim, parts, mesh.size()), mesh)


def _check_mesh(mesh: Any, layer: str) -> None:
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
        return
    found = f"a mesh of {mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else repr(mesh)
    raise ConfigError(
        f"{layer}: mesh = {found}; expected a DeviceMesh of one axis, the ranks that share the layer: "
        'init_device_mesh("cuda", (2,)), or one axis of a larger mesh, mesh["tp"].'
    )


class _ColumnInput(ShardedLayer):
    """A layer that reads full activations and computes this rank's outputs."""

    copies = True  # false where tokens were gathered for the layer: the gather reduces gradients already
    shared: SharedInput | None = None

    def _copy_input(self, x: Tensor) -> Tensor:
        if not self.copies:
            return x
        return self.shared.copy(x, self.group) if self.shared is not None else copy_to_ranks(x, self.group)


class ColumnParallelLinear(_ColumnInput, LocalProduct, nn.Linear):
    """A linear layer of which each rank has some of the outputs.

    Create a new one, or convert a layer that is the same on all ranks (`from_linear`).
    """

    gather = False

    def __init__(
        self, in_features: int, out_features: int, mesh: DeviceMesh, bias: bool = True, gather: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        """Create a layer with the weights of the first rank.

        Args:
            in_features: Of the full layer.
            out_features: Of the full layer.
            mesh: The ranks; it has one axis.
            bias: Whether there is a bias.
            gather: Return all outputs on every rank, not only the rank's own.
            device: The device of the parameters.
            dtype: The dtype of the parameters.
        """
        self._create(mesh, in_features, out_features, bias, device, dtype)
        self._shard(mesh, (out_features,), gather)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: DeviceMesh, parts: tuple[int, ...] | None = None, gather: bool = False
    ) -> Self:
        """Shard a linear layer in place and return it.

        Args:
            linear: The full layer.
            mesh: The ranks; it has one axis.
            parts: The sizes of what is fused in its outputs, each of which is sharded.
            gather: Return all outputs on every rank.
        """
        layer = cls._convert(linear, mesh)
        layer._shard(mesh, parts or (layer.out_features,), gather)
        return layer

    def _shard(self, mesh: DeviceMesh, parts: tuple[int, ...], gather: bool) -> None:
        if gather and len(parts) > 1:
            raise ConfigError("A fused layer cannot give back all outputs: they would be in another order.")
        self.__dict__.update(group=RankGroup.of(mesh.get_group()), gather=gather)
        self._shard_parameters(mesh, {"weight": int(self.is_transposed), "bias": 0}, parts, "outputs")

    @property
    def local_sizes(self) -> tuple[int, int]:
        return self.in_features, self.out_features // self.group.count

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(self._copy_input(x), self._local_weight(), to_local_parameter(self.bias))
        return gather_from_ranks(y, self.group) if self.gather else y


class RowParallelLinear(ShardedLayer, LocalProduct, nn.Linear):
    """A linear layer of which each rank has some of the inputs; the bias is replicated."""

    split = False
    tokens: SequenceShards | None = None  # with sequence parallelism: reduces outputs and scatters them along tokens

    def __init__(
        self, in_features: int, out_features: int, mesh: DeviceMesh, bias: bool = True, split: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        """See `ColumnParallelLinear`; with `split`, inputs are full, and each rank uses its own."""
        self._create(mesh, in_features, out_features, bias, device, dtype)
        self._shard(mesh, split)

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh, split: bool = False) -> Self:
        """Shard a linear layer in place and return it; with `split`, it takes full inputs."""
        layer = cls._convert(linear, mesh)
        layer._shard(mesh, split)
        return layer

    def _shard(self, mesh: DeviceMesh, split: bool) -> None:
        self.__dict__.update(group=RankGroup.of(mesh.get_group()), split=split)
        self._shard_parameters(mesh, {"weight": int(not self.is_transposed)}, (self.in_features,), "inputs")

    @property
    def local_sizes(self) -> tuple[int, int]:
        return self.in_features // self.group.count, self.out_features

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(scatter_to_ranks(x, self.group) if self.split else x, self._local_weight(), None)
        # The bias is added once, after the sum. With sharded tokens its gradient must be summed over ranks.
        if self.tokens is not None:
            y = self.tokens.reduce_scatter(y)
            return y if self.bias is None else y + copy_to_ranks(self.bias, self.group)
        y = reduce_from_ranks(y, self.group)
        return y if self.bias is None else y + self.bias


class ReplicatedColumnLinear(_ColumnInput, nn.Linear):
    """A linear layer with fewer heads than ranks: it is replicated, and each rank computes the heads that it needs."""

    rows = slice(0)

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh, heads: int) -> Self:
        width = linear.out_features // heads
        head = mesh.get_local_rank() * heads // mesh.size()
        return cls._convert(linear, mesh, rows=slice(head * width, (head + 1) * width))

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else copy_to_ranks(self.bias, self.group)[self.rows]
        weight = copy_to_ranks(self.weight, self.group)[self.rows]
        return nn.functional.linear(self._copy_input(x), weight, bias)


class PartlyReplicatedLinear(ShardedLayer, nn.Linear):
    """A replicated linear layer whose last outputs go to each rank's own heads (rotary keys of MLA)."""

    last = 0

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh, last: int) -> Self:
        return cls._convert(linear, mesh, last=last)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        first, last = y.split([y.shape[-1] - self.last, self.last], -1)
        return torch.cat([first, copy_to_ranks(last, self.group)], -1)


# ------------------------------------------------------------------------------------------------ any module


def bind_local_parameters(module: nn.Module, uses: dict[str, Use]) -> None:
    """Let `self.weight` be what `uses["weight"]` returns while a module of any class runs its forward."""
    if "parameter_uses" in module.__dict__:
        module.__dict__["parameter_uses"].update(uses)
        return
    module.__dict__["parameter_uses"] = dict(uses)
    module.__class__ = _derive_bound_class(type(module))  # type: ignore[arg-type]


@cache  # modules of one class share the class made of it: layers that differ in a class would not share a graph
def _derive_bound_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        values = {name: use(getattr(self, name)) for name, use in self.parameter_uses.items()}  # type: ignore
        self.__dict__.update(values)  # attributes are found before parameters
        try:
            return kind.forward(self, *inputs, **options)
        finally:
            for name in values:
                del self.__dict__[name]

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def sum_parameter_gradients(module: nn.Module, group: RankGroup) -> None:
    """Sum the gradients of a module's own parameters over ranks, which use them differently."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if names:
        bind_local_parameters(module, {name: lambda parameter: copy_to_ranks(parameter, group) for name in names})


def change_output(output: Any, change: Use) -> Any:
    """Change the activation of a layer's output, which may be the first of several."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def sum_output_over_ranks(module: nn.Module, group: RankGroup) -> None:
    """Let a module take full activations and return the sum over ranks of what each computes."""

    def copy(value: Any) -> Any:
        return copy_to_ranks(value, group) if isinstance(value, Tensor) and value.is_floating_point() else value

    def enter(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(copy, inputs)), {name: copy(value) for name, value in options.items()}

    def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
        return change_output(output, lambda partial: reduce_from_ranks(partial, group))

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
