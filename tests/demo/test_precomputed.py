"""Sound features that were computed beforehand go through extractor, processor, encoder and folders unharmed."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperModel

from cornstarch.config import EncoderConfig
from cornstarch.data.collate import ChatCollator
from cornstarch.data.sample import Media, Message, Sample, SampleError, SampleTooLongError
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import (
    MultimodalModel,
    MultimodalProcessor,
    PrecomputedFeatureExtractor,
)
from cornstarch.tasks.task import load_item_processor
from tests.data.small_data import data_config, processor_for, tone, wav
from tests.models.local_processors import sound, tokenizer
from tests.zoo import LANGUAGE_MODELS

SIZE, FRAMES = 3, 8


def noise(frames: int, size: int = SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((frames, size))


def extractor(**options: Any) -> PrecomputedFeatureExtractor:
    return PrecomputedFeatureExtractor(**{"feature_size": SIZE, "max_frames": FRAMES, **options})


def whisper() -> torch.nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "num_mel_bins": SIZE, "max_source_positions": FRAMES // 2, "vocab_size": 8,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
    return WhisperModel(WhisperConfig(**sizes)).get_encoder()


def compose_model() -> tuple[MultimodalProcessor, MultimodalModel]:
    model = MultimodalModel({"audio": whisper()}, LANGUAGE_MODELS["llama"].build()).eval()
    return MultimodalProcessor({"audio": extractor()}, tokenizer(), model), model


# ------------------------------------------------------------------------------------------------ the extractor


@pytest.mark.parametrize(
    ("mean", "std"), [(None, None), (0.5, None), (None, 2.0), ([1.0, -2.0, 0.5], [0.5, 2.0, 3.0]), (0, 1)]
)
def test_features_are_normalised_padded_and_transposed(mean: Any, std: Any) -> None:
    given = noise(5)
    expected = np.zeros((SIZE, FRAMES), np.float32)
    for frame in range(5):
        for feature in range(SIZE):
            subtracted = np.broadcast_to(0 if mean is None else mean, SIZE)[feature]
            divided = np.broadcast_to(1 if std is None else std, SIZE)[feature]
            expected[feature, frame] = (given[frame, feature] - subtracted) / divided
    found = extractor(mean=mean, std=std)(given, return_tensors="pt")["input_features"]
    assert found.dtype == torch.float32 and found.shape == (1, SIZE, FRAMES)
    assert np.allclose(found[0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        [noise(4, seed=1), noise(4, seed=2)],
        [[noise(4, seed=1)], [noise(4, seed=2)]],
        np.stack([noise(4, seed=1), noise(4, seed=2)]),
        [torch.from_numpy(noise(4, seed=1)), noise(4, seed=2)],
    ],
    ids=["list", "list per sample", "one array", "a tensor"],
)
def test_batches_of_sounds_may_be_lists_arrays_or_tensors(given: Any) -> None:
    each = [extractor()(noise(4, seed=seed), return_tensors="np")["input_features"] for seed in (1, 2)]
    assert np.array_equal(extractor()(given, return_tensors="np")["input_features"], np.concatenate(each))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (sound(800), r"Sound 0 is an array \[800\] of float32 \(a wave\? .*expected \[frames, 3\]"),
        (noise(4, 5), r"an array \[4, 5\].*expected \[frames, 3\]"),
        ([noise(4), noise(9)], r"Sound 1 has 9 frames; expected 1 to max_frames = 8"),
        (noise(0), r"has 0 frames"),
        (np.full((2, SIZE), np.nan), "not finite"),
        (np.array([["a"] * SIZE]), "of numbers"),
        ([], "no sound"),
    ],
    ids=["a wave", "other features", "too long", "empty", "not finite", "texts", "nothing"],
)
def test_malformed_features_raise_config_error(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        extractor()(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_size": 0}, "feature_size = 0"),
        ({"max_frames": 2.5}, "max_frames = 2.5"),
        ({"max_frames": True}, "max_frames = True"),
        ({"mean": [1.0]}, r"mean = \[1.0\]; expected a number, or a list of 3"),
        ({"mean": "zero"}, "mean = 'zero'"),
        ({"std": [1, 0, 1]}, "expected numbers above 0"),
        ({"std": float("inf")}, "std = inf"),
        ({"means": 1.0}, "no setting 'means' .did you mean 'mean'"),
    ],
)
def test_wrong_settings_raise_config_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        extractor(**options)


def test_extractor_survives_saving_and_loading(tmp_path: Path) -> None:
    made = extractor(mean=[1.0, -2.0, 0.5], std=3.0)
    made.save_pretrained(tmp_path)
    loaded = PrecomputedFeatureExtractor.from_pretrained(tmp_path)
    assert loaded.to_dict() == made.to_dict()
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/preprocessor_config.json").read_bytes() == (
        tmp_path / "preprocessor_config.json"
    ).read_bytes()
    assert np.array_equal(loaded(noise(5))["input_features"], made(noise(5))["input_features"])
    assert pickle.loads(pickle.dumps(made)).to_dict() == made.to_dict()


# ------------------------------------------------------------------------------------------------ beside the model


def test_extractor_works_with_processor_and_model(tmp_path: Path) -> None:
    processor, model = compose_model()
    sounds = [noise(5, seed=1), noise(8, seed=2), noise(1, seed=3)]
    texts = ["a <audio> and <audio>", "the <audio>"]
    batch = processor(text=texts, audio=sounds, padding=True, return_tensors="pt")
    tokens = (batch["input_ids"] == processor.modality_token_ids["audio"]).sum(1).tolist()
    assert tokens == [FRAMES, FRAMES // 2]  # a token for two frames, filled ones too
    expected = extractor()(sounds, return_tensors="pt")["input_features"]
    assert torch.equal(batch["input_features"], expected)
    assert model(**batch).logits.isfinite().all()
    one_by_one = processor(text=texts, audio=[sounds[:2], sounds[2:]], padding=True, return_tensors="pt")
    assert torch.equal(one_by_one["input_ids"], batch["input_ids"])

    processor.save_pretrained(tmp_path)
    loaded = MultimodalProcessor.from_pretrained(tmp_path, model=model)
    assert isinstance(loaded.encoder_processors["audio"], PrecomputedFeatureExtractor)
    again = loaded(text=texts, audio=sounds, padding=True, return_tensors="pt")
    assert all(torch.equal(again[key], batch[key]) for key in batch)


def test_config_builds_the_extractor(tmp_path: Path) -> None:
    def described(**options: Any) -> EncoderConfig:
        return EncoderConfig.model_validate({"config": {"model_type": "whisper"}, **options})

    settings = {"class_name": "PrecomputedFeatureExtractor", "feature_size": SIZE, "max_frames": FRAMES}
    found = load_item_processor("model.encoders.audio", described(processor_config=settings))
    assert isinstance(found, PrecomputedFeatureExtractor) and found.feature_size == SIZE
    found.save_pretrained(tmp_path)
    loaded = load_item_processor("model.encoders.audio", described(processor=str(tmp_path)))
    assert loaded.to_dict() == found.to_dict()
    del settings["max_frames"]
    with pytest.raises(ConfigError, match=r"model.encoders.audio.processor_config: .*max_frames"):
        load_item_processor("model.encoders.audio", described(processor_config=settings))


# ------------------------------------------------------------------------------------------------ beside data


def asked(source: Any) -> Sample:
    return Sample("row 1", (Message("user", ("the ", Media("audio", source))), Message("assistant", ("cat",))))


def test_samples_may_have_features(tmp_path: Path) -> None:
    processor, model = compose_model()
    collator = ChatCollator(processor, data_config("unused"))
    features = noise(5)
    np.save(tmp_path / "sound.npy", features)
    batches = [collator([asked(source)]) for source in (features, str(tmp_path / "sound.npy"))]
    expected = extractor()(features.astype(np.float32), return_tensors="pt")["input_features"]
    for batch in batches:
        assert torch.equal(batch.inputs["input_features"], expected)
        assert batch.items == {"audio": 1}
        assert model(**batch.inputs).loss.isfinite()


@pytest.mark.parametrize("too_long", ["skip", "cut"])
def test_too_many_frames_are_rejected(too_long: str) -> None:
    processor, _ = compose_model()
    collator = ChatCollator(processor, data_config("unused", too_long=too_long))
    features = noise(FRAMES + 1)
    if too_long == "skip":
        with pytest.raises(SampleTooLongError, match=f"of {FRAMES + 1} frames, .*takes {FRAMES}"):
            collator.prepare(asked(features))
    else:
        found = collator.prepare(asked(features)).encoder_inputs["input_features"]
        assert np.array_equal(found[0].numpy(), features[:FRAMES].T.astype(np.float32))


def test_waves_and_features_are_distinguished(tmp_path: Path) -> None:
    processor, _ = compose_model()
    for_features = ChatCollator(processor, data_config("unused"))
    for_waves = ChatCollator(processor_for(audio="whisper")[0], data_config("unused"))
    (tmp_path / "sound.wav").write_bytes(wav(tone()))
    np.save(tmp_path / "sound.npy", noise(5, 12))
    for source in (str(tmp_path / "sound.wav"), tone(), {"array": tone(), "sampling_rate": 16000}, wav(tone())):
        with pytest.raises(SampleError, match="features computed beforehand"):
            for_features.prepare(asked(source))
    for source in (str(tmp_path / "sound.npy"), noise(5, 12), (tmp_path / "sound.npy").read_bytes()):
        with pytest.raises(SampleError, match=re.escape("takes waves; features computed beforehand are for a Precom")):
            for_waves.prepare(asked(source))
