"""Questions and answers about the demo's data, as rows of an ordinary source."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cornstarch.errors import ConfigError

DATA = Path(__file__).parent / "data"
NUMBERS = "zero one two three four five six seven eight nine".split()
HELD_OUT_DIGITS = 360

Row = dict[str, Any]


def digits(split: str) -> list[Row]:
    """Ask which digit an image shows.

    Args:
        split: "train" (1,437 images) or "test" (the other 360).
    """
    return [_build_row("image", image, "which digit is <image> ?", NUMBERS[digit]) for image, digit in _images(split)]


def parity(split: str) -> list[Row]:
    """Ask whether the digit in an image is even or odd: the same images, another question."""
    return [
        _build_row("image", image, "is <image> even or odd ?", "odd" if digit % 2 else "even")
        for image, digit in _images(split)
    ]


def speakers(split: str) -> list[Row]:
    """Ask who speaks in a sound, which is given as precomputed features [frames, 12].

    Args:
        split: "train" (270 utterances) or "test" (370, spoken on other occasions), as their authors split them.
    """
    stored = _load_arrays("speakers")
    ends = np.cumsum(stored["frames"], dtype=np.int64)
    sounds = np.split(stored["features"], ends[:-1])
    order = _random_order(len(ends))  # they are stored speaker by speaker
    chosen = order[stored["test"][order] == _is_test(split)].tolist()
    return [
        _build_row("audio", sounds[i], "who says <audio> ?", f"speaker {NUMBERS[stored['speakers'][i]]}")
        for i in chosen
    ]


def _images(split: str) -> Iterable[tuple[np.ndarray, int]]:
    """Return the images of a split, in grey levels, with their digits."""
    stored = _load_arrays("digits")
    order = _random_order(len(stored["digits"]))
    chosen = order[:HELD_OUT_DIGITS] if _is_test(split) else order[HELD_OUT_DIGITS:]
    images = (stored["images"].astype(np.uint16) * 255 // 16).astype(np.uint8)
    return zip(images[chosen], stored["digits"][chosen].tolist(), strict=True)


def _random_order(length: int) -> np.ndarray:
    """Return a random order that is always the same: numpy keeps the stream of this generator stable."""
    return np.random.PCG64(0).random_raw(length).argsort(kind="stable")


def _build_row(kind: str, media: np.ndarray, question: str, answer: str) -> Row:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {kind: media, "messages": turns}


def _is_test(split: str) -> bool:
    if split not in ("train", "test"):
        raise ConfigError(f"split = {split!r}; expected train or test.")
    return split == "test"


@cache
def _load_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)
