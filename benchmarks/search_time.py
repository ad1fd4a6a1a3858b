"""CPU seconds and memory of `cornstarch plan` by the size of the cluster.

Every row is a process of its own. CPU seconds are user and system time of that process; memory is its largest resident
set. Rows of `cornstarch plan` do what the command does: they read a config, trace the model on the meta device, and
search; imports of torch and transformers, the trace, and the search are listed apart. The other rows search with costs
that are counted by hand (nine_models.py), without torch.

    python benchmarks/search_time.py                          # prints the table
    python benchmarks/search_time.py --only 405B              # rows whose names contain a text
    python benchmarks/search_time.py --output FILE.md --picture FILE.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from nine_models import LANGUAGE, LLAMA_8B, LLAMA_70B, Model, run_cost
from nine_models import SIGLIP as SIGLIP_STACK

from cornstarch.plan.cluster import Cluster
from cornstarch.plan.cost import RunCost
from cornstarch.plan.search import SearchResult, search

EFFICIENCY = 0.55  # of the peak rate
CP_SIZES = tuple(2**power for power in range(11))
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
LLAMA = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
"""The shapes of Llama 3.1."""
SLOW = {"per_node": 8, "device": "H100", "between": {"bandwidth": "10 Gbit/s", "latency": "100 us"}}
STACKS = {
    "8B": LLAMA_8B,
    "70B": LLAMA_70B,
    "405B": replace(LLAMA_70B, name="llama_405b", layers=126, hidden=16384, inner=53248, heads=128),
}
OTHERS = 40  # runners-up at most, as in the command
LIMIT = 180  # CPU seconds of a row


@dataclass(frozen=True)
class Case:
    """A run on clusters of several sizes: devices, with the batch of each."""

    name: str
    language: str
    sizes: tuple[tuple[int, int], ...]
    tokens: int = 4096
    has_images: bool = True
    slow: bool = False
    is_command: bool = False
    """Whether it is planned as `cornstarch plan` does."""


CASES = (
    Case("SigLIP + 8B", "8B", ((8, 256), (64, 1024), (512, 2048), (4096, 4096))),
    Case("SigLIP + 70B", "70B", ((64, 1024), (1024, 2048), (4096, 4096))),
    Case("SigLIP + 405B", "405B", ((1024, 2048), (4096, 4096), (4096, 3840))),
    Case("8B, 128k tokens", "8B", ((64, 64), (256, 256), (1024, 256)), 131_072, False),
    Case("8B, 1M tokens", "8B", ((64, 8), (256, 16), (1024, 64)), 1_048_576, False),
    Case("SigLIP + 8B, 10 Gbit/s between nodes", "8B", ((64, 1024), (512, 2048)), slow=True),
    Case("SigLIP + 70B, 10 Gbit/s between nodes", "70B", ((64, 1024), (512, 2048)), slow=True),
    Case("`cornstarch plan`: SigLIP + 8B", "8B", ((64, 1024),), is_command=True),
    Case("`cornstarch plan`: SigLIP + 405B", "405B", ((4096, 4096),), is_command=True),
)


def count_costs(case: Case, batch: int, operations: float) -> RunCost:
    """Return the costs of a run, counted by hand; operations: of a device in a second."""
    encoders = {"vision": replace(SIGLIP_STACK, tiles=1, handed=729)} if case.has_images else {}
    model = Model(case.name, STACKS[case.language], encoders, case.tokens - 729 * len(encoders))
    cp = tuple(size for size in CP_SIZES if size <= max(8, case.tokens // 1024))
    sizes = {"encoder": ((1, 2, 4, 8), cp), LANGUAGE: ((1, 2, 4, 8), cp)}
    return run_cost(model, operations, sizes, trained=True, batch=batch)


def write_run(folder: Path, case: Case, devices: int, batch: int) -> tuple[Path, str]:
    """Write a run's config, and return it with the name of the cluster."""
    shared = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 2**20}
    model: dict[str, Any] = {"language_model": {"train": "full", "config": {**shared, **LLAMA[case.language]}}}
    if case.has_images:
        model["encoders"] = {"vision": {"token": "<image>", "train": "full", "config": SIGLIP}}
    data = {"train": "none.json", "max_length": case.tokens}
    run = {"name": "run", "model": model, "data": data, "loop": {"batch_size": batch}, "precision": "bf16"}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    if not case.slow:
        return folder / "run.yaml", f"{devices // 8}x8xH100"
    (folder / "cluster.yaml").write_text(yaml.safe_dump({**SLOW, "nodes": devices // 8}))
    return folder / "run.yaml", str(folder / "cluster.yaml")


def plan_as_command(run: str, machines: Cluster) -> tuple[list[float], SearchResult]:
    """Plan as `cornstarch plan` does; return the CPU seconds after each phase."""
    from cornstarch.cli import import_quickly
    from cornstarch.config.config_file import load_config

    with import_quickly():
        from cornstarch.planner import build_cost, search_run  # noqa: F401  # imports torch and transformers

        config, times = load_config(run, ()), [time.process_time()]
        cost = search_run.cost_of(config, machines)
    times.append(time.process_time())
    return times, search_run.plan_run(config, machines, cost, OTHERS)


def plan_once(name: str, batch: int, run: str, cluster: str) -> dict[str, Any]:
    """Plan in this process; return the CPU seconds of each phase."""
    import resource

    case, machines = next(one for one in CASES if one.name == name), Cluster.parse(cluster)
    if case.is_command:
        times, found = plan_as_command(run, machines)
    else:
        cost = count_costs(case, batch, EFFICIENCY * machines.device.flops_of("bf16"))
        times = [0.0, time.process_time()]
        found = search(cost, machines, None, OTHERS)
    times.append(time.process_time())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB; kilobytes are given
    if found.best is None:
        return {"error": found.message}
    phases = {"imports": times[0], "costs": times[1] - times[0], "search": times[2] - times[1]}
    others = [f"{one.prediction.candidate.describe()} {one.prediction.step:.4g}" for one in found.runners_up]
    best = {"step": found.best.step, "plan": found.best.candidate.describe(), "tried": found.tried, "others": others}
    return {**phases, "cpu": times[2], "peak": peak, **best}


def measure(case: Case, devices: int, batch: int) -> dict[str, Any]:
    """Return the figures of one row, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run, cluster = write_run(Path(folder), case, devices, batch)
        child = shlex.join(
            [sys.executable, str(Path(__file__).resolve()), "--child", case.name, str(batch), str(run), cluster]
        )
        command = f"ulimit -t {LIMIT}; exec {child}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True)
    head = {"name": case.name, "devices": devices, "batch": batch}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        error = f"more than {LIMIT} CPU-s" if done.returncode < 0 or done.returncode == 137 else (said or ["?"])[-1]
        return {**head, "error": error}
    return {**head, **json.loads(lines[-1])}


def build_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    names = ["run", "GPUs", "batch", "search", "trace", "imports", "CPU-s", "GiB", "simulated", "step", "plan"]
    lines = [names, ["---"] * len(names)]
    for row in rows:
        head = [row["name"], f"{row['devices']:,}", f"{row['batch']:,}"]
        if "error" in row:
            lines.append([*head, row["error"], *[""] * 7])
            continue
        times = [f"{row[name]:.1f}" for name in ("search", "costs", "imports", "cpu")]
        lines.append([*head, *times, f"{row['peak']:.2f}", f"{row['tried']:,}", f"{row['step']:.3g} s", row["plan"]])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def build_page(rows: list[dict[str, Any]], arguments: str, picture: str | None) -> str:
    """Return the page of results."""
    import torch
    import transformers

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    head = [
        "# Search time",
        "",
        "`benchmarks/search_time.py`: CPU seconds (user and system) and memory of the search for a plan, each row a",
        "process of its own. *search* is the search alone, with all runners-up; *trace* the costs of layers; *imports*",
        "torch and transformers; *CPU-s* is their sum, *GiB* the largest resident set of the process. The last rows",
        "are what `cornstarch plan` does; the others search with costs that are counted by hand, without torch.",
        "Clusters are nodes of 8 H100. The plans are predictions.",
        "",
        f"2026-11-19, 2 CPU cores shared with other work, {versions}:",
        "",
        "```bash",
        f"OMP_NUM_THREADS=1 python benchmarks/search_time.py {arguments}".rstrip(),
        "```",
        "",
    ]
    shown = ["", f"![CPU seconds of the search by the number of GPUs]({picture})"] if picture else []
    return "\n".join([*head, *build_table(rows), *shown, ""])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the CPU seconds of the search by the number of GPUs, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name and "search" in row]
        axes.plot([row["devices"] for row in own], [row["search"] for row in own], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="CPU seconds of the search")
    axes.set_xticks(sizes := sorted({row["devices"] for row in rows}), [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every row, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--output", type=Path, help="a Markdown file")
    parser.add_argument("--picture", type=Path, help="a PNG or SVG file")
    parser.add_argument("--json", type=Path, help="all figures, as JSON")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, batch, run, cluster = given.child
        print(json.dumps(plan_once(name, int(batch), run, cluster)))
        return
    rows = []
    for case in CASES:
        for devices, batch in case.sizes if given.only in case.name else ():
            rows.append(measure(case, devices, batch))
            print(build_table(rows[-1:])[-1], flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))
    if given.picture:
        draw(rows, given.picture)
    if given.output:
        picture = os.path.relpath(given.picture, given.output.parent) if given.picture else None
        given.output.write_text(build_page(rows, " ".join(sys.argv[1:]), picture))


if __name__ == "__main__":
    main()
