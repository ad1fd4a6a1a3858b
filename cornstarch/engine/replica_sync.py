"""What a run does so that its replicas keep together over slow links, and what it saves of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cornstarch.checkpoint.flatten import flatten_values, unflatten_values
from cornstarch.checkpoint.save import PER_RANK
from cornstarch.checkpoint.shards import Tensorlike
from cornstarch.parallel import distributed
from cornstarch.parallel.low_bandwidth import ReplicaSync
from cornstarch.plan.kinds import UNSYNCHRONIZED
from cornstarch.plan.plan import DataPlan

_KEY = "exchange"


class Captured(NamedTuple):
    """What one process adds to a checkpoint."""

    tensors: dict[str, Tensorlike]
    data: dict[str, Any]


class RunReplicaSync:
    """The exchange of a run, if it has one; without one nothing happens.

    Args:
        exchange: How replicas keep together, if torch does not see to it alone.
        plan: The run's data parallelism.
        parameters: Those of this process that are trained, by name.
        model: What they belong to.
        optimizer: What changes them.
    """

    def __init__(
        self,
        exchange: ReplicaSync | None,
        plan: DataPlan,
        parameters: Mapping[str, nn.Parameter],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._exchange, self._kind = exchange, plan.kind
        self._parameters, self._model, self._optimizer = parameters, model, optimizer

    @property
    def is_unsynchronized(self) -> bool:
        """Whether processes train by themselves, so that weights and the optimizer's states differ."""
        return self._exchange is not None and self._kind in UNSYNCHRONIZED

    def before_step(self) -> None:
        """Prepare for the gradients of a step."""
        if self._exchange is not None:
            self._exchange.before_step()

    def after_step(self, step: int) -> None:
        """Exchange weights, or begin to."""
        if self._exchange is not None:
            self._exchange.after_step(step)

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Run a block in which every process has the mean of all weights."""
        if self._exchange is None:
            yield
        else:
            with self._exchange.use_averaged_weights():
                yield

    def finish(self) -> None:
        """Wait for everything that is on its way, and end threads."""
        if self._exchange is not None:
            self._exchange.finish()

    def figures(self) -> dict[str, float]:
        """Return what is to be logged."""
        return {} if self._exchange is None else self._exchange.figures()

    # ------------------------------------------------------------------------------------------ checkpoints

    def capture(self) -> Captured:
        """Return what this process alone has to save; ask before `use_averaged_weights`."""
        tensors: dict[str, Tensorlike] = {}
        if self._exchange is None:
            return Captured(tensors, {})
        own: dict[str, Any] = {"kind": self._kind, "state": self._exchange.state_dict()}
        if self.is_unsynchronized:
            # While the mean is saved these weights are replaced by it, so they are copied.
            own["weights"] = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            own["buffers"] = dict(self._model.named_buffers())
            own["optimizer"] = {name: dict(self._optimizer.state.get(p, {})) for name, p in self._parameters.items()}
        packed = flatten_values(own, f"{_KEY}/{distributed.rank()}", tensors)
        return Captured(tensors, {PER_RANK: {_KEY: packed}})

    def restore(self, tensors: Mapping[str, Any], data: Mapping[str, Any], note: Callable[[str], None]) -> None:
        """Go on from what this process has saved; without it, from what all have in common.

        Args:
            tensors: Those of the checkpoint.
            data: Its data.
            note: Tells the user something.
        """
        if self._exchange is None:
            return
        saved = {rank: one[_KEY] for rank, one in data.get(PER_RANK, {}).items() if _KEY in one}
        own = saved.get(str(distributed.rank()))
        if own is None or len(saved) != distributed.world_size() or own["kind"] != self._kind:
            note("What each process alone remembered of exchanges is left behind: the run is spread otherwise now.")
            return
        found = unflatten_values(own, tensors)
        if self.is_unsynchronized:
            self._restore_own(found)
        self._exchange.load_state_dict(found["state"])

    @torch.no_grad()
    def _restore_own(self, found: Mapping[str, Any]) -> None:
        for name, buffer in self._model.named_buffers():
            if name in found["buffers"]:
                buffer.copy_(found["buffers"][name])
        for name, parameter in self._parameters.items():
            parameter.copy_(found["weights"][name])
            held = self._optimizer.state.get(parameter, {})
            for key, value in found["optimizer"][name].items():
                if isinstance(value, Tensor) and isinstance(held.get(key), Tensor):
                    held[key].copy_(value)
                else:
                    held[key] = value
