"""Replicas lend images to one another, so that a sample with many of them does not hold up all the others.

    lend_items(model.vision_encoder, mesh["dp"])      # on every rank, before the model is wrapped
    with lending(model):                              # a pass of training; elsewhere nothing is exchanged
        loss = model(**batch).loss
        loss.backward()

At each call of the encoder the ranks tell one another how large their items are, and all find the same deal. What is
beyond an even share travels to ranks that have less, is encoded there beside their own, and its tokens come back. In
the backward pass the gradients of those tokens take the way back, so that the sum of the ranks' gradients is what it
was. Each rank reads, and computes a loss of, its own samples only.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.items import token_states
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.carriage import backend_of
from cornstarch.parallel.context.exchange import exchange
from cornstarch.parallel.items import FLAT, Items, check_apart, named_inputs, row_dim
from cornstarch.plan.dealing import lend_out
from cornstarch.trees import map_tensors, tensors_in

_ATTACHED = "_cornstarch_lender"
_ADVICE = "Set data.split_images to false."
_TOLD = 64  # numbers of a rank's first message; a second one has the rest of its items, if there are so many
_PLAIN = (type(None), bool, int, float, str, torch.dtype)


def lend_items(encoder: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let ranks with few items encode some of those of others, within `lending`; return the encoder, changed in place.

    All ranks must call the encoder equally often: one that has no item calls it with a stand-in, as
    `MultimodalModel.keep_encoders_running` lets it. Call it before the model is wrapped by DDP or FSDP.

    Args:
        encoder: An encoder of transformers, or a `ModalEncoderModule` around one.
        mesh: The replicas: one axis. Give them a process group of their own: gradients may be on their way in another
            one, in an order that differs from rank to rank.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError("lend_items needs the mesh of one axis, such as mesh['dp'].")
    target = encoder.module if isinstance(encoder, ModalEncoderModule) else encoder
    check_apart(target, _ADVICE[0].lower() + _ADVICE[1:])
    if mesh.size() > 1:
        lender = _Lender(encoder, target, mesh)
        encoder.__dict__[_ATTACHED] = lender
        target.register_forward_pre_hook(lender.before, with_kwargs=True)
        target.register_forward_hook(lender.after, with_kwargs=True, always_call=True)
    return encoder


def lends(model: nn.Module) -> bool:
    """Whether some encoder in a model lends items within `lending`."""
    return next(_lenders(model), None) is not None


@contextmanager
def lending(model: nn.Module) -> Iterator[None]:
    """Run a block in which encoders lend items; all ranks must run it, and call each encoder equally often."""
    lenders = list(_lenders(model))
    for lender in lenders:
        lender.is_on = True
    try:
        yield
    finally:
        for lender in lenders:
            lender.is_on = False


def _lenders(model: nn.Module) -> Iterator[_Lender]:
    return (module.__dict__[_ATTACHED] for module in model.modules() if _ATTACHED in module.__dict__)


@dataclass(frozen=True)
class _Told:
    """What a rank has said before a call of the encoder."""

    is_refused: bool
    form: int
    """Stands for all that items must have in common to be encoded together."""
    patches: list[int]
    """Of each item; of a stand-in, nothing."""


@dataclass(frozen=True)
class _Loan:
    """Who encodes what in one call."""

    rank: int
    items: Items
    """Those that this rank was given."""
    encoded: Items
    """Those that it encodes: of one rank after the other."""
    takers: list[list[int]]
    """Of each rank's items, who encodes them; a stand-in is no item."""
    forms: list[int]
    """Of each rank's items."""

    def of(self, owner: int, taker: int) -> list[int]:
        """Return which of a rank's items another one encodes."""
        return [item for item, whose in enumerate(self.takers[owner]) if whose == taker]

    @property
    def stands_in(self) -> bool:
        """Whether this rank has no items of its own."""
        return not self.takers[self.rank]

    @property
    def moving(self) -> set[int]:
        """The forms of items that are lent."""
        return {self.forms[owner] for owner, whose in enumerate(self.takers) if any(one != owner for one in whose)}


class _Lender:
    """The hooks of one encoder."""

    def __init__(self, whole: nn.Module, encoder: nn.Module, mesh: DeviceMesh) -> None:
        self.encoder, self.name = encoder, type(unwrap(encoder)).__name__
        self.modal = whole if isinstance(whole, ModalEncoderModule) else None
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.is_on = False
        # What ranks tell one another is wanted on the CPU, which then does not wait for a GPU.
        self.speaks_on = "cpu" if backend_of(self.group, "cpu") is not None else mesh.device_type
        self._loan: _Loan | None = None
        self._has_warned = False

    # -------------------------------------------------------------------------------------------- inputs

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Agree on who encodes what, and exchange the items that are lent."""
        if not self.is_on:
            return None
        items: Items | None = None
        named: dict[str, Any] = {}
        refusal: ConfigError | None = None
        form = 0
        try:
            check_apart(module, _ADVICE[0].lower() + _ADVICE[1:])
            named = named_inputs(self.encoder, args, kwargs)
            items = Items.of(self.encoder, named, _ADVICE)
            form = self._form(named, items)
        except ConfigError as error:  # the others would wait
            refusal = error
        stands_in = self.modal is not None and self.modal.is_standing_in
        told = self._tell(_Told(refusal is not None, form, [] if items is None or stands_in else items.patches))
        if refusal is not None:
            raise refusal
        if any(one.is_refused for one in told):
            raise UnsupportedModelError(
                f"{self.name} was given something on another rank of which it is unknown which part belongs to which "
                f"item. {_ADVICE}"
            )
        assert items is not None
        takers = self._dealt(told)
        if all(taker == owner for owner, whose in enumerate(takers) for taker in whose):
            return None
        loan = _Loan(self.rank, items, items, takers, [one.form for one in told])
        inputs = {name: self._exchanged(name, value, loan, told) for name, value in named.items()}
        self._loan = replace(loan, encoded=Items.of(self.encoder, inputs, _ADVICE))
        return (), inputs

    def _form(self, named: dict[str, Any], items: Items) -> int:
        """Return a number for all that items must have in common to be encoded together."""
        said: list[Any] = []
        for name, value in sorted(named.items()):
            if isinstance(value, Tensor) and value.dim():
                if value.requires_grad:
                    raise UnsupportedModelError(f"{self.name}: {name!r} is trained, and cannot be lent. {_ADVICE}")
                said.append((name, items.is_by_item(name, value), tuple(value.shape[1:]), str(value.dtype)))
            elif isinstance(value, _PLAIN):
                said.append((name, repr(value)))
            else:
                raise UnsupportedModelError(
                    f"{self.name} was given {name!r}, a {type(value).__name__}: it is unknown which part belongs to "
                    f"which item. {_ADVICE}"
                )
        return _number(said)

    def _tell(self, own: _Told) -> list[_Told]:
        """Return what all ranks say."""
        room = _TOLD - 3
        first = self._gathered([own.is_refused, own.form, len(own.patches), *own.patches[:room]], _TOLD)
        counts = [one[2] for one in first]
        more = max(counts) - room
        rest = self._gathered(own.patches[room:], more) if more > 0 else [[] for _ in first]
        return [
            _Told(bool(one[0]), one[1], [*one[3:], *others][: one[2]]) for one, others in zip(first, rest, strict=True)
        ]

    def _gathered(self, numbers: Sequence[int], size: int) -> list[list[int]]:
        """Return numbers of all ranks, filled up to so many."""
        own = torch.zeros(size, dtype=torch.long)
        own[: len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        own = own.to(self.speaks_on)
        found = own.new_empty(self.ranks, size)
        dist.all_gather(list(found.unbind()), own, group=self.group)
        return found.tolist()

    def _dealt(self, told: Sequence[_Told]) -> list[list[int]]:
        """Return who encodes which items: ranks lend to those whose items have the same form."""
        takers = [[owner] * len(one.patches) for owner, one in enumerate(told)]
        alike: dict[int, list[int]] = {}
        for rank, one in enumerate(told):
            alike.setdefault(one.form, []).append(rank)
        for ranks in alike.values():
            for owner, whose in zip(ranks, lend_out([told[rank].patches for rank in ranks]), strict=True):
                takers[owner] = [ranks[taker] for taker in whose]
        if len(alike) > 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"data.split_images: the items of {self.name} do not have the same shape on all replicas, as where "
                "images are filled up to the largest of a batch. They are lent among replicas of one shape only.",
                stacklevel=2,
            )
        return takers

    def _exchanged(self, name: str, value: Any, loan: _Loan, told: Sequence[_Told]) -> Any:
        """Return an input of the items that this rank encodes."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        pieces, shapes = [], []
        for rank, one in enumerate(told):
            away, here = loan.of(self.rank, rank), loan.of(rank, self.rank)
            is_self = rank == self.rank
            pieces.append(loan.items.select(name, value, [] if is_self else away))
            rows = len(here) if loan.items.is_by_item(name, value) else sum(one.patches[item] for item in here)
            shapes.append((0 if is_self else rows, *value.shape[1:]))
        received = exchange(pieces, shapes, self.group)
        received[self.rank] = loan.items.select(name, value, loan.of(self.rank, self.rank))
        made = torch.cat(received)
        return made if len(made) else value  # nothing was lent to this rank, which stands in

    # -------------------------------------------------------------------------------------------- outputs

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Send what was made of the others' items back to them."""
        loan, self._loan = self._loan, None
        if loan is None:
            return output
        tensors: list[Tensor] = []
        layouts: list[int] = []
        refusal: UnsupportedModelError | None = None
        try:
            output = self._tokens(output)
            tensors = tensors_in(output)
            layouts = [loan.encoded.layout(tensor) for tensor in tensors]
        except UnsupportedModelError as error:  # the others may have understood theirs, and would wait
            refusal = error
        self._check_agreement(loan, tensors, layouts, refusal, has_failed=output is None)
        if output is None:  # the encoder has raised, which goes on from here
            return None
        ways = [_Way(loan, tensor, layout, self.group) for tensor, layout in zip(tensors, layouts, strict=True)]
        returned = iter(_Return.apply(ways, self._used, *tensors))
        return map_tensors(lambda _: next(returned), output)

    def _tokens(self, output: Any) -> Any:
        """Return what of an output is looked at: its tokens alone, if there is nobody to look at the rest."""
        modal = self.modal
        if output is None or modal is None or modal.projector is None or modal.postprocess_module_callback is not None:
            return output
        return token_states(output)

    def _check_agreement(
        self,
        loan: _Loan,
        tensors: Sequence[Tensor],
        layouts: Sequence[int],
        refusal: UnsupportedModelError | None,
        has_failed: bool,
    ) -> None:
        """Let all ranks raise where one cannot go on."""
        patches = sum(loan.encoded.patches)
        rows = [
            (layout, tuple(tensor.shape[row_dim(layout) + 1 :]), _ratio(len(tensor), patches) if layout == FLAT else "")
            for layout, tensor in zip(layouts, tensors, strict=refusal is None)
        ]
        types = [str(tensor.dtype) for tensor in tensors]
        found = self._gathered([refusal is not None, has_failed, _number([rows, types]), _number(types)], 4)
        if refusal is not None:
            raise refusal
        if has_failed:
            return
        if any(one[1] for one in found):
            raise ConfigError(f"{self.name} has failed on another rank, which lends items: see what that one says.")
        if any(one[0] for one in found):
            raise UnsupportedModelError(
                f"{self.name} put out a tensor on another rank of which it is unknown which part belongs to which "
                f"item. {_ADVICE}"
            )
        made = {(form, one[2]) for form, one in zip(loan.forms, found, strict=True) if form in loan.moving}
        if len({one[3] for one in found}) > 1 or len(made) > len(loan.moving):
            raise UnsupportedModelError(
                f"{self.name} put out tensors of different shapes on different ranks: they depend on which items are "
                f"together, and cannot be sent back. {_ADVICE}"
            )

    def _used(self, gradients: Sequence[Tensor | None]) -> list[bool]:
        """Return which outputs have a gradient, on whichever rank."""
        found = self._gathered([gradient is not None for gradient in gradients], len(gradients))
        return [any(one) for one in zip(*found, strict=True)]


class _Way:
    """How one tensor that the encoder has put out gets to the ranks whose items it is of, and its gradient back."""

    def __init__(self, loan: _Loan, tensor: Tensor, layout: int, group: dist.ProcessGroup) -> None:
        self.loan, self.group, self.dim = loan, group, row_dim(layout)
        self.shape = tensor.shape
        self.rows = loan.items.rows(layout, tensor, loan.encoded)
        """Of each item of this rank."""
        ranks = range(len(loan.takers))
        self.own = [loan.of(loan.rank, taker) for taker in ranks]
        made = iter(loan.encoded.rows(layout, tensor, loan.encoded))
        self.made = [sum(next(made) for _ in loan.of(owner, loan.rank)) for owner in ranks]
        """Rows that this rank has made for each; none at all, if it has but a stand-in."""

    def forth(self, tensor: Tensor) -> Tensor:
        """Return the tokens of this rank's items, in their order, of what it has made of those that it encodes."""
        away = tensor.split(self.made, self.dim) if any(self.made) else [tensor.narrow(self.dim, 0, 0)] * len(self.made)
        shapes = [self._shape(sum(self.rows[item] for item in items)) for items in self.own]
        received = exchange(away, shapes, self.group)
        if self.loan.stands_in:  # nobody reads it
            return tensor.new_zeros(self._shape(sum(self.rows)))
        pieces: dict[int, Tensor] = {}
        for items, part in zip(self.own, received, strict=True):
            pieces |= zip(items, part.split([self.rows[item] for item in items], self.dim), strict=True)
        return torch.cat([pieces[item] for item in range(len(self.rows))], self.dim)

    def back(self, gradient: Tensor) -> Tensor:
        """Return the gradient of what this rank has made, of those of its items' tokens."""
        nothing = gradient.narrow(self.dim, 0, 0)
        pieces = gradient.split(self.rows, self.dim)
        away = [torch.cat([nothing, *(pieces[item] for item in items)], self.dim) for items in self.own]
        received = exchange(away, [self._shape(rows) for rows in self.made], self.group)
        return torch.cat(received, self.dim) if any(self.made) else gradient.new_zeros(self.shape)

    def _shape(self, rows: int) -> list[int]:
        return [*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]]


class _Return(torch.autograd.Function):
    """All that an encoder has put out, on its way in one step.

    So ranks exchange gradients in one step, too, in whichever order those of several outputs are ready, which is
    another one where there was a stand-in. What nobody has used is left without a gradient, as without lending.
    """

    @staticmethod
    def forward(
        ctx: Any, ways: Sequence[_Way], used: Callable[[Sequence[Tensor | None]], list[bool]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ways, ctx.used, ctx.types = ways, used, [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        made = tuple(way.forth(tensor) for way, tensor in zip(ways, tensors, strict=True))
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        ctx.lengths = [one.shape for one in made]
        ctx.device = tensors[0].device
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = []
        used = ctx.used(gradients)
        for way, gradient, is_used, shape, dtype in zip(ctx.ways, gradients, used, ctx.lengths, ctx.types, strict=True):
            if gradient is None and is_used:
                gradient = torch.zeros(shape, dtype=dtype, device=ctx.device)
            found.append(None if gradient is None else way.back(gradient))
        return None, None, *found


def _ratio(rows: int, patches: int) -> tuple[int, int]:
    shared = math.gcd(rows, patches)
    return rows // shared, patches // shared


def _number(said: Any) -> int:
    """Return a number that stands for what was said, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7])


__all__ = ["lend_items", "lending", "lends"]
