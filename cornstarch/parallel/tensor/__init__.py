"""Tensor parallelism: each rank has a part of every large layer."""

from cornstarch.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from cornstarch.parallel.tensor.regions import find_unsharded_modules, tensor_plan
from cornstarch.parallel.tensor.shard_boxes import (
    ShardBox,
    gather_full_tensors,
    is_sharded,
    load_full_tensors,
    original_boxes,
    use_full_shapes,
)
from cornstarch.parallel.tensor.shard_layers import check_tensor_plan, shard_added_adapters, shard_tensors
from cornstarch.parallel.tensor.styles import Style
from cornstarch.parallel.tensor.vocabulary import vocabulary_cross_entropy

__all__ = [
    "ColumnParallelLinear", "RowParallelLinear", "ShardBox", "Style", "check_tensor_plan", "find_unsharded_modules",
    "gather_full_tensors", "is_sharded", "load_full_tensors", "original_boxes", "shard_added_adapters",
    "shard_tensors", "tensor_plan", "use_full_shapes", "vocabulary_cross_entropy",
]  # fmt: skip
