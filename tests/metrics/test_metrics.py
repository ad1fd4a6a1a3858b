"""Lines of metrics are whole or not there, come back as they were, and say how fast it went."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import MetricsFile, Throughput, parse_line, read_metrics

ROOT = Path(__file__).resolve().parents[2]


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def write(path: Path, *records: dict[str, Any]) -> None:
    with MetricsFile(path) as file:
        for record in records:
            file.append(record)


RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"step": 1, "loss": 0.5, "grad_norm": None}, {"step": 1, "loss": 0.5, "grad_norm": None}),
    "nested": ({"items": {"vision": 3.5}, "list": [1, 2]}, {"items": {"vision": 3.5}, "list": [1, 2]}),
    "infinite": ({"a": math.inf, "b": {"c": [-math.inf]}}, {"a": math.inf, "b": {"c": [-math.inf]}}),
    "numpy": ({"a": np.float32(0.5), "b": np.int64(3)}, {"a": 0.5, "b": 3}),
    "numpy, infinite": ({"a": np.float32("inf"), "b": np.int64(3)}, {"a": math.inf, "b": 3}),
    "text": ({"text": "é\n\u2028 \ud800", "n": "NaN-like"}, {"text": "é\n\u2028 ?", "n": "NaN-like"}),
    "a text that is a number's name": ({"text": "NaN", "loss": math.inf}, {"text": "NaN", "loss": math.inf}),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_read_as_written(tmp_path: Path, name: str) -> None:
    record, expected = RECORDS[name]
    write(tmp_path / "m.jsonl", record, {"step": 2})
    assert read_metrics(tmp_path / "m.jsonl") == [expected, {"step": 2}]
    lines = (tmp_path / "m.jsonl").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3
    json.loads(lines[0], parse_constant=no_constants)  # strict JSON: other programs read it as well


def test_nan_is_read_as_nan(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", {"loss": math.nan, "sources": {"a": {"loss": math.nan}}})
    (record,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(record["loss"]) and math.isnan(record["sources"]["a"]["loss"])


def test_nan_literals_of_python_are_read() -> None:
    assert parse_line(b'{"a": Infinity}') == {"a": math.inf}


def test_a_line_is_visible_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append({"step": 1})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}]
    file.close()
    file.close()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b'{"step": 1}\n{"st', [1]),
        (b'{"step": 1}\n{"step": 2}', [1, 2]),
        (b'{"step": 1}\n[1]\n\xff\n\0\0\0\n\n{"step": 2}\n', [1, 2]),
        (b"[" * 100_000 + b"\n", []),
    ],
)
def test_unfinished_lines_are_dropped(tmp_path: Path, content: bytes, expected: list[int]) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    assert [record["step"] for record in read_metrics(path)] == expected
    write(path, {"step": 9})  # a run that goes on: its first line is not glued to what was left
    assert [record["step"] for record in read_metrics(path)] == [*expected, 9]


def test_rewind_drops_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    lines = [{"kind": kind, "step": step} for step in range(1, 6) for kind in ("train", "evaluation")]
    write(path, *lines)
    with open(path, "a") as torn:
        torn.write('{"step": 3, "lo')
    with MetricsFile(path) as file:
        file.rewind(3)
        assert read_metrics(path) == lines[:6]
        file.append({"kind": "train", "step": 4})
        file.rewind(4)
    assert read_metrics(path) == [*lines[:6], {"kind": "train", "step": 4}]
    assert [found.name for found in tmp_path.iterdir()] == ["m.jsonl"]


def test_rewind_leaves_the_file_alone_if_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1})
    before = path.stat().st_ino
    with MetricsFile(path) as file:
        file.rewind(1)
    assert path.stat().st_ino == before


def test_many_lines_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    record = {"kind": "train", "loss": 1.25, "items_per_second": {"vision": 3.5}, "tokens": 12345, "time": 1.7e9}
    start = time.process_time()
    write(path, *({**record, "step": step} for step in range(20_000)))
    middle = time.process_time()
    assert len(read_metrics(path)) == 20_000
    assert middle - start < 20 and time.process_time() - middle < 10
    with MetricsFile(path) as file:
        file.rewind(10)
    assert len(read_metrics(path)) == 11


# ------------------------------------------------------------------------------------------------ full disks


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported() -> None:
    with MetricsFile("/dev/full") as file, pytest.raises(ConfigError, match=r"/dev/full cannot be written: No space"):
        file.append({"step": 1})


def test_a_line_that_does_not_fit_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    code = (
        "import resource; from cornstarch.metrics.metrics import MetricsFile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))\n"
        f"file = MetricsFile({str(path)!r})\n"
        "file.append({'step': 1})\n"
        "try: file.append({'text': 'x' * 60})\n"
        "except ValueError as error: print(error)\n"
        "file.append({'step': 2})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "cannot be written: File too large" in ran.stdout, ran.stderr
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("name", ["missing/m.jsonl", ""])
def test_an_unwritable_path_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written: (No such file|Is a directory)"):
        MetricsFile(tmp_path / name)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_metrics(tmp_path / "m.jsonl")


# ------------------------------------------------------------------------------------------------ speed


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_throughput_equals_hand_computed_rates() -> None:
    clock = Clock()
    speed = Throughput(clock)
    clock.now += 50  # the model is loaded
    speed.start(seconds=30.0, tokens=1000)
    clock.now += 2
    speed.add(samples=4, tokens=100, trained_tokens=10, loss=np.float32(20), items={"vision": 4}, waited=0.5)
    with speed.pause():
        clock.now += 1000
        with speed.pause():  # the best model is saved within an evaluation
            clock.now += 1000
            assert speed.seconds == 32
        clock.now += 1000
    clock.now += 2
    speed.add(samples=2, tokens=60, trained_tokens=30, loss=20.0, items={"vision": 1, "audio": 2})
    assert speed.line() == {
        "loss": 1.0,  # of (20 + 20) / (10 + 30): per token, not per step
        "tokens": 1160,
        "tokens_per_second": 40.0,
        "samples_per_second": 1.5,
        "items_per_second": {"vision": 1.25, "audio": 0.5},
        "seconds": 34.0,
        "step_time": 2.0,
        "data_wait": 0.25,  # per step
    }
    clock.now += 1
    speed.add(samples=1, tokens=5, trained_tokens=5, loss=10.0, items={})
    line = speed.line()
    assert (line["loss"], line["tokens"], line["tokens_per_second"], line["items_per_second"]) == (2.0, 1165, 5.0, {})
    assert line["data_wait"] == 0
    assert "flops_per_second" not in line  # nothing was counted
    clock.now += 2
    speed.add(samples=1, tokens=5, trained_tokens=5, loss=10.0, items={}, flops=8e12)
    assert speed.line()["flops_per_second"] == 4e12


def test_throughput_without_steps_is_zero() -> None:
    line = Throughput(Clock()).line()
    assert math.isnan(line["loss"]) and line["tokens_per_second"] == 0 and line["tokens"] == 0


@pytest.mark.parametrize("losses", [(math.nan, 1.0), (math.inf, -math.inf)])
def test_throughput_keeps_losses_that_are_not_finite(losses: tuple[float, float]) -> None:
    speed = Throughput(Clock())
    for loss in losses:
        speed.add(1, 1, 1, loss, {})
    assert math.isnan(speed.line()["loss"])


def test_an_exception_ends_a_pause() -> None:
    clock = Clock()
    speed = Throughput(clock)
    with pytest.raises(KeyError), speed.pause():
        clock.now += 5
        raise KeyError
    clock.now += 1
    assert speed.seconds == 1


def test_counting_a_step_is_fast() -> None:
    speed = Throughput()
    start = time.process_time()
    for _ in range(10_000):
        speed.add(8, 1000, 500, 1.5, {"vision": 8, "audio": 1})
    assert (time.process_time() - start) / 10_000 < 20e-6


def test_metrics_need_no_torch() -> None:
    code = "import sys, cornstarch.metrics.metrics, cornstarch.metrics.progress; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "False", ran.stderr
