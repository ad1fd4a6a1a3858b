"""FlashAttention-4's kernels for pieces of rows, by its own package (`flash-attn-4`).

torch calls the same two functions of it (`torch.nn.attention._fa4`), but hands on neither pieces that are shorter than
their room nor a backward pass of sums that are of more than one call. Both are needed here: spans have gaps between
them, and what a token sees before itself and behind itself is joined.

Tensors are [tokens of all rows, heads, width], token after token.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cornstarch.attention.pieces import Cut

_GPUS = (9,)  # by the first number of their compute capability: Hopper, where it was tried
_KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
GRADIENTS = ("dq", "dk", "dv")
"""What the package calls the tensors that it writes gradients of query, key and value to."""


@cache
def has_flash() -> bool:
    """Whether FlashAttention-4's package is there."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        found = package()
    except Exception:  # of many kinds, by versions of what it is made of
        return False
    return hasattr(found, "_flash_attn_fwd") and hasattr(found, "_flash_attn_bwd")


@cache
def package() -> Any:
    """Return the package's kernels."""
    keep_compiled()
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")  # and works
    return importlib.import_module("flash_attn.cute.interface")


def keep_compiled() -> None:
    """Let the package keep what it compiles, some seconds for each kernel, in a folder that nobody else writes to."""
    if _KEPT in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"cornstarch_{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
        os.environ[_KEPT] = "1"
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder / "flash_attention"))


@cache
def runs_on(device: torch.device) -> bool:
    """Whether there are kernels for a GPU."""
    return has_flash() and torch.cuda.get_device_capability(device)[0] in _GPUS


class Flash:
    """Attention in pieces of rows; see `cornstarch.attention.varlen.Kernel`."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
        """Attend."""
        attend = package()._flash_attn_fwd
        if cut.pieces is None:
            whole = [one.unflatten(0, (cut.rows, -1)) for one in (query, key, value)]
            output, sums = attend(*whole, softmax_scale=cut.scale, causal=True, return_lse=True)[:2]
            return output.flatten(0, 1), sums.transpose(1, 2).flatten(0, 1).contiguous()
        output, sums = attend(query, *_asked(cut, key, value), return_lse=True, **_options(cut))[:2]
        return output, sums.transpose(0, 1).contiguous()

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        sums: Tensor,
        cut: Cut,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients."""
        differentiate = package()._flash_attn_bwd
        found = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        sums = sums.transpose(0, 1)
        if cut.pieces is None:
            states = [one.unflatten(0, (cut.rows, -1)) for one in (query, key, value, output, gradient)]
            sums = sums.unflatten(1, (cut.rows, -1)).transpose(0, 1).contiguous()
            into = {name: one.unflatten(0, (cut.rows, -1)) for name, one in zip(GRADIENTS, found, strict=True)}
            differentiate(*states, sums, softmax_scale=cut.scale, causal=True, **into)
            return found
        states = [query, *_asked(cut, key, value), output, gradient]
        into = dict(zip(GRADIENTS, (found[0], *_asked(cut, *found[1:])), strict=True))
        differentiate(*states, sums.contiguous(), **into, **_options(cut))
        return found


def _asked(cut: Cut, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values so that a token and the first that it sees ahead have the same place."""
    return (key[1:], value[1:]) if cut.ahead else (key, value)


def _options(cut: Cut) -> dict[str, Any]:
    """Return what both functions are told of pieces."""
    assert cut.pieces is not None
    begins, lengths = cut.pieces.to(torch.int32).unbind(0)
    options = {
        "softmax_scale": cut.scale,
        "cu_seqlens_q": begins,
        "cu_seqlens_k": begins,
        "max_seqlen_q": cut.longest,
        "max_seqlen_k": cut.longest,
    }
    if not cut.ahead:
        return {**options, "causal": True}
    used = lengths[:-1]
    return {**options, "window_size_left": 0, "seqused_q": used, "seqused_k": used}
