"""Linear layers that are cut over ranks.

    column: each rank has some of the outputs            row: each rank has some of the inputs

        x (whole)                                             x (cut)
        |  copy_in: gradients of x are added up               |
        x @ W[my outputs]                                     x @ W[my inputs]
        |                                                     |  add_up
        y (cut), or whole after `join`                        y (whole), + bias

A column layer followed by a row layer needs one exchange in the forward pass and one in the backward pass. Weights are
DTensors, which say what part they are; computing happens on plain local tensors, because a DTensor's own operations
cost several times a small kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError
from cornstarch.parallel.tensor.collectives import Group, add_up, copy_in, join, take_part
from cornstarch.parallel.tensor.order import Cut, distribute, local_use


class SharedInput:
    """One copy of an activation for layers that read the same one: their gradients are added up here, then once.

    Queries, keys and values read the same activation. Each with a copy of its own would have it added up three times.
    """

    def __init__(self) -> None:
        self.readers = 0
        self._left = 0
        self._given: Tensor | None = None
        self._copy: Tensor | None = None

    def copy(self, x: Tensor, group: Group) -> Tensor:
        """Return the copy of `x`; the last reader lets go of it."""
        if self._given is not x or self._copy is None:
            self._given, self._copy, self._left = x, copy_in(x, group), self.readers
        copied = self._copy
        self._left -= 1
        if self._left <= 0:
            self._given = self._copy = None
        return copied


def check_mesh(mesh: Any, layer: str) -> None:
    """Refuse what is no mesh of one axis: a number of ranks does not say which ranks share a layer."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
        return
    found = f"a mesh of {mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else repr(mesh)
    raise ConfigError(
        f"{layer}: mesh = {found}; expected a DeviceMesh of one axis, the ranks that share the layer: "
        'init_device_mesh("cuda", (2,)), or one axis of a larger mesh, mesh["tp"].'
    )


class CutLayer(nn.Module):
    """What cut layers know beyond their parameters."""

    group: Group
    cuts: dict[str, Cut]

    def _settle(self, mesh: DeviceMesh) -> None:
        self.__dict__["group"] = mesh.get_group()


class ColumnParallelLinear(CutLayer, nn.Linear):
    """A linear layer of which each rank has some of the outputs.

    Made anew, or of a layer that is there (`from_linear`), which must be the same on all ranks.
    """

    gather = False
    copies = True
    shared: SharedInput | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        bias: bool = True,
        gather: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        """Make a layer.

        Args:
            in_features: Of the whole layer.
            out_features: Of the whole layer.
            mesh: The ranks; it has one axis.
            bias: Whether there is one.
            gather: Give back all outputs on every rank, not only the rank's own.
            device: Where the parameters are.
            dtype: What type they have.
        """
        check_mesh(mesh, type(self).__name__)
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        _same_everywhere(self, mesh)
        self._cut(mesh, (out_features,), gather)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: DeviceMesh, parts: tuple[int, ...] | None = None, gather: bool = False
    ) -> Self:
        """Cut a linear layer in place and return it.

        Args:
            linear: The layer, whole.
            mesh: The ranks; it has one axis.
            parts: The sizes of what is fused in its outputs, each of which is cut.
            gather: Give back all outputs on every rank.
        """
        check_mesh(mesh, cls.__name__)
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear._cut(mesh, parts or (linear._outputs,), gather)
        return linear

    @property
    def _outputs(self) -> int:
        return self.out_features

    def _cut(self, mesh: DeviceMesh, parts: tuple[int, ...], gather: bool) -> None:
        _check_divides(parts, mesh.size(), "outputs")
        if gather and len(parts) > 1:
            raise ConfigError("A fused layer cannot give back all outputs: they would be in another order.")
        self._settle(mesh)
        self.__dict__["gather"] = gather
        for name in ("weight", "bias"):
            if self._parameters[name] is not None:
                distribute(self, name, Cut(0, parts, mesh.size()), mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, or all."""
        x = _copied(self, x)
        y = self._apply_to(x)
        return join(y, self.group) if self.gather else y

    def _apply_to(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, local_use(self.weight), local_use(self.bias))


class RowParallelLinear(CutLayer, nn.Linear):
    """A linear layer of which each rank has some of the inputs; the bias is whole everywhere."""

    split = False
    tokens: Any = None
    """Where activations are cut along tokens: what deals them out."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: DeviceMesh,
        bias: bool = True,
        split: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        """Make a layer.

        Args:
            in_features: Of the whole layer.
            out_features: Of the whole layer.
            mesh: The ranks; it has one axis.
            bias: Whether there is one.
            split: Take whole inputs, of which each rank uses its own.
            device: Where the parameters are.
            dtype: What type they have.
        """
        check_mesh(mesh, type(self).__name__)
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        _same_everywhere(self, mesh)
        self._cut(mesh, split)

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh, split: bool = False) -> Self:
        """Cut a linear layer in place and return it.

        Args:
            linear: The layer, whole.
            mesh: The ranks; it has one axis.
            split: Take whole inputs, of which each rank uses its own.
        """
        check_mesh(mesh, cls.__name__)
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear._cut(mesh, split)
        return linear

    def _cut(self, mesh: DeviceMesh, split: bool) -> None:
        _check_divides((self.in_features,), mesh.size(), "inputs")
        self._settle(mesh)
        self.__dict__["split"] = split
        distribute(self, "weight", Cut(1, (self.in_features,), mesh.size()), mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        x = take_part(x, self.group) if self.split else x
        y = self._apply_to(x)
        if self.tokens is not None:
            y = self.tokens.add_up(y)
            return y if self.bias is None else y + copy_in(self.bias, self.group)
        y = add_up(y, self.group)
        return y if self.bias is None else y + self.bias

    def _apply_to(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, local_use(self.weight))


class ColumnParallelConv1D(ColumnParallelLinear):
    """The same of a layer whose weight stands the other way round, as GPT-2 has them."""

    @property
    def _outputs(self) -> int:
        return self.weight.shape[1]

    def _cut(self, mesh: DeviceMesh, parts: tuple[int, ...], gather: bool) -> None:
        _check_divides(parts, mesh.size(), "outputs")
        self._settle(mesh)
        self.__dict__["gather"] = gather
        self.in_features, self.out_features = self.weight.shape
        distribute(self, "weight", Cut(1, parts, mesh.size()), mesh)
        distribute(self, "bias", Cut(0, parts, mesh.size()), mesh)

    def _apply_to(self, x: Tensor) -> Tensor:
        return x @ local_use(self.weight) + local_use(self.bias)

    def extra_repr(self) -> str:
        """Return its sizes."""
        return f"{tuple(self.weight.shape)}"


class RowParallelConv1D(RowParallelLinear):
    """The same of a layer whose weight stands the other way round."""

    def _cut(self, mesh: DeviceMesh, split: bool) -> None:
        _check_divides((self.weight.shape[0],), mesh.size(), "inputs")
        self._settle(mesh)
        self.__dict__["split"] = split
        self.in_features, self.out_features = self.weight.shape
        distribute(self, "weight", Cut(0, (self.weight.shape[0],), mesh.size()), mesh)

    def _apply_to(self, x: Tensor) -> Tensor:
        return x @ local_use(self.weight)

    def extra_repr(self) -> str:
        """Return its sizes."""
        return f"{tuple(self.weight.shape)}"


class SharedColumnLinear(CutLayer, nn.Linear):
    """A linear layer with fewer heads than ranks: all have it whole, and each computes the heads that it needs."""

    rows = slice(0)
    copies = True
    shared: SharedInput | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh, heads: int) -> Self:
        """Change a linear layer in place and return it."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear._settle(mesh)
        width = linear.out_features // heads
        head = mesh.get_local_rank() * heads // mesh.size()
        linear.__dict__["rows"] = slice(head * width, (head + 1) * width)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of this rank's head."""
        x = _copied(self, x)
        bias = None if self.bias is None else copy_in(self.bias, self.group)[self.rows]
        return nn.functional.linear(x, copy_in(self.weight, self.group)[self.rows], bias)


class PartlySharedLinear(CutLayer, nn.Linear):
    """A linear layer that all ranks have whole, whose last outputs go to each rank's own heads (rotary keys of MLA)."""

    last = 0

    @classmethod
    def from_linear(cls, linear: nn.Linear, mesh: DeviceMesh, last: int) -> Self:
        """Change a linear layer in place and return it."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        linear._settle(mesh)
        linear.__dict__["last"] = last
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        y = nn.functional.linear(x, self.weight, self.bias)
        first, last = y.split([y.shape[-1] - self.last, self.last], -1)
        return torch.cat([first, copy_in(last, self.group)], -1)


def _copied(layer: ColumnParallelLinear | SharedColumnLinear, x: Tensor) -> Tensor:
    """Return what a layer reads; whoever gathered tokens for it adds up the gradients already."""
    if not layer.copies:
        return x
    return layer.shared.copy(x, layer.group) if layer.shared is not None else copy_in(x, layer.group)


# ------------------------------------------------------------------------------------------------ any module

Use = Callable[[Tensor], Tensor]


def with_local_parameters(module: nn.Module, uses: dict[str, Use]) -> None:
    """Let a module of any class compute with what `uses` make of its own parameters.

    While its forward runs, `self.weight` is what the use returns. Names, and what others see, stay.
    """
    kind = type(module)
    earlier: dict[str, Use] | None = module.__dict__.get("parameter_uses")
    if earlier is not None:
        earlier.update(uses)
        return

    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        values = {name: use(getattr(self, name)) for name, use in self.parameter_uses.items()}  # type: ignore
        self.__dict__.update(values)  # found before the parameters are
        try:
            return kind.forward(self, *inputs, **options)
        finally:
            for name in values:
                del self.__dict__[name]

    module.__dict__["parameter_uses"] = dict(uses)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def with_summed_output(module: nn.Module, group: Group) -> None:
    """Let a module take whole activations, of which each rank makes its share of the output; shares are added up."""

    def enter(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(copied, inputs)), {name: copied(value) for name, value in options.items()}

    def copied(value: Any) -> Any:
        return copy_in(value, group) if isinstance(value, Tensor) and value.is_floating_point() else value

    def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (add_up(output[0], group), *output[1:])
        return add_up(output, group)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _same_everywhere(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the parameters of the first."""
    group = mesh.get_group()
    for parameter in module.parameters():
        if not parameter.is_meta:
            torch.distributed.broadcast(parameter.detach(), group=group, group_src=0)


def _check_divides(parts: tuple[int, ...], ranks: int, what: str) -> None:
    for size in parts:
        if size % ranks:
            raise ConfigError(f"{size} {what} cannot be cut evenly over {ranks} ranks.")


__all__ = ["ColumnParallelLinear", "RowParallelLinear"]
