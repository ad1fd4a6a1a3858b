"""The demo's config and rows: questions and answers about its data, and held-out examples to ask the model about."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cornstarch.config import RunConfig
from cornstarch.config.config_file import load_config, write_data
from cornstarch.errors import ConfigError

CONFIG = Path(__file__).parent / "demo.yaml"
TOKENIZER = Path(__file__).parent / "tokenizer"
_TOKENIZER_LINE = "tokenizer: tokenizer "


def demo_config(overrides: Sequence[str] = (), plan: Path | None = None) -> RunConfig:
    """Return the demo's config; its paths are absolute, so the working directory does not matter.

    `overrides` are `key.path=value`, as on the command line; `plan` is a file of `cornstarch plan`.
    """
    return load_config(CONFIG, [f"model.language_model.tokenizer={TOKENIZER}", *overrides], plan=plan)


def write_demo(folder: str | Path) -> dict[str, str]:
    """Write the demo's config, its tokenizer, and held-out examples into a folder; return what each file is, by name.

    The paths in the copied config are absolute, so that it can be run from anywhere. Existing files are not replaced.
    """
    from PIL import Image

    place = Path(folder).absolute()
    image, sound = examples = digits("test")[0], speakers("test")[0]
    asked = [[turn["content"] for turn in row["messages"]] for row in examples]
    about = [f'held out; "{question}" should give "{answer}"' for question, answer in asked]
    written = {
        "demo.yaml": "the description of the run, to change as you like",
        "tokenizer": "the tokenizer of its 26 words",
        "digit.png": about[0],
        "speaker.npy": about[1],
    }
    existing = [name for name in written if (place / name).exists()]
    if existing:
        raise ConfigError(f"{place} has {', '.join(existing)} already; give another folder.")
    try:
        place.mkdir(parents=True, exist_ok=True)
        shutil.copytree(TOKENIZER, place / "tokenizer")
        Image.fromarray(image["image"]).save(place / "digit.png")
        np.save(place / "speaker.npy", sound["audio"], allow_pickle=False)
        config = CONFIG.read_text(encoding="utf-8")
        assert config.count(_TOKENIZER_LINE) == 1
        quoted = write_data(str(place / "tokenizer"), flow=True).strip()
        copy = config.replace(_TOKENIZER_LINE, f"tokenizer: {quoted} ")
        (place / "demo.yaml").write_text(copy, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or place} cannot be written: {error.strerror}.") from error
    return written


DATA = Path(__file__).parent / "data"
NUMBERS = "zero one two three four five six seven eight nine".split()
HELD_OUT_DIGITS = 360

Row = dict[str, Any]


def digits(split: str) -> list[Row]:
    """Ask which digit an image shows; `split` is "train" (1,437 images) or "test" (the other 360)."""
    return [_build_row("image", image, "which digit is <image> ?", NUMBERS[digit]) for image, digit in _images(split)]


def parity(split: str) -> list[Row]:
    """Ask whether the digit in an image is even or odd: the same images, another question."""
    return [
        _build_row("image", image, "is <image> even or odd ?", "odd" if digit % 2 else "even")
        for image, digit in _images(split)
    ]


def speakers(split: str) -> list[Row]:
    """Ask who speaks; `split` is "train" (270 sounds, as features [frames, 12]) or "test" (370 of other days)."""
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
