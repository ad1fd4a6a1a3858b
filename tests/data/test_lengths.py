"""Rows of few lengths: what is padded, and that padding changes nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cornstarch.data.collate import ChatCollator, CollatedBatch, RowLengths, few_lengths
from cornstarch.data.formats import open_sources
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.train import load_config
from tests.data.small_data import data_config, mixed_rows, processor_for, write_rows
from tests.trainer.tiny import tiny_config, trainer_of


@pytest.mark.parametrize("longest", [1, 64, 128, 500, 1024, 1500, 2048, 4096, 8192, 32768, 131072])
def test_few_lengths_are_multiples_of_128_up_to_the_maximum(longest: int) -> None:
    found = few_lengths(longest)
    assert len(found) <= 8 and list(found) == sorted(set(found)) and found[-1] == longest
    assert all(length % 128 == 0 for length in found[:-1])
    # What is longer than the shortest wastes less than half of itself.
    assert all(after <= max(before + 128, 1.5 * before) or after == longest for before, after in pairwise(found))


def test_row_lengths_equal_those_computed_by_hand() -> None:
    assert few_lengths(4096) == (512, 768, 1024, 1280, 1792, 2304, 3072, 4096)
    free = RowLengths(100)
    assert free.of_rows(37) == 37
    multiple = RowLengths(100, multiple=16)
    assert [multiple.of_rows(n) for n in (1, 16, 17, 97, 100)] == [16, 16, 32, 100, 100]
    few = RowLengths(100, lengths=(32, 64, 100))
    assert [few.of_rows(n) for n in (1, 32, 33, 65, 100)] == [32, 32, 64, 100, 100]


@pytest.mark.parametrize("wrong", [0, -8, "some", 1.5, True])
def test_wrong_lengths_are_refused(wrong: Any) -> None:
    base = {"model": {"given": "Net"}, "data": {"train": "x.json", "pad_to": wrong}}
    with pytest.raises(ConfigError, match="pad_to"):
        load_config(None, base=base)


def batches(folder: Path, packing: bool, **options: Any) -> tuple[nn.Module, ChatCollator, list[Any]]:
    processor, model = processor_for(vision="clip", audio="whisper")
    path = folder / "d.jsonl"
    if not path.exists():
        write_rows(path, mixed_rows(folder, 5))
    data = data_config(path, packing=packing, max_length=100, **options)
    collator = ChatCollator(processor, data)
    source = open_sources(data.train)
    return model, collator, [collator.prepare(source[index]) for index in range(len(source))]


def crop_padding(batch: CollatedBatch, collator: ChatCollator) -> CollatedBatch:
    """The rows of a packed batch as long as the fullest."""
    width = int(batch.inputs["attention_mask"].sum(1).max())
    shape = batch.inputs["input_ids"].shape
    is_row = {k: isinstance(v, Tensor) and v.shape[:2] == shape for k, v in batch.inputs.items()}
    inputs = {k: v[:, :width] if is_row[k] else v for k, v in batch.inputs.items() if k != "facts"}
    facts = BatchFacts.of(inputs, collator.processor.modality_token_ids)
    return replace(batch, inputs={**inputs, "facts": facts})


def gradients(model: nn.Module, batch: CollatedBatch) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss = model(**batch.inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("pad_to", [64, "compiled"])
def test_padding_changes_no_loss_no_gradient_and_no_count(tmp_path: Path, packing: bool, pad_to: int | str) -> None:
    model, collator, samples = batches(tmp_path, packing)
    plain = crop_padding(collator.join(samples), collator) if packing else collator.join(samples)
    if pad_to == "compiled":
        collator.expect_compiled()
    else:
        _, collator, _ = batches(tmp_path, packing, pad_to=pad_to)
    padded = collator.join(samples)
    assert padded.inputs["input_ids"].shape[1] == (100 if pad_to == "compiled" or packing else 64)
    assert padded.inputs["input_ids"].shape[1] > plain.inputs["input_ids"].shape[1]
    counts = ("sample_ids", "tokens", "trained_tokens", "items")
    assert all(getattr(plain, name) == getattr(padded, name) for name in counts)
    loss, wanted = gradients(model, plain)
    found_loss, found = gradients(model, padded)
    torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_config_without_compilation_pads_nothing(tmp_path: Path) -> None:
    _, collator, samples = batches(tmp_path, packing=False)
    longest = max(len(sample.input_ids) for sample in samples)
    assert collator.join(samples).inputs["input_ids"].shape[1] == longest


def test_ragged_batches_have_few_shapes(tmp_path: Path) -> None:
    """What a compiled model is compiled anew for."""
    _, collator, samples = batches(tmp_path, packing=False)
    collator.expect_compiled()
    shapes = {collator.join(samples[i : i + 1]).inputs["input_ids"].shape for i in range(len(samples))}
    assert len(shapes) == 1 < len({len(sample.input_ids) for sample in samples})


@pytest.mark.parametrize(("compile", "length"), [("layers", 32), ("auto", None), ("off", None)])
def test_a_run_that_compiles_has_rows_of_few_lengths(tmp_path: Path, compile: str, length: int | None) -> None:
    """32 is `max_length`: shorter than a block, there is no other length."""
    trainer = trainer_of(tiny_config(tmp_path, f'compile="{compile}"'))
    trainer.setup()
    batch = next(iter(trainer.build_loader())).microbatches[0].inputs
    longest = int(batch["attention_mask"].sum(-1).max())
    assert longest < 32
    assert batch["input_ids"].shape[1] == (length or longest)
