"""`cornstarch doctor`: what is installed, what is broken, and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cornstarch.launch.measuring import Machine

# As in pyproject.toml, which an installed package does not carry along.
SUPPORTED = {"torch": ((2, 11), (2, 16)), "transformers": ((5, 17), (6,))}
CORE = ("safetensors", "numpy", "pillow", "rich", "pyyaml", "pydantic", "typer", "psutil", "matplotlib")
OPTIONAL = {
    "peft": "LoRA",
    "soundfile": "sound files other than WAV",
    "tensorboard": "logging.to: [tensorboard]",
    "trackio": "logging.to: [trackio]",
    "wandb": "logging.to: [wandb]",
    "mlflow": "logging.to: [mlflow]",
    "datasets": "data of the format `datasets`",
}
# Their builds must match torch's; a broken one breaks transformers, an absent one does not.
FRAGILE = ("torchvision", "torchaudio", "torchcodec")
GIB = 2**30
PROBE_SECONDS = 180


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure how quickly it computes, exchanges and writes, instead.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="--measure: write a YAML file that --cluster takes."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", help="--measure: processes. Default: one for each GPU; without GPUs 2."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="--measure: with little, in seconds; less exact.")] = False,
) -> None:
    """Check this machine: versions, broken packages, process groups, GPUs, shared memory, disk, ports."""
    if measure:
        _measure(output, nproc, quick)
        return
    from cornstarch.errors import ConfigError

    options = {"--output": output is not None, "--nproc": nproc is not None, "--quick": quick}
    if given := [name for name, is_given in options.items() if is_given]:
        raise ConfigError(f"{given[0]} says how to measure. Add --measure.")
    _check()


def _check() -> None:
    from rich.console import Console
    from rich.table import Table

    found = list(examine())
    table = Table("", "what", "found", "what to do")
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in found:
        table.add_row(finding.status, finding.name, finding.detail, finding.advice, style=colours[finding.status])
    Console(markup=False, highlight=False).print(table)
    failed = [finding.name for finding in found if finding.status == "fail"]
    if failed:
        print(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def _measure(output: Path | None, nproc: int | None, quick: bool) -> None:
    from rich.console import Console

    from cornstarch.errors import ConfigError
    from cornstarch.launch.measuring import measure
    from cornstarch.plan.cluster import write_cluster
    from cornstarch.plan.cluster_file import as_yaml

    folder = output.absolute().parent if output is not None else Path.cwd()
    if output is not None and (output.is_dir() or not os.access(folder, os.W_OK)):
        raise ConfigError(f"--output {output}: expected the path of a file in a folder that can be written.")
    machine = measure(folder, nproc, quick)
    Console(markup=False, highlight=False).print(_measured_table(machine))
    if output is None:
        print(as_yaml(machine.cluster), end="")
        return
    write_cluster(output, machine.cluster)
    print(f"Written: {output}. What is between nodes was not measured; put in what yours have.")


def _measured_table(machine: Machine) -> Table:
    """Return what was measured, and for each exchange how far the fitted line is from the times."""
    from rich.table import Table

    from cornstarch.plan.links import fit_error
    from cornstarch.plan.quantities import written

    cluster = machine.cluster
    table = Table("what", "measured", title=f"{cluster.per_node} × {cluster.device.name}")
    for dtype, rate in cluster.device.rates:
        table.add_row(f"matrices in {dtype}", written(rate, "FLOP/s"))
    table.add_row("memory", written(cluster.device.bandwidth or 0.0, "B/s"))
    for kind, link in cluster.inside.collectives:
        error = fit_error([one for one in machine.timings if one.kind == kind], link)
        line = f"{written(link.latency, 's')} + {written(link.bandwidth, 'B/s')}, within {error:.0%}"
        table.add_row(kind.replace("_", "-"), line)
    for name, speed in (("disk, writing", cluster.disk), ("disk, reading", cluster.disk_read)):
        table.add_row(name, written(speed or 0.0, "B/s"))
    return table


def examine() -> Iterator[Finding]:
    """Yield every finding; a check that breaks is a finding too."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # the doctor must survive every machine
            name = check.__name__.replace("_", " ")
            yield Finding(name, "warn", f"could not be checked: {type(error).__name__}: {error}")


# ------------------------------------------------------------------------------------------------ packages


def python() -> Iterator[Finding]:
    """Check the interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < (3, 11)
    yield Finding("python", "fail" if old else "ok", version, "Install Python 3.11 or newer." if old else "")


def packages() -> Iterator[Finding]:
    """Check what must be installed, and tell what may be."""
    for name, (least, below) in SUPPORTED.items():
        yield _supported(name, least, below)
    for name in CORE:
        version = _version(name)
        if version is None:
            yield Finding(name, "fail", "not installed", f"pip install {name}")
        else:
            yield Finding(name, "ok", version)
    for name, purpose in OPTIONAL.items():
        version = _version(name)
        yield Finding(name, "ok", version or f"not installed; only for {purpose}")


def _supported(name: str, least: tuple[int, ...], below: tuple[int, ...]) -> Finding:
    wanted = f"{name}>={_dotted(least)},<{_dotted(below)}"
    version = _version(name)
    if version is None:
        return Finding(name, "fail", "not installed", f"pip install '{wanted}'")
    if not least <= _numbers(version) < below:
        return Finding(name, "fail", f"{version}; expected {wanted}", f"pip install '{wanted}'")
    return Finding(name, "ok", version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 13) of 2.13.0+cpu."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def fragile_packages() -> Iterator[Finding]:
    """Import, in a process of their own, the packages that must fit torch's build."""
    for name in FRAGILE:
        version = _version(name)
        if version is None:
            yield Finding(name, "ok", "not installed, not needed")
            continue
        ended = _run_python(["-c", f"import {name}"])
        if ended.returncode == 0:
            yield Finding(name, "ok", version)
        else:
            reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1][:200]
            advice = f"pip uninstall {name}: Cornstarch does not need it, and a broken one breaks transformers."
            yield Finding(name, "fail", f"{version} cannot be imported: {reason}", advice)


# ------------------------------------------------------------------------------------------------ torch

_PROBE_ADVICE = {
    "torch": "Install torch again: pip install --force-reinstall torch",
    "gloo": "Several processes cannot work together. Is the loopback interface up? Does a firewall close local ports?",
    "cuda": "Look at `nvidia-smi`; the driver must be new enough for torch's CUDA.",
    "nccl": "Run again with NCCL_DEBUG=INFO to see what NCCL says.",
}


def process_groups_and_devices() -> Iterator[Finding]:
    """Try torch, gloo, CUDA and NCCL in a process of their own, which may crash or hang."""
    if _version("torch") is None:
        return
    ended = _run_python(["-P", str(Path(__file__).with_name("probe.py"))])
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    for probe in told:
        name = f"{probe['name']} probe"
        if probe["status"] == "fail":
            yield Finding(name, "fail", probe["detail"], _PROBE_ADVICE[probe["name"]])
        else:
            yield Finding(name, "ok", probe["detail"])
    names = {probe["name"] for probe in told}
    for name, advice in _PROBE_ADVICE.items():
        if name not in names:
            ending = (ended.stderr.strip().splitlines() or ["no message"])[-1][:200]
            yield Finding(f"{name} probe", "fail", f"no answer (exit code {ended.returncode}): {ending}", advice)
            return


def _run_python(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python; a run that takes too long counts as one that failed, with what it had said."""
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, errors="replace")
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, 124, output, f"took longer than {PROBE_SECONDS} s")


# ------------------------------------------------------------------------------------------------ machine


def processors_and_memory() -> Iterator[Finding]:
    """Tell cores and memory."""
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cores", "ok", str(cores))
    low = memory.available < GIB
    advice = "Close other programs; a model may not fit." if low else ""
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    yield Finding("memory", "warn" if low else "ok", detail, advice)


def shared_memory() -> Iterator[Finding]:
    """Check the shared memory, through which loader processes hand over batches."""
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        yield Finding("shared memory", "warn", f"there is no {folder}", "Keep data.workers: 0 if loading fails.")
        return
    free = shutil.disk_usage(folder).free
    small = free < GIB
    advice = "Keep data.workers: 0, or make it larger (docker run --shm-size=8g)." if small else ""
    yield Finding("shared memory", "warn" if small else "ok", f"{free / GIB:.1f} GiB free", advice)


def disk() -> Iterator[Finding]:
    """Check the folder where runs would be written."""
    folder = os.getcwd()
    if not os.access(folder, os.W_OK):
        yield Finding("working folder", "warn", f"{folder} cannot be written", "Set `output` to a folder that can.")
    free = shutil.disk_usage(folder).free
    status: Literal["ok", "warn", "fail"] = "fail" if free < GIB else "warn" if free < 10 * GIB else "ok"
    advice = "" if status == "ok" else "Free some space, or set `output` to another disk: checkpoints are large."
    yield Finding("disk", status, f"{free / GIB:.1f} GiB free in {folder}", advice)


def ports() -> Iterator[Finding]:
    """Check that a local port can be opened and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        yield Finding("ports", "fail", f"no local port can be used: {error}", "Bring up the loopback interface.")
    else:
        yield Finding("ports", "ok", f"{port} is free and can be reached")


CHECKS: list[Callable[[], Iterator[Finding]]] = [
    python,
    packages,
    fragile_packages,
    process_groups_and_devices,
    processors_and_memory,
    shared_memory,
    disk,
    ports,
]
