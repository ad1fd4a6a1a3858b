"""The last stage of a pipeline computes its loss as a model in one process does: without the logits of all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from cornstarch.trees import tensors_in
from tests.models import local_processors
from tests.parity.cell import STEPS, TOLERANCE, Outcome, compare, join_outcomes, make_trainer, outcome_of
from tests.parity.pool import Pool
from tests.parity.rows import LLAMA, ROWS, TOKENIZER, Row, llm, row_of, vision
from tests.parity.samples import alike, asking

VOCABULARY, ROWS_OF_A_CHUNK = 1001, 8  # no other dim of the model has this size


class LargestLogits(TorchDispatchMode):
    """Remembers the largest number of rows that a tensor with logits had."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tensors_in(found):
            is_weight = tensor.dim() == 2 and LLAMA["hidden_size"] in tensor.shape
            if VOCABULARY in tensor.shape and tensor.dim() > 1 and not is_weight:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return found


def add_row(name: str, tied: bool) -> None:
    language = llm({**LLAMA, "vocab_size": VOCABULARY, "tie_word_embeddings": tied})
    model = {"encoders": {"vision": vision("full")}, "language_model": language}
    ROWS[name] = Row(name, model, asking("i"), ("vision", "language_model"))


def train(name: str, tied: bool, plan: dict[str, Any], tokenizer: str, folder: str) -> tuple[Outcome, int]:
    """Train; return what it comes to, and the largest number of rows of logits."""
    add_row(name, tied)
    loop = {"steps": STEPS, "batch_size": 8, "accumulation": 2}
    small = {"ROW_MULTIPLE": ROWS_OF_A_CHUNK, "CHUNK_BYTES": {"cpu": 1, "cuda": 1}}
    trainer = make_trainer(name, alike(row_of(name).make, STEPS * 8), loop, plan, tokenizer, folder)
    with mock.patch.multiple("cornstarch.kernels.cross_entropy", **small), LargestLogits() as logits:
        return outcome_of(trainer), logits.rows


@pytest.mark.parametrize(("name", "tied", "virtual"), [("own", False, 1), ("tied", True, 1), ("interleaved", True, 2)])
def test_no_stage_holds_the_logits_of_all_tokens(
    workers: Pool, tmp_path: Path, name: str, tied: bool, virtual: int
) -> None:
    tokenizer = str(tmp_path / TOKENIZER)
    local_processors.tokenizer().save_pretrained(tokenizer)
    stages = {"stages": 2, "virtual_stages": virtual}
    plan = {"modules": {"vision": {}, "language_model": stages}, "ranks": "first_stage"}
    plan["schedule"] = "1f1b" if virtual == 1 else "interleaved"
    name = f"fused {name}"
    ((alone, rows_alone),) = workers.run(1, train, name, tied, {}, tokenizer, str(tmp_path / "alone"))
    found = workers.run(2, train, name, tied, plan, tokenizer, str(tmp_path / "run"))
    assert compare(join_outcomes([outcome for outcome, _ in found]), alone).worst < TOLERANCE
    rows = [many for _, many in found]
    assert rows == [0, ROWS_OF_A_CHUNK] and rows_alone == ROWS_OF_A_CHUNK, (rows, rows_alone)
