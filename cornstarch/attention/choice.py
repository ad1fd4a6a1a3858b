"""Which kernels attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cornstarch.attention import cudnn, flash
from cornstarch.errors import ConfigError

Way = Literal["auto", "flex", "sdpa", "cudnn", "varlen"]
Maker = Literal["flash", "cudnn"]
"""Whose kernels: FlashAttention-4's, or cuDNN's."""

_HOPPER = (9, 0)  # from here on cuDNN's kernels and FlashAttention-4's are the quickest
_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 128  # heads, for both on all GPUs
# FlashAttention-4's passes round some other widths up differently, and gradients are wrong then (seen: 4.0.0b36, 16).
_STEPS: dict[Maker, int] = {"flash": 32, "cudnn": 8}
_INSTALL = "pip install 'cornstarch[gpu]'"

# cuDNN's kernels are the quickest on the GPUs that have them; what they cannot do, the next takes.
_QUICKEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

_current: ContextVar[Way | None] = ContextVar("cornstarch_attention", default=None)


@contextmanager
def attend_with(way: Way) -> Iterator[None]:
    """Let attention take these kernels, within this block.

    - `auto`: the quickest that respect the mask: cuDNN's for plain causal rows; for packed documents and images that
      see in both directions those of `varlen` where they are installed, else FlexAttention, as under
      `torch.use_deterministic_algorithms`.
    - `flex`: FlexAttention for such masks.
    - `varlen`: FlashAttention-4's kernels or else cuDNN's for such masks; sliding windows and the like, which they do
      not know, take FlexAttention.
    - `sdpa`: torch chooses; such masks are dense.
    - `cudnn`: cuDNN's kernels and no others.
    """
    token = _current.set(way)
    try:
        if way == "sdpa":
            yield
        else:
            with sdpa_kernel(_QUICKEST[:1] if way == "cudnn" else _QUICKEST, set_priority=True):
                yield
    finally:
        _current.reset(token)


def attending_again() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what torch's `checkpoint` runs a forward pass in, and the same pass when it is computed again.

    Backward passes are outside of `attend_with`: other kernels would be taken there, which keep other tensors.
    """
    way = _current.get()
    return nullcontext(), nullcontext() if way is None else attend_with(way)


def check_way(way: Way, device: torch.device, half: bool) -> None:
    """Refuse kernels that a device does not have.

    Args:
        way: What is asked for.
        device: Where it is to run.
        half: Whether it computes in half precision.
    """
    if way not in get_args(Way):
        raise ConfigError(f"attention = {way!r}\n  Use one of {', '.join(get_args(Way))}.")
    if way in ("auto", "sdpa"):
        return
    if device.type != "cuda":
        raise ConfigError(
            f"attention = {way}\n  These kernels need a GPU; this runs on {device.type}. Use auto or sdpa."
        )
    if way == "cudnn" and not cudnn.has_cudnn():
        raise ConfigError(f"attention = {way}\n  cuDNN's own package is not installed: {_INSTALL}, or use auto.")
    if way == "varlen" and not (flash.has_flash() or cudnn.has_cudnn()):
        raise ConfigError(
            f"attention = {way}\n  Neither flash-attn-4 {' or '.join(flash.TRIED)} nor cuDNN's own package is there: "
            f"{_INSTALL}, or use auto."
        )
    if way in ("cudnn", "varlen") and not half:
        raise ConfigError(f"attention = {way}\n  These kernels compute in bf16 or fp16. Set precision, or use auto.")


def takes(maker: Maker, width: int) -> bool:
    """Whether these kernels are right for heads of a width."""
    return width <= _WIDEST and width % _STEPS[maker] == 0


def can_attend(query: Tensor, value: Tensor, maker: Maker) -> bool:
    """Whether kernels take such heads: [B, H, S, D]. On a CPU there is one way for all."""
    width = query.shape[-1]
    if width != value.shape[-1]:
        return False
    return not query.is_cuda or (query.dtype in _HALF and takes(maker, width))


def kernels_of_documents(device: torch.device, width: int | None) -> Maker | None:
    """Return whose kernels attend where masks have documents and spans; None: FlexAttention's, or none at all.

    Args:
        device: Where they run.
        width: Of the heads, if it is known.
    """
    way = _current.get() or "auto"
    if way in ("flex", "sdpa") or device.type != "cuda" or width is None:
        return None
    is_quickest = torch.cuda.get_device_capability(device) >= _HOPPER
    if way == "auto" and (torch.are_deterministic_algorithms_enabled() or not is_quickest):
        return None
    if way != "cudnn" and takes("flash", width) and flash.runs_on(device):
        return "flash"
    planned = takes("cudnn", width) and cudnn.has_cudnn() and cudnn.has_kernels(width, device)
    return "cudnn" if planned else None


def attends_between(device: torch.device) -> bool:
    """Whether queries that see from one place to another are attended for by one kernel that knows such masks."""
    way = _current.get() or "auto"
    if way in ("flex", "sdpa", "cudnn") or device.type != "cuda":
        return False
    if way == "auto" and torch.are_deterministic_algorithms_enabled():
        return False
    return flash.runs_on(device)


def wants_dense() -> bool:
    """Whether masks are to be dense."""
    return _current.get() == "sdpa"
