"""The patches of an image over ranks: an encoder's tokens are sharded between its first layer and its last.

Where a batch has fewer items than ranks, or one that is larger than all others together, whole items cannot be divided
evenly. Then every rank embeds all items and keeps some tokens of each until after the last layer:

    all tokens -> some of each item's -> layers, whose attention gathers keys and values -> all tokens

As with whole items, the sum of the ranks' gradients is that of the batch.

Shape letters: B rows, H heads, S tokens of an item or a row, s those of this rank, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cornstarch.attention.backends import run_attention
from cornstarch.attention.interface import IMPLEMENTATION, set_attention_function
from cornstarch.attention.mask_verification import logits_tolerance, use_eval_mode
from cornstarch.errors import UnsupportedModelError
from cornstarch.kernels.compile import run_eagerly
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.modes import gather_varying
from cornstarch.parallel.tensor.layers import change_output
from cornstarch.parallel.tensor.sequence import find_layers
from cornstarch.trees import tensors_in

# An argument of a layer's call, not an attribute: activation checkpointing passes it again when it recomputes a layer.
_PASS = "patch_shards"
_BOUNDS = "cu_seqlens"
# Arguments of layers that have a row for each token.
_BY_TOKEN = ("position_emb", "rotary", "cos", "sin", "freqs", "position_ids")


@dataclass(eq=False)
class PatchShards:
    """How the tokens of one forward pass are sharded."""

    lengths: list[int]  # of each item in a row of many; or of a row, if each item has one of its own
    dim: int  # the dim of the tokens in an activation
    rank: int
    ranks: int
    group: dist.ProcessGroup
    bounds: Tensor | None = None  # where items begin and end in a row of many, as layers get it

    def part(self, length: int, rank: int) -> slice:
        """Return the tokens of an item that a rank has."""
        return slice(length * rank // self.ranks, length * (rank + 1) // self.ranks)

    def sizes(self, length: int) -> list[int]:
        """Return how many of an item's tokens each rank has."""
        return [part.stop - part.start for part in (self.part(length, rank) for rank in range(self.ranks))]

    def places(self, rank: int) -> Tensor:
        """Return the indices of a rank's tokens in the row."""
        first, found = 0, []
        for length in self.lengths:
            part = self.part(length, rank)
            found.append(torch.arange(first + part.start, first + part.stop))
            first += length
        return torch.cat(found)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.index_select(dim, self.places(self.rank).to(tensor.device))

    def collect(self, own: Tensor) -> Tensor:
        """Return all tokens, in their order."""
        sizes = [sum(self.sizes(length)[rank] for length in self.lengths) for rank in range(self.ranks)]
        together = gather_varying(own, self.dim, sizes, self.group)
        order = torch.cat([self.places(rank) for rank in range(self.ranks)]).argsort()
        return together.index_select(self.dim, order.to(own.device))


class _PatchAttention:
    """The attention of one layer; it is called once for each item in a row of many."""

    def __init__(self, cut: PatchShards) -> None:
        self.cut, self.calls = cut, 0

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from this rank's tokens to those of all: [B, s, H, D]."""
        name = type(module).__name__
        length = self.cut.lengths[self.calls % len(self.cut.lengths)]
        self.calls += 1
        sizes, part = self.cut.sizes(length), self.cut.part(length, self.cut.rank)
        if query.shape[2] != sizes[self.cut.rank] or key.shape[2] != query.shape[2]:
            raise UnsupportedModelError(f"{name} attends from {query.shape[2]} to {key.shape[2]} tokens of {length}")
        for option, given in options.items():
            if isinstance(given, Tensor) and given.numel() > 1 and option != "s_aux":
                raise UnsupportedModelError(f"{name} changes its attention by {option!r}")
        both = gather_varying(torch.cat([key, value], dim=-1), 2, sizes, self.cut.group)
        keys, values = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        if isinstance(mask, Tensor) and mask.shape[-2] > 1:
            mask = mask[..., part, :]
        elif mask is not None and not isinstance(mask, Tensor):
            raise UnsupportedModelError(f"{name} has a {type(mask).__name__} for a mask")
        return run_attention(module, query, keys, values, mask, **options)


class PatchSharder:
    """The hooks of one encoder's layers; they do nothing outside of `use`."""

    def __init__(self, encoder: nn.Module, group: dist.ProcessGroup) -> None:
        self.encoder, self.group = encoder, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.layers = find_layers(encoder)[1]
        self._is_on = False
        self._pass: PatchShards | None = None
        self._running: list[tuple[_PatchAttention, Any]] = []
        classes = {kind: self._build_class(kind) for kind in dict.fromkeys(map(type, self.layers))}
        for layer in self.layers:
            self._attach(layer)
            layer.__class__ = classes[type(layer)]

    @contextmanager
    def use(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on, self._pass = False, None

    def _build_class(self, kind: type[nn.Module]) -> type[nn.Module]:
        """Return a class whose calls begin a pass at the first layer; layers of one class share compiled variants."""
        signature, ranks = inspect.signature(kind.forward), self.ranks

        def call(module: nn.Module, *inputs: Any, **options: Any) -> Any:
            if not self._is_on:
                return kind.__call__(module, *inputs, **options)
            if module is self.layers[0]:
                named = _bind(signature, inputs, options)
                first, bounds = next(iter(named.values())), named.get(_BOUNDS)
                lengths = [first.shape[-2]] if bounds is None else bounds.diff().tolist()
                if min(lengths) < ranks:
                    raise UnsupportedModelError(f"an item of {min(lengths)} tokens cannot be cut over {ranks} ranks")
                self._pass = PatchShards(lengths, first.dim() - 2, self.rank, ranks, self.group, bounds)
            return kind.__call__(module, *inputs, **options, **{_PASS: self._pass})

        return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

    def _attach(self, layer: nn.Module) -> None:
        is_first, is_last = layer is self.layers[0], layer is self.layers[-1]
        signature = inspect.signature(type(layer).forward)

        def enter(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
            cut: PatchShards | None = options.pop(_PASS, None)
            if cut is None:
                return inputs, options
            named = _bind(signature, inputs, options)
            first = next(iter(named))
            changed = {name: _shard_argument(cut, name, value, type(module).__name__) for name, value in named.items()}
            changed[first] = cut.own(named[first], cut.dim) if is_first else named[first]
            attention = _PatchAttention(cut)
            self._running.append((attention, set_attention_function(attention)))
            return (), changed

        def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not self._running:
                return output
            attention, end = self._running.pop()
            end()
            if output is None:  # it raised
                return output
            if not attention.calls or attention.calls % len(attention.cut.lengths):
                name = type(module).__name__
                raise UnsupportedModelError(f"{name} does not attend through transformers' attention interface")
            return change_output(output, attention.cut.collect) if is_last else output

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave, always_call=True)

    def explain_refusal(self, item: dict[str, Any]) -> str | None:
        """Compute one item whole and sharded; return why the encoder cannot be sharded, or None. A collective call."""
        inner: Any = unwrap(self.encoder)
        if not self.layers:
            return "it has no list of layers"
        before = getattr(getattr(inner, "config", None), "_attn_implementation", None)
        found, reason = torch.inf, "cut, it computes something else than whole"
        try:
            inner.set_attn_implementation(IMPLEMENTATION)
            with use_eval_mode(self.encoder), run_eagerly():  # a trial is no reason to compile layers
                # Not by a call: the encoder is being called already, and FSDP's hooks around that must not run twice.
                expected = tensors_in(self.encoder.forward(**item))
                with self.use():
                    computed = tensors_in(self.encoder.forward(**item))
            if [one.shape for one in computed] == [one.shape for one in expected]:
                pairs = [(a, b) for a, b in zip(computed, expected, strict=True) if b.is_floating_point() and b.numel()]
                far = [float((a - b).float().norm() / b.float().norm().clamp(min=1e-12)) for a, b in pairs]
                found = max(far, default=0.0)
        except Exception as error:  # encoders fail in many ways when tokens are missing
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        device = next(self.encoder.parameters()).device
        most = torch.tensor(found, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        if float(most) <= logits_tolerance(self.encoder, device):
            return None
        if before is not None:
            # Not by transformers' setter, which looks for a package for any name that contains "flash".
            inner.config._attn_implementation = before
        return reason


def _bind(signature: inspect.Signature, inputs: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in signature.parameters if name != "self"]
    return {**dict(zip(names, inputs, strict=False)), **options}


def _shard_argument(cut: PatchShards, name: str, value: Any, layer: str) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_shard_argument(cut, name, one, layer) for one in value)
    if name == _BOUNDS:
        if cut.bounds is None or (value is not cut.bounds and not torch.equal(value, cut.bounds)):
            raise UnsupportedModelError(f"the tokens of {layer} see other groups than those of the first layer")
        sizes = [0, *(cut.sizes(length)[cut.rank] for length in cut.lengths)]
        return torch.tensor(sizes).cumsum(0).to(cut.bounds)  # of this rank's parts of the items
    if not isinstance(value, Tensor) or value.numel() <= 1 or name in ("attention_mask", "hidden_states"):
        return value
    if any(word in name for word in _BY_TOKEN):
        dim = next((d for d in (value.dim() - 2, 0, value.dim() - 1) if value.shape[d] == sum(cut.lengths)), None)
        if dim is not None:
            return cut.own(value, dim)
    raise UnsupportedModelError(f"{layer} is given {name!r} of shape {list(value.shape)}, which is not cut with tokens")
