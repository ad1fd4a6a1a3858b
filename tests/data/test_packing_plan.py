"""Packed rows: how full they are, every sample once, the same for every layout, one shape, and the same loss."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cornstarch.config import DataConfig
from cornstarch.data.collate import ChatCollator
from cornstarch.data.formats import open_sources
from cornstarch.data.loader import StepBatch, StepLoader
from cornstarch.data.packing_plan import PackedOrder, build_packed_order, fill_rows
from cornstarch.data.sampler import EpochOrder
from cornstarch.data.token_lengths import TokenLengths, find_lengths_file
from cornstarch.trees import tensors_in
from tests.data.small_data import data_config, mixed_rows, processor_for, write_rows

LIMIT = 4096


def draw_lengths(kind: str, count: int = 6000) -> np.ndarray:
    """Images of 729 tokens, and 50 to 2,500 words; samples above the limit have no length."""
    random = np.random.default_rng(0)
    median, spread = (250, 0.9) if kind == "0 to 4 images" else (300, 0.8)
    words = np.clip(np.exp(random.normal(np.log(median), spread, count)), 50, 2500).astype(np.int64)
    images = random.integers(0, 5, count) if kind == "0 to 4 images" else random.random(count) < 0.94
    lengths = words + images * 729
    return np.where(lengths <= LIMIT, lengths, 0)


def plan(lengths: np.ndarray, batch_size: int, **options: Any) -> PackedOrder:
    data = DataConfig.model_validate({"train": "x", "packing": True, "max_length": LIMIT, **options})
    return build_packed_order(EpochOrder([len(lengths)], [1.0], 3, True), lengths.__getitem__, data, batch_size)


@pytest.mark.parametrize("kind", ["0 to 4 images", "mostly one image"])
@pytest.mark.parametrize("batch_size", [2, 3, 4, 8])
def test_rows_are_full(kind: str, batch_size: int) -> None:
    lengths = draw_lengths(kind)
    packed = plan(lengths, batch_size)
    steps = [packed.step(0, number) for number in range(packed.steps(0))]
    assert {len(rows) for rows in steps[:-1]} == {packed.rows_per_step}
    tokens = np.array([lengths[row].sum() for rows in steps for row in rows])
    assert tokens.max() <= LIMIT and tokens.sum() == lengths.sum()
    assert tokens.mean() / LIMIT >= 0.97
    wanted = batch_size * lengths[lengths > 0].mean() / LIMIT
    assert wanted - 0.1 <= packed.rows_per_step <= wanted + 1.1


def test_long_samples_are_packed_as_well_as_whole_samples_can_be() -> None:
    """Samples above half a row need a row each: no packing has fewer rows than there are of them."""
    random = np.random.default_rng(1)
    lengths = random.integers(0, 5, 6000) * 729 + random.integers(50, 2501, 6000)
    lengths = lengths[lengths <= LIMIT]
    rows = list(fill_rows(np.arange(len(lengths)), lengths.__getitem__, LIMIT, 1024))
    assert len(rows) <= 1.01 * (lengths > LIMIT // 2).sum()


@pytest.mark.parametrize("buffer", [1, 7, 1024])
def test_every_sample_comes_once_and_none_waits_long(buffer: int) -> None:
    lengths = draw_lengths("0 to 4 images", 2000)
    order = np.random.default_rng(5).permutation(2000)
    rows = list(fill_rows(order, lengths.__getitem__, LIMIT, buffer))
    assert Counter(number for row in rows for number in row) == Counter(range(2000))
    assert max(lengths[list(row)].sum() for row in rows) <= LIMIT
    in_row = {number: place for place, row in enumerate(rows) for number in row}
    seen = 0
    for number in order.tolist():  # the row of a sample comes at most `buffer` rows after those of the ones before it
        assert in_row[number] <= seen + 2 * buffer
        seen = max(seen, in_row[number])


@pytest.mark.parametrize("buffer", [2, 100])
def test_unusable_samples_have_no_row_for_themselves(buffer: int) -> None:
    lengths = np.zeros(60, np.int64)
    lengths[[5, 20, 21, 40]] = 3000
    rows = list(fill_rows(np.arange(60), lengths.__getitem__, LIMIT, buffer))
    assert Counter(number for row in rows for number in row) == Counter(range(60))
    assert [lengths[list(row)].sum() for row in rows] == [3000] * 4
    nothing = list(fill_rows(np.arange(9), np.zeros(9, np.int64).__getitem__, LIMIT, buffer))
    assert nothing == [tuple(range(9))]


def test_a_plan_is_the_same_from_any_place_on() -> None:
    lengths = draw_lengths("mostly one image", 900)
    whole, later = plan(lengths, 4, packing_buffer=64), plan(lengths, 4, packing_buffer=64)
    for epoch, step in ((1, 20), (0, 3), (1, 0)):
        for found, expected in zip(later.step(epoch, step), whole.step(epoch, step), strict=True):
            assert found.tolist() == expected.tolist()


def test_lengths_are_asked_for_as_far_as_they_are_needed() -> None:
    lengths, asked = draw_lengths("mostly one image"), Counter[int]()

    def count(numbers: np.ndarray) -> np.ndarray:
        asked.update(numbers.tolist())
        return lengths[numbers]

    packed = PackedOrder(EpochOrder([len(lengths)], [1.0], 3, True), count, LIMIT, 2, 256)
    packed.plan_steps(10)
    assert len(asked) <= 3 * 256


# ------------------------------------------------------------------------------------------------ batches


def build_loader(data: DataConfig, **options: Any) -> StepLoader:
    processor, _ = processor_for(vision="clip", audio="whisper")
    source = open_sources(data.train)
    order = EpochOrder(source.lengths, [1.0], 1, data.shuffle)
    return StepLoader(source, order, ChatCollator(processor, data), 4, epochs=2, **options)


def ids_of(batch: StepBatch) -> list[str]:
    return [id for microbatch in batch.microbatches for id in microbatch.sample_ids]


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    path = write_rows(tmp_path / "d.jsonl", mixed_rows(tmp_path, 24))
    return data_config(path, packing=True, max_length=64, tokens_per_step=4 * 64, packing_buffer=12)


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (3, 1)])
def test_steps_are_the_same_in_every_layout(data: DataConfig, ranks: int, accumulation: int) -> None:
    alone = list(build_loader(data))
    by_rank = [list(build_loader(data, rank=rank, ranks=ranks, accumulation=accumulation)) for rank in range(ranks)]
    rows = -(-4 // (ranks * accumulation))
    assert {len(one) for one in by_rank} == {len(alone)} and len(alone) > 3
    for number, expected in enumerate(alone):
        found = [one[number] for one in by_rank]
        assert sorted(id for one in found for id in ids_of(one)) == sorted(ids_of(expected))
        assert sum(one.trained_tokens for one in found) == expected.trained_tokens
        for microbatch in (microbatch for one in found for microbatch in one.microbatches):
            assert microbatch.inputs["input_ids"].shape == (rows, 64)  # one shape, at the end of an epoch, too
            assert microbatch.tokens == (microbatch.inputs["documents"] > 0).sum() or rows > 1 or not microbatch.tokens
    for epoch in range(2):
        seen = Counter(id for batch in alone if batch.epoch == epoch for id in ids_of(batch))
        assert seen == {f"d.jsonl:{line}": 1 for line in range(1, 25)}


@pytest.mark.parametrize(("ranks", "accumulation", "workers"), [(1, 1, 0), (2, 1, 0), (1, 2, 2)])
@pytest.mark.parametrize("at", [(0, 1), (1, 1)])
def test_a_resumed_run_continues_within_the_buffer(
    data: DataConfig, ranks: int, accumulation: int, workers: int, at: tuple[int, int]
) -> None:
    """In another layout, too: a step has the same samples, and in one process the same numbers."""
    data = data.model_copy(update={"tokens_per_step": 2 * 64})
    rest = [batch for batch in build_loader(data) if (batch.epoch, batch.index) >= at]
    options: dict[str, Any] = {"ranks": ranks, "accumulation": accumulation, "workers": workers}
    resumed = [list(build_loader(data, start=at, rank=rank, **options)) for rank in range(ranks)]
    assert {len(one) for one in resumed} == {len(rest)} and rest
    for number, expected in enumerate(rest):
        found = [one[number] for one in resumed]
        assert all((one.epoch, one.index) == (expected.epoch, expected.index) for one in found)
        assert sorted(id for one in found for id in ids_of(one)) == sorted(ids_of(expected))
        if ranks * accumulation == 1:
            assert_equal(found[0].microbatches[0].inputs, expected.microbatches[0].inputs)


def assert_equal(one: Any, other: Any) -> None:
    found, expected = tensors_in(one), tensors_in(other)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_packed_step_has_the_loss_of_its_samples(data: DataConfig) -> None:
    processor, model = processor_for(vision="clip", audio="whisper")
    collator = ChatCollator(processor, data.model_copy(update={"packing": False, "tokens_per_step": None}))
    source = open_sources(data.train)
    names = {source.name(number): number for number in range(len(source))}
    for batch in list(build_loader(data, ranks=3, rank=0))[:3]:
        (microbatch,) = batch.microbatches
        alone = collator.join([collator.prepare(source[names[id]]) for id in microbatch.sample_ids])
        assert microbatch.trained_tokens == alone.trained_tokens and microbatch.tokens == alone.tokens
        torch.testing.assert_close(model(**microbatch.inputs).loss, model(**alone.inputs).loss, rtol=1e-5, atol=0)


def test_broken_samples_leave_a_hole(data: DataConfig, tmp_path: Path) -> None:
    rows = mixed_rows(tmp_path, 24)
    rows[3] = {"messages": [{"role": "user", "content": "<image>"}], "images": ["missing.png"]}
    write_rows(tmp_path / "d.jsonl", rows)
    batches = [batch for batch in build_loader(data.model_copy(update={"skip_limit": 0.5})) if batch.epoch == 0]
    assert [sample.id for batch in batches for sample in batch.skipped] == ["d.jsonl:4"]
    assert sorted(id for batch in batches for id in ids_of(batch)) == sorted(
        f"d.jsonl:{n}" for n in range(1, 25) if n != 4
    )


def test_a_sample_longer_than_counted_is_reported(data: DataConfig) -> None:
    loader = build_loader(data.model_copy(update={"skip_limit": 1.0}))
    loader.packed = PackedOrder(loader.order, lambda numbers: np.full(len(numbers), 6), 64, 2, 24)
    batches = [batch for batch in loader if batch.epoch == 0]
    left_out = [sample for batch in batches for sample in batch.skipped]
    assert left_out and all("more than were counted" in sample.reason for sample in left_out)
    seen = [id for batch in batches for id in ids_of(batch)] + [sample.id for sample in left_out]
    assert Counter(seen) == {f"d.jsonl:{line}": 1 for line in range(1, 25)}


def test_counted_lengths_are_those_of_prepared_samples(data: DataConfig) -> None:
    source, collator = open_sources(data.train), ChatCollator(processor_for(vision="clip", audio="whisper")[0], data)
    counted = TokenLengths(source, collator)(np.arange(24)).tolist()
    assert counted == [len(collator.prepare(source[number]).input_ids) for number in range(24)]


def test_what_a_blank_item_does_not_tell_is_prepared(data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    source, collator = open_sources(data.train), ChatCollator(processor_for(vision="clip", audio="whisper")[0], data)

    def refuse(*_: Any) -> Any:
        raise ValueError("blank")

    monkeypatch.setattr(collator, "item_inputs", refuse)
    counted = TokenLengths(source, collator)(np.arange(24)).tolist()
    assert counted == [len(collator.prepare(source[number]).input_ids) for number in range(24)]


def test_lengths_are_counted_once(data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, collator = open_sources(data.train), ChatCollator(processor_for(vision="clip", audio="whisper")[0], data)
    file = find_lengths_file(collator, data.train, {})
    assert file is not None and file != find_lengths_file(collator, data.train, {"other": "model"})
    first = TokenLengths(source, collator, file=file)
    with first.share():
        first(np.arange(10))
    again = TokenLengths(source, collator, file=file)
    with again.share():
        assert len(again.known) == 10
        monkeypatch.setattr(collator, "tokenize", lambda sample: pytest.fail("counted again"))
        assert again(np.arange(10)).tolist() == first(np.arange(10)).tolist()
    file.write_bytes(b"damaged")
    damaged = TokenLengths(source, collator, file=file)
    with damaged.share():
        assert not len(damaged.known)
    write_rows(tmp_path / "d.jsonl", mixed_rows(tmp_path, 23))
    assert find_lengths_file(collator, data.train, {}) != file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True, "max_length": 100, "tokens_per_step": 99}, "less than one row of `max_length` = 100"),
        ({"tokens_per_step": 9999}, "set `packing: true`"),
    ],
)
def test_impossible_steps_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"train": "x", **options})
