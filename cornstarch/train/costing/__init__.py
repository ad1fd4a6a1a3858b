"""What the layers of a run cost: reckoned from shapes, or measured on a device."""

from __future__ import annotations

from cornstarch.train.costing.file import read_costs, write_costs
from cornstarch.train.costing.portions import Portion, portion_of
from cornstarch.train.costing.profile import profile_model, profile_run
from cornstarch.train.costing.run import model_cost, run_cost

__all__ = [
    "Portion", "model_cost", "portion_of", "profile_model", "profile_run", "read_costs", "run_cost", "write_costs",
]  # fmt: skip
