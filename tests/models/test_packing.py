"""The loss of packed samples is the sum of their own; every token is placed once, in a row with room."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch import ConfigError, ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.packing import first_fit_decreasing, pack
from tests import zoo
from tests.effort import counted
from tests.models.whole_models import FAMILIES, IMAGE

Sample = dict[str, Any]
IGNORED = -100


def naive_first_fit_decreasing(lengths: Sequence[int], limit: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[index] <= limit:
                row.append(index)
                break
        else:
            rows.append([index])
    return sorted(sorted(row) for row in rows)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(0, 40))
def test_rows_are_those_of_first_fit_decreasing(lengths: list[int], room: int) -> None:
    limit = max(lengths) + room
    assert first_fit_decreasing(lengths, limit) == naive_first_fit_decreasing(lengths, limit)


def text(length: int, number: int) -> Sample:
    """A sample whose tokens say whose they are."""
    ids = 1000 * (number + 1) + torch.arange(length)
    return {"input_ids": ids, "labels": ids + 500_000, "weights": ids + 7}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 40), st.booleans())
def test_every_token_lands_once_in_a_row_with_room(lengths: list[int], room: int, wide: bool) -> None:
    limit = max(lengths) + room
    samples = [text(length, number) for number, length in enumerate(lengths)]
    batch = pack(samples, limit, pad_token_id=9, pad_to=limit if wide else None, token_keys=["weights"])
    ids, documents, labels = batch["input_ids"], batch["documents"], batch["labels"]
    assert ids.shape[1] <= limit and (not wide or ids.shape[1] == limit)
    assert {tuple(batch[key].shape) for key in ("attention_mask", "documents", "labels", "weights")} == {
        tuple(ids.shape)
    }
    assert "position_ids" not in batch
    assert torch.equal(batch["attention_mask"], (documents > 0).long())
    padding = documents == 0
    assert (ids[padding] == 9).all() and (labels[padding] == IGNORED).all() and (batch["weights"][padding] == 0).all()
    assert torch.equal(batch["weights"][~padding], ids[~padding] + 7)
    found = []
    for row in range(len(ids)):
        numbers = documents[row][documents[row] > 0]
        assert torch.equal(documents[row, : len(numbers)], numbers)  # padding is on the right only
        assert torch.equal(numbers.unique_consecutive(), torch.arange(1, int(numbers.max()) + 1))
        for number in range(1, int(numbers.max()) + 1):
            place = documents[row] == number
            sample = samples[int(ids[row, place][0]) // 1000 - 1]
            assert torch.equal(ids[row, place], sample["input_ids"])  # whole, in order
            assert labels[row, place][0] == IGNORED
            assert torch.equal(labels[row, place][1:], sample["labels"][1:])
            found.append(int(ids[row, place][0]) // 1000 - 1)
    assert sorted(found) == list(range(len(samples)))


@pytest.mark.parametrize("longest", [1, 20, 1000])
def test_ten_thousand_samples_are_packed_quickly(longest: int) -> None:
    lengths = torch.randint(1, longest + 1, (10_000,), generator=zoo.generator(0)).tolist()
    rows, turns = counted(lambda: first_fit_decreasing(lengths, 1024))
    assert turns < 1000 * 10_000  # measured: up to 100 for each sample; to look at all rows would be thousands
    assert len(rows) <= 11 / 9 * sum(lengths) / 1024 + 2
    samples = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in lengths]
    batch, turns = counted(lambda: pack(samples, 1024))
    assert turns < 10_000 * 10_000  # measured: some 800
    assert int(batch["attention_mask"].sum()) == sum(lengths)


# ------------------------------------------------------------------- the loss and its gradients

LANGUAGE_MODELS = ("llama", "mistral", "gpt2", "gemma2", "llama4", "qwen3_moe")
LENGTHS = [13, 4, 9, 21, 2, 17]  # longer and shorter than windows and chunks of 8 tokens
LIMIT = 30


def count_trained(sample: Sample, placeholder: int | None = zoo.MODALITY_TOKEN) -> int:
    """Number of labels of one sample that the loss is the mean over."""
    labels = sample["labels"]
    return int(((labels != IGNORED) & (labels != placeholder))[1:].sum())


def total_loss(model: nn.Module, batch: Sample, count: int) -> Tensor:
    return model(**batch).loss * count


def alone(sample: Sample) -> Sample:
    """The sample as a batch of one; encoders' inputs have a first dimension of their own."""
    text_keys = ("input_ids", "labels", "attention_mask", "mm_token_type_ids")
    batch = {key: value[None] if key in text_keys else value for key, value in sample.items()}
    if "position_ids" in sample:
        batch["position_ids"] = sample["position_ids"].unsqueeze(-2)
    return batch


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_packed_equals_alone(
    packed: nn.Module, batch: Sample, reference: nn.Module, samples: list[Sample], placeholder: int | None
) -> None:
    """Compare the summed loss and every gradient, also whether there is one."""
    counts = [count_trained(sample, placeholder) for sample in samples]
    expected = sum(total_loss(reference, alone(s), n) for s, n in zip(samples, counts, strict=True) if n)
    expected.backward()
    found = total_loss(packed, batch, sum(counts))
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    ours, theirs = gradients(packed), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient is None) == (theirs[name] is None), name
        if gradient is not None:
            largest, error = float(theirs[name].abs().max()), float((gradient - theirs[name]).abs().max())
            assert error <= 2e-5 * max(largest, 1.0), f"{name}: off by {error:.1e}, its largest entry is {largest:.1e}"


def text_samples() -> list[Sample]:
    noise = zoo.generator(3)
    samples = []
    for length in LENGTHS:
        ids = torch.randint(3, zoo.VOCABULARY, (length,), generator=noise)
        labels = ids.masked_fill(torch.rand(length, generator=noise) < 0.2, IGNORED)
        samples.append({"input_ids": ids, "labels": labels})
    return samples


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_loss_of_packed_text_is_the_sum_of_its_samples(name: str) -> None:
    packed, reference = (MultimodalModel(language_model=zoo.LANGUAGE_MODELS[name].build()).train() for _ in range(2))
    samples = text_samples()
    batch = pack(samples, LIMIT)
    assert len(batch["input_ids"]) < len(samples)
    assert_packed_equals_alone(packed, batch, reference, samples, None)


def image_samples(lengths: Sequence[int], token: int = zoo.MODALITY_TOKEN) -> list[Sample]:
    """Text with no, one and two images, one of them first and one last in its sample."""
    clip, noise = zoo.ENCODERS["clip"], zoo.generator(4)
    samples = []
    for number, layout in enumerate(("tt*ttttt", "tttttt", "*tt*", "t*ttt*t", "ttt", "*t")):
        ids: list[int] = []
        for piece in layout:
            one = torch.randint(3, zoo.VOCABULARY, (1,), generator=noise).tolist()
            ids += [token] * lengths[0] if piece == "*" else one
        sample = {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}
        if "*" in layout:
            sample.update(clip.inputs(layout.count("*"), seed=10 + number))
        samples.append(sample)
    return samples


@pytest.mark.parametrize("attention", ["causal", "item", "modality"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_the_loss_of_packed_images_is_the_sum_of_their_samples(name: str, attention: Any) -> None:
    models = []
    for _ in range(2):
        encoder = ModalEncoderModule(zoo.ENCODERS["clip"].build(), attention=attention)
        torch.manual_seed(0)
        model = MultimodalModel({"vision": encoder}, zoo.LANGUAGE_MODELS[name].build()).train()
        model.set_modality_token_ids({"vision": zoo.MODALITY_TOKEN})
        models.append(model)
    samples = image_samples(zoo.ENCODERS["clip"].lengths)
    batch = pack(samples, LIMIT)
    assert len(batch["input_ids"]) < len(samples)
    assert_packed_equals_alone(models[0], batch, models[1], samples, zoo.MODALITY_TOKEN)


def test_encoders_inputs_come_in_the_order_of_their_tokens() -> None:
    """Also nested ones, and options that all samples share."""
    samples = []
    for number, length in enumerate([5, 20, 8, 12]):
        ids = torch.full((length,), number)
        mine = {"input_features": torch.full((number, 2), number), "attention_mask": torch.ones(number, 3)}
        audio = {"audio": mine} if number else {}
        pixels = {"pixel_values": torch.full((2, 3), number), "sizes": [number, -number]}
        samples.append({"input_ids": ids, **pixels, **audio, "interpolate": True})
    batch = pack(samples, 25)
    order = [int(ids[0]) for row, numbers in zip(batch["input_ids"], batch["documents"], strict=True)
             for ids in [row[numbers == n] for n in range(1, int(numbers.max()) + 1)]]  # fmt: skip
    assert sorted(order) == [0, 1, 2, 3]
    assert batch["pixel_values"][:, 0].tolist() == [number for number in order for _ in range(2)]
    assert batch["sizes"] == [value for number in order for value in (number, -number)]
    items = [number for number in order for _ in range(number)]
    assert batch["audio"]["input_features"][:, 0].tolist() == items
    assert batch["audio"]["attention_mask"].shape == (len(items), 3)
    assert batch["interpolate"] is True


def test_padding_inside_samples_is_left_out() -> None:
    samples = text_samples()
    padded = []
    for number, sample in enumerate(samples):
        pad = (number, 3)
        mask = nn.functional.pad(torch.ones_like(sample["input_ids"]), pad)
        padded.append({key: nn.functional.pad(value, pad, value=5) for key, value in sample.items()})
        padded[-1]["attention_mask"] = mask
    expected, found = pack(samples, LIMIT), pack(padded, LIMIT)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_lists_of_ids_are_samples_too() -> None:
    batch = pack([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}], 4)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7, IGNORED]]
    assert batch["documents"].tolist() == [[1, 1, 1, 2]]


# ----------------------------------------------------------------------------------------- mRoPE


def qwen_samples(whole: PreTrainedModel) -> list[Sample]:
    """Three samples of Qwen2-VL, with images of three sizes, and one of text."""
    torch.manual_seed(1)
    family = FAMILIES["qwen2-vl"]
    items = family.items()
    lengths = family.lengths(whole, items)
    grids = items["image_grid_thw"]
    patches = items["pixel_values"].split(grids.prod(-1).tolist())
    samples = []
    for number in range(4):
        ids = torch.randint(5, 80, (6 + number,)).tolist()
        extra = {}
        if number < 3:
            ids[2:2] = [93, *[IMAGE] * lengths[number], 94]
            extra = {"pixel_values": patches[number], "image_grid_thw": grids[number][None]}
        text = torch.tensor(ids)
        samples.append({"input_ids": text, "labels": text, "mm_token_type_ids": (text == IMAGE).int(), **extra})
    return samples


def rope_positions(whole: PreTrainedModel, sample: Sample) -> Tensor:
    """The positions [3, S] that the model itself gives a sample."""
    batch = alone(sample)
    if "image_grid_thw" not in sample:
        return torch.arange(len(sample["input_ids"])).expand(3, -1)
    keys = ("input_ids", "image_grid_thw", "mm_token_type_ids")
    return whole.model.get_rope_index(**{key: batch[key] for key in keys})[0][:, 0]


@pytest.mark.parametrize("given", ["by the samples", "by the model"])
def test_mrope_positions_start_anew_in_each_document(given: str) -> None:
    whole = FAMILIES["qwen2-vl"].build()
    samples = qwen_samples(whole)
    parts = MultimodalModel.from_multimodal(copy.deepcopy(whole))
    if given == "by the samples":
        placed = [{**sample, "position_ids": rope_positions(whole, sample)} for sample in samples]
        placed[3]["position_ids"] = placed[3]["position_ids"][0]  # text may have one axis
    else:
        placed = samples
    batch = pack(placed, 40)
    rows = len(batch["input_ids"])
    assert rows < len(samples)
    if given == "by the samples":
        assert batch["position_ids"].shape == (3, *batch["input_ids"].shape)
    # The original knows no placeholders that are not trained on: it predicts them like text.
    counts = [count_trained(sample, None) for sample in samples]
    losses = [total_loss(whole, alone(s), n) for s, n in zip(samples, counts, strict=True)]
    sum(losses).backward()
    found = total_loss(parts, batch, sum(counts))
    torch.testing.assert_close(found, sum(losses), rtol=1e-5, atol=1e-4)
    found.backward()
    ours, theirs = gradients(parts.whole()), gradients(whole)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient is None) == (theirs[name] is None), name
        if gradient is not None:
            error, largest = float((gradient - theirs[name]).abs().max()), float(theirs[name].abs().max())
            assert error <= 2e-5 * max(largest, 1.0), f"{name}: off by {error:.1e}, its largest entry is {largest:.1e}"


# -------------------------------------------------------------------------------------- mistakes


def ids(length: int, **more: Any) -> Sample:
    return {"input_ids": torch.ones(length, dtype=torch.long), **more}


MISTAKES: dict[str, tuple[list[Sample], dict[str, Any], list[str]]] = {
    "too long": ([ids(3), ids(9)], {}, ["Sample 1", "9 tokens", "max_length is 8", "1 of 2"]),
    "all too long": ([ids(9), ids(10)], {"too_long": "skip"}, ["Sample 0", "9 tokens", "2 of 2"]),
    "unknown choice": ([ids(3)], {"too_long": "cut"}, ["'cut'", "'skip'"]),
    "nothing to pack": ([], {}, ["no samples"]),
    "no ids": ([{"labels": [1]}], {}, ["Sample 0", "input_ids"]),
    "no tokens": ([ids(2), ids(0)], {}, ["Sample 1", "[0]"]),
    "all padding": ([ids(2, attention_mask=torch.zeros(2))], {}, ["Sample 0", "attention_mask"]),
    "with a batch dimension": ([{"input_ids": torch.ones(1, 3)}], {}, ["Sample 0", "[1, 3]", "batch dimension"]),
    "labels of another length": ([ids(3, labels=torch.ones(4))], {}, ["labels", "[4]", "[3]"]),
    "some without labels": ([ids(3, labels=torch.ones(3)), ids(2)], {}, ["1 of 2", "labels"]),
    "some without positions": ([ids(3, position_ids=torch.ones(3, 3)), ids(2)], {}, ["1 of 2", "position_ids"]),
    "positions of other axes": (
        [ids(3, position_ids=torch.ones(3, 3)), ids(2, position_ids=torch.ones(4, 2))],
        {},
        ["[3, 4] axes"],
    ),
    "packed already": ([ids(3, documents=torch.ones(3))], {}, ["documents"]),
    "images of two sizes": (
        [ids(3, pixel_values=torch.ones(1, 3, 8)), ids(2, pixel_values=torch.ones(2, 3, 4))],
        {},
        ["pixel_values", "[1, 3, 8]", "[2, 3, 4]", "sample 1"],
    ),
    "options that differ": ([ids(3, interpolate=True), ids(2, interpolate=False)], {}, ["interpolate", "True"]),
    "a mask in some clips only": (
        [ids(3, audio={"x": torch.ones(1), "mask": torch.ones(1)}), ids(2, audio={"x": torch.ones(1)})],
        {},
        ["audio", "mask", "sample 1"],
    ),
    "wider than the limit": ([ids(3)], {"pad_to": 9}, ["pad_to = 9", "max_length = 8"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name: str) -> None:
    samples, options, expected = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        pack(samples, 8, **options)
    assert [words for words in expected if words not in str(caught.value)] == []


def test_samples_that_are_too_long_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    samples = [ids(3, pixel_values=torch.ones(1, 2)), ids(9, pixel_values=torch.full((1, 2), 7.0)), ids(8)]
    with caplog.at_level(logging.WARNING):
        batch = pack(samples, 8, too_long="skip")
    assert int(batch["attention_mask"].sum()) == 11
    assert batch["pixel_values"].tolist() == [[1.0, 1.0]]
    assert "Left out 1 of 3 samples with more than 8 tokens." in caplog.text
