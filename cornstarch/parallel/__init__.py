"""How one stage of a model is spread over its ranks."""

from cornstarch.parallel.apply import spread
from cornstarch.parallel.clipping import clip_gradients
from cornstarch.parallel.context import shard_items, shard_tokens
from cornstarch.parallel.data import apply_data_parallel
from cornstarch.parallel.lending import lend_items, lending
from cornstarch.parallel.loading import load_cut, load_sharded, loaded_whole
from cornstarch.parallel.mesh import data_mesh
from cornstarch.parallel.tensor import ColumnParallelLinear, RowParallelLinear, shard_tensors
from cornstarch.parallel.units import wrapping_units
from cornstarch.parallel.zero1 import OwnedParameters

__all__ = [
    "ColumnParallelLinear",
    "OwnedParameters",
    "RowParallelLinear",
    "apply_data_parallel",
    "clip_gradients",
    "data_mesh",
    "lend_items",
    "lending",
    "load_cut",
    "load_sharded",
    "loaded_whole",
    "shard_items",
    "shard_tensors",
    "shard_tokens",
    "spread",
    "wrapping_units",
]
