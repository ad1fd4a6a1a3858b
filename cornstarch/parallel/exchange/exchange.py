"""What a way of exchanging gradients or weights must do for the loop that trains."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Exchange(Protocol):
    """How replicas keep together. All processes make the same calls in the same order.

    The loop calls `before_step`, does forward and backward, lets the optimizer change the weights, calls `after_step`:

        exchange.before_step()
        loss.backward()
        optimizer.step()
        exchange.after_step(step)

    Whoever evaluates or saves does it inside `averaged`. A step that is left out (nothing to train on) is not told.
    """

    def before_step(self) -> None:
        """Prepare for the gradients of a step: before its first forward pass."""
        ...

    def after_step(self, step: int) -> None:
        """Exchange weights, or begin to: the optimizer has changed them for the `step`-th time, counted from 1."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Run a block in which every process has the mean of all weights; afterwards each has its own again.

        To evaluate and to save. Where all processes have the same weights anyway there is nothing to do.
        """
        ...

    def finish(self) -> None:
        """Wait for everything that is on its way, and end threads: no step follows."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what this process alone remembers, for a checkpoint: nested dictionaries of tensors, numbers, texts.

        What travels arrives first. Tensors are not copied. The weights, and the optimizer's states, are not in it: the
        loop saves those that each process has after this call, if it `is_apart`.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, bit for bit; weights and optimizer are restored already."""
        ...

    def figures(self) -> dict[str, float]:
        """Return what is to be logged of the last step, by name.

        bytes_sent: by this process, since it began; staleness: steps that the oldest of what was applied is behind;
        consensus_distance: of this process's weights to the mean, if it is known.
        """
        ...


__all__ = ["Exchange"]
