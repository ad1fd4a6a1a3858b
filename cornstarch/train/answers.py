"""What the model says to some samples that it was not trained on, with their images and sounds beside it."""

from __future__ import annotations

import shutil
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cornstarch.attention.verify import evaluating
from cornstarch.errors import ConfigError
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.media import load_audio, load_image
from cornstarch.train.data.sample import Media, Sample, SampleError
from cornstarch.train.runs import SAMPLES
from cornstarch.train.tasks.task import Task

_LARGEST = 256  # pixels of a side of an image in the report
_RATE = 16_000


def collect_answers(
    task: Task, sources: Mapping[str, SampleSource], count: int, folder: Path | None, max_pixels: int
) -> list[dict[str, Any]]:
    """Ask the model about some samples of each source, and keep their media in the run's folder.

    Without a folder it is asked alone: of several processes, all have to ask, and one writes.
    """
    chosen = list(_chosen(task, sources, count))
    with evaluating(task.model):
        said = task.answer([sample for _, sample in chosen])
    if folder is None:
        return []
    try:
        shutil.rmtree(folder / SAMPLES, ignore_errors=True)
        (folder / SAMPLES).mkdir(exist_ok=True)
        return _described(task, chosen, said, folder, max_pixels)
    except OSError as error:
        raise ConfigError(f"{folder / SAMPLES} cannot be written: {error.strerror or error}.") from error


def _described(
    task: Task, chosen: list[tuple[str, Sample]], said: list[str], folder: Path, max_pixels: int
) -> list[dict[str, Any]]:
    found = []
    for number, ((source, sample), answer) in enumerate(zip(chosen, said, strict=False)):
        truth = task.truth(sample)
        found.append(
            {
                "id": sample.id,
                "source": source,
                "question": _question(sample, folder, number, max_pixels),
                "truth": truth,
                "answer": answer,
                "right": answer.strip() == truth.strip(),
            }
        )
    return found


def _chosen(task: Task, sources: Mapping[str, SampleSource], count: int) -> Iterator[tuple[str, Sample]]:
    """Yield samples that have an answer, from all over each source."""
    shares = [len(part) for part in np.array_split(np.arange(count), max(len(sources), 1))]
    for (name, source), share in zip(sources.items(), shares, strict=True):
        found = 0
        for index in _places(len(source), share):
            if found == share:
                break
            try:
                sample = source[index]
                task.collator.prepare(sample)
            except SampleError:
                continue
            if task.truth(sample):
                found += 1
                yield name, sample


def _places(length: int, wanted: int) -> list[int]:
    """Return places all over a source, and then more: samples at the first ones may be broken, or have no answer."""
    spread = [np.linspace(0, length - 1, count).astype(int).tolist() for count in (wanted, 4 * wanted)]
    return list(dict.fromkeys([*spread[0], *spread[1]]))


def _question(sample: Sample, folder: Path, number: int, max_pixels: int) -> list[dict[str, str]]:
    """Return what the model was asked, as texts and files."""
    if sample.messages:
        asked = [part for message in sample.messages[:-1] for part in (*message.content, "\n")][:-1]
    else:
        asked = [value for value in sample.fields.values() if isinstance(value, Media)] or [
            str(sample.fields[name]) for name in ("source", "text") if name in sample.fields
        ]
    question: list[dict[str, str]] = []
    for place, part in enumerate(asked):
        if isinstance(part, str):
            question.append({"text": part})
        else:
            question.append({part.kind: _stored(part, folder, f"{SAMPLES}/{number}_{place}", max_pixels)})
    return question


def _stored(media: Media, folder: Path, name: str, max_pixels: int) -> str:
    """Write a medium small enough for a page; return its name in the folder."""
    if media.kind == "image":
        image = load_image(media, max_pixels)
        image.thumbnail((_LARGEST, _LARGEST))
        image.save(folder / f"{name}.png")
        return f"{name}.png"
    features = _features(media)
    if features is not None:
        np.save(folder / f"{name}.npy", features, allow_pickle=False)
        return f"{name}.npy"
    sound = load_audio(media, _RATE)
    with wave.open(str(folder / f"{name}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    return f"{name}.wav"


def _features(media: Media) -> np.ndarray | None:
    """Return features that were computed beforehand, if a sound is given so."""
    if isinstance(media.source, str) and media.source.endswith(".npy"):
        return np.asarray(np.load(media.source, allow_pickle=False), dtype=np.float32)
    if isinstance(media.source, np.ndarray) and media.source.ndim == 2:
        return media.source.astype(np.float32)
    return None
