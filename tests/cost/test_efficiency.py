"""What devices reach of their peak figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cornstarch.cost.analytic import DeviceSpeed
from cornstarch.cost.efficiency import ON_CPU, ON_GPU, ON_MEASURED_GPU, find_efficiency
from cornstarch.cost.tracer import Operation
from cornstarch.plan.cluster import device, this_cpu

PRODUCT = Operation(2.0 * 8192**3, "bf16", tiles=64.0 * 64)


def test_devices_reach_their_own_fractions() -> None:
    assert find_efficiency(device("H200")) == ON_GPU
    assert find_efficiency(device("H100")).matrices < ON_GPU.matrices < find_efficiency(device("A100-80")).matrices
    assert find_efficiency(device("A100-80")) == find_efficiency(device("A100-40"))
    assert find_efficiency(this_cpu()) == ON_CPU
    assert find_efficiency(device("H100"), is_measured=True) == ON_MEASURED_GPU


def test_a_file_overrides_single_fractions() -> None:
    own = replace(device("H100"), reached=(("products", 0.5), ("memory", 0.7)))
    assert find_efficiency(own) == replace(find_efficiency(device("H100")), matrices=0.5, memory=0.7)


def test_a_power_limit_slows_products_and_not_memory() -> None:
    full, limited = device("H100"), replace(device("H100"), power=700.0 / 8)
    fast, slow = DeviceSpeed.of(full), DeviceSpeed.of(limited)
    start = fast.efficiency.start
    assert slow.product(PRODUCT) - start == pytest.approx(2 * (fast.product(PRODUCT) - start))
    assert slow.move(1e9) == fast.move(1e9)
    assert DeviceSpeed.of(limited, is_measured=True) == replace(DeviceSpeed.of(full, is_measured=True), device=limited)
