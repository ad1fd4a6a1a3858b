"""Every named encoder and every named language model, composed and compared with the same parts run by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from tests.models import reference
from tests.zoo import (
    ENCODERS,
    LANGUAGE_MODELS,
    MEL_FRAMES,
    MODALITY_TOKEN,
    PAD,
    PATCH,
    RAGGED,
    TEXT_ONLY,
    VOCABULARY,
    EncoderPart,
    Inputs,
    item_count,
    text_batch,
)

PAIRS = [(name, "llama") for name in ENCODERS] + [("clip", name) for name in LANGUAGE_MODELS if name != "llama"]
PADDINGS = ("right", "left")
# Samples run alone take other kernels than a padded batch: equal up to rounding.
ROUNDING: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


@dataclass
class Composed:
    """A composed model and what it was made of."""

    part: EncoderPart
    model: MultimodalModel

    @property
    def encoder(self) -> nn.Module:
        """The bare encoder."""
        return self.model.encoders[self.part.modality].module

    @property
    def projection(self) -> nn.Module:
        """The bare projection."""
        return self.model.encoders[self.part.modality].projector.projection

    @property
    def language_model(self) -> PreTrainedModel:
        """The bare language model."""
        return self.model.language_model

    def batch(self, padding: str = "right", rows: tuple[str, ...] = RAGGED, token_id: int = MODALITY_TOKEN) -> Inputs:
        """Make the text of a batch."""
        return text_batch(rows, self.part.feature_lengths(item_count(rows)), token_id, padding)

    def items(self, rows: tuple[str, ...] = RAGGED) -> Inputs:
        """Make the items of the same batch."""
        return self.part.inputs(item_count(rows))

    def features(self, items: Inputs) -> Tensor:
        """Encode and project by hand."""
        return reference.project(self.part, self.encoder, self.projection, items)

    def gradients(self, loss: Tensor) -> reference.Gradients:
        """Take every gradient of a loss."""
        return reference.backward(
            loss, encoder=self.encoder, projection=self.projection, language_model=self.language_model
        )


def compose(encoder: str, language_model: str) -> Composed:
    """Compose two parts of the zoo."""
    part = ENCODERS[encoder]
    model = MultimodalModel({part.modality: part.build()}, LANGUAGE_MODELS[language_model].build())
    model.set_modality_token_ids({part.modality: MODALITY_TOKEN})
    return Composed(part, model)


@pytest.fixture(params=PAIRS, ids=lambda pair: "-".join(pair))
def composed(request: pytest.FixtureRequest) -> Composed:
    """Each encoder with Llama, and CLIP with each language model."""
    return compose(*request.param)


@pytest.mark.parametrize("padding", PADDINGS)
def test_loss_and_every_gradient_equal_the_parts_run_by_hand(composed: Composed, padding: str) -> None:
    batch, items = composed.batch(padding), composed.items()
    output = composed.model(**batch, **items)
    found = composed.gradients(output.loss)
    expected = reference.run_batch(composed.language_model, batch, composed.features(items), MODALITY_TOKEN)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    reference.assert_same_gradients(found, composed.gradients(expected.loss))
    assert any(name.startswith("encoder.") and gradient is not None for name, gradient in found.items())


@pytest.mark.parametrize("padding", PADDINGS)
def test_each_sample_is_computed_as_if_it_were_alone(composed: Composed, padding: str) -> None:
    batch, items = composed.batch(padding), composed.items()
    logits = composed.model(**batch, **items).logits
    alone = reference.run_rows(composed.language_model, batch, composed.features(items), MODALITY_TOKEN)
    for found, expected in zip(reference.rows_of(logits, batch["attention_mask"]), alone, strict=True):
        torch.testing.assert_close(found, expected, **ROUNDING)


def test_forward_without_labels(composed: Composed) -> None:
    batch, items = composed.batch(), composed.items()
    with_labels = composed.model(**batch, **items)
    del batch["labels"]
    output = composed.model(**batch, **items)
    assert output.loss is None
    assert torch.equal(output.logits, with_labels.logits)
    assert output.logits.shape == (*batch["input_ids"].shape, VOCABULARY)


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_batch_without_items_is_the_plain_language_model(composed: Composed, padding: str) -> None:
    batch = composed.batch(padding, TEXT_ONLY)
    plain: dict[str, Tensor] = dict(batch)
    if padding == "left":
        plain["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    output, expected = composed.model(**batch), composed.language_model(**plain)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)
    gradients = composed.gradients(output.loss)
    reference.assert_same_gradients(gradients, composed.gradients(expected.loss), rtol=0, atol=0)
    assert all(gradient is None for name, gradient in gradients.items() if not name.startswith("language_model."))


@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_is_never_attended(composed: Composed, padding: str) -> None:
    batch, items = composed.batch(padding), composed.items()
    is_padding = batch["attention_mask"] == 0
    output = composed.model(**batch, **items)
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(is_padding, PAD + 7)}
    again = composed.model(**other, **items)
    assert torch.equal(output.logits[~is_padding], again.logits[~is_padding])
    assert torch.equal(output.loss, again.loss)


def test_an_item_changes_the_text_after_it_and_only_that(composed: Composed) -> None:
    rows = ("tttt*tttt", "ttttt*tt")
    batch, items = composed.batch(rows=rows), composed.items(rows)
    count = composed.part.feature_lengths(1)[0]
    before = composed.model(**batch, **items).logits
    after = composed.model(**batch, **first_item_changed(items)).logits
    changed = (before != after).any(-1)
    assert not changed[0, :4].any(), "text before an item saw it"
    assert changed[0, 4 : 4 + count + 1].all(), "neither the item nor the text behind it noticed the change"
    assert not changed[1].any(), "another sample noticed the change"


def first_item_changed(items: Inputs) -> Inputs:
    """Negate what belongs to the first item alone: the first row of the encoder's main input."""
    name, values = next(iter(items.items()))
    values = values.clone()
    values[0] = -values[0]
    return {**items, name: values}


@pytest.mark.parametrize("token_id", [5, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1000, 2**40])
def test_the_modality_token_may_be_inside_or_outside_the_embedding_table(token_id: int) -> None:
    composed = compose("clip", "llama")
    composed.model.set_modality_token_ids({"vision": token_id})
    # Text must not hold the token by chance: it would be taken for a placeholder.
    batch, items = composed.batch(token_id=token_id), composed.items()
    text = composed.batch(token_id=2**41)["input_ids"] != 2**41
    batch["input_ids"] = torch.where(text & (batch["input_ids"] == token_id), 9, batch["input_ids"])
    output = composed.model(**batch, **items)
    expected = reference.run_batch(composed.language_model, batch, composed.features(items), token_id)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("language_model", ["llama", "gpt2", "gemma3"])
def test_two_modalities_in_one_sample(language_model: str) -> None:
    vision, audio = ENCODERS["pixtral"], ENCODERS["whisper"]
    model = MultimodalModel({"vision": vision.build(), "audio": audio.build()}, LANGUAGE_MODELS[language_model].build())
    model.set_modality_token_ids({"vision": MODALITY_TOKEN, "audio": MODALITY_TOKEN + 1})
    batch = text_batch(("tt+tt*tt+t", "ttt", "*t+tt"), [8, 4, 8, 2, 8])
    images, clips = vision.inputs(2), audio.inputs(3)
    output = model(**batch, **images, **clips)

    eyes, ears = model.encoders["vision"], model.encoders["audio"]
    image, other_image = reference.project(vision, eyes.module, eyes.projector.projection, images).split([4, 2])
    clip_1, clip_2, clip_3 = reference.project(audio, ears.module, ears.projector.projection, clips).split(8)
    in_order = torch.cat([clip_1, image, clip_2, other_image, clip_3])
    one_token = {name: value.clamp(max=MODALITY_TOKEN) for name, value in batch.items()}
    expected = reference.run_batch(model.language_model, one_token, in_order, MODALITY_TOKEN)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("encoder", "corner"), [("siglip2", (1, slice(2, None))), ("pixtral", (1, slice(None), slice(PATCH, None)))]
)
def test_image_padding_changes_no_logits(encoder: str, corner: tuple[int | slice, ...]) -> None:
    composed = compose(encoder, "llama")
    batch, items = composed.batch(), composed.items()
    before = composed.model(**batch, **items)
    items["pixel_values"][corner] += 1.0  # the second image is half as large as the first
    after = composed.model(**batch, **items)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)


@pytest.mark.parametrize(
    ("encoder", "valid", "lengths"),
    [  # lengths by hand, from kernels and strides
        ("whisper", (16, 9, 12), (8, 5, 6)),
        ("wav2vec2", (400, 250, 200), (4, 3, 2)),
    ],
)
def test_clips_of_different_lengths(encoder: str, valid: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    composed = compose(encoder, "llama")
    items = composed.items()
    items["attention_mask"] = valid_places(valid, next(iter(items.values())).shape[-1])
    batch = text_batch(RAGGED, lengths)
    states = composed.encoder(**items).last_hidden_state
    check_kept_features(composed, batch, composed.model(**batch, audio=items), states, lengths)


def test_clips_of_different_lengths_through_a_callback() -> None:
    """Qwen2-Audio's encoder takes a mask of another shape than its processor makes."""
    valid, lengths = (16, 9, 12), (4, 2, 3)
    composed = compose("qwen2_audio", "llama")
    mask = valid_places(valid, MEL_FRAMES)
    hidden = torch.zeros(3, 1, 8, 8).masked_fill(~mask[:, None, None, ::2].bool(), -torch.inf)

    def hide_silence(inputs: Inputs) -> Inputs:
        assert torch.equal(inputs["feature_attention_mask"], mask)
        return {"input_features": inputs["input_features"], "attention_mask": hidden}

    encoder = ModalEncoderModule(
        composed.encoder,
        composed.model.audio_encoder.projector,
        additional_args=["feature_attention_mask"],
        preprocess_callback=hide_silence,
    )
    model = MultimodalModel({"audio": encoder}, composed.language_model)
    model.set_modality_token_ids({"audio": MODALITY_TOKEN})
    batch, items = text_batch(RAGGED, lengths), composed.items()
    output = model(**batch, **items, feature_attention_mask=mask)
    states = composed.encoder(**items, attention_mask=hidden).last_hidden_state
    check_kept_features(composed, batch, output, states, lengths)


def valid_places(valid: tuple[int, ...], total: int) -> Tensor:
    """Make a mask of clips that were filled up to `total` places."""
    return (torch.arange(total) < torch.tensor(valid).unsqueeze(-1)).long()


def check_kept_features(
    composed: Composed, batch: Inputs, output: Any, states: Tensor, lengths: tuple[int, ...]
) -> None:
    """The language model read the first `lengths` of each clip's features, and nothing else."""
    kept = torch.cat([state[:length] for state, length in zip(states, lengths, strict=True)])
    expected = reference.run_batch(composed.language_model, batch, composed.projection(kept), MODALITY_TOKEN)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
