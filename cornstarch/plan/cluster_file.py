"""Clusters as YAML: reading with every mistake and its line, and writing; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cornstarch.errors import ConfigError
from cornstarch.plan import mistakes
from cornstarch.plan.cluster import Cluster, joined
from cornstarch.plan.devices import DTYPES, Device, device, device_or_unknown, this_cpu, with_rates
from cornstarch.plan.links import BETWEEN_NODES, COLLECTIVES, LINKS, Link
from cornstarch.plan.mistakes import Mistake, shown, suggestion
from cornstarch.plan.quantities import Unit, quantity, written

_CLUSTER = ["name", "nodes", "per_node", "device", "inside", "between", "disk", "disk_read", "measured"]
_DEVICE = ["name", "memory", "bandwidth", "flops", "bf16"]
_LINK = ["bandwidth", "latency"]
_LARGEST = 1_000_000  # bytes of a file

_MISSING = object()


def read(path: Path) -> Cluster:
    """Return the cluster that a file describes."""
    data, lines = _loaded(path)
    reader = _Reader()
    cluster = reader.cluster(data)
    if reader.found:
        told = []
        for one in reader.found:
            line = next((lines[one.path[:n]] for n in range(len(one.path), -1, -1) if one.path[:n] in lines), None)
            told.append(f"{path}{f':{line}' if line else ''}  {one}")
        raise ConfigError("\n".join([f"{len(told)} mistakes:", *told] if len(told) > 1 else told))
    assert cluster is not None
    return cluster if cluster.name else replace(cluster, name=path.stem)


def _loaded(path: Path) -> tuple[Any, dict[mistakes.Path, int]]:
    """Return what a YAML file holds, and the line of each key."""
    import yaml

    try:
        content = path.read_bytes()
        if len(content) > _LARGEST:
            raise ConfigError(f"{path} has {len(content)} bytes; expected the description of a cluster.")
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[mistakes.Path, int] = {}
        _note_lines(path, node, (), lines)
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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none; brackets without end
        raise ConfigError(f"{path}: this is not YAML: {str(error).splitlines()[0]}.") from error


def _note_lines(file: Path, node: Any, path: mistakes.Path, lines: dict[mistakes.Path, int]) -> None:
    """Note the line of each key, as deep as a description of a cluster goes; a key given twice is a mistake."""
    import yaml

    if not isinstance(node, yaml.MappingNode) or len(path) > 3:
        return
    for key, value in node.value:
        here, line = (*path, str(key.value)), key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{file}:{line}  {mistakes.dotted(here)} is given twice; first in line {lines[here]}.")
        lines[here] = line
        _note_lines(file, value, here, lines)


class _Reader:
    """Reads data as a cluster, and collects what is wrong with it."""

    def __init__(self) -> None:
        self.found: list[Mistake] = []
        self._processes = 1
        """Those that share a node's CPU."""

    def cluster(self, data: Any) -> Cluster | None:
        given = self._keys(data, _CLUSTER, ())
        if given is None:
            return None
        nodes = self._count(given.get("nodes", 1), ("nodes",))
        per_node = self._count(given.get("per_node", _MISSING), ("per_node",))
        self._processes = per_node or 1
        one = self._device(given.get("device", _MISSING))
        inside = self._link(given["inside"], ("inside",)) if "inside" in given else joined(one) if one else None
        between = self._link(given["between"], ("between",)) if "between" in given else LINKS[BETWEEN_NODES]
        disks = [self._number(given[key], "B/s", (key,)) if key in given else None for key in ("disk", "disk_read")]
        name, measured = given.get("name", ""), given.get("measured", False)
        if not isinstance(name, str):
            self._complain(("name",), name, "Expected a text.")
        if not isinstance(measured, bool):
            self._complain(("measured",), measured, "Expected true or false.")
        if self.found or None in (nodes, per_node) or one is None or inside is None or between is None:
            return None
        assert nodes is not None and per_node is not None
        return Cluster(nodes, per_node, one, inside, between, disks[0], name, disks[1], measured)

    def _device(self, data: Any) -> Device | None:
        path = ("device",)
        if data is _MISSING:
            self._complain(path, _MISSING, "Give a name of the catalogue, or name, memory, bandwidth and flops.")
            return None
        if isinstance(data, str):
            return self._known(data, path)
        given = self._keys(data, _DEVICE, path)
        if given is None:
            return None
        name = given.get("name", _MISSING)
        if not isinstance(name, str) or not name:
            self._complain((*path, "name"), name, "Expected what the device is called.")
            return None
        needed = ("memory", "bandwidth", "flops")
        if not all(key in given for key in needed):  # the rest is the catalogue's
            base = self._known(name, path, [key for key in needed if key not in given])
        else:
            base = device_or_unknown(name)
        if base is None:
            return None
        if "memory" in given:
            base = replace(base, memory=int(self._number(given["memory"], "B", (*path, "memory")) or 0))
        if "bandwidth" in given:
            base = replace(base, bandwidth=self._number(given["bandwidth"], "B/s", (*path, "bandwidth")))
        if "flops" in given:
            base = self._with_rates(base, given["flops"], (*path, "flops"))
        has_bf16 = given.get("bf16", base.has_bf16)
        if not isinstance(has_bf16, bool):
            self._complain(
                (*path, "bf16"), has_bf16, "Expected true or false: whether it computes in bfloat16 by itself."
            )
            return None
        return replace(base, has_bf16=has_bf16)

    def _known(self, name: str, path: mistakes.Path, missing: list[str] | None = None) -> Device | None:
        try:
            found = device(name)
            return this_cpu(self._processes) if found.is_cpu else found
        except ConfigError as error:
            more = (
                f"\nOr describe it: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
                if missing
                else ""
            )
            self._complain((*path, "name") if missing else path, name, f"{error}{more}")
            return None

    def _with_rates(self, base: Device, data: Any, path: mistakes.Path) -> Device:
        """Return a device whose operations per second are those of a file, and of no catalogue."""
        given = self._keys(data, list(DTYPES), path) or {}
        if isinstance(data, Mapping) and not data:
            self._complain(path, None, f"Expected the operations a second of at least one of {', '.join(DTYPES)}.")
        rates = {dtype: self._number(given[dtype], "FLOP/s", (*path, dtype)) for dtype in DTYPES if dtype in given}
        known = {dtype: rate for dtype, rate in rates.items() if rate is not None}
        return replace(with_rates(base, known), has_bf16="bf16" in rates)

    def _link(self, data: Any, path: mistakes.Path) -> Link | None:
        if isinstance(data, str):
            if data not in LINKS:
                meant = mistakes.nearest(data, [name.lower().replace(" ", "_") for name in LINKS])
                close = [name for name in LINKS if name.lower().replace(" ", "_") == meant]
                advice = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(LINKS)}."
                self._complain(path, data, f"There is no such link in the catalogue. {advice}")
            return LINKS.get(data)
        kinds = [] if len(path) > 1 else list(COLLECTIVES)
        given = self._keys(data, [*_LINK, *kinds], path)
        if given is None:
            return None
        bandwidth = self._number(given.get("bandwidth", _MISSING), "B/s", (*path, "bandwidth"))
        latency = self._number(given.get("latency", _MISSING), "s", (*path, "latency"), least=0)
        each = [(kind, self._link(given[kind], (*path, kind))) for kind in COLLECTIVES if kind in given]
        if bandwidth is None or latency is None:
            return None
        return Link(bandwidth, latency, tuple((kind, link) for kind, link in each if link is not None))

    # -------------------------------------------------------------------------------------------- values

    def _keys(self, data: Any, known: list[str], path: mistakes.Path) -> dict[str, Any] | None:
        if not isinstance(data, Mapping):
            where = path or ("the file",)
            self._complain(where, data, f"Expected a mapping with some of these keys: {', '.join(known)}.")
            return None
        for key in data:
            if key not in known:
                _, text = suggestion(str(key), known, path)
                self.found.append(Mistake((*path, str(key)), shown(data[key]), text))
        return {key: value for key, value in data.items() if key in known}

    def _count(self, value: Any, path: mistakes.Path) -> int | None:
        if type(value) is int and 1 <= value < 2**31:
            return value
        self._complain(path, value, "Expected a whole number of at least 1.")
        return None

    def _number(self, value: Any, unit: Unit, path: mistakes.Path, least: float | None = None) -> float | None:
        try:
            return quantity(None if value is _MISSING else value, unit, least)
        except ValueError as error:
            self._complain(path, value, str(error))
            return None

    def _complain(self, path: mistakes.Path, value: Any, text: str) -> None:
        missing = value is _MISSING
        self.found.append(
            Mistake(path, None if missing else shown(value), f"It is missing. {text}" if missing else text)
        )


# ------------------------------------------------------------------------------------------------ writing


def as_yaml(cluster: Cluster) -> str:
    """Return a cluster as YAML."""
    one = cluster.device
    rates = dict(one.rates) or {"fp16": one.flops_of("fp16")}
    lines = [
        *([f"name: {json.dumps(cluster.name)}"] if cluster.name else []),
        f"nodes: {cluster.nodes}",
        f"per_node: {cluster.per_node}",
        "device:",
        f"  name: {json.dumps(one.name)}",
        f"  memory: {one.memory}",
        *([f"  bandwidth: {written(one.bandwidth, 'B/s')}"] if one.bandwidth is not None else []),
        "  flops:",
        *(f"    {dtype}: {written(rate, 'FLOP/s')}" for dtype, rate in rates.items()),
        f"  bf16: {json.dumps(one.has_bf16)}",
        *_link_lines("inside", cluster.inside),
        *_link_lines("between", cluster.between),
    ]
    for key, speed in (("disk", cluster.disk), ("disk_read", cluster.disk_read)):
        lines += [f"{key}: {written(speed, 'B/s')}"] if speed is not None else []
    lines += ["measured: true"] if cluster.measured else []
    return "\n".join(lines) + "\n"


def _link_lines(name: str, link: Link) -> list[str]:
    each = [f"  {kind}: {{{_figures(one)}}}" for kind, one in link.collectives]
    return [f"{name}: {{{_figures(link)}}}"] if not each else [f"{name}:", *_indented(link), *each]


def _indented(link: Link) -> list[str]:
    return [f"  {figure}" for figure in _figures(link).split(", ")]


def _figures(link: Link) -> str:
    return f"bandwidth: {written(link.bandwidth, 'B/s')}, latency: {written(link.latency, 's')}"
