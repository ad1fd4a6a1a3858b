"""`cornstarch doctor`: check this machine, and say how to fix what is broken; with --measure, benchmark it.

Run as a script, this file is the probe of torch: in a process of its own, which may crash or hang.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

# As in pyproject.toml, which an installed package does not contain.
SUPPORTED = {"torch": ((2, 11), (2, 16)), "transformers": ((5, 17), (6,))}
CORE = (
    "safetensors", "numpy", "pillow", "rich", "pyyaml", "pydantic", "typer", "psutil", "fsspec", "matplotlib", "jinja2",
)  # fmt: skip
OPTIONAL = {
    "peft": "LoRA",
    "soundfile": "sound files other than WAV",
    "tensorboard": "logging.to: [tensorboard]",
    "trackio": "logging.to: [trackio]",
    "wandb": "logging.to: [wandb]",
    "mlflow": "logging.to: [mlflow]",
    "datasets": "data of the format `datasets`",
}
# Their builds must match torch's. A broken one breaks transformers; a missing one does not.
FRAGILE = ("torchvision", "torchaudio", "torchcodec")
GIB = 2**30
PROBE_SECONDS = 180
Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def _advise(name: str, status: Status, detail: str, advice: str) -> Finding:
    """Return a finding whose advice is needed only if something is wrong."""
    return Finding(name, status, detail, "" if status == "ok" else advice)


def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Instead, measure compute, memory, collectives and the disk.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="--measure: write a YAML file for `cornstarch plan --cluster`.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="--measure: processes. Default: one per GPU; without GPUs 2.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="--measure: take seconds, and be less exact.")] = False,
) -> None:
    """Check this machine: versions, broken packages, process groups, GPUs, shared memory, disk, ports."""
    from rich.console import Console
    from rich.table import Table

    from cornstarch.errors import ConfigError

    if measure:
        _measure(output, nproc, quick)
        return
    options = {"--output": output is not None, "--nproc": nproc is not None, "--quick": quick}
    if given := [name for name, is_given in options.items() if is_given]:
        raise ConfigError(f"{given[0]} is an option of --measure. Add --measure.")
    found = list(examine())
    table = Table("", "what", "found", "what to do")
    colors = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for finding in found:
        table.add_row(finding.status, finding.name, finding.detail, finding.advice, style=colors[finding.status])
    Console(markup=False, highlight=False).print(table)
    failed = [finding.name for finding in found if finding.status == "fail"]
    if failed:
        print(f"failed: {', '.join(failed)}")
        raise typer.Exit(1)


def _measure(output: Path | None, nproc: int | None, quick: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from cornstarch.errors import ConfigError
    from cornstarch.launch.hardware_probe import probe_hardware
    from cornstarch.plan.cluster import write_cluster
    from cornstarch.plan.cluster_file import as_yaml, format_quantity
    from cornstarch.plan.communication import fit_error

    folder = output.absolute().parent if output is not None else Path.cwd()
    if output is not None and (output.is_dir() or not os.access(folder, os.W_OK)):
        raise ConfigError(f"--output {output}: expected the path of a file in a writable folder.")
    result = probe_hardware(folder, nproc, quick)
    cluster = result.cluster
    table = Table("what", "measured", title=f"{cluster.per_node} × {cluster.device.name}")
    for dtype, speed in cluster.device.rates:
        table.add_row(f"matmul in {dtype}", format_quantity(speed, "FLOP/s"))
    for name, fraction in cluster.device.reached:
        error = dict(cluster.errors).get(name, 0.0)
        table.add_row(f"{name.replace('_', ' ')} reached", f"{fraction:.0%} of that, ± {error:.0%}")
    table.add_row("memory", format_quantity(cluster.device.bandwidth or 0.0, "B/s"))
    for kind, link in cluster.inside.collectives:
        error = fit_error([one for one in result.timings if one.kind == kind], link)  # of the fitted line
        line = f"{format_quantity(link.latency, 's')} + {format_quantity(link.bandwidth, 'B/s')}, within {error:.0%}"
        table.add_row(kind.replace("_", "-"), line)
    for name, rate in (("disk write", cluster.disk), ("disk read", cluster.disk_read)):
        table.add_row(name, format_quantity(rate or 0.0, "B/s"))
    Console(markup=False, highlight=False).print(table)
    if output is None:
        print(as_yaml(cluster), end="")
        return
    write_cluster(output, cluster)
    print(f"Wrote {output}. The network between nodes was not measured; edit it to match yours.")


def examine() -> Iterator[Finding]:
    """Yield the findings of all checks; a check that raises is a finding too."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # the doctor must survive every machine
            name = check.__name__.removeprefix("check_").replace("_", " ")
            yield Finding(name, "warn", f"could not be checked: {type(error).__name__}: {error}")


def check_python() -> Iterator[Finding]:
    """Check the version of Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    status: Status = "fail" if sys.version_info < (3, 11) else "ok"
    yield _advise("python", status, version, "Install Python 3.11 or newer.")


def check_packages() -> Iterator[Finding]:
    """Check required packages, and list optional ones."""
    for name, (least, below) in SUPPORTED.items():
        wanted = f"{name}>={'.'.join(map(str, least))},<{'.'.join(map(str, below))}"
        version = get_version(name)
        if version is None:
            yield Finding(name, "fail", "not installed", f"pip install '{wanted}'")
            continue
        parts = version.split("+")[0].split(".")[:2]  # of 2.13.0+cpu: 2 and 13
        numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
        if least <= numbers < below:
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "fail", f"{version}; expected {wanted}", f"pip install '{wanted}'")
    for name in CORE:
        version = get_version(name)
        yield _advise(name, "ok" if version else "fail", version or "not installed", f"pip install {name}")
    for name, purpose in OPTIONAL.items():
        yield Finding(name, "ok", get_version(name) or f"not installed; only for {purpose}")


def get_version(name: str) -> str | None:
    """Return the installed version of a package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_fragile_packages() -> Iterator[Finding]:
    """Import the packages that must match torch's build, each in a process of its own."""
    for name in FRAGILE:
        version = get_version(name)
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


_PROBE_ADVICE = {
    "torch": "Install torch again: pip install --force-reinstall torch",
    "gloo": "Processes cannot communicate. Is the loopback interface up? Does a firewall close local ports?",
    "cuda": "Check `nvidia-smi`; the driver must be new enough for torch's CUDA.",
    "nccl": "Run again with NCCL_DEBUG=INFO to see the messages of NCCL.",
}


def check_process_groups_and_devices() -> Iterator[Finding]:
    """Try torch, gloo, CUDA and NCCL in a process of their own, which may crash or hang."""
    if get_version("torch") is None:
        return
    # -P: this folder must not be on the path, where its files would hide modules of the same name.
    ended = _run_python(["-P", __file__])
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    for probe in results:
        status: Status = "fail" if probe["status"] == "fail" else "ok"
        yield _advise(f"{probe['name']} probe", status, probe["detail"], _PROBE_ADVICE[probe["name"]])
    names = {probe["name"] for probe in results}
    for name, advice in _PROBE_ADVICE.items():
        if name not in names:
            last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1][:200]
            yield Finding(f"{name} probe", "fail", f"no answer (exit code {ended.returncode}): {last_line}", advice)
            return


def _run_python(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run Python; a timeout counts as a failure, and the output up to then is kept."""
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, errors="replace")
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, 124, output, f"took longer than {PROBE_SECONDS} s")


def _probe_cuda() -> str:
    """Multiply two matrices on every GPU."""
    import torch

    if not torch.cuda.is_available():
        raise LookupError("no CUDA device")
    names = []
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        if float((ones @ ones).sum()) != 64.0**3:
            raise RuntimeError(f"GPU {index} computes a wrong matrix product")
        free, total = torch.cuda.mem_get_info(index)
        names.append(f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    return "; ".join(names)


def _probe_nccl() -> str:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        raise LookupError("no CUDA device")
    if not dist.is_nccl_available():
        raise LookupError("this build of torch has no NCCL")
    return _all_reduce("nccl", "cuda:0")


def _all_reduce(backend: str, device: str) -> str:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    start = time.perf_counter()
    # Port 0: the store finds a free port itself, so that no other process can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30))
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        value = torch.ones(1024, device=device)
        dist.all_reduce(value)
        if float(value.sum()) != 1024.0:
            raise RuntimeError(f"the sum of 1024 ones is {float(value.sum())}")
    finally:
        dist.destroy_process_group()
    return f"all-reduce in a group of one process took {time.perf_counter() - start:.1f} s, port {store.port}"


def _run_probes() -> None:
    """Print one line of JSON per probe, at once, so that a later crash or hang does not lose it."""
    probes: dict[str, Callable[[], str]] = {
        "torch": lambda: f"torch {import_module('torch').__version__} imports",
        "gloo": partial(_all_reduce, "gloo", "cpu"),
        "cuda": _probe_cuda,
        "nccl": _probe_nccl,
    }
    for name, probe in probes.items():
        try:
            status, detail = "ok", probe()
        except LookupError as error:
            status, detail = "absent", str(error)
        except Exception as error:  # the next probe may still find something
            status, detail = "fail", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps({"name": name, "status": status, "detail": detail}), flush=True)


def check_bytecode() -> Iterator[Finding]:
    """Check that Python keeps the compiled sources of large packages, and does not compile them at every start."""
    for name in ("torch", "transformers"):
        spec = find_spec(name)
        if spec is None or spec.cached is None:
            continue
        if os.path.exists(spec.cached):
            yield Finding(f"{name} bytecode", "ok", "kept")
        elif sys.dont_write_bytecode:
            advice = f"Unset PYTHONDONTWRITEBYTECODE, or run once: {sys.executable} -m compileall -q {sys.prefix}"
            yield Finding(f"{name} bytecode", "warn", "not kept: every start takes seconds longer", advice)
        else:
            yield Finding(f"{name} bytecode", "ok", "none yet; the first start writes it")


def check_processors_and_memory() -> Iterator[Finding]:
    """Report cores, and check the free memory."""
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cores", "ok", str(cores))
    status: Status = "warn" if memory.available < GIB else "ok"
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    yield _advise("memory", status, detail, "Close other programs; a model may not fit.")


def check_shared_memory() -> Iterator[Finding]:
    """Check the shared memory, through which data workers hand over batches."""
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        yield Finding("shared memory", "warn", f"there is no {folder}", "Keep data.workers: 0 if loading fails.")
        return
    free = shutil.disk_usage(folder).free
    advice = "Keep data.workers: 0, or make it larger (docker run --shm-size=8g)."
    yield _advise("shared memory", "warn" if free < GIB else "ok", f"{free / GIB:.1f} GiB free", advice)


def check_disk() -> Iterator[Finding]:
    """Check the folder where runs would be written."""
    folder = os.getcwd()
    if not os.access(folder, os.W_OK):
        yield Finding("working folder", "warn", f"{folder} is not writable", "Set `output` to a writable folder.")
    free = shutil.disk_usage(folder).free
    status: Status = "fail" if free < GIB else "warn" if free < 10 * GIB else "ok"
    advice = "Free some space, or set `output` to another disk: checkpoints are large."
    yield _advise("disk", status, f"{free / GIB:.1f} GiB free in {folder}", advice)


def check_ports() -> Iterator[Finding]:
    """Check that a local port can be opened and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        yield Finding("ports", "fail", f"no local port can be used: {error}", "Bring up the loopback interface.")
    else:
        yield Finding("ports", "ok", f"{port} is free and reachable")


CHECKS: list[Callable[[], Iterator[Finding]]] = [
    check_python, check_packages, check_fragile_packages, check_process_groups_and_devices,
    check_bytecode, check_processors_and_memory, check_shared_memory, check_disk, check_ports,
]  # fmt: skip


if __name__ == "__main__":
    _run_probes()
