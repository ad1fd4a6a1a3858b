"""Any module: made by a named function or given, with rows stacked or collated by the user's own function."""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cornstarch import allow_code
from cornstarch.config import DataConfig, RunConfig
from cornstarch.data.formats import open_sources
from cornstarch.data.loader import StepLoader
from cornstarch.data.sample import Media, Sample, SampleError
from cornstarch.data.sampler import EpochOrder
from cornstarch.errors import ConfigError
from cornstarch.tasks.module import ModuleTask, build_factory_task, build_module_task
from tests.data.small_data import png, tone, wav, write_rows
from tests.models.local_processors import image
from tests.tasks import small_factory
from tests.tasks.small_tasks import check_folder, check_measures_add_up, check_microbatches

HERE = "tests.tasks.small_factory"
LABELS = [0, 2, 1, 0, 2]


def make_config(folder: Path, labels: Any = LABELS, **factory: Any) -> RunConfig:
    for number in range(len(labels)):
        (folder / f"{number}.png").write_bytes(png(10, 8, number))
    rows = [{"image": f"{number}.png", "label": label} for number, label in enumerate(labels)]
    factory = {"function": f"{HERE}:convolution", "loss": f"{HERE}:label_loss", **factory}
    data = {"train": str(write_rows(folder / "rows.jsonl", rows))}
    return RunConfig.model_validate({"model": {"factory": factory}, "data": data})


def collate_rows(task: ModuleTask, *rows: Mapping[str, Any]) -> dict[str, Any]:
    samples = [Sample(f"x:{number}", fields=dict(row)) for number, row in enumerate(rows)]
    return task.collator.join([task.collator.prepare(sample) for sample in samples]).inputs


@pytest.fixture
def plain() -> ModuleTask:
    return build_module_task(small_factory.convolution(), small_factory.label_loss)


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("function", ["convolution", "convolution_with_loss"])
def test_a_named_function_builds_the_module(tmp_path: Path, function: str) -> None:
    options = {"loss": None} if function.endswith("loss") else {}
    config = make_config(tmp_path, function=f"{HERE}:{function}", arguments={"classes": 4}, **options)
    task = build_factory_task(config)
    assert task.name == "module" and task.model[-1].out_features == 4
    check_microbatches(task, config)
    check_measures_add_up(task, config)
    source = open_sources(config.data.train)
    batch = task.collator.join([task.collator.prepare(source[n]) for n in range(len(source))])
    assert (batch.tokens, batch.trained_tokens, batch.items) == (5, 5, {"image": 5})
    pixels = torch.stack([torch.from_numpy(np.array(image(10, 8, n))).permute(2, 0, 1) / 255 for n in range(5)])
    torch.testing.assert_close(batch.inputs["image"], pixels)
    logits = task.model(pixels).detach()
    with torch.no_grad():
        means = task.measure(batch).means()
    assert means["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, torch.tensor(LABELS))), rel=1e-5)
    assert means["accuracy"] == pytest.approx(float((logits.argmax(-1) == torch.tensor(LABELS)).float().mean()))
    assert task.answer([source[0]]) == [] and task.truth(source[0]) == ""


def test_a_function_of_main_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.build = small_factory.convolution_with_loss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    allow_code("__main__")
    assert isinstance(
        build_factory_task(make_config(tmp_path, function="__main__:build", loss=None)).model, nn.Sequential
    )


def test_a_module_that_returns_its_loss() -> None:
    module = small_factory.tied()
    task = build_module_task(module)
    batch = collate_rows(task, {"x": [1.0, 2.0, 3.0, 4.0], "y": [0.5] * 4}, {"x": [0.0] * 4, "y": [1.0] * 4})
    assert batch["x"].dtype == torch.float32 and batch["x"].shape == (2, 4)
    torch.testing.assert_close(task.loss(batch), ((module.up(module.down(batch["x"])) - batch["y"]) ** 2).mean())


# ------------------------------------------------------------------------------------------------ stacking


def test_fields_become_tensors_or_lists(plain: ModuleTask) -> None:
    rows = [
        {"n": n, "f": n / 2, "flag": True, "table": [[1, 2], [3, n]], "text": f"text {n}", "names": ["a", "b"],
         "array": np.full((2, 3), n, np.float64), "tensor": torch.full((2,), n, dtype=torch.int16),
         "image": Media("image", png(6, 4, n)), "images": [Media("image", png(6, 4, n)), Media("image", png(6, 4, 9))],
         "picture": image(6, 4, n), "audio": Media("audio", wav(tone(0.01)))}
        for n in (1, 2)
    ]  # fmt: skip
    batch = collate_rows(plain, *rows)
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in batch.items() if isinstance(value, Tensor)}
    assert kinds == {
        "n": (torch.int64, (2,)),
        "f": (torch.float32, (2,)),
        "flag": (torch.int64, (2,)),
        "table": (torch.int64, (2, 2, 2)),
        "array": (torch.float32, (2, 2, 3)),
        "tensor": (torch.int16, (2, 2)),
        "image": (torch.float32, (2, 3, 4, 6)),
        "images": (torch.float32, (2, 2, 3, 4, 6)),
        "picture": (torch.float32, (2, 3, 4, 6)),
        "audio": (torch.float32, (2, 160)),
    }
    assert batch["text"] == ["text 1", "text 2"] and batch["names"] == [["a", "b"], ["a", "b"]]
    assert batch["table"][1].tolist() == [[1, 2], [3, 2]] and batch["f"].tolist() == [0.5, 1.0]
    assert float(batch["image"].min()) >= 0 and 0.9 < float(batch["image"].max()) <= 1
    assert torch.equal(batch["image"], batch["picture"])


def test_images_given_as_tensors_are_unchanged(plain: ModuleTask) -> None:
    made = [torch.rand(3, 4, 4), torch.rand(3, 4, 4)]
    batch = collate_rows(plain, *({"image": Media("image", one), "label": 1} for one in made))
    assert torch.equal(batch["image"], torch.stack(made))
    arrays = collate_rows(plain, *({"image": Media("image", one.numpy()), "label": 1} for one in made))
    assert torch.equal(arrays["image"], torch.stack(made))
    bytes_ = np.array(image(6, 4))
    (seen,) = collate_rows(plain, {"image": Media("image", bytes_)})["image"]
    torch.testing.assert_close(seen, torch.from_numpy(bytes_).permute(2, 0, 1) / 255)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"image": Media("image", png(6, 4))},
            {"image": Media("image", png(5, 4))},
            r"`image` is \[3, 4, 6\] in x:0 and \[3, 4, 5\] in x:1",
        ),
        ({"x": [1, 2]}, {"x": [1, 2, 3]}, r"`x` is \[2\] in x:0 and \[3\] in x:1.*`collate`"),
        ({"x": 1}, {"x": 1.5}, r"of int64 in x:0 and of float32 in x:1.*1.0 instead of 1"),
        ({"x": 1}, {"x": "one"}, r"Tensor in x:0 and str in x:1"),
        ({"x": 1}, {"x": 1, "y": 2}, r"Only one of x:0 and x:1 has \['y'\]"),
        ({"x": 1, "label": "cat"}, {}, r"`label` is 'cat': a word has no number"),
    ],
)
def test_errors_name_rows_that_cannot_be_stacked(
    plain: ModuleTask, first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        collate_rows(plain, first, second)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no fields"),
        ({"x": None}, "`x` is empty"),
        ({"x": [[1, 2], [3]]}, "`x` is a list that is no table of numbers"),
        ({"x": np.array(["a"], dtype=object)}, "`x` is an array of object"),
        ({"image": Media("image", b"?")}, "no image that can be read"),
        ({"audio": Media("audio", np.zeros(0, np.float32))}, "its length is zero"),
        ({"images": [Media("image", png(4, 4)), Media("image", png(5, 4))]}, r"sizes \[3, 4, 4\], \[3, 4, 5\]"),
    ],
)
def test_broken_rows_say_why(plain: ModuleTask, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        plain.collator.prepare(Sample("x", fields=fields))


# ------------------------------------------------------------------------------------------------ collate


def steps(config: RunConfig, task: ModuleTask, start: tuple[int, int] = (0, 0), workers: int = 0) -> list[Any]:
    source = open_sources(config.data.train)
    order = EpochOrder(source.lengths, [1.0], 1, True)
    return list(StepLoader(source, order, task.collator, 2, start=start, epochs=2, workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_draws_the_same_random_numbers_after_resuming(tmp_path: Path, workers: int) -> None:
    config = make_config(tmp_path, collate=f"{HERE}:with_noise")
    task = build_factory_task(config)
    assert pickle.loads(pickle.dumps(task.collator)).collate.name == f"{HERE}:with_noise"
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    whole = steps(config, task)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]
    rest = steps(config, task, start=(1, 1), workers=workers)
    assert len(rest) == 2
    for found, expected in zip(rest, whole[4:], strict=True):
        assert torch.equal(found.microbatches[0].inputs["image"], expected.microbatches[0].inputs["image"])
    images = {
        (batch.epoch, id): one
        for batch in whole
        for id, one in zip(batch.microbatches[0].sample_ids, batch.microbatches[0].inputs["image"], strict=True)
    }
    assert not any(torch.equal(images[0, f"rows.jsonl:{n}"], images[1, f"rows.jsonl:{n}"]) for n in range(1, 6))
    check_microbatches(build_factory_task(make_config(tmp_path)), config)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        ("raises", "small_factory:raises failed with x:0.*on purpose"),
        ("a_list", "small_factory:a_list returned a list"),
    ],
)
def test_errors_name_a_failing_collate_function(tmp_path: Path, collate: str, message: str) -> None:
    task = build_factory_task(make_config(tmp_path, collate=f"{HERE}:{collate}"))
    with pytest.raises(ConfigError, match=message):
        collate_rows(task, {"x": 1})


# ------------------------------------------------------------------------------------------------ wrong functions


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            {"function": "tests.no_such_module:build"},
            r"model.factory.function = tests.no_such_module:build\n .*No mod",
        ),
        ({"function": f"{HERE}:no_such"}, r"no attribute 'no_such'"),
        ({"function": f"{HERE}:NUMBER"}, r"It is a int, expected a function"),
        ({"function": f"{HERE}:raises"}, r"small_factory:raises\n  It failed: RuntimeError: on purpose"),
        ({"function": f"{HERE}:not_a_module"}, r"It returned str; expected a torch.nn.Module"),
        ({"arguments": {"colour": 1}}, r"It failed: TypeError.*colour"),
        ({"loss": f"{HERE}:no_such"}, r"model.factory.loss = .*no_such"),
        ({"function": f"{HERE}:convolution_with_loss"}, r"returns a loss as well"),
        ({"collate": f"{HERE}:no_such"}, r"model.factory.collate = .*no_such"),
    ],
)
def test_errors_name_unusable_functions(tmp_path: Path, factory: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_factory_task(make_config(tmp_path, **factory))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "raises",
            r"small_factory:raises failed: RuntimeError: on purpose\n  The batch has image: float32 \[1, 3, 4, 6\]",
        ),
        ("no_loss", "small_factory:no_loss gave nothing as loss"),
        ("several", r"small_factory:several gave float32 \[1, 3\] as loss"),
        ("detached", "small_factory:detached gave a loss that does not depend on any trained weight"),
    ],
)
def test_errors_name_a_loss_function_without_a_loss(tmp_path: Path, loss: str, message: str) -> None:
    task = build_factory_task(make_config(tmp_path, loss=f"{HERE}:{loss}"))
    with pytest.raises(ConfigError, match=message):
        task.loss(collate_rows(task, {"image": Media("image", png(6, 4)), "label": 0}))


def test_errors_name_a_measure_that_is_not_a_number(tmp_path: Path) -> None:
    task = build_factory_task(make_config(tmp_path, loss=f"{HERE}:odd_measure"))
    source = open_sources(make_config(tmp_path).data.train)
    batch = task.collator.join([task.collator.prepare(source[0])])
    with torch.no_grad(), pytest.raises(ConfigError, match="odd_measure gave .*note: a str"):
        task.measure(batch)


def test_a_module_without_a_loss_is_refused() -> None:
    task = build_module_task(nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match=r"(?s)Linear, called with the batch, failed: TypeError.*The batch has input: fl"
    ):
        task.loss({"input": torch.ones(1, 2), "y": torch.ones(1)})
    with pytest.raises(ConfigError, match="Linear, called with the batch, gave nothing as loss"):
        task.loss({"input": torch.ones(1, 2)})


def test_out_of_memory_is_not_blamed_on_the_loss_function() -> None:
    def loss(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        build_module_task(nn.Linear(2, 2), loss).loss({})


def test_values_that_are_not_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="The module is a str"):
        build_module_task("model")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss is a int, expected a function"):
        build_module_task(nn.Linear(1, 1), 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="data.packing = True"):
        build_module_task(nn.Linear(1, 1), data=DataConfig.model_validate({"train": "x", "packing": True}))


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("from_config", [True, False])
def test_an_exported_folder_has_the_weights(tmp_path: Path, from_config: bool) -> None:
    config = make_config(tmp_path)
    task = build_factory_task(config)
    if not from_config:
        task = build_module_task(task.model, small_factory.label_loss, data=config.data)
    loaded = check_folder(task, config, tmp_path / "out")
    for name, value in task.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded is not task.model
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"model.safetensors", *(["factory.json"] if from_config else [])}
    if from_config:
        assert json.loads((tmp_path / "out/factory.json").read_text())["function"] == f"{HERE}:convolution"
    with pytest.raises(ConfigError, match="out exists already"):
        task.save(tmp_path / "out")


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    task = build_module_task(small_factory.tied())
    task.save(tmp_path / "out")
    loaded: Any = task.load(tmp_path / "out")
    assert loaded.up.weight is loaded.down.weight
    assert torch.equal(loaded.up.weight, task.model.up.weight)


def test_a_failed_save_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = build_factory_task(make_config(tmp_path))

    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("cornstarch.tasks.module.save_model", full)
    before = set(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space"):
        task.save(tmp_path / "out")
    assert set(tmp_path.iterdir()) == before
