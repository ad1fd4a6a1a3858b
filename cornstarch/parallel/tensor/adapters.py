"""LoRA on layers that are cut.

column:  x -> A -> B, with B cut by its outputs as the layer is; A is whole
row:     x (cut) -> A, cut by its inputs, added up -> B; B is whole
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cornstarch.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, SharedColumnLinear
from cornstarch.parallel.tensor.order import Cut


def cut_adapters(wrapper: Any, layer: Any, mesh: DeviceMesh) -> None:
    """Cut the LoRA matrices around a layer that has been cut."""
    if wrapper is layer:
        return
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


__all__ = ["cut_adapters"]
