"""The interface between the training loop and a way to synchronize replicas; and trained weights as one vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.parallel.distributed import to_local_tensor


class ReplicaSync:
    """Keeps replicas together. All ranks make the same calls in the same order.

    The loop calls `before_step`, runs forward and backward, steps the optimizer, and calls `after_step`:

        sync.before_step()
        loss.backward()
        optimizer.step()
        sync.after_step(step)

    Evaluate and save inside `use_averaged_weights`. A skipped step (nothing to train on) is not reported.

    The methods here do nothing, which is right where weights are the same on all ranks and gradients are synchronized
    in the backward pass.
    """

    def before_step(self) -> None:
        """Prepare for a step, before its first forward pass."""

    def after_step(self, step: int) -> None:
        """Exchange weights, or begin to, after the `step`-th step of the optimizer, counted from 1."""

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Run a block with the mean of all weights on every rank; afterwards each rank has its own again."""
        yield

    @property
    def averaged(self) -> Callable[[], AbstractContextManager[None]]:
        """`use_averaged_weights`, by its name in earlier releases."""
        return self.use_averaged_weights

    def finish(self) -> None:
        """Wait for everything in flight and end threads: no step follows."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank alone remembers, for a checkpoint: nested dictionaries of tensors, numbers, strings.

        Everything in flight arrives first. Tensors are not copied. Weights and optimizer states are not included: if
        replicas are unsynchronized, the loop saves those of each rank after this call.
        """
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit from a `state_dict`; weights and optimizer are restored already."""
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        """Return the metrics of the last step by name.

        bytes_sent: by this rank since the beginning; staleness: by how many steps the oldest change that was applied is
        behind; consensus_distance: of this rank's weights to the mean, if it is known.
        """
        raise NotImplementedError


class FlatWeights:
    """The trained parameters of a rank as one vector in float32 or wider; frozen parameters are left out."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._sizes = [to_local_tensor(parameter).numel() for parameter in self._parameters]
        # In bfloat16, a mean would lose small changes of the weights.
        self.dtype = reduce(torch.promote_types, (parameter.dtype for parameter in self._parameters), torch.float32)
        self.device = self._parameters[0].device if self._parameters else torch.device("cpu")

    @property
    def numbers(self) -> int:
        """The length of the vector."""
        return sum(self._sizes)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return a copy of the weights."""
        if not self._parameters:
            return self.zeros()
        return torch.cat([to_local_tensor(one).reshape(-1).to(self.dtype) for one in self._parameters])

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Replace the weights."""
        for parameter, part in zip(self._parameters, values.split(self._sizes), strict=True):
            local = to_local_tensor(parameter.detach())
            local.copy_(part.view_as(local))

    def zeros(self) -> Tensor:
        """Return a vector of zeros."""
        return torch.zeros(self.numbers, dtype=self.dtype, device=self.device)

    @contextmanager
    def use(self, values: Tensor) -> Iterator[None]:
        """Run a block with other weights; afterwards the weights are restored bit for bit."""
        own = self.read()
        self.write(values)
        try:
            yield
        finally:
            self.write(own)


def distance(values: Tensor, others: Tensor) -> float:
    """Return the Euclidean distance of two vectors."""
    return float(torch.linalg.vector_norm(values - others))
