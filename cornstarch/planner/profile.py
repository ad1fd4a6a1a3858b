"""Profile the layers of a run on its device, and keep the costs in a YAML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cornstarch.config import OptimizerConfig, RunConfig
from cornstarch.cost.analytic import CallCost, ComputeSetting
from cornstarch.cost.profiled import PASSES, ProfiledCost
from cornstarch.engine.acceleration import compiles
from cornstarch.engine.model_parts import cast_parts, split_into_parts
from cornstarch.errors import ConfigError
from cornstarch.parallel.device import DevicePlacement, choose_placement
from cornstarch.plan.cluster import Device, device
from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost
from cornstarch.planner.build_cost import MicrobatchShape, build_cost, build_microbatch_shape
from cornstarch.tasks.build import build_meta_model

if TYPE_CHECKING:
    from cornstarch.plan.data_statistics import DataStatistics

_MEASURED_ON = "measured_on"
_TUPLES = ("feeds", "tp_sizes", "cp_sizes")


def profile_run(
    config: RunConfig, facts: DataStatistics | None = None, on_measure: Callable[[str], None] = lambda words: None
) -> RunCost:
    """Return the cost of the layers of a run, measured on the device of its config.

    One layer of each kind is built there with random weights and run forward and backward. The model itself is not
    built, and no weights are read.

    Args:
        config: The run.
        facts: What the data is like, as in `run_cost`.
        on_measure: Called with a description of each call that is measured.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    placement = choose_placement(config.device, config.precision, config.attention)
    model = build_meta_model(config)
    cast_parts(split_into_parts(model, config.model, config.optimizer), placement.dtype)
    return profile_model(
        model,
        build_microbatch_shape(config, model, facts),
        placement,
        compiled=compiles(config.compile, placement.device),
        batch=config.loop.batch_size,
        optimizer=config.optimizer,
        on_measure=on_measure,
    )


def profile_model(
    model: nn.Module,
    microbatch: MicrobatchShape,
    placement: DevicePlacement,
    *,
    compiled: bool | None = None,
    batch: int | None = None,
    optimizer: OptimizerConfig | None = None,
    known: dict[str, CallCost] | None = None,
    on_measure: Callable[[str], None] = lambda words: None,
) -> RunCost:
    """Return the cost of the layers of a model, measured on a device.

    Args:
        model: On the meta device, its parameters in the precisions of the run.
        microbatch: The shape of a microbatch.
        placement: The device and the precision.
        compiled: Whether layers are compiled. Default: on GPUs.
        batch: Samples of a step. Default: those of the microbatch.
        optimizer: Has states for trained parameters. Default: AdamW.
        known: Earlier measurements, which are not repeated; new ones are added.
        on_measure: Called with a description of each call that is measured.
    """
    on_gpu = placement.device.type != "cpu"
    fused = compiles("auto", placement.device) if compiled is None else compiled
    known = {} if known is None else known
    cost_models: list[ProfiledCost] = []

    def build_cost_model(is_causal: bool) -> ProfiledCost:
        setting = ComputeSetting(placement.dtype, on_gpu, fused, is_causal, microbatch.labels)
        cost_models.append(ProfiledCost(placement, setting, known, on_measure))
        return cost_models[-1]

    def build() -> RunCost:
        return build_cost(model, microbatch, build_cost_model, placement.dtype, on_gpu, batch, optimizer)

    cost = build()
    if on_gpu:
        return cost
    for _ in range(PASSES - 1):
        for one in cost_models:
            one.measure_again()
    return build()


def get_device_name(config: RunConfig) -> str:
    """Return the name of the device of a run; `cpu` for a processor."""
    found = choose_placement(config.device, config.precision, config.attention).device
    return torch.cuda.get_device_name(found) if found.type == "cuda" else found.type


# ---------------------------------------------------------------------------------------------------- files


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}.")


def write_costs(path: str | Path, cost: RunCost, measured_on: str) -> None:
    """Write costs to a file for `read_costs`; `measured_on`: the name of the device."""
    import yaml

    data, usual = asdict(cost), {one.name: one.default for one in fields(LayerCost)}
    modules = {one.pop("name"): one for one in data.pop("modules")}
    for module in modules.values():
        for name in _TUPLES:
            module[name] = list(module[name])
        module["layers"] = [
            {name: value for name, value in one.items() if value != usual[name]} for one in module["layers"]
        ]
    text = yaml.safe_dump({_MEASURED_ON: measured_on, **data, "modules": modules}, sort_keys=False, width=200)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def read_costs(path: str | Path, on: Device | None = None) -> RunCost:
    """Read the costs in a file.

    Args:
        path: A file of `cornstarch profile`.
        on: The device that they are used for; costs of another device are refused.
    """
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. To write it: cornstarch profile CONFIG --output {path}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: this is not YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(data, Mapping) or not isinstance(data.get("modules"), Mapping):
        raise ConfigError(f"{path}: the file has no costs; `cornstarch profile CONFIG --output {path}` writes them.")
    try:
        _check_device(str(data.get(_MEASURED_ON, "")), on)
        modules = tuple(_read_module(name, one) for name, one in data["modules"].items())
        given = {name: value for name, value in data.items() if name not in ("modules", _MEASURED_ON)}
        return _read(RunCost, "the run", {**given, "modules": modules})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_device(measured_on: str, on: Device | None) -> None:
    if on is None or not measured_on:
        return
    try:
        found = device(measured_on).name
    except ConfigError:  # a device that is not in the catalogue
        found = measured_on
    if found != on.name and measured_on != on.name:
        raise ConfigError(
            f"the costs were measured on {measured_on}; they do not apply to {on.name}. Measure them there "
            "(cornstarch profile), or leave them out: costs are then computed from shapes."
        )


def _read_module(name: str, data: Any) -> ModuleCost:
    if not isinstance(data, Mapping) or not isinstance(data.get("layers"), list):
        raise ConfigError(f"modules.{name}: expected `layers`, a list.")
    layers = tuple(_read(LayerCost, f"modules.{name}.layers[{n}]", one) for n, one in enumerate(data["layers"]))
    given = {key: tuple(value) if key in _TUPLES else value for key, value in data.items() if key != "layers"}
    return _read(ModuleCost, f"modules.{name}", {**given, "name": name, "layers": layers})


def _read(kind: type, where: str, data: Any) -> Any:
    """Return an object of a class, given exactly the fields that it needs."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a mapping; found {data!r}.")
    known = {one.name: one for one in fields(kind)}
    unknown = [str(name) for name in data if name not in known]
    missing = [name for name, one in known.items() if one.default is MISSING and name not in data]
    wrong = [
        f"{name} = {value!r}"
        for name, value in data.items()
        if name in known and str(known[name].type) in ("int", "float") and not _is_number(value)
    ]
    for found, words in ((unknown, "unknown"), (missing, "missing"), (wrong, "expected a number")):
        if found:
            raise ConfigError(f"{where}: {', '.join(found)}: {words}.")
    return kind(**data)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
