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
from dataclasses import make_dataclass
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
from cornstarch.parallel.context import batch
from cornstarch.parallel.context.batch import TokenBatch, check_tokens, count_layers
from cornstarch.parallel.context.modes import MODES
from cornstarch.parallel.distributed import all_gather
from cornstarch.plan import token_distribution
from cornstarch.plan.token_distribution import Distribute, DistributionMethod, TokenDistribution

Mode = Literal["ring_attn", "gather", "all_to_all"]  # the built-in modes; `register_context_parallel_mode` adds others


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
    if mode not in MODES:
        raise ConfigError(f"mode = {mode!r}: expected one of {', '.join(sorted(MODES))}.")
    methods = get_args(DistributionMethod)
    if not callable(distribution) and distribution not in methods:
        raise ConfigError(f"distribution = {distribution!r}: expected one of {', '.join(methods)}.")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        found = f"a mesh of {mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigError(f"shard_tokens was given {found}; expected the mesh of one axis, such as mesh['cp'].")
    if has_sharded_tokens(model):
        raise ConfigError("The model's tokens are cut already; call unshard_tokens(model) first.")
    if mesh.size() == 1:
        return model
    check_tokens(model, mesh.size(), mode)
    on_meta = is_on_meta(model)
    attend_through_masks(model)
    if on_meta:
        mark_verified(unwrap(model))  # or it would be checked in the middle of a step, on sharded rows
    model.__dict__[_ATTACHED] = _TokenSharder(model, mesh, mode, distribution)
    if not on_meta:
        verify_tokens(model)
    return model


def verify_tokens(model: nn.Module) -> None:
    """Refuse a model that computes something else sharded than whole; all its ranks must call it together.

    `shard_tokens` calls it, except for models on the meta device: call it when their weights are loaded.
    """
    sharder = _get_sharder(model)
    try:
        batch.verify_model(model, sharder.whole_rows, sharder.group)
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


_ATTACHED = "_cornstarch_token_cutter"
_CHECKED_PASSES = 8  # ranks compare their batches in the first passes only: it costs a collective


def _get_sharder(model: nn.Module) -> _TokenSharder:
    sharder = model.__dict__.get(_ATTACHED)
    if not isinstance(sharder, _TokenSharder):
        raise ConfigError(f"The tokens of this {type(model).__name__} are not cut; call shard_tokens first.")
    return sharder


class _TokenSharder:
    def __init__(self, model: nn.Module, mesh: DeviceMesh, mode: str, how: DistributionMethod | Distribute) -> None:
        self.model, self.inner = model, unwrap(model)
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.method = MODES[mode](self.group)
        self.how = how
        self.distribution: TokenDistribution | None = None
        self.signature = inspect.signature(type(self.inner).forward)
        self.layers, self.attends = count_layers(self.inner), True
        self._linear, self._windows = _estimate_work(self.inner)
        self._whole = self._agreed = 0
        self._passes: list[tuple[TokenSharding, TokenBatch, Callable[[], None]]] = []
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._handles = before, model.register_forward_hook(self._after, with_kwargs=True, always_call=True)

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

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {**self.signature.bind_partial(self.inner, *args).arguments, **kwargs}
        named.pop("self", None)
        # Every rank generates whole rows. Some models create a cache even in training, an empty one.
        cache = named.pop("past_key_values", None)
        trains = torch.is_grad_enabled() or named.get("labels") is not None
        if self._whole or (cache is not None and (not trains or cache.get_seq_length() > 0)):
            return None
        inputs = batch.read_batch(named, self.inner)
        spec = batch.build_mask_spec(inputs, get_active_mask(), self.inner)
        if self._agreed < _CHECKED_PASSES:
            self._check_agreement(inputs, spec.documents)
            self._agreed += 1
        tokens, device = spec.documents.shape[1], spec.documents.device
        if tokens < self.ranks:
            raise ConfigError(f"Rows of {tokens} tokens cannot be cut over {self.ranks} ranks; use fewer (cp).")
        work = token_distribution.compute_mask_work(
            spec.documents.cpu().numpy(),
            spec.spans.cpu().numpy(),
            block=token_distribution.choose_block_size(tokens, self.ranks),
            linear=self._linear,
            windows=self._windows,
            partial=token_distribution.PARTIAL if device.type == "cuda" else 0.0,
        )
        how = self.how
        if isinstance(how, str):
            self.distribution = token_distribution.distribute(work, self.ranks, how)
        else:
            self.distribution = how(work, self.ranks)
        shards = tuple(torch.from_numpy(self.distribution.tokens(one)).to(device) for one in range(self.ranks))
        batch.check_positions(self.inner, inputs.positions, shards)
        cut = TokenSharding(spec, shards, self.rank, self.method)
        self._passes.append((cut, inputs, start_token_sharding(cut)))
        return (), batch.select_inputs(inputs, spec, cut.local_positions, self.signature)

    def _check_agreement(self, inputs: TokenBatch, documents: Tensor) -> None:
        """Refuse batches that differ between ranks: they would deadlock, or train on a mixture."""
        ids = inputs.tensors.get("input_ids", documents)
        weights = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        shape = [torch.tensor(size, device=ids.device) for size in documents.shape]
        own = torch.stack([*shape, (ids.long() * weights).sum(), (documents.long() * weights).sum()])
        found = [one.tolist() for one in all_gather(own, self.group)]
        if any(one != found[0] for one in found):
            shapes = ", ".join(f"{one[0]} x {one[1]}" for one in found)
            raise ConfigError(
                f"The ranks that share each row were given different batches (rows x tokens: {shapes}). "
                "Give all ranks of a context-parallel group the same samples."
            )

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not self._passes:  # whole rows, or the batch was refused
            return output
        cut, inputs, end = self._passes.pop()
        end()
        if output is None:  # it raised
            return output
        if not isinstance(output, ModelOutput):
            raise ConfigError("A model whose tokens are cut must return a ModelOutput: leave out return_dict=False.")
        if self.layers and cut.calls % self.layers or (self.attends and not cut.calls):
            raise UnsupportedModelError(
                f"{type(self.inner).__name__} has {self.layers} layers and {cut.calls} of them attended through "
                "transformers' attention interface: the others mix tokens in a way that cannot be cut."
            )
        values = {**dict(output), "token_index": cut.local_positions}
        labels, logits = inputs.labels, output.get("logits")
        if labels is not None and logits is not None:
            own = labels[:, cut.local_positions]
            words = getattr(self.inner.config.get_text_config(), "vocab_size", None)  # type: ignore[operator,union-attr]
            values["loss"] = self.inner.loss_function(  # type: ignore[operator]
                logits=logits,
                labels=own,
                vocab_size=words or logits.shape[-1],
                shift_labels=own,
                num_items_in_batch=inputs.count if inputs.count is not None else (labels != -100).sum(),
            )
        return _add_token_index(type(output))(**values)


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
