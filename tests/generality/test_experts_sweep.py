"""A sample of the sweep over mixtures of experts; all of them: `python -m tests.generality.experts`."""

from __future__ import annotations

import pytest

from cornstarch.parallel.expert import dispatch
from tests.generality.experts import judge_experts, judge_here
from tests.models.sweep import REFUSED, SUPPORTED, WRONG, Verdict
from tests.parity.pool import pool

# Experts without a gate, with transposed weights, with tokens that may skip them, chosen by groups.
SAMPLE = {
    "NemotronHForCausalLM": SUPPORTED,
    "AriaTextForCausalLM": SUPPORTED,
    "ZayaForCausalLM": SUPPORTED,
    "DeepseekV2ForCausalLM": SUPPORTED,
    "LlamaForCausalLM": REFUSED,
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_mixtures(name: str) -> None:
    verdict = judge_experts(name)
    assert verdict.status == SAMPLE[name], verdict


def defective() -> Verdict:
    """Judge a model with a package that does not divide the gradients of experts by the ranks."""
    before, dispatch._scale_gradient = dispatch._scale_gradient, lambda x, divisor: x
    try:
        return judge_here("MixtralForCausalLM")
    finally:
        dispatch._scale_gradient = before


def test_a_defect_is_seen() -> None:
    """A sweep that finds nothing must be able to find something."""
    assert all(verdict.status == WRONG for verdict in pool().run(2, defective))
