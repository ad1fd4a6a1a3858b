"""Hidden words: which are hidden, how, and that it is the same wherever and whenever it is drawn."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, BertForMaskedLM

from cornstarch.config import RunConfig
from cornstarch.data.formats import open_sources
from cornstarch.data.loader import StepLoader
from cornstarch.data.sample import Sample, SampleError, SampleTooLongError
from cornstarch.data.sampler import EpochOrder
from cornstarch.errors import ConfigError
from cornstarch.tasks.text import MaskedLMTask, build_masked_lm_task
from tests.data.small_data import write_rows
from tests.tasks.small_tasks import (
    BERT,
    ROBERTA,
    SPECIAL,
    T5,
    VOCABULARY,
    WORDS,
    batches,
    check_folder,
    check_measures_add_up,
    check_microbatches,
    disturb,
    run_config,
    tokenizer_folder,
)

ROWS = [{"text": " ".join(WORDS[start : start + 3 + start])} for start in range(9)]
MASK = SPECIAL.index("<mask>")


def build(
    folder: Path, sizes: dict[str, Any] = BERT, rows: Any = ROWS, **options: Any
) -> tuple[MaskedLMTask, RunConfig]:
    config = run_config(
        write_rows(folder / "rows.jsonl", rows), config=sizes, tokenizer=tokenizer_folder(folder), **options
    )
    return build_masked_lm_task(config), config


@pytest.mark.parametrize("sizes", [BERT, ROBERTA])
def test_the_loss_is_the_mean_over_hidden_tokens(tmp_path: Path, sizes: dict[str, Any]) -> None:
    task, config = build(tmp_path, sizes)
    (batch,) = batches(task, config, 20)
    labels = batch.inputs["labels"]
    counted = labels != -100
    assert batch.trained_tokens == int(counted.sum())
    assert bool(counted.any(dim=1).all())  # at least one in each sample
    assert (
        batch.tokens == sum(len(row["text"].split()) + 2 for row in ROWS) == int(batch.inputs["attention_mask"].sum())
    )
    logits = task.model(**batch.inputs).logits
    expected = cross_entropy(logits[counted].double(), labels[counted])
    torch.testing.assert_close(task.loss(batch.inputs).double(), expected)
    assert "token_type_ids" not in batch.inputs or batch.inputs["token_type_ids"].shape == labels.shape
    check_microbatches(task, config)


def test_accuracy_counts_hidden_tokens(tmp_path: Path) -> None:
    task, config = build(tmp_path)
    disturb(task.model)
    check_measures_add_up(task, config)
    (batch,) = batches(task, config, 20)
    with torch.no_grad():
        found = task.measure(batch)
        guesses = task.model(**batch.inputs).logits.argmax(-1)
    hidden = batch.inputs["labels"] != -100
    right = int((guesses[hidden] == batch.inputs["labels"][hidden]).sum())
    assert found.sums["accuracy"] == (right, int(hidden.sum()))
    assert task.answer([]) == [] and task.truth(Sample("x")) == ""


def test_fractions_of_masked_replaced_and_unchanged_tokens(tmp_path: Path) -> None:
    """15 %, of which 80 % are masked, 10 % another word and 10 % left; each within four standard deviations."""
    task, _ = build(tmp_path, {**BERT, "max_position_embeddings": 512})
    text = " ".join(np.random.default_rng(0).choice(WORDS, 400).tolist())
    shown, labels = [], []
    for number in range(50):
        prepared = task.collator.prepare(Sample(f"x:{number}", fields={"text": text}))
        shown.append(prepared.inputs["input_ids"])
        labels.append(prepared.labels)
    truth = torch.tensor(task.collator.tokenizer(text)["input_ids"])
    seen, wanted = torch.stack(shown), torch.stack(labels)
    hidden = wanted != -100
    assert torch.equal(torch.where(hidden, wanted, seen), truth.expand_as(seen))  # nothing else has changed
    assert not hidden[:, 0].any() and not hidden[:, -1].any()  # special tokens

    def near(share: float, expected: float, count: int) -> None:
        assert abs(share - expected) < 4 * (expected * (1 - expected) / count) ** 0.5, (share, expected)

    near(float(hidden[:, 1:-1].float().mean()), 0.15, hidden[:, 1:-1].numel())
    count = int(hidden.sum())
    masked, kept = seen[hidden] == MASK, seen[hidden] == wanted[hidden]
    near(float(masked.float().mean()), 0.8, count)
    others = seen[hidden][~masked & ~kept]
    near(len(others) / count, 0.1 * (1 - 1 / (VOCABULARY - len(SPECIAL))), count)
    assert int(others.min()) >= len(SPECIAL) and int(others.max()) < VOCABULARY
    assert len(others.unique()) > 40  # of 59


def test_at_least_one_token_is_hidden_and_never_a_special_one(tmp_path: Path) -> None:
    task, _ = build(tmp_path)
    for number in range(200):
        labels = task.collator.prepare(Sample(f"x:{number}", fields={"text": "cat nonsense"})).labels
        assert labels.tolist() == [-100, 7, -100, -100]  # <s> cat <unk> </s>


def test_masks_depend_on_seed_sample_and_epoch_alone(tmp_path: Path) -> None:
    task, config = build(tmp_path, seed=3)
    source = open_sources(config.data.train)
    sample = source[8]

    def drawn(sample: Sample, collator: Any = task.collator) -> list[list[int]]:
        prepared = collator.prepare(sample)
        return [prepared.inputs["input_ids"].tolist(), prepared.labels.tolist()]

    epochs = [drawn(Sample(sample.id, fields=sample.fields, epoch=epoch)) for epoch in range(6)]
    assert epochs[0] == drawn(sample)
    assert len({str(one) for one in epochs}) > 3
    torch.rand(3)
    np.random.rand(3)
    before = torch.get_rng_state()
    assert drawn(sample, pickle.loads(pickle.dumps(task.collator))) == epochs[0]
    assert torch.equal(torch.get_rng_state(), before)
    other = build_masked_lm_task(config.model_copy(update={"seed": 4}))
    assert any(drawn(source[n], other.collator) != drawn(source[n]) for n in range(len(source)))
    assert drawn(Sample("another id", fields=sample.fields)) != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_in_the_middle_of_an_epoch_is_exact(tmp_path: Path, workers: int) -> None:
    task, config = build(tmp_path)

    def steps(start: tuple[int, int], workers: int) -> list[Any]:
        source = open_sources(config.data.train)
        order = EpochOrder(source.lengths, [1.0], 1, True)
        return list(StepLoader(source, order, task.collator, 2, start=start, epochs=3, workers=workers))

    whole = steps((0, 0), 0)
    assert [batch.epoch for batch in whole] == [0] * 5 + [1] * 5 + [2] * 5
    rest = steps((1, 2), workers)
    assert len(rest) == 8
    for found, expected in zip(rest, whole[7:], strict=True):
        ours, theirs = found.microbatches[0].inputs, expected.microbatches[0].inputs
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    by_sample: dict[str, set[str]] = {}
    for batch in whole:
        for id, row in zip(
            batch.microbatches[0].sample_ids, batch.microbatches[0].inputs["labels"].tolist(), strict=True
        ):
            by_sample.setdefault(id, set()).add(str(row).rstrip("]").rstrip(", -10"))
    assert sum(len(kinds) > 1 for kinds in by_sample.values()) >= 5  # drawn anew in another epoch


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_folder_loads_with_transformers(tmp_path: Path, train: str) -> None:
    task, config = build(tmp_path, train=train)
    disturb(task.model)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if train == "lora" else {}
    loaded = check_folder(task, config, tmp_path / "out", **tolerance)
    assert isinstance(loaded, BertForMaskedLM)
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path / "out"), BertForMaskedLM)
    again = build_masked_lm_task(run_config(config.data.train[0].path, path=str(tmp_path / "out")))
    assert again.collator.tokenizer.mask_token_id == MASK


@pytest.mark.parametrize("too_long", ["skip", "cut", "error"])
@pytest.mark.parametrize(
    ("sizes", "most", "said"),
    [(BERT, 5, "max_length is 5"), (BERT, 100, "the model's limit is 32"), (ROBERTA, 100, "the model's limit is 33")],
)
def test_long_texts_are_refused_skipped_or_cut(
    tmp_path: Path, too_long: str, sizes: dict[str, Any], most: int, said: str
) -> None:
    task, _ = build(tmp_path, sizes, max_length=most, too_long=too_long)
    sample = Sample("x:1", fields={"text": "cat " * 40})
    if too_long == "cut":
        prepared = task.collator.prepare(sample)
        assert len(prepared.labels) == int(said.split()[-1])
        task.model(**task.collator.join([prepared]).inputs)
    else:
        error = SampleTooLongError if too_long == "skip" else ConfigError
        with pytest.raises(error, match=f"has 42 tokens, {said}"):
            task.collator.prepare(sample)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "  "}, "`text` is empty"),
        ({"text": 5}, "has a int as `text`"),
        ({"words": "cat"}, r"`text` is empty, it has \['words'\]"),
        ({"text": "nonsense"}, "no token that can be hidden"),
    ],
)
def test_broken_rows_say_why(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    task, _ = build(tmp_path)
    with pytest.raises(SampleError, match=message):
        task.collator.prepare(Sample("x", fields=fields))


def test_documents_made_in_python_are_accepted(tmp_path: Path) -> None:
    task, _ = build(tmp_path)
    assert len(task.collator.prepare(Sample("x", document=("a cat", " and a dog"))).labels) == 7


@pytest.mark.parametrize(
    ("sizes", "tokenizer", "options", "message"),
    [
        (BERT, {"mask_token": None}, {}, "the tokenizer has no mask token"),
        (T5, {}, {}, "AutoModelForMaskedLM of transformers knows no 't5' model"),
        (BERT, {}, {"system": "x"}, "data.system = x"),
    ],
)
def test_invalid_configs_are_refused_with_the_reason(
    tmp_path: Path, sizes: dict[str, Any], tokenizer: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    config = run_config(
        write_rows(tmp_path / "rows.jsonl", ROWS),
        config=sizes,
        tokenizer=tokenizer_folder(tmp_path, **tokenizer),
        **options,
    )
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        build_masked_lm_task(config)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.whole has no `path`: say where its tokenizer is"):
        build_masked_lm_task(run_config(write_rows(tmp_path / "rows.jsonl", ROWS), config=BERT))
