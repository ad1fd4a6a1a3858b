"""Tensors whose memory a worker process shares with the process that it works for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def build_shared_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in shared memory, with any values.

    `DataLoader` copies what a worker returns into such memory; values that are computed there are not copied again, as
    in torch's own collate function. `torch.empty(...).share_memory_()` copies the memory that it replaces. torch has no
    public function for it in any version so far.
    """
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=dtype).set_(storage).view(*shape)
