"""The user's optimizer over this rank's parameters.

The object stays the same, so that a learning-rate scheduler keeps its reference. Its groups list the parameters of this
rank. While it steps, they are split further: by device mesh, because a fused kernel takes one mesh only, and with
ZeRO-1 to the parameters that this rank owns.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.engine.train_step import TrainStep
from cornstarch.errors import ConfigError


class GroupedParameters:
    """The groups of an optimizer that has made no step yet, by the names of their parameters in the whole model."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        _check_optimizer(optimizer)
        by_id = {id(parameter): name for name, parameter in parameters.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in by_id:
                    raise ConfigError(
                        f"The optimizer has a parameter of shape {list(parameter.shape)} that is not one of the "
                        f"model's {len(by_id)}. Make it from the model that is boosted."
                    )
        self.optimizer = optimizer
        self._members = [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        self._labels: list[list[str] | None] = [group.get("param_names") for group in optimizer.param_groups]
        self._owned: frozenset[str] | None = None
        self._names: dict[int, str] = {}
        self._whole: list[dict[str, Any]] | None = None

    @property
    def names(self) -> list[str]:
        """The parameters that the optimizer was made with."""
        return [name for members in self._members for name in members]

    def replace_parameters(self, parameters: Mapping[str, nn.Parameter], owned: Collection[str] | None = None) -> None:
        """Continue with the parameters of this rank; only those in `owned` are stepped here, if it is given."""
        self._owned = None if owned is None else frozenset(owned)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for group, members, labels in zip(self.optimizer.param_groups, self._members, self._labels, strict=True):
            here = [number for number, name in enumerate(members) if name in parameters]
            group["params"] = [parameters[members[number]] for number in here]
            if labels is not None:
                group["param_names"] = [labels[number] for number in here]
        if self.optimizer.state:  # Adagrad builds states in its constructor
            self.optimizer.state.clear()
            with self.use_step_groups():
                groups = [dict(group) for group in self.optimizer.param_groups if group["params"]]
                kind: Any = type(self.optimizer)
                self.optimizer.state.update(kind(groups).state if groups else {})

    @contextmanager
    def use_step_groups(self) -> Iterator[None]:
        """Run a block with the groups that are stepped."""
        self.enter_step()
        try:
            yield
        finally:
            self.leave_step()

    def enter_step(self) -> None:
        """Split the groups for a step."""
        self.leave_step()  # a step that raised has left them split
        self._whole = self.optimizer.param_groups
        self.optimizer.param_groups = [part for group in self._whole for part in self._split(group)]

    def leave_step(self) -> None:
        """Restore the groups, with the options that the step has changed."""
        if self._whole is None:
            return
        parts = iter(self.optimizer.param_groups)
        for group in self._whole:
            changed = [next(parts) for _ in self._split(group)][0]
            group.update({key: value for key, value in changed.items() if key not in ("params", "param_names")})
        self.optimizer.param_groups, self._whole = self._whole, None

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a group as several, at least one: one for each mesh."""
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if self._owned is None or self._names[id(parameter)] in self._owned:
                by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        options = {key: value for key, value in group.items() if key != "param_names"}
        return [{**options, "params": alike} for alike in by_mesh.values()] or [{**options, "params": []}]


class OptimizerHooks:
    """Runs the phases of a `TrainStep` around `optimizer.step()`: unscale and clip before, broadcast after."""

    def __init__(self, groups: GroupedParameters, step: TrainStep) -> None:
        self.groups, self._step = groups, step
        self.norm: Tensor | None = None
        """The norm of all gradients in the last step, before clipping; None without clipping."""
        groups.optimizer.register_step_pre_hook(self._before)
        groups.optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._step.unscale()
        self.norm = self._step.clip()
        if not self._step.is_finite:  # a step without gradients changes nothing
            self._step.zero_grad()
        self.groups.enter_step()

    def _after(self, *_: Any) -> None:
        self.groups.leave_step()
        self._step.finish_update()


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"The optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} computes the loss several times per step, which a pipeline does not."
        )
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):
        raise ConfigError(
            "The optimizer has made steps already, and its states cannot be cut with the model. Boost first, then "
            "load them: booster.load_optimizer."
        )
