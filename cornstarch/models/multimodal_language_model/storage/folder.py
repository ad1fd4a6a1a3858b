"""A model's folder on disk: complete, checked, and never half there.

A folder is written beside its place, synced, and renamed into it, so that a crash at any moment leaves the model that
was there before. `cornstarch_model.json` is written last and lists every file of the model with its size and SHA-256.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, check_manifest, file_digests, own_digest, sync

DESCRIPTION = "cornstarch_model.json"
FORMAT = 1


# ---------------------------------------------------------------------------------------------------- writing


def checked_target(folder: str | os.PathLike[str]) -> Path:
    """Return where to save, if a model may be put there: nothing, an empty folder, or a Cornstarch model."""
    target = Path(folder).resolve()  # through links: the real folder is replaced, a link to it stays
    try:
        found = [path.name for path in target.iterdir()] if target.exists() else []
    except NotADirectoryError as error:
        raise ConfigError(f"Cannot save to {target}: it is a file. Give a folder.") from error
    except PermissionError as error:
        raise ConfigError(f"Cannot save to {target}: no permission ({error}).") from error
    if os.path.ismount(target):
        raise ConfigError(f"Cannot save to {target}: it is a mount point and cannot be replaced. Give a folder in it.")
    if found:
        if DESCRIPTION not in found:
            raise ConfigError(
                f"Cannot save to {target}: it is not empty and holds no Cornstarch model. "
                "Give a new folder, or empty this one."
            )
        try:
            read_description(target, verify=False)
        except ConfigError as error:
            raise ConfigError(
                f"Cannot save to {target}: which of its files belong to the model there cannot be read. "
                f"Give a new folder, or empty this one. ({error})"
            ) from error
    return target


@contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, and put it in its place if the block ends well."""
    fresh = _sibling(target, "tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        leftovers = list(_siblings(target))
        fresh.mkdir()
    except OSError as error:
        raise ConfigError(f"Cannot save to {target}: cannot write in {target.parent} ({error}).") from error
    if leftovers:
        names = ", ".join(path.name for path in leftovers)
        warnings.warn(f"An interrupted save left {names} in {target.parent}; remove what is not needed.", stacklevel=5)
    try:
        yield fresh
        _swap(fresh, target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _sibling(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name}.{kind}.{secrets.token_hex(4)}")


def _siblings(target: Path) -> Iterator[Path]:
    """Yield the folders that interrupted saves of `target` left beside it, the newest content first."""
    for kind in ("tmp", "old"):
        yield from sorted(target.parent.glob(f"{glob.escape(target.name)}.{kind}.*"))


def _swap(fresh: Path, target: Path) -> None:
    old = _sibling(target, "old")
    try:
        if target.exists():
            os.rename(target, old)
        os.rename(fresh, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    sync(target.parent)  # the new folder is there for good before the old one goes
    if old.exists():
        shutil.rmtree(old, onerror=_tell_left_over)


def _tell_left_over(function: Callable[..., Any], path: str, reason: Any) -> None:
    warnings.warn(f"The model is saved, but {path} of its predecessor could not be removed: {reason[1]}", stacklevel=4)


def seal(fresh: Path, target: Path, description: dict[str, Any]) -> None:
    """Finish a new folder: sync and list its files, bring over the user's own, and write the description last."""
    written = _files_in(fresh)
    # safetensors makes files that only their owner can read; here they are as the user's umask made the folder.
    mode = fresh.stat().st_mode & 0o666
    for name in written:
        os.chmod(fresh / name, mode)
        sync(fresh / name)
    digests = file_digests(fresh, written)
    files = {name: {"size": (fresh / name).stat().st_size, "sha256": digests[name]} for name in written}
    _carry_over(target, fresh, files)
    content = {**description, "files": files}
    content["sha256"] = own_digest(content)
    (fresh / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(fresh / DESCRIPTION)
    for root, _, _ in os.walk(fresh):
        sync(Path(root))


def _carry_over(target: Path, fresh: Path, files: Manifest) -> None:
    """Keep what others put in the folder that is replaced: a processor, a README, a tokenizer beside the weights."""
    if not (target / DESCRIPTION).is_file():
        return
    listed = read_description(target, verify=False)["files"]
    parts = {PurePosixPath(name).parts[0] for name in (*listed, *files)}
    for name in _files_in(target):
        if name in listed or name in files or name == DESCRIPTION:
            continue
        if PurePosixPath(name).parts[0] in parts and _steers_loading(name):
            continue  # such a file in a part's folder would be taken for the part's weights
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(target / name, fresh / name, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(target / name, fresh / name, follow_symlinks=False)


def _files_in(folder: Path) -> list[str]:
    """Return the files and links below a folder, as sorted relative names."""
    found = []
    for root, directories, files in os.walk(folder):
        links = [name for name in directories if os.path.islink(os.path.join(root, name))]
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in [*files, *links]]
    return sorted(found)


# ---------------------------------------------------------------------------------------------------- reading


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder to load from, if there is a Cornstarch model in it."""
    path = Path(folder)
    try:
        if not path.exists():
            raise ConfigError(_missing_message(path))
        if not path.is_dir():
            raise ConfigError(f"{path} is a file; expected the folder that save_pretrained wrote.")
        list(path.iterdir())
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be read: no permission ({error}).") from error
    if not (path / DESCRIPTION).is_file():
        if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
            raise ConfigError(
                f"{path} is a plain Hugging Face model, not a Cornstarch one ({DESCRIPTION} is missing). Load it with "
                "transformers, then compose it, MultimodalModel(encoders={…}, language_model=…), or take a whole "
                "multimodal model apart with MultimodalModel.from_multimodal(model)."
            )
        if (path / "training_args.bin").is_file():
            raise ConfigError(
                f"{path} is a checkpoint of transformers' Trainer, which has weights only ({DESCRIPTION} is missing). "
                "Load them into the model that was trained, model.load_state_dict(safetensors.torch.load_file(…)), or "
                "write the model with trainer.model.save_pretrained(folder)."
            )
        raise ConfigError(f"{path} holds no Cornstarch model: {DESCRIPTION} is missing.")
    return path


def _missing_message(path: Path) -> str:
    message = f"There is no folder {path} (models are read from local folders; nothing is downloaded)."
    resolved = path.resolve()
    complete = [sibling for sibling in _siblings(resolved) if (sibling / DESCRIPTION).is_file()]
    if complete:
        found = " and ".join(str(sibling) for sibling in complete)
        message += (
            f" A save of it was interrupted at its last step; the model is complete in {found} "
            f"('.tmp.' is the new one, '.old.' the one before it). Rename one of them to {resolved.name}."
        )
    return message


def read_description(folder: Path, verify: bool = True) -> dict[str, Any]:
    """Return the content of `cornstarch_model.json` if it can be trusted: whole, of a known format, safe names."""
    path = folder / DESCRIPTION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is not JSON ({error}). Restore the folder from a copy.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}).") from error
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise ConfigError(f"{path} is damaged: it has no format number. Restore the folder from a copy.")
    if version > FORMAT:
        writer = content.get("versions")
        raise ConfigError(
            f"{folder} was saved in format {version} by a newer Cornstarch ({writer}); this one reads formats up to "
            f"{FORMAT}. Update Cornstarch."
        )
    if verify and content.get("sha256") != own_digest(content):
        raise ConfigError(
            f"{path} is damaged or was edited: its content does not have the checksum it states. "
            "Restore it from a copy, or load with verify=False if the change was meant."
        )
    check_manifest(path, content.get("files"))
    return content


def check_files(folder: Path, files: Manifest, verify: bool) -> None:
    """Refuse a folder whose files are not those that were saved.

    Without `verify` configs may have been edited, and only the sizes of the weights are compared.
    """
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise ConfigError(f"{path} is missing. Restore the folder from a copy.")
        size = path.stat().st_size
        if size != entry["size"] and (verify or name.endswith(".safetensors")):
            raise ConfigError(
                f"{path} has {size} bytes, but {entry['size']} were saved: it is truncated or was changed. "
                "Restore it from a copy."
            )
    if verify:
        for name, digest in file_digests(folder, list(files)).items():
            if digest != files[name]["sha256"]:
                raise ConfigError(
                    f"{folder / name} is damaged or was edited: its SHA-256 is {digest[:16]}…, but "
                    f"{files[name]['sha256'][:16]}… was saved. Restore it from a copy, or load with verify=False "
                    "if the change was meant."
                )
    parts = {PurePosixPath(name).parts[0] for name in files}
    for name in _files_in(folder):
        if name not in files and PurePosixPath(name).parts[0] in parts and _steers_loading(name):
            raise ConfigError(
                f"{folder / name} is not a file of the saved model, but could be loaded in place of one. Move it away."
            )


def _steers_loading(name: str) -> bool:
    """Whether transformers or PEFT would read weights from a file of this name."""
    return name.endswith((".safetensors", ".bin", ".index.json", "adapter_config.json"))
