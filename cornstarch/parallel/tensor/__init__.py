"""Tensor parallelism: each rank has a part of every large layer."""

from cornstarch.parallel.tensor.adapters import cut_added_adapters
from cornstarch.parallel.tensor.apply import shard_tensors
from cornstarch.parallel.tensor.check import check_tensor_plan
from cornstarch.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from cornstarch.parallel.tensor.order import Held, full_tensors, is_cut, load_full_tensors, original_boxes, seen_whole
from cornstarch.parallel.tensor.plan import kept_whole, tensor_plan
from cornstarch.parallel.tensor.styles import Style
from cornstarch.parallel.tensor.vocabulary import vocabulary_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "Held",
    "RowParallelLinear",
    "Style",
    "check_tensor_plan",
    "cut_added_adapters",
    "full_tensors",
    "is_cut",
    "kept_whole",
    "load_full_tensors",
    "original_boxes",
    "seen_whole",
    "shard_tensors",
    "tensor_plan",
    "vocabulary_cross_entropy",
]
