"""Samples dealt out by cost: each process reads its own, all together read all, and a run goes on where it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornstarch.compute.flops import FlopCounter
from cornstarch.errors import ConfigError
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import Plan
from cornstarch.train import load_config
from cornstarch.train.data import balancing
from cornstarch.train.data.balancing import COSTS, Balancer, balancer_of, told_gain, weighed
from cornstarch.train.data.collate import ChatCollator
from cornstarch.train.data.formats import open_sources
from cornstarch.train.data.loader import StepLoader
from cornstarch.train.data.order import EpochOrder
from cornstarch.train.data.sample import Sample
from cornstarch.train.data.sizes import SampleSizer
from cornstarch.train.runs import RunFolder
from tests.train.data.small_data import data_config, mixed_rows, processor_for, write_rows
from tests.train.data.test_loader import assert_equal
from tests.train.tiny import tiny_config

COUNT = 30


class Watched:
    """A source that remembers which samples were asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.read = inner, Counter[int]()

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, index: int) -> Sample:
        self.read[index] += 1
        return self.inner[index]


class Data:
    """Thirty samples of many sizes, one of them broken."""

    def __init__(self, folder: Path, **options: Any) -> None:
        rows = mixed_rows(folder, COUNT)
        rows[4] = {"messages": [{"role": "user", "content": "<image>"}], "images": ["missing.png"]}
        self.data = data_config(write_rows(folder / "d.jsonl", rows), skip_limit=0.5, max_length=100, **options)
        processor, model = processor_for(vision="clip", audio="whisper")
        self.collator = ChatCollator(processor, self.data)
        sizer = SampleSizer(self.collator, FlopCounter(model).step)
        costs = weighed(sizer, open_sources(self.data.train), range(COUNT))
        self.balancer = Balancer(costs, padded=not self.data.packing)

    def loader(self, balanced: bool = True, **options: Any) -> StepLoader:
        """The steps of one process."""
        source: Any = Watched(open_sources(self.data.train))
        order = EpochOrder(source.lengths, [1.0], 1, True)
        balancer = self.balancer if balanced else None
        return StepLoader(source, order, self.collator, 8, balancer=balancer, epochs=2, **options)


def test_what_is_left_out_costs_nothing(tmp_path: Path) -> None:
    costs = Data(tmp_path).balancer.costs
    assert costs.shape == (3, COUNT)
    assert not costs[:, 4].any() and (np.delete(costs[2], 4) > 0).all()
    assert (costs[0] > 0).sum() == 15 and (costs[1] > 0).sum() == 7


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_a_step_has_the_same_samples(tmp_path: Path, packing: bool, ranks: int, accumulation: int) -> None:
    data = Data(tmp_path, packing=packing)
    plain = list(data.loader(False, accumulation=accumulation))
    shares = [list(data.loader(rank=rank, ranks=ranks, accumulation=accumulation)) for rank in range(ranks)]
    for number, expected in enumerate(plain):
        found = [share[number] for share in shares]
        assert {(one.epoch, one.index) for one in found} == {(expected.epoch, expected.index)}
        ids = sorted(id for one in found for portion in one.portions for id in portion.sample_ids)
        assert ids == sorted(id for portion in expected.portions for id in portion.sample_ids)
        assert sum(one.trained_tokens for one in found) == expected.trained_tokens
        assert sum(len(one.skipped) for one in found) == len(expected.skipped)
        assert len({len(one.portions) for one in found}) == 1


def test_a_process_reads_its_own_samples_only(tmp_path: Path) -> None:
    data = Data(tmp_path)
    read = []
    for rank in range(4):
        loader = data.loader(rank=rank, ranks=4)
        for _ in loader:
            pass
        read.append(loader.source.read)  # type: ignore[attr-defined]
    stand_in = sum(counter[0] for counter in read) - 2  # a process without a sample reads the first one once
    assert sum(read, Counter()) == Counter(dict.fromkeys(range(COUNT), 2)) + Counter({0: stand_in})
    assert 0 <= stand_in <= 3


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_is_exact_everywhere(tmp_path: Path, workers: int) -> None:
    data = Data(tmp_path, packing=True)
    options: dict[str, Any] = {"rank": 1, "ranks": 2, "accumulation": 2}
    whole = list(data.loader(**options))
    for done in (0, 1, 4, 7) if workers else range(len(whole)):
        start = (whole[done].epoch, whole[done].index)
        rest = list(data.loader(start=start, workers=workers, **options))
        assert len(rest) == len(whole) - done
        for found, expected in zip(rest, whole[done:], strict=True):
            assert_equal(found, expected)


def test_steps_get_shorter(tmp_path: Path) -> None:
    data = Data(tmp_path, packing=True)
    before, after = data.balancer.gain([np.arange(COUNT)], 4, 1)
    assert 1 <= after < before and after < 1.2


# ------------------------------------------------------------------------------------------------ in a run


def balancer(folder: Path, ranks: int = 2, modules: Any = None, **data: Any) -> Balancer | None:
    """What a run of the tiny model balances with."""
    config = tiny_config(folder, data={"balance": "cost", **data})
    processor, model = processor_for(vision="clip")
    (folder / "run").mkdir(exist_ok=True)
    return balancer_of(
        config,
        ChatCollator(processor, config.data),
        open_sources(config.data.train),
        FlopCounter(model).step,
        Layout.of(Plan.from_data({"modules": modules} if modules else {}), ranks),
        RunFolder(folder / "run"),
    )


def test_off_or_alone(tmp_path: Path) -> None:
    assert balancer(tmp_path, balance="off") is None
    assert balancer(tmp_path, ranks=1) is None


def test_samples_are_weighed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = balancer(tmp_path)
    assert first is not None and first.padded and (tmp_path / "run" / COSTS).is_file()

    def never(*_: Any) -> Any:
        raise AssertionError("weighed again")

    with monkeypatch.context() as patched:
        patched.setattr(balancing, "weighed", never)
        again = balancer(tmp_path, packing=True)
        assert again is not None and not again.padded
        assert np.array_equal(again.costs, first.costs)
        with pytest.raises(AssertionError, match="weighed again"):
            balancer(tmp_path, max_length=16)  # other samples are left out
    (tmp_path / "run" / COSTS).write_bytes(b"damaged")
    again = balancer(tmp_path)
    assert again is not None and np.array_equal(again.costs, first.costs)


def test_work_on_more_ranks_takes_less_time(tmp_path: Path) -> None:
    shared = balancer(tmp_path, 2)
    apart = balancer(tmp_path, 6, {"vision": {}, "language_model": {"tp": 2}})
    assert shared is not None and apart is not None
    assert np.array_equal(apart.costs[0], shared.costs[0]) and np.allclose(apart.costs[1], shared.costs[1] / 2)


def test_encoders_that_lend_are_even_anyhow(tmp_path: Path) -> None:
    both = balancer(tmp_path)
    lent = balancer(tmp_path, split_images=True)
    assert both is not None and lent is not None
    assert np.array_equal(lent.costs, both.costs[1:]) and len(lent.costs) == 1


def test_the_gain_is_told(tmp_path: Path) -> None:
    found = balancer(tmp_path)
    assert found is not None
    config = tiny_config(tmp_path)
    order = EpochOrder([found.costs.shape[1]], [1.0], 0, True)
    line = told_gain(found, order, config, 2)
    assert "the slowest replica has 1." in line and "first 7 steps" in line


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, data={"balance": "cost"})
    source = open_sources(config.data.train)
    layout = Layout.of(Plan(), 2)
    with pytest.raises(ConfigError, match="data.balance = cost: only conversations and documents"):
        balancer_of(config, object(), source, lambda inputs: None, layout, RunFolder(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "gossip"])
def test_processes_that_train_by_themselves_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="`data.balance` = cost with `parallel.data.kind`"):
        tiny_config(tmp_path, data={"balance": "cost"}, parallel={"data": {"kind": kind}})
    assert tiny_config(tmp_path, data={"balance": False}).data.balance == "off"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": {"data": {"kind": "diloco"}}}, "`parallel.data.kind` = diloco"),
        ({"parallel": {"modules": {"vision": {}, "language_model": {"stages": 2}}}}, "or encoders on ranks of"),
        (
            {"parallel": {"modules": {"vision": {}, "language_model": {}}, "ranks": "own"}},
            "stages, or encoders on ranks",
        ),
        ({"parallel": {"modules": {"model": {"cp": 2}}}}, "cp > 1 for model"),
        ({"parallel": {"modules": {"vision": {"cp": 2}, "language_model": {"cp": 2}}}}, "cp > 1 for vision:"),
        ({"model": {"encoders": {"vision": {"train": "projector"}}}, "features": {"cache": True}}, "`features.cache`"),
    ],
)
def test_what_cannot_lend_is_refused(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"`data.split_images` = true with .*{said}"):
        tiny_config(tmp_path, data={"split_images": True}, **sections)


def test_lending_goes_with_tokens_that_are_cut(tmp_path: Path) -> None:
    modules = {"vision": {}, "language_model": {"cp": 2}}
    parallel = {"modules": modules, "ranks": "shared"}
    assert tiny_config(tmp_path, data={"split_images": True}, parallel=parallel).data.split_images
    with pytest.raises(ConfigError, match="lends what encoders read; `model` has none"):
        load_config(
            None,
            base={
                "model": {"language_model": {"path": "llama"}},
                "data": {"train": ["train.json"], "split_images": True},
            },
        )
