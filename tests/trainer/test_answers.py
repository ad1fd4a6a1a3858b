"""The answers in a report: which samples, what was asked, what was said."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from cornstarch.data.sample import Media, Message, Sample, SampleError
from cornstarch.errors import ConfigError
from cornstarch.trainer.evaluator import collect_answers


class Echo:
    """A task whose answer is the number of the sample; even samples are right. Some samples cannot be prepared."""

    def __init__(self, unusable: Sequence[str] = ()) -> None:
        self.model, self.collator, self._unusable = nn.Linear(1, 1), self, set(unusable)
        self.was_training: list[bool] = []

    def prepare(self, sample: Sample) -> Sample:
        if sample.id in self._unusable:
            raise SampleError("is broken")
        return sample

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        self.was_training.append(self.model.training)
        return [f"number {int(one.id) % 2 * 7}" for one in samples]

    def truth(self, sample: Sample) -> str:
        return " number 0 " if sample.messages[-1].role == "assistant" else ""


class Source(list[Sample]):
    """Samples by number."""

    description = "samples"

    def name(self, index: int) -> str:
        return str(index)


def make_sample(number: int, *content: str | Media, answered: bool = True) -> Sample:
    turns = (Message("user", content or (f"question {number}",)),)
    return Sample(str(number), (*turns, Message("assistant", ("number 0",))) if answered else turns)


def source(count: int) -> Source:
    return Source(make_sample(number) for number in range(count))


def ids(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(one["source"], int(one["id"])) for one in found]


def collect(task: Any, sources: dict[str, Source], count: int, folder: Path) -> list[dict[str, Any]]:
    return collect_answers(task, sources, count, folder, 10_000)


def test_samples_are_evenly_distributed_over_each_source(tmp_path: Path) -> None:
    found = collect(Echo(), {"a": source(101), "b": source(11)}, 5, tmp_path)
    assert ids(found) == [("a", 0), ("a", 50), ("a", 100), ("b", 0), ("b", 10)]


def test_unusable_samples_are_replaced_by_others(tmp_path: Path) -> None:
    found = collect(Echo(unusable=["0", "99"]), {"a": source(100)}, 3, tmp_path)
    assert len(found) == 3 and not {0, 99} & {number for _, number in ids(found)}
    short = collect(Echo(unusable=["0"]), {"a": source(2)}, 3, tmp_path)
    assert ids(short) == [("a", 1)]
    unanswered = Source([make_sample(0, answered=False), make_sample(1)])
    assert ids(collect(Echo(), {"a": unanswered}, 2, tmp_path)) == [("a", 1)]


def test_no_samples_no_answers(tmp_path: Path) -> None:
    assert collect(Echo(), {"a": source(3), "b": source(3)}, 0, tmp_path) == []
    assert collect(Echo(unusable=["0"]), {"a": source(1)}, 4, tmp_path) == []
    task: Any = Echo()
    task.answer = lambda samples: []
    assert collect(task, {"a": source(3)}, 2, tmp_path) == []


def test_answers_have_question_truth_and_correctness(tmp_path: Path) -> None:
    task = Echo()
    found = collect(task, {"a": source(2)}, 2, tmp_path)
    assert [(one["answer"], one["truth"], one["right"]) for one in found] == [
        ("number 0", " number 0 ", True),
        ("number 7", " number 0 ", False),
    ]
    assert found[0]["question"] == [{"text": "question 0"}]
    assert task.was_training == [False] and task.model.training


def test_earlier_turns_belong_to_the_question(tmp_path: Path) -> None:
    turns = (
        Message("system", ("be kind",)), Message("user", ("what",)), Message("assistant", ("that",)),
        Message("user", ("why",)), Message("assistant", ("number 0",)),
    )  # fmt: skip
    (found,) = collect(Echo(), {"a": Source([Sample("0", turns)])}, 1, tmp_path)
    assert "".join(part["text"] for part in found["question"]) == "be kind\nwhat\nthat\nwhy"


def test_media_are_stored_small(tmp_path: Path) -> None:
    picture = Image.fromarray(np.full((600, 900, 3), 90, np.uint8))
    wide = Image.fromarray(np.full((10, 20, 3), 90, np.uint8))
    sound = {"array": np.sin(np.arange(8000) / 9).astype(np.float32), "sampling_rate": 8000}
    features = np.ones((7, 3), np.float32)
    np.save(tmp_path / "features.npy", features)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/old.png").touch()
    content = (
        Media("image", picture), "and", Media("image", wide), Media("audio", sound), Media("audio", features),
        Media("audio", str(tmp_path / "features.npy")),
    )  # fmt: skip
    (found,) = collect(Echo(), {"a": Source([make_sample(0, *content)])}, 1, tmp_path)
    assert found["question"] == [
        {"image": "samples/0_0.png"}, {"text": "and"}, {"image": "samples/0_2.png"}, {"audio": "samples/0_3.wav"},
        {"audio": "samples/0_4.npy"}, {"audio": "samples/0_5.npy"},
    ]  # fmt: skip
    assert Image.open(tmp_path / "samples/0_0.png").size == (256, 171)
    assert Image.open(tmp_path / "samples/0_2.png").size == (20, 10)
    assert picture.size == (900, 600)  # the user's own is as it was
    with wave.open(str(tmp_path / "samples/0_3.wav")) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (16000, 16000, 1)
    assert np.array_equal(np.load(tmp_path / "samples/0_5.npy"), features)
    assert not (tmp_path / "samples/old.png").exists()


def test_the_fields_of_a_row_are_its_question(tmp_path: Path) -> None:
    picture = Media("image", Image.fromarray(np.zeros((4, 4, 3), np.uint8)))
    task: Any = Echo()
    task.truth = lambda sample: "cat"
    rows = Source(
        [Sample("0", fields={"image": picture, "label": "cat"}), Sample("1", fields={"text": "a", "label": 1})]
    )
    found = collect(task, {"a": rows}, 2, tmp_path)
    assert [one["question"] for one in found] == [[{"image": "samples/0_0.png"}], [{"text": "a"}]]


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "samples").touch()
    with pytest.raises(ConfigError, match="samples cannot be written"):
        collect(Echo(), {"a": source(1)}, 1, tmp_path)
