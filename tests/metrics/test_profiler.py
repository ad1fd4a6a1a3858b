"""`--profile`: every moment of a step belongs to one part, backward included; and what a run leaves of it."""

from __future__ import annotations

import gzip
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from cornstarch.kernels.compile import compile_layers
from cornstarch.metrics.attribution import RANGE, WINDOW, attribute, classify_operation
from cornstarch.metrics.profiler import build_time_table, record_range, trace_name
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.parallel.ddp_fsdp import wrapping_units
from cornstarch.report.run_report import write_report
from cornstarch.report.time_breakdown import PROFILE, read_time_breakdown
from cornstarch.train import Trainer
from tests import warm
from tests.cli.small_runs import write_config
from tests.cli.started import start
from tests.parity.pool import pool
from tests.trainer.test_pipelined_run import STAGES, fit_run, tokenizer  # noqa: F401  (a fixture)
from tests.trainer.tiny import tiny_config, trainer_of

MAIN, BACKWARD, GPU = ("p", 1), ("p", 2), ("gpu", 7)


# ---------------------------------------------------------------------------------------------------- traces by hand


def host(name: str, ts: float, dur: float, thread: tuple[str, int] = MAIN, cat: str = "cpu_op", **args: Any) -> dict:
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": thread[0],
        "tid": thread[1],
        "ts": ts,
        "dur": dur,
        "args": named,
    }


def part(name: str, ts: float, dur: float, thread: tuple[str, int] = MAIN) -> dict:
    return host(RANGE + name, ts, dur, thread, cat="user_annotation")


def kernel(
    name: str, launched: tuple[tuple[str, int], float], ts: float, dur: float, cat: str = "kernel"
) -> list[dict]:
    """Return a kernel and its launch."""
    number = f"{name}{ts}"
    launch = host("cudaLaunchKernel", launched[1], 0.5, launched[0], cat="cuda_runtime", correlation=number)
    return [launch, host(name, ts, dur, GPU, cat=cat, correlation=number)]


def table(events: list[dict], parts: list[str], steps: int = 1) -> dict[str, dict[str, Any]]:
    """Return rows by name, in microseconds, after a look at their sum."""
    found = attribute({"traceEvents": events}, parts, steps)
    assert sum(row["seconds"] for row in found["rows"]) == pytest.approx(found["seconds"], rel=1e-6)
    rows = {row.pop("name"): row for row in found["rows"]}
    scaled = json.loads(json.dumps(rows), parse_float=lambda text: round(float(text) * 1e6, 3))
    return {**scaled, "step": {"seconds": round(found["seconds"] * 1e6, 3)}, "hidden": found["hidden_communication"]}


def step_of_a_gpu() -> list[dict]:
    """One step whose process is ahead of its GPU: two parts, a backward on another thread, clipping, the next batch."""
    return [
        part(WINDOW, 100, 900),
        part("waiting for data", 100, 20),
        part("encoder", 120, 100),
        host("aten::linear", 121, 50, Sequence_number=1, Fwd_thread_id=0),
        part("language model", 220, 180),
        host("aten::linear", 221, 40, Sequence_number=2, Fwd_thread_id=0),
        host("aten::scaled_dot_product_attention", 270, 40, Sequence_number=3, Fwd_thread_id=0),
        # A node that makes no gradient has the number of the next one: the last to begin with it counts.
        host("aten::empty", 215, 1, Sequence_number=2, Fwd_thread_id=0),
        host("autograd::engine::evaluate_function: A", 400, 50, BACKWARD, Sequence_number=3, Fwd_thread_id=1),
        host("autograd::engine::evaluate_function: B", 450, 50, BACKWARD),
        host("BBackward0", 452, 40, BACKWARD, Sequence_number=2, Fwd_thread_id=1),
        host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 500, 10, BACKWARD),
        host("autograd::engine::evaluate_function: C", 520, 30, BACKWARD, Sequence_number=1, Fwd_thread_id=1),
        part("clipping gradients", 560, 20),
        # On the GPU: first the rest of the step before, which ends at 250.
        *kernel("gemm", (MAIN, 90), 200, 50),
        *kernel("ampere_gemm", (MAIN, 130), 250, 100),  # encoder
        *kernel("ampere_gemm", (MAIN, 230), 350, 100),  # language model, forward
        *kernel("pytorch_flash::flash_fwd", (MAIN, 280), 450, 50),
        *kernel("pytorch_flash::flash_bwd", (BACKWARD, 410), 500, 100),
        *kernel("triton_poi_fused_add", (BACKWARD, 460), 600, 40),
        *kernel("vectorized_add", (BACKWARD, 505), 640, 10),  # adds up a gradient
        *kernel("ampere_gemm", (BACKWARD, 530), 650, 50),  # encoder, backward
        *kernel("norm", (MAIN, 565), 700, 10),
        # Communication: the first half beside computing, the second alone; then nothing, then a copy.
        *kernel("ncclDevKernel_AllReduce", (BACKWARD, 540), 690, 40),
        *kernel("Memcpy HtoD (Pinned -> Device)", (MAIN, 110), 745, 5, cat="gpu_memcpy"),
        *kernel("fused_adam", (MAIN, 590), 760, 40),  # outside of all ranges
        *kernel("after", (MAIN, 1100), 1200, 40),  # of the next step
    ]


def test_kernels_belong_to_their_launcher_and_backward_to_its_forward() -> None:
    rows = table(step_of_a_gpu(), ["encoder", "language model"])
    assert rows["step"]["seconds"] == 550  # from the end of the step before, 250, to the end of this one, 800
    assert rows["encoder"]["forward"] == 100 and rows["encoder"]["backward"] == 50
    assert rows["encoder"]["matrix products"] == {"forward": 100, "backward": 50}
    assert rows["language model"]["forward"] == 150 and rows["language model"]["backward"] == 150
    assert rows["language model"]["attention"] == {"forward": 50, "backward": 100}
    assert rows["language model"]["matrix products"] == {"forward": 100}
    assert rows["clipping gradients"]["seconds"] == 10
    assert rows["communication"]["seconds"] == 20 and rows["hidden"] == pytest.approx(20e-6)
    assert rows["copying batches"]["seconds"] == 5
    assert rows["other"]["seconds"] == 40
    assert rows["GPU idle"]["seconds"] == 25


def test_idle_gpu_time_is_data_wait_or_idle() -> None:
    events = [
        part(WINDOW, 0, 1000),
        part("waiting for data", 100, 300),
        part("model", 400, 600),
        *kernel("gemm", (MAIN, 50), 60, 140),  # of the step itself; ends at 200, within the wait
        *kernel("gemm", (MAIN, 450), 500, 100),
    ]
    rows = table(events, ["model"])
    assert rows["waiting for data"]["seconds"] == 200
    assert rows["GPU idle"]["seconds"] == 60 + 100
    assert rows["model"]["seconds"] == 100 and rows["other"]["seconds"] == 140


def test_concurrent_kernels_divide_the_time() -> None:
    events = [
        part(WINDOW, 0, 100),
        part("a", 0, 10),
        part("b", 10, 10),
        *kernel("one", (MAIN, 1), 20, 40),
        *kernel("two", (MAIN, 11), 40, 40),
    ]
    rows = table(events, ["a", "b"])
    assert rows["a"]["seconds"] == 30 and rows["b"]["seconds"] == 30 and rows["GPU idle"]["seconds"] == 20


def test_waiting_for_other_ranks_is_communication() -> None:
    """On a CPU messages are on their way in other threads; what runs beside them is no wait."""
    events = [
        part(WINDOW, 0, 1000),
        part("model", 0, 300),
        host("aten::mm", 0, 300),
        host("gloo:all_reduce", 200, 600, BACKWARD, cat="user_annotation"),
        part("optimizer", 900, 100),
        host("c10d::broadcast_", 950, 10),
    ]
    rows = table(events, ["model"])
    assert rows["model"]["forward"] == 300
    assert rows["communication"]["seconds"] == 500 + 10
    assert rows["optimizer"]["seconds"] == 90 and rows["other"]["seconds"] == 100


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::baddbmm", "matrix products"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("triton_tem_fused_mm_3", "matrix products"),
        ("aten::_scaled_mm", "matrix products"),
        ("aten::convolution", "matrix products"),
        ("triton_tem_fused_flex_attention_1", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at_", "attention"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "attention"),
        ("fmha_cutlassF_bf16_aligned", "attention"),
        ("triton_red_fused_mean_mul_rsqrt", ""),
        ("aten::_convert_indices_from_csr_to_coo", ""),
        ("aten::upsample_bilinear2d", ""),
        ("aten::resolve_conj", ""),
        ("multi_tensor_apply_kernel", ""),
    ],
)
def test_operations_are_classified_by_name(name: str, kind: str) -> None:
    assert classify_operation(name) == kind


# ---------------------------------------------------------------------------------------------------- real backwards


class Burns(torch.autograd.Function):
    """Takes a known time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        burn(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        burn(2 * ctx.seconds)
        return gradient.clone(), None


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Part(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, value: Tensor) -> Tensor:
        return Burns.apply(self.linear(value), self.seconds).relu()


@pytest.mark.parametrize("again", ["kept", "recomputed", "recomputed, reentrant"])
def test_backward_belongs_to_the_part_of_its_forward(again: str) -> None:
    first, second = Part(0.01), Part(0.03)
    value = torch.randn(2, 4, requires_grad=True)

    def run(module: nn.Module, value: Tensor) -> Tensor:
        return module(value) if again == "kept" else checkpoint(module, value, use_reentrant="reentrant" in again)

    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(RANGE + WINDOW):
        with record_function(RANGE + "first"):
            made = run(first, value)
        with record_function(RANGE + "second"):
            made = run(second, made)
        made.sum().backward()
    rows = attribute_profile(profiled)
    computed_again = 0 if again == "kept" else 1
    for name, seconds in (("first", 0.01), ("second", 0.03)):  # what counts for one part does not for the other
        assert rows[name]["forward"] >= seconds
        assert rows[name]["backward"] >= (2 + computed_again) * seconds


def attribute_profile(profiled: profile) -> dict[str, dict[str, Any]]:
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"trace-{os.getpid()}.json"
    profiled.export_chrome_trace(str(path))
    try:
        found = attribute(json.loads(path.read_bytes()), ["first", "second"], 1)
    finally:
        path.unlink()
    assert sum(row["seconds"] for row in found["rows"]) == pytest.approx(found["seconds"], rel=1e-6)
    return {row["name"]: row for row in found["rows"]}


def test_backward_of_compiled_layers_belongs_to_their_part() -> None:
    first, second = nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Sequential(nn.Linear(64, 64), nn.GELU())
    calls = [torch.compile(one, backend="aot_eager") for one in (first, second)]
    value = torch.randn(256, 64, requires_grad=True)
    for _ in range(2):
        calls[1](calls[0](value)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(RANGE + WINDOW):
        with record_function(RANGE + "first"):
            made = calls[0](value)
        with record_function(RANGE + "second"):
            made = calls[1](made)
        made.sum().backward()
    rows = attribute_profile(profiled)
    for name in ("first", "second"):
        assert rows[name]["matrix products"]["forward"] > 0
        assert rows[name]["matrix products"]["backward"] > 0


# ---------------------------------------------------------------------------------------------------- runs


def read(folder: Path, ranks: int = 1) -> dict[str, Any]:
    """Return what a run says of its time, after a look at it."""
    data = json.loads((folder / PROFILE).read_text())
    assert [rank["rank"] for rank in data["ranks"]] == [*range(ranks)]
    for rank in data["ranks"]:
        assert sum(row["seconds"] for row in rank["rows"]) == pytest.approx(rank["seconds"], rel=0.02)
    for rank in range(ranks):
        trace = json.loads(gzip.decompress((folder / trace_name(rank, ranks)).read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {f"{RANGE}step {step}" for step in data["steps"]} <= names
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".profile*"))
    return data


def rows_of(data: dict[str, Any], rank: int = 0) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in data["ranks"][rank]["rows"]}


VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "microbatches": ["loop.gradient_accumulation_steps=2"],
    "packed": ["data.packing=true"],
    "adapters": ["model.language_model.train=lora", "model.encoders.vision.train=projector"],
    "recomputed": ["loop.activation_checkpointing=true"],
    "workers": ["data.workers=1"],
    "averaged": ["loop.ema_decay=0.9", "optimizer.max_grad_norm=null"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_is_profiled(tmp_path: Path, name: str) -> None:
    told = io.StringIO()
    config = tiny_config(tmp_path, "loop.steps=7", *VARIANTS[name])
    trainer = Trainer(config, console=Console(file=told, width=100), profile=True)
    trainer.fit()
    data = read(tmp_path / "run")
    assert data["steps"] == [4, 5, 6] and data["notes"] == []
    rows = rows_of(data)
    for part_name in ("vision encoder", "vision projector", "merging", "language model", "head and loss"):
        assert rows[part_name]["forward"] > 0
    assert rows["language model"]["backward"] > 0 and rows["head and loss"]["backward"] > 0
    assert rows["language model"]["matrix products"]["forward"] > 0
    assert rows["optimizer"]["seconds"] > 0 and rows["waiting for data"]["seconds"] > 0
    assert ("clipping gradients" in rows) == (name != "averaged")
    assert ("backward" in rows["vision encoder"]) == (name != "adapters")  # what is frozen has none
    assert "GPU idle" not in rows and "communication" not in rows
    assert rows["other"]["seconds"] < 0.5 * data["ranks"][0]["seconds"]
    said = told.getvalue()
    assert "where the time goes: steps 4 to 6" in said and "language model" in said.split("where the time goes")[1]
    assert 'id="times"' in (tmp_path / "run/report.html").read_text()
    assert all("in_range" not in repr(module.__dict__.get("forward")) for module in trainer.model.modules())


def test_a_run_with_compiled_layers_is_profiled(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "loop.steps=5", "data.pad_to=32"), profile=True)
    trainer.setup()
    assert isinstance(trainer.model, MultimodalModel)
    parts = (trainer.model.language_model, trainer.model.encoders["vision"].module)
    layers = [layer for one in parts for layer in wrapping_units(one)]
    assert compile_layers(layers, backend="aot_eager") == 2
    trainer.fit()
    rows = rows_of(read(tmp_path / "run"))
    for name in ("language model", "vision encoder"):
        assert rows[name]["matrix products"]["forward"] > 0 and rows[name]["matrix products"]["backward"] > 0
    assert compile_layers(layers) == 0  # they still are


def test_without_profiling_there_are_no_ranges(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path, "loop.steps=5")).fit()
    assert not (tmp_path / "run" / PROFILE).exists()
    assert 'id="times"' not in (tmp_path / "run/report.html").read_text()
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_range("optimizer"):
        torch.ones(2)
    assert not any(event.name.startswith(RANGE) for event in profiled.events())


@pytest.mark.parametrize(("steps", "expected"), [(1, [1]), (2, [2]), (3, [3]), (4, [4]), (5, [4, 5])])
def test_short_runs_profile_their_last_steps(tmp_path: Path, steps: int, expected: list[int]) -> None:
    trainer_of(tiny_config(tmp_path, f"loop.steps={steps}"), profile=True).fit()
    data = read(tmp_path / "run")
    assert data["steps"] == expected
    assert ("at its start" in "".join(data["notes"])) == (steps < 4)


@pytest.mark.parametrize(("option", "expected"), [("checkpoint.every=5", [4, 5]), ("checkpoint.every=3", [4, 5, 6])])
def test_evaluations_and_checkpoints_are_not_counted(tmp_path: Path, option: str, expected: list[int]) -> None:
    trainer_of(tiny_config(tmp_path, "loop.steps=8", option), profile=True).fit()
    assert read(tmp_path / "run")["steps"] == expected


def test_a_resumed_run_counts_from_its_start(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path, "loop.steps=2")).fit()
    trainer_of(tiny_config(tmp_path, "loop.steps=9"), profile=True, allow_changes=True).fit()
    assert read(tmp_path / "run")["steps"] == [6, 7, 8]


def test_a_run_that_fails_leaves_no_profiler(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_config(tmp_path, "loop.steps=8"), profile=True)
    trainer.setup()
    step = trainer.step

    def fails(batch: Any) -> Any:
        if trainer.position.step == 4:
            raise RuntimeError("broken")
        return step(batch)

    trainer.step = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_range("optimizer"):
        torch.ones(2)  # torch refuses a second profiler
    assert not any(event.name.startswith(RANGE) for event in profiled.events())
    assert not (tmp_path / "run" / PROFILE).exists()


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "vision, pp 2", "vision inside, interleaved"])
def test_several_ranks_are_profiled(name: str, tokenizer: str, tmp_path: Path) -> None:  # noqa: F811
    ranks, parallel = STAGES.get(name, (2, {"data": {"kind": name}}))
    pool().run(ranks, profile_run, parallel, tokenizer, str(tmp_path / "run"), 5)
    data = read(tmp_path / "run", ranks)
    assert data["steps"] == [4]  # then a checkpoint is written
    found = [rows_of(data, rank) for rank in range(ranks)]
    assert all("communication" in rows for rows in found)
    assert any(rows.get("language model", {}).get("backward", 0.0) > 0 for rows in found)
    if name == "vision, pp 2":  # one place each: the encoder, and two halves of the language model
        assert "vision encoder" in found[0] and "language model" not in found[0]
        assert "vision encoder" not in found[1] and "language model" in found[1] and "language model" in found[2]
    page = write_report(tmp_path / "run").read_text()
    assert f"mean of {ranks} processes" in page
    console = Console(file=io.StringIO(), width=120)
    console.print(build_time_table(read_time_breakdown(data)))
    assert "least" in console.file.getvalue()  # type: ignore[attr-defined]


def profile_run(*arguments: Any) -> Any:
    """Run a config under the profiler."""
    return fit_run(*arguments, profile=True)


def test_the_command_passes_profile_to_its_processes(tmp_path: Path) -> None:
    write_config(tmp_path)
    command = ("train", "run.yaml", "--nproc", "2", "--profile")
    code, said = start(*command, folder=tmp_path, python=warm.interpreter()).ended()
    assert code == 0, said
    assert read(tmp_path / "run", 2)["steps"] == [4, 5, 6]
    assert said.count("where the time goes") == 1
    assert "profiler_start" not in said  # torch's own words


def test_a_damaged_profile_does_not_stop_the_report(tmp_path: Path) -> None:
    trainer_of(tiny_config(tmp_path, "loop.steps=2")).fit()
    for content in ("{", "[]", '{"steps": [4], "ranks": [{"seconds": "NaN"}]}', '{"steps": [4], "ranks": []}'):
        (tmp_path / "run" / PROFILE).write_text(content)
        page = write_report(tmp_path / "run").read_text()
        assert f"{PROFILE} could not be read" in page and 'id="times"' not in page
