"""How a `MaskSpec` enters a transformers model: one name in transformers' attention and mask registries.

Without a spec, this name behaves as "sdpa". With a spec, transformers still states the pattern of each layer (causal,
sliding, chunked): its mask function is called with positions within the document instead of the row.

With context parallelism (`start_token_sharding`), the tokens of a row are sharded over ranks. The mask of a layer is
then a `ShardedMask`, an object that knows the whole row, and the method of the sharding attends with it. Objects pass
through the layers unchanged, so that recomputed layers get the same one. cornstarch.parallel.context moves the tensors
between ranks.

Shape letters: B rows, H heads, S tokens of a row, Q and K tokens of some ranks, s tokens of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from cornstarch.attention.backends import (
    DEFAULT_OPTIONS,
    AttentionChoice,
    get_chosen_attention,
    is_dense_requested,
    run_attention,
    select_backend,
    use_attention,
)
from cornstarch.attention.mask import BLOCK_SIZE, CAUSAL, MaskFunction, MaskSpec, RangeMask
from cornstarch.attention.opaque_attention import attend_opaquely, number_mask
from cornstarch.errors import ConfigError, UnsupportedModelError

IMPLEMENTATION = "cornstarch"
# For models that declare that they do not support FlexAttention's masks: dense masks on every device.
DENSE_IMPLEMENTATION = "cornstarch_dense"

# Tensors that models pass to their attention and that change nothing in it.
_HARMLESS_OPTIONS = frozenset({"position_ids", "position_embeddings", "cache_position", "input_ids", "token_type_ids"})

_active_mask: ContextVar[MaskSpec | None] = ContextVar("cornstarch_mask", default=None)
_mask_builder: ContextVar[Callable[..., Any] | None] = ContextVar("cornstarch_mask_builder", default=None)
_attention_function: ContextVar[Callable[..., Any] | None] = ContextVar("cornstarch_attention_function", default=None)


@contextmanager
def use_mask(spec: MaskSpec | None) -> Iterator[None]:
    """Apply `spec` in models whose attention implementation is `IMPLEMENTATION`, within this block.

    Only the forward pass must be inside: checkpointed layers are recomputed with the mask that they were given.
    """
    token = _active_mask.set(spec)
    try:
        yield
    finally:
        _active_mask.reset(token)


def get_active_mask() -> MaskSpec | None:
    return _active_mask.get()


def set_mask_builder(builder: Callable[..., Any]) -> Callable[[], None]:
    """Let `builder` build the masks of layers, with the arguments of `build_mask`; return a function that undoes it."""
    token = _mask_builder.set(builder)
    return lambda: _mask_builder.reset(token)


def set_attention_function(function: Callable[..., Any]) -> Callable[[], None]:
    """Let `function(module, query, key, value, mask, options)` attend for layers; return a function that undoes it."""
    token = _attention_function.set(function)
    return lambda: _attention_function.reset(token)


def has_attention_function() -> bool:
    """Return whether a function attends for layers, which are not compiled then."""
    return _attention_function.get() is not None


def build_checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpointed forward pass and of its recomputation, for torch's `checkpoint`."""
    # The backward pass runs outside of `use_attention`, and of the hooks that set a function: without a context, the
    # recomputation would select other kernels, which save other tensors.
    return nullcontext(), _attend_again(get_chosen_attention(), _attention_function.get())


@contextmanager
def _attend_again(choice: AttentionChoice | None, function: Callable[..., Any] | None) -> Iterator[None]:
    token = _attention_function.set(function)
    try:
        with nullcontext() if choice is None else use_attention(choice):
            yield
    finally:
        _attention_function.reset(token)


def build_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, *,
    mask_function: MaskFunction, attention_mask: Tensor | None = None, use_vmap: bool = False,
    device: torch.device | str = "cpu", config: Any = None, use_flex: bool = True, **options: Any,
) -> Any:  # fmt: skip
    """Build the mask of one kind of layers; transformers calls it once per kind and forward pass."""
    layer = {"mask_function": mask_function, "attention_mask": attention_mask, "use_vmap": use_vmap, "config": config}
    builder = _mask_builder.get()
    if builder is not None:
        return builder(batch_size, q_length, kv_length, **layer, use_flex=use_flex, options=options)
    spec = _active_mask.get()
    if spec is None or spec.is_plain:
        sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
        return AttentionMaskInterface()["sdpa"](batch_size=batch_size, **sizes, device=device, **layer, **options)
    end = kv_offset + kv_length
    _check_layer(attention_mask, q_length, use_vmap, options, config, end)
    rows = spec.documents.shape[0]
    if rows != batch_size and (batch_size % rows or torch.is_grad_enabled()):
        raise ConfigError(
            f"The mask in use has {rows} rows, the model was given {batch_size}; make the mask from the same batch."
        )
    if rows != batch_size:  # generation repeats each prompt for its beams and samples
        spec = spec.repeat_interleave(batch_size // rows)
    spec = spec.to(device).extend(end)
    pattern = restrict_to_documents(mask_function, None if attention_mask is None else attention_mask.to(device))
    whole_row = isinstance(q_offset, int) and q_offset == 0 and q_length == end == spec.documents.shape[1]
    if use_flex and whole_row and q_length >= BLOCK_SIZE and not is_dense_requested():
        backend = None
        if pattern is CAUSAL and spec.counts.are_contiguous:
            backend = select_backend(spec.documents.device, _get_head_dim(config))
        if backend is not None:
            return backend.build_mask(spec)
        if spec.documents.is_cuda:
            return spec.block_mask(pattern)
    queries = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_offset, end, device=device)
    return spec.dense(pattern, queries, keys)


def restrict_to_documents(mask_function: MaskFunction, attention_mask: Tensor | None) -> MaskFunction:
    """Return transformers' rule on positions within a document."""
    rule: Any = mask_function
    if rule is causal_mask_function:
        return CAUSAL
    if attention_mask is None:
        return mask_function
    # transformers counts chunks from the end of the left padding, which it subtracts from the indices. Positions within
    # a document have no padding, so it is added first. Windows depend on differences only.
    left_padding = (attention_mask.cumsum(dim=-1) == 0).sum(dim=-1)

    def pattern(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask_function(row, head, query + left_padding[row], key + left_padding[row])

    return pattern


def _get_head_dim(config: Any) -> int | None:
    heads, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and isinstance(heads, int) and isinstance(size, int) and heads > 0:
        head_dim = size // heads
    return head_dim if isinstance(head_dim, int) else None


def _check_layer(
    attention_mask: Tensor | None, q_length: int, use_vmap: bool, options: dict[str, Any], config: Any, end: int
) -> None:
    """Refuse rules and scores that depend on indices in a row of `end` tokens, not on positions in a document."""
    if use_vmap:
        raise UnsupportedModelError("The model adds a mask function of its own, which may depend on row indices.")
    # Without an attention mask transformers looks for documents in the position ids. If it finds any, it adds them to
    # mask_function by row index, and no longer allows to omit the mask.
    if attention_mask is None and q_length > 1 and not options.get("allow_is_causal_skip", True):
        raise ConfigError("A model under use_mask(spec) needs its 2-D attention_mask too (1: token, 0: padding).")
    # With temperature tuning (Llama 4) a query is scaled by its index in the row, in steps of floor_scale tokens: equal
    # to the index in its document only before the first step.
    if getattr(config, "attn_temperature_tuning", False) and end >= getattr(config, "floor_scale", end + 1):
        raise UnsupportedModelError(
            f"The model scales its attention by a token's place in the row once a row has {config.floor_scale} "
            f"tokens; this row has {end}, and its documents must be scaled by their own places. "
            f"Use rows shorter than {config.floor_scale} tokens, or one document per row without padding."
        )


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend for a layer: over ranks, by the function of `set_attention_function`, or by `run_attention`."""
    is_sharded = isinstance(attention_mask, ShardedMask)
    if torch.compiler.is_compiling():
        # Context variables cannot be traced; layers run uncompiled where a function is set (`CompiledForward`).
        if is_sharded:
            return attention_mask.attend_compiled(module, query, key, value, **{**DEFAULT_OPTIONS, **options}), None
        return run_attention(module, query, key, value, attention_mask, **options)
    function = _attention_function.get()
    if function is not None:
        return function(module, query, key, value, attention_mask, {**DEFAULT_OPTIONS, **options})
    if is_sharded:
        return attention_mask.attend(module, query, key, value, **{**DEFAULT_OPTIONS, **options}), None
    if _mask_builder.get() is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was handed no mask by transformers' mask functions, so that nothing says what "
            "its tokens may see on other ranks"
        )
    return run_attention(module, query, key, value, attention_mask, **options)


@dataclass(frozen=True)
class ScoreOptions:
    """The options of a layer's attention, without its mask."""

    scaling: float
    softcap: float | None
    dropout: float
    training: bool


RenderedMask: TypeAlias = Tensor | BlockMask | RangeMask
ShardedAttention = Callable[[ScoreOptions, "ShardedMask", Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(options, mask, query, key, value, sinks) of this rank's tokens [B, H, s, D] -> [B, s, H, D]."""


@dataclass(eq=False)
class TokenSharding:
    """How the rows of one forward pass are sharded over ranks."""

    spec: MaskSpec
    """Of the whole rows."""
    rank_positions: tuple[Tensor, ...]
    """For each rank the positions of its tokens."""
    rank: int
    method: ShardedAttention
    calls: int = 0
    """How often a layer attended."""

    @property
    def local_positions(self) -> Tensor:
        return self.rank_positions[self.rank]

    @property
    def sizes(self) -> list[int]:
        return [len(positions) for positions in self.rank_positions]

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(range(len(self.rank_positions)))


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    for option, given in options.items():
        if isinstance(given, Tensor) and option not in (*DEFAULT_OPTIONS, *_HARMLESS_OPTIONS):
            raise UnsupportedModelError(
                f"{type(module).__name__} changes its attention by {option!r}, which is not cut with the tokens"
            )


@dataclass(eq=False)
class ShardedMask:
    """What tokens of some ranks see of tokens of others, for one kind of layers; rendered on first use."""

    sharding: TokenSharding
    pattern: MaskFunction
    use_flex: bool
    _rendered: dict[tuple[tuple[int, ...], tuple[int, ...]], RenderedMask] = field(default_factory=dict)
    _empty: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = number_mask(self)
        """By which compiled layers name it."""
        self.passes_query = bool(getattr(self.sharding.method, "keeps_query", True))

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attend for a layer with this rank's tokens: [B, H, s, D] -> [B, s, H, D]."""
        _check_options(module, options)
        scoring = (options["scaling"], options["softcap"], options["dropout"], module.training)
        return self.attend_with(scoring, query, key, value, options["s_aux"])

    def attend_compiled(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attend as `attend` does, in a layer that is being compiled: as one operator of its graph."""
        _check_options(module, options)
        kind, sinks = query.device.type, options["s_aux"]
        if torch.is_autocast_enabled(kind):  # a graph contains its casts, and operators run without autocast
            query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
        scaling = query.shape[-1] ** -0.5 if options["scaling"] is None else float(options["scaling"])
        scoring = (scaling, options["softcap"], options["dropout"], module.training)
        sinks = None if sinks is None else sinks.float()
        return attend_opaquely(query, key, value, sinks, self.number, scoring, self.passes_query)

    def attend_with(
        self, options: Sequence[Any], query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend by this mask; options: scale (None: that of the width of heads), softcap, dropout, training."""
        own = len(self.sharding.local_positions)
        if query.shape[2] != own or key.shape[2] != own:
            raise UnsupportedModelError(
                f"a layer attends from {query.shape[2]} to {key.shape[2]} tokens where this rank has {own}"
            )
        self.sharding.calls += 1
        scaling, *rest = options
        scoring = ScoreOptions(query.shape[-1] ** -0.5 if scaling is None else float(scaling), *rest)
        return self.sharding.method(scoring, self, query, key, value, sinks)

    def render(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> RenderedMask:
        """Return the mask between the tokens of these ranks, in their order: bool [B, 1, Q, K], or for a kernel."""
        if (queries, keys) not in self._rendered:
            spec, positions = self.sharding.spec, self.sharding.rank_positions
            between = tuple(torch.cat([positions[rank] for rank in ranks]) for ranks in (queries, keys))
            device, backend = between[0].device, None
            is_flex = self.use_flex and device.type == "cuda" and min(map(len, between)) >= BLOCK_SIZE
            if is_flex and self.pattern is CAUSAL and spec.counts.are_contiguous:
                backend = select_backend(device, sharded=True)
            if backend is not None:
                self._rendered[queries, keys] = backend.build_mask(spec, *between)
            else:
                self._rendered[queries, keys] = (spec.block_mask if is_flex else spec.dense)(self.pattern, *between)
        return self._rendered[queries, keys]

    def is_empty(self, owner: int) -> bool:
        """Whether no token of this rank sees any token of another rank."""
        if owner not in self._empty:
            mask = self.render((self.sharding.rank,), (owner,))
            mask = mask.block_mask if isinstance(mask, RangeMask) else mask
            some = mask.kv_num_blocks.any() if isinstance(mask, BlockMask) else mask.any()
            if isinstance(mask, BlockMask) and mask.full_kv_num_blocks is not None:
                some = some | mask.full_kv_num_blocks.any()
            self._empty[owner] = not bool(some)
        return self._empty[owner]


def attend_locally(
    scoring: ScoreOptions, query: Tensor, key: Tensor, value: Tensor, mask: RenderedMask, sinks: Tensor | None = None
) -> Tensor:
    """Attend to keys that are all on this rank: [B, Q, H, D]."""
    layer: Any = nn.Module()  # transformers' functions read these attributes of a layer
    layer.num_key_value_groups, layer.is_causal = query.shape[1] // key.shape[1], False
    layer.training = scoring.training
    options: dict[str, Any] = {"dropout": scoring.dropout, "scaling": scoring.scaling, "softcap": scoring.softcap}
    return run_attention(layer, query, key, value, mask, s_aux=sinks, **options)[0]


def start_token_sharding(sharding: TokenSharding) -> Callable[[], None]:
    """Let models attend over rows that are sharded so; return a function that ends it."""
    return set_mask_builder(partial(_build_sharded_mask, sharding))


def _build_sharded_mask(
    sharding: TokenSharding, batch_size: int, q_length: int, kv_length: int, *, mask_function: MaskFunction,
    attention_mask: Tensor | None, use_vmap: bool, config: Any, use_flex: bool, options: dict[str, Any],
) -> ShardedMask:  # fmt: skip
    rows, tokens = sharding.spec.documents.shape
    own = len(sharding.local_positions)
    if (q_length, kv_length) != (own, own):
        raise UnsupportedModelError(
            f"it asks for a mask of {q_length} by {kv_length} tokens where this rank has {own}: its layers see other "
            "tokens than those of the text"
        )
    _check_layer(attention_mask, q_length, use_vmap, options, config, tokens)
    if rows != batch_size:
        raise ConfigError(f"The batch has {rows} rows, and a layer was given {batch_size}.")
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, own, device=sharding.local_positions.device)
    return ShardedMask(sharding, restrict_to_documents(mask_function, attention_mask), use_flex)


for _name, _use_flex in ((IMPLEMENTATION, True), (DENSE_IMPLEMENTATION, False)):
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, partial(build_mask, use_flex=_use_flex))
