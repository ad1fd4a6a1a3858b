"""The section `parallel`: a `Plan`, or how to choose one."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from cornstarch.plan.kinds import WHOLE_MODEL
from cornstarch.plan.plan import ModulePlan, Plan
from cornstarch.plan.validation import Switch, section


@section
class ParallelConfig(Plan):
    """How the run is parallelized over the processes that it is started with.

    `parallel: auto` is short for `parallel: {auto: true}`. Until the plan is chosen, nothing is parallelized.
    """

    verify: Literal["auto", "always", "never"] = "auto"
    """Try the plan on a tiny twin of the model before training. auto: if no test has parallelized such a model so."""
    auto: Switch = False
    """Choose the plan when the run is started, for the processes that there are; then only `verify`, `cluster` and
    `costs` are given."""
    cluster: str | None = None
    """auto: what the processes run on, a name or a file (docs/clusters.md). Default: this machine, by the catalogue."""
    costs: str | None = None
    """auto: a file of `cornstarch profile`. Default: the costs of layers are estimated."""

    def __post_init__(self) -> None:
        if not self.modules:
            object.__setattr__(self, "modules", {WHOLE_MODEL: ModulePlan()})
        super().__post_init__()

    @model_validator(mode="after")
    def _check_auto(self) -> ParallelConfig:
        usual = Plan()
        chosen = ("modules", "data", "ranks", "schedule")
        given = [name for name in chosen if getattr(self, name) != getattr(usual, name)]
        if self.auto and given:
            names = " and ".join(f"`{name}`" for name in given)
            raise ValueError(f"`auto` chooses {names} itself; leave one of them out")
        for name in ("cluster", "costs"):
            if getattr(self, name) is not None and not self.auto:
                raise ValueError(f"`{name}` is what `auto` chooses by; write `auto: true` beside it, or leave it out")
        return self
