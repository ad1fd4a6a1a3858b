"""From a case, plain JSON, to the run that it describes: sections of a `RunConfig`, and samples.

A case names the language model and the encoders, what of each is trained, the world, and sections of a run. `kinds`
has for each sample [images, sounds, words, whether there is an answer]; `then` is a second run that resumes the first
in another layout. Everything that is left out has the default of a `RunConfig`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cornstarch.data.sample import Media, Message, Sample
from tests.fuzz.models import ENCODERS, IMAGE, MEL_BINS, MEL_FRAMES, TOKENS, Folders
from tests.parity.samples import WORDS

Case = Mapping[str, Any]
Kind = tuple[int, int, int, bool]

LORA = {"rank": 2, "alpha": 4}
SECTIONS = ("precision", "compile", "features", "checkpoint", "attention")
"""Sections and values of a `RunConfig` that a case may have by the same name, beside data, optimizer and loop."""
_SIZES = ((8, 8), (12, 8), (8, 16), (5, 9))
_OF_LAYOUT = ("world", "parallel", "steps", "then", "name", "expected", "booster")


def load_cases(path: Path) -> dict[str, Case]:
    """Return the cases of a file by name."""
    return {case["name"]: case for case in json.loads(path.read_text(encoding="utf-8"))}


def dump_cases(cases: list[Case]) -> str:
    """Return cases as a file has them: one on each line."""
    return "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"


def alone(case: Case) -> dict[str, Any]:
    """Return the case in one process, from the first step to the last, without a break."""
    steps = case["then"]["steps"] if "then" in case else case["steps"]
    return {**{key: value for key, value in case.items() if key not in _OF_LAYOUT}, "world": 1, "parallel": {},
            "steps": steps}  # fmt: skip


def describe_run(case: Case, folders: Folders, output: str) -> dict[str, Any]:
    """Return the description of a run, as `load_config` takes it."""
    data = {"train": [{"path": "train", "format": "given"}], "skip_limit": 1.0, **case.get("data", {})}
    if case.get("evaluated"):
        data["evaluation"] = [{"path": "held-out", "format": "given"}]
    loop = {"steps": case["steps"], "batch_size": case["batch_size"], "accumulation": case["accumulation"]}
    return {
        "output": output,
        "seed": case.get("seed", 0),
        "device": "cpu",
        "threads": 1,
        "model": _describe_model(case, folders),
        "data": data,
        "optimizer": dict(case.get("optimizer", {})),
        "schedule": {"name": "constant", "warmup": 0, **case.get("schedule", {})},
        "loop": {**loop, **case.get("loop", {})},
        "logging": {"every": 1, "progress": "none", "samples": 2 if case.get("evaluated") else 0},
        "parallel": dict(case.get("parallel", {})),
        **{name: case[name] for name in SECTIONS if name in case},
    }


def _describe_model(case: Case, folders: Folders) -> dict[str, Any]:
    language_model = {
        "path": folders.language_model(case["llm"], case.get("layers"), case.get("vocabulary"), case.get("weights", 1)),
        "tokenizer": folders.tokenizer(),
        "train": case["llm_train"],
        "lora": LORA,
    }
    encoders = {}
    for name, said in case.get("encoders", {}).items():
        options = {key: value for key, value in said.items() if key != "kind"}
        encoders[name] = {
            "path": folders.encoder(said["kind"]),
            "processor_config": ENCODERS[said["kind"]][1],
            "token": TOKENS[name],
            "lora": LORA,
            **options,
        }
    return {"language_model": language_model, "encoders": encoders}


def build_samples(case: Case, key: str = "kinds") -> list[Sample]:
    """Return the samples of a case: those to train on, or those of `evaluation_kinds`."""
    kinds = case.get(key, case["kinds"])
    known = case.get("encoders", {})
    first = 0 if key == "kinds" else 1000  # evaluation must not see the samples of training
    return [
        _build_sample(first + number, kind, known, case.get("odd_sizes", False)) for number, kind in enumerate(kinds)
    ]


def _build_sample(number: int, kind: Kind, encoders: Mapping[str, Any], odd_sizes: bool) -> Sample:
    images, sounds, words, has_answer = kind
    drawn = random.Random(number)
    media = [_build_image(number, place, odd_sizes) for place in range(images if "vision" in encoders else 0)]
    media += [_build_sound(number, place) for place in range(sounds if "audio" in encoders else 0)]
    drawn.shuffle(media)
    question = (f"{' '.join(drawn.choices(WORDS, k=words))} ", *media, " what is it")
    answer = Message("assistant", (" ".join(drawn.choices(WORDS, k=1 + words // 2)),))
    return Sample(f"sample {number}", (Message("user", question), *([answer] if has_answer else [])))


def _build_image(number: int, place: int, odd_sizes: bool) -> Media:
    width, height = _SIZES[(number + place) % len(_SIZES)] if odd_sizes else (IMAGE, IMAGE)
    pixels = np.random.default_rng([number, place]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Media("image", Image.fromarray(pixels))


def _build_sound(number: int, place: int) -> Media:
    frames = np.random.default_rng([number, place, 1]).standard_normal((MEL_FRAMES, MEL_BINS))
    return Media("audio", frames.astype(np.float32))
