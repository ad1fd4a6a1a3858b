"""Load balancing by cost, and the predicted sizes of samples against prepared ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornstarch.config.run_folder import RunFolder
from cornstarch.cost.flops import FlopCounter
from cornstarch.data import load_balancing as balancing
from cornstarch.data.collate import ChatCollator
from cornstarch.data.formats import JoinedSources, open_sources
from cornstarch.data.load_balancing import (
    COSTS,
    LoadBalancer,
    SampleSizer,
    build_balancer,
    describe_gain,
    measure_costs,
)
from cornstarch.data.loader import StepLoader, open_data
from cornstarch.data.sample import Media, Message, Sample, SampleError, SampleTooLongError
from cornstarch.data.sampler import EpochOrder
from cornstarch.errors import ConfigError
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import Plan
from cornstarch.train import load_config
from tests.data.small_data import data_config, mixed_rows, png, processor_for, tone, wav, write_rows
from tests.data.test_loader import assert_equal
from tests.trainer.tiny import tiny_config

COUNT = 30


class RecordingSource:
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


class BalancedData:
    """Thirty samples of many sizes, one of them broken."""

    def __init__(self, folder: Path, **options: Any) -> None:
        rows = mixed_rows(folder, COUNT)
        rows[4] = {"messages": [{"role": "user", "content": "<image>"}], "images": ["missing.png"]}
        self.data = data_config(write_rows(folder / "d.jsonl", rows), skip_limit=0.5, max_length=100, **options)
        processor, model = processor_for(vision="clip", audio="whisper")
        self.collator = ChatCollator(processor, self.data)
        sizer = SampleSizer(self.collator, FlopCounter(model).step)
        costs = measure_costs(sizer, open_sources(self.data.train), range(COUNT))
        self.balancer = LoadBalancer(costs, padded=not self.data.packing)

    def loader(self, balanced: bool = True, **options: Any) -> StepLoader:
        """The steps of one process."""
        source: Any = RecordingSource(open_sources(self.data.train))
        order = EpochOrder(source.lengths, [1.0], 1, True)
        balancer = self.balancer if balanced else None
        return StepLoader(source, order, self.collator, 8, balancer=balancer, epochs=2, **options)


def test_skipped_samples_cost_nothing(tmp_path: Path) -> None:
    costs = BalancedData(tmp_path).balancer.costs
    assert costs.shape == (3, COUNT)
    assert not costs[:, 4].any() and (np.delete(costs[2], 4) > 0).all()
    assert (costs[0] > 0).sum() == 15 and (costs[1] > 0).sum() == 7


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_balanced_step_has_the_same_samples(tmp_path: Path, packing: bool, ranks: int, accumulation: int) -> None:
    data = BalancedData(tmp_path, packing=packing)
    plain = list(data.loader(False, accumulation=accumulation))
    by_rank = [list(data.loader(rank=rank, ranks=ranks, accumulation=accumulation)) for rank in range(ranks)]
    for number, expected in enumerate(plain):
        found = [one[number] for one in by_rank]
        assert {(one.epoch, one.index) for one in found} == {(expected.epoch, expected.index)}
        ids = sorted(id for one in found for microbatch in one.microbatches for id in microbatch.sample_ids)
        assert ids == sorted(id for microbatch in expected.microbatches for id in microbatch.sample_ids)
        assert sum(one.trained_tokens for one in found) == expected.trained_tokens
        assert sum(len(one.skipped) for one in found) == len(expected.skipped)
        assert len({len(one.microbatches) for one in found}) == 1


def test_a_process_reads_its_own_samples_only(tmp_path: Path) -> None:
    data = BalancedData(tmp_path)
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
def test_resumed_batches_are_bit_equal(tmp_path: Path, workers: int) -> None:
    data = BalancedData(tmp_path, packing=True)
    options: dict[str, Any] = {"rank": 1, "ranks": 2, "accumulation": 2}
    whole = list(data.loader(**options))
    for done in (0, 1, len(whole) // 2, len(whole) - 1) if workers else range(len(whole)):
        start = (whole[done].epoch, whole[done].index)
        rest = list(data.loader(start=start, workers=workers, **options))
        assert len(rest) == len(whole) - done
        for found, expected in zip(rest, whole[done:], strict=True):
            assert_equal(found, expected)


def test_balancing_reduces_the_slowest_replica(tmp_path: Path) -> None:
    data = BalancedData(tmp_path, packing=True)
    before, after = data.balancer.gain([np.arange(COUNT)], 4, 1)
    assert 1 <= after < before and after < 1.2


# ------------------------------------------------------------------------------------------------ in a run


def balancer(folder: Path, ranks: int = 2, modules: Any = None, **data: Any) -> LoadBalancer | None:
    """What a run of the tiny model balances with."""
    config = tiny_config(folder, data={"balance": "cost", **data})
    processor, model = processor_for(vision="clip")
    (folder / "run").mkdir(exist_ok=True)
    return build_balancer(
        config,
        ChatCollator(processor, config.data),
        open_sources(config.data.train),
        FlopCounter(model).step,
        Layout.of(Plan.from_data({"modules": modules} if modules else {}), ranks),
        RunFolder(folder / "run"),
    )


def test_no_balancer_if_off_or_alone(tmp_path: Path) -> None:
    assert balancer(tmp_path, balance="off") is None
    assert balancer(tmp_path, ranks=1) is None


def test_costs_are_measured_once_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = balancer(tmp_path)
    assert first is not None and first.padded and (tmp_path / "run" / COSTS).is_file()

    def never(*_: Any) -> Any:
        raise AssertionError("weighed again")

    with monkeypatch.context() as patched:
        patched.setattr(balancing, "measure_costs", never)
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


def test_balanced_encoders_leave_only_the_language_model_to_balance(tmp_path: Path) -> None:
    both = balancer(tmp_path)
    lent = balancer(tmp_path, balance_encoders=True)
    assert both is not None and lent is not None
    assert np.array_equal(lent.costs, both.costs[1:]) and len(lent.costs) == 1


def test_gain_is_described(tmp_path: Path) -> None:
    found = balancer(tmp_path)
    assert found is not None
    config = tiny_config(tmp_path)
    line = describe_gain(found, open_data(config), 2)
    assert "the slowest replica has 1." in line and "first 7 steps" in line


def test_gain_of_packed_rows_is_described(tmp_path: Path) -> None:
    found = balancer(tmp_path, packing=True)
    assert found is not None
    config = tiny_config(tmp_path, data={"packing": True, "max_length": 40, "tokens_per_step": 160})
    data = open_data(config).plan_packing(ChatCollator(processor_for(vision="clip")[0], config.data))
    assert "the slowest replica has 1." in describe_gain(found, data, 2)


def test_balanced_rows_are_equally_many(tmp_path: Path) -> None:
    data = BalancedData(tmp_path, packing=True)
    rows = [np.array([2 * number, 2 * number + 1]) for number in range(7)]
    dealt = data.balancer.deal_rows(rows, 2, 2, 2)
    assert sorted(place for own in dealt for places in own for place in places.tolist()) == list(range(7))
    assert sorted(len(places) for own in dealt for places in own) == [1, 2, 2, 2]


def test_other_tasks_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, data={"balance": "cost"})
    source = open_sources(config.data.train)
    layout = Layout.of(Plan(), 2)
    with pytest.raises(ConfigError, match="data.balance = cost: only conversations and documents"):
        build_balancer(config, object(), source, lambda inputs: None, layout, RunFolder(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "gossip"])
def test_unsynchronized_replicas_are_refused(tmp_path: Path, kind: str) -> None:
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
def test_encoder_balancing_is_refused_where_impossible(tmp_path: Path, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"`data.balance_encoders` = true with .*{said}"):
        tiny_config(tmp_path, data={"balance_encoders": True}, **sections)


def test_encoder_balancing_works_with_context_parallelism(tmp_path: Path) -> None:
    modules = {"vision": {}, "language_model": {"cp": 2}}
    parallel = {"modules": modules, "ranks": "shared"}
    assert tiny_config(tmp_path, data={"balance_encoders": True}, parallel=parallel).data.balance_encoders
    with pytest.raises(ConfigError, match="lends what encoders read; `model` has none"):
        load_config(
            None,
            base={
                "model": {"language_model": {"path": "llama"}},
                "data": {"train": ["train.json"], "balance_encoders": True},
            },
        )


# ------------------------------------------------------------------------------------------------ sizes


def build_sizer(
    path: Path, vision: str = "clip", **options: Any
) -> tuple[SampleSizer, ChatCollator, FlopCounter, JoinedSources]:
    data = data_config(path, **options)
    processor, model = processor_for(vision=vision, audio="whisper")
    collator, counter = ChatCollator(processor, data), FlopCounter(model)
    return SampleSizer(collator, counter.step), collator, counter, open_sources(data.train)


def rows_of_all_sizes(folder: Path) -> Path:
    """Conversations, and images of many shapes."""
    rows = mixed_rows(folder, 12)
    for number, (width, height) in enumerate([(20, 20), (8, 40), (64, 16), (33, 31)]):
        (folder / f"size{number}.png").write_bytes(png(width, height))
        asked = "<image> look <image>" if number % 2 else "<image>"
        images = [f"size{number}.png"] * (1 + number % 2)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "a cat and a dog"}]
        rows.append({"images": images, "messages": turns})
    return write_rows(folder / "d.jsonl", rows)


@pytest.mark.parametrize("vision", ["clip", "qwen2_vl"])
def test_sizes_are_those_of_prepared_samples(tmp_path: Path, vision: str) -> None:
    sizer, collator, _, source = build_sizer(rows_of_all_sizes(tmp_path), vision)
    for number in range(len(source)):
        size, prepared = sizer(source[number]), collator.prepare(source[number])
        assert (size.tokens, size.trained) == (len(prepared.input_ids), prepared.trained_tokens)
        assert {name: count for name, count in size.items.items() if count} == {
            name: len(items) for name, items in prepared.items.items()
        }
        ids = collator.processor.modality_token_ids
        assert size.item_tokens == {name: int((prepared.input_ids == ids[name]).sum()) for name in size.items}


@pytest.mark.parametrize("vision", ["clip", "qwen2_vl"])
def test_work_is_what_the_counter_counts(tmp_path: Path, vision: str) -> None:
    sizer, collator, counter, source = build_sizer(rows_of_all_sizes(tmp_path), vision)
    for number in range(len(source)):
        size, prepared = sizer(source[number]), collator.prepare(source[number])
        if not prepared.items:
            continue  # alone, a text sends nothing back to encoders; beside others it does
        parts = counter.step(collator.join([prepared]).inputs).parts
        for name in ("vision", "audio"):
            expected = sum(parts[part].total for part in (f"{name} encoder", f"{name} projector") if part in parts)
            assert size.work[name] == pytest.approx(expected, rel=1e-6), name
        assert size.work["language_model"] == pytest.approx(parts["language model"].total, rel=0.05)


def record_requests(collator: ChatCollator) -> list[str]:
    """Return a list to which the encoder of each item that is processed will be added."""
    asked: list[str] = []
    ask = collator.item_inputs

    def record(name: str, items: list[Any]) -> Any:
        asked.append(name)
        return ask(name, items)

    collator.item_inputs = record  # type: ignore[method-assign]
    return asked


def test_each_item_size_is_measured_once(tmp_path: Path) -> None:
    sizer, collator, _, source = build_sizer(rows_of_all_sizes(tmp_path))
    asked = record_requests(collator)
    for _ in range(2):
        for number in range(len(source)):
            sizer(source[number])
    assert Counter(asked) == {"vision": 4, "audio": 3}  # 20 × 20 in most rows; sounds of three lengths


def sample_with_image(width: int, height: int) -> Sample:
    """A sample with an image of a size."""
    image = Media("image", np.zeros((height, width, 3), np.uint8))
    return Sample("an image", (Message("user", (image,)), Message("assistant", ("a cat",))))


def test_items_resized_to_one_size_are_not_measured_again(tmp_path: Path) -> None:
    sizer, collator, _, _ = build_sizer(rows_of_all_sizes(tmp_path))
    asked = record_requests(collator)
    found = {sizer(sample_with_image(20 + number, 50)).tokens for number in range(60)}
    assert len(asked) == 32 and len(found) == 1


def test_images_with_equally_many_patches_are_measured_once(tmp_path: Path) -> None:
    sizer, collator, _, _ = build_sizer(rows_of_all_sizes(tmp_path), "qwen2_vl")
    asked = record_requests(collator)
    sizes = [(width, height) for width in range(8, 60, 3) for height in range(8, 60, 3)]
    for width, height in sizes:
        sample = sample_with_image(width, height)
        assert sizer(sample).tokens == len(collator.prepare(sample).input_ids)
    assert 3 < len(asked) < 12 < len(sizes)


def test_nothing_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(png(60, 40)[:60])
    path = write_rows(tmp_path / "d.jsonl", [{"image": "cut.png", "text": "the cat"}])
    sizer, collator, _, source = build_sizer(path)
    assert sizer(source[0]).items["vision"] == 1
    with pytest.raises(SampleError):
        collator.prepare(source[0])


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"image": "missing.png", "text": "x"}, SampleError, "cannot be read"),
        ({"audio": "long.wav", "text": "x"}, SampleTooLongError, "its feature extractor takes 16000"),
        ({"messages": [{"role": "user", "content": "cat"}]}, SampleError, "no token to train on"),
    ],
)
def test_sizer_refuses_samples_that_will_be_skipped(
    tmp_path: Path, row: dict[str, Any], kind: type[Exception], message: str
) -> None:
    (tmp_path / "long.wav").write_bytes(wav(tone(2.0)))
    sizer, _, _, source = build_sizer(write_rows(tmp_path / "d.jsonl", [row]))
    with pytest.raises(kind, match=message):
        sizer(source[0])


def test_a_long_sample_costs_what_is_left_of_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"source": "cat " * 50, "target": "b"}, {"source": "cat", "target": "b"}])
    sizer, _, _, source = build_sizer(path, max_length=30, too_long="cut")
    long, short = sizer(source[0]), sizer(source[1])
    assert long.tokens > 50
    assert 1 < long.work["language_model"] / short.work["language_model"] < 30 / short.tokens * 1.5


def test_a_model_that_cannot_be_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"source": "cat", "target": "b"}])
    data = data_config(path)
    sizer = SampleSizer(ChatCollator(processor_for()[0], data), lambda inputs: None)
    with pytest.raises(ConfigError, match="cannot be weighed"):
        sizer(open_sources(data.train)[0])
