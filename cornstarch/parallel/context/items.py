"""Context parallelism of an encoder: images, clips or frames are dealt out over the ranks, balanced by patches.

    shard_items(model.vision_encoder, mesh["cp"])

Every rank is given all items and encodes its own; what comes out is gathered, so that every rank has all of it, in the
order of the items. In the backward pass an item's gradient is summed over the ranks and goes to whoever encoded it: the
sum of the ranks' gradients is that of the batch, as with `shard_tokens`. Where whole items cannot be dealt out evenly,
their patches are (cornstarch.parallel.context.patches).

Shapes: N items, P patches of all items, T tokens of an item, D width.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.exchange import gather
from cornstarch.parallel.context.patches import PatchCutter
from cornstarch.parallel.items import Items, check_apart, named_inputs, row_dim
from cornstarch.plan.dealing import deal_out
from cornstarch.trees import map_tensors, tensors_in

_MANY, _UNEVEN = 1024, 1.5  # patches of a rank, and how far beyond the mean, that are worth an exchange in each layer
_ATTACHED = "_cornstarch_item_dealer"
_ADVICE = "Use cp = 1 for this encoder."


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

    items: Items
    owners: list[int]

    def is_uneven(self, ranks: int) -> bool:
        """Whether some rank has far more than its part, and enough to do for others to help."""
        loads = [sum(self.items.patches[item] for item in self.of(rank)) for rank in range(ranks)]
        return self.items.known and max(loads) >= _MANY and max(loads) * ranks > _UNEVEN * sum(loads)

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
        self.deal: _Deal | None = None
        self.refusal: str | None = None
        self._cutter = PatchCutter(encoder, self.group) if patches != "never" else None
        self._is_trusted = False
        self._cutting: AbstractContextManager[None] | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep this rank's items."""
        check_apart(module, "use cp = 1.")
        named = named_inputs(self.encoder, args, kwargs)
        items = Items.of(self.encoder, named, _ADVICE)
        deal = _Deal(items, deal_out(items.patches, self.ranks))
        if self._cuts_patches(deal, named):
            assert self._cutter is not None
            self._cutting = self._cutter.on()
            self._cutting.__enter__()
            return (), named
        self.deal = deal
        mine = deal.run_by(self.rank)
        return (), {name: items.select(name, value, mine) for name, value in named.items()}

    def _cuts_patches(self, deal: _Deal, named: dict[str, Any]) -> bool:
        """Say whether each rank takes some patches of every item; the first time it is tried on the largest item."""
        items = deal.items
        if self._cutter is None or self.refusal is not None or (items.known and min(items.patches) < self.ranks):
            return False
        if self.patches == "auto" and not deal.is_uneven(self.ranks):
            return False
        if not self._is_trusted:
            # The largest: one that fits into a window tells nothing about others that do not.
            largest = max(range(len(items)), key=lambda item: items.patches[item])
            one = {name: items.select(name, value, [largest]) for name, value in named.items()}
            self.refusal = self._cutter.why_not(one)
            if self.refusal is not None:
                said = f"{type(unwrap(self.encoder)).__name__} cannot have its patches cut over ranks: {self.refusal}."
                if self.patches == "always":
                    raise UnsupportedModelError(said)
                warnings.warn(f"{said} Whole items are dealt out, which is uneven.", stacklevel=2)
            self._is_trusted = self.refusal is None
        return self._is_trusted

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
        tensors = tensors_in(output)
        encoded = deal.items.chosen(deal.run_by(self.rank))
        layouts: list[int] = []
        refusal: UnsupportedModelError | None = None
        try:
            layouts = [encoded.layout(tensor) for tensor in tensors]
        except UnsupportedModelError as error:  # the others may have understood theirs, and would wait
            refusal = error
        self._check_agreement(deal.items, tensors, layouts, refusal)
        rest = iter(layouts)
        return map_tensors(lambda tensor: self._gathered(tensor, next(rest), deal, encoded), output)

    def _check_agreement(
        self, items: Items, tensors: Sequence[Tensor], layouts: Sequence[int], refusal: UnsupportedModelError | None
    ) -> None:
        facts = [
            refusal is not None,
            len(items),
            sum(items.patches),
            len(tensors),
            *layouts,
            *(tensor.shape[-1] for tensor in tensors),
        ]
        # What is gathered along the first dimension must have the others alike.
        facts += [
            size
            for tensor, layout in zip(tensors, layouts, strict=refusal is None)
            for size in tensor.shape[row_dim(layout) + 1 :]
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

    def _gathered(self, tensor: Tensor, layout: int, deal: _Deal, encoded: Items) -> Tensor:
        lengths = deal.items.rows(layout, tensor, encoded)
        order = [deal.of(rank) for rank in range(self.ranks)]
        dim = row_dim(layout)
        own = tensor if order[self.rank] else tensor.narrow(dim, 0, 0)
        rows = gather(own, dim, [sum(lengths[item] for item in items) for items in order], self.group)
        dealt = [item for items in order for item in items]
        pieces = dict(zip(dealt, rows.split([lengths[item] for item in dealt], dim), strict=True))
        return torch.cat([pieces[item] for item in range(len(lengths))], dim)
