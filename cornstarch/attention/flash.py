"""FlashAttention-4's own package (`flash-attn-4`): whether it is there and runs, and where it keeps what it compiles.

torch calls the same two functions of it (`torch.nn.attention._fa4`), but hands on no masks of documents and spans.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

TRIED = ("4.0.0b36",)
"""Versions whose insides are as `flash_kernels` takes them to be."""
_GPUS = (9,)  # by the first number of their compute capability: Hopper, where it was tried
_KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
GRADIENTS = ("dq", "dk", "dv")
"""What the package calls the tensors that it writes gradients of query, key and value to."""


@cache
def has_flash() -> bool:
    """Whether FlashAttention-4's package is there, in a version that was tried."""
    try:
        if importlib.metadata.version("flash-attn-4") not in TRIED:
            return False
        package()
        importlib.import_module("cornstarch.attention.flash_kernels")
    except Exception:  # of many kinds, by versions of what it is made of
        return False
    return True


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
