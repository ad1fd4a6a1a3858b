"""Context parallelism: the tokens of a row, or the items of an encoder, over several ranks."""

from cornstarch.parallel.context.batch import check_tokens
from cornstarch.parallel.context.encoder_items import explain_whole_items, shard_items
from cornstarch.parallel.context.modes import ContextParallelMode, register_context_parallel_mode
from cornstarch.parallel.context.tokens import (
    Mode,
    get_last_distribution,
    has_sharded_tokens,
    set_expected_layers,
    shard_tokens,
    unshard_tokens,
    use_whole_rows,
    verify_tokens,
)

__all__ = [
    "ContextParallelMode", "Mode", "check_tokens", "explain_whole_items", "get_last_distribution",
    "has_sharded_tokens", "register_context_parallel_mode", "set_expected_layers", "shard_items", "shard_tokens",
    "unshard_tokens", "use_whole_rows", "verify_tokens",
]  # fmt: skip
