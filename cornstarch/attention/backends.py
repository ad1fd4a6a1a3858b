"""The registry of attention kernels, and which of them runs.

An `AttentionBackend` is one kernel: the masks that it reads, the devices and layers that it supports, and its call. To
add a kernel, write a subclass in a file of its own, call `register_attention_backend`, and import the file in
`cornstarch/attention/__init__.py`.

A backend is selected once per forward pass, where the mask is built (`select_backend`). Layers then find the backend by
the type of their mask (`run_attention`). For a layer that it does not support (dropout, another head size), the mask is
converted for the next more general one: kernels for documents -> FlexAttention -> scaled_dot_product_attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cornstarch.attention.mask import MaskSpec
from cornstarch.errors import ConfigError, UnsupportedModelError

AttentionChoice = Literal["auto", "flex", "sdpa", "cudnn", "varlen"]
"""Values of the config key `attention`."""

# cuDNN's kernels are the fastest on GPUs that have them; the next backend takes what they do not support.
_SDPA_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Arguments by which a layer changes its attention scores in a way that masks as data do not express.
_UNSUPPORTED_SCORES = ("position_bias", "indices", "block_indices", "head_mask")
_MAX_HEAD_DIM = 128  # of kernels for documents, on all GPUs

_choice: ContextVar[AttentionChoice | None] = ContextVar("cornstarch_attention", default=None)


class AttentionBackend(ABC):
    """One attention kernel."""

    name: ClassVar[str]
    mask_type: ClassVar[type]
    """Layers with a mask of this type run on this backend."""
    choices: ClassVar[tuple[AttentionChoice, ...]] = ()
    """Values of `attention` under which `select_backend` may choose it, for causal masks with documents and spans."""
    priority: ClassVar[int] = 0
    """The available backend with the highest priority is selected."""
    auto_capability: ClassVar[tuple[int, int]] = (9, 0)
    """Compute capability from which it is faster than FlexAttention, so that `auto` selects it: Hopper."""
    is_deterministic: ClassVar[bool] = False
    for_sharded_rows: ClassVar[bool] = False
    """Whether its masks are between some queries and some keys of a row, for context parallelism."""
    package: ClassVar[str] = ""
    """The package that it needs, with its version if only some work."""

    def __str__(self) -> str:
        return self.name

    def is_installed(self) -> bool:
        """Whether `package` can be imported."""
        return True

    def is_available(self, device: torch.device, head_dim: int | None) -> bool:
        """Whether its kernels run on a GPU, for heads of this size (None: unknown)."""
        return self.is_installed()

    def build_mask(self, spec: MaskSpec, queries: Tensor | None = None, keys: Tensor | None = None) -> Any:
        """Return the causal mask of a spec: of whole rows, or between these tokens if `for_sharded_rows`."""
        raise NotImplementedError(f"{self.name} cannot be selected")

    @abstractmethod
    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        """Whether it can run a layer with these states [B, H, S, D] and the options of `run`."""

    @abstractmethod
    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, S, H, D] and the attention weights, if there are any.

        Options are those of transformers' attention functions; `dropout`, `scaling`, `softcap` and `s_aux` (sinks) are
        always given.
        """

    @abstractmethod
    def convert_mask(self, mask: Any, query: Tensor, key: Tensor) -> Any:
        """Return the mask for a more general backend, for layers that this one does not support."""


class DocumentBackend(AttentionBackend):
    """A kernel for causal masks with documents and spans, in half precision, without dropout, softcap and sinks."""

    head_dim_multiple: ClassVar[int]

    def supports_head_dim(self, head_dim: int) -> bool:
        """Whether the kernels are correct for heads of this size."""
        return head_dim <= _MAX_HEAD_DIM and head_dim % self.head_dim_multiple == 0

    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        head_dim = query.shape[-1]
        if options["dropout"] != 0 or options["softcap"] is not None or options["s_aux"] is not None:
            return False
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        # On a CPU plain torch stands in for the kernels, for every type and size.
        is_supported = not query.is_cuda or (is_half and self.supports_head_dim(head_dim))
        return is_supported and head_dim == value.shape[-1]

    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
        return self.attend(query, key, value, mask, scale), None

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        """Return the output [B, S, H, D] of states [B, H, S, D]; keys and values may have fewer heads."""

    def convert_mask(self, mask: Any, query: Tensor, key: Tensor) -> Any:
        return mask.block_mask


# ------------------------------------------------------------------------------------------------ registry

ATTENTION_BACKENDS: dict[type, AttentionBackend] = {}
"""Backends by their type of masks."""


def register_attention_backend(backend: AttentionBackend) -> None:
    """Add a backend; no other backend may have its type of masks."""
    other = ATTENTION_BACKENDS.setdefault(backend.mask_type, backend)
    if other is not backend:
        raise ValueError(f"{backend.mask_type.__name__} is the mask of the attention backend {other.name!r} already.")


def run_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend on the backend of the mask, or on a more general one that supports everything the layer asks for."""
    for name in _UNSUPPORTED_SCORES:
        if options.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} changes its attention scores by {name!r}.")
    options |= {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    dense = ATTENTION_BACKENDS[Tensor]  # also for layers without a mask
    backend = ATTENTION_BACKENDS.get(type(attention_mask), dense)
    while not backend.supports(query, value, options):
        attention_mask = backend.convert_mask(attention_mask, query, key)
        backend = ATTENTION_BACKENDS.get(type(attention_mask), dense)
    return backend.run(module, query, key, value, attention_mask, **options)


# ------------------------------------------------------------------------------------------------ choice


@contextmanager
def use_attention(choice: AttentionChoice) -> Iterator[None]:
    """Select attention kernels within this block.

    - `auto`: the fastest kernels that respect the mask: cuDNN's for plain causal rows; for packed documents and
      bidirectional images those of `varlen` if they are installed, else FlexAttention. FlexAttention also under
      `torch.use_deterministic_algorithms`.
    - `flex`: FlexAttention for such masks.
    - `varlen`: FlashAttention-4 or else cuDNN for such masks; FlexAttention for others, such as sliding windows.
    - `sdpa`: torch's choice, with dense masks.
    - `cudnn`: cuDNN's kernels only.
    """
    token = _choice.set(choice)
    try:
        if choice == "sdpa":
            yield
        else:
            with sdpa_kernel(_SDPA_PRIORITY[:1] if choice == "cudnn" else _SDPA_PRIORITY, set_priority=True):
                yield
    finally:
        _choice.reset(token)


def build_checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpointed forward pass and of its recomputation, for torch's `checkpoint`.

    The backward pass runs outside of `use_attention`: without a context, the recomputation would select other kernels,
    which save other tensors.
    """
    choice = _choice.get()
    return nullcontext(), nullcontext() if choice is None else use_attention(choice)


def is_dense_requested() -> bool:
    """Whether `use_attention` asks for dense masks."""
    return _choice.get() == "sdpa"


def select_backend(device: torch.device, head_dim: int | None = None, sharded: bool = False) -> AttentionBackend | None:
    """Return the backend for causal masks with documents and spans; None: FlexAttention, or dense masks on a CPU.

    Args:
        device: The device of the model.
        head_dim: The size of heads, if it is known.
        sharded: Whether rows are sharded over ranks.
    """
    choice = _choice.get() or "auto"
    if device.type != "cuda":
        return None
    for backend in sorted(ATTENTION_BACKENDS.values(), key=lambda one: -one.priority):
        if choice not in backend.choices or backend.for_sharded_rows != sharded:
            continue
        if choice == "auto" and (
            (torch.are_deterministic_algorithms_enabled() and not backend.is_deterministic)
            or torch.cuda.get_device_capability(device) < backend.auto_capability
        ):
            continue
        if backend.is_available(device, head_dim):
            return backend
    return None


def has_range_backend(device: torch.device) -> bool:
    """Whether a kernel reads masks between the tokens of different ranks."""
    return select_backend(device, sharded=True) is not None


def check_attention(choice: AttentionChoice, device: torch.device, half: bool) -> None:
    """Refuse kernels that a device does not have; `half`: whether the run computes in half precision."""
    if choice not in get_args(AttentionChoice):
        raise ConfigError(f"attention = {choice!r}\n  Use one of {', '.join(get_args(AttentionChoice))}.")
    if choice in ("auto", "sdpa"):
        return
    if device.type != "cuda":
        raise ConfigError(
            f"attention = {choice}\n  These kernels need a GPU; this runs on {device.type}. Use auto or sdpa."
        )
    candidates = [backend for backend in ATTENTION_BACKENDS.values() if choice in backend.choices]
    if candidates and not any(backend.is_installed() for backend in candidates):
        packages = " or ".join(dict.fromkeys(backend.package for backend in candidates))
        raise ConfigError(
            f"attention = {choice}\n  {packages} is not installed: pip install 'cornstarch[gpu]', or use auto."
        )
    if candidates and not half:
        raise ConfigError(f"attention = {choice}\n  These kernels compute in bf16 or fp16. Set precision, or use auto.")
