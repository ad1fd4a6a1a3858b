"""The demo's config, and a copy of it to change, with a held-out image and sound to ask the model about."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cornstarch.config import RunConfig
from cornstarch.config.config_file import load_config, write_data
from cornstarch.demo.samples import digits, speakers
from cornstarch.errors import ConfigError

CONFIG = Path(__file__).parent / "demo.yaml"
TOKENIZER = Path(__file__).parent / "tokenizer"
_TOKENIZER_LINE = "tokenizer: tokenizer "


def demo_config(overrides: Sequence[str] = (), plan: Path | None = None) -> RunConfig:
    """Return the demo's config; its paths are absolute, so the working directory does not matter.

    Args:
        overrides: `key.path=value`, as on the command line.
        plan: A file of `cornstarch plan`.
    """
    return load_config(CONFIG, [f"model.language_model.tokenizer={TOKENIZER}", *overrides], plan=plan)


def write_demo(folder: str | Path) -> dict[str, str]:
    """Write the demo's config, its tokenizer, and held-out examples into a folder.

    The paths in the copied config are absolute, so that it can be run from anywhere. Existing files are not replaced.

    Returns:
        A description of each file, by its name.
    """
    place = Path(folder).absolute()
    image, sound = digits("test")[0], speakers("test")[0]
    written = {
        "demo.yaml": "the description of the run, to change as you like",
        "tokenizer": "the tokenizer of its 26 words",
        "digit.png": _describe_example(image),
        "speaker.npy": _describe_example(sound),
    }
    existing = [name for name in written if (place / name).exists()]
    if existing:
        raise ConfigError(f"{place} has {', '.join(existing)} already; give another folder.")
    try:
        place.mkdir(parents=True, exist_ok=True)
        shutil.copytree(TOKENIZER, place / "tokenizer")
        _save_image(image["image"], place / "digit.png")
        np.save(place / "speaker.npy", sound["audio"], allow_pickle=False)
        config = CONFIG.read_text(encoding="utf-8")
        assert config.count(_TOKENIZER_LINE) == 1
        quoted = write_data(str(place / "tokenizer"), flow=True).strip()
        copy = config.replace(_TOKENIZER_LINE, f"tokenizer: {quoted} ")
        (place / "demo.yaml").write_text(copy, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or place} cannot be written: {error.strerror}.") from error
    return written


def _describe_example(row: dict[str, Any]) -> str:
    question, answer = (turn["content"] for turn in row["messages"])
    return f'held out; "{question}" should give "{answer}"'


def _save_image(image: np.ndarray, path: Path) -> None:
    from PIL import Image

    Image.fromarray(image).save(path)
