"""Every private name of torch and transformers that is used, and every branch on a version, in one place.

Each entry says which versions it is for, why it is needed, and when it can go.
"""

from __future__ import annotations

from typing import Any


def is_flattened(parameter: Any) -> bool:
    """Say whether FSDP1 keeps a parameter in a flat one, cut into intervals.

    torch 2.11 to 2.15 mark it on the parameter, and have no public way to ask: a model inside the outermost
    `FullyShardedDataParallel` shows intervals in place of parameters and nothing that says so. Goes when FSDP1 goes.
    """
    return bool(getattr(parameter, "_fsdp_flattened", False))
