"""ZeRO-1: each process holds the states of the optimizer for its own part of the parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from cornstarch.errors import ConfigError
from cornstarch.plan.dealing import deal_out


class OwnedParameters:
    """Whole parameters dealt out among processes.

    Every process has all gradients (DDP). It makes its optimizer from the parameters that it owns alone, steps them,
    and `share` then hands them to the others. All processes deal out alike, largest first to whoever has least.

    Args:
        parameters: All that are trained, by name, in the same order on every process.
        group: The processes. Default: all.
        is_stage: Whether they hold one stage of several, of which some may have little to train, or nothing.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None = None, is_stage: bool = False
    ) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if len(parameters) < len(self._ranks) and not is_stage:
            raise ConfigError(
                f"zero1 deals out whole parameters, and there are {len(parameters)} for {len(self._ranks)} processes. "
                "Use fewer processes, or ddp."
            )
        owners = deal_out([parameter.numel() for parameter in parameters.values()], len(self._ranks))
        self._owner = dict(zip(parameters, owners, strict=True))
        self._parameters = dict(parameters)
        self._me = dist.get_rank(group)

    @property
    def names(self) -> frozenset[str]:
        """The parameters that this process owns."""
        return frozenset(name for name, owner in self._owner.items() if owner == self._me)

    @torch.no_grad()
    def share(self) -> None:
        """Bring all parameters together after a step: one message for each owner and type, not for each parameter."""
        for owner, rank in enumerate(self._ranks):
            owned = [self._parameters[name] for name, whose in self._owner.items() if whose == owner]
            for dtype in sorted({parameter.dtype for parameter in owned}, key=str):
                same = [parameter for parameter in owned if parameter.dtype == dtype]
                flat = torch.cat([parameter.detach().reshape(-1) for parameter in same])
                dist.broadcast(flat, rank, group=self._group)
                if owner != self._me:
                    parts = flat.split([parameter.numel() for parameter in same])
                    for parameter, part in zip(same, parts, strict=True):
                        parameter.copy_(part.view_as(parameter))
