"""How one stage of a model is sharded over its ranks."""

import sys

from cornstarch.parallel import ddp_fsdp, low_bandwidth
from cornstarch.parallel.context import register_context_parallel_mode, shard_items, shard_tokens
from cornstarch.parallel.ddp_fsdp import apply_data_parallel, wrapping_units
from cornstarch.parallel.encoder_balancing import attach_encoder_balancing, balance_encoders
from cornstarch.parallel.gradients import clip_gradients
from cornstarch.parallel.loading import full_read_reason, load_partial, load_sharded
from cornstarch.parallel.low_bandwidth import register_compression
from cornstarch.parallel.mesh import data_mesh
from cornstarch.parallel.passes import apply_cp, apply_tp
from cornstarch.parallel.tensor import ColumnParallelLinear, RowParallelLinear, shard_tensors
from cornstarch.parallel.zero1 import Zero1

# Names in the documentation of earlier releases.
lend_items, lending, loaded_whole = attach_encoder_balancing, balance_encoders, full_read_reason
# Import paths there.
for _name, _module in {"data": ddp_fsdp, "units": ddp_fsdp, "exchange": low_bandwidth}.items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _module

__all__ = [
    "ColumnParallelLinear", "RowParallelLinear", "Zero1", "apply_cp", "apply_data_parallel", "apply_tp",
    "attach_encoder_balancing", "balance_encoders", "clip_gradients", "data_mesh", "full_read_reason", "lend_items",
    "lending", "load_partial", "load_sharded", "loaded_whole", "register_compression",
    "register_context_parallel_mode", "shard_items", "shard_tensors", "shard_tokens", "wrapping_units",
]  # fmt: skip
