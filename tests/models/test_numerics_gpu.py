"""Every model family on a GPU, in fp32 and bf16, is as near to fp32 on the CPU as `numerics.BOUNDS` says."""

from __future__ import annotations

import pytest

from tests.models.numerics import FAMILIES, figures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels are compiled
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_is_near_the_cpu(family: str) -> None:
    assert [problem for one in figures(family, "cuda") for problem in one.problems()] == []
