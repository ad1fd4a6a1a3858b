"""Labels for texts and images: which there are, the loss, scores, answers, folders, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    ViTForImageClassification,
    pipeline,
)

from cornstarch.config import RunConfig, WholeModelConfig
from cornstarch.data.formats import open_sources
from cornstarch.data.sample import Media, Sample, SampleError, SampleTooLongError
from cornstarch.errors import ConfigError
from cornstarch.tasks import classification
from cornstarch.tasks.classification import (
    ClassificationTask,
    build_image_classification_task,
    build_sequence_classification_task,
)
from cornstarch.tasks.task import TaskInputs
from tests.data.small_data import png, write_rows
from tests.models.local_processors import image
from tests.tasks.small_tasks import (
    BERT,
    LLAMA,
    ROBERTA,
    VIT,
    VIT_PROCESSOR,
    batches,
    check_folder,
    check_measures_add_up,
    check_microbatches,
    disturb,
    run_config,
    tokenizer_folder,
)

TEXTS = ["one two", "look", "a cat and a dog", "is it loud", "the sound", "this", "what now"]
KINDS = ["loud", "quiet", "none", "loud", "quiet", "quiet", "none"]
ROWS = [{"text": text, "label": kind} for text, kind in zip(TEXTS, KINDS, strict=True)]


def describe_run(folder: Path, rows: Any = ROWS, sizes: dict[str, Any] | None = BERT, **options: Any) -> RunConfig:
    path = write_rows(folder / "rows.jsonl", rows)
    evaluation = options.pop("evaluation", None)
    tests = [str(write_rows(folder / "tests.jsonl", evaluation))] if evaluation else []
    return run_config(path, tests, config=sizes, tokenizer=tokenizer_folder(folder), **options)


def build(folder: Path, rows: Any = ROWS, **options: Any) -> tuple[ClassificationTask, RunConfig]:
    config = describe_run(folder, rows, **options)
    return build_sequence_classification_task(config), config


def image_rows(folder: Path, labels: Any = KINDS) -> list[dict[str, Any]]:
    for number in range(len(labels)):
        (folder / f"{number}.png").write_bytes(png(20 + number, 18, number))
    return [{"image": f"{number}.png", "label": label} for number, label in enumerate(labels)]


def image_run(folder: Path, labels: Any = KINDS, **options: Any) -> RunConfig:
    options = {"config": VIT, "processor_config": VIT_PROCESSOR, **options}
    return run_config(write_rows(folder / "rows.jsonl", image_rows(folder, labels)), **options)


def samples_of(config: RunConfig) -> list[Sample]:
    source = open_sources(config.data.train)
    return [source[index] for index in range(len(source))]


def learn(task: ClassificationTask, config: RunConfig, steps: int = 60) -> None:
    (batch,) = batches(task, config, 100)
    optimizer = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(batch.inputs).backward()
        optimizer.step()
    task.model.eval()


# ------------------------------------------------------------------------------------------------ loss and scores


@pytest.mark.parametrize(
    ("sizes", "kind"), [(BERT, BertForSequenceClassification), (LLAMA, LlamaForSequenceClassification)]
)
def test_the_loss_of_texts_is_the_mean_over_samples(tmp_path: Path, sizes: dict[str, Any], kind: type) -> None:
    task, config = build(tmp_path, sizes=sizes)
    assert isinstance(task.model, kind)
    assert task.labels.names == ("loud", "none", "quiet")  # sorted
    (batch,) = batches(task, config, 10)
    assert batch.inputs["labels"].tolist() == [0, 2, 1, 0, 2, 2, 1]
    assert (batch.trained_tokens, batch.items) == (7, {})
    assert batch.tokens == sum(len(text.split()) + 2 for text in TEXTS)
    logits = task.model(**batch.inputs).logits
    expected = cross_entropy(logits.double(), batch.inputs["labels"])
    torch.testing.assert_close(task.loss(batch.inputs).double(), expected)
    check_microbatches(task, config)
    check_measures_add_up(task, config)


def test_the_loss_of_images_is_the_mean_over_samples(tmp_path: Path) -> None:
    config = image_run(tmp_path)
    task = build_image_classification_task(config)
    assert isinstance(task.model, ViTForImageClassification)
    (batch,) = batches(task, config, 10)
    assert batch.inputs["pixel_values"].shape == (7, 3, 16, 16)
    assert (batch.trained_tokens, batch.tokens, batch.items) == (7, 7, {"image": 7})
    own = task.collator.items.processor(images=[image(20 + n, 18, n) for n in range(7)], return_tensors="pt")
    torch.testing.assert_close(batch.inputs["pixel_values"], own["pixel_values"])
    expected = cross_entropy(task.model(own["pixel_values"]).logits.double(), torch.tensor([0, 2, 1, 0, 2, 2, 1]))
    torch.testing.assert_close(task.loss(batch.inputs).double(), expected)
    check_microbatches(task, config)
    check_measures_add_up(task, config)


def test_labels_with_a_fraction_make_a_regression(tmp_path: Path) -> None:
    values = [0.5, 1.0, -2.25, 3, 4.0, 0.0, 1.5]
    task, config = build(tmp_path, [{"text": text, "label": v} for text, v in zip(TEXTS, values, strict=True)])
    assert task.labels.is_regression and task.model.config.num_labels == 1
    (batch,) = batches(task, config, 10)
    assert batch.inputs["labels"].dtype == torch.float32
    logits = task.model(**batch.inputs).logits
    torch.testing.assert_close(task.loss(batch.inputs), mse_loss(logits[:, 0], torch.tensor(values)))
    check_microbatches(task, config)
    with torch.no_grad():
        assert set(task.measure(batch).sums) == {"loss"}
        (said,) = task.answer(samples_of(config)[:1])
        assert said == f"{task.model(**batches(task, config, 1)[0].inputs).logits.item():.4g}"
    assert task.truth(samples_of(config)[2]) == "-2.25"
    check_folder(task, config, tmp_path / "out")
    again = build_sequence_classification_task(run_config(config.data.train[0].path, path=str(tmp_path / "out")))
    assert again.labels.is_regression  # without reading the rows again


def test_accuracy_equals_the_fraction_of_correct_answers(tmp_path: Path) -> None:
    task, config = build(tmp_path)
    learn(task, config)
    (batch,) = batches(task, config, 10)
    with torch.no_grad():
        assert task.measure(batch).sums["accuracy"] == (7, 7)
    samples = samples_of(config)
    assert task.answer(samples) == [task.truth(sample) for sample in samples] == KINDS
    unlabelled = Sample("x", fields={"text": "look"})
    assert task.answer([unlabelled]) == ["quiet"] and task.truth(unlabelled) == ""
    assert task.truth(Sample("x", fields={"text": "look", "label": "odd"})) == "odd"


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_folder_of_texts_loads_with_transformers(tmp_path: Path, train: str) -> None:
    task, config = build(tmp_path, train=train)
    flags = {name: p.requires_grad for name, p in task.model.named_parameters()}
    if train == "lora":  # the head is new: there is nothing to adapt
        assert all(flag == ("lora_" in n or ".classifier." in n) for n, flag in flags.items())
        assert sum(".classifier." in name for name in flags) == 2
    learn(task, config, 150)
    disturb(task.model)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if train == "lora" else {}
    check_folder(task, config, tmp_path / "out", **tolerance)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert plain.config.id2label == {0: "loud", 1: "none", 2: "quiet"}
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    assert [one["label"] for one in classify(TEXTS)] == task.answer(samples_of(config))


@pytest.mark.parametrize("targets", ["all-linear", ["dense", "query"]])
def test_a_head_of_several_layers_is_trained_and_gets_no_adapters(tmp_path: Path, targets: Any) -> None:
    task, config = build(tmp_path, sizes=ROBERTA, train="lora", lora={"rank": 2, "targets": targets})
    head = {name: p.requires_grad for name, p in task.model.named_parameters() if ".classifier." in name}
    assert set(head.values()) == {True} and {name.split(".classifier.")[1] for name in head} == {
        "dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias",
    }  # fmt: skip
    check_microbatches(task, config)
    disturb(task.model)
    check_folder(task, config, tmp_path / "out", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_folder_of_images_loads_with_transformers(tmp_path: Path, train: str) -> None:
    config = image_run(tmp_path, train=train)
    task = build_image_classification_task(config)
    learn(task, config, 30)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if train == "lora" else {}
    check_folder(task, config, tmp_path / "out", **tolerance)
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "out").config.label2id["none"] == 1
    again = build_image_classification_task(run_config(config.data.train[0].path, path=str(tmp_path / "out")))
    assert again.answer(samples_of(config)) == task.answer(samples_of(config))


# ------------------------------------------------------------------------------------------------ which labels


@pytest.mark.parametrize(
    ("labels", "given", "names", "numbers"),
    [
        (["b", "a", "b"], None, ["a", "b"], [1, 0, 1]),
        ([10, 9, 10], None, ["9", "10"], [1, 0, 1]),
        ([True, False, True], None, ["false", "true"], [1, 0, 1]),
        (["b", "a", "b"], ["c", "b", "a"], ["c", "b", "a"], [1, 2, 1]),
        ([1, 0, 1], ["no", "yes"], ["no", "yes"], [1, 0, 1]),
    ],
)
def test_labels_are_numbered_in_order(
    tmp_path: Path, labels: Any, given: Any, names: list[str], numbers: list[int]
) -> None:
    rows = [{"text": "cat", "label": label} for label in labels]
    task, config = build(tmp_path, rows, labels=given)
    assert list(task.labels.names) == names
    assert task.model.config.label2id == {name: number for number, name in enumerate(names)}
    assert task.model.config.num_labels == len(names)
    (batch,) = batches(task, config, 10)
    assert batch.inputs["labels"].tolist() == numbers
    assert [task.truth(sample) for sample in samples_of(config)] == [names[number] for number in numbers]


def stored(folder: Path, **settings: Any) -> str:
    sizes = {key: value for key, value in BERT.items() if key != "model_type"}
    model = BertForSequenceClassification(BertConfig(**sizes, **settings))
    disturb(model)
    model.save_pretrained(folder / "bert")
    return str(folder / "bert")


def test_a_models_own_names_keep_their_numbers(tmp_path: Path) -> None:
    path = stored(tmp_path, id2label={0: "quiet", 1: "loud", 2: "none"})
    config = describe_run(tmp_path, ROWS[:2], sizes=None, path=path)
    task = build_sequence_classification_task(config)
    assert task.labels.names == ("quiet", "loud", "none")
    saved = BertForSequenceClassification.from_pretrained(path)
    assert torch.equal(task.model.classifier.weight, saved.classifier.weight)
    same = build_sequence_classification_task(
        describe_run(tmp_path, sizes=None, path=path, labels=["loud", "none", "quiet"])
    )
    assert same.labels.names == ("quiet", "loud", "none")


def test_a_head_without_names_keeps_its_numbers(tmp_path: Path) -> None:
    path = stored(tmp_path, num_labels=5)
    rows = [{"text": "cat", "label": 3}, {"text": "dog", "label": 1}]
    task, config = build(tmp_path, rows, sizes=None, path=path)
    assert batches(task, config, 2)[0].inputs["labels"].tolist() == [3, 1] and task.model.config.num_labels == 5
    named = [{"text": "cat", "label": "LABEL_3"}, {"text": "dog", "label": "LABEL_1"}]
    task, config = build(tmp_path, named, sizes=None, path=path)
    assert batches(task, config, 2)[0].inputs["labels"].tolist() == [3, 1] and task.model.config.num_labels == 5


def test_other_labels_get_a_new_head(tmp_path: Path) -> None:
    path = stored(tmp_path, num_labels=5)
    task, config = build(tmp_path, sizes=None, path=path)
    assert task.labels.names == ("loud", "none", "quiet") and task.model.classifier.weight.shape == (3, 16)
    saved = BertForSequenceClassification.from_pretrained(path)
    assert torch.equal(task.model.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)
    check_microbatches(task, config)


def test_a_body_without_a_head_is_trained_to_classify(tmp_path: Path) -> None:
    sizes = {key: value for key, value in BERT.items() if key != "model_type"}
    body = BertForMaskedLM(BertConfig(**sizes))
    body.save_pretrained(tmp_path / "body")
    task, _ = build(tmp_path, sizes=None, path=str(tmp_path / "body"))
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(task.model.bert.get_parameter(name), body.bert.get_parameter(name))


def test_weights_that_were_not_stored_are_trained_beside_adapters(tmp_path: Path) -> None:
    sizes = {key: value for key, value in BERT.items() if key != "model_type"}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path / "body")
    task, config = build(tmp_path, sizes=None, path=str(tmp_path / "body"), train="lora")
    trained = {name for name, p in task.model.named_parameters() if p.requires_grad and "lora_" not in name}
    start = "base_model.model."
    new = ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"]
    assert trained == {start + name for name in new}
    disturb(task.model)
    check_folder(task, config, tmp_path / "out", rtol=1e-4, atol=1e-5)


def test_open_rows_are_not_opened_again(tmp_path: Path) -> None:
    config = describe_run(tmp_path)
    source = open_sources(config.data.train)
    missing = config.data.model_copy(update={"train": [config.data.train[0].model_copy(update={"path": "gone"})]})
    moved = config.model_copy(update={"data": missing})
    assert build_sequence_classification_task(moved, TaskInputs(train=source)).labels.names == ("loud", "none", "quiet")


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "cat"}, {"text": "dog"}], {}, "No row of the training data has a `label`"),
        ([{"text": "cat", "label": "a"}] * 3, {}, r"have the label 'a' \(rows.jsonl:1 is the first\)"),
        (ROWS, {"evaluation": [{"text": "x", "label": "odd"}]}, r"tests.jsonl:1 of the evaluation data .* 'odd'"),
        ([*ROWS, {"text": "cat", "label": 0.5}], {}, r"numbers with a fraction as labels, and the word 'loud'"),
        (ROWS, {"sizes": {**BERT, "id2label": {0: "x", 1: "y"}}}, r"has the label 'loud', expected one of 'x', 'y'"),
        (ROWS, {"packing": True}, "data.packing = True"),
        (ROWS, {"sizes": VIT}, "knows no 'vit' model"),
    ],
)
def test_invalid_runs_are_refused_with_the_reason(
    tmp_path: Path, rows: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, rows, **options)


def test_too_many_labels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "MOST_LABELS", 5)
    rows = [{"text": "cat", "label": f"text {number}"} for number in range(9)]
    with pytest.raises(ConfigError, match=r"more than 5 different labels .*seq2seq-lm"):
        build(tmp_path, rows)
    numbers = [{"text": "cat", "label": number / 7} for number in range(9)]
    assert build(tmp_path, numbers)[0].labels.is_regression


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "cat", "label": "odd"}, "has the label 'odd', expected one of 'loud', 'none', 'quiet'"),
        ({"text": "cat", "label": 3}, "has the label 3, expected"),
        ({"text": "cat"}, r"has the fields \['text'\], expected a `label`"),
        ({"text": "cat", "label": None}, "expected a `label`"),
        ({"text": "cat", "label": ["loud"]}, "has a list as label"),
        ({"text": " ", "label": "loud"}, "`text` is empty"),
    ],
)
def test_broken_rows_say_why(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    task, _ = build(tmp_path)
    with pytest.raises(SampleError, match=message):
        task.collator.prepare(Sample("x", fields=fields))


@pytest.mark.parametrize("value", ["loud", True, float("nan")])
def test_a_regression_label_must_be_a_number(tmp_path: Path, value: Any) -> None:
    task, _ = build(tmp_path, [{"text": "cat", "label": 0.5}, {"text": "dog", "label": 1.5}])
    with pytest.raises(SampleError, match="expected a number"):
        task.collator.prepare(Sample("x", fields={"text": "cat", "label": value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "loud"}, "has 0 images, expected one"),
        ({"image": [Media("image", png()), Media("image", png())], "label": "loud"}, "has 2 images, expected one"),
        ({"image": Media("image", b"no picture"), "label": "loud"}, "no image that can be read"),
        ({"image": Media("image", png(100, 100)), "label": "loud"}, "more than max_pixels = 5000"),
    ],
)
def test_broken_images_say_why(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    task = build_image_classification_task(image_run(tmp_path, max_pixels=5000))
    with pytest.raises(SampleError, match=message):
        task.collator.prepare(Sample("x", fields=fields))


def test_errors_name_images_of_different_sizes(tmp_path: Path) -> None:
    task = build_image_classification_task(image_run(tmp_path, processor_config={**VIT_PROCESSOR, "do_resize": False}))
    prepared = [
        task.collator.prepare(Sample(f"x:{side}", fields={"image": Media("image", png(side, 16)), "label": "loud"}))
        for side in (16, 24)
    ]
    with pytest.raises(ConfigError, match=r"x:16 is \[3, 16, 16\] and that of x:24 \[3, 16, 24\]"):
        task.collator.join(prepared)


def test_a_processor_of_another_modality_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of which ViTForImageClassification takes"):
        build_image_classification_task(image_run(tmp_path, processor_config={"class_name": "WhisperFeatureExtractor"}))


@pytest.mark.parametrize("too_long", ["skip", "cut", "error"])
def test_long_texts_are_refused_skipped_or_cut(tmp_path: Path, too_long: str) -> None:
    task, _ = build(tmp_path, max_length=4, too_long=too_long)
    sample = Sample("x:1", fields={"text": "a cat and a dog", "label": "loud"})
    if too_long == "cut":
        assert task.collator.prepare(sample).inputs["input_ids"].tolist() == [1, 5, 7, 2]
    else:
        with pytest.raises(SampleTooLongError if too_long == "skip" else ConfigError, match="has 7 tokens"):
            task.collator.prepare(sample)


@pytest.mark.parametrize("labels", [["a"], ["a", "b", "a"], []])
def test_invalid_lists_of_labels_are_refused(labels: list[str]) -> None:
    with pytest.raises(ValueError, match="labels"):
        WholeModelConfig(path="x", labels=labels)


def test_collators_can_be_pickled(tmp_path: Path) -> None:
    texts, config = build(tmp_path)
    (folder := tmp_path / "images").mkdir()
    pictures = image_run(folder)
    for task, run in ((texts, config), (build_image_classification_task(pictures), pictures)):
        sent = pickle.loads(pickle.dumps(task.collator))
        ours = task.collator.join([task.collator.prepare(sample) for sample in samples_of(run)])
        theirs = sent.join([sent.prepare(sample) for sample in samples_of(run)])
        assert all(torch.equal(theirs.inputs[name], value) for name, value in ours.inputs.items())
