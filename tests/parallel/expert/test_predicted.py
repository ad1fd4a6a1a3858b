"""What is predicted of shared experts is what ranks hold and send: bytes of weights, of states, of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cornstarch.plan.communication import all_to_all_bytes
from tests.models import local_processors
from tests.parallel.expert import dispatching, predicted
from tests.parity.pool import Pool

LLM = "language_model"


@pytest.mark.parametrize(
    ("family", "ranks", "kind", "module"),
    [
        ("mixtral", 2, "ddp", {"ep": 2}),
        ("qwen3_moe", 4, "fsdp2", {"ep": 2}),
        ("deepseek_v3", 4, "zero3", {"ep": 4}),  # its first layer has no experts
        ("mixtral", 4, "zero1", {"ep": 2}),
        ("qwen2_moe", 4, "ddp", {"ep": 2, "stages": 2}),
        ("mixtral", 4, "ddp", {"ep": 2, "tp": 2}),  # norms, routers and the table of embeddings stay whole
        ("qwen3_moe", 2, "ddp", {"tp": 2, "tp_vocabulary": True}),
    ],
)
def test_ranks_hold_what_is_predicted(
    workers: Pool, tmp_path: Path, family: str, ranks: int, kind: str, module: dict[str, Any]
) -> None:
    workers.renew()
    local_processors.tokenizer().save_pretrained(tmp_path / "tokenizer")
    parallel = {"data": {"kind": kind}, "modules": {LLM: module}, "ranks": "auto", "schedule": "1f1b"}
    places = str(tmp_path / "tokenizer"), str(tmp_path / "run")
    found = workers.run(ranks, predicted.hold, family, parallel, ranks, *places)
    held = {(one["parameters"], one["states"]) for one in found}
    assert held == {(one["parameters"], one["optimizer"]) for one in found[0]["places"]}


def test_tokens_take_as_many_bytes_as_predicted(workers: Pool) -> None:
    for found in workers.run(4, dispatching.count_bytes):
        sent = found.pop("traced")
        # To the experts and back, in the forward and in the backward pass, if routers are even.
        assert found["sent"] == [all_to_all_bytes(sent, 4)] * 4, found
