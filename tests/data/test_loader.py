"""The batches of a run: every sample, exact resuming, what is left out, and when it stops."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cornstarch.config import DataConfig
from cornstarch.data.collate import ChatCollator
from cornstarch.data.formats import open_sources
from cornstarch.data.loader import StepBatch, StepLoader
from cornstarch.data.sample import BrokenSample, SkipCounter
from cornstarch.data.sampler import EpochOrder
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from tests.data.small_data import data_config, huge_png, mixed_rows, png, processor_for, wav, write_rows

COUNT = 13


def loader(data: DataConfig, processor: Any, *, batch_size: int = 4, seed: int = 1, **options: Any) -> StepLoader:
    source = open_sources(data.train)
    order = EpochOrder(source.lengths, [config.weight for config in data.train], seed, data.shuffle)
    return StepLoader(source, order, ChatCollator(processor, data), batch_size, **options)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Thirteen good rows, and two broken ones between them."""
    rows = mixed_rows(tmp_path, COUNT)
    rows.insert(3, {"messages": [{"role": "user", "content": "<image>"}], "images": ["missing.png"]})
    path = write_rows(tmp_path / "d.jsonl", rows)
    with path.open("a") as file:
        file.write("{broken\n")
    return path


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """All tensors of a batch by name, also nested ones."""
    if isinstance(value, BatchFacts):
        value = vars(value)
    if isinstance(value, dict):
        return {key: one for k, v in value.items() for key, one in flat(v, f"{name}.{k}").items()}
    return {name: value}


def assert_equal(found: StepBatch, expected: StepBatch) -> None:
    """Compare bit for bit."""
    assert (found.epoch, found.index, found.skipped) == (expected.epoch, expected.index, expected.skipped)
    assert found.samples == expected.samples and len(found.microbatches) == len(expected.microbatches)
    for ours, theirs in zip(found.microbatches, expected.microbatches, strict=True):
        assert (ours.sample_ids, ours.tokens, ours.trained_tokens, ours.items) == (
            theirs.sample_ids, theirs.tokens, theirs.trained_tokens, theirs.items,
        )  # fmt: skip
        mine, others = flat(ours.inputs), flat(theirs.inputs)
        assert mine.keys() == others.keys()
        for key, value in others.items():
            assert torch.equal(mine[key], value) if isinstance(value, Tensor) else mine[key] == value, key


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_is_exact_everywhere(files: Path, packing: bool, workers: int) -> None:
    """Two epochs of four steps (packed: of several): from each place on, the rest is what it would have been."""
    processor, _ = processor_for(vision="clip", audio="whisper")
    limits: dict[str, Any] = {"packing_buffer": 4, "tokens_per_step": 100} if packing else {}
    data = data_config(files, packing=packing, skip_limit=0.5, max_length=50 if packing else 100, **limits)
    options: dict[str, Any] = {"accumulation": 2, "epochs": 2}
    first = loader(data, processor, **options)
    whole = list(first)
    steps = [first.steps(0), first.steps(1)] if packing else [4, 4]
    assert min(steps) > 1 and sum(steps) > 4
    assert [(batch.epoch, batch.index) for batch in whole] == [(e, i) for e in range(2) for i in range(steps[e])]
    for done in range(len(whole) + 1):
        last = whole[done - 1] if done else None
        start = (last.epoch, last.index + 1) if last else (0, 0)
        rest = list(loader(data, processor, start=start, workers=workers, **options))
        assert len(rest) == len(whole) - done
        for found, expected in zip(rest, whole[done:], strict=True):
            assert_equal(found, expected)


def test_every_sample_comes_once_per_epoch(files: Path) -> None:
    processor, _ = processor_for(vision="clip", audio="whisper")
    for batch_size, accumulation in ((1, 1), (4, 2), (6, 3), (50, 1)):
        steps = loader(
            data_config(files, skip_limit=0.5), processor, batch_size=batch_size, accumulation=accumulation, epochs=3
        )
        seen = [Counter[str](), Counter[str](), Counter[str]()]
        left_out = [Counter[str](), Counter[str](), Counter[str]()]
        for batch in steps:
            assert 1 <= len(batch.microbatches) <= accumulation
            assert all(len(microbatch.sample_ids) <= batch_size // accumulation for microbatch in batch.microbatches)
            assert batch.samples == sum(len(microbatch.sample_ids) for microbatch in batch.microbatches)
            seen[batch.epoch].update(id for microbatch in batch.microbatches for id in microbatch.sample_ids)
            left_out[batch.epoch].update(sample.id for sample in batch.skipped)
        good = {f"d.jsonl:{line}": 1 for line in range(1, COUNT + 2) if line != 4}
        assert seen == [good] * 3
        if batch_size > 1:
            assert left_out == [{"d.jsonl:4": 1, f"d.jsonl:{COUNT + 2}": 1}] * 3
        else:  # a skipped batch is reported with the next one, which may be in the next epoch
            assert sum(map(Counter.total, left_out)) in (4, 5, 6)
        assert len(steps) == steps.steps(0) == -(-(COUNT + 2) // batch_size)


def test_without_epochs_it_never_ends(files: Path) -> None:
    processor, _ = processor_for(vision="clip", audio="whisper")
    steps = loader(data_config(files, skip_limit=0.5), processor, batch_size=15)
    assert [batch.epoch for batch in islice(steps, 4)] == [0, 1, 2, 3]
    later = next(iter(loader(data_config(files, skip_limit=0.5), processor, batch_size=15, start=(7, 1))))
    assert (later.epoch, later.index) == (8, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_takes_none_of_the_models_random_numbers(files: Path, workers: int) -> None:
    """Or the dropout of a resumed run would be another."""
    processor, _ = processor_for(vision="clip", audio="whisper")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for _ in range(2):
        next(iter(loader(data_config(files, skip_limit=0.5), processor, workers=workers)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_a_collator_can_be_sent_to_another_process(files: Path) -> None:
    data = data_config(files, skip_limit=0.5)
    steps = loader(data, processor_for(vision="clip", audio="whisper")[0], epochs=1)
    twin = StepLoader(*pickle.loads(pickle.dumps((steps.source, steps.order, steps.collator))), 4, epochs=1)
    for found, expected in zip(twin, steps, strict=True):
        assert_equal(found, expected)


class Deadly:
    """A source that ends the process that reads it."""

    description = "deadly"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def name(self, index: int) -> str:
        return str(index)


def test_dead_worker_is_reported() -> None:
    collator = ChatCollator(processor_for()[0], data_config("x"))
    with pytest.raises(ConfigError, match=r"has died.*data.workers"):
        list(StepLoader(Deadly(), EpochOrder([4], [1], 0, True), collator, 2, workers=1))


def test_without_shuffling(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"source": "a", "target": "b"} for _ in range(5)])
    batches = list(loader(data_config(path, shuffle=False), processor_for()[0], batch_size=2, epochs=1))
    assert [p.sample_ids for batch in batches for p in batch.microbatches] == [
        ["d.jsonl:1", "d.jsonl:2"], ["d.jsonl:3", "d.jsonl:4"], ["d.jsonl:5"],
    ]  # fmt: skip


def test_a_mixture(tmp_path: Path) -> None:
    for name, count in (("a", 4), ("b", 6)):
        write_rows(tmp_path / f"{name}.jsonl", [{"source": "a", "target": "b"}] * count)
    train = [{"path": str(tmp_path / "a.jsonl"), "weight": 2}, {"path": str(tmp_path / "b.jsonl"), "weight": 0.5}]
    steps = loader(DataConfig(train=train), processor_for()[0], batch_size=11, epochs=2)
    seen = [Counter(id for microbatch in batch.microbatches for id in microbatch.sample_ids) for batch in steps]
    for epoch in seen:
        assert [epoch[f"a.jsonl:{i}"] for i in range(1, 5)] == [2] * 4
    assert {f"b.jsonl:{i}": 1 for i in range(1, 7)} == {k: v for k, v in (seen[0] + seen[1]).items() if k[0] == "b"}


# ---------------------------------------------------------------------------------------- broken samples


def image_row(folder: Path, content: bytes | None) -> dict[str, Any]:
    if content is not None:
        (folder / "broken.png").write_bytes(content)
    return {"image": "broken.png", "text": "the cat"}


def sound_row(folder: Path, content: bytes) -> dict[str, Any]:
    (folder / "broken.wav").write_bytes(content)
    return {"audio": "broken.wav", "text": "the cat"}


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing image": (lambda folder: image_row(folder, None), "No such file"),
    "corrupt JPEG": (lambda folder: image_row(folder, png(60, 60, format="JPEG")[:200] + bytes(900)), "damaged"),
    "truncated PNG": (lambda folder: image_row(folder, png(60, 60)[:-3000]), "damaged"),
    "decompression bomb": (lambda folder: image_row(folder, huge_png(60_000, 60_000)), "60000 × 60000 pixels"),
    "sound without length": (lambda folder: sound_row(folder, wav(np.zeros(0))), "length is zero"),
    "wrong placeholders": (lambda folder: {"image": "good.png", "text": "<image><image>", "label": "x"}, "2 <image>"),
    "no format": (lambda folder: {"caption": "x"}, "expected pairs"),
    "bad JSON": (lambda folder: "{", "no JSON"),
    "too long": (lambda folder: {"image": "good.png", "text": "cat " * 50}, "59 tokens, max_length is 30"),
}


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in BROKEN), ("corrupt JPEG", 1), ("bad JSON", 1)])
def test_broken_sample_is_skipped_and_reported(tmp_path: Path, name: str, workers: int) -> None:
    make, message = BROKEN[name]
    (tmp_path / "good.png").write_bytes(png())
    rows = [{"image": "good.png", "text": "the cat"}] * 5
    path = write_rows(tmp_path / "d.jsonl", rows)
    row = make(tmp_path)
    if isinstance(row, str):
        path.write_text(path.read_text() + row)
    else:
        write_rows(path, [*rows, row])
    data = data_config(path, shuffle=False, skip_limit=0.2, max_length=30)
    processor, _ = processor_for(vision="clip", audio="whisper")
    (batch,) = loader(data, processor, batch_size=6, epochs=1, workers=workers)
    assert batch.microbatches[0].sample_ids == [f"d.jsonl:{line}" for line in range(1, 6)]
    assert [sample.id for sample in batch.skipped] == ["d.jsonl:6"]
    assert message in batch.skipped[0].reason
    assert batch.skipped[0].too_long == (name == "too long")


@pytest.mark.parametrize("workers", [0, 1])
def test_too_long_may_be_an_error(tmp_path: Path, workers: int) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"source": "cat " * 50, "target": "b"}])
    steps = loader(data_config(path, max_length=30, too_long="error"), processor_for()[0], workers=workers)
    with pytest.raises(ConfigError, match="d.jsonl:1: has 55 tokens, max_length is 30") as caught:
        list(steps)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("count", [3, 40])
def test_everything_broken(tmp_path: Path, count: int) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"image": f"{i}.png", "text": "x"} for i in range(count)])
    processor, _ = processor_for(vision="clip")
    with pytest.raises(ConfigError) as caught:
        list(loader(data_config(path, shuffle=False), processor))
    text = str(caught.value)
    assert f"{min(count, 20)} of {min(count, 20)} samples are broken" in text and "`data.skip_limit` = 0.05" in text
    assert "d.jsonl:1: image" in text and "0.png cannot be read" in text and "d.jsonl:6" not in text


def test_everything_too_long(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"source": "cat " * 50, "target": "b"}] * 30)
    with pytest.raises(ConfigError, match="Not one of 30 samples can be used"):
        list(loader(data_config(path, max_length=30), processor_for()[0]))


def test_a_whole_batch_that_is_broken_is_passed_over(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"source": "a", "target": "b"}] * 30
    rows[2:4] = [{"source": "a", "target": None}] * 2
    path = write_rows(tmp_path / "d.jsonl", rows)
    steps = loader(data_config(path, shuffle=False, skip_limit=0.1), processor_for()[0], batch_size=2, epochs=1)
    batches = list(steps)
    assert [batch.index for batch in batches] == [0, *range(2, 15)] and all(batch.microbatches for batch in batches)
    assert [sample.id for sample in batches[1].skipped] == ["d.jsonl:3", "d.jsonl:4"]


def test_a_broken_last_batch_does_not_stop_a_resumed_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"source": "a", "target": "b"}] * 29 + [{"source": "a", "target": None}]
    path = write_rows(tmp_path / "d.jsonl", rows)
    steps = loader(data_config(path, shuffle=False), processor_for()[0], batch_size=1, start=(0, 29), epochs=2)
    assert [batch.epoch for batch in steps] == [1] * 29


# ---------------------------------------------------------------------------------------- counting


def skipped(count: int, too_long: bool = False) -> list[BrokenSample]:
    return [BrokenSample(f"f:{i}", "gone", too_long) for i in range(count)]


def test_the_share_is_judged_after_twenty_samples() -> None:
    counter = SkipCounter(0.05)
    counter.add(9, skipped(10))  # 19 seen
    with pytest.raises(ConfigError, match=r"10 of 20 samples are broken, more than .* = 0.05"):
        counter.add(1, [])
    exact = SkipCounter(0.05)
    exact.add(19, skipped(1))
    exact.add(19, skipped(1))
    with pytest.raises(ConfigError, match=r"3 of 41") as caught:
        exact.add(0, skipped(1))
    assert str(caught.value).count("f:0: gone") == 3


def test_each_epoch_is_judged_by_itself() -> None:
    counter = SkipCounter(0.05)
    for _ in range(3):
        counter.add(29, skipped(1))
        counter.end_epoch()
    assert (counter.good, counter.broken) == (87, 3)
    counter.begin_epoch(passed=19)
    counter.add(0, skipped(1))
    with pytest.raises(ConfigError, match="2 of 21"):
        counter.add(0, skipped(1))


def test_samples_that_are_too_long_do_not_count_as_broken() -> None:
    counter = SkipCounter(0.05)
    counter.add(20, skipped(100, too_long=True))
    counter.end_epoch()
    assert (counter.good, counter.broken, counter.too_long) == (20, 0, 100)


def test_mistakes_of_the_caller(files: Path) -> None:
    data = data_config(files)
    with pytest.raises(ConfigError, match="no multiple of accumulation = 3"):
        loader(data, processor_for()[0], accumulation=3)
    with pytest.raises(ConfigError, match="order is of 3 samples, the source has 15"):
        StepLoader(open_sources(data.train), EpochOrder([3], [1], 0, True), ChatCollator(processor_for()[0], data), 1)


class Waiting:
    """A source whose samples are there when the test says so."""

    def __init__(self, source: Any, clock: list[float]) -> None:
        self._source, self._clock = source, clock

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        return self._source.name(index)

    def __getitem__(self, index: int) -> Any:
        self._clock[0] += 1.0
        return self._source[index]


def test_waiting_for_a_batch_is_measured(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between asking for a batch and getting it; what is done with the one before it does not count."""
    clock = [0.0]
    monkeypatch.setattr("cornstarch.data.loader.time.perf_counter", lambda: clock[0])
    processor, _ = processor_for(vision="clip", audio="whisper")
    data = data_config(files, skip_limit=0.5, max_length=100)
    batches = loader(data, processor, epochs=1)
    batches.source = Waiting(batches.source, clock)  # type: ignore[assignment]
    waits = []
    for batch in batches:
        waits.append(batch.waited)
        clock[0] += 100  # a step
    assert waits == [4.0, 4.0, 4.0, 3.0]  # samples that were looked at
