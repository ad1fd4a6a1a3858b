"""The pipeline benchmarks run in their quickest form, and say what they should."""

from __future__ import annotations

from typing import Any

from tests.parity.pool import Pool
from tests.pipeline import measured


def test_pipeline_runtime(workers: Pool) -> None:
    options = "--repetitions 1 --rounds 1 --steps 1 --cases small --no-deepspeed"
    found, _ = workers.run(2, measured.contenders, options.split())
    (case,) = found["cases"]
    ours = {"Cornstarch", "torch", "torch, again", "Cornstarch, train_batch"}
    assert case["milliseconds"].keys() == case["processor_milliseconds"].keys() == ours
    assert case["ratios"]["Cornstarch"]["to"] == case["processor_ratios"]["Cornstarch"]["to"] == "torch"
    overhead = found["overhead"]
    assert overhead["milliseconds"].keys() == {*ours, "messages alone", "messages and computing by hand"}
    assert min(overhead["milliseconds"].values()) > 0
    assert overhead["overhead_us"].keys() == overhead["own_us"].keys() == ours


def test_a_bubble_is_never_smaller_than_the_formula() -> None:
    script = measured.script("pipeline_runtime")
    options = "--places 2 --microbatches 4 --sleep 0.01 --steps-asleep 1"
    found = script.measure_bubbles(script.options(options.split()))
    assert [(one["policy"], one["formula"]) for one in found] == [("gpipe", 0.2), ("1f1b", 0.2)]
    assert all(one["bubble"] >= 0.2 - 1e-6 for one in found)  # nothing is faster than its sleeps


def test_modality() -> None:
    script: Any = measured.script("modality")
    (model,) = [model for model in script.WORKLOADS["published"] if model.name == "VALM-M"]
    case = script.Case.of(model, 0.3)
    script.measure([case], steps=1, together=2)
    assert all(plan.devices <= 24 for plan in case.plans.values())
    # They were slept. How long a step takes exactly depends on when its ranks begin, and that on the machine.
    assert all(case.deviation(name) > -0.5 for name in case.plans)
    # As searched, that is without what the runtime takes around actions: a step of 0.3 s is mostly that.
    assert case.plans["searched"].simulated <= min(plan.simulated for plan in case.plans.values())
    page = script.page({"published": [case]}, "About it.")
    assert all(f"| VALM-M | {name} |" in page for name in case.plans)
