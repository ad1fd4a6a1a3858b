"""Does a plan do what one process does? It is tried on a tiny twin of the model, before any GPU hour is spent.

A process of the trial is `python -m cornstarch.train.verification CONFIG FOLDER`: it does the steps of the config,
alone or as one of several, and writes what they came to.
"""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from cornstarch.errors import ConfigError
from cornstarch.models.twin import twin_config
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import Plan
from cornstarch.train.build import part_config
from cornstarch.train.config import PartConfig, RunConfig
from cornstarch.train.source import as_data, load_config
from cornstarch.train.witness import Witness, record

STEPS = 2
_MOST = 8  # processes that are started without being asked for
# AdamW divides a gradient by its own size: with an eps of 1e-8 rounding in one that is zero would be a step like any.
_OPTIMIZER = {"eps": 1e-6, "clip": 0.5, "learning_rate": 1e-3}


def twin_run(config: RunConfig, folder: Path, replicas: int) -> RunConfig:
    """Return a run of a few steps with a tiny twin of the model, on the first samples, on the CPU and without noise."""
    data: dict[str, Any] = as_data(config)
    modules = config.parallel.plan().modules.values()
    multiple = math.lcm(*(module.tp * module.cp for module in modules))
    model = config.model
    named: list[tuple[str, PartConfig | None, dict[str, Any]]] = [
        ("language_model", model.language_model, data["model"]),
        ("whole", model.whole, data["model"]),
        *((name, part, data["model"]["encoders"]) for name, part in model.encoders.items()),
    ]
    for name, part, place in named:
        if part is not None:
            place[name] = _twin_part(name, part, place[name], multiple)
    data["model"]["start_from"] = None
    data["data"]["evaluation"] = []
    data["data"]["workers"] = 0
    data["loop"].update(steps=STEPS, epochs=None, batch_size=2 * replicas, accumulation=1, ema=None,
                        evaluate_every=None, early_stopping=None)  # fmt: skip
    data["optimizer"].update(_OPTIMIZER)
    data["schedule"] = {"name": "constant", "warmup": 0}
    data.update(output=str(folder), device="cpu", threads=1, precision="fp32", checkpoint={})
    data["logging"] = {"progress": "none", "samples": 0}
    data["parallel"]["data"].update(param_dtype=None, reduce_dtype=None, buffer_dtype=None, offload=False)
    return load_config(None, base=data)


def _twin_part(name: str, part: PartConfig, described: dict[str, Any], multiple: int) -> dict[str, Any]:
    config = twin_config(part_config(f"model.{name}", part), multiple)
    places: list[str] = [key for key in ("tokenizer", "processor") if key in described]
    kept = {key: described[key] if described[key] is not None else part.path for key in places}
    if described.get("processor_config") is not None:
        kept.pop("processor", None)
    return {**described, **kept, "path": None, "config": config.to_dict(), "dtype": None, "learning_rate": None}


def processes_for(plan: Plan) -> tuple[int, int]:
    """Return how many processes a plan is tried with, and how many replicas these are: two, if that is not too many."""
    for dp in (2, 4, plan.data.replicate or 1, 1):
        try:
            layout = Layout.of(plan, dp * plan.replica)
        except ConfigError:
            continue
        if layout.world <= max(_MOST, plan.replica):
            return layout.world, layout.dp
    raise ConfigError(f"parallel: a replica takes {plan.replica} processes. Say how many to try it with: --nproc.")


def main(arguments: list[str]) -> None:
    """Be one process of a trial."""
    from cornstarch.launch import current_world, start_process_group

    config, folder = load_config(Path(arguments[0])), Path(arguments[1])
    world = current_world()
    console = Console(file=io.StringIO())
    if world.size == 1:
        record(Witness(config, console=console), folder)
        return
    with start_process_group(world, "cpu"):
        record(Witness(config, console=console), folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
