"""Encoder load balancing: replicas with many images let others encode some, so that no replica holds up the step.

    attach_encoder_balancing(model.vision_encoder, mesh["dp"])   # on every rank, before the model is wrapped
    with balance_encoders(model):                                # a training step; outside nothing is exchanged
        loss = model(**batch).loss
        loss.backward()

At each call of the encoder, ranks exchange the sizes of their items and compute the same assignment. Items beyond an
even load are sent to ranks that have less, encoded there together with their own, and the tokens come back. In the
backward pass the gradients of those tokens travel in the other direction, so that the sum of the ranks' gradients does
not change. Each rank reads, and computes a loss of, its own samples only.
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
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.facts import get_token_states
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context import encoder_items
from cornstarch.parallel.context.encoder_items import EncoderItems, row_dim
from cornstarch.parallel.context.modes import all_to_all
from cornstarch.parallel.distributed import all_gather, get_device_backend
from cornstarch.plan.balancing import assign_surplus
from cornstarch.trees import map_tensors, tensors_in

_ATTACHED = "_cornstarch_encoder_balancer"
_ADVICE = "Set data.balance_encoders to false."
_SUMMARY = 64  # numbers of a rank's first message; a second one has the rest of its items, if there are more
_PLAIN = (type(None), bool, int, float, str, torch.dtype)


def attach_encoder_balancing(encoder: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let ranks with few items encode some of those of others within `balance_encoders`; return the encoder.

    All ranks must call the encoder equally often: a rank without items calls it with a placeholder, as
    `MultimodalModel.keep_encoders_running` lets it. Call this before the model is wrapped by DDP or FSDP.

    Args:
        encoder: An encoder of transformers, or a `ModalEncoderModule` around one; changed in place.
        mesh: The replicas: one axis. Give them a process group of their own: gradients may be in flight in another
            one, in an order that differs from rank to rank.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ConfigError("attach_encoder_balancing needs the mesh of one axis, such as mesh['dp'].")
    target = encoder.module if isinstance(encoder, ModalEncoderModule) else encoder
    encoder_items.check_items_independent(target, _ADVICE[0].lower() + _ADVICE[1:])
    if mesh.size() > 1:
        balancer = _EncoderBalancer(encoder, target, mesh)
        encoder.__dict__[_ATTACHED] = balancer
        target.register_forward_pre_hook(balancer.before, with_kwargs=True)
        target.register_forward_hook(balancer.after, with_kwargs=True, always_call=True)
    return encoder


def has_encoder_balancing(model: nn.Module) -> bool:
    """Return whether the items of some encoder in a model are balanced within `balance_encoders`."""
    return next(_iter_balancers(model), None) is not None


@contextmanager
def balance_encoders(model: nn.Module) -> Iterator[None]:
    """Run a block in which items are balanced; all ranks must run it, and call each encoder equally often."""
    balancers = list(_iter_balancers(model))
    for balancer in balancers:
        balancer.is_on = True
    try:
        yield
    finally:
        for balancer in balancers:
            balancer.is_on = False


def _iter_balancers(model: nn.Module) -> Iterator[_EncoderBalancer]:
    return (module.__dict__[_ATTACHED] for module in model.modules() if _ATTACHED in module.__dict__)


@dataclass(frozen=True)
class _Assignment:
    """Which rank encodes which items in one call."""

    rank: int
    items: EncoderItems  # the items of this rank's batch
    encoded: EncoderItems  # the items that this rank encodes, ordered by owner
    takers: list[list[int]]  # of each rank's items, the rank that encodes them; a placeholder is not an item
    forms: list[int]  # of each rank's items

    def of(self, owner: int, taker: int) -> list[int]:
        """Return the items of one rank that another one encodes."""
        return [item for item, whose in enumerate(self.takers[owner]) if whose == taker]


class _EncoderBalancer:
    def __init__(self, whole: nn.Module, encoder: nn.Module, mesh: DeviceMesh) -> None:
        self.encoder, self.name = encoder, type(unwrap(encoder)).__name__
        self.modal = whole if isinstance(whole, ModalEncoderModule) else None
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.is_on = False
        # Numbers about items are needed on the CPU, which then does not wait for a GPU.
        self.control_device = "cpu" if get_device_backend(self.group, "cpu") is not None else mesh.device_type
        self._assignment: _Assignment | None = None
        self._has_warned = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on:
            return None
        items: EncoderItems | None = None
        named: dict[str, Any] = {}
        refusal: ConfigError | None = None
        form = 0
        try:
            encoder_items.check_items_independent(module, _ADVICE[0].lower() + _ADVICE[1:])
            named = encoder_items.bind_inputs(self.encoder, args, kwargs)
            items = EncoderItems.of(self.encoder, named, _ADVICE)
            form = self._hash_form(named, items)
        except ConfigError as error:  # raised below: other ranks would wait for this one
            refusal = error
        is_placeholder = self.modal is not None and self.modal.is_running_stand_in
        patches = [] if items is None or is_placeholder else items.patches
        room = _SUMMARY - 3
        first = self._all_gather([refusal is not None, form, len(patches), *patches[:room]], _SUMMARY)
        more = max(one[2] for one in first) - room
        rest = self._all_gather(patches[room:], more) if more > 0 else [[] for _ in first]
        forms = [one[1] for one in first]
        sizes = [[*one[3:], *others][: one[2]] for one, others in zip(first, rest, strict=True)]
        if refusal is not None:
            raise refusal
        if any(one[0] for one in first):
            raise encoder_items.build_refusal(f"{self.name} was given something on another rank of which", _ADVICE)
        assert items is not None
        takers = self._assign(forms, sizes)
        if all(taker == owner for owner, whose in enumerate(takers) for taker in whose):
            return None
        assignment = _Assignment(self.rank, items, items, takers, forms)
        inputs = {name: self._exchange_input(name, value, assignment, sizes) for name, value in named.items()}
        self._assignment = replace(assignment, encoded=EncoderItems.of(self.encoder, inputs, _ADVICE))
        return (), inputs

    def _hash_form(self, named: dict[str, Any], items: EncoderItems) -> int:
        """Return a hash of everything that items must have in common to be encoded together."""
        facts: list[Any] = []
        for name, value in sorted(named.items()):
            if isinstance(value, Tensor) and value.dim():
                if value.requires_grad:
                    raise UnsupportedModelError(f"{self.name}: {name!r} is trained, and cannot be lent. {_ADVICE}")
                facts.append((name, items.is_by_item(name, value), tuple(value.shape[1:]), str(value.dtype)))
            elif isinstance(value, _PLAIN):
                facts.append((name, repr(value)))
            else:
                given = f"{self.name} was given {name!r}, a {type(value).__name__}:"
                raise encoder_items.build_refusal(given, _ADVICE)
        return _hash(facts)

    def _all_gather(self, numbers: Sequence[int], size: int) -> list[list[int]]:
        own = torch.zeros(size, dtype=torch.long)
        own[: len(numbers)] = torch.tensor(numbers, dtype=torch.long)
        return torch.stack(all_gather(own.to(self.control_device), self.group)).tolist()

    def _assign(self, forms: list[int], patches: list[list[int]]) -> list[list[int]]:
        """Return the rank that encodes each item; items move among ranks whose items have the same form."""
        takers = [[owner] * len(own) for owner, own in enumerate(patches)]
        alike: dict[int, list[int]] = {}
        for rank, form in enumerate(forms):
            alike.setdefault(form, []).append(rank)
        for ranks in alike.values():
            for owner, whose in zip(ranks, assign_surplus([patches[rank] for rank in ranks]), strict=True):
                takers[owner] = [ranks[taker] for taker in whose]
        if len(alike) > 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"data.balance_encoders: the items of {self.name} do not have the same shape on all replicas, as where "
                "images are padded to the largest of a batch. They are balanced among replicas of one shape only.",
                stacklevel=2,
            )
        return takers

    def _exchange_input(self, name: str, value: Any, assignment: _Assignment, patches: list[list[int]]) -> Any:
        """Return an input of the items that this rank encodes."""
        if not isinstance(value, Tensor) or not value.dim():
            return value
        items, pieces, shapes = assignment.items, [], []
        for rank, sizes in enumerate(patches):
            away, here = assignment.of(self.rank, rank), assignment.of(rank, self.rank)
            is_self = rank == self.rank  # own items need not travel
            pieces.append(items.select_input(name, value, [] if is_self else away))
            rows = len(here) if items.is_by_item(name, value) else sum(sizes[item] for item in here)
            shapes.append((0 if is_self else rows, *value.shape[1:]))
        received = all_to_all(pieces, shapes, self.group)
        received[self.rank] = items.select_input(name, value, assignment.of(self.rank, self.rank))
        together = torch.cat(received)
        return together if len(together) else value  # this rank encodes its placeholder

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        assignment, self._assignment = self._assignment, None
        if assignment is None:
            return output
        tensors: list[Tensor] = []
        layouts: list[int] = []
        refusal: UnsupportedModelError | None = None
        modal = self.modal if output is not None else None
        try:
            if modal is not None and modal.projector is not None and modal.postprocess_module_callback is None:
                output = get_token_states(output)  # nobody looks at the rest
            tensors = tensors_in(output)
            layouts = [assignment.encoded.layout(tensor) for tensor in tensors]
        except UnsupportedModelError as error:  # other ranks may have understood theirs, and would wait
            refusal = error
        self._check_agreement(assignment, tensors, layouts, refusal, has_failed=output is None)
        if output is None:  # the encoder has raised, and the exception goes on from here
            return None
        pairs = zip(tensors, layouts, strict=True)
        routes = [_OutputRoute(assignment, tensor, layout, self.group) for tensor, layout in pairs]

        def find_used(gradients: Sequence[Tensor | None]) -> list[bool]:  # on any rank
            found = self._all_gather([gradient is not None for gradient in gradients], len(gradients))
            return [any(one) for one in zip(*found, strict=True)]

        returned = iter(_ReturnOutputs.apply(routes, find_used, *tensors))
        return map_tensors(lambda _: next(returned), output)

    def _check_agreement(
        self, assignment: _Assignment, tensors: list[Tensor], layouts: list[int], refusal: Any, has_failed: bool
    ) -> None:
        """Let all ranks raise where one cannot continue."""
        patches, rows = sum(assignment.encoded.patches), []
        for layout, tensor in zip(layouts, tensors, strict=refusal is None):
            shared = math.gcd(len(tensor), patches) if layout == encoder_items.FLAT else 0
            ratio = (len(tensor) // shared, patches // shared) if shared else ""
            rows.append((layout, tuple(tensor.shape[row_dim(layout) + 1 :]), ratio))
        types = [str(tensor.dtype) for tensor in tensors]
        found = self._all_gather([refusal is not None, has_failed, _hash([rows, types]), _hash(types)], 4)
        if refusal is not None:
            raise refusal
        if has_failed:
            return
        if any(one[1] for one in found):
            raise ConfigError(f"{self.name} has failed on another rank, which lends items: see what that one says.")
        if any(one[0] for one in found):
            raise encoder_items.build_refusal(f"{self.name} put out a tensor on another rank of which", _ADVICE)
        takers = enumerate(assignment.takers)
        moving = {assignment.forms[owner] for owner, whose in takers if any(taker != owner for taker in whose)}
        shapes = {(form, one[2]) for form, one in zip(assignment.forms, found, strict=True) if form in moving}
        if len({one[3] for one in found}) > 1 or len(shapes) > len(moving):
            raise UnsupportedModelError(
                f"{self.name} put out tensors of different shapes on different ranks: they depend on which items are "
                f"together, and cannot be sent back. {_ADVICE}"
            )


class _OutputRoute:
    """Sends one output tensor to the ranks whose items it belongs to, and its gradient back."""

    def __init__(self, assignment: _Assignment, tensor: Tensor, layout: int, group: dist.ProcessGroup) -> None:
        self.assignment, self.group, self.dim = assignment, group, row_dim(layout)
        self.shape = tensor.shape
        self.rows = assignment.items.rows(layout, tensor, assignment.encoded)  # of each item of this rank
        ranks = range(len(assignment.takers))
        self.own = [assignment.of(assignment.rank, taker) for taker in ranks]
        encoded = iter(assignment.encoded.rows(layout, tensor, assignment.encoded))
        self.encoded = [sum(next(encoded) for _ in assignment.of(owner, assignment.rank)) for owner in ranks]
        """Rows that this rank has computed for each rank; none at all, if it has but a placeholder."""

    def send_output(self, tensor: Tensor) -> Tensor:
        """Return the tokens of this rank's items, in their order, given those that it encoded."""
        nothing = [tensor.narrow(self.dim, 0, 0)] * len(self.encoded)
        away = tensor.split(self.encoded, self.dim) if any(self.encoded) else nothing
        shapes = [self._shape(sum(self.rows[item] for item in items)) for items in self.own]
        received = all_to_all(away, shapes, self.group)
        if not self.assignment.takers[self.assignment.rank]:  # it has only a placeholder, which nobody reads
            return tensor.new_zeros(self._shape(sum(self.rows)))
        pieces: dict[int, Tensor] = {}
        for items, part in zip(self.own, received, strict=True):
            pieces |= zip(items, part.split([self.rows[item] for item in items], self.dim), strict=True)
        return torch.cat([pieces[item] for item in range(len(self.rows))], self.dim)

    def send_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of what this rank encoded, given that of its items' tokens."""
        nothing = gradient.narrow(self.dim, 0, 0)
        pieces = gradient.split(self.rows, self.dim)
        away = [torch.cat([nothing, *(pieces[item] for item in items)], self.dim) for items in self.own]
        received = all_to_all(away, [self._shape(rows) for rows in self.encoded], self.group)
        return torch.cat(received, self.dim) if any(self.encoded) else gradient.new_zeros(self.shape)

    def _shape(self, rows: int) -> list[int]:
        return [*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]]


class _ReturnOutputs(torch.autograd.Function):
    """Sends all outputs of an encoder back in one autograd step, so that gradients are exchanged in one step, too.

    In several, ranks could wait for one another: the order in which gradients are ready differs where a rank had a
    placeholder. An output that no rank has used is left without a gradient, as without balancing.
    """

    @staticmethod
    def forward(
        ctx: Any, routes: list[_OutputRoute], find_used: Callable[..., list[bool]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.routes, ctx.find_used, ctx.types = routes, find_used, [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        returned = tuple(route.send_output(tensor) for route, tensor in zip(routes, tensors, strict=True))
        ctx.mark_non_differentiable(*(one for one in returned if not one.is_floating_point()))
        ctx.shapes = [one.shape for one in returned]
        ctx.device = tensors[0].device
        return returned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = []
        used = ctx.find_used(gradients)
        outputs = zip(ctx.routes, gradients, used, ctx.shapes, ctx.types, strict=True)
        for route, gradient, is_used, shape, dtype in outputs:
            if gradient is None and is_used:
                gradient = torch.zeros(shape, dtype=dtype, device=ctx.device)
            found.append(None if gradient is None else route.send_gradient(gradient))
        return None, None, *found


def _hash(facts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7])
