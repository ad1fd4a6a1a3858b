"""An optimizer that was made for a whole model, and goes on with what one process has of it.

The object stays the same, so that whatever holds on to it (a learning-rate scheduler) does. Its groups list this
process's parameters. While it steps, they are cut further: by what one kernel can take together, and, with ZeRO-1, to
what this process owns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.loss_scale import LossScale

Clip = Callable[[float], Tensor]
"""Takes the largest norm, clips all gradients, returns the norm that they had."""


class GroupedParameters:
    """The groups of an optimizer, by the names of their parameters.

    Args:
        optimizer: One that has made no step yet.
        names: The parameters of the whole model, by name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> None:
        _check_steps(optimizer)
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise ConfigError(
                "The optimizer has made steps already, and its states cannot be cut with the model. Boost first, then "
                "load them: booster.load_optimizer."
            )
        by_id = {id(parameter): name for name, parameter in names.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in by_id:
                    raise ConfigError(
                        f"The optimizer holds a parameter of shape {list(parameter.shape)} that is not one of the "
                        f"model's {len(by_id)}. Make it from the model that is boosted."
                    )
        self.optimizer = optimizer
        self._members = [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        self._labels: list[list[str] | None] = [group.get("param_names") for group in optimizer.param_groups]
        self._only: frozenset[str] | None = None
        self._names: dict[int, str] = {}
        self._whole: list[dict[str, Any]] | None = None

    @property
    def names(self) -> list[str]:
        """The parameters that the optimizer had before."""
        return [name for members in self._members for name in members]

    def take(self, parameters: Mapping[str, nn.Parameter], only: Collection[str] | None = None) -> None:
        """Go on with what this process has.

        Args:
            parameters: By the names of the whole model.
            only: Those among them that it steps; other processes step the others.
        """
        self._only = None if only is None else frozenset(only)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for group, members, labels in zip(self.optimizer.param_groups, self._members, self._labels, strict=True):
            here = [number for number, name in enumerate(members) if name in parameters]
            group["params"] = [parameters[members[number]] for number in here]
            if labels is not None:
                group["param_names"] = [labels[number] for number in here]
        if self.optimizer.state:  # Adagrad has states from its beginning
            self.optimizer.state.clear()
            with self.working():
                parts = [dict(group) for group in self.optimizer.param_groups if group["params"]]
                kind: Any = type(self.optimizer)
                self.optimizer.state.update(kind(parts).state if parts else {})

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run a block in which the groups are as they are stepped."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Cut the groups as they are stepped."""
        self.end()  # a step that raised has left them cut
        self._whole = self.optimizer.param_groups
        self.optimizer.param_groups = [part for group in self._whole for part in self._cut(group)]

    def end(self) -> None:
        """Have the groups whole again, with what was changed of their options."""
        if self._whole is None:
            return
        parts = iter(self.optimizer.param_groups)
        for group in self._whole:
            changed = [next(parts) for _ in self._cut(group)][0]
            group.update({key: value for key, value in changed.items() if key not in ("params", "param_names")})
        self.optimizer.param_groups, self._whole = self._whole, None

    def _cut(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a group as several, at least one; one kernel for many takes parameters of one mesh only."""
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if self._only is None or self._names[id(parameter)] in self._only:
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        options = {key: value for key, value in group.items() if key != "param_names"}
        return [{**options, "params": alike} for alike in by_mesh.values()] or [{**options, "params": []}]


class Stepping:
    """What happens around each step of an optimizer: gradients brought to their size, parameters handed round.

    Args:
        groups: Of the optimizer.
        trained: The parameters of this process that take gradients.
        clip: Clips their gradients.
        most: The largest norm; 0: any.
        scale: What losses were multiplied with.
        share: Hands round what was stepped, where each process steps some.
    """

    def __init__(
        self,
        groups: GroupedParameters,
        trained: Sequence[nn.Parameter],
        clip: Clip,
        most: float,
        scale: LossScale | None,
        share: Callable[[], None] | None,
    ) -> None:
        self.groups, self._trained, self._clip, self._most = groups, trained, clip, most
        self._scale, self._share = scale, share
        self.norm: Tensor | None = None
        """Of all gradients of the last step, before they were clipped; None if nothing asked for it."""
        groups.optimizer.register_step_pre_hook(self._before)
        groups.optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        self.norm = None
        if self._scale is not None:
            self._scale.unscale(self._trained)
        if self._most or self._scale is not None:
            self.norm = self._clip(self._most or float("inf"))
        if self._scale is not None:
            assert self.norm is not None
            is_finite = bool(torch.isfinite(self.norm))  # the norm is that of all processes: they agree
            self._scale.update(is_finite)
            if not is_finite:  # a step without gradients changes nothing
                for parameter in self._trained:
                    parameter.grad = None
        self.groups.begin()

    def _after(self, *_: Any) -> None:
        self.groups.end()
        if self._share is not None:
            self._share()


def _check_steps(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"The optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes the loss several times per step, which a pipeline does not."
        )


__all__ = ["GroupedParameters", "Stepping"]
