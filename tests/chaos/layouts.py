"""The layouts under which runs are disturbed: a tiny model with an encoder and dropout, in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cornstarch.train import dump_config
from tests.trainer.tiny import tiny_config

STEPS, EVERY, EVALUATE_EVERY = 24, 4, 6


@dataclass(frozen=True)
class Layout:
    """A layout: how many ranks it takes, and what its config says besides."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()


_STAGES = (
    "model.language_model.config.num_hidden_layers=2",
    "parallel.modules.vision.stages=1",
    "parallel.modules.language_model.stages=2",
    "parallel.ranks=first_stage",
    "parallel.schedule=1f1b",
    "loop.gradient_accumulation_steps=4",
)
LAYOUTS: Mapping[str, Layout] = {
    one.name: one
    for one in (
        Layout("ddp", 2, ("parallel.data.kind=ddp",)),
        Layout("fsdp2", 2, ("parallel.data.kind=fsdp2",)),
        Layout("tp2xdp2", 4, ("parallel.modules.vision.tp=2", "parallel.modules.language_model.tp=2")),
        Layout("pipeline", 2, _STAGES),
    )
}


def write_run(data: Path, folder: Path, layout: Layout, steps: int = STEPS, *overrides: str) -> Path:
    """Write `run.yaml` of a run into a folder; images and tokenizer are those of the folder `data`.

    Args:
        data: Where images, answers and the tokenizer are, or will be written.
        folder: Where the run is.
        layout: How it is parallelized.
        steps: How long it is.
        overrides: What is different besides.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data.mkdir(parents=True, exist_ok=True)
    sections = {
        "output": str(folder / "run"),
        "loop": {"steps": steps, "evaluate_every": EVALUATE_EVERY, "exchange_check": False},
        "checkpoint": {"every": EVERY},
        "data": {"evaluation": [{"path": str(data / "test.json")}]},
        "logging": {"samples": 0},
    }
    config = tiny_config(data, *layout.overrides, *overrides, **sections)
    (folder / "run.yaml").write_text(dump_config(config))
    return folder / "run.yaml"
