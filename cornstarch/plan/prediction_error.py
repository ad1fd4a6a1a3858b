"""The error bar of a prediction, from the errors of what was measured; no torch.

The parts of a step are put into three groups by what they were predicted from: layers, communication, and kernels that
move memory. Errors of one group are the same error, so its parts add up. Errors of different groups, and what no
measurement of parts sees, are independent: their squares add up. The bar is twice the standard error, so that about 19
of 20 steps lie within it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cornstarch.plan.cluster import Cluster
    from cornstarch.plan.predict import TimeBreakdown

BARS = 2.0
"""Standard errors in an error bar."""
REST = 0.06
"""Of a step: what layers that are measured one by one do not show. From measured layers, 23 steps on an H200 and on a
CPU were predicted with this error (benchmarks/results/prediction.md)."""
ASSUMED = 0.3
"""Of communication between nodes, which a calibration of one node does not measure."""
_COMMUNICATION = ("tensor", "context", "gather", "data", "exchange")


def estimate_error(one: TimeBreakdown, cluster: Cluster, has_layers: bool) -> float | None:
    """Return the error bar of a predicted step, as a fraction of it; None if the cluster was not calibrated.

    `has_layers`: the costs of layers were measured in the same calibration, not computed from the device's figures.
    """
    errors = dict(cluster.errors)
    if not errors:
        return None
    kernels = max(errors.get(name, 0.0) for name in ("products", "attention", "attention_backward", "memory"))
    layers = errors.get("layers", kernels) if has_layers else kernels
    links = max(errors.get("links", 0.0), ASSUMED if cluster.nodes > 1 else 0.0)
    parts = vars(one)
    communication = sum(parts.get(name, 0.0) for name in _COMMUNICATION)
    computing = sum(parts.values()) - communication - parts["optimizer"]
    groups = ((computing, layers), (communication, links), (parts["optimizer"], errors.get("memory", 0.0)))
    step = sum(parts.values())
    return BARS * math.hypot(REST, *(seconds / step * error for seconds, error in groups)) if step else None
