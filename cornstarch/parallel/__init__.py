"""How one stage of a model is sharded over its ranks."""

from cornstarch.parallel.apply import apply_cp, apply_tp
from cornstarch.parallel.context import register_context_parallel_mode, shard_items, shard_tokens
from cornstarch.parallel.data import OwnedParameters, apply_data_parallel
from cornstarch.parallel.encoder_balancing import attach_encoder_balancing, balance_encoders
from cornstarch.parallel.gradients import clip_gradients
from cornstarch.parallel.loading import full_read_reason, load_partial, load_sharded
from cornstarch.parallel.low_bandwidth import register_compression
from cornstarch.parallel.mesh import data_mesh
from cornstarch.parallel.tensor import ColumnParallelLinear, RowParallelLinear, shard_tensors
from cornstarch.parallel.units import wrapping_units

# Names in the documentation of earlier releases.
lend_items, lending, loaded_whole = attach_encoder_balancing, balance_encoders, full_read_reason

__all__ = [
    "ColumnParallelLinear",
    "OwnedParameters",
    "RowParallelLinear",
    "apply_cp",
    "apply_data_parallel",
    "apply_tp",
    "attach_encoder_balancing",
    "balance_encoders",
    "clip_gradients",
    "data_mesh",
    "full_read_reason",
    "lend_items",
    "lending",
    "load_partial",
    "load_sharded",
    "loaded_whole",
    "register_compression",
    "register_context_parallel_mode",
    "shard_items",
    "shard_tensors",
    "shard_tokens",
    "wrapping_units",
]
