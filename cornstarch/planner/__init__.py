"""The cost of the layers of a run: analytic, from shapes, or profiled on a device."""

from __future__ import annotations

from cornstarch.planner.build_cost import (
    MicrobatchShape,
    build_microbatch_shape,
    model_cost,
    profile_model,
    profile_run,
    read_costs,
    run_cost,
    write_costs,
)  # fmt: skip

__all__ = [
    "MicrobatchShape", "build_microbatch_shape", "model_cost", "profile_model", "profile_run", "read_costs", "run_cost",
    "write_costs",
]  # fmt: skip
