"""Steps are timed by marks on the device, whose own clock goes behind the process; nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cornstarch.metrics.metrics import StepClock, StepTimes, read_metrics
from tests.trainer.tiny import tiny_config, trainer_of


class Device:
    """A device that does what it is given one after the other, and a process beside it, with one clock in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        """Of the process."""
        self.busy_until = 0.0

    def mark(self) -> Mark:
        """Put a mark behind what was given."""
        return Mark(self, max(self.now, self.busy_until))

    def give(self, seconds: float, handing_over: float = 0.01) -> None:
        """Hand over some work."""
        self.busy_until = max(self.now, self.busy_until) + seconds
        self.now += handing_over


class Mark:
    def __init__(self, device: Device, at: float) -> None:
        self.device, self.at = device, at

    def query(self) -> bool:
        """Say whether the device has passed it."""
        return self.device.now >= self.at

    def elapsed_time(self, end_event: Mark) -> float:
        """Return milliseconds; a mark that was not passed may not be asked, as with CUDA."""
        assert self.query() and end_event.query()
        return 1000 * (end_event.at - self.at)


def train(clock: StepClock, device: Device, steps: int, computes: float, waits: float) -> None:
    for _ in range(steps):
        device.now += waits  # for the batch
        clock.start_step()
        device.give(computes)
        clock.end_step(waits)


@pytest.mark.parametrize(
    ("computes", "waits", "step_time", "waited"),
    [
        (1.0, 0.0, 1.0, 0.0),
        (1.0, 0.5, 1.0, 0.0),  # the process waits for data while the device still computes
        (1.0, 3.0, 3.01, 2.01),  # the device waits, too: from its end to the next batch
    ],
)
def test_step_time_and_data_wait_of_a_device_that_lags_behind_its_process(
    computes: float, waits: float, step_time: float, waited: float
) -> None:
    device = Device()
    clock = StepClock(device.mark)
    train(clock, device, 1, computes, waits)  # the first has nothing before it
    device.now = max(device.now, device.busy_until)
    first = clock.read()
    assert first is not None and (first.steps, first.waited) == (1, waits)
    assert first.seconds == pytest.approx(computes + waits)
    device.now = device.busy_until
    train(clock, device, 10, computes, waits)
    device.now = max(device.now, device.busy_until)  # the loss of the last is read
    found = clock.read()
    assert found is not None and found.steps == 10
    assert found.seconds / 10 == pytest.approx(step_time, rel=0.06)
    assert found.waited / 10 == pytest.approx(waited, abs=0.11 * max(waits, 0.1))
    assert clock.read() == StepTimes(0, 0.0, 0.0)


def test_unfinished_steps_are_reported_later() -> None:
    device = Device()
    clock = StepClock(device.mark)
    train(clock, device, 3, 1.0, 0.0)
    assert clock.read() == StepTimes(0, 0.0, 0.0)
    device.now = 2.5
    found = clock.read()
    assert found is not None and (found.steps, found.seconds) == (2, pytest.approx(2.0))
    device.now = 3.0
    last = clock.read()
    assert last is not None and (last.steps, last.seconds) == (1, pytest.approx(1.0))


def test_a_pause_does_not_count() -> None:
    device = Device()
    clock = StepClock(device.mark)
    train(clock, device, 1, 1.0, 0.0)
    device.give(50.0)  # an evaluation
    device.now = device.busy_until
    clock.pause()
    train(clock, device, 1, 1.0, 0.25)
    device.now = device.busy_until
    found = clock.read()
    assert found is not None and (found.steps, found.waited) == (2, 0.25)
    assert found.seconds == pytest.approx(2.25)


def test_events_of_finished_steps_are_released() -> None:
    device = Device()
    clock = StepClock(device.mark)
    train(clock, device, 10_000, 0.01, 0.0)
    assert len(clock._pending) <= 2


def test_a_cpu_has_no_device_times() -> None:
    clock = StepClock.for_device(torch.device("cpu"))
    clock.start_step()
    clock.end_step(1.0)
    clock.pause()
    assert clock.read() is None


def test_metrics_have_step_time_and_data_wait(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "logging.every=2")
    trainer_of(config).fit()
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 4, 6]
    for before, line in zip(lines, lines[1:], strict=False):
        steps = line["step"] - before["step"]
        assert line["step_time"] * steps == pytest.approx(line["seconds"] - before["seconds"], rel=1e-6)
        assert 0 <= line["data_wait"] < line["step_time"]


def test_a_run_logs_the_device_times(tmp_path: Path) -> None:
    """The run's own way of telling, with marks of a device that takes a second for each step."""
    trainer = trainer_of(tiny_config(tmp_path, "logging.every=3"))
    trainer.setup()
    device = Device()
    trainer.clock = trainer.logger.clock = StepClock(device.mark)
    step = trainer.step

    def takes_a_second(batch: object) -> object:
        device.busy_until, device.now = max(device.busy_until, device.now) + 1.0, device.now + 1.0
        return step(batch)  # type: ignore[arg-type]

    trainer.step = takes_a_second  # type: ignore[method-assign, assignment]
    trainer.fit()
    lines = [line for line in read_metrics(tmp_path / "run/metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 3, 6]
    assert [line["step_time"] for line in lines[1:]] == pytest.approx([1.0, 1.0])
    assert "Seconds per step" in (tmp_path / "run/report.html").read_text()
