"""Parameters in flat buffers that are divided evenly among ranks, and the shard of each that a rank steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from cornstarch.compat import move_memory
from cornstarch.parallel.distributed import to_local_tensor
from cornstarch.plan.balancing import assign_largest_first

_KEY = "cornstarch_shard"
_ALIGNMENT = 16  # bytes; matrix products and vectorized kernels are slower, or refuse, where a tensor begins elsewhere


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """The part of a parameter whose optimizer state this rank has."""

    whole: nn.Parameter
    """The parameter that the model computes with; with tensor parallelism a DTensor, whose local tensor is divided."""
    stepped: nn.Parameter
    """The part: the very memory of `whole`. It has one dim, or the shape of the local tensor if it is all of it."""
    start: int
    """The index of its first value in the flattened local tensor."""
    ranks: int
    """The number of ranks that the local tensor is divided among."""


def find_shard(parameter: Tensor) -> ParameterShard | None:
    """Return the shard that a parameter is, or whose whole it is; None if it is not divided on this rank."""
    found = getattr(parameter, _KEY, None)
    return found if isinstance(found, ParameterShard) else None


def lay_out_flat(sizes: Sequence[int], ranks: int, unit: int, keep_whole: bool) -> tuple[list[int], int]:
    """Return where each tensor begins in a flat buffer, and how many of the buffer's values each rank has.

    Tensors begin at multiples of `unit`. With `keep_whole` no tensor lies across the border of two ranks: the largest
    are dealt out first, and ranks with less are padded.
    """
    padded = [-(-size // unit) * unit for size in sizes]
    if not keep_whole:
        starts = list(accumulate(padded, initial=0))
        return starts[:-1], -(-starts[-1] // (ranks * unit)) * unit
    loads, offsets = [0] * ranks, []
    owners = assign_largest_first(padded, ranks)
    for size, owner in zip(padded, owners, strict=True):
        offsets.append(loads[owner])
        loads[owner] += size
    return [owner * max(loads) + offset for owner, offset in zip(owners, offsets, strict=True)], max(loads)


class FlatBuffer:
    """Parameters of one dtype and device, moved into a flat buffer that is divided among ranks.

    Args:
        parameters: Trained parameters by name. Their memory is replaced by views of the buffer.
        ranks: The number of ranks.
        rank: The index of this rank.
        keep_whole: Do not cut a parameter: for optimizers that look at whole matrices.
    """

    @torch.no_grad()
    def __init__(self, parameters: dict[str, nn.Parameter], ranks: int, rank: int, keep_whole: bool) -> None:
        self.parameters, self.ranks = parameters, ranks
        locals_ = [to_local_tensor(parameter) for parameter in parameters.values()]
        self._sizes = [local.numel() for local in locals_]
        unit = max(1, _ALIGNMENT // locals_[0].element_size())
        self._starts, self.shard_size = lay_out_flat(self._sizes, ranks, unit, keep_whole)
        self.values = locals_[0].new_zeros(ranks * self.shard_size)
        self.own = self.values[rank * self.shard_size : (rank + 1) * self.shard_size]
        self.shards: dict[str, ParameterShard] = {}
        first, last = rank * self.shard_size, (rank + 1) * self.shard_size
        for (name, parameter), local, start in zip(parameters.items(), locals_, self._starts, strict=True):
            view = self.values[start : start + local.numel()].view(local.shape)
            view.copy_(local)
            move_memory(parameter, view)
            begin, end = max(start, first), min(start + local.numel(), last)
            if begin < end:
                part = self.values[begin:end]
                is_all = end - begin == local.numel()
                stepped = nn.Parameter(part.view(local.shape) if is_all else part)
                self.shards[name] = shard = ParameterShard(parameter, stepped, begin - start, ranks)
                setattr(stepped, _KEY, shard)
                setattr(parameter, _KEY, shard)

    def is_intact(self) -> bool:
        """Return whether all parameters still lie in the buffer."""
        size, at = self.values.element_size(), self.values.data_ptr()
        with torch.no_grad():
            return all(
                to_local_tensor(parameter).data_ptr() == at + start * size
                for parameter, start, count in zip(self.parameters.values(), self._starts, self._sizes, strict=True)
                if count
            )

    def flatten(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return tensors of the shapes of the parameters, in the layout of the buffer; None and padding are zeros."""
        zero, pieces, end = self.values.new_zeros(1), [], 0
        for start, size, tensor in sorted(zip(self._starts, self._sizes, tensors, strict=True), key=lambda one: one[0]):
            pieces += [zero.expand(start - end)]
            pieces += [zero.expand(size) if tensor is None else to_local_tensor(tensor).reshape(-1)]
            end = start + size
        return torch.cat([*pieces, zero.expand(len(self.values) - end)])

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat buffer in the local shapes of the parameters."""
        with torch.no_grad():
            shapes = [to_local_tensor(parameter).shape for parameter in self.parameters.values()]
        parts = zip(self._starts, self._sizes, shapes, strict=True)
        return [flat[start : start + size].view(shape) for start, size, shape in parts]

    def split_own(self, own: Tensor) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """Yield the name of each shard of this rank, the shard, and its part of a tensor that is like `own`."""
        begin = self.own.data_ptr()
        for name, shard in self.shards.items():
            at = (shard.stepped.data_ptr() - begin) // own.element_size()
            yield name, shard, own[at : at + shard.stepped.numel()].view(shard.stepped.shape)


def divide_into_buckets(parameters: Iterable[nn.Parameter], limit: float) -> Iterator[list[nn.Parameter]]:
    """Yield lists of parameters, in order, that are reduced together: of at most `limit` bytes, or a single one."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = to_local_tensor(parameter.detach()).nbytes
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    if bucket:
        yield bucket
