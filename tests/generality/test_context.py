"""A sample of the sweep over all causal language models; all of them: `python -m tests.generality.context`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cornstarch.parallel.context import modes
from tests.generality.context import judge_context, judge_here
from tests.models.sweep import REFUSED, SUPPORTED, WRONG
from tests.parity.pool import pool

# Every kind of odd: latent keys, sinks, shared keys, layers of several kinds, experts, learned positions, two heads.
RIGHT = (
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Gemma3nForCausalLM",
    "Cohere2ForCausalLM",
    "BioGptForCausalLM",
    "GPTBigCodeForCausalLM",
    "DiffLlamaForCausalLM",
)
REASONS = {
    "BambaForCausalLM": "linear_attention",
    "MptForCausalLM": "takes no position_ids",
    "CodeGenForCausalLM": "attention code of its own",
    "CamembertForCausalLM": "do not count from 0",
}


@pytest.mark.parametrize("name", RIGHT)
def test_supported(name: str) -> None:
    verdict = judge_context(name)
    assert verdict.status == SUPPORTED, verdict.reason


@pytest.mark.parametrize("name", REASONS)
def test_refused(name: str) -> None:
    verdict = judge_context(name)
    assert verdict.status == REFUSED, verdict.reason
    assert REASONS[name] in verdict.reason


@pytest.mark.parametrize("defect", ["gradients are not summed", "blocks are weighed alike"])
def test_a_defect_is_seen(defect: str) -> None:
    """A sweep that finds nothing must be able to find something."""
    verdicts = pool().run(2, defective, defect)
    assert all(verdict.status in (WRONG, REFUSED) for verdict in verdicts)


def defective(defect: str) -> Any:
    """Judge a model with a package that has a defect."""
    summed, share = modes._sum_own_rows, modes._fraction
    if defect == "gradients are not summed":
        modes._sum_own_rows = lambda found, dim, sizes, group: found.split(sizes, dim)[dist.get_rank(group)]
    else:
        modes._fraction = lambda part, total: torch.full_like(part, 0.5).unsqueeze(-1)
    try:
        return judge_here("LlamaForCausalLM")
    finally:
        modes._sum_own_rows, modes._fraction = summed, share
