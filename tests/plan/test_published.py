"""The planner against the stage counts of a published evaluation, and the costs that it is judged by."""

from __future__ import annotations

from types import ModuleType

import pytest

from cornstarch.plan.layout import unexecutable
from tests.pipeline import measured


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return the cases of the benchmark."""
    return measured.script("published_cases")


@pytest.mark.parametrize("name", ["VLM-L", "ALM-M", "VALM-M"])  # the tightest, one of many parts, and two encoders
def test_the_planner_is_never_slower_than_the_published_plans(script: ModuleType, name: str) -> None:
    (model,) = [model for model in script.WORKLOADS["published"] if model.name == name]
    cluster = script.Cluster.parse("6x4xA40")
    one = script._against(model, cluster, script.rate(cluster))
    assert min(one.ratios) >= 1.0
    assert one.stages.fits and one.free.fits
    assert one.free.step <= one.stages.step * 1.01  # more to choose from
    for plan in (one.stages, one.free):
        assert plan.candidate.world <= 24
        assert unexecutable(plan.candidate.plan) == []


def test_costs_equal_those_of_the_benchmark(script: ModuleType) -> None:
    """The planner's costs add up to those of virtual devices: forward, and backward with recomputation."""
    nine = measured.script("nine_models")
    for model in script.WORKLOADS["patches"]:
        cost = nine.run_cost(model, 1e12, nine.FIXED)
        for module in cost.modules:
            pieces = model.pieces(module.name, devices=1)
            assert len(pieces) == len(module.layers)
            assert sum(one.forward for one in module.layers) == pytest.approx(sum(piece[0] for piece in pieces))
        layers = cost.modules[-1].layers
        again = sum(one.forward if one.again is None else one.again for one in layers)
        backward = again + sum(one.input_gradient for one in layers)
        assert backward == pytest.approx(sum(piece[1] for piece in model.pieces("language_model", devices=1)))


def test_an_image_rank_gains_nothing_where_the_encoder_costs_nothing(script: ModuleType) -> None:
    """17 ranks do what 16 did, but for what the image rank still sends."""
    assert script._gain(4096, 32, 1e-6) == pytest.approx(16 / 17 - 1, abs=0.01)
    assert script._gain(4096, 32, 4.0) < script._gain(4096, 32, 16.0)  # the slower it is, the better off the way
