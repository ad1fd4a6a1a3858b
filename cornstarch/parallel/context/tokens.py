"""Context parallelism of a language model: every rank is given the same batch and computes its own tokens.

    shard_tokens(model, mesh["cp"])
    loss = model(**batch).loss      # of this rank's tokens; the sum over the ranks is the batch's loss
    loss.backward()                 # gradients, summed over the ranks, are those of the batch

The model's own forward is kept. A hook before it cuts the batch, another behind it computes the loss; in between,
attention goes through transformers' registries (cornstarch.attention.context).
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
from cornstarch.attention.context import Method, TokenCut, begin_cut
from cornstarch.attention.interface import mask_in_use
from cornstarch.attention.verify import is_on_meta, trust_masks
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.batch import Cuttable, cut_inputs, read_batch, spec_of
from cornstarch.parallel.context.checks import check_positions, check_tokens, layer_count, verify_model
from cornstarch.parallel.context.modes import GatherAttention, HeadsAttention
from cornstarch.parallel.context.ring import RingAttention
from cornstarch.plan.tokens import PARTIAL, Distribute, Distribution, How, block_size, distribute, mask_work

Mode = Literal["ring_attn", "gather", "all_to_all"]
_METHODS: dict[str, Callable[[dist.ProcessGroup], Method]] = {
    "ring_attn": RingAttention,
    "gather": GatherAttention,
    "all_to_all": HeadsAttention,
}


def shard_tokens(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: Mode = "ring_attn",
    distribution: How | Distribute = "auto",
) -> nn.Module:
    """Let a causal language model compute each rank's own tokens of a batch that all ranks are given.

    All ranks of the mesh must call it together: a very short text is computed whole and cut, and a model that gives
    something else is refused (`UnsupportedModelError`). On the meta device that is left to `verify_tokens`.

    The output's `loss` is the sum over this rank's tokens over the number of trained tokens of the batch (or over
    `num_items_in_batch`, if that is given); `logits` are of this rank's tokens, whose places are `token_index`.
    Within `use_mask(spec)` tokens see what the spec says. With a cache (generation) every rank computes whole rows.

    Args:
        model: A transformers causal language model, or a PEFT model around one. Changed in place, and returned.
        mesh: The ranks that share each row: one axis.
        mode: "ring_attn": keys and values go from rank to rank; least memory. "gather": every rank gathers all keys
            and values, some heads at a time. "all_to_all": every rank gets the whole rows of some heads.
        distribution: Which tokens go where, see `cornstarch.plan.tokens.distribute`; or a function of work and ranks.
    """
    ranks = _checked(model, mesh, mode, distribution)
    if ranks == 1:
        return model
    check_tokens(model, ranks, mode)
    on_meta = is_on_meta(model)
    attend_through_masks(model)
    if on_meta:
        trust_masks(unwrap(model))  # or it would be checked in the middle of a step, on cut rows
    _Cutter(model, mesh, mode, distribution).attach()
    if not on_meta:
        verify_tokens(model)
    return model


def verify_tokens(model: nn.Module) -> None:
    """Refuse a model that computes something else cut than whole; all its ranks must call it together.

    `shard_tokens` does it by itself, but for models on the meta device: call it when their weights are there.
    """
    cutter = _cutter_of(model)
    try:
        verify_model(model, cutter.whole_rows, cutter.group)
    except UnsupportedModelError:
        cutter.detach()
        raise


def unshard_tokens(model: nn.Module) -> nn.Module:
    """Undo `shard_tokens`: every rank computes whole rows again."""
    _cutter_of(model).detach()
    return model


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Run a block in which every rank computes whole rows, as before `shard_tokens`, in all parts of a model."""
    with ExitStack() as stack:
        for module in model.modules():
            if tokens_are_cut(module):
                stack.enter_context(_cutter_of(module).whole_rows())
        yield


def tokens_are_cut(model: nn.Module) -> bool:
    """Whether `shard_tokens` was called for this very module."""
    return _ATTACHED in model.__dict__


def expect_layers(model: nn.Module, layers: int) -> None:
    """Say how many layers a model still has, where a pipeline has taken the others away: each attends in every pass."""
    cutter = _cutter_of(model)
    cutter.layers, cutter.attends = layers, layers > 0


def last_distribution(model: nn.Module) -> Distribution | None:
    """Return how the rows of the last forward pass were dealt out, with the reason."""
    return _cutter_of(model).distribution


def _checked(model: nn.Module, mesh: DeviceMesh, mode: str, distribution: Any) -> int:
    if mode not in _METHODS:
        raise ConfigError(f"mode = {mode!r}: expected one of {', '.join(_METHODS)}.")
    if not callable(distribution) and distribution not in get_args(How):
        raise ConfigError(f"distribution = {distribution!r}: expected one of {', '.join(get_args(How))}.")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        found = f"a mesh of {mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigError(f"shard_tokens was given {found}; expected the mesh of one axis, such as mesh['cp'].")
    if tokens_are_cut(model):
        raise ConfigError("The model's tokens are cut already; call unshard_tokens(model) first.")
    return mesh.size()


_ATTACHED = "_cornstarch_token_cutter"
_CHECKED = 8  # passes in which ranks compare their batches: a mistake shows at once, and it costs an exchange


def _cutter_of(model: nn.Module) -> _Cutter:
    cutter = model.__dict__.get(_ATTACHED)
    if not isinstance(cutter, _Cutter):
        raise ConfigError(f"The tokens of this {type(model).__name__} are not cut; call shard_tokens first.")
    return cutter


@dataclass
class _Pass:
    """One forward pass."""

    cut: TokenCut
    inputs: Cuttable
    end: Callable[[], None]


class _Cutter:
    """The hooks of one model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, mode: str, how: How | Distribute) -> None:
        self.model, self.inner = model, unwrap(model)
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.method = _METHODS[mode](self.group)
        self.how = how
        self.distribution: Distribution | None = None
        self.signature = inspect.signature(type(self.inner).forward)
        self.layers, self.attends = layer_count(self.inner), True
        self._linear, self._windows = _work_of(self.inner)
        self._whole = 0
        self._agreed = 0
        self._passes: list[_Pass] = []
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Begin."""
        self._handles = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        self.model.__dict__[_ATTACHED] = self

    def detach(self) -> None:
        """End."""
        for handle in self._handles:
            handle.remove()
        self.model.__dict__.pop(_ATTACHED, None)

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Cut nothing within this block."""
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1

    # -------------------------------------------------------------------------------------------- one forward pass

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {**self.signature.bind_partial(self.inner, *args).arguments, **kwargs}
        named.pop("self", None)
        if self._whole or _generates(named):
            return None
        inputs = read_batch(named, self.inner)
        spec = spec_of(inputs, mask_in_use(), self.inner)
        if self._agreed < _CHECKED:
            self._check_agreement(inputs, spec.documents)
            self._agreed += 1
        self.distribution = self._distribute(spec.documents, spec.spans)
        device = spec.documents.device
        shares = tuple(torch.from_numpy(self.distribution.tokens(one)).to(device) for one in range(self.ranks))
        check_positions(self.inner, inputs.positions, shares)
        cut = TokenCut(spec, shares, self.rank, self.method)
        self._passes.append(_Pass(cut, inputs, begin_cut(cut)))
        return (), cut_inputs(inputs, spec, cut.mine, self.signature)

    def _distribute(self, documents: Tensor, spans: Tensor) -> Distribution:
        tokens = documents.shape[1]
        if tokens < self.ranks:
            raise ConfigError(f"Rows of {tokens} tokens cannot be cut over {self.ranks} ranks; use fewer (cp).")
        work = mask_work(
            documents.cpu().numpy(),
            spans.cpu().numpy(),
            block=block_size(tokens, self.ranks),
            linear=self._linear,
            windows=self._windows,
            partial=PARTIAL if documents.is_cuda else 0.0,
        )
        return distribute(work, self.ranks, self.how) if isinstance(self.how, str) else self.how(work, self.ranks)

    def _check_agreement(self, inputs: Cuttable, documents: Tensor) -> None:
        """Refuse batches that differ between ranks: they would wait for one another, or train on a mixture."""
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
        return self._finished(output, done)

    def _finished(self, output: ModelOutput, done: _Pass) -> ModelOutput:
        values = {**dict(output), "token_index": done.cut.mine}
        labels, logits = done.inputs.labels, output.get("logits")
        if labels is not None and logits is not None:
            own = labels[:, done.cut.mine]
            count = done.inputs.count if done.inputs.count is not None else (labels != -100).sum()
            values["loss"] = self.inner.loss_function(  # type: ignore[operator]
                logits=logits,
                labels=own,
                vocab_size=_vocabulary(self.inner, logits),
                shift_labels=own,
                num_items_in_batch=count,
            )
        return _with_index(type(output))(**values)


def _generates(named: dict[str, Any]) -> bool:
    """Whether a forward pass is a step of generation, where every rank goes on with whole rows.

    Some models make a cache even in training.
    """
    cache = named.pop("past_key_values", None)
    trains = torch.is_grad_enabled() or named.get("labels") is not None
    return cache is not None and (not trains or cache.get_seq_length() > 0)


def _vocabulary(inner: nn.Module, logits: Tensor) -> int:
    return getattr(inner.config.get_text_config(), "vocab_size", None) or logits.shape[-1]  # type: ignore[operator,union-attr]


@lru_cache(maxsize=64)
def _with_index(output: type[ModelOutput]) -> type[ModelOutput]:
    """Return the kind of output with one more entry, which also survives FSDP's walk through outputs."""
    made = make_dataclass(f"{output.__name__}OfShare", [("token_index", Tensor | None, None)], bases=(output,))
    made.__module__ = __name__
    made.__doc__ = f"{output.__name__} of one rank's tokens; `token_index` has their places in the row."
    return made


def _work_of(inner: nn.Module) -> tuple[float, tuple[int | None, ...]]:
    """Return what a token costs in linear layers, in pairs of attention, and the windows of the layers."""
    config: Any = inner.config.get_text_config()  # type: ignore[operator,union-attr]
    layers = max(layer_count(inner), 1)
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
