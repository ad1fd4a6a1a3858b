"""Context parallelism of an encoder: images, clips or frames are divided over ranks, balanced by patches.

    shard_items(model.vision_encoder, mesh["cp"])

Every rank is given all items, encodes its own, and gathers the outputs of all. In the backward pass an item's gradient
is summed over ranks and goes to the rank that encoded it: the sum of the ranks' gradients is that of the batch, as with
`shard_tokens`. Where whole items cannot be divided evenly, their patches are (cornstarch.parallel.context.patches).

Shapes: N items, P patches of all items, T tokens of an item, D width.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.facts import count_patches, find_mask
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.modes import gather_varying
from cornstarch.parallel.context.patches import PatchSharder
from cornstarch.parallel.distributed import all_gather
from cornstarch.plan.balancing import assign_largest_first
from cornstarch.trees import map_tensors, tensors_in

STACKED, FLAT, ONE_ROW = 1, 2, 3  # [N, …]; [tokens of all items, …]; [1, tokens of all items, …]
_MIXES_ITEMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Splitting patches costs an exchange in each layer. It pays if a rank has this many, this far beyond the mean.
MIN_PATCHES, MIN_IMBALANCE = 1024, 1.5
_ATTACHED = "_cornstarch_item_sharder"
_ADVICE = "Use cp = 1 for this encoder."


@dataclass(frozen=True)
class EncoderItems:
    """The items of one call of an encoder."""

    encoder: str  # the encoder's class, for messages
    advice: str  # what to do about an encoder whose items cannot be told apart, for messages
    patches: list[int]  # of each item
    lengths: list[int] | None  # tokens of each item, where the encoder puts those of all items in one row
    flat: bool  # whether the patches of all items are given in one row
    known: bool = True  # whether the patches are counted; otherwise each item counts as one

    @classmethod
    def of(cls, encoder: nn.Module, named: Mapping[str, Any], advice: str) -> EncoderItems:
        name = type(unwrap(encoder)).__name__
        grid = next((value for key, value in named.items() if key.endswith("grid_thw") and value is not None), None)
        tensors = [value for value in named.values() if isinstance(value, Tensor) and value.dim()]
        if not tensors:
            raise ConfigError(f"{name}, whose items are shared out over ranks, was given no tensor with items.")
        if grid is not None:
            return cls(name, advice, torch.as_tensor(grid).prod(-1).tolist(), None, flat=True)
        count = len(tensors[0])
        mask, lengths = find_mask(named), count_patches(encoder, named)
        if lengths is not None and len(lengths) == count:
            return cls(name, advice, lengths, lengths, flat=False)
        if mask is not None and len(mask) == count:
            return cls(name, advice, mask.sum(-1).tolist(), None, flat=False)
        # Images of one size: the encoder's config may say how large a patch is.
        size, images = getattr(getattr(unwrap(encoder), "config", None), "patch_size", None), tensors[0]
        if images.dim() != 4 or not isinstance(size, int):
            return cls(name, advice, [1] * count, None, flat=False, known=False)
        pixels = (images.shape[2] // size) * (images.shape[3] // size)
        return cls(name, advice, [pixels or 1] * count, None, flat=False)

    def __len__(self) -> int:
        return len(self.patches)

    def is_by_item(self, name: str, value: Tensor) -> bool:
        """Return whether an input has a row for each item, and not one for each patch."""
        if len(value) == len(self.patches):
            return True
        if self.flat and len(value) == sum(self.patches):
            return False
        given = f"{self.encoder} was given {name!r} of shape {list(value.shape)} beside {len(self.patches)} items:"
        raise build_refusal(given, self.advice)

    def select_input(self, name: str, value: Any, indices: Sequence[int]) -> Any:
        """Return the part of an input that belongs to some of the items, in their order."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if self.is_by_item(name, value):
            return value[torch.tensor(indices, dtype=torch.long, device=value.device)]
        pieces = value.split(self.patches)
        return torch.cat([pieces[item] for item in indices]) if indices else value[:0]

    def select(self, indices: Sequence[int]) -> EncoderItems:
        lengths = None if self.lengths is None else [self.lengths[item] for item in indices]
        return replace(self, patches=[self.patches[item] for item in indices], lengths=lengths)

    def layout(self, tensor: Tensor) -> int:
        """Return how the items lie in an output of the encoder."""
        if self.lengths is not None and tensor.shape[:2] == (1, sum(self.lengths)):
            return ONE_ROW
        whole = sum(self.patches)
        if self.flat and tensor.dim() and all(count * len(tensor) % whole == 0 for count in self.patches):
            return FLAT
        if tensor.dim() and len(tensor) == len(self.patches):
            return STACKED
        found = f"{self.encoder} put out a tensor of shape {list(tensor.shape)} for {len(self.patches)} items:"
        raise build_refusal(found, self.advice)

    def rows(self, layout: int, tensor: Tensor, encoded: EncoderItems) -> list[int]:
        """Return how many rows each item has in outputs of a layout, given one such output and its items."""
        if layout == STACKED:
            return [1] * len(self.patches)
        if layout == ONE_ROW:
            assert self.lengths is not None
            return self.lengths
        return [count * len(tensor) // sum(encoded.patches) for count in self.patches]


def build_refusal(found: str, advice: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{found} it is unknown which part belongs to which item. {advice}")


def row_dim(layout: int) -> int:
    """Return the dim of an output along which the rows of items follow one another."""
    return 1 if layout == ONE_ROW else 0


def check_items_independent(encoder: nn.Module, advice: str) -> None:
    """Refuse an encoder whose output for an item depends on the other items."""
    if encoder.training and any(isinstance(module, _MIXES_ITEMS) for module in encoder.modules()):
        raise UnsupportedModelError(
            f"{type(unwrap(encoder)).__name__} takes means over all items of a batch (BatchNorm): in training its "
            f"items cannot be shared out over ranks. Freeze it, or {advice}"
        )


def bind_inputs(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    inner = unwrap(encoder)
    named = {**inspect.signature(type(inner).forward).bind_partial(inner, *args).arguments, **kwargs}
    named.pop("self", None)
    return named


def shard_items(
    encoder: nn.Module, mesh: DeviceMesh, *, patches: Literal["auto", "always", "never"] = "auto"
) -> nn.Module:
    """Let each rank encode some of the items that all ranks are given; return the encoder, changed in place.

    Args:
        encoder: An encoder of transformers, or a `ModalEncoderModule` around one, whose projector every rank runs on
            all items.
        mesh: The ranks that share the items: one axis.
        patches: Whether each rank takes some patches of every item instead. auto: where whole items cannot be divided
            evenly, are large, and the encoder can do so; one item is computed both ways to find out.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError("shard_items needs the mesh of one axis, such as mesh['cp'].")
    if mesh.size() > 1:
        target = encoder.module if isinstance(encoder, ModalEncoderModule) else encoder
        sharder = _ItemSharder(target, mesh, patches)
        target.__dict__[_ATTACHED] = sharder
        target.register_forward_pre_hook(sharder.before, with_kwargs=True)
        target.register_forward_hook(sharder.after, with_kwargs=True, always_call=True)
    return encoder


def explain_whole_items(encoder: nn.Module) -> str | None:
    """Return why the patches of an item were not split over ranks although that was asked for, or None."""
    target = encoder.module if isinstance(encoder, ModalEncoderModule) else encoder
    sharder: _ItemSharder | None = target.__dict__.get(_ATTACHED)
    return None if sharder is None else sharder.refusal


class _ItemSharder:
    def __init__(self, encoder: nn.Module, mesh: DeviceMesh, patches: str) -> None:
        self.encoder, self.patches = encoder, patches
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.shards: tuple[EncoderItems, list[list[int]]] | None = None  # all items, and those that each rank encodes
        self.refusal: str | None = None
        self._patch_sharder = PatchSharder(encoder, self.group) if patches != "never" else None
        self._is_verified = False
        self._patch_context: AbstractContextManager[None] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_items_independent(module, "use cp = 1.")
        named = bind_inputs(self.encoder, args, kwargs)
        items = EncoderItems.of(self.encoder, named, _ADVICE)
        owners = assign_largest_first(items.patches, self.ranks)
        shards = [[item for item, owner in enumerate(owners) if owner == rank] for rank in range(self.ranks)]
        if self._should_split_patches(items, shards, named):
            assert self._patch_sharder is not None
            self._patch_context = self._patch_sharder.use()
            self._patch_context.__enter__()
            return (), named
        self.shards = items, shards
        mine = shards[self.rank] or [0]  # at least one, because FSDP's collectives need every rank
        return (), {name: items.select_input(name, value, mine) for name, value in named.items()}

    def _should_split_patches(self, items: EncoderItems, shards: list[list[int]], named: dict[str, Any]) -> bool:
        sharder = self._patch_sharder
        if sharder is None or self.refusal is not None or (items.known and min(items.patches) < self.ranks):
            return False
        loads = [sum(items.patches[item] for item in own) for own in shards]
        is_uneven = max(loads) >= MIN_PATCHES and max(loads) * self.ranks > MIN_IMBALANCE * sum(loads)
        if self.patches == "auto" and not (items.known and is_uneven):
            return False
        if not self._is_verified:
            # On the largest item: one that fits into a window tells nothing about others that do not.
            largest = max(range(len(items)), key=lambda item: items.patches[item])
            one = {name: items.select_input(name, value, [largest]) for name, value in named.items()}
            self.refusal = sharder.explain_refusal(one)
            if self.refusal is not None:
                said = f"{type(unwrap(self.encoder)).__name__} cannot have its patches cut over ranks: {self.refusal}."
                if self.patches == "always":
                    raise UnsupportedModelError(said)
                warnings.warn(f"{said} Whole items are dealt out, which is uneven.", stacklevel=2)
            self._is_verified = self.refusal is None
        return self._is_verified

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if self._patch_context is not None:
            self._patch_context.__exit__(None, None, None)
            self._patch_context = None
            return output
        found, self.shards = self.shards, None
        if found is None or output is None:  # the items were refused, or the encoder raised
            return output
        items, shards = found
        tensors = tensors_in(output)
        encoded = items.select(shards[self.rank] or [0])
        layouts: list[int] = []
        refusal: UnsupportedModelError | None = None
        try:
            layouts = [encoded.layout(tensor) for tensor in tensors]
        except UnsupportedModelError as error:  # other ranks may have understood theirs, and would wait
            refusal = error
        self._check_agreement(items, tensors, layouts, refusal)
        rest = iter(layouts)

        def gather(tensor: Tensor) -> Tensor:
            layout = next(rest)
            return self._gather(tensor, row_dim(layout), items.rows(layout, tensor, encoded), shards)

        return map_tensors(gather, output)

    def _check_agreement(
        self, items: EncoderItems, tensors: Sequence[Tensor], layouts: Sequence[int], refusal: Exception | None
    ) -> None:
        facts = [refusal is not None, len(items), sum(items.patches), len(tensors), *layouts]
        facts += [tensor.shape[-1] for tensor in tensors]
        # What is gathered along one dim must have all other dims alike.
        for tensor, layout in zip(tensors, layouts, strict=refusal is None):
            facts += tensor.shape[row_dim(layout) + 1 :]
        own = torch.zeros(64, dtype=torch.long, device=tensors[0].device if tensors else None)
        own[: min(len(facts), 64)] = torch.tensor(facts[:64])
        found = all_gather(own, self.group)
        if refusal is not None:
            raise refusal
        name = type(unwrap(self.encoder)).__name__
        if any(bool(one[0]) for one in found):
            raise build_refusal(f"{name} put out a tensor on another rank of which", _ADVICE)
        if any(not torch.equal(one, own) for one in found):
            raise ConfigError(
                f"The ranks that share the items of {name} were given different items, or its output depends on which "
                "items are together. Give all ranks of a context-parallel group the same samples, or use cp = 1 for "
                "this encoder."
            )

    def _gather(self, tensor: Tensor, dim: int, lengths: list[int], shards: list[list[int]]) -> Tensor:
        own = tensor if shards[self.rank] else tensor.narrow(dim, 0, 0)
        rows = gather_varying(own, dim, [sum(lengths[item] for item in items) for items in shards], self.group)
        gathered = [item for items in shards for item in items]
        pieces = dict(zip(gathered, rows.split([lengths[item] for item in gathered], dim), strict=True))
        return torch.cat([pieces[item] for item in range(len(lengths))], dim)
