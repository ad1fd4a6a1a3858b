"""A run on ragged multimodal data with evaluations: few variants of each layer, none after the first steps."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cornstarch.kernels import compile as compile_module
from cornstarch.train import load_config
from tests.models.whole_folders import write_folder
from tests.trainer.tiny import WORDS, tiny_config, trainer_of

STEPS, BATCH, EVERY = 24, 4, 8
# Of a size, and of several, which the processor of Qwen2.5-VL cuts into 4 to 24 patches.
SIZES = {"composed": [(20, 20)], "whole": [(8, 8), (16, 8), (16, 24), (24, 16), (8, 24), (16, 16)]}
LAYERS = {
    "composed": {"vision": ("CLIPEncoderLayer", 1), "language_model": ("LlamaDecoderLayer", 2)},
    "whole": {"vision": ("Qwen2_5_VLVisionBlock", 2), "language_model": ("Qwen2_5_VLDecoderLayer", 2)},
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def write_ragged(file: Path, count: int, words: list[str], sizes: list[tuple[int, int]]) -> None:
    """Write conversations of 20 to 400 words with no image, two or three: a batch never has one, which torch compiles
    apart from all other numbers."""
    drawn, pixels = random.Random(count), np.random.default_rng(count)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        shown = []
        for place in range(drawn.choice((0, 2, 3))):
            width, height = drawn.choice(sizes)
            shown.append(f"images/{file.stem}-{number}-{place}.png")
            Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file.parent / shown[-1])
        asked, answer = (" ".join(drawn.choices(words, k=drawn.randint(10, most))) for most in (150, 250))
        turns = [{"from": "human", "value": "<image>" * len(shown) + asked}, {"from": "gpt", "value": answer}]
        rows.append({"conversations": turns, **({"image": shown} if shown else {})})
    file.write_text(json.dumps(rows))


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_is_compiled_again_after_the_first_steps(
    kind: str, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trace as the default does, with torch's own kernels. To differentiate, too, takes twice as long: once for a kind.
    quick = functools.partial(compile_module.compile_variants, backend="aot_eager" if packing else "eager")
    monkeypatch.setattr(compile_module, "compile_variants", quick)
    base = tiny_config(
        tmp_path, "compile=layers", f"loop.evaluate_every={EVERY}", f"loop.steps={STEPS}", f"loop.batch_size={BATCH}",
        model={"language_model": {"config": {"num_hidden_layers": 2, "attention_dropout": 0.0}}},
        data={"evaluation": [{"path": str(tmp_path / "test.json")}], "max_length": 512, "packing": packing},
    ).model_dump(mode="json", exclude_unset=True)  # fmt: skip
    words = WORDS
    if kind == "whole":
        base["model"] = {"whole": {"path": str(write_folder("qwen2.5-vl", tmp_path))}}
        words = ["q1", "q2", "a1", "a2", "a3"]
    write_ragged(tmp_path / "train.json", 110, words, SIZES[kind])
    write_ragged(tmp_path / "test.json", 14, words, SIZES[kind])  # the last batch has fewer rows
    trainer = trainer_of(load_config(None, (), base=base))
    assert trainer.fit().status == "finished"

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == STEPS and len({line["tokens"] for line in steps}) > STEPS // 2  # ragged indeed
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [8, 16, 24]
    assert any((tmp_path / "run" / "samples").iterdir())  # answers were generated, too

    log = trainer.run_model.acceleration.compile_log
    assert log.layers == {part: count for part, (_, count) in LAYERS[kind].items()} and not log.eager
    variants = log.variants()
    assert variants.keys() == {(part, layer) for part, (layer, _) in LAYERS[kind].items()}
    for (part, _), count in variants.items():
        # The first block of Qwen2.5-VL's vision gets a view, the others do not: torch compiles both, in both modes.
        most = 4 if (kind, part) == ("whole", "vision") else 3
        assert count <= most, [one.describe() for one in log.compilations]
    late = [line["text"] for line in lines if line.get("event") in ("compiled", "recompiled") and line["step"] > 10]
    assert not late
