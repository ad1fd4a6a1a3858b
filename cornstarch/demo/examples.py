"""Files to begin with: a copy of the demo's description, and an image and a sound to ask the model about."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from cornstarch.demo.config import CONFIG, TOKENIZER
from cornstarch.demo.samples import digits, speakers
from cornstarch.errors import ConfigError
from cornstarch.train.source import write_data

_TOKENIZER_LINE = "tokenizer: tokenizer "


def write_demo(folder: str | Path) -> dict[str, str]:
    """Write the demo's config, its tokenizer, and held-out examples into a folder.

    The paths in the copied config are absolute, so that it can be run from anywhere; nothing that is there already is
    replaced.

    Returns:
        By file: what it is.
    """
    place = Path(folder).absolute()
    image, sound = digits("test")[0], speakers("test")[0]
    written = {
        "demo.yaml": "the description of the run, to change as you like",
        "tokenizer": "the tokenizer of its 26 words",
        "digit.png": _described(image),
        "speaker.npy": _described(sound),
    }
    there = [name for name in written if (place / name).exists()]
    if there:
        raise ConfigError(f"{place} has {', '.join(there)} already; give another folder.")
    try:
        place.mkdir(parents=True, exist_ok=True)
        shutil.copytree(TOKENIZER, place / "tokenizer")
        _save_image(image["image"], place / "digit.png")
        np.save(place / "speaker.npy", sound["audio"], allow_pickle=False)
        (place / "demo.yaml").write_text(_description(place / "tokenizer"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or place} cannot be written: {error.strerror}.") from error
    return written


def _described(row: dict[str, Any]) -> str:
    question, answer = (turn["content"] for turn in row["messages"])
    return f'held out; "{question}" should give "{answer}"'


def _save_image(image: np.ndarray, path: Path) -> None:
    from PIL import Image

    Image.fromarray(image).save(path)


def _description(tokenizer: Path) -> str:
    text = CONFIG.read_text(encoding="utf-8")
    assert text.count(_TOKENIZER_LINE) == 1
    quoted = write_data(str(tokenizer), flow=True).strip()
    return text.replace(_TOKENIZER_LINE, f"tokenizer: {quoted} ")
