"""Collects the model's answers to some evaluation samples, with their images and sounds, for the report."""

from __future__ import annotations

import shutil
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.config.run_folder import SAMPLES
from cornstarch.data.formats import DataSource
from cornstarch.data.media import load_audio, load_image
from cornstarch.data.sample import Media, Sample, SampleError
from cornstarch.errors import ConfigError
from cornstarch.tasks.task import Task

_MAX_SIDE = 256  # pixels of an image in the report
_SAMPLE_RATE = 16_000


def collect_answers(
    task: Task, sources: Mapping[str, DataSource], count: int, folder: Path | None, max_pixels: int
) -> list[dict[str, Any]]:
    """Return the model's answers to some samples of each source, and store their media in the run's folder.

    All ranks must call it, since they generate together; only the rank with a `folder` writes and gets the answers.
    """
    chosen = list(_choose_samples(task, sources, count))
    with use_eval_mode(task.model):
        answers = task.answer([sample for _, sample in chosen])
    if folder is None:
        return []
    found = []
    try:
        shutil.rmtree(folder / SAMPLES, ignore_errors=True)
        (folder / SAMPLES).mkdir(exist_ok=True)
        for number, ((source, sample), answer) in enumerate(zip(chosen, answers, strict=False)):
            truth = task.truth(sample)
            found.append(
                {
                    "id": sample.id,
                    "source": source,
                    "question": _write_question(sample, folder, number, max_pixels),
                    "truth": truth,
                    "answer": answer,
                    "right": answer.strip() == truth.strip(),
                }
            )
    except OSError as error:
        raise ConfigError(f"{folder / SAMPLES} cannot be written: {error.strerror or error}.") from error
    return found


def _choose_samples(task: Task, sources: Mapping[str, DataSource], count: int) -> Iterator[tuple[str, Sample]]:
    """Yield samples that have an answer, evenly from each source."""
    counts = [len(part) for part in np.array_split(np.arange(count), max(len(sources), 1))]
    for (name, source), wanted in zip(sources.items(), counts, strict=True):
        found = 0
        for index in _candidates(len(source), wanted):
            if found == wanted:
                break
            try:
                sample = source[index]
                task.collator.prepare(sample)
            except SampleError:
                continue
            if task.truth(sample):
                found += 1
                yield name, sample


def _candidates(length: int, wanted: int) -> list[int]:
    """Return indices all over a source, and then more: the first samples may be broken, or have no answer."""
    first, more = (np.linspace(0, length - 1, count).astype(int).tolist() for count in (wanted, 4 * wanted))
    return list(dict.fromkeys([*first, *more]))


def _write_question(sample: Sample, folder: Path, number: int, max_pixels: int) -> list[dict[str, str]]:
    """Return the question as texts and names of files, which are written."""
    if sample.messages:
        content = [part for message in sample.messages[:-1] for part in (*message.content, "\n")][:-1]
    else:
        content = [value for value in sample.fields.values() if isinstance(value, Media)] or [
            str(sample.fields[name]) for name in ("source", "text") if name in sample.fields
        ]
    return [
        {"text": part}
        if isinstance(part, str)
        else {part.kind: _write_media(part, folder, f"{SAMPLES}/{number}_{place}", max_pixels)}
        for place, part in enumerate(content)
    ]


def _write_media(media: Media, folder: Path, name: str, max_pixels: int) -> str:
    """Write a medium small enough for a page; return its name in the folder."""
    if media.kind == "image":
        image = load_image(media, max_pixels)
        image.thumbnail((_MAX_SIDE, _MAX_SIDE))
        image.save(folder / f"{name}.png")
        return f"{name}.png"
    features = _load_features(media)
    if features is not None:
        np.save(folder / f"{name}.npy", features, allow_pickle=False)
        return f"{name}.npy"
    sound = load_audio(media, _SAMPLE_RATE)
    with wave.open(str(folder / f"{name}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLE_RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    return f"{name}.wav"


def _load_features(media: Media) -> np.ndarray | None:
    """Return the features of a sound that is given as such."""
    if isinstance(media.source, str) and media.source.endswith(".npy"):
        return np.asarray(np.load(media.source, allow_pickle=False), dtype=np.float32)
    if isinstance(media.source, np.ndarray) and media.source.ndim == 2:
        return media.source.astype(np.float32)
    return None
