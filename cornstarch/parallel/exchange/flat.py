"""The trained weights of a process as one vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor, nn

from cornstarch.parallel.data import local_value


class FlatWeights:
    """The parameters that are trained, one after the other, in float32 or wider.

    Args:
        parameters: Those of this process; what is frozen is left out.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sizes = [local_value(parameter).numel() for parameter in self._parameters]
        # Small changes of bfloat16 weights would be lost in a mean that is kept in bfloat16.
        self.dtype = reduce(torch.promote_types, (parameter.dtype for parameter in self._parameters), torch.float32)
        self.device = self._parameters[0].device if self._parameters else torch.device("cpu")

    @property
    def numbers(self) -> int:
        """How many there are."""
        return sum(self._sizes)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a copy of the weights."""
        if not self._parameters:
            return self.zeros()
        return torch.cat([local_value(one).reshape(-1).to(self.dtype) for one in self._parameters])

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Replace the weights."""
        for parameter, part in zip(self._parameters, values.split(self._sizes), strict=True):
            local = local_value(parameter.detach())
            local.copy_(part.view_as(local))

    def zeros(self) -> Tensor:
        """Return as many zeros as there are weights."""
        return torch.zeros(self.numbers, dtype=self.dtype, device=self.device)

    @contextmanager
    def replaced(self, values: Tensor) -> Iterator[None]:
        """Run a block with other weights; afterwards they are what they were, bit for bit."""
        own = self.read()
        self.write(values)
        try:
            yield
        finally:
            self.write(own)


def distance(values: Tensor, others: Tensor) -> float:
    """Return how far two vectors are apart."""
    return float(torch.linalg.vector_norm(values - others))


__all__ = ["FlatWeights", "distance"]
