"""Models of Mistral that hear: their folders have no chat template and no tokenizer.json, but a tekken.json."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.whole_folders.stored import Ids, StoredFamily, existing

# The first twenty have these numbers in every file of mistral-common; transformers' Voxtral expects [AUDIO] at 24.
SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_21>"),
    *("<SPECIAL_22>", "<SPECIAL_23>", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"),
)
# Bytes, and words joined with the space before them.
PIECES = (*(bytes([number]) for number in range(256)), b" a", b" q", b"a1", b"q1")


@dataclass(frozen=True)
class TekkenFamily(StoredFamily):
    """A family whose tokenizer and chat template are mistral-common's: one file, tekken.json."""

    def write(self, folder: Path) -> None:
        """Write config, weights, tokenizer and processor."""
        (folder / "tekken.json").write_text(json.dumps(_tekken()))
        ids = {token: number for number, token in enumerate([*SPECIAL, *map(repr, PIECES)])}
        self.model(ids).save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(dict(self.processor), indent=2))


def _tekken() -> dict[str, Any]:
    """Return the file as published: `frame_rate` tokens for each second of sound, and 30 seconds at a time."""
    return {
        "config": {
            "pattern": r" ?[aq]\d+|\s+|[^\s]",
            "num_vocab_tokens": len(PIECES),
            "default_vocab_size": len(PIECES) + len(SPECIAL),
            "default_num_special_tokens": len(SPECIAL),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": piece.decode(errors="replace")}
            for rank, piece in enumerate(PIECES)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)
        ],
        "audio": {
            "sampling_rate": 16000,
            "frame_rate": 12.5,
            "audio_encoding_config": {"num_mel_bins": 8, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
    }


def _voxtral(ids: Ids) -> Any:
    config = existing("voxtral", audio_token_id="[AUDIO]")(ids)
    config.audio_config.max_source_positions = 1500  # half the frames of 30 seconds, which the processor's code fixes
    config.text_config.max_position_embeddings = 4096
    return config


FAMILIES: dict[str, StoredFamily] = {
    "voxtral": TekkenFamily(
        "VoxtralForConditionalGeneration",
        _voxtral,
        {
            "processor_class": "VoxtralProcessor",
            "feature_extractor": {
                "feature_extractor_type": "WhisperFeatureExtractor",
                "feature_size": 8,
                "sampling_rate": 16000,
                "hop_length": 160,
                "n_fft": 400,
                "chunk_length": 30,
            },
        },
        None,
        kinds=("audio",),
        ends=("</s>",),
    ),
}
