"""A batch is cut so that the parts, one after the other, are what the whole is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cornstarch.api.microbatches import MicrobatchSplitter, TokenCounter
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from tests import zoo

ROWS = ("tt*ttt*t", "tttt", "*tt", "ttt", "t*t*t*t", "ttttttt*")


def model_of(name: str) -> MultimodalModel:
    model = MultimodalModel(
        {"vision": ModalEncoderModule(zoo.ENCODERS[name].build())}, zoo.LANGUAGE_MODELS["llama"].build()
    )
    model.set_modality_token_ids({"vision": zoo.MODALITY_TOKEN})
    return model.eval()


def batch_of(name: str, nested: bool = False, padding: str = "right") -> dict[str, Any]:
    part, count = zoo.ENCODERS[name], zoo.item_count(ROWS)
    text = zoo.text_batch(ROWS, part.feature_lengths(count), padding=padding)
    items = part.inputs(count)
    return {**text, "vision": items} if nested else {**text, **items}


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["clip", "siglip2", "pixtral", "qwen2_vl", "qwen2_5_vl"])
def test_the_loss_of_a_batch_equals_that_of_its_microbatches(name: str, nested: bool, padding: str) -> None:
    model, batch = model_of(name), batch_of(name, nested, padding)
    parts, count = MicrobatchSplitter(model, 3, None).split(batch), TokenCounter(model)
    assert [len(part["input_ids"]) for part in parts] == [2, 2, 2]
    assert sum(map(count, parts)) == count(batch)
    with torch.no_grad():
        whole = model(**batch).loss
        losses = sum(model(**part).loss * count(part) for part in parts) / count(batch)
    torch.testing.assert_close(losses, whole, rtol=1e-5, atol=1e-6)


def test_a_microbatch_without_items_has_no_encoder_inputs() -> None:
    parts = MicrobatchSplitter(model_of("clip"), None, 1).split(batch_of("clip"))
    assert [len(part.get("pixel_values", ())) for part in parts] == [2, 0, 1, 0, 3, 1]
    assert [("pixel_values" in part) for part in parts] == [True, False, True, False, True, True]


def test_rows_are_split_and_options_are_kept() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build()
    batch = {
        "input_ids": torch.arange(8).reshape(4, 2), "position_ids": torch.arange(24).reshape(3, 4, 2),
        "names": list("abcd"), "use_cache": False, "factor": torch.tensor(2.0), "nothing": None,
    }  # fmt: skip
    first, last = MicrobatchSplitter(model, 2, None).split(batch)
    assert first["input_ids"].tolist() == [[0, 1], [2, 3]] and last["names"] == ["c", "d"]
    assert torch.equal(last["position_ids"], batch["position_ids"][:, 2:])  # type: ignore[index]
    assert first["use_cache"] is False and float(last["factor"]) == 2.0 and "nothing" not in first
    assert MicrobatchSplitter(model, 1, None).split(batch)[0]["names"] == list("abcd")


def broken(**changes: Any) -> dict[str, Any]:
    return {**batch_of("clip"), **changes}


@pytest.mark.parametrize(
    ("batch", "many", "size", "said"),
    [
        ([1, 2], 2, None, "expected a dictionary"),
        ({"names": ["a"]}, 2, None, "no tensor whose rows are samples"),
        (broken(), 4, None, "num_microbatches = 4: a batch of 6 samples does not divide by it. Use 1 or 2 or 3 or 6"),
        (broken(), None, 4, "microbatch_size = 4: a batch of 6 samples"),
        (broken(), 2, 2, "take batches of 4 samples; this one has 6"),
        (broken(token_type_ids=torch.zeros(5, 2)), 2, None, r"token_type_ids has shape \[5, 2\] beside 6 samples"),
        (broken(pixel_values=torch.zeros(6, 3, 16, 16)), 2, None, "Sample 5 has 5 vision tokens"),
    ],
)
def test_batches_that_cannot_be_split_are_refused(batch: Any, many: int | None, size: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MicrobatchSplitter(model_of("clip"), many, size).split(batch)


def test_batches_are_split_after_the_weights_of_the_encoder_are_freed() -> None:
    model = model_of("clip")
    splitter = MicrobatchSplitter(model, 2, None)
    expected = [len(part["pixel_values"]) for part in splitter.split(batch_of("clip"))]
    model.encoders["vision"].to("meta")
    model.encoders["vision"].module = torch.nn.Identity()
    assert [len(part["pixel_values"]) for part in splitter.split(batch_of("clip"))] == expected == [3, 4]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_token_count_is_that_of_the_loss(name: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    if name == "llama":
        model: Any = zoo.LANGUAGE_MODELS["llama"].build()
    else:
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
        )
    labels: Tensor = torch.randint(3, 60, (3, 6))
    labels[0, 2:] = zoo.IGNORED
    labels[1] = zoo.IGNORED
    batch = {"input_ids": torch.randint(3, 60, (3, 6)), "labels": labels}
    count = TokenCounter(model)
    assert count(batch) == (1 + 0 + 5 if name == "llama" else 2 + 0 + 6)
    model.eval()
    with torch.no_grad():
        whole = model(**batch).loss
        rows = [{key: value[n : n + 1] for key, value in batch.items()} for n in (0, 2)]
        parts = sum(model(**row).loss * count(row) for row in rows) / count(batch)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert count({"input_ids": labels}) == 0
