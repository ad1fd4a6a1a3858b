"""Context parallelism of an encoder: images, clips or frames are dealt out over the ranks, balanced by patches.

    shard_items(model.vision_encoder, mesh["cp"])

Every rank is given all items and encodes its own; what comes out is gathered, so that every rank has all of it, in the
order of the items. In the backward pass an item's gradient is summed over the ranks and goes to whoever encoded it: the
sum of the ranks' gradients is that of the batch, as with `shard_tokens`. Where whole items cannot be dealt out evenly,
their patches are (cornstarch.parallel.context.patches).

Shapes: N items, P patches of all items, T tokens of an item, D width.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import ModelOutput

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.items import mask_of, patch_counts
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.exchange import gather
from cornstarch.parallel.context.patches import PatchCutter
from cornstarch.plan.dealing import deal_out

_STACKED, _FLAT, _ONE_ROW = 1, 2, 3  # [N, …]; [tokens of all items, …]; [1, tokens of all items, …]
_MANY, _UNEVEN = 1024, 1.5  # patches of a rank, and how far beyond the mean, that are worth an exchange in each layer
_ATTACHED = "_cornstarch_item_dealer"
_MIXES_ITEMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def shard_items(
    encoder: nn.Module, mesh: DeviceMesh, *, patches: Literal["auto", "always", "never"] = "auto"
) -> nn.Module:
    """Let each rank encode some of the items that all ranks are given; return the encoder, changed in place.

    Args:
        encoder: An encoder of transformers, or a `ModalEncoderModule` around one, whose projector every rank runs on
            all items.
        mesh: The ranks that share the items: one axis.
        patches: Whether each rank takes some patches of every item instead. auto: where whole items cannot be dealt out
            evenly, are large, and the encoder can do so; one item is computed both ways to find out.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError("shard_items needs the mesh of one axis, such as mesh['cp'].")
    if mesh.size() > 1:
        target = encoder.module if isinstance(encoder, ModalEncoderModule) else encoder
        dealer = _Dealer(target, mesh, patches)
        target.__dict__[_ATTACHED] = dealer
        target.register_forward_pre_hook(dealer.before, with_kwargs=True)
        target.register_forward_hook(dealer.after, with_kwargs=True, always_call=True)
    return encoder


def kept_in_one_piece(encoder: nn.Module) -> str | None:
    """Return why patches of an item were not cut over ranks although that was asked for; None if they were, or not."""
    target = encoder.module if isinstance(encoder, ModalEncoderModule) else encoder
    dealer: _Dealer | None = target.__dict__.get(_ATTACHED)
    return None if dealer is None else dealer.refusal


@dataclass(frozen=True)
class _Deal:
    """Who encodes which of a batch's items."""

    patches: list[int]
    """Of each item."""
    owners: list[int]
    lengths: list[int] | None
    """Tokens of each item, where the encoder lays those of all items in one row."""
    flat: bool
    """Whether the patches of all items come in one row, too."""
    known: bool = True
    """Whether the patches are counted; else each item stands for one."""

    def is_uneven(self, ranks: int) -> bool:
        """Whether some rank has far more than its part, and enough to do for others to help."""
        loads = [sum(self.patches[item] for item in self.of(rank)) for rank in range(ranks)]
        return self.known and max(loads) >= _MANY and max(loads) * ranks > _UNEVEN * sum(loads)

    def of(self, rank: int) -> list[int]:
        """Return the items of a rank."""
        return [item for item, owner in enumerate(self.owners) if owner == rank]

    def run_by(self, rank: int) -> list[int]:
        """Return what a rank encodes: it has to take part even if nothing is left for it."""
        return self.of(rank) or [0]


class _Dealer:
    """The hooks of one encoder."""

    def __init__(self, encoder: nn.Module, mesh: DeviceMesh, patches: str) -> None:
        self.encoder = encoder
        self.patches = patches
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.signature = inspect.signature(type(unwrap(encoder)).forward)
        self.mixing = any(isinstance(module, _MIXES_ITEMS) for module in encoder.modules())
        self.deal: _Deal | None = None
        self.refusal: str | None = None
        self._cutter = PatchCutter(encoder, self.group) if patches != "never" else None
        self._is_trusted = False
        self._cutting: AbstractContextManager[None] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep this rank's items."""
        if self.mixing and module.training:
            raise UnsupportedModelError(
                f"{type(unwrap(module)).__name__} takes means over all items of a batch (BatchNorm): in training its "
                "items cannot be dealt out. Freeze it, or use cp = 1."
            )
        named = {**self.signature.bind_partial(unwrap(self.encoder), *args).arguments, **kwargs}
        named.pop("self", None)
        deal = self._dealt(named)
        if self._cuts_patches(deal, named):
            assert self._cutter is not None
            self._cutting = self._cutter.on()
            self._cutting.__enter__()
            return (), named
        self.deal = deal
        mine = deal.run_by(self.rank)
        return (), {name: self._own(name, value, deal, mine) for name, value in named.items()}

    def _cuts_patches(self, deal: _Deal, named: dict[str, Any]) -> bool:
        """Say whether each rank takes some patches of every item; the first time it is tried on the largest item."""
        if self._cutter is None or self.refusal is not None or (deal.known and min(deal.patches) < self.ranks):
            return False
        if self.patches == "auto" and not deal.is_uneven(self.ranks):
            return False
        if not self._is_trusted:
            # The largest: one that fits into a window tells nothing about others that do not.
            largest = max(range(len(deal.patches)), key=lambda item: deal.patches[item])
            one = {name: self._own(name, value, deal, [largest]) for name, value in named.items()}
            self.refusal = self._cutter.why_not(one)
            if self.refusal is not None:
                said = f"{type(unwrap(self.encoder)).__name__} cannot have its patches cut over ranks: {self.refusal}."
                if self.patches == "always":
                    raise UnsupportedModelError(said)
                warnings.warn(f"{said} Whole items are dealt out, which is uneven.", stacklevel=2)
            self._is_trusted = self.refusal is None
        return self._is_trusted

    def _dealt(self, named: dict[str, Any]) -> _Deal:
        grid = next((value for name, value in named.items() if name.endswith("grid_thw") and value is not None), None)
        tensors = [value for value in named.values() if isinstance(value, Tensor) and value.dim()]
        if not tensors:
            raise ConfigError("An encoder whose items are dealt out was given no tensor with items.")
        if grid is not None:
            patches = torch.as_tensor(grid).prod(-1).tolist()
            return _Deal(patches, deal_out(patches, self.ranks), None, flat=True)
        count = len(tensors[0])
        mask, lengths = mask_of(named), patch_counts(self.encoder, named)
        if lengths is not None and len(lengths) == count:
            patches = lengths
        elif mask is not None and len(mask) == count:
            patches = mask.sum(-1).tolist()
        else:
            pixels, lengths = self._pixel_patches(tensors[0]), None
            patches = [pixels or 1] * count
            return _Deal(patches, deal_out(patches, self.ranks), lengths, flat=False, known=pixels is not None)
        return _Deal(patches, deal_out(patches, self.ranks), lengths, flat=False)

    def _pixel_patches(self, images: Tensor) -> int | None:
        """Return the patches of each of some images of one size, if the encoder says how large a patch is."""
        size = getattr(getattr(unwrap(self.encoder), "config", None), "patch_size", None)
        if images.dim() != 4 or not isinstance(size, int):
            return None
        return (images.shape[2] // size) * (images.shape[3] // size)

    def _own(self, name: str, value: Any, deal: _Deal, mine: list[int]) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if len(value) == len(deal.patches):
            return value[torch.tensor(mine, device=value.device)]
        if deal.flat and len(value) == sum(deal.patches):
            pieces = value.split(deal.patches)
            return torch.cat([pieces[item] for item in mine])
        raise UnsupportedModelError(
            f"{type(unwrap(self.encoder)).__name__} was given {name!r} of shape {list(value.shape)} beside "
            f"{len(deal.patches)} items: it is unknown which part belongs to which item. Use cp = 1 for this encoder."
        )

    # -------------------------------------------------------------------------------------------- outputs

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Gather what all ranks made."""
        if self._cutting is not None:
            self._cutting.__exit__(None, None, None)
            self._cutting = None
            return output
        deal, self.deal = self.deal, None
        if deal is None or output is None:  # the items were refused, or the encoder raised
            return output
        tensors = list(_tensors(output))
        layouts: list[int] = []
        refusal: UnsupportedModelError | None = None
        try:
            layouts = [self._layout(tensor, deal) for tensor in tensors]
        except UnsupportedModelError as error:  # the others may have understood theirs, and would wait
            refusal = error
        self._check_agreement(deal, tensors, layouts, refusal)
        rest = iter(layouts)
        return _each(output, lambda tensor: self._gathered(tensor, next(rest), deal))

    def _layout(self, tensor: Tensor, deal: _Deal) -> int:
        mine = deal.run_by(self.rank)
        if deal.lengths is not None and tensor.shape[:2] == (1, sum(deal.lengths[item] for item in mine)):
            return _ONE_ROW
        own = sum(deal.patches[item] for item in mine)
        if deal.flat and tensor.dim() and all(deal.patches[item] * len(tensor) % own == 0 for item in mine):
            return _FLAT
        if tensor.dim() and len(tensor) == len(mine):
            return _STACKED
        raise UnsupportedModelError(
            f"{type(unwrap(self.encoder)).__name__} put out a tensor of shape {list(tensor.shape)} for {len(mine)} "
            "items: it is unknown which part belongs to which item. Use cp = 1 for this encoder."
        )

    def _check_agreement(
        self, deal: _Deal, tensors: Sequence[Tensor], layouts: Sequence[int], refusal: UnsupportedModelError | None
    ) -> None:
        facts = [
            refusal is not None,
            len(deal.patches),
            sum(deal.patches),
            len(tensors),
            *layouts,
            *(tensor.shape[-1] for tensor in tensors),
        ]
        # What is gathered along the first dimension must have the others alike.
        facts += [
            size
            for tensor, layout in zip(tensors, layouts, strict=refusal is None)
            for size in tensor.shape[2 if layout == _ONE_ROW else 1 :]
        ]
        own = torch.zeros(64, dtype=torch.long, device=tensors[0].device if tensors else None)
        own[: min(len(facts), 64)] = torch.tensor(facts[:64])
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own, group=self.group)
        if refusal is not None:
            raise refusal
        if any(bool(one[0]) for one in found):
            raise UnsupportedModelError(
                f"{type(unwrap(self.encoder)).__name__} put out a tensor on another rank of which it is unknown which "
                "part belongs to which item. Use cp = 1 for this encoder."
            )
        if any(not torch.equal(one, own) for one in found):
            raise ConfigError(
                f"The ranks that share the items of {type(unwrap(self.encoder)).__name__} were given different items, "
                "or its output depends on which items are together. Give all ranks of a context-parallel group the "
                "same samples, or use cp = 1 for this encoder."
            )

    def _gathered(self, tensor: Tensor, layout: int, deal: _Deal) -> Tensor:
        lengths = self._lengths(tensor, layout, deal)
        order = [deal.of(rank) for rank in range(self.ranks)]
        dim = 1 if layout == _ONE_ROW else 0
        own = tensor if order[self.rank] else tensor.narrow(dim, 0, 0)
        rows = gather(own, dim, [sum(lengths[item] for item in items) for items in order], self.group)
        dealt = [item for items in order for item in items]
        pieces = dict(zip(dealt, rows.split([lengths[item] for item in dealt], dim), strict=True))
        return torch.cat([pieces[item] for item in range(len(lengths))], dim)

    def _lengths(self, tensor: Tensor, layout: int, deal: _Deal) -> list[int]:
        """Return how many rows of an output each item has."""
        if layout == _STACKED:
            return [1] * len(deal.patches)
        if layout == _ONE_ROW:
            assert deal.lengths is not None
            return deal.lengths
        own = sum(deal.patches[item] for item in deal.run_by(self.rank))
        return [count * len(tensor) // own for count in deal.patches]


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in an output, in its order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, ModelOutput | list | tuple):
        for value in output.values() if isinstance(output, ModelOutput) else output:
            yield from _tensors(value)


def _each(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with every tensor in it changed, in its order."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, ModelOutput):
        return type(output)(**{name: _each(value, change) for name, value in output.items()})
    if isinstance(output, list | tuple):
        return type(output)(_each(value, change) for value in output)
    return output
