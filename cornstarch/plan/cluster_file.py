"""Clusters as YAML: reading, with the line of every mistake, and writing; numbers with units; no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from cornstarch.errors import ConfigError
from cornstarch.plan import cluster as catalogue
from cornstarch.plan import validation as mistakes
from cornstarch.plan.cluster import DTYPES, ERRORS, REACHED, Cluster, Device, find_node_link, format_cluster_name
from cornstarch.plan.communication import BETWEEN_NODES, COLLECTIVES, LINKS, Link
from cornstarch.plan.validation import Mistake, format_value, suggestion

Unit = Literal["B", "B/s", "s", "FLOP/s", "W"]

_BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BITS = {"kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8}
_UNITS: dict[Unit, dict[str, float]] = {
    "B": _BYTES,
    "B/s": {f"{name}/s": factor for name, factor in _BYTES.items()} | _BITS,
    "s": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "FLOP/s": {"FLOP/s": 1, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "W": {"W": 1, "kW": 1e3},
}
_EXAMPLES: dict[Unit, str] = {
    "B": "a size such as `80 GB` or `79.1 GiB`",
    "B/s": "bytes a second such as `450 GB/s` or `400 Gbit/s`",
    "s": "a time such as `5 us`",
    "FLOP/s": "operations a second such as `989 TFLOP/s`",
    "W": "a power such as `500 W`",
}
_MAX_INTEGER = 10**300
_QUANTITY = re.compile(r"\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)\s*([^\d\s].*?)?\s*")


def parse_quantity(value: Any, unit: Unit, least: float | None = None) -> float:
    """Return a number in `unit`, from a number or a text, of at least `least`, or above 0; ValueError if it is none."""
    expected = f"Expected {_EXAMPLES[unit]}"
    number = value if isinstance(value, float) or (type(value) is int and abs(value) < _MAX_INTEGER) else None
    if isinstance(value, str) and (found := _QUANTITY.fullmatch(value)):
        text = found[2] or ""  # in any capitalization that is not ambiguous
        lowered = {name.lower(): factor for name, factor in _UNITS[unit].items()}
        factor = _UNITS[unit].get(text) or lowered.get(re.sub(r"flops$", "flop/s", text.lower())) if text else 1.0
        if factor is None:
            raise ValueError(f"{expected}. The unit {found[2]!r} is none of {', '.join(_UNITS[unit])}.")
        number = float(Decimal(found[1]) * Decimal(str(factor)))  # 3.4 × 10⁻⁶ is no product of two floats
    if number is None:
        raise ValueError(f"{expected}.")
    if not (math.isfinite(number) and (number > 0 if least is None else number >= least)):
        raise ValueError(f"{expected}, {'more than 0' if least is None else f'at least {least:g}'}.")
    return float(number)


def format_quantity(value: float, unit: Unit) -> str:
    """Return a number with a unit that makes it short, or without one where that would lose digits."""
    decimal = [(factor, name) for name, factor in _UNITS[unit].items() if "i" not in name and name != "µs"]
    factor, name = max((one for one in decimal if one[0] <= value), default=min(decimal))
    text = f"{value / factor:.6g} {name}"
    exact = parse_quantity(text, unit, least=0) == value
    return text if exact else repr(value)


_CLUSTER = ["name", "nodes", "per_node", "device", "inside", "between", "disk", "disk_read", "measured", "errors"]
_DEVICE = ["name", "memory", "bandwidth", "flops", "bf16", "power", "full_power", "spread", "slowdown", "reached"]
_LINK = ["bandwidth", "latency", "reached"]
_MAX_BYTES = 1_000_000

_MISSING = object()


def read(path: Path) -> Cluster:
    """Return the cluster that a file describes."""
    data, lines = _load_yaml(path)
    reader = _Reader()
    cluster = reader.read_cluster(data)
    if reader.found:
        messages = []
        for one in reader.found:
            line = next((lines[one.path[:n]] for n in range(len(one.path), -1, -1) if one.path[:n] in lines), None)
            messages.append(f"{path}{f':{line}' if line else ''}  {one}")
        raise ConfigError("\n".join([f"{len(messages)} mistakes:", *messages] if len(messages) > 1 else messages))
    assert cluster is not None
    return cluster if cluster.name else replace(cluster, name=path.stem)


def _load_yaml(path: Path) -> tuple[Any, dict[mistakes.Path, int]]:
    """Return the content of a YAML file, and the line of each key."""
    import yaml

    try:
        content = path.read_bytes()
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path} has {len(content)} bytes; expected the description of a cluster.")
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[mistakes.Path, int] = {}
        _collect_lines(path, node, (), lines)
        return loader.construct_document(node), lines
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file. To measure this machine: cornstarch doctor --measure --output {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError(f"{path}{line}  This is not YAML: {error.problem or error.context}.") from error
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8. Save the file as UTF-8.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date; unclosed brackets
        raise ConfigError(f"{path}: this is not YAML: {str(error).splitlines()[0]}.") from error


def _collect_lines(file: Path, node: Any, path: mistakes.Path, lines: dict[mistakes.Path, int]) -> None:
    """Collect the line of each key, as deep as a cluster description goes; refuse a key that is given twice."""
    import yaml

    if isinstance(node, yaml.SequenceNode) and not path[1:]:  # kinds of nodes
        for number, value in enumerate(node.value):
            lines[(*path, str(number))] = value.start_mark.line + 1
            _collect_lines(file, value, (*path, str(number)), lines)
    if not isinstance(node, yaml.MappingNode) or len(path) > 5:
        return
    for key, value in node.value:
        here, line = (*path, str(key.value)), key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{file}:{line}  {mistakes.join_path(here)} is given twice; first in line {lines[here]}.")
        lines[here] = line
        _collect_lines(file, value, here, lines)


class _Reader:
    """Reads plain data as a cluster and collects every mistake in it."""

    def __init__(self) -> None:
        self.found: list[Mistake] = []
        self._processes = 1  # that divide a node's CPU

    def read_cluster(self, data: Any) -> Cluster | None:
        given = self._read_mapping(data, _CLUSTER, ())
        if given is None:
            return None
        between = self._read_link(given["between"], ("between",)) if "between" in given else LINKS[BETWEEN_NODES]
        if isinstance(given.get("nodes"), list):
            return self._read_kinds(given, between)
        nodes = self._read_count(given.get("nodes", 1), ("nodes",))
        per_node = self._read_count(given.get("per_node", _MISSING), ("per_node",))
        self._processes = per_node or 1
        one = self._read_device(given.get("device", _MISSING))
        inside = find_node_link(one) if one is not None else None
        inside = self._read_link(given["inside"], ("inside",)) if "inside" in given else inside
        disks = {key: self._read_quantity(given[key], "B/s", (key,)) for key in ("disk", "disk_read") if key in given}
        name, measured = given.get("name", ""), given.get("measured", False)
        if not isinstance(name, str):
            self._add_mistake(("name",), name, "Expected a text.")
        if not isinstance(measured, bool):
            self._add_mistake(("measured",), measured, "Expected true or false.")
        errors = self._read_errors(given.get("errors", {}))
        if nodes is None or per_node is None or one is None or inside is None or between is None:
            return None
        found = Cluster(nodes, per_node, one, inside, between, name=name, measured=measured, errors=errors)
        return replace(found, disk=disks.get("disk"), disk_read=disks.get("disk_read"))

    def _read_kinds(self, given: Mapping[str, Any], between: Link | None) -> Cluster | None:
        """Return a cluster of several kinds of nodes, which `nodes` lists."""
        from cornstarch.plan.mixed_cluster import MOST_KINDS, combine_clusters

        for key in given:
            if key not in ("name", "nodes", "between"):
                self._add_mistake((key,), given[key], "With a list of `nodes`, each kind in it has its own.")
        if not 2 <= len(given["nodes"]) <= MOST_KINDS:
            self._add_mistake(("nodes",), given["nodes"], f"Expected 2 to {MOST_KINDS} kinds of nodes, or a number.")
        parts = [self._read_kind(one, ("nodes", str(number)), between) for number, one in enumerate(given["nodes"])]
        found = [part for part in parts if part is not None]
        if self.found or len(found) < len(parts):
            return None
        return combine_clusters(found, given.get("name", ""))

    def _read_kind(self, data: Any, path: mistakes.Path, between: Link | None) -> Cluster | None:
        given = self._read_mapping(data, ["count", "per_node", "device", "inside", "between"], path)
        if given is None:
            return None
        count = self._read_count(given.get("count", 1), (*path, "count"))
        per_node = self._read_count(given.get("per_node", _MISSING), (*path, "per_node"))
        one = self._read_device(given.get("device", _MISSING), (*path, "device"))
        if one is not None and one.is_cpu:
            self._add_mistake((*path, "device"), given["device"], "Processors cannot be mixed with other devices.")
        inside = find_node_link(one) if one is not None else None
        inside = self._read_link(given["inside"], (*path, "inside")) if "inside" in given else inside
        between = self._read_link(given["between"], (*path, "between")) if "between" in given else between
        if count is None or per_node is None or one is None or inside is None or between is None:
            return None
        return Cluster(count, per_node, one, inside, between, name=format_cluster_name(one, count, per_node))

    def _read_errors(self, data: Any) -> tuple[tuple[str, float], ...]:
        given = self._read_mapping(data, list(ERRORS), ("errors",)) or {}
        for key, value in given.items():
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                self._add_mistake(("errors", key), value, "Expected a relative error such as 0.05, at least 0.")
        return tuple((key, float(value)) for key, value in given.items() if type(value) in (int, float))

    def _read_device(self, data: Any, path: mistakes.Path = ("device",)) -> Device | None:
        if data is _MISSING:
            self._add_mistake(path, _MISSING, "Give a name of the catalogue, or name, memory, bandwidth and flops.")
            return None
        if isinstance(data, str):
            return self._find_device(data, path)
        given = self._read_mapping(data, _DEVICE, path)
        if given is None:
            return None
        name = given.get("name", _MISSING)
        if not isinstance(name, str) or not name:
            self._add_mistake((*path, "name"), name, "Expected the name of the device.")
            return None
        needed = ("memory", "bandwidth", "flops")
        missing = [key for key in needed if key not in given]  # the catalogue has them
        base = self._find_device(name, path, missing) if missing else catalogue.find_device_or_unknown(name)
        if base is None:
            return None
        if "memory" in given:
            base = replace(base, memory=int(self._read_quantity(given["memory"], "B", (*path, "memory")) or 0))
        if "bandwidth" in given:
            base = replace(base, bandwidth=self._read_quantity(given["bandwidth"], "B/s", (*path, "bandwidth")))
        if "flops" in given:
            base = self._read_rates(base, given["flops"], (*path, "flops"))
        base = self._read_power(base, given, path)
        if "spread" in given:
            base = replace(base, spread=self._read_fraction(given["spread"], (*path, "spread"), least=0.0) or 0.0)
        if "slowdown" in given:
            base = replace(base, slowdown=self._read_fraction(given["slowdown"], (*path, "slowdown"), least=0.0) or 0.0)
        if "reached" in given:
            fractions = self._read_mapping(given["reached"], list(REACHED), (*path, "reached")) or {}
            each = [(key, self._read_fraction(one, (*path, "reached", key))) for key, one in fractions.items()]
            base = replace(base, reached=tuple((key, one) for key, one in each if one is not None))
        has_bf16 = given.get("bf16", base.has_bf16)
        if isinstance(has_bf16, bool):
            return replace(base, has_bf16=has_bf16)
        text = "Expected true or false: whether the hardware computes in bfloat16."
        self._add_mistake((*path, "bf16"), has_bf16, text)
        return None

    def _read_power(self, base: Device, given: Mapping[str, Any], path: mistakes.Path) -> Device:
        if "full_power" in given:
            base = replace(base, full_power=self._read_quantity(given["full_power"], "W", (*path, "full_power")))
        if "power" in given:
            base = replace(base, power=self._read_quantity(given["power"], "W", (*path, "power")))
        if base.power is not None and base.full_power is None:
            text = f"The vendor's limit of {base.name} is not known, so what this one costs is not.\nGive `full_power`."
            self._add_mistake((*path, "power"), given["power"], text)
        return base

    def _find_device(self, name: str, path: mistakes.Path, missing: list[str] | None = None) -> Device | None:
        try:
            found = catalogue.device(name)
            return catalogue.this_cpu(self._processes) if found.is_cpu else found
        except ConfigError as error:
            are = "is" if len(missing or ()) == 1 else "are"
            more = f"\nOr describe it: {', '.join(missing)} {are} missing." if missing else ""
            self._add_mistake((*path, "name") if missing else path, name, f"{error}{more}")
            return None

    def _read_rates(self, base: Device, data: Any, path: mistakes.Path) -> Device:
        """Return a device with the FLOP/s of the file, and none from the catalogue."""
        given = self._read_mapping(data, list(DTYPES), path) or {}
        if isinstance(data, Mapping) and not data:
            self._add_mistake(path, None, f"Expected the operations a second of at least one of {', '.join(DTYPES)}.")
        rates = {key: self._read_quantity(given[key], "FLOP/s", (*path, key)) or 0.0 for key in DTYPES if key in given}
        return replace(catalogue.replace_rates(base, rates), has_bf16="bf16" in rates)

    def _read_link(self, data: Any, path: mistakes.Path) -> Link | None:
        if isinstance(data, str):
            if data not in LINKS:
                meant = mistakes.nearest(data, [name.lower().replace(" ", "_") for name in LINKS])
                close = [name for name in LINKS if name.lower().replace(" ", "_") == meant]
                advice = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(LINKS)}."
                self._add_mistake(path, data, f"There is no such link in the catalogue. {advice}")
            return LINKS.get(data)
        kinds = [] if path[-1] in COLLECTIVES else list(COLLECTIVES)
        given = self._read_mapping(data, [*_LINK, *kinds], path)
        if given is None:
            return None
        bandwidth = self._read_quantity(given.get("bandwidth", _MISSING), "B/s", (*path, "bandwidth"))
        latency = self._read_quantity(given.get("latency", _MISSING), "s", (*path, "latency"), least=0)
        each = [(kind, self._read_link(given[kind], (*path, kind))) for kind in COLLECTIVES if kind in given]
        reached = self._read_fraction(given.get("reached", 1.0), (*path, "reached"))
        if bandwidth is None or latency is None or reached is None:
            return None
        return Link(bandwidth, latency, tuple((kind, link) for kind, link in each if link is not None), reached)

    def _read_fraction(self, value: Any, path: mistakes.Path, least: float | None = None) -> float | None:
        if type(value) in (int, float) and value <= 1 and (value > 0 if least is None else value >= least):
            return float(value)
        lowest = "more than 0" if least is None else f"at least {least:g}"
        self._add_mistake(path, value, f"Expected a fraction such as 0.8, {lowest} and at most 1.")
        return None

    def _read_mapping(self, data: Any, known: list[str], path: mistakes.Path) -> dict[str, Any] | None:
        if not isinstance(data, Mapping):
            where = path or ("the file",)
            self._add_mistake(where, data, f"Expected a mapping with some of these keys: {', '.join(known)}.")
            return None
        for key in data:
            if key not in known:
                _, text = suggestion(str(key), known, path)
                self.found.append(Mistake((*path, str(key)), format_value(data[key]), text))
        return {key: value for key, value in data.items() if key in known}

    def _read_count(self, value: Any, path: mistakes.Path) -> int | None:
        if type(value) is int and 1 <= value < 2**31:
            return value
        self._add_mistake(path, value, "Expected a whole number of at least 1.")
        return None

    def _read_quantity(self, value: Any, unit: Unit, path: mistakes.Path, least: float | None = None) -> float | None:
        try:
            return parse_quantity(None if value is _MISSING else value, unit, least)
        except ValueError as error:
            self._add_mistake(path, value, str(error))
            return None

    def _add_mistake(self, path: mistakes.Path, value: Any, text: str) -> None:
        missing = value is _MISSING
        text = f"It is missing. {text}" if missing else text
        self.found.append(Mistake(path, None if missing else format_value(value), text))


def as_yaml(cluster: Cluster) -> str:
    lines = [f"name: {json.dumps(cluster.name)}"] if cluster.name else []
    if cluster.parts:
        lines.append("nodes:")
        for part in cluster.parts:
            first, *rest = _format_nodes(part, "count")
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        return "\n".join(lines) + "\n"
    lines += _format_nodes(cluster, "nodes")
    for key, speed in (("disk", cluster.disk), ("disk_read", cluster.disk_read)):
        lines += [f"{key}: {format_quantity(speed, 'B/s')}"] if speed is not None else []
    lines += ["measured: true"] if cluster.measured else []
    errors = ", ".join(f"{key}: {value!r}" for key, value in cluster.errors)
    lines += [f"errors: {{{errors}}}"] if errors else []
    return "\n".join(lines) + "\n"


def _format_nodes(cluster: Cluster, count: str) -> list[str]:
    one = cluster.device
    rates = dict(one.rates) or {"fp16": one.flops_of("fp16")}
    return [
        f"{count}: {cluster.nodes}",
        f"per_node: {cluster.per_node}",
        "device:",
        f"  name: {json.dumps(one.name)}",
        f"  memory: {one.memory}",
        *([f"  bandwidth: {format_quantity(one.bandwidth, 'B/s')}"] if one.bandwidth is not None else []),
        "  flops:",
        *(f"    {dtype}: {format_quantity(rate, 'FLOP/s')}" for dtype, rate in rates.items()),
        f"  bf16: {json.dumps(one.has_bf16)}",
        *(f"  {key}: {format_quantity(watts, 'W')}" for key, watts in _list_power(one)),
        f"  spread: {one.spread!r}",
        f"  slowdown: {one.slowdown!r}",
        *([f"  reached: {{{', '.join(f'{key}: {value!r}' for key, value in one.reached)}}}"] if one.reached else []),
        *_format_link("inside", cluster.inside),
        *_format_link("between", cluster.between),
    ]


def _list_power(one: Device) -> list[tuple[str, float]]:
    watts = (("power", one.power), ("full_power", one.full_power))
    return [(key, value) for key, value in watts if value is not None]


def _format_link(name: str, link: Link) -> list[str]:
    each = [f"  {kind}: {{{_format_figures(one)}}}" for kind, one in link.collectives]
    if not each:
        return [f"{name}: {{{_format_figures(link)}}}"]
    return [f"{name}:", *(f"  {figure}" for figure in _format_figures(link).split(", ")), *each]


def _format_figures(link: Link) -> str:
    figures = f"bandwidth: {format_quantity(link.bandwidth, 'B/s')}, latency: {format_quantity(link.latency, 's')}"
    return figures + (f", reached: {link.reached!r}" if link.reached != 1 else "")
