"""The registry of attention kernels, which of them runs, and those of torch itself.

An `AttentionBackend` is one kernel: the masks that it reads, the devices and layers that it supports, and its call. To
add a kernel, write a subclass in a file of its own and call `register_attention_backend`; a kernel of this package is
imported in `cornstarch/attention/__init__.py`, too.

A backend is selected once per forward pass, where the mask is built (`select_backend`). Layers then find the backend by
the type of their mask (`run_attention`). For a layer that it does not support (dropout, another head size), the mask is
converted for the next more general one: kernels for documents -> FlexAttention -> scaled_dot_product_attention.

Shape letters: B rows, H heads of queries, G heads of keys and values, Q queries, K keys, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from cornstarch.attention.mask import MaskSpec, evaluate_mask
from cornstarch.compat.compiler import allow_variants
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.plan.data_options import REGISTERED

AttentionChoice = Literal["auto", "flex", "sdpa", "cudnn", "varlen"]
"""Values of the config key `attention`."""

# cuDNN's kernels are the fastest on GPUs that have them; the next backend takes what they do not support.
_SDPA_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
# Arguments by which a layer changes its attention scores in a way that masks as data do not express.
_UNSUPPORTED_SCORES = ("position_bias", "indices", "block_indices", "head_mask")
_MAX_HEAD_DIM = 128  # of kernels for documents, on all GPUs
_FLEX_MIN_HEAD_DIM = 16

DEFAULT_OPTIONS: dict[str, Any] = {"dropout": 0.0, "scaling": None, "softcap": None, "s_aux": None}
"""Options of transformers' attention functions that a layer may omit."""

_choice: ContextVar[AttentionChoice | None] = ContextVar("cornstarch_attention", default=None)


class AttentionBackend(ABC):
    """One attention kernel."""

    name: ClassVar[str]
    mask_type: ClassVar[type]
    """Layers with a mask of this type run on this backend."""
    choices: ClassVar[tuple[str, ...]] = ()
    """Values of `attention` under which `select_backend` may choose it, for causal masks with documents and spans. A
    name of its own becomes a value of the config key when the backend is registered."""
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    """Types of devices that its kernels run on."""
    needs_half: ClassVar[bool] = False
    """Whether its kernels compute in bf16 and fp16 only."""
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

    needs_half = True
    head_dim_multiple: ClassVar[int]

    def supports_head_dim(self, head_dim: int) -> bool:
        """Whether the kernels are correct for heads of this size."""
        return head_dim <= _MAX_HEAD_DIM and head_dim % self.head_dim_multiple == 0

    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        head_dim = query.shape[-1]
        if options["dropout"] != 0 or options["softcap"] is not None or options["s_aux"] is not None:
            return False
        # On a CPU plain torch stands in for the kernels, for every type and size.
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        return head_dim == value.shape[-1] and (not query.is_cuda or (is_half and self.supports_head_dim(head_dim)))

    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"]
        return self.attend(query, key, value, mask, scale), None

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
        """Return the output [B, Q, H, D] of states [B, H, Q, D]; keys and values may have fewer heads."""

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
    REGISTERED["attention"].update(set(backend.choices).difference(get_args(AttentionChoice)))


def run_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend on the backend of the mask, or on a more general one that supports everything the layer asks for."""
    for name in _UNSUPPORTED_SCORES:
        if options.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} changes its attention scores by {name!r}.")
    options = {**DEFAULT_OPTIONS, **options}
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
        kernels = _SDPA_PRIORITY[:1] if choice == "cudnn" else _SDPA_PRIORITY
        with nullcontext() if choice == "sdpa" else sdpa_kernel(kernels, set_priority=True):
            yield
    finally:
        _choice.reset(token)


def get_chosen_attention() -> AttentionChoice | None:
    """Return the kernels of the innermost `use_attention`; None outside of any."""
    return _choice.get()


def get_attention_choice() -> AttentionChoice:
    return _choice.get() or "auto"


def is_dense_requested() -> bool:
    """Whether `use_attention` asks for dense masks."""
    return _choice.get() == "sdpa"


def select_backend(device: torch.device, head_dim: int | None = None, sharded: bool = False) -> AttentionBackend | None:
    """Return the backend for causal masks with documents and spans, of whole rows or rows `sharded` over ranks."""
    choice = get_attention_choice()
    for backend in sorted(ATTENTION_BACKENDS.values(), key=lambda one: -one.priority):
        if choice not in backend.choices or backend.for_sharded_rows != sharded or device.type not in backend.devices:
            continue
        if (
            choice == "auto"
            and device.type == "cuda"
            and (
                (torch.are_deterministic_algorithms_enabled() and not backend.is_deterministic)
                or torch.cuda.get_device_capability(device) < backend.auto_capability
            )
        ):
            continue
        if backend.is_available(device, head_dim):
            return backend
    return None  # FlexAttention on a GPU, dense masks elsewhere


def has_range_backend(device: torch.device) -> bool:
    """Whether a kernel reads masks between the tokens of different ranks."""
    return select_backend(device, sharded=True) is not None


def check_attention(choice: AttentionChoice, device: torch.device, half: bool) -> None:
    """Refuse kernels that a device does not have; `half`: whether the run computes in half precision."""
    names = [*get_args(AttentionChoice), *sorted(REGISTERED["attention"])]
    if choice not in names:
        raise ConfigError(f"attention = {choice!r}\n  Use one of {', '.join(names)}.")
    if choice in ("auto", "sdpa"):
        return
    candidates = [backend for backend in ATTENTION_BACKENDS.values() if choice in backend.choices]
    devices = {name for backend in candidates for name in backend.devices} or {"cuda"}
    if device.type not in devices:
        needed = "a GPU" if devices == {"cuda"} else " or ".join(sorted(devices))
        raise ConfigError(
            f"attention = {choice}\n  These kernels need {needed}; this runs on {device.type}. Use auto or sdpa."
        )
    if candidates and not any(backend.is_installed() for backend in candidates):
        packages = " or ".join(dict.fromkeys(backend.package for backend in candidates))
        raise ConfigError(
            f"attention = {choice}\n  {packages} is not installed: pip install 'cornstarch[gpu]', or use auto."
        )
    if not half and any(backend.needs_half for backend in candidates):
        raise ConfigError(f"attention = {choice}\n  These kernels compute in bf16 or fp16. Set precision, or use auto.")


# ------------------------------------------------------------------------------------------------ torch's own


def get_flex_attention() -> Callable[..., Any]:
    """Return transformers' FlexAttention, which compiles itself outside of compiled layers."""
    if not torch.compiler.is_compiling():
        # Past torch's limit of variants (layouts, dtypes), it would stop compiling and compute whole score matrices.
        allow_variants()
    found: Callable[..., Any] = AttentionInterface()["flex_attention"]
    return found


class FlexAttentionBackend(AttentionBackend):
    """FlexAttention: every mask function, softcap and sinks, but no dropout and no small heads."""

    name = "flex"
    mask_type = BlockMask

    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        return options["dropout"] == 0 and query.shape[-1] >= _FLEX_MIN_HEAD_DIM

    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        del options["dropout"]
        output, weights = get_flex_attention()(module, query, key, value, mask, **options)
        return output, weights

    def convert_mask(self, mask: BlockMask, query: Tensor, key: Tensor) -> Tensor:
        queries, keys = (torch.arange(states.shape[2], device=query.device) for states in (query, key))
        return evaluate_mask(mask.mask_mod, query.shape[0], queries, keys)


class SdpaBackend(AttentionBackend):
    """torch's scaled_dot_product_attention with a dense mask or none; the plain formula for softcap and sinks."""

    name = "sdpa"
    mask_type = Tensor

    def supports(self, query: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        return True

    def run(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        softcap, sinks = options.pop("softcap"), options.pop("s_aux")
        if softcap is None and sinks is None:
            output, weights = AttentionInterface()["sdpa"](module, query, key, value, mask, **options)
            return output, weights
        scaling, dropout = options["scaling"], options["dropout"]
        queries, keys = query.shape[2], key.shape[2]
        # transformers omits the mask of one query that sees everything, and of a whole row from its start (the keys
        # behind it are the empty slots of a static cache).
        if mask is None and queries > 1 and options.get("is_causal", getattr(module, "is_causal", True)):
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        groups = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = _softmax(scores, mask, sinks).to(query.dtype)
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    def convert_mask(self, mask: Any, query: Tensor, key: Tensor) -> Any:
        raise AssertionError("sdpa supports every layer")


def _softmax(scores: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    # A sink is one more key per head that takes weight and gives nothing.
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1, dtype=torch.float32)[..., :-1]


register_attention_backend(FlexAttentionBackend())
register_attention_backend(SdpaBackend())

# ------------------------------------------------------------------------------------------------ operators
# torch.compile sees a kernel for documents as one operator, and its backward pass as another. On a CPU the plain
# formula stands in for the kernels; it is also the reference of their tests.

BACKWARD_STATES = "Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp"
"""The first arguments of a backward operator."""


def define_operators(name: str, mask: str, backward_mask: str, logsumexp_dims: Sequence[int], *kernels: Any) -> Any:
    """Define `cornstarch::NAME` and `cornstarch::NAME_backward` and return them.

    The first kernel takes query, key, value, the arguments `mask` (a part of a torch schema) and the scale, and returns
    the output and the logsumexp, whose sizes are those of `logsumexp_dims` of the query. The second takes
    `BACKWARD_STATES`, `backward_mask` and the scale, and returns the gradients of query, key and value.
    """
    schemas = (
        f"(Tensor query, Tensor key, Tensor value, {mask}, float scale) -> (Tensor, Tensor)",
        f"({BACKWARD_STATES}, {backward_mask}, float scale) -> (Tensor, Tensor, Tensor)",
    )
    forward, backward = (
        torch.library.custom_op(f"cornstarch::{name}{end}", kernel, mutates_args=(), schema=schema)
        for end, kernel, schema in zip(("", "_backward"), kernels, schemas, strict=True)
    )

    @forward.register_fake
    def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        sizes = [query.shape[dim] for dim in logsumexp_dims]
        return query.new_empty(query.shape), query.new_empty(sizes, dtype=torch.float32)

    backward.register_fake(empty_gradients)
    return forward, backward


def connect_backward(operators: tuple[Any, Any], passed_on: Sequence[int], numbers: Sequence[int] = ()) -> None:
    """Let autograd call the backward operator, with the tensors `passed_on` and the `numbers` of the other's mask."""
    forward, backward = operators

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], *output, *(inputs[number] for number in passed_on))
        ctx.rest, ctx.last = len(inputs) - 3, (*(inputs[number] for number in numbers), inputs[-1])

    def differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        found = backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.last)  # it may be one expanded number
        return (*found, *[None] * ctx.rest)

    forward.register_autograd(differentiate, setup_context=save)


def attend_concatenated(operator: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """Attend with an operator on the tokens of all rows: [B, H, Q, D] -> [B, Q, H, D]."""
    rows, _, tokens, _ = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    output: Tensor = operator(*flat, *others)[0]
    return output.unflatten(0, (rows, tokens))


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [Q, H, D] and the logsumexp of the scores, float32 [H, Q]; hidden: bool [Q, K]."""
    scores = _compute_scores(query, key, hidden, scale)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _repeat_heads(value, query))
    return output.to(query.dtype), scores.logsumexp(-1)


def attend_plainly_backward(states: Sequence[Tensor], hidden: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 gradients, given `BACKWARD_STATES`, whose output and logsumexp may be of more keys than these."""
    gradient, query, key, value, output, logsumexp = states
    gradient = gradient.float()
    scores = _compute_scores(query, key, hidden, scale)
    weights = (scores - logsumexp[..., None]).exp().masked_fill(hidden, 0.0)  # a query that sees nothing has nan
    grad_weights = torch.einsum("qhd,khd->hqk", gradient, _repeat_heads(value, query))
    delta = (gradient * output.float()).sum(-1).transpose(0, 1)[..., None]
    grad_scores = weights * (grad_weights - delta) * scale
    grad_query = torch.einsum("hqk,khd->qhd", grad_scores, _repeat_heads(key, query))
    grad_key, grad_value = (
        torch.einsum("hqk,qhd->khd", left, right).unflatten(1, (key.shape[1], -1)).sum(2)
        for left, right in ((grad_scores, query.float()), (weights, gradient))
    )
    return grad_query, grad_key, grad_value


def empty_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized gradients of query, key and value; the fake implementation of backward operators."""
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _compute_scores(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query.float(), _repeat_heads(key, query)) * scale
    return scores.masked_fill(hidden, -torch.inf)


def _repeat_heads(states: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values [K, G, D] for each head of queries, in float32."""
    return states.float().repeat_interleave(query.shape[1] // states.shape[1], dim=1)
