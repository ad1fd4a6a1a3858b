"""The demo's data are what their sources have, its run is an ordinary one, and it learns."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cornstarch.config import RunConfig
from cornstarch.config.config_file import dump_config, load_config
from cornstarch.data import ChatCollator, EpochOrder, StepLoader, open_sources
from cornstarch.demo import CONFIG, TOKENIZER, demo_config, digits, parity, speakers, write_demo
from cornstarch.demo.__main__ import main
from cornstarch.demo.demo_files import DATA, NUMBERS
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel
from cornstarch.tasks.build_model import build_model
from cornstarch.tasks.task import build_processor

LICENSES = CONFIG.parent / "DATA_LICENSES.md"
SOURCES = {"digits": digits, "parity": parity, "speakers": speakers}


def question(row: dict[str, Any]) -> str:
    return row["messages"][0]["content"]


def answer(row: dict[str, Any]) -> str:
    return row["messages"][1]["content"]


# ------------------------------------------------------------------------------------------------ data


def test_every_data_file_has_a_licence() -> None:
    stated = LICENSES.read_text(encoding="utf-8")
    for file in DATA.iterdir():
        assert f"`data/{file.name}`" in stated
    for credit in ("Alpaydin, E. & Kaynak, C.", "Kudo, M., Toyama, J. & Shimbo, M.", "licenses/by/4.0"):
        assert credit in stated


def test_the_data_are_small_and_plain() -> None:
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 700_000
    for file in DATA.iterdir():
        with np.load(file, allow_pickle=False) as stored:
            assert all(stored[name].dtype.kind in "ufb" for name in stored)


# Of the values in C order: the first characters of their SHA-256. The digits have been compared with scikit-learn's
# (below), the sounds with the files in aeon.
HASHES = {
    "digits": {"images": "8f26b2bd9d135c25", "digits": "8ba4f891220f5e4c"},
    "speakers": {
        "features": "f4e9490b1d6bf201",
        "frames": "dceb83c2fb007c39",
        "speakers": "a44e158c8e1a0551",
        "test": "b63248438598a21f",
    },
}


@pytest.mark.parametrize("name", HASHES)
def test_the_data_have_not_changed(name: str) -> None:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as stored:
        assert {key: hashlib.sha256(stored[key].tobytes()).hexdigest()[:16] for key in stored} == HASHES[name]


def test_the_digits_are_those_of_scikit_learn() -> None:
    source = pytest.importorskip("sklearn.datasets").load_digits()
    with np.load(DATA / "digits.npz", allow_pickle=False) as stored:
        assert np.array_equal(stored["images"], source.images)
        assert np.array_equal(stored["digits"], source.target)


def test_images_have_the_expected_answers() -> None:
    train, test = digits("train"), digits("test")
    assert (len(train), len(test)) == (1437, 360)
    assert {question(row) for row in train + test} == {"which digit is <image> ?"}
    counts = Counter(answer(row) for row in train + test)
    assert [counts[number] for number in NUMBERS] == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert min(Counter(answer(row) for row in test).values()) >= 25
    assert all(row["image"].dtype == np.uint8 and row["image"].shape == (8, 8) for row in train)
    assert max(row["image"].max() for row in train) == 255
    seen = {row["image"].tobytes() for row in train}
    assert sum(row["image"].tobytes() in seen for row in test) == 0


@pytest.mark.parametrize("split", ["train", "test"])
def test_parity_uses_the_same_images(split: str) -> None:
    for digit, row in zip(digits(split), parity(split), strict=True):
        assert np.array_equal(digit["image"], row["image"])
        assert answer(row) == ("even", "odd")[NUMBERS.index(answer(digit)) % 2]


def test_sounds_have_the_expected_speakers() -> None:
    train, test = speakers("train"), speakers("test")
    assert {question(row) for row in train + test} == {"who says <audio> ?"}
    # What the repository says about the data set.
    told = {"train": [30] * 9, "test": [31, 35, 88, 44, 29, 24, 40, 50, 29]}
    for rows, numbers in ((train, told["train"]), (test, told["test"])):
        counts = Counter(answer(row) for row in rows)
        assert [counts[f"speaker {number}"] for number in NUMBERS[1:]] == numbers
        assert {7 <= len(row["audio"]) <= 29 for row in rows} == {True}
        assert all(row["audio"].shape[1:] == (12,) and np.isfinite(row["audio"]).all() for row in rows)
        assert len(set(map(answer, rows[:20]))) > 5  # not speaker by speaker
    with np.load(DATA / "speakers.npz", allow_pickle=False) as stored:
        # The first and the last frames of the authors' files.
        assert np.allclose(stored["features"][0, :3], [1.860936, -0.207383, 0.261557], atol=1e-6)
        assert stored["frames"][:2].tolist() == [20, 26]


@pytest.mark.parametrize("name", SOURCES)
def test_an_unknown_split_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="split = 'all'; expected train or test"):
        SOURCES[name]("all")


# ------------------------------------------------------------------------------------------------ the run


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return demo_config()


@pytest.fixture(scope="module")
def built(config: RunConfig) -> tuple[MultimodalModel, ChatCollator]:
    torch.manual_seed(0)
    model = build_model(config.model)
    return model, ChatCollator(build_processor(config.model, model), config.data)


def test_demo_config_round_trips_as_yaml(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo_config() == config
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert demo_config(["loop.steps=7", "seed=3"]).loop.steps == 7
    with pytest.raises(ConfigError, match="demo.yaml|command line"):
        demo_config(["loop.stepz=7"])


def test_model_is_small_and_fits_its_vocabulary(config: RunConfig, built: tuple[MultimodalModel, ChatCollator]) -> None:
    model, collator = built
    assert 150_000 < sum(p.numel() for p in model.parameters()) < 300_000
    assert isinstance(model.audio_encoder.module, WhisperEncoder)
    tokenizer = collator.processor.llm_tokenizer
    # The placeholders come after the words, outside the embedding table.
    assert model.language_model.config.vocab_size == min(collator.processor.modality_token_ids.values())
    assert model.language_model.config.eos_token_id == tokenizer.eos_token_id
    words = {word for rows in SOURCES.values() for word in question(rows("test")[0]).split()}
    words |= {word for rows in SOURCES.values() for row in rows("test") for word in answer(row).split()}
    assert tokenizer.unk_token_id not in tokenizer.convert_tokens_to_ids(sorted(words))
    asked = [tokenizer(text)["input_ids"] for text in ("Which digit is <image>?", "which digit is <image> ?")]
    assert asked[0] == asked[1]


def test_only_answers_are_trained_on(built: tuple[MultimodalModel, ChatCollator], config: RunConfig) -> None:
    _, collator = built
    tokenizer = collator.processor.llm_tokenizer
    source = open_sources(config.data.evaluation)
    expected = [(rows("test")[5], start + 5) for rows, start in zip(SOURCES.values(), (0, 360, 720), strict=True)]
    for row, number in expected:
        prepared = collator.prepare(source[number])
        trained = tokenizer.decode(prepared.labels[prepared.labels >= 0])
        assert trained == f"{answer(row)} </s>"
        assert len(prepared.input_ids) <= config.data.max_length
    batch = collator([source[number] for _, number in expected])
    assert batch.items == {"vision": 2, "audio": 1}
    assert batch.inputs["pixel_values"].shape == (2, 3, 8, 8)
    assert batch.inputs["input_features"].shape == (1, 12, 30)


def test_every_sample_can_be_used(built: tuple[MultimodalModel, ChatCollator], config: RunConfig) -> None:
    _, collator = built
    for sources in (config.data.train, config.data.evaluation):
        opened = open_sources(sources)
        for number in range(0, len(opened), 41):
            assert collator.prepare(opened[number]).trained_tokens in (2, 3)


def test_a_few_steps_lower_the_loss(config: RunConfig) -> None:
    torch.manual_seed(0)
    model = build_model(config.model)
    collator = ChatCollator(build_processor(config.model, model), config.data)
    source = open_sources(config.data.train)
    order = EpochOrder(source.lengths, [one.weight for one in config.data.train], seed=0, shuffle=True)
    loader = StepLoader(source, order, collator, batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.learning_rate)
    losses = []
    for _, step in zip(range(15), loader, strict=False):
        loss = model(**step.microbatches[0].inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(26), abs=1.0)
    assert sum(losses[-3:]) / 3 < 0.6 * losses[0]


# ------------------------------------------------------------------------------------------------ files to begin with


def test_the_examples_are_held_out_samples(tmp_path: Path) -> None:
    folder = tmp_path / "a folder: with odd # characters"
    written = write_demo(folder)
    assert set(written) == {path.name for path in folder.iterdir()}
    with Image.open(folder / "digit.png") as image:
        assert np.array_equal(np.asarray(image), digits("test")[0]["image"])
    assert np.array_equal(np.load(folder / "speaker.npy", allow_pickle=False), speakers("test")[0]["audio"])
    assert f'"{answer(digits("test")[0])}"' in written["digit.png"]
    assert f'"{answer(speakers("test")[0])}"' in written["speaker.npy"]
    copy = load_config(folder / "demo.yaml")
    assert copy.model.language_model is not None
    assert copy.model.language_model.tokenizer == str(folder / "tokenizer")
    assert load_config(folder / "demo.yaml", [f"model.language_model.tokenizer={TOKENIZER}"]) == demo_config()
    assert yaml.safe_load((folder / "demo.yaml").read_text())["name"] == "demo"


def test_existing_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="has demo.yaml already"):
        write_demo(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["demo.yaml"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_demo(tmp_path / "file" / "below")


def test_command_prints_writes_and_rejects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "digit.png" in said and "should give" in said and "cornstarch generate" in said
    assert main([str(tmp_path / "out")]) == 2
    assert "already" in capsys.readouterr().err


def test_demo_config_does_not_import_torch() -> None:
    code = "import sys, cornstarch.demo as d; d.demo_config(); d.speakers('test'); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONFIG.parents[2])
    assert ran.stdout.strip() == "False", ran.stderr
