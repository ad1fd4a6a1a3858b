"""LoRA on layers that are cut.

column:  x -> A -> B, with B cut by its outputs as the layer is; A is whole
row:     x (cut) -> A, cut by its inputs, added up -> B; B is whole
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import UnsupportedModelError
from cornstarch.parallel.tensor.layers import ColumnParallelLinear, CutLayer, RowParallelLinear, SharedColumnLinear
from cornstarch.parallel.tensor.noise import separate_adapter_noise
from cornstarch.parallel.tensor.order import Cut

ADAPTER_PARTS = {"base_layer", "lora_A", "lora_B"}


def check_adapters(name: str, wrapper: nn.Module, can_be_cut: bool) -> None:
    """Refuse adapters around a layer that is cut, if they are not plain LoRA or the layer is no plain linear one."""
    held = {part for part, inside in wrapper.named_children() if any(True for _ in inside.parameters())}
    if not can_be_cut or held - ADAPTER_PARTS:
        others = ", ".join(sorted(held - ADAPTER_PARTS)) or type(wrapper).__name__
        raise UnsupportedModelError(
            f"{name} has adapters that tensor parallelism cannot cut ({others}); LoRA on linear layers can be."
        )


def cut_added_adapters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the LoRA matrices that were put around the layers of a model that is cut already."""
    for name, wrapper in list(model.named_modules()):
        layer = getattr(wrapper, "base_layer", None)
        if layer is None or not (isinstance(layer, CutLayer) or "cuts" in layer.__dict__):
            continue
        check_adapters(name, wrapper, isinstance(layer, ColumnParallelLinear | RowParallelLinear | SharedColumnLinear))
        shared = layer.__dict__.pop("shared", None)  # there may be dropout before each
        if shared is not None:
            shared.readers -= 1
        cut_adapters(wrapper, layer, mesh)


def cut_adapters(wrapper: Any, layer: Any, mesh: DeviceMesh) -> None:
    """Cut the LoRA matrices around a layer that has been cut."""
    if wrapper is layer:
        return
    separate_adapter_noise(wrapper, layer, mesh.get_group())
    for adapter in wrapper.lora_A:
        before, after = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
        if isinstance(layer, RowParallelLinear):
            RowParallelLinear.from_linear(before, mesh)
        elif isinstance(layer, SharedColumnLinear):
            SharedColumnLinear.from_linear(after, mesh, layer.weight.shape[0] // (layer.rows.stop - layer.rows.start))
        else:
            assert isinstance(layer, ColumnParallelLinear)
            cut: Cut = layer.cuts["weight"]
            ColumnParallelLinear.from_linear(after, mesh, cut.parts, layer.gather)


__all__ = ["check_adapters", "cut_adapters", "cut_added_adapters"]
