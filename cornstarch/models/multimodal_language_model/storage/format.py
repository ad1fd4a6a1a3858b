"""What `cornstarch_model.json` says, and whether the folder it describes may be read.

It says everything about a saved model that is not a weight or a part's own config.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from cornstarch.errors import ConfigError
from cornstarch.files import check_inside
from cornstarch.models.multimodal_language_model.encoder import TokenAttention
from cornstarch.models.multimodal_language_model.storage.folder import DESCRIPTION

LANGUAGE_MODEL = "language_model"
EncoderCallback = Literal["preprocess_callback", "postprocess_module_callback", "postprocess_projector_callback"]
ENCODER_CALLBACKS: tuple[EncoderCallback, ...] = get_args(EncoderCallback)
LLM_CALLBACK = "preprocess_llm_callback"

WEIGHTS = "model.safetensors"
ADAPTERS = "adapter"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_DEFAULT_ADAPTER = "default"  # PEFT writes it into the folder itself; others get a sub-folder

# What in a config makes a library import code: transformers' own-code models, a module's name that PEFT imports.
_CODE_KEYS = ("auto_map", "megatron_config")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def _plain(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a plain name")
    return name


def _plain_file(name: str) -> str:
    if not name or name.startswith(".") or any(character in name for character in "/\\\0"):
        raise ValueError(f"{name!r} is not a plain name of a folder")
    return name


PlainName = Annotated[str, AfterValidator(_plain)]
"""A name that becomes an attribute and a folder; nothing that could lead elsewhere."""
FolderName = Annotated[str, AfterValidator(_plain_file)]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NameSet(_Stored):
    """Some of the names of a part's tensors, written shortly: none or all of them, but for a few."""

    all: bool
    but: tuple[str, ...] = ()

    @classmethod
    def of(cls, chosen: Collection[str], names: Iterable[str]) -> NameSet:
        """Describe `chosen` among `names`."""
        inside = tuple(name for name in names if name in chosen)
        outside = tuple(name for name in names if name not in chosen)
        return cls(all=True, but=outside) if len(outside) < len(inside) else cls(all=False, but=inside)

    def among(self, names: Iterable[str]) -> frozenset[str]:
        """Return the described names."""
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
        """Return where an adapter's files lie in the adapters' folder."""
        return "." if name == _DEFAULT_ADAPTER else name

    @property
    def files(self) -> list[str]:
        """The files that must be there, relative to the adapters' folder."""
        places = ["" if name == _DEFAULT_ADAPTER else f"{name}/" for name in self.names]
        return [f"{place}{file}" for place in places for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]


class StoredPart(_Stored):
    """One part: what it is, and what its weights are like beyond their values."""

    kind: Literal["transformers", "projector", "module"]
    """A transformers model; a projector around the user's own module; any other module."""
    class_path: str
    """Where its class is imported from; for a projector the class of the user's module."""
    dtype: str | None = None
    """The precision of most tensors (None: it has none); `other_dtypes` lists the others by precision."""
    other_dtypes: dict[str, tuple[str, ...]] = {}
    trainable: NameSet = NameSet(all=True)
    """The parameters that require a gradient."""
    fixed: NameSet | None = None
    """The parameters that stay frozen when the part is declared trained, if it ever was declared."""
    attn_implementation: str | None = None
    adapters: StoredAdapters | None = None


class StoredEncoder(_Stored):
    """One encoder: how it is called."""

    additional_args: tuple[str, ...] = ()
    attention: TokenAttention = "causal"
    callbacks: tuple[EncoderCallback, ...] = ()


class StoredModel(_Stored):
    """The whole model. Each part is a sub-folder named like its key in `parts`."""

    format: int
    versions: dict[str, str]
    encoders: dict[PlainName, StoredEncoder]
    parts: dict[PlainName, StoredPart]
    same_as: dict[PlainName, PlainName] = {}
    """Parts that are the very same module as another part and are stored once."""
    modality_token_ids: dict[PlainName, int] = {}
    trains_on_placeholders: bool = False
    positions_from_mask: bool = True
    takes_left_padding: bool = True
    has_llm_callback: bool = False
    origin: dict[str, Any] | None = None
    """For a model that was taken apart by from_multimodal: what the whole was."""
    files: dict[str, dict[str, Any]] = {}
    sha256: str = ""


def parsed(path: Path, content: dict[str, Any]) -> StoredModel:
    """Return what the file `path` says, if it is complete."""
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
    configs += [(folder / file, _json(folder / file)) for file in stored.files if file.endswith(".json")]
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


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it is not JSON ({error}). Restore it from a copy.") from error


def _has_key(content: Any, key: str) -> bool:
    """Whether a key with a value stands anywhere in a JSON document."""
    todo = [content]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if item.get(key):
                return True
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return False
