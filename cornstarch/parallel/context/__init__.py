"""Context parallelism: the tokens of a row, or the items of an encoder, over several ranks."""

from cornstarch.parallel.context.checks import check_tokens
from cornstarch.parallel.context.items import kept_in_one_piece, shard_items
from cornstarch.parallel.context.tokens import (
    Mode,
    expect_layers,
    last_distribution,
    shard_tokens,
    tokens_are_cut,
    unshard_tokens,
    verify_tokens,
    whole_rows,
)

__all__ = [
    "Mode",
    "check_tokens",
    "expect_layers",
    "kept_in_one_piece",
    "last_distribution",
    "shard_items",
    "shard_tokens",
    "tokens_are_cut",
    "unshard_tokens",
    "verify_tokens",
    "whole_rows",
]
