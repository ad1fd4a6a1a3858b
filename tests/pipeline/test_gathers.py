"""A pipeline gathers sharded parameters once in a step, however many microbatches the step has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import local_processors
from tests.parallel.work import CollectiveCounter
from tests.parity.cell import make_trainer
from tests.parity.pool import Pool
from tests.parity.rows import row_of
from tests.parity.samples import alike

UNITS = 3  # of the larger stage: two layers, and the modules around them


def count_gathers(data: dict[str, object], microbatches: int, tokenizer: str, folder: str) -> list[int]:
    """Return how often each of two steps gathers parameters."""
    modules = {"language_model": {"stages": 2}}
    loop = {"steps": 2, "batch_size": 16, "accumulation": microbatches}
    plan = {"data": data, "modules": modules}
    trainer = make_trainer("llm", alike(row_of("llm").make, 32), loop, plan, tokenizer, folder)
    trainer.watching = False  # to look at gradients, they are gathered
    found = []
    for batch in trainer.batches():
        with CollectiveCounter() as counter:
            trainer.step(batch)
        found.append(counter.calls["allgather_base"])
    return found


@pytest.mark.parametrize(
    ("data", "is_kept"),
    [
        ({"kind": "zero2"}, True),
        ({"kind": "fsdp2"}, True),
        ({"kind": "fsdp2", "reshard_after_forward": True}, False),
        ({"kind": "zero3"}, False),
    ],
    ids=["zero2", "fsdp2", "fsdp2, freed", "zero3"],
)
def test_microbatches_share_a_gather(workers: Pool, tmp_path: Path, data: dict[str, object], is_kept: bool) -> None:
    tokenizer = str(tmp_path / "tokenizer")
    local_processors.tokenizer().save_pretrained(tokenizer)
    few, many = (workers.run(4, count_gathers, data, n, tokenizer, str(tmp_path / str(n))) for n in (2, 4))
    for one, other in zip(few, many, strict=True):
        assert one[0] == one[1] > 0 and other[0] == other[1]
        assert (other == one) if is_kept else (other[0] >= 2 * one[0] - 2), (one, other)
        assert not is_kept or one[0] <= UNITS, one
