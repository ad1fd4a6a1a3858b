"""`loop.on_bad_loss`: a step whose loss is bad leaves no trace, with the same decision on all ranks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.config.run_folder import METRICS
from cornstarch.engine.bad_steps import FILE, MOST, WARM_UP, WINDOW, is_spike
from cornstarch.errors import ConfigError
from cornstarch.metrics.metrics import read_metrics
from cornstarch.train import load_config
from cornstarch.trainer.trainer import Trainer
from tests.models import local_processors
from tests.parity.columns import COLUMNS
from tests.parity.pool import pool
from tests.parity.rows import ROWS
from tests.trainer import bad_loss_runs

BAD = 2  # the batch whose loss is bad
SAME = ("losses", "weights", "averages", "buffers", "draws")
"""What a run that left a batch out has in common with one whose data lacks it, to the bit."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    local_processors.tokenizer().save_pretrained(folder)
    return folder


def of(told: dict[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in SAME}


# ------------------------------------------------------------------------------------------------ several ranks


@pytest.mark.parametrize("column", ["ddp", "fsdp2", "zero1", "tp", "pp"])
def test_a_bad_batch_leaves_no_trace_on_any_rank(column: str, tmp_path: Path, tokenizer: str) -> None:
    options: dict[str, Any] = {"parallel": COLUMNS[column].parallel(ROWS["llm"])}
    loop = {"ema_decay": 0.9}
    without = pool().run(
        2, bad_loss_runs.train, "llm", str(tmp_path / "without"), tokenizer, {**options, "loop": loop}, (), (BAD,)
    )
    for how in ("skip", "rewind"):
        changed = {**options, "loop": {**loop, "on_bad_loss": how}, "checkpoint": {"every": 2}}
        found = pool().run(2, bad_loss_runs.train, "llm", str(tmp_path / how), tokenizer, changed, ("sample 9",))
        assert [of(one) for one in found] == [of(one) for one in without]
        [told] = found[0]["told"]
        assert (told["epoch"], told["batch"], told["step"], told["reason"]) == (0, BAD, 3, "The loss is nan")
        assert told["ranks"] == ([0, 1] if column == "tp" else [1]) and "sample 9" in told["samples"]
        events = [event["event"] for event in found[0]["events"]]
        assert events == (["left_out"] if how == "skip" else ["rewound", "left_out"])
        assert "on rank" in found[0]["events"][0]["text"] and "sample 9" in found[0]["events"][0]["samples"]


def test_a_gradient_that_is_not_finite_is_found_without_clipping(tmp_path: Path, tokenizer: str) -> None:
    options = {"parallel": COLUMNS["ddp"].parallel(ROWS["llm"]), "optimizer": {"learning_rate": 1e-3, "clip": None}}
    without = pool().run(2, bad_loss_runs.train, "llm", str(tmp_path / "a"), tokenizer, options, (), (BAD,))
    skipping = {**options, "loop": {"on_bad_loss": "skip"}}
    found = pool().run(
        2, bad_loss_runs.train, "llm", str(tmp_path / "b"), tokenizer, skipping, ("sample 9",), (), 8, 6, None, True
    )
    assert [of(one) for one in found] == [of(one) for one in without]
    assert found[0]["told"][0]["reason"] == "The norm of the gradient is nan" and found[0]["told"][0]["ranks"] == []
    assert found[0]["told"][0]["samples"] == [f"sample {n}" for n in (8, 10, 9, 11)]  # of all ranks


def test_too_many_bad_batches_end_the_run_on_all_ranks(tmp_path: Path, tokenizer: str) -> None:
    options = {"parallel": COLUMNS["ddp"].parallel(ROWS["llm"]), "loop": {"on_bad_loss": "skip"}}
    spoiled = [f"sample {number}" for number in (1, 5, 13, 17)]  # of batches 0, 1, 3 and 4
    found = pool().run(2, bad_loss_runs.train, "llm", str(tmp_path / "run"), tokenizer, options, spoiled)
    assert found[0] == found[1]
    assert found[0].startswith("The loss is nan in step 2 on rank 1.")
    assert f"{MOST} steps within 100 were left out before it (loop.on_bad_loss = skip)" in found[0]
    assert "sample 17" in found[0] and "Try: a smaller optimizer.learning_rate" in found[0]


@pytest.mark.parametrize("how", ["skip", "rewind"])
def test_a_later_start_leaves_the_batch_out_as_well(how: str, tmp_path: Path) -> None:
    options = {"loop": {"on_bad_loss": how, "ema_decay": 0.9}, "checkpoint": {"every": 2}}
    whole = bad_loss_runs.train("mlp", str(tmp_path / "whole"), "", options, ("sample 13",))
    assert isinstance(whole, dict)
    folder = str(tmp_path / "cut")
    bad_loss_runs.train("mlp", folder, "", options, ("sample 13",), kill_at=3)  # the bad batch came after step 3
    bad_loss_runs.train("mlp", folder, "", options, ("sample 13",), kill_at=5)  # left out; the newest is of step 4
    again = bad_loss_runs.train("mlp", folder, "", options)  # innocent now: the file says that it is left out
    assert isinstance(again, dict) and of(again)["weights"] == of(whole)["weights"]
    assert again["losses"] == {step: loss for step, loss in whole["losses"].items() if step > 4}
    assert again["position"]["losses"] == whole["position"]["losses"]


def test_a_run_that_begins_anew_or_reads_other_batches_forgets(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loop": {"on_bad_loss": "skip"}, "checkpoint": {"every": 2}}
    folder = tmp_path / "run"
    honest = bad_loss_runs.train("mlp", str(tmp_path / "honest"), "", options)
    bad_loss_runs.train("mlp", str(folder), "", options, ("sample 1",), kill_at=1)  # no checkpoint yet
    assert (folder / FILE).exists()
    anew = bad_loss_runs.train("mlp", str(folder), "", options)
    assert isinstance(anew, dict) and isinstance(honest, dict) and of(anew) == of(honest)
    assert not (folder / FILE).exists()


@pytest.mark.parametrize("content", ["[]", "{}", '{"order": 1, "batches": [1]}', "[" * 100_000])
def test_a_damaged_list_of_batches(content: str, tmp_path: Path) -> None:
    options = {"loop": {"on_bad_loss": "skip"}, "checkpoint": {"every": 2}}
    bad_loss_runs.train("mlp", str(tmp_path / "run"), "", options, kill_at=3)
    (tmp_path / "run" / FILE).write_text(content)
    said = bad_loss_runs.train("mlp", str(tmp_path / "run"), "", options)
    if content.startswith("[["):
        assert isinstance(said, str) and f"{FILE} is damaged" in said and len(said.splitlines()) == 1
    else:
        assert isinstance(said, dict) and max(said["losses"]) == 6


# ------------------------------------------------------------------------------------------------ one process


class Net(nn.Module):
    """A model whose forward pass changes buffers, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.layers(x) - y) ** 2).mean()}


def rows(count: int, without: range = range(0), **changed: float) -> list[dict[str, Any]]:
    """Return rows of numbers, without some; `y5=1e9` is the label of row 5."""
    drawn = torch.Generator().manual_seed(3)
    xs = torch.randn(count, 3, generator=drawn)
    found = [{"x": x, "y": torch.tensor([changed.get(f"y{n}", float(x.sum()))])} for n, x in enumerate(xs)]
    return [row for number, row in enumerate(found) if number not in without]


def fit(folder: Path, data: list[dict[str, Any]], **sections: Any) -> Trainer:
    loop = {"steps": 50, "batch_size": 4, "exchange_check": False, **sections.pop("loop", {})}
    base = {"data": {"shuffle": False, "workers": 0}, "logging": {"progress": "none", "samples": 0, "every": 5}}
    trainer = Trainer.from_objects(
        Net(), train_data=data, device="cpu", output=folder, loop=loop, **base, compile="off", **sections
    )
    trainer.fit()
    return trainer


def state_of(trainer: Trainer) -> dict[str, list[float]]:
    return {name: one.double().flatten().tolist() for name, one in trainer.model.state_dict().items()}


@pytest.mark.parametrize("how", ["skip", "rewind"])
@pytest.mark.parametrize("label", [math.nan, 1e6])  # a spike of a finite loss, too
def test_running_means_and_random_numbers_are_those_without_the_batch(how: str, label: float, tmp_path: Path) -> None:
    bad = 4 * (WARM_UP + 3)
    without = fit(tmp_path / "without", rows(400, range(bad, bad + 4)))
    found = fit(
        tmp_path / how, rows(400, **{f"y{bad + 1}": label}), loop={"on_bad_loss": how}, checkpoint={"every": 10}
    )
    assert state_of(found) == state_of(without)
    [event, *again] = [one for one in read_metrics(tmp_path / how / METRICS) if one.get("event") in _EVENTS]
    expected = "The loss is nan" if math.isnan(label) else "a spike (median of the last"
    assert expected in event["text"] and f"train_data:{bad + 2}" in event["samples"] and len(again) == (how == "rewind")
    assert [n["step"] for n in read_metrics(tmp_path / how / METRICS) if n["kind"] == "train"] == [1, *range(5, 51, 5)]
    assert f"train_data:{bad + 2}" in (tmp_path / how / "report.html").read_text()


_EVENTS = ("left_out", "rewound")


def test_a_loss_scale_that_overflows_is_no_bad_loss(tmp_path: Path) -> None:
    trainer = fit(tmp_path, rows(40), loop={"steps": 6, "on_bad_loss": "skip"}, precision="fp16")
    assert trainer.scaler is not None and trainer.scaler.value < 2**16  # it has left out steps, and scales less
    assert not (tmp_path / FILE).exists() and trainer.position.step == 6
    again = fit(tmp_path / "b", rows(40, y5=math.nan), loop={"steps": 6, "on_bad_loss": "skip"}, precision="fp16")
    expected = fit(tmp_path / "c", rows(40, range(4, 8)), loop={"steps": 6}, precision="fp16")
    assert state_of(again) == state_of(expected) and again.scaler is not None and expected.scaler is not None
    assert again.scaler.state_dict() == expected.scaler.state_dict()  # it did not count the step


# ------------------------------------------------------------------------------------------------ the rule


def test_a_spike_is_far_above_what_the_window_has_seen() -> None:
    drawn = random.Random(0)
    calm = [2 + drawn.gauss(0, 0.1) for _ in range(WINDOW)]
    assert is_spike(3.5, calm) and not is_spike(2.6, calm) and not is_spike(0.0, calm)
    assert not is_spike(1e9, calm[: WARM_UP - 1])
    assert is_spike(3.5, calm[:WARM_UP])
    # A window that has seen such losses takes the next for one of them.
    assert not is_spike(3.5, [*calm[:-1], 3.2])
    # Whatever the unit of the loss is, and with a loss that does not move at all.
    assert is_spike(3.5e-6, [one * 1e-6 for one in calm]) and is_spike(3.5e6, [one * 1e6 for one in calm])
    assert not is_spike(1.4, [1.0] * WINDOW) and is_spike(1.6, [1.0] * WINDOW)
    assert is_spike(-1.0, [-4.0] * WINDOW)  # losses may be negative


@pytest.mark.parametrize("seed", range(5))
def test_losses_of_training_are_no_spikes(seed: int) -> None:
    """20,000 losses that fall, with noise of heavy tails, as those of small batches are."""
    drawn = random.Random(seed)
    window: list[float] = []
    for step in range(4000):
        loss = (0.05 + 4 * math.exp(-step / 600)) * math.exp(drawn.gauss(0, 0.25))
        assert not is_spike(loss, window), (step, loss)
        window = [*window, loss][-WINDOW:]


# ------------------------------------------------------------------------------------------------ what is refused


def refusals() -> Iterator[Any]:
    for kind in ("local_sgd", "diloco", "async", "gossip"):
        yield {"parallel": {"data": {"kind": kind}}}, f"`parallel.data.kind` = {kind}"
    compressed = {"data": {"kind": "ddp", "compression": {"kind": "powersgd"}}}
    yield {"parallel": compressed}, "`parallel.data.compression.kind` = powersgd"
    yield {"loop": {"on_bad_loss": "rewind"}}, "without `checkpoint.every` there is none"


@pytest.mark.parametrize(("sections", "said"), list(refusals()))
def test_what_cannot_be_the_same_on_all_ranks_is_refused(sections: dict[str, Any], said: str) -> None:
    base = {"model": {"given": "Net"}, "data": {"train": "x.json"}, "loop": {"on_bad_loss": "skip"}, **sections}
    with pytest.raises(ConfigError) as error:
        load_config(None, base=base)
    assert said in str(error.value) and "`loop.on_bad_loss` = " in str(error.value)


def test_stopping_needs_nothing_of_it(tmp_path: Path) -> None:
    trainer = fit(tmp_path, rows(40), loop={"steps": 3})
    assert trainer.bad_steps is None and trainer.position.losses == () and not (tmp_path / FILE).exists()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
