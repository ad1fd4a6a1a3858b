"""Context parallelism of a language model: every rank gets the same batch and computes its own tokens.

    shard_tokens(model, mesh["cp"])
    loss = model(**batch).loss      # of this rank's tokens; the sum over the ranks is the batch's loss
    loss.backward()                 # gradients, summed over the ranks, are those of the batch

The model's own forward is kept. A hook before it shards the batch, another one after it computes the loss; in between,
attention goes through transformers' registries (cornstarch.attention.interface).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, make_dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import ModelOutput

from cornstarch.attention import attend_through_masks
from cornstarch.attention.interface import TokenSharding, get_active_mask, start_token_sharding
from cornstarch.attention.mask_verification import is_on_meta, mark_verified
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.batch import (
    TokenBatch,
    build_mask_spec,
    check_positions,
    check_tokens,
    count_layers,
    read_batch,
    select_inputs,
    verify_model,
)
from cornstarch.parallel.context.modes import build_context_parallel_mode, list_context_parallel_modes
from cornstarch.plan.token_distribution import (
    PARTIAL,
    Distribute,
    DistributionMethod,
    TokenDistribution,
    choose_block_size,
    compute_mask_work,
    distribute,
)

Mode = Literal["ring_attn", "gather", "all_to_all"]
"""The built-in modes; `register_context_parallel_mode` adds others."""


def shard_tokens(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: Mode = "ring_attn",
    distribution: DistributionMethod | Distribute = "auto",
) -> nn.Module:
    """Let each rank compute its own tokens of a batch that all ranks get; return the model, changed in place.

    All ranks of the mesh must call it together: a very short text is computed whole and sharded, and a model whose
    results differ is refused (`UnsupportedModelError`). On the meta device that is left to `verify_tokens`.

    The output's `loss` is the sum over this rank's tokens, divided by the number of trained tokens of the batch (or by
    `num_items_in_batch`, if that is given); `logits` are those of this rank's tokens, whose places are `token_index`.
    `use_mask(spec)` works as without sharding. With a cache (generation) every rank computes whole rows.

    Args:
        model: A transformers causal language model, or a PEFT model around one.
        mesh: The ranks that share each row: one axis.
        mode: "ring_attn": keys and values go from rank to rank; least memory. "gather": every rank gathers all keys
            and values, some heads at a time. "all_to_all": every rank gets the whole rows of some heads.
        distribution: See `cornstarch.plan.token_distribution.distribute`; or a function of work and ranks.
    """
    ranks = _check_arguments(model, mesh, mode, distribution)
    if ranks == 1:
        return model
    check_tokens(model, ranks, mode)
    on_meta = is_on_meta(model)
    attend_through_masks(model)
    if on_meta:
        mark_verified(unwrap(model))  # or it would be checked in the middle of a step, on sharded rows
    _TokenSharder(model, mesh, mode, distribution).attach()
    if not on_meta:
        verify_tokens(model)
    return model


def verify_tokens(model: nn.Module) -> None:
    """Refuse a model that computes something else sharded than whole; all its ranks must call it together.

    `shard_tokens` calls it, except for models on the meta device: call it when their weights are loaded.
    """
    sharder = _get_sharder(model)
    try:
        verify_model(model, sharder.whole_rows, sharder.group)
    except UnsupportedModelError:
        sharder.detach()
        raise


def unshard_tokens(model: nn.Module) -> nn.Module:
    """Undo `shard_tokens`: every rank computes whole rows again."""
    _get_sharder(model).detach()
    return model


@contextmanager
def use_whole_rows(model: nn.Module) -> Iterator[None]:
    """Run a block in which every rank computes whole rows, as before `shard_tokens`, in all parts of a model."""
    with ExitStack() as stack:
        for module in model.modules():
            if has_sharded_tokens(module):
                stack.enter_context(_get_sharder(module).whole_rows())
        yield


def has_sharded_tokens(model: nn.Module) -> bool:
    """Return whether `shard_tokens` was called for this very module."""
    return _ATTACHED in model.__dict__


def set_expected_layers(model: nn.Module, layers: int) -> None:
    """Set how many layers a model has left where other pipeline stages have the rest: each attends in every pass."""
    sharder = _get_sharder(model)
    sharder.layers, sharder.attends = layers, layers > 0


def get_last_distribution(model: nn.Module) -> TokenDistribution | None:
    """Return how the rows of the last forward pass were distributed, with the reason."""
    return _get_sharder(model).distribution


def _check_arguments(model: nn.Module, mesh: DeviceMesh, mode: str, distribution: Any) -> int:
    if mode not in (modes := list_context_parallel_modes()):
        raise ConfigError(f"mode = {mode!r}: expected one of {', '.join(modes)}.")
    if not callable(distribution) and distribution not in get_args(DistributionMethod):
        raise ConfigError(
            f"distribution = {distribution!r}: expected one of {', '.join(get_args(DistributionMethod))}."
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        found = f"a mesh of {mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigError(f"shard_tokens was given {found}; expected the mesh of one axis, such as mesh['cp'].")
    if has_sharded_tokens(model):
        raise ConfigError("The model's tokens are cut already; call unshard_tokens(model) first.")
    return mesh.size()


_ATTACHED = "_cornstarch_token_cutter"
_CHECKED_PASSES = 8  # ranks compare their batches in the first passes only: it costs a collective


def _get_sharder(model: nn.Module) -> _TokenSharder:
    sharder = model.__dict__.get(_ATTACHED)
    if not isinstance(sharder, _TokenSharder):
        raise ConfigError(f"The tokens of this {type(model).__name__} are not cut; call shard_tokens first.")
    return sharder


@dataclass
class _ForwardPass:
    cut: TokenSharding
    inputs: TokenBatch
    end: Callable[[], None]


class _TokenSharder:
    """The hooks of one model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, mode: str, how: DistributionMethod | Distribute) -> None:
        self.model, self.inner = model, unwrap(model)
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.method = build_context_parallel_mode(mode, self.group)
        self.how = how
        self.distribution: TokenDistribution | None = None
        self.signature = inspect.signature(type(self.inner).forward)
        self.layers, self.attends = count_layers(self.inner), True
        self._linear, self._windows = _estimate_work(self.inner)
        self._whole = 0
        self._agreed = 0
        self._passes: list[_ForwardPass] = []
        self._handles: list[Any] = []

    def attach(self) -> None:
        self._handles = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        self.model.__dict__[_ATTACHED] = self

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.model.__dict__.pop(_ATTACHED, None)

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1

    # -------------------------------------------------------------------------------------------- one forward pass

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {**self.signature.bind_partial(self.inner, *args).arguments, **kwargs}
        named.pop("self", None)
        if self._whole or _is_generation(named):
            return None
        inputs = read_batch(named, self.inner)
        spec = build_mask_spec(inputs, get_active_mask(), self.inner)
        if self._agreed < _CHECKED_PASSES:
            self._check_agreement(inputs, spec.documents)
            self._agreed += 1
        self.distribution = self._distribute(spec.documents, spec.spans)
        device = spec.documents.device
        shards = tuple(torch.from_numpy(self.distribution.tokens(one)).to(device) for one in range(self.ranks))
        check_positions(self.inner, inputs.positions, shards)
        cut = TokenSharding(spec, shards, self.rank, self.method)
        self._passes.append(_ForwardPass(cut, inputs, start_token_sharding(cut)))
        return (), select_inputs(inputs, spec, cut.local_positions, self.signature)

    def _distribute(self, documents: Tensor, spans: Tensor) -> TokenDistribution:
        tokens = documents.shape[1]
        if tokens < self.ranks:
            raise ConfigError(f"Rows of {tokens} tokens cannot be cut over {self.ranks} ranks; use fewer (cp).")
        work = compute_mask_work(
            documents.cpu().numpy(),
            spans.cpu().numpy(),
            block=choose_block_size(tokens, self.ranks),
            linear=self._linear,
            windows=self._windows,
            partial=PARTIAL if documents.is_cuda else 0.0,
        )
        return distribute(work, self.ranks, self.how) if isinstance(self.how, str) else self.how(work, self.ranks)

    def _check_agreement(self, inputs: TokenBatch, documents: Tensor) -> None:
        """Refuse batches that differ between ranks: they would deadlock, or train on a mixture."""
        ids = inputs.tensors.get("input_ids", documents)
        weights = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        own = torch.stack(
            [torch.tensor(size, device=ids.device) for size in documents.shape]
            + [(ids.long() * weights).sum(), (documents.long() * weights).sum()]
        )
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own, group=self.group)
        if any(one.tolist() != own.tolist() for one in found):
            shapes = ", ".join(f"{one[0]} x {one[1]}" for one in (other.tolist() for other in found))
            raise ConfigError(
                f"The ranks that share each row were given different batches (rows x tokens: {shapes}). "
                "Give all ranks of a context-parallel group the same samples."
            )

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not self._passes:  # whole rows, or the batch was refused
            return output
        done = self._passes.pop()
        done.end()
        if output is None:  # it raised
            return output
        if not isinstance(output, ModelOutput):
            raise ConfigError("A model whose tokens are cut must return a ModelOutput: leave out return_dict=False.")
        if self.layers and done.cut.calls % self.layers or (self.attends and not done.cut.calls):
            raise UnsupportedModelError(
                f"{type(self.inner).__name__} has {self.layers} layers and {done.cut.calls} of them attended through "
                "transformers' attention interface: the others mix tokens in a way that cannot be cut."
            )
        return self._build_output(output, done)

    def _build_output(self, output: ModelOutput, done: _ForwardPass) -> ModelOutput:
        values = {**dict(output), "token_index": done.cut.local_positions}
        labels, logits = done.inputs.labels, output.get("logits")
        if labels is not None and logits is not None:
            own = labels[:, done.cut.local_positions]
            count = done.inputs.count if done.inputs.count is not None else (labels != -100).sum()
            values["loss"] = self.inner.loss_function(  # type: ignore[operator]
                logits=logits,
                labels=own,
                vocab_size=_vocabulary_size(self.inner, logits),
                shift_labels=own,
                num_items_in_batch=count,
            )
        return _add_token_index(type(output))(**values)


def _is_generation(named: dict[str, Any]) -> bool:
    """Return whether a forward pass is a step of generation, which every rank does on whole rows."""
    # Some models create a cache even in training, an empty one.
    cache = named.pop("past_key_values", None)
    trains = torch.is_grad_enabled() or named.get("labels") is not None
    return cache is not None and (not trains or cache.get_seq_length() > 0)


def _vocabulary_size(inner: nn.Module, logits: Tensor) -> int:
    return getattr(inner.config.get_text_config(), "vocab_size", None) or logits.shape[-1]  # type: ignore[operator,union-attr]


@lru_cache(maxsize=64)
def _add_token_index(output: type[ModelOutput]) -> type[ModelOutput]:
    """Return an output class with one more field; a dataclass, so that FSDP's tree traversal finds its tensors."""
    made = make_dataclass(f"{output.__name__}OfShard", [("token_index", Tensor | None, None)], bases=(output,))
    made.__module__ = __name__
    made.__doc__ = f"{output.__name__} of one rank's tokens; `token_index` has their places in the row."
    return made


def _estimate_work(inner: nn.Module) -> tuple[float, tuple[int | None, ...]]:
    """Return the cost of a token in linear layers, in query-key pairs of attention, and the layers' windows."""
    config: Any = inner.config.get_text_config()  # type: ignore[operator,union-attr]
    layers = max(count_layers(inner), 1)
    tables = {id(one.weight) for one in inner.modules() if isinstance(one, nn.Embedding)}
    parameters = sum(one.numel() for one in inner.parameters() if id(one) not in tables)
    width = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None) or 1
    limits = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None) or []
    windows = tuple(limits.get(kind) for kind in kinds) or (getattr(config, "sliding_window", None),)
    return parameters / layers / (2 * width), windows
