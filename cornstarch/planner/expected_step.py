"""What was predicted of a run's steps, to be compared with the steps that it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cornstarch.config import RunConfig
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.cost import RunCost
    from cornstarch.plan.predict import Prediction

MEASURED, CATALOGUE = 0.15, 0.3
"""By how much real steps may differ from a prediction: on a measured machine, and by the makers' figures."""


@dataclass(frozen=True)
class ExpectedStep:
    """The predicted time of a step."""

    seconds: float
    tokens: float
    """Of a step, over all replicas, as the prediction assumes them; 0: the model takes no tokens."""
    cluster: str
    """The machines that it was predicted for."""
    is_measured: bool = False
    """Whether these machines were measured."""
    error: float | None = None
    """The error bar of the prediction, as a fraction; None: the machines were not calibrated."""

    @classmethod
    def of(cls, prediction: Prediction, cost: RunCost, cluster: Cluster) -> ExpectedStep:
        """Return what a prediction says of a run's steps."""
        name = cluster.name or cluster.describe()
        return cls(prediction.step, cost.batch * cost.tokens, name, cluster.measured, prediction.error)

    @property
    def tolerance(self) -> float:
        """By how much real steps may differ, as a fraction: the error bar if there is one."""
        if self.error is not None:
            return self.error
        return MEASURED if self.is_measured else CATALOGUE

    def scale(self, tokens: float) -> float:
        """Return the predicted seconds of a step with this many tokens: samples are often shorter than assumed."""
        return self.seconds * min(tokens / self.tokens, 1.0) if self.tokens and tokens else self.seconds


def expect_step(config: RunConfig, ranks: int, per_node: int) -> ExpectedStep | None:
    """Return what is predicted of the steps of a run with a plan of its own, if its config names a cluster.

    None if there is no prediction for this plan, which is no reason not to train with it.
    """
    from cornstarch.planner.search_run import build_cluster, cost_of, predict_own_plan

    if config.parallel.cluster is None or ranks % per_node:
        return None
    cluster = build_cluster(config, ranks, per_node)
    try:
        cost = cost_of(config, cluster, config.parallel.costs)
        found = predict_own_plan(config, cluster, cost).prediction
    except ConfigError:
        return None
    return None if found is None else ExpectedStep.of(found, cost, cluster)
