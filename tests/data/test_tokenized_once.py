"""Every sample's text is tokenized once: by one of several workers, with packing, for composed and for whole models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from cornstarch.config import DataConfig, RunConfig
from cornstarch.data.collate import ChatCollator
from cornstarch.data.formats import open_sources
from cornstarch.data.loader import StepLoader
from cornstarch.data.packing_plan import build_packed_order
from cornstarch.data.sampler import EpochOrder
from cornstarch.data.token_lengths import TokenLengths
from cornstarch.tasks.build import build_task
from tests.data.small_data import data_config, png, processor_for, write_rows
from tests.models.whole_folders import write_folder

COUNT = 24


def write_questions(folder: Path, words: list[str]) -> Path:
    """Write questions of which no two are equal, with no image, one, or two."""
    (folder / "0.png").write_bytes(png())
    rows = []
    for number, asked in zip(range(COUNT), permutations(words, 3), strict=False):
        images = number % 3
        turns = [{"role": "user", "content": "<image>" * images + " ".join(asked)}]
        turns.append({"role": "assistant", "content": words[0]})
        rows.append({"messages": turns, "images": ["0.png"] * images})
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture
def count_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], list[int]]:
    """Count, in all processes, how often a text with each of some words has been tokenized since the last call."""
    log = tmp_path / "calls"
    encode = PreTrainedTokenizerBase.__call__

    def record(self: Any, text: Any = None, *given: Any, **options: Any) -> Any:
        for one in [text] if isinstance(text, str) else text:
            with open(log, "a") as file:
                file.write(one.replace("\n", " ") + "\n")
        return encode(self, text, *given, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", record)

    def count(asked: list[str]) -> list[int]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        spaced = [f" {' '.join(line.replace('>', '> ').replace('<', ' <').split())} " for line in lines]
        return [sum(f" {words} " in line for line in spaced) for words in asked]

    return count


def build_collator(kind: str, folder: Path) -> tuple[ChatCollator, DataConfig]:
    words = "cat dog sound loud look".split() if kind == "composed" else ["q1", "q2", "a1", "a2", "a3"]
    data = data_config(write_questions(folder, words), packing=True, max_length=64, packing_buffer=12)
    if kind == "composed":
        return ChatCollator(processor_for(vision="clip")[0], data), data
    model = {"whole": {"path": str(write_folder(kind, folder))}}
    task = build_task(RunConfig.model_validate({"model": model, "data": data.model_dump()}))
    assert isinstance(task.collator, ChatCollator)
    return task.collator, data


@pytest.mark.parametrize("kind", ["composed", "llava", "qwen2.5-vl"])
def test_counting_and_training_tokenize_a_text_once_each(
    kind: str, tmp_path: Path, count_calls: Callable[[list[str]], list[int]]
) -> None:
    collator, data = build_collator(kind, tmp_path)
    source = open_sources(data.train)
    samples = [source[number] for number in range(COUNT)]
    asked = ["".join(part for part in one.messages[0].content if isinstance(part, str)).strip() for one in samples]
    # As `data.workers: auto` does: workers then inherit what was tried. One batch with images, and one with a text.
    prepared = [collator.prepare(samples[number]) for number in (1, 2, 3)]
    for pair in (prepared[:2], prepared[1:]):
        collator.join_rows([[one] for one in pair])
    assert max(count_calls(asked)) > 0

    lengths = TokenLengths(source, collator, workers=2, file=tmp_path / "lengths.npy")
    with lengths.share():
        lengths(np.arange(COUNT))
    assert count_calls(asked) == [1] * COUNT

    stored = TokenLengths(source, collator, workers=2, file=tmp_path / "lengths.npy")
    with stored.share():
        stored(np.arange(COUNT))
    assert count_calls(asked) == [0] * COUNT

    order = EpochOrder([COUNT], [1.0], 1, True)
    packed = build_packed_order(order, stored, data, 4)
    loader = StepLoader(source, order, collator, 4, workers=2, epochs=1, packed=packed)
    seen = Counter(id for batch in loader for microbatch in batch.microbatches for id in microbatch.sample_ids)
    assert set(seen.values()) == {1} and len(seen) == COUNT
    assert count_calls(asked) == [1] * COUNT
