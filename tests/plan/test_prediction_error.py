"""Error bars of predictions: errors of one group add up, those of different groups are independent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cornstarch.plan.cluster import Cluster
from cornstarch.plan.predict import TimeBreakdown
from cornstarch.plan.prediction_error import ASSUMED, BARS, REST, estimate_error

PARTS = TimeBreakdown(compute=5, recompute=1, tensor=2, context=0, gather=1, data=0.5, optimizer=0.5, wait=0)
ERRORS = (("products", 0.1), ("attention", 0.2), ("memory", 0.05), ("links", 0.25), ("layers", 0.02))
MACHINE = replace(Cluster.parse("8xH100"), errors=ERRORS)


@pytest.mark.parametrize(
    ("cluster", "has_layers", "computing", "links"),
    [
        (MACHINE, True, 0.02, 0.25),
        (MACHINE, False, 0.2, 0.25),  # the worst of the kernels
        (replace(MACHINE, errors=ERRORS[:4]), True, 0.2, 0.25),  # layers of another calibration
        (MACHINE.resize(2, 8), True, 0.02, ASSUMED),  # links between nodes are not measured
    ],
)
def test_parts_are_combined(cluster: Cluster, has_layers: bool, computing: float, links: float) -> None:
    expected = BARS * math.hypot(REST, 0.6 * computing, 0.35 * links, 0.05 * 0.05)
    assert estimate_error(PARTS, cluster, has_layers) == pytest.approx(expected)


def test_a_cluster_that_was_not_calibrated_has_no_bar() -> None:
    assert estimate_error(PARTS, Cluster.parse("8xH100"), True) is None
