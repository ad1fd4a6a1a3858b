"""The stored folders are ones that transformers itself loads and runs: processor, chat template and model fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.whole_folders import FOLDERS, write_folder
from tests.models.whole_oracle import conversations, expected_labels, load_model, load_processor, oracle_batch


@pytest.mark.parametrize("name", FOLDERS)
def test_the_model_reads_what_its_processor_makes(name: str, tmp_path: Path) -> None:
    family = FOLDERS[name]
    folder = write_folder(name, tmp_path)
    processor, model = load_processor(folder), load_model(folder, family)
    given = list(conversations(family.kinds[0]).values())
    batch = oracle_batch(processor, given)
    labels = expected_labels(batch, processor.tokenizer, family)
    assert not (batch["input_ids"] == processor.tokenizer.unk_token_id).any()
    assert int((labels != -100).any(-1).sum()) == len(given)
    with torch.no_grad():
        assert model(**batch, labels=labels).loss.isfinite()
