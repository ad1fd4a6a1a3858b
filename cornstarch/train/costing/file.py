"""Costs in a YAML file: written where they were measured, read where a run is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.plan.cluster import Device, device
from cornstarch.plan.cost import LayerCost, ModuleCost, RunCost

_MEASURED_ON = "measured_on"
_TUPLES = ("feeds", "tp_sizes", "cp_sizes")


def write_costs(path: str | Path, cost: RunCost, measured_on: str) -> None:
    """Write a file that `read_costs` reads as the same costs.

    Args:
        path: The file.
        cost: What is written.
        measured_on: The device.
    """
    import yaml

    said = asdict(cost)
    modules = {one.pop("name"): one for one in said.pop("modules")}
    for module in modules.values():
        for name in _TUPLES:
            module[name] = list(module[name])
        module["layers"] = [_short(LayerCost, one) for one in module["layers"]]
    text = yaml.safe_dump({_MEASURED_ON: measured_on, **said, "modules": modules}, sort_keys=False, width=200)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def _short(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not as it is anyway."""
    usual = {one.name: one.default for one in fields(kind)}
    return {name: value for name, value in values.items() if value != usual[name]}


def read_costs(path: str | Path, on: Device | None = None) -> RunCost:
    """Return the costs that a file has.

    Args:
        path: A file that `cornstarch profile` has written.
        on: What they are used for; costs that were measured on something else are refused.
    """
    import yaml

    try:
        said = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. To write it: cornstarch profile CONFIG --output {path}"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: this is not YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(said, Mapping) or not isinstance(said.get("modules"), Mapping):
        raise ConfigError(f"{path}: these are no costs; `cornstarch profile CONFIG --output {path}` writes them.")
    try:
        _check_device(str(said.get(_MEASURED_ON, "")), on)
        modules = tuple(_module(name, one) for name, one in said["modules"].items())
        given = {name: value for name, value in said.items() if name not in ("modules", _MEASURED_ON)}
        return _made(RunCost, "the run", {**given, "modules": modules})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_device(measured_on: str, on: Device | None) -> None:
    if on is None or not measured_on:
        return
    try:
        found = device(measured_on).name
    except ConfigError:  # a device that no catalogue has
        found = measured_on
    if found != on.name and measured_on != on.name:
        raise ConfigError(
            f"the costs were measured on {measured_on}; they say nothing about {on.name}. Measure them there "
            "(cornstarch profile), or leave them out: costs are then reckoned from shapes."
        )


def _module(name: str, said: Any) -> ModuleCost:
    if not isinstance(said, Mapping) or not isinstance(said.get("layers"), list):
        raise ConfigError(f"modules.{name}: expected `layers`, a list.")
    layers = tuple(_made(LayerCost, f"modules.{name}.layers[{n}]", one) for n, one in enumerate(said["layers"]))
    given = {key: tuple(value) if key in _TUPLES else value for key, value in said.items() if key != "layers"}
    return _made(ModuleCost, f"modules.{name}", {**given, "name": name, "layers": layers})


def _made(kind: type, where: str, said: Any) -> Any:
    """Return an object, if what is said of it is what it needs."""
    if not isinstance(said, Mapping):
        raise ConfigError(f"{where}: expected names with values; found {said!r}.")
    known = {one.name: one for one in fields(kind)}
    unknown = [str(name) for name in said if name not in known]
    missing = [name for name, one in known.items() if one.default is MISSING and name not in said]
    wrong = [
        f"{name} = {value!r}"
        for name, value in said.items()
        if name in known and str(known[name].type) in ("int", "float") and not _is_number(value)
    ]
    for found, words in ((unknown, "unknown"), (missing, "missing"), (wrong, "expected a number")):
        if found:
            raise ConfigError(f"{where}: {', '.join(found)}: {words}.")
    return kind(**said)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


__all__ = ["read_costs", "write_costs"]
