"""A model's folder on disk: complete, verified, and never half-written.

A new folder is written next to the target, synced, and renamed, so that a crash at any moment leaves the previous
model in place. `cornstarch_model.json` is written last. It lists every file with its size and SHA-256, and describes
everything about a saved model that is not a weight or a part's own config.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from cornstarch.errors import ConfigError
from cornstarch.files import Manifest, check_inside, check_manifest, file_digests, own_digest, sync

from .encoder import TokenAttention

DESCRIPTION = "cornstarch_model.json"
FORMAT = 1
LANGUAGE_MODEL = "language_model"
EncoderCallback = Literal["preprocess_callback", "postprocess_module_callback", "postprocess_projector_callback"]
ENCODER_CALLBACKS: tuple[EncoderCallback, ...] = get_args(EncoderCallback)
LLM_CALLBACK = "preprocess_llm_callback"

WEIGHTS = "model.safetensors"
ADAPTERS = "adapter"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_DEFAULT_ADAPTER = "default"  # PEFT writes it into the folder itself; others get a sub-folder

# Config keys that make a library import code: transformers' remote code, a module's name that PEFT imports.
_CODE_KEYS = ("auto_map", "megatron_config")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def _check_identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a plain name")
    return name


def _check_folder_name(name: str) -> str:
    if not name or name.startswith(".") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{name!r} is not a plain name of a folder")
    return name


PlainName = Annotated[str, AfterValidator(_check_identifier)]
"""A name that becomes an attribute and a folder, and cannot lead out of the model's folder."""
FolderName = Annotated[str, AfterValidator(_check_folder_name)]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NameSet(_Stored):
    """A subset of the names of a part's tensors: all names except `but`, or only `but`."""

    all: bool
    but: tuple[str, ...] = ()

    @classmethod
    def of(cls, chosen: Collection[str], names: Iterable[str]) -> NameSet:
        inside = tuple(name for name in names if name in chosen)
        outside = tuple(name for name in names if name not in chosen)
        return cls(all=True, but=outside) if len(outside) < len(inside) else cls(all=False, but=inside)

    def among(self, names: Iterable[str]) -> frozenset[str]:
        known = frozenset(names)
        unknown = [name for name in self.but if name not in known]
        if unknown:
            raise ConfigError(f"cornstarch_model.json names {unknown[0]!r}, which the loaded part does not have.")
        return known.difference(self.but) if self.all else frozenset(self.but)


class StoredAdapters(_Stored):
    """The PEFT adapters of a part, in the order in which they were added."""

    names: tuple[FolderName, ...]
    active: tuple[FolderName, ...]
    enabled: bool = True

    @staticmethod
    def place(name: str) -> str:
        return "." if name == _DEFAULT_ADAPTER else name

    @property
    def files(self) -> list[str]:
        places = ["" if name == _DEFAULT_ADAPTER else f"{name}/" for name in self.names]
        return [f"{place}{file}" for place in places for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]


class StoredPart(_Stored):
    """One part: its class, and the properties of its tensors beyond their values."""

    kind: Literal["transformers", "projector", "module"]
    """A transformers model; a projector around the user's own module; any other module."""
    class_path: str  # the import path of its class; for a projector the class of the user's module
    dtype: str | None = None
    """The dtype of most tensors (None: there are no tensors); `other_dtypes` lists the others by dtype."""
    other_dtypes: dict[str, tuple[str, ...]] = {}
    trainable: NameSet = NameSet(all=True)  # the parameters that require a gradient
    fixed: NameSet | None = None
    """The parameters that stay frozen when the part is trained, if `set_trainable` was ever called."""
    attn_implementation: str | None = None
    adapters: StoredAdapters | None = None


class StoredEncoder(_Stored):
    additional_args: tuple[str, ...] = ()
    attention: TokenAttention = "causal"
    callbacks: tuple[EncoderCallback, ...] = ()


class StoredModel(_Stored):
    """The whole model. Each part is a sub-folder with the name of its key in `parts`."""

    format: int
    versions: dict[str, str]
    encoders: dict[PlainName, StoredEncoder]
    parts: dict[PlainName, StoredPart]
    same_as: dict[PlainName, PlainName] = {}  # parts that are the same module as another part and are stored once
    modality_token_ids: dict[PlainName, int] = {}
    trains_on_placeholders: bool = False
    positions_from_mask: bool = True
    takes_left_padding: bool = True
    has_llm_callback: bool = False
    origin: dict[str, Any] | None = None
    """For a model that was decomposed by from_multimodal: the class and config of the whole model."""
    files: dict[str, dict[str, Any]] = {}
    sha256: str = ""


def read_description(folder: Path, verify: bool = True) -> dict[str, Any]:
    """Return the content of `cornstarch_model.json` after checking its checksum, format and file names."""
    path = folder / DESCRIPTION
    try:
        content = _read_json(path, "Restore the folder from a copy")
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


def _read_json(path: Path, advice: str = "Restore it from a copy") -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is not JSON ({error}). {advice}.") from error


def parse_description(path: Path, content: dict[str, Any]) -> StoredModel:
    """Parse the content of the file `path`, and check that it describes all parts."""
    try:
        stored = StoredModel.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"{path} is damaged: {where}: {first['msg']}.") from error
    expected = {LANGUAGE_MODEL}
    for name in stored.encoders:
        expected |= {f"{name}_encoder", f"{name}_projector"}
    further = {f"{name}_{callback}" for name in stored.encoders for callback in ENCODER_CALLBACKS} | {LLM_CALLBACK}
    known = {*stored.parts, *stored.same_as}
    wrong = (expected - known) | (known - expected - further) | (set(stored.same_as.values()) - stored.parts.keys())
    if wrong:
        raise ConfigError(f"{path} is damaged: its parts do not match its encoders ({sorted(wrong)}).")
    return stored


def check_target(folder: str | os.PathLike[str]) -> Path:
    """Return the resolved target of a save; it may be missing, empty, or hold a Cornstarch model."""
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
def replace_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder next to `target`, and move it to `target` if the block succeeds."""
    fresh = _build_sibling(target, "tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        leftovers = list(_find_siblings(target))
        fresh.mkdir()
    except OSError as error:
        raise ConfigError(f"Cannot save to {target}: cannot write in {target.parent} ({error}).") from error
    if leftovers:
        names = ", ".join(path.name for path in leftovers)
        warnings.warn(f"An interrupted save left {names} in {target.parent}; remove what is not needed.", stacklevel=5)
    old = _build_sibling(target, "old")
    try:
        yield fresh
        if target.exists():
            os.rename(target, old)
        os.rename(fresh, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    sync(target.parent)  # the new folder is durable before the old one is removed

    def warn(function: Callable[..., Any], path: str, reason: Any) -> None:
        warnings.warn(
            f"The model is saved, but {path} of its predecessor could not be removed: {reason[1]}", stacklevel=4
        )

    if old.exists():
        shutil.rmtree(old, onerror=warn)


def _build_sibling(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name}.{kind}.{secrets.token_hex(4)}")


def _find_siblings(target: Path) -> Iterator[Path]:
    """Yield the folders that interrupted saves of `target` left next to it, the newest content first."""
    for kind in ("tmp", "old"):
        yield from sorted(target.parent.glob(f"{glob.escape(target.name)}.{kind}.*"))


def finish_folder(fresh: Path, target: Path, description: dict[str, Any]) -> None:
    """Sync and list the files of a new folder, copy the user's own files, and write the description last."""
    written = _list_files(fresh)
    # safetensors creates files that only their owner can read; give them the mode of the user's umask.
    mode = fresh.stat().st_mode & 0o666
    for name in written:
        os.chmod(fresh / name, mode)
        sync(fresh / name)
    digests = file_digests(fresh, written)
    files = {name: {"size": (fresh / name).stat().st_size, "sha256": digests[name]} for name in written}
    if (target / DESCRIPTION).is_file():
        # Keep files that others put into the replaced folder: a processor, a README, a tokenizer next to the weights.
        listed = read_description(target, verify=False)["files"]
        parts = {PurePosixPath(name).parts[0] for name in (*listed, *files)}
        for name in _list_files(target):
            if name in listed or name in files or name == DESCRIPTION:
                continue
            if PurePosixPath(name).parts[0] in parts and _affects_loading(name):
                continue  # in a part's folder, such a file would be loaded as the part's weights
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(target / name, fresh / name, follow_symlinks=False)
            except OSError:  # a file system without hard links
                shutil.copy2(target / name, fresh / name, follow_symlinks=False)
    content = {**description, "files": files}
    content["sha256"] = own_digest(content)
    (fresh / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(fresh / DESCRIPTION)
    for root, _, _ in os.walk(fresh):
        sync(Path(root))


def _list_files(folder: Path) -> list[str]:
    """Return the files and links below a folder, as sorted relative names."""
    found = []
    for root, directories, files in os.walk(folder):
        links = [name for name in directories if os.path.islink(os.path.join(root, name))]
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in [*files, *links]]
    return sorted(found)


def _affects_loading(name: str) -> bool:
    """Whether transformers or PEFT would read weights from a file of this name."""
    return name.endswith((".safetensors", ".bin", ".index.json", "adapter_config.json"))


def check_source(folder: str | os.PathLike[str]) -> Path:
    """Return the folder to load from; raise if it holds no Cornstarch model."""
    path = Path(folder)
    try:
        if not path.exists():
            message = f"There is no folder {path} (models are read from local folders; nothing is downloaded)."
            resolved = path.resolve()
            complete = [str(one) for one in _find_siblings(resolved) if (one / DESCRIPTION).is_file()]
            if complete:
                message += (
                    f" A save of it was interrupted at its last step; the model is complete in "
                    f"{' and '.join(complete)} ('.tmp.' is the new one, '.old.' the one before it). "
                    f"Rename one of them to {resolved.name}."
                )
            raise ConfigError(message)
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


def check_files(folder: Path, files: Manifest, verify: bool) -> None:
    """Refuse a folder whose files differ from the saved ones; without `verify`, compare only the weights' sizes."""
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
    for name in _list_files(folder):
        if name not in files and PurePosixPath(name).parts[0] in parts and _affects_loading(name):
            raise ConfigError(
                f"{folder / name} is not a file of the saved model, but could be loaded in place of one. Move it away."
            )


def check_safe(folder: Path, stored: StoredModel, trust_remote_code: bool) -> None:
    """Refuse pickles, code and names that lead out of the folder, before any library reads the files."""
    for name, part in stored.parts.items():
        needed = [f"{name}/{ADAPTERS}/{file}" for file in part.adapters.files] if part.adapters else []
        if f"{name}/{WEIGHTS}.index.json" not in stored.files:
            needed.append(f"{name}/{WEIGHTS}")
        for file in needed:
            if file not in stored.files:
                raise ConfigError(f"{folder / file} is missing: weights are read from safetensors files only.")
    for file in stored.files:
        if file.endswith(_PICKLES):
            raise ConfigError(f"{folder / file} may hold a pickle, which can run code when it is read: refused.")
    configs: list[tuple[Path, Any]] = [(folder / DESCRIPTION, stored.origin)]
    configs += [(folder / file, _read_json(folder / file)) for file in stored.files if file.endswith(".json")]
    for path, content in configs:
        for key in _CODE_KEYS:
            if not trust_remote_code and _has_key(content, key):
                raise ConfigError(
                    f"{path} asks to run Python code of its own choice ({key}). If you trust it, load with "
                    "from_pretrained(…, trust_remote_code=True)."
                )
        if isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
            for shard in content["weight_map"].values():
                check_inside(path, shard)
                if (path.parent / shard).relative_to(folder).as_posix() not in stored.files:
                    raise ConfigError(f"{path} names the file {shard}, which was not saved with the model: refused.")


def _has_key(content: Any, key: str) -> bool:
    """Whether a JSON document has a key with a value anywhere."""
    pending = [content]  # no recursion: a crafted document may be nested deeply
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if item.get(key):
                return True
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return False
