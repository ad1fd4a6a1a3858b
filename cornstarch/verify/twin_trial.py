"""Does a plan do what one process does? It is tried on a tiny twin of the model, before any GPU hour is spent.

A process of the trial is `python -m cornstarch.verify.twin_trial CONFIG FOLDER`: it does the steps of the config,
alone or as one of several, and writes what they came to.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel

from cornstarch.config import PartConfig, RunConfig
from cornstarch.config.config_file import dump_config, load_config
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument
from cornstarch.models.twin import add_noise, build_twin_config
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import Plan
from cornstarch.plan.validation import as_data
from cornstarch.tasks.build_model import build_part, load_part_config
from cornstarch.verify.compare import Difference, compare_records

_MOST = 8  # processes that are started without being asked for
# AdamW divides a gradient by its own size: with an eps of 1e-8 rounding in one that is zero would be a step like any.
STEPS = 3
"""Steps of a trial: on samples as they come, with the last and with the first microbatch without images and sounds."""
_OPTIMIZER = {"eps": 1e-6, "max_grad_norm": 0.5, "learning_rate": 1e-3}
_TOKENS = 24  # of a row of random text
_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def build_twin_run(config: RunConfig, folder: Path, replicas: int) -> RunConfig:
    """Return a run of a few steps with a tiny twin of the model, on the first samples, on the CPU and without noise."""
    data: dict[str, Any] = as_data(config)
    multiple = _multiple(config)
    model = config.model
    named: list[tuple[str, PartConfig | None, dict[str, Any]]] = [
        ("language_model", model.language_model, data["model"]),
        ("whole", model.whole, data["model"]),
        *((name, part, data["model"]["encoders"]) for name, part in model.encoders.items()),
    ]
    for name, part, place in named:
        if part is not None:
            place[name] = _twin_part(name, part, place[name], multiple, _layers(config), folder.parent / "parts")
    data["model"]["start_from"] = None
    return _short_run(data, folder, replicas)


def build_given_twin_run(config: RunConfig, model: PreTrainedModel, folder: Path, replicas: int) -> RunConfig:
    """Return such a run with a twin of a model that was made in Python, on random text.

    The run's own rows and loss stay out of it: what is cut is the model.
    """
    kind = type(model)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigError(f"{kind.__qualname__} is not in a module that another process can import")
    if not (accepts_argument(model, "input_ids") and accepts_argument(model, "labels")):
        raise ConfigError(f"{kind.__name__} takes no input_ids and labels: it is unknown what to try it with")
    twin = build_twin_config(model.config, _multiple(config), _layers(config))
    (folder / "rows.json").write_text(
        json.dumps(_random_rows(twin, STEPS * replicas * _layers(config))), encoding="utf-8"
    )
    data: dict[str, Any] = as_data(config)
    arguments = {"kind": name, "config": twin.to_dict()}
    data["model"] = {"factory": {"function": f"{__name__}:build_given_twin", "arguments": arguments}}
    data["data"] = {"train": [{"path": str(folder / "rows.json"), "format": "rows"}]}
    return _short_run(data, folder / "run", replicas)


def build_given_twin(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    """Return a model of the class `package.module:Class`."""
    module, _, path = kind.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found(found.config_class.from_dict(config))


def _random_rows(config: PreTrainedConfig, count: int) -> list[dict[str, list[int]]]:
    words = config.get_text_config().vocab_size
    ids = torch.randint(min(3, words - 1), words, (count, _TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids.tolist()]


def _multiple(config: RunConfig) -> int:
    return math.lcm(*(module.tp * module.cp for module in config.parallel.modules.values()))


def _layers(config: RunConfig) -> int:
    """Return how many layers a twin needs, so that every stage has one."""
    return max(2, *(module.stages * module.virtual_stages for module in config.parallel.modules.values()))


def _short_run(data: dict[str, Any], folder: Path, replicas: int) -> RunConfig:
    data["data"]["evaluation"] = []
    data["data"]["workers"] = 0
    # As many microbatches as a pipeline has stages: fewer would not interleave. At least two, because one of them may
    # have no image, and two rows in each, because one of them may be padded.
    microbatches = max(2, *(one["stages"] for one in data["parallel"]["modules"].values()), 0)
    rows = replicas * microbatches * 2
    data["loop"].update(steps=STEPS, epochs=None, batch_size=rows, gradient_accumulation_steps=microbatches)
    data["loop"].update(ema_decay=None, evaluate_every=None, early_stopping=None)
    data["optimizer"].update(_OPTIMIZER)
    data["schedule"] = {"name": "constant", "warmup": 0}
    precision = "fp16" if data["precision"] == "fp16" else "fp32"  # it is computed in fp32, but fp16 scales its loss
    data.update(output=str(folder), device="cpu", threads=1, precision=precision, checkpoint={})
    data["logging"] = {"progress": "none", "samples": 0}
    for module in data["parallel"]["modules"].values():
        module["layers"] = None  # a twin has others
    data["parallel"]["data"].update(param_dtype=None, reduce_dtype=None, buffer_dtype=None, offload=False)
    return load_config(None, base=data)


def _twin_part(
    name: str, part: PartConfig, described: dict[str, Any], multiple: int, layers: int, folder: Path
) -> dict[str, Any]:
    config = build_twin_config(load_part_config(f"model.{name}", part), multiple, layers)
    places: list[str] = [key for key in ("tokenizer", "processor") if key in described]
    kept = {key: described[key] if described[key] is not None else part.path for key in places}
    if described.get("processor_config") is not None:
        kept.pop("processor", None)
    twin = {**described, **kept, "path": None, "config": config.to_dict(), "dtype": None, "learning_rate": None}
    if part.path is not None and _store_twin(name, part, config, folder / name):
        twin.update(path=str(folder / name), config=None)
    return twin


def _store_twin(name: str, part: PartConfig, config: PreTrainedConfig, folder: Path) -> bool:
    """Write the twin of a stored part to a folder, because reading in part can go wrong, too; False if it cannot be."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = build_part(f"model.{name}", part, config)
        add_noise(model)
        model.save_pretrained(folder)
    except Exception:  # a class with code of its own may not be stored as others are; it is made from its config then
        return False
    return True


def choose_trial_size(plan: Plan, replicas: tuple[int, ...] = (2, 4)) -> tuple[int, int]:
    """Return how many processes a plan is tried with, and how many replicas these are: the first number that fits."""
    for dp in (*replicas, plan.data.replicate or 1, 1):
        try:
            layout = Layout.of(plan, dp * plan.replica)
        except ConfigError:
            continue
        if layout.world <= max(_MOST, plan.replica):
            return layout.world, layout.dp
    raise ConfigError(f"parallel: a replica takes {plan.replica} processes. Say how many to try it with: --nproc.")


class TrialError(Exception):
    """A trial could not be carried out; the text is what its processes said."""

    def __init__(self, code: int, said: str, shown: bool) -> None:
        super().__init__(said)
        self.code = code
        self.is_shown = shown
        """Whether the user has read it."""


def run_trial(twin: RunConfig, ranks: int, place: Path) -> Difference:
    """Carry a trial out: the run of a twin in one process and in several; return how far they are apart.

    Args:
        twin: What `build_twin_run` made.
        ranks: How many processes.
        place: A folder for the trial.
    """
    one = twin.model_copy(update={"parallel": type(twin.parallel)(), "output": place / "alone"})
    for name, described, count in (("one", one, 1), ("several", twin, ranks)):
        (place / f"{name}.yaml").write_text(dump_config(described), encoding="utf-8")
        _launch_trial(place, name, count)
    return compare_records(place / "record several", place / "record one")


def _launch_trial(place: Path, name: str, ranks: int) -> None:
    from cornstarch.launch import launch
    from cornstarch.launch.failure_report import read_logged_error

    files = [f"{place / name}.yaml", f"{place / 'record'} {name}"]
    # The twin has a group of its own, and no use for a GPU. What this process can import, it can, too.
    environment = {key: value for key, value in os.environ.items() if key not in _WORLD}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    heard = io.StringIO()
    console = Console(file=heard, soft_wrap=True)
    command = [sys.executable, "-m", "cornstarch.trainer.recording_trainer", *files]
    code = launch(command, ranks, place / f"logs of {name}", environment=environment, console=console)
    if code:
        said = heard.getvalue().strip()  # nothing if the first process has told it itself
        words = said or read_logged_error(place / f"logs of {name}" / "rank_0.log").text
        raise TrialError(code, words, shown=not said)
