"""Tiny folders of whole multimodal models, as `save_pretrained` writes them; one for each family of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.models.whole_folders import families, more, newest, qwen, tekken
from tests.models.whole_folders.stored import StoredFamily

FOLDERS: Mapping[str, StoredFamily] = {
    **qwen.FAMILIES,
    **tekken.FAMILIES,
    **families.FAMILIES,
    **more.FAMILIES,
    **newest.FAMILIES,
}


def write_folder(name: str, parent: Path) -> Path:
    """Return the folder of a family under `parent`; it is written if it is not there yet."""
    folder = parent / name
    if not folder.exists():
        fresh = parent / f"{name}.unfinished"
        fresh.mkdir(parents=True)
        FOLDERS[name].write(fresh)
        fresh.rename(folder)
    return folder
