"""Verifies that a plan computes what one process computes, on a tiny twin of the model, before a run trains it.

The processes of a trial are `python -m cornstarch.trainer.recording_trainer CONFIG FOLDER`, alone and as several ranks:
they record losses, gradients, parameters and outputs.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.config import PartConfig, RunConfig
from cornstarch.config.config_file import dump_config, load_config
from cornstarch.config.user_code import allow_in
from cornstarch.data.formats import open_sources
from cornstarch.data.sample import Sample, SampleError
from cornstarch.engine.plan_requirements import check_loss
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule
from cornstarch.models.multimodal_language_model.unwrap import accepts_argument, unwrap
from cornstarch.models.twin import add_noise, build_twin_config
from cornstarch.parallel import distributed
from cornstarch.parallel.expert import check_expert_plan
from cornstarch.parallel.passes import iter_planned_modules
from cornstarch.parallel.tensor import check_tensor_plan
from cornstarch.parallel.tested import is_tested
from cornstarch.plan.data_options import UNSYNCHRONIZED
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import Plan
from cornstarch.plan.validation import as_data
from cornstarch.tasks.build_model import build_part, load_part_config

_MOST = 8  # ranks that are started without a request
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


def hand_over_samples(twin: RunConfig, rows: Sequence[Any] | None, folder: Path) -> RunConfig:
    """Return a twin's run whose processes can read rows that were given in Python: the first samples, from a file."""
    if all(source.format != "given" for source in twin.data.train):
        return twin
    sources, samples = open_sources(twin.data.train, rows), []
    for index in range(len(sources)):
        with suppress(SampleError):  # a run skips it, too
            samples.append(sources[index])
        if len(samples) == STEPS * twin.loop.batch_size:
            break
    file = folder / "samples.pickle"
    try:
        file.write_bytes(pickle.dumps(samples))
    except Exception as error:  # objects of the user's own may raise anything
        raise ConfigError(f"the given data cannot be handed to another process ({error})") from error
    source = {"path": f"{__name__}:read_samples", "format": "callable", "arguments": {"file": str(file)}}
    data = {**as_data(twin), "data": {**as_data(twin.data), "train": [source]}}
    return load_config(None, base=data)


def read_samples(file: str) -> list[Sample]:
    """Return what `hand_over_samples` has written a moment ago, into a folder that only this user can read."""
    samples: list[Sample] = pickle.loads(Path(file).read_bytes())
    return samples


def build_given_twin_run(config: RunConfig, model: PreTrainedModel, folder: Path, replicas: int) -> RunConfig:
    """Return such a run with a twin of a model that was made in Python, on random text: what is cut is the model."""
    kind = type(model)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ConfigError(f"{kind.__qualname__} is not in a module that another process can import")
    if not (accepts_argument(model, "input_ids") and accepts_argument(model, "labels")):
        raise ConfigError(f"{kind.__name__} takes no input_ids and labels: it is unknown what to try it with")
    twin = build_twin_config(model.config, _multiple(config), _layers(config))
    words, count = twin.get_text_config().vocab_size, STEPS * replicas * _layers(config)
    ids = torch.randint(min(3, words - 1), words, (count, _TOKENS), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids.tolist()]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    data: dict[str, Any] = as_data(config)
    arguments = {"kind": name, "config": twin.to_dict()}
    data["model"] = {"factory": {"function": f"{__name__}:build_given_twin", "arguments": arguments}}
    data["data"] = {"train": [{"path": str(folder / "rows.json"), "format": "rows"}]}
    return _short_run(data, folder / "run", replicas)


def build_given_twin(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    found: Any = resolve_name(kind)
    return found(found.config_class.from_dict(config))


def _multiple(config: RunConfig) -> int:
    return math.lcm(*(module.tp * module.cp * module.ep for module in config.parallel.modules.values()))


def _layers(config: RunConfig) -> int:
    """Return the number of layers of a twin: one for every stage."""
    return max(2, *(module.stages * module.virtual_stages for module in config.parallel.modules.values()))


def _short_run(data: dict[str, Any], folder: Path, replicas: int) -> RunConfig:
    data["data"]["evaluation"] = []
    data["data"]["workers"] = 0
    # As many microbatches as a pipeline has stages: fewer would not interleave. At least two, because one of them may
    # have no image, and two rows in each, because one of them may be padded.
    microbatches = max(2, *(one["stages"] for one in data["parallel"]["modules"].values()), 0)
    rows = replicas * microbatches * 2
    data["loop"].update(steps=STEPS, epochs=None, batch_size=rows, gradient_accumulation_steps=microbatches)
    data["loop"].update(ema_decay=None, evaluate_every=None, early_stopping=None, on_bad_loss="stop")
    data["optimizer"].update(_OPTIMIZER)
    data["schedule"] = {"name": "constant", "warmup": 0}
    precision = "fp16" if data["precision"] == "fp16" else "fp32"  # it is computed in fp32, but fp16 scales its loss
    data.update(output=str(folder), device="cpu", threads=1, precision=precision, checkpoint={}, compile_cache="off")
    data["logging"] = {"progress": "none", "samples": 0}
    for module in data["parallel"]["modules"].values():
        module["layers"] = None  # a twin has others
    options = data["parallel"]["data"]
    options.update(param_dtype=None, reduce_dtype=None, buffer_dtype=None, offload=False)
    # What differs from one process on purpose is left out: a trial is about how the model is cut.
    options["compression"] = {"kind": "none"}
    if options["kind"] in UNSYNCHRONIZED:
        data["parallel"]["data"] = {"kind": "ddp"}
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
    if part.path is not None:
        # Stored, because reading in shards can go wrong, too. A class with code of its own may not be stored as others
        # are: its twin is built from its config.
        with suppress(Exception):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                model = build_part(f"model.{name}", part, config)
            add_noise(model)
            model.save_pretrained(folder / name)
            twin.update(path=str(folder / name), config=None)
    return twin


def choose_trial_size(plan: Plan, replicas: tuple[int, ...] = (2, 4)) -> tuple[int, int]:
    """Return the number of ranks that a plan is tried with, and of replicas: the first number that fits."""
    for dp in (*replicas, plan.data.replicate or 1, 1):
        try:
            layout = Layout.of(plan, dp * plan.replica)
        except ConfigError:
            continue
        if layout.world <= max(_MOST, plan.replica):
            return layout.world, layout.dp
    raise ConfigError(f"parallel: a replica takes {plan.replica} processes. Say how many to try it with: --nproc.")


class TrialError(Exception):
    """A trial could not be run; the text is the output of its processes."""

    def __init__(self, code: int, said: str, shown: bool) -> None:
        super().__init__(said)
        self.code = code
        self.is_shown = shown  # whether the user has read it


def run_trial(twin: RunConfig, ranks: int, place: Path) -> Difference:
    """Run the twin of `build_twin_run` in one process and in `ranks` processes; return how far they are apart."""
    from cornstarch.launch import launch
    from cornstarch.launch.failure_report import read_logged_error

    one = twin.model_copy(update={"parallel": type(twin.parallel)(), "output": place / "alone"})
    # The twin has a process group of its own and needs no GPU. It can import what this process can.
    environment = {key: value for key, value in os.environ.items() if key not in _WORLD}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    allow_in(environment, __name__)  # the configs of a trial name functions of this file
    for name, described, count in (("one", one, 1), ("several", twin, ranks)):
        (place / f"{name}.yaml").write_text(dump_config(described), encoding="utf-8")
        files = [f"{place / name}.yaml", f"{place / 'record'} {name}"]
        output, logs = io.StringIO(), place / f"logs of {name}"
        command = [sys.executable, "-m", "cornstarch.trainer.recording_trainer", *files]
        console = Console(file=output, soft_wrap=True)
        code = launch(command, count, logs, environment=environment, console=console)
        if code:
            said = output.getvalue().strip()  # empty if rank 0 has printed the error itself
            raise TrialError(code, said or read_logged_error(logs / "rank_0.log").text, shown=not said)
    return compare_records(place / "record several", place / "record one")


_PULSE = 2.0  # seconds
_OFF = "To train without this check: parallel.verify=never."


def find_untested_modules(model: nn.Module, layout: Layout) -> list[str]:
    """Return what a layout cuts and no test has cut so before: `MyForCausalLM (tp)`. What cannot be cut is refused."""
    found = []
    for module, plan in iter_planned_modules(model, layout):
        inner = unwrap(module.module if isinstance(module, ModalEncoderModule) else module)
        name = type(inner).__name__
        is_known = type(inner).__module__.startswith("transformers.")  # not just a class of the same name
        shards_items = plan.cp > 1 and isinstance(module, ModalEncoderModule)
        for axis, is_cut in (("tp", plan.tp > 1), ("cp", shards_items), ("ep", plan.ep > 1)):
            if is_cut and not (is_known and is_tested(name, axis, transformers.__version__)):
                found.append(f"{name} ({axis})")
        if plan.ep > 1:
            check_expert_plan(inner, plan.ep)
        if plan.tp > 1:
            vocabulary = plan.tp_vocabulary and not isinstance(module, ModalEncoderModule)
            check_tensor_plan(inner, plan.tp, sequence=plan.tp_sequence, vocabulary=vocabulary)
    return list(dict.fromkeys(found))


def verify_plan(
    model: nn.Module,
    layout: Layout,
    config: RunConfig,
    note: Callable[[str], None],
    rows: Sequence[Any] | None = None,
) -> None:
    """Try the plan on a tiny twin of the model if it cuts something untested; refuse to train if it is wrong.

    All ranks must call it, before the model is sharded: rank 0 tries it in local processes, and broadcasts the result.
    `rows` are those of sources of the format `given`.
    """
    how = config.parallel.verify
    if how != "never":
        check_loss(model, layout)
    is_cut = any(max(plan.tp, plan.cp, plan.ep) > 1 for plan in layout.plan.modules.values())
    if how == "never" or not is_cut:
        return
    untested = find_untested_modules(model, layout)
    if how == "auto" and not untested:
        return
    why = f"Not in the table of tested models: {', '.join(untested)}. " if untested else ""
    if distributed.rank() == 0:
        note(f"{why}The plan is tried on a tiny twin of the model first (parallel.verify).")
    if distributed.is_single_process():
        refusal = _try_plan(model, config, rows)
    else:
        with ThreadPoolExecutor(1) as thread:
            trial = thread.submit(_try_plan, model, config, rows) if distributed.rank() == 0 else None
            answer = None
            while answer is None:  # all ranks communicate meanwhile, so that no collective reaches the group's timeout
                is_known = trial is not None and bool(wait([trial], _PULSE).done)
                answer = distributed.broadcast_json({"refusal": trial.result()} if trial and is_known else None)
        refusal = answer["refusal"]
    if refusal is not None:
        raise ConfigError(f"{why}{refusal}\n  {_OFF}")


def _try_plan(model: nn.Module, config: RunConfig, rows: Sequence[Any] | None) -> str | None:
    # Two ranks exchange tokens as many do, and a trial is small.
    modules = {name: replace(plan, ep=min(plan.ep, 2)) for name, plan in config.parallel.modules.items()}
    config = config.model_copy(update={"parallel": replace(config.parallel, modules=modules)})
    try:
        # One replica, so that both sides see the same batch and the first wrong output can be named.
        ranks, replicas = choose_trial_size(config.parallel, (1, 2, 4))
        with TemporaryDirectory(prefix="cornstarch-verify-") as folder:
            place = Path(folder)
            if config.model.given is None and config.model.factory is None:
                twin = hand_over_samples(build_twin_run(config, place / "run", replicas), rows, place)
            elif isinstance(inner := unwrap(model), PreTrainedModel):
                twin = build_given_twin_run(config, inner, place, replicas)
            else:
                return f"The plan cannot be verified: {type(inner).__name__} is no transformers model."
            found = run_trial(twin, ranks, place)
    except TrialError as error:
        return f"The plan cannot be verified, its trial on {ranks} local processes failed:\n  {error}"
    except ConfigError as error:
        return f"The plan cannot be verified: {str(error).rstrip('.')}."
    except Exception as error:  # an odd config, a full disk: the others wait for an answer
        return f"The plan cannot be verified: {type(error).__name__}: {error}."
    if found.is_equal:
        return None
    where = f" It begins in {found.begins}." if found.begins else ""
    worst = max((one.gradients for one in found.parts), default=0.0)
    return (
        f"The plan does something else than one process.{where} Of a tiny twin the loss is off by {found.loss:.1e}, a "
        f"gradient by {worst:.1e}; it is not trained.\n  Use tp = 1 and cp = 1 for what begins there."
    )


TOLERANCE = 1e-4  # how far a number may be off: this times (its own size + FLOOR × the largest number beside it)
FLOOR = 1e-2
NUMBERS, RECORD = "numbers-{}.safetensors", "record.json"


@dataclass(frozen=True)
class PartDifference:
    """The deviation of one part's gradients and parameters."""

    part: str
    gradients: float
    parameters: float
    begins: str | None  # the wrong gradient that is computed first: the last one of the part in the order of the model
    missing: tuple[str, ...]  # gradients that only one of the two records has


@dataclass(frozen=True)
class Difference:
    """How far a record is from that of one process; 0 is equal to the bit."""

    loss: float
    parts: list[PartDifference]
    output: str | None = None  # the first module whose output, of the same shape in both, is another one

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains it."""
        wrong = [one for one in self.parts if one.missing or max(one.gradients, one.parameters) > TOLERANCE]
        return self.loss <= TOLERANCE and not wrong

    @property
    def begins(self) -> str | None:
        """The module where it begins: that of the first wrong output, or else of the first wrong gradient."""
        if self.output is not None:
            return self.output
        wrong = [one.begins for one in self.parts if one.begins is not None]
        return wrong[-1].rpartition(".")[0] if wrong else None


def compare_records(found: Path, expected: Path) -> Difference:
    ours, theirs = (json.loads((folder / RECORD).read_text(encoding="utf-8")) for folder in (found, expected))
    a, b = _numbers(found), _numbers(expected)
    pairs = zip(ours["losses"] + ours["norms"], theirs["losses"] + theirs["norms"], strict=True)
    loss = max(abs(x - y) / (abs(y) or 1.0) for x, y in pairs if x is not None)
    parts = [_part_difference(name, parameters, a, b) for name, parameters in theirs["parts"].items()]
    # The first module with another output; a sharded output has another shape, and is not compared.
    first = None
    for name, shape in theirs.get("outputs", {}).items():
        key = f"output {name}"
        is_alike = ours.get("outputs", {}).get(name) == shape
        if is_alike and compute_deviations(a, {key: b[key]}).get(key, 0.0) > 10 * TOLERANCE:
            first = name
            break
    return Difference(loss, parts, first)


def _numbers(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("numbers*.safetensors")):
        found |= load_file(file)
    assert found, f"{folder} has no numbers to compare"
    return found


def _part_difference(
    part: str, names: list[str], found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> PartDifference:
    own = set(names)
    keys = [key for key in sorted({*found, *expected}) if key.split(" ")[-1] in own]
    both = {key for key in keys if key in found and key in expected}
    missing = tuple(key for key in keys if key not in both)
    off = {}
    for kind in ("gradient", "parameter"):
        off[kind] = compute_deviations(found, {key: expected[key] for key in both if key.startswith(kind)})
    order = {name: number for number, name in enumerate(names)}
    wrong = sorted((order[key.split(" ")[-1]], key) for key, far in off["gradient"].items() if far > TOLERANCE)
    begins = wrong[-1][1].split(" ")[-1] if wrong else None
    largest = {kind: max(values.values(), default=0.0) for kind, values in off.items()}
    return PartDifference(part, largest["gradient"], largest["parameter"], begins, missing)


def compute_deviations(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far each number is off: the largest |a − b| / (|b| + FLOOR × the largest |b| of all)."""
    there = {name: value for name, value in expected.items() if value.numel()}
    floor = FLOOR * max((float(value.abs().max()) for value in there.values()), default=0.0)
    return {
        name: float(((found[name] - value).abs() / (value.abs() + floor).clamp(min=1e-30)).max())
        for name, value in there.items()
    }
