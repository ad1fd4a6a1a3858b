"""Finds bits that flipped: ranks that hold the same parameters compare checksums of them."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.checkpoint.shards import local_shards
from cornstarch.health.comparison_group import ComparisonGroup

_MASK = 2**64 - 1
_SIGN = 2**63
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 4

Checksums = tuple[list[str], list[int]]


def sum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers, on its device. One flipped bit changes it, always."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.dtype.itemsize
    if flat.nbytes % 8 == 0:
        aligned = flat if flat.storage_offset() * size % 8 == 0 else flat.clone()
        return aligned.view(torch.int64).sum()  # overflows on purpose; several times as fast as adding smaller ones
    return flat.view(_WORDS[size]).sum(dtype=torch.int64)


@torch.no_grad()
def compute_checksums(tensors: Iterable[tuple[str, Tensor]]) -> Checksums:
    """Return, for each tensor, a name with the place of this rank's shard, and the sum of its bits."""
    names, sums = [], []
    for name, tensor in tensors:
        for box, values in local_shards(tensor):
            names.append(f"{name} {box}")
            sums.append(sum_bits(values))
    if not sums:
        return [], []
    device = sums[0].device
    return names, torch.stack([one.to(device) for one in sums]).tolist()  # a GPU is waited for once


def _join(checksums: Checksums, salt: str) -> tuple[int, int]:
    """Return a key of what a rank holds, and a number of its values, as signed 64-bit integers."""
    names, sums = checksums
    key = zlib.crc32(salt.encode())
    for name in names:
        key = zlib.crc32(name.encode(), key)
    total = 0
    for number, one in enumerate(sums):
        total = (total + (2 * number + 1) * one) & _MASK
    return key + len(names) * 2**32, (total ^ _SIGN) - _SIGN


class ReplicaCheck:
    """Compares parameters between the ranks that hold the same ones. All ranks must call `check` at the same points.

    Args:
        group: For the exchange.
        modules: The modules of this rank, by the name of its stage.
        place: What else distinguishes what a rank holds: ranks with different places are not compared.
    """

    def __init__(self, group: ComparisonGroup, modules: Mapping[str, nn.Module], place: str) -> None:
        self.group, self._place = group, place
        self._named = [(f"{stage}{name}", one) for stage, module in modules.items()
                       for name, one in module.named_parameters()]  # fmt: skip
        self._named = [(name, one) for name, one in self._named if not one.is_meta]
        self._by_id = {id(one): name for name, one in self._named}
        self.has_replicas = True
        """Whether any rank holds what another one holds, too; known after the first check, on all ranks alike."""
        self.seconds = 0.0
        """What the last check took on the rank that is slowest at it."""

    def check(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> str | None:
        """Compare; return what differs in words, on all ranks the same. With an optimizer, compare its states, too."""
        began = time.perf_counter()
        weights = compute_checksums(self._named)
        states = compute_checksums(self._list_states(optimizer))
        parts = [weights, states]
        own = [number for part, salt in zip(parts, ("weights", "states"), strict=True)
               for number in _join(part, f"{self._place} {salt}")]  # fmt: skip
        ranks = self.group.gather([*own, round(1e9 * (time.perf_counter() - began))])
        self.seconds = max(one[-1] for one in ranks) / 1e9
        self.has_replicas = len({one[0] for one in ranks}) < len(ranks)
        for number, part in enumerate(parts):
            pairs = [(one[2 * number], one[2 * number + 1]) for one in ranks]
            if group := _find_differing(pairs):
                what = "weights" if number == 0 else "optimizer states"
                return self._explain(step, what, group, self.group.gather_json([part[0], part[1]]))
        return None

    def _list_states(self, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, Tensor]]:
        """Return the states of parameters that ranks hold alike; what ZeRO-1 divides has other parameters."""
        if optimizer is None:
            return []
        return [
            (f"{name} {key}", state)
            for parameter, states in optimizer.state.items()
            if (name := self._by_id.get(id(parameter))) is not None
            for key, state in states.items()
            if isinstance(state, Tensor) and state.shape == parameter.shape
        ]

    def _explain(self, step: int, what: str, group: Sequence[int], details: Sequence[Any]) -> str:
        """Return which of the ranks in `group`, which hold the same, deviates from the others, and where."""
        tables = {rank: dict(zip(*details[rank], strict=True)) for rank in group}
        names = details[group[0]][0]
        differing = [name for name in names if len({tables[rank].get(name) for rank in group}) > 1]
        odd: dict[int, list[str]] = {}
        undecided: list[int] = []
        for name in differing:
            counts = Counter(tables[rank].get(name) for rank in group).most_common()
            if counts[0][1] > len(group) / 2:
                for rank in group:
                    if tables[rank].get(name) != counts[0][0]:
                        odd.setdefault(rank, []).append(name)
            else:
                undecided = list(group)
        where = ", ".join(name.partition(" [")[0] for name in differing[:_SHOWN])
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        if odd and not undecided:
            ranks = sorted(odd)
            who = f"Rank {ranks[0]} holds" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} hold"
            text = f"{who} other {what} after step {step} than the {len(group) - len(ranks)} ranks with the same"
        else:
            shown = ", ".join(map(str, group[:_SHOWN]))
            text = f"Ranks {shown} should hold the same {what} after step {step} and do not; which one is wrong cannot "
            text += "be told"
        return (
            f"{text}: {where}{more}. A bit has flipped, or ranks did not do the same. Nothing was saved of it.\n"
            "  Start again from the last checkpoint (launch.restarts does so by itself); if the same machine is named "
            "again, take it out and test its memory. loop.check_replicas=off does not compare."
        )


def _find_differing(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks of the first group with the same key whose numbers are not the same; none if there is none."""
    members: dict[int, list[int]] = {}
    for rank, (key, _) in enumerate(pairs):
        members.setdefault(key, []).append(rank)
    for group in members.values():
        if len({pairs[rank][1] for rank in group}) > 1:
            return group
    return []
