"""Steps through a Booster, in several processes, come to what a plain loop in one comes to: every number of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.api.work import MIXED, Case, Outcome, Values, alone, run
from tests.parity.pool import Pool

TOLERANCE = 1e-4
"""The largest deviation of a loss, a gradient or a parameter in fp32, as in the matrix of tests/parity."""

ROWS = {"num_microbatches": None, "microbatch_size": 1}
"""As many microbatches as there are rows, of which packing makes few or many."""

CASES: dict[str, Case] = {
    "vision and LLM apart": Case(2),
    "pp 2": Case(3, llm={"stages": 2}),
    "vision pp 2, LLM pp 2": Case(4, vision={"stages": 2}, llm={"pp_size": 2}),
    "LLM tp 2": Case(3, llm={"tp_size": 2}, plugin={"max_norm": 0.2}),
    "vision tp 2, LLM pp 2": Case(4, vision={"tp_size": 2}, llm={"stages": 2}),
    "LLM sp 2, ring": Case(3, llm={"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}),
    "vision and LLM sp 2, all to all": Case(
        4, vision={"sp_size": 2}, llm={"sp_size": 2, "sequence_parallelism": "all_to_all"}
    ),
    "vision ∥ audio → LLM pp 2": Case(4, llm={"stages": 2}, encoders=("vision", "audio"), rows=MIXED),
    "vision tp 2, LLM tp 1 × pp 2, zero-bubble": Case(
        4, vision={"tp_size": 2}, llm={"stages": 2}, plugin={"schedule": "zero_bubble"}
    ),
    "vision tp 1, LLM tp 2, zero 2": Case(
        2, vision={"tp_size": 1}, llm={"tp_size": 2}, plugin={"zero_stage": 2, "ranks": "shared"}
    ),
    "vision sp 2, LLM pp 2": Case(4, vision={"sp_size": 2}, llm={"stages": 2}, plugin={"max_norm": 0.2}),
    "colocated": Case(2, encoders=("vision", "audio"), rows=MIXED, colocated=True),
    "colocated, LLM pp 2, four processes": Case(
        4,
        llm={"stages": 2, "tp_size": 1},
        encoders=("vision", "audio"),
        rows=MIXED,
        colocated=True,
        vision={"tp_size": 2},
        audio={"tp_size": 2},
    ),
    "embeddings apart, tied": Case(3, llm={"stages": "embeddings, layers"}, tied=True),
    "embeddings apart, packed, checkpointing, first stage": Case(
        2,
        llm={"stages": "embeddings, layers", "activation_checkpointing": True},
        packed=True,
        plugin={**ROWS, "packed": True, "ranks": "first_stage"},
    ),
    "first stage": Case(2, llm={"stages": 2}, rows=MIXED[:2], plugin={"ranks": "first_stage"}),
    "shared, tp 2": Case(2, vision={"tp_size": 2}, llm={"tp_size": 2}, plugin={"ranks": "shared"}),
    "shared, dp 2": Case(2, plugin={"ranks": "shared", "max_norm": 0.2}, replicas=2),
    "one process": Case(1, plugin={"ranks": "shared", "max_norm": 0.2}, rows=MIXED[:2]),
    "LLM alone, no pipeline": Case(2, encoders=(), rows=("ttttt", "ttt"), replicas=2),
    "LLM alone, pp 2 × dp 2": Case(4, llm={"stages": 2}, encoders=(), rows=("ttttt", "ttt"), replicas=2),
    "dp 2": Case(4, replicas=2, rows=MIXED[:2], plugin={"max_norm": 0.2}),
    "zero 1": Case(4, replicas=2, rows=MIXED[:2], plugin={"zero_stage": 1, "max_norm": 0.2}),
    "zero 1, tp 2": Case(
        4,
        llm={"tp_size": 2},
        vision={"tp_size": 2},
        replicas=2,
        plugin={"zero_stage": 1, "ranks": "shared", "max_norm": 0.2},
    ),
    "dp 2, alike": Case(4, replicas=2, rows=("tt*tt",)),
    "zero 2": Case(4, replicas=2, plugin={"zero_stage": 2, "max_norm": 0.2}),
    "shared, zero 3": Case(2, plugin={"ranks": "shared", "zero_stage": 3}, replicas=2),
    "LLM pp 2, zero 3": Case(
        4, llm={"stages": 2}, replicas=2, plugin={"zero_stage": 3, "ranks": "first_stage", "max_norm": 0.2}
    ),
    "gpipe": Case(3, llm={"stages": 2}, plugin={"schedule": "gpipe"}),
    "interleaved": Case(
        2, llm={"pp_size": 2, "virtual_stages": 2}, plugin={"schedule": "interleaved", "ranks": "first_stage"}
    ),
    "microbatch_size": Case(3, llm={"stages": 2}, plugin={"num_microbatches": None, "microbatch_size": 4}),
    "frozen encoder": Case(3, llm={"stages": 2}, frozen=(("vision", (False, True)),)),
    "all frozen but the encoder": Case(3, llm={"stages": 2}, frozen=(("vision", (True, False)),), rows=MIXED[:2]),
    "tied embeddings, two batches a step": Case(3, llm={"stages": 2}, tied=True, accumulated=2),
    "activation checkpointing": Case(
        3, vision={"activation_checkpointing": True}, llm={"stages": 2, "activation_checkpointing": True}
    ),
    "SGD": Case(3, llm={"tp_size": 2}, optimizer="SGD"),
    "Adagrad": Case(2, optimizer="Adagrad"),
    "packed, vision sp 2, LLM tp 1": Case(3, vision={"sp_size": 2}, packed=True, plugin={**ROWS, "packed": True}),
    "packed, LLM pp 2 × sp 2": Case(
        4,
        vision={"sp_size": 2},
        llm={"stages": 2, "sp_size": 2},
        packed=True,
        plugin={**ROWS, "packed": True, "ranks": "first_stage"},
    ),
    "packed, no pipeline": Case(
        2, vision={"tp_size": 2}, llm={"tp_size": 2}, packed=True, plugin={**ROWS, "ranks": "shared"}
    ),
    "packed, dp 2": Case(4, replicas=2, packed=True, plugin={**ROWS, "packed": True, "max_norm": 0.2}),
    "another criterion": Case(4, replicas=2, own_criterion=True, rows=MIXED[:2]),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_those_of_one_process(name: str, workers: Pool) -> None:
    case = CASES[name]
    if "tp" in name or "sp" in name:  # torch remembers meshes that equal those of an earlier job
        workers.renew()
    check(workers.run(case.ranks, run, case), alone(case))


def check(outcomes: list[Outcome], expected: Outcome) -> None:
    """Compare all processes with one."""
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert outcome.rates == expected.rates
    for step, gradients in enumerate(expected.gradients):
        close([outcome.gradients[step] for outcome in outcomes], gradients)
    close([outcome.parameters for outcome in outcomes], expected.parameters)


def close(found: list[Values], expected: Values, tolerance: float = TOLERANCE) -> None:
    """Compare values by name; every one must be there, and where it is twice, twice the same."""
    there = [value for value in expected.values() if value is not None]
    floor = 1e-2 * max((float(np.abs(value).max()) for value in there), default=0.0)
    assert {name for one in found for name in one} == set(expected)
    for one in found:
        for name, value in one.items():
            wanted = expected[name]
            assert (value is None) == (wanted is None), name
            if wanted is not None:
                far = np.abs(value - wanted) / (np.abs(wanted) + floor)
                assert far.max() <= tolerance, f"{name}: {far.max():.1e}"
