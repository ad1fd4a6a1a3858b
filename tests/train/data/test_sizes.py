"""Sizes of samples from headers: the tokens that the model will meet, and what it will multiply."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornstarch.compute.flops import FlopCounter
from cornstarch.errors import ConfigError
from cornstarch.train.data.collate import ChatCollator
from cornstarch.train.data.formats import JoinedSources, open_sources
from cornstarch.train.data.sample import Media, Message, Sample, SampleError, SampleTooLongError
from cornstarch.train.data.sizes import SampleSizer
from tests.train.data.small_data import data_config, mixed_rows, png, processor_for, tone, wav, write_rows


def made(
    path: Path, vision: str = "clip", **options: Any
) -> tuple[SampleSizer, ChatCollator, FlopCounter, JoinedSources]:
    data = data_config(path, **options)
    processor, model = processor_for(vision=vision, audio="whisper")
    collator, counter = ChatCollator(processor, data), FlopCounter(model)
    return SampleSizer(collator, counter.step), collator, counter, open_sources(data.train)


def rows_of_all_sizes(folder: Path) -> Path:
    """Conversations, and images of many shapes."""
    rows = mixed_rows(folder, 12)
    for number, (width, height) in enumerate([(20, 20), (8, 40), (64, 16), (33, 31)]):
        (folder / f"size{number}.png").write_bytes(png(width, height))
        asked = "<image> look <image>" if number % 2 else "<image>"
        images = [f"size{number}.png"] * (1 + number % 2)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "a cat and a dog"}]
        rows.append({"images": images, "messages": turns})
    return write_rows(folder / "d.jsonl", rows)


@pytest.mark.parametrize("vision", ["clip", "qwen2_vl"])
def test_sizes_are_those_of_prepared_samples(tmp_path: Path, vision: str) -> None:
    sizer, collator, _, source = made(rows_of_all_sizes(tmp_path), vision)
    for number in range(len(source)):
        size, prepared = sizer(source[number]), collator.prepare(source[number])
        assert (size.tokens, size.trained) == (len(prepared.input_ids), prepared.trained_tokens)
        assert {name: count for name, count in size.items.items() if count} == {
            name: len(items) for name, items in prepared.items.items()
        }
        ids = collator.processor.modality_token_ids
        assert size.item_tokens == {name: int((prepared.input_ids == ids[name]).sum()) for name in size.items}


@pytest.mark.parametrize("vision", ["clip", "qwen2_vl"])
def test_work_is_what_the_counter_counts(tmp_path: Path, vision: str) -> None:
    sizer, collator, counter, source = made(rows_of_all_sizes(tmp_path), vision)
    for number in range(len(source)):
        size, prepared = sizer(source[number]), collator.prepare(source[number])
        if not prepared.items:
            continue  # alone, a text sends nothing back to encoders; beside others it does
        parts = counter.step(collator.join([prepared]).inputs).parts
        for name in ("vision", "audio"):
            expected = sum(parts[part].total for part in (f"{name} encoder", f"{name} projector") if part in parts)
            assert size.work[name] == pytest.approx(expected, rel=1e-6), name
        assert size.work["language_model"] == pytest.approx(parts["language model"].total, rel=0.05)


def asked_for(collator: ChatCollator) -> list[str]:
    """Return a list to which the encoder of each item that is processed will be added."""
    asked: list[str] = []
    ask = collator.item_inputs

    def noted(name: str, items: list[Any]) -> Any:
        asked.append(name)
        return ask(name, items)

    collator.item_inputs = noted  # type: ignore[method-assign]
    return asked


def test_each_size_is_looked_at_once(tmp_path: Path) -> None:
    sizer, collator, _, source = made(rows_of_all_sizes(tmp_path))
    asked = asked_for(collator)
    for _ in range(2):
        for number in range(len(source)):
            sizer(source[number])
    assert Counter(asked) == {"vision": 4, "audio": 3}  # 20 × 20 in most rows; sounds of three lengths


def shown(width: int, height: int) -> Sample:
    """A sample with an image of a size."""
    image = Media("image", np.zeros((height, width, 3), np.uint8))
    return Sample("an image", (Message("user", (image,)), Message("assistant", ("a cat",))))


def test_what_is_scaled_to_one_size_is_not_looked_at_for_ever(tmp_path: Path) -> None:
    sizer, collator, _, _ = made(rows_of_all_sizes(tmp_path))
    asked = asked_for(collator)
    found = {sizer(shown(20 + number, 50)).tokens for number in range(60)}
    assert len(asked) == 32 and len(found) == 1


def test_images_of_as_many_patches_are_looked_at_once(tmp_path: Path) -> None:
    sizer, collator, _, _ = made(rows_of_all_sizes(tmp_path), "qwen2_vl")
    asked = asked_for(collator)
    sizes = [(width, height) for width in range(8, 60, 3) for height in range(8, 60, 3)]
    for width, height in sizes:
        sample = shown(width, height)
        assert sizer(sample).tokens == len(collator.prepare(sample).input_ids)
    assert 3 < len(asked) < 12 < len(sizes)


def test_nothing_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png(60, 40)[:60])
    path = write_rows(tmp_path / "d.jsonl", [{"image": "cut.png", "text": "the cat"}])
    sizer, collator, _, source = made(path)
    assert sizer(source[0]).items["vision"] == 1
    with pytest.raises(SampleError):
        collator.prepare(source[0])


@pytest.mark.parametrize(
    ("row", "kind", "told"),
    [
        ({"image": "missing.png", "text": "x"}, SampleError, "cannot be read"),
        ({"audio": "long.wav", "text": "x"}, SampleTooLongError, "its feature extractor takes 16000"),
        ({"messages": [{"role": "user", "content": "cat"}]}, SampleError, "no token to train on"),
    ],
)
def test_what_will_be_left_out(tmp_path: Path, row: dict[str, Any], kind: type[Exception], told: str) -> None:
    (tmp_path / "long.wav").write_bytes(wav(tone(2.0)))
    sizer, _, _, source = made(write_rows(tmp_path / "d.jsonl", [row]))
    with pytest.raises(kind, match=told):
        sizer(source[0])


def test_a_long_sample_costs_what_is_left_of_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"source": "cat " * 50, "target": "b"}, {"source": "cat", "target": "b"}])
    sizer, _, _, source = made(path, max_length=30, too_long="cut")
    long, short = sizer(source[0]), sizer(source[1])
    assert long.tokens > 50
    assert 1 < long.work["language_model"] / short.work["language_model"] < 30 / short.tokens * 1.5


def test_a_model_that_cannot_be_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"source": "cat", "target": "b"}])
    data = data_config(path)
    sizer = SampleSizer(ChatCollator(processor_for()[0], data), lambda inputs: None)
    with pytest.raises(ConfigError, match="cannot be weighed"):
        sizer(open_sources(data.train)[0])
