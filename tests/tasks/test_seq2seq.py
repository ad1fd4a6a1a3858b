"""Text to text: batches, the loss of the models themselves, scores, answers, folders."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartForConditionalGeneration, T5ForConditionalGeneration

from cornstarch.config import RunConfig
from cornstarch.data.formats import open_sources
from cornstarch.data.sample import Sample, SampleError, SampleTooLongError
from cornstarch.errors import ConfigError
from cornstarch.tasks.text import Seq2SeqTask, build_seq2seq_task
from tests.data.small_data import write_rows
from tests.tasks.small_tasks import (
    BART,
    BERT,
    T5,
    batches,
    check_folder,
    check_measures_add_up,
    check_microbatches,
    disturb,
    run_config,
    tokenizer_folder,
)

ROWS = [
    {"source": "one two three", "target": "three two one"},
    {"source": "look now", "target": "now"},
    {"source": "a cat and a dog or it", "target": "a loud sound is what it is"},
    {"source": "four", "target": "four four"},
    {"source": "five six", "target": "six five"},
]


def make_config(folder: Path, sizes: dict[str, Any], rows: Any = ROWS, **options: Any) -> RunConfig:
    path = write_rows(folder / "rows.jsonl", rows)
    return run_config(path, config=sizes, tokenizer=tokenizer_folder(folder), **options)


def build(folder: Path, sizes: dict[str, Any], **options: Any) -> tuple[Seq2SeqTask, RunConfig]:
    config = make_config(folder, sizes, **options)
    return build_seq2seq_task(config), config


@pytest.mark.parametrize(("sizes", "kind"), [(T5, T5ForConditionalGeneration), (BART, BartForConditionalGeneration)])
def test_the_loss_is_the_mean_over_the_targets_tokens(tmp_path: Path, sizes: dict[str, Any], kind: type) -> None:
    task, config = build(tmp_path, sizes)
    assert isinstance(task.model, kind)
    (batch,) = batches(task, config, 10)
    labels = batch.inputs["labels"]
    assert labels[1].tolist() == [1, 13, 2, *[-100] * 6]  # <s> now </s>
    assert batch.inputs["input_ids"][1].tolist() == [1, 12, 13, 2, *[0] * 5]
    assert batch.trained_tokens == int((labels != -100).sum()) == sum(len(r["target"].split()) + 2 for r in ROWS)
    assert batch.tokens == batch.trained_tokens + sum(len(r["source"].split()) + 2 for r in ROWS)
    output = task.model(**batch.inputs)
    counted = labels != -100
    sums = cross_entropy(output.logits[counted].double(), labels[counted], reduction="sum")
    torch.testing.assert_close(task.loss(batch.inputs), (sums / batch.trained_tokens).float())
    check_microbatches(task, config)


def test_losses_keep_no_cache_in_training_and_in_evaluation(tmp_path: Path) -> None:
    task, config = build(tmp_path, T5)
    (batch,) = batches(task, config, 10)
    asked: list[Any] = []
    task.model.register_forward_pre_hook(lambda *call: asked.append(call[2].get("use_cache")), with_kwargs=True)
    task.loss(batch.inputs)
    with torch.no_grad():
        task.measure(batch)
    assert asked == [False, False]


@pytest.mark.parametrize("sizes", [T5, BART])
def test_token_and_sample_accuracy(tmp_path: Path, sizes: dict[str, Any]) -> None:
    task, config = build(tmp_path, sizes)
    disturb(task.model)
    (batch,) = batches(task, config, 10)
    check_measures_add_up(task, config)
    with torch.no_grad():
        found = task.measure(batch).sums
        guesses = task.model(**batch.inputs).logits.argmax(-1)
    pairs = [
        [(g, w) for g, w in zip(*row, strict=True) if w != -100]
        for row in zip(guesses.tolist(), batch.inputs["labels"].tolist(), strict=True)
    ]
    assert found["token_accuracy"] == (sum(g == w for row in pairs for g, w in row), sum(map(len, pairs)))
    assert found["accuracy"] == (sum(all(g == w for g, w in row) for row in pairs), len(ROWS))


@pytest.mark.parametrize("sizes", [T5, BART])
def test_training_lowers_the_loss_and_answers_are_correct(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """After some steps on five rows the model writes their targets, without seeing them."""
    task, config = build(tmp_path, sizes)
    (batch,) = batches(task, config, 10)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        task.loss(batch.inputs).backward()
        optimizer.step()
    source = open_sources(config.data.train)
    samples = [source[index] for index in range(len(source))]
    task.model.eval()
    with torch.no_grad():
        assert task.measure(batch).means()["accuracy"] == 1.0
    assert task.answer(samples) == [task.truth(sample) for sample in samples] == [row["target"] for row in ROWS]
    blind = [Sample(sample.id, sample.messages[:1]) for sample in samples]
    assert task.answer(blind) == [row["target"] for row in ROWS]


@pytest.mark.parametrize("sizes", [T5, BART])
@pytest.mark.parametrize("train", ["full", "lora", "frozen"])
def test_the_folder_loads_with_transformers(tmp_path: Path, sizes: dict[str, Any], train: str) -> None:
    lora = {"lora": {"rank": 2}} if train == "lora" else {}
    task, config = build(tmp_path, sizes, train=train, **lora)
    flags = {name: p.requires_grad for name, p in task.model.named_parameters()}
    assert all(flag == {"full": True, "frozen": False}.get(train, "lora_" in name) for name, flag in flags.items())
    disturb(task.model)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if train == "lora" else {}
    check_folder(task, config, tmp_path / "out", **tolerance)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert not any("lora" in name for name in plain.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("one two")["input_ids"] == [1, 19, 20, 2]
    again = build_seq2seq_task(run_config(config.data.train[0].path, path=str(tmp_path / "out")))
    (batch,) = batches(task, config, 10)
    with torch.no_grad():
        torch.testing.assert_close(again.model.eval()(**batch.inputs).loss, task.model(**batch.inputs).loss)


def test_a_conversation_becomes_one_text(tmp_path: Path) -> None:
    turns = [("system", "look"), ("user", "a cat"), ("assistant", "it is"), ("user", "what now"), ("assistant", "dog")]
    rows = [{"messages": [{"role": role, "content": said} for role, said in turns[start:]]} for start in (0, 1, 3)]
    task, config = build(tmp_path, T5, rows=rows, system="the")
    source = open_sources(config.data.train)
    tokenizer = task.collator.tokenizer
    texts = [tokenizer.decode(task.collator.prepare(source[n]).inputs["input_ids"][1:-1]) for n in range(3)]
    unknown = "<unk>"  # user: and assistant: are no words of this tokenizer
    assert texts == [
        f"look {unknown} a cat {unknown} it is {unknown} what now",
        f"the {unknown} a cat {unknown} it is {unknown} what now",
        "the what now",
    ]
    assert [task.truth(source[n]) for n in range(3)] == ["dog"] * 3


def test_targets_always_end_with_the_end_token(tmp_path: Path) -> None:
    task, config = build(tmp_path, T5)
    task.collator.tokenizer.backend_tokenizer.post_processor = None
    source = open_sources(config.data.train)
    assert task.collator.prepare(source[1]).labels.tolist() == [13, 2]
    reader = task.collator
    reader.limit, reader.data = 3, reader.data.model_copy(update={"too_long": "cut"})
    assert reader.read_target("one two three four", "x").tolist() == [19, 20, 2]


@pytest.mark.parametrize("too_long", ["skip", "cut", "error"])
@pytest.mark.parametrize("field", ["source", "target"])
def test_long_samples_are_refused_skipped_or_cut(tmp_path: Path, too_long: str, field: str) -> None:
    rows = [{"source": "one", "target": "two", field: "one two three four five six"}]
    task, config = build(tmp_path, T5, rows=rows, max_length=5, too_long=too_long)
    sample = open_sources(config.data.train)[0]
    if too_long == "skip":
        with pytest.raises(SampleTooLongError, match="has 8 tokens, max_length is 5"):
            task.collator.prepare(sample)
    elif too_long == "error":
        with pytest.raises(ConfigError, match=r"rows.jsonl:1: has 8 tokens, max_length is 5.*data.too_long"):
            task.collator.prepare(sample)
    else:
        prepared = task.collator.prepare(sample)
        cut = prepared.inputs["input_ids"] if field == "source" else prepared.labels
        assert cut.tolist() == [1, 19, 20, 21, 2]


def test_position_embeddings_limit_the_length(tmp_path: Path) -> None:
    rows = [{"source": "cat " * 40, "target": "two"}]
    task, config = build(tmp_path, BART, rows=rows)
    with pytest.raises(SampleTooLongError, match="has 42 tokens, the model's limit is 32"):
        task.collator.prepare(open_sources(config.data.train)[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"source": " ", "target": "two"}, "`source` is empty"),
        ({"source": "one", "target": " "}, "`target` is empty"),
        ({"source": "one <image>", "target": "two", "image": "a.png"}, "has an image, but this model takes text only"),
        ({"messages": [{"role": "user", "content": "cat"}]}, "no answer to learn"),
        ({"text": "only this"}, "no answer to learn"),
    ],
)
def test_broken_rows_say_why(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    task, config = build(tmp_path, T5, rows=[row])
    with pytest.raises(SampleError, match=message):
        task.collator.prepare(open_sources(config.data.train)[0])


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        (BERT, {}, r"'bert' model has no encoder and decoder"),
        (T5, {"packing": True}, r"data.packing = True\n  A seq2seq-lm run has no use for it"),
        (T5, {"train_on": "everything"}, r"data.train_on = everything"),
        ({**T5, "vocab_size": 10}, {}, r"54 tokens beyond the model's embedding table of 10 rows"),
    ],
)
def test_invalid_configs_are_refused_with_the_reason(
    tmp_path: Path, sizes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        task, config = build(tmp_path, sizes, **options)
        batches(task, config, 10)


def test_the_collator_can_be_pickled(tmp_path: Path) -> None:
    task, config = build(tmp_path, T5)
    sent = pickle.loads(pickle.dumps(task.collator))
    sample = open_sources(config.data.train)[0]
    ours, theirs = task.collator.prepare(sample), sent.prepare(sample)
    assert torch.equal(ours.labels, theirs.labels) and torch.equal(ours.inputs["input_ids"], theirs.inputs["input_ids"])
