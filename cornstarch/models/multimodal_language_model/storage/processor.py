"""The folder of a processor: the tokenizer and each modality's processor in sub-folders that transformers loads."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.preprocessing.subprocessors import (
    load_processor,
    load_tokenizer,
    read_json,
)

CONFIG_NAME = "cornstarch_processor.json"
_FORMAT = 1


@dataclass(frozen=True)
class ProcessorParts:
    """What a processor is made of, as far as it can be stored."""

    tokenizer: PreTrainedTokenizerBase
    processors: Mapping[str, Any]
    """By modality."""
    tokens: Mapping[str, str]
    """By modality: its placeholder."""


def save_parts(folder: Path, parts: ProcessorParts, with_functions: Collection[str]) -> None:
    """Write the parts of a processor.

    Args:
        folder: Where to.
        parts: What is stored.
        with_functions: Modalities that have a function of the user's, which is not.
    """
    modalities: dict[str, Any] = {}
    for name, processor in parts.processors.items():
        if not hasattr(processor, "save_pretrained"):
            raise ConfigError(f"The {name} processor ({type(processor).__name__}) has no save_pretrained.")
        token, has_function = parts.tokens[name], name in with_functions
        modalities[name] = {"class": type(processor).__name__, "token": token, "has_function": has_function}
    for name, processor in parts.processors.items():
        processor.save_pretrained(folder / f"{name}_processor")
    parts.tokenizer.save_pretrained(folder / "tokenizer")
    # Last and at once: a folder with this file is complete.
    temporary = folder / f"{CONFIG_NAME}.tmp"
    temporary.write_text(json.dumps({"format": _FORMAT, "modalities": modalities}, indent=2) + "\n")
    os.replace(temporary, folder / CONFIG_NAME)


def load_parts(
    folder: Path, counted: Collection[str] | None, classes: Mapping[str, type] | None, trust_remote_code: bool
) -> ProcessorParts:
    """Read the parts of a processor.

    Args:
        folder: What `save_parts` wrote.
        counted: Modalities of which the tokens of an item can be counted without a stored function; None: all.
        classes: By modality, the class of a processor that is not in transformers.
        trust_remote_code: Whether code in the tokenizer's folder may be run.
    """
    stored = read_json(folder / CONFIG_NAME)
    if stored.get("format") != _FORMAT:
        raise ConfigError(f"{folder / CONFIG_NAME} has format {stored.get('format')}; this version reads {_FORMAT}.")
    modalities: dict[str, Any] = stored["modalities"]
    for name, entry in modalities.items():
        if entry["has_function"] and counted is not None and name not in counted:
            raise ConfigError(
                f"The processor in {folder} had its own function for the tokens of {name}; functions are not stored. "
                f"Pass num_feature_calculation_funcs={{{name!r}: …}} or model=… to from_pretrained."
            )
    processors = {
        name: load_processor(folder / f"{name}_processor", name, entry["class"], classes)
        for name, entry in modalities.items()
    }
    tokenizer = load_tokenizer(folder / "tokenizer", trust_remote_code)
    return ProcessorParts(tokenizer, processors, {name: entry["token"] for name, entry in modalities.items()})


__all__ = ["CONFIG_NAME", "ProcessorParts", "load_parts", "save_parts"]
