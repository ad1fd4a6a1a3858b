"""Every form of a Hugging Face dataset gives the samples that were put in, and every mistake is reported."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cornstarch import allow_code
from cornstarch.config import SourceConfig
from cornstarch.data.data_report import check_data
from cornstarch.data.formats import open_source
from cornstarch.data.sample import Media, Message, SampleError
from cornstarch.errors import ConfigError
from tests.data.small_data import data_config, png, tone, wav

datasets = pytest.importorskip("datasets")

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [{"source": f"question {i}", "target": f"answer {i}"} for i in range(5)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def source(path: Path | str, **options: Any) -> Any:
    return open_source(SourceConfig(path=str(path), **options))


def texts() -> Any:
    return datasets.Dataset.from_list(TEXTS)


def pair(question: Any, answer: str) -> tuple[Message, Message]:
    return Message("user", (question,)), Message("assistant", (answer,))


def save_dataset(folder: Path) -> tuple[Path, dict[str, Any]]:
    texts().save_to_disk(folder / "d")
    return folder / "d", {}


def save_splits(folder: Path) -> tuple[Path, dict[str, Any]]:
    datasets.DatasetDict({"train": texts(), "test": texts().select([0])}).save_to_disk(folder / "d")
    return folder / "d", {"arguments": {"split": "train"}}


def save_one_split(folder: Path) -> tuple[Path, dict[str, Any]]:
    datasets.DatasetDict({"train": texts()}).save_to_disk(folder / "d")
    return folder / "d", {}


def parquet(folder: Path) -> tuple[Path, dict[str, Any]]:
    texts().to_parquet(folder / "d.parquet")
    return folder / "d.parquet", {}


def parquets(folder: Path) -> tuple[Path, dict[str, Any]]:
    for name, rows in (("b", [3, 4]), ("a", [0, 1, 2])):
        texts().select(rows).to_parquet(folder / f"{name}.parquet")
    return folder / "*.parquet", {}


def parquet_folder(folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "d/data").mkdir(parents=True)
    texts().to_parquet(folder / "d/data/train-00000-of-00001.parquet")
    texts().select([0]).to_parquet(folder / "d/data/test-00000-of-00001.parquet")
    return folder / "d", {"arguments": {"split": "train"}}


def arrow(folder: Path) -> tuple[Path, dict[str, Any]]:
    texts().save_to_disk(folder / "d")
    return next((folder / "d").glob("*.arrow")), {}


def csv(folder: Path) -> tuple[Path, dict[str, Any]]:
    texts().to_csv(folder / "d.csv")
    return folder / "d.csv", {}


def json_lines(folder: Path) -> tuple[Path, dict[str, Any]]:
    texts().to_json(folder / "d.jsonl")
    return folder / "d.jsonl", {"format": "datasets"}


# What it is, and what its rows are called.
FORMS: dict[Any, tuple[str, str]] = {
    save_dataset: ("saved by save_to_disk", "d"),
    save_splits: ("saved by save_to_disk, split train", "d[train]"),
    save_one_split: ("saved by save_to_disk, split train", "d[train]"),
    parquet: ("1 parquet file", "d.parquet"),
    parquets: ("2 parquet files", "*.parquet"),
    parquet_folder: ("a folder of files, split train", "d[train]"),
    arrow: ("1 arrow file", "data-00000-of-00001.arrow"),
    csv: ("1 csv file", "d.csv"),
    json_lines: ("1 json file", "d.jsonl"),
}


@pytest.mark.parametrize("given", ["auto", "datasets", "pairs"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_of_dataset_gives_the_same_samples(tmp_path: Path, form: Any, given: str) -> None:
    path, options = form(tmp_path)
    if form is json_lines and given != "datasets":
        pytest.skip("JSON is read without the library unless it is asked for")
    found = source(path, **{**options, "format": given})
    words, name = FORMS[form]
    assert found.description == f"{path}: Hugging Face dataset, {words}, pairs, 5 samples"
    for i in (4, 0, 2):  # in any order
        assert found[i].messages == pair(f"question {i}", f"answer {i}")
    assert found.name(4) == found[4].id == f"{name}:5"
    assert found[1].fields == TEXTS[1]


def test_other_processes_open_the_table_themselves(tmp_path: Path) -> None:
    many = datasets.Dataset.from_dict({"text": ["a long text " * 100] * 1000})
    many.save_to_disk(tmp_path / "d")
    sent = pickle.dumps(source(tmp_path / "d"))
    assert len(sent) < 20_000
    code = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer)[999].document[0]))"
    ran = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, cwd=ROOT)
    assert ran.stdout.strip() == b"1200", ran.stderr


def test_limits_and_columns(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"frage": ["a", "b"], "antwort": ["x", "y"]}).save_to_disk(tmp_path / "d")
    found = source(
        tmp_path / "d", limit=1, arguments={"columns": {"source": "frage", "target": "antwort"}}, format="datasets"
    )
    assert len(found) == 1 and found[0].messages == pair("a", "x")


# ------------------------------------------------------------------------------------------------ features


def pictures(folder: Path) -> Any:
    """Images and sounds, as bytes and as paths, with labels."""
    (folder / "a.png").write_bytes(png(seed=1))
    (folder / "b.wav").write_bytes(wav(tone()))
    rows = {
        "image": [{"bytes": None, "path": str(folder / "a.png")}, {"bytes": png(seed=2), "path": None}],
        "audio": [{"bytes": None, "path": str(folder / "b.wav")}, {"bytes": wav(tone()), "path": None}],
        "label": [1, -1],
    }
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    # Not by its features at once: writing sounds would need the library's encoders.
    table = table.cast_column("audio", datasets.Audio())
    return table.cast_column("label", datasets.ClassLabel(names=["cat", "dog"]))


def test_images_are_not_decoded_by_the_library(tmp_path: Path) -> None:
    table = pictures(tmp_path).remove_columns("audio")
    table.save_to_disk(tmp_path / "d")  # which takes the bytes of files with it
    found = source(tmp_path / "d")
    assert found[0].messages == pair(Media("image", png(seed=1)), "dog")
    assert found[0].fields["label"] == "dog"
    with pytest.raises(SampleError, match="`label` is empty"):  # -1 is no class
        found[1]
    report = check_data(data_config(tmp_path / "d", skip_limit=0.5))
    assert not report.problems and report.sources[0].items == {"image": 1}


def test_sounds_need_no_decoder_of_the_library(tmp_path: Path) -> None:
    table = pictures(tmp_path).remove_columns(["image", "label"]).add_column("text", ["a", "b"])
    table.to_parquet(tmp_path / "d.parquet")
    found = source(tmp_path / "d.parquet")
    assert found[0].media == [Media("audio", str(tmp_path / "b.wav"))]
    assert found[1].media == [Media("audio", wav(tone()))]
    assert not check_data(data_config(tmp_path / "d.parquet")).problems


def test_labels_as_numbers(tmp_path: Path) -> None:
    pictures(tmp_path).remove_columns("audio").save_to_disk(tmp_path / "d")
    found = source(tmp_path / "d", arguments={"labels": "numbers"})
    assert [found[i].fields["label"] for i in (0, 1)] == [1, -1]


def test_conversations_with_lists_of_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    turns = [{"role": "user", "content": "<image> or <image> ?"}, {"role": "assistant", "content": "neither"}]
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        }
    )
    table = datasets.Dataset.from_dict({"images": [[str(tmp_path / "a.png")] * 2], "messages": [turns]}, features)
    table.save_to_disk(tmp_path / "d")
    sample = source(tmp_path / "d")[0]
    assert [type(part) for part in sample.messages[0].content] == [Media, str, Media, str]
    assert sample.media == [Media("image", png())] * 2


def test_typed_parts_of_messages(tmp_path: Path) -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}]
    datasets.Dataset.from_list([{"image": "x.png", "messages": chat}]).to_parquet(tmp_path / "d.parquet")
    sample = source(tmp_path / "d.parquet", media="/pictures")[0]
    assert sample.messages[0].content == (Media("image", "/pictures/x.png"), "what?")


def test_paths_are_relative_to_the_dataset(tmp_path: Path) -> None:
    rows = [{"image": "a.png", "text": "a cat"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")
    assert source(tmp_path / "d")[0].media == [Media("image", str(tmp_path / "d/a.png"))]
    assert source(tmp_path / "d.parquet")[0].media == [Media("image", str(tmp_path / "a.png"))]
    assert source(tmp_path / "d", media="/m")[0].media == [Media("image", "/m/a.png")]


def test_arrays_keep_shape_and_dtype(tmp_path: Path) -> None:
    features = datasets.Features({"inputs": datasets.Array2D((2, 3), "float32"), "n": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"inputs": [np.ones((2, 3)), None], "n": [1, 2]}, features)
    table.save_to_disk(tmp_path / "d")
    found = source(tmp_path / "d", format="rows")
    inputs = found[0].fields["inputs"]
    assert inputs.dtype == np.float32 and inputs.shape == (2, 3) and found[1].fields["inputs"] is None


# ------------------------------------------------------------------------------------------------ functions

HERE = __name__
_made: dict[str, Any] = {}


def build_dataset(which: str) -> Any:
    return _made[which]


def test_functions_that_return_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_datasets", sys.modules[HERE])
    allow_code("own_datasets")
    table = pictures(tmp_path).remove_columns("image").select([0])
    monkeypatch.setitem(_made, "sounds", table)
    monkeypatch.setitem(_made, "own", texts().with_transform(lambda rows: {"text": ["own"] * len(rows["source"])}))
    monkeypatch.setitem(_made, "stream", texts().to_iterable_dataset())
    monkeypatch.setitem(_made, "splits", datasets.DatasetDict({"train": texts()}))
    found = source("own_datasets:build_dataset", arguments={"which": "sounds"})
    assert found[0].media[0].source == str(tmp_path / "b.wav")
    assert source("own_datasets:build_dataset", arguments={"which": "own"})[4].document == ("own",)
    with pytest.raises(ConfigError, match="streaming dataset has no row numbers"):
        source("own_datasets:build_dataset", arguments={"which": "stream"})
    with pytest.raises(ConfigError, match="returned a DatasetDict"):
        source("own_datasets:build_dataset", arguments={"which": "splits"})


def test_datasets_given_in_python() -> None:
    config = SourceConfig(path="mine", format="given")
    assert open_source(config, texts())[3].messages == pair("question 3", "answer 3")
    with pytest.raises(ConfigError, match="streaming"):
        open_source(config, texts().to_iterable_dataset())


# ------------------------------------------------------------------------------------------------ mistakes


def write_damaged_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "d.parquet").write_bytes(b"PAR1 no table PAR1")
    return folder / "d.parquet", {}


def remove_table_files(folder: Path) -> tuple[Path, dict[str, Any]]:
    path, _ = save_dataset(folder)
    next(path.glob("*.arrow")).unlink()
    return path, {}


def remove_one_of_two_files(folder: Path) -> tuple[Path, dict[str, Any]]:
    texts().save_to_disk(folder / "d", num_shards=2)
    next((folder / "d").glob("*.arrow")).unlink()
    return folder / "d", {}


def empty_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    datasets.Dataset.from_dict({"text": []}).to_parquet(folder / "d.parquet")
    return folder / "d.parquet", {}


def empty(folder: Path) -> tuple[Path, dict[str, Any]]:
    datasets.Dataset.from_dict({"text": []}).save_to_disk(folder / "d")
    return folder / "d", {}


def no_format(folder: Path) -> tuple[Path, dict[str, Any]]:
    datasets.Dataset.from_dict({"a": [1]}).save_to_disk(folder / "d")
    return folder / "d", {}


def missing_column(folder: Path) -> tuple[Path, dict[str, Any]]:
    return save_dataset(folder)[0], {"arguments": {"columns": {"text": "b"}}}


def mixed(folder: Path) -> tuple[Path, dict[str, Any]]:
    parquet(folder)
    csv(folder)
    return folder / "d.*", {"format": "datasets"}


def unknown_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "d.xml").write_text("<a/>")
    return folder / "d.xml", {"format": "datasets"}


def empty_folder(folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "d").mkdir()
    return folder / "d", {"format": "datasets"}


def given(form: Any, **arguments: Any) -> Any:
    def build_with_arguments(folder: Path) -> tuple[Path, dict[str, Any]]:
        return form(folder)[0], {"arguments": arguments}

    return build_with_arguments


MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "damaged": (write_damaged_file, ["d.parquet cannot be opened as a Hugging Face dataset", "Parquet"]),
    "its files are gone": (remove_table_files, ["no .arrow files", "gone"]),
    "one of its files is gone": (remove_one_of_two_files, ["cannot be opened", "FileNotFoundError"]),
    "empty": (empty, ["no .arrow files", "empty"]),
    "an empty file": (empty_file, ["cannot be opened", "no data"]),
    "no format": (no_format, ["d:1 has ['a']", "`conversations`", "columns"]),
    "missing column": (missing_column, ["['source', 'target']", "['b']"]),
    "no split": (given(save_splits), ["has the splits train, test", "split: train"]),
    "unknown split": (given(save_splits, split="dev"), ["train, test", "arguments.split = dev"]),
    "unknown split of a folder": (given(parquet_folder, split="dev"), ["dev", "test"]),
    "no split of a folder": (given(parquet_folder), ["has the splits train, test"]),
    "a split of files": (given(parquet, split="train"), ["arguments has split", "one table"]),
    "a revision of a folder": (given(save_dataset, revision="main"), ["arguments has revision"]),
    "unknown arguments": (given(save_dataset, splitt="train"), ["['splitt']", "split, name, revision"]),
    "unknown labels": (given(save_dataset, labels="words"), ["'words'", "names or numbers"]),
    "streaming": (given(save_dataset, streaming=True), ["neither shuffled nor resumed"]),
    "mixed files": (mixed, [".csv, .parquet", "expected one of"]),
    "unknown file": (unknown_file, [".xml", ".parquet"]),
    "empty folder": (empty_folder, ["cannot be opened"]),
    "no such file": (lambda folder: (folder / "d.parquet", {}), ["does not exist", "looked in"]),
    "no such pattern": (lambda folder: (folder / "*.parquet", {}), ["matches no file"]),
    "no such folder": (lambda folder: (folder / "d/e/f", {"format": "datasets"}), ["does not exist"]),
    "a folder of something": (lambda folder: (folder, {}), ["is no file", "save_to_disk"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_reported_with_the_reason(tmp_path: Path, name: str) -> None:
    make, message = MISTAKES[name]
    (tmp_path / "x").mkdir()
    path, options = make(tmp_path / "x")
    with pytest.raises(ConfigError) as caught:
        source(path, **options)
    assert [words for words in message if words not in str(caught.value)] == [], caught.value
    assert str(path) in str(caught.value)


def test_the_hub_needs_a_split_and_a_network() -> None:
    with pytest.raises(ConfigError, match=r"no file or folder here .*split: train"):
        source("nobody/nothing", format="datasets")
    with pytest.raises(ConfigError, match=r"(?s)the Hugging Face hub does not give it: .*save_to_disk"):
        source("nobody/nothing", format="datasets", arguments={"split": "train", "name": "x", "revision": "y"})
    with pytest.raises(ConfigError, match="nobody/nothing does not exist"):  # a hub name is never guessed
        source("nobody/nothing")


def test_unreadable_row_raises_sample_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = source(save_dataset(tmp_path)[0])
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda self, index: 1 / 0)
    with pytest.raises(SampleError, match="cannot be read: ZeroDivisionError"):
        found[1]


def test_missing_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = save_dataset(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"(?s)is a Hugging Face dataset.*pip install datasets`"):
        source(path)


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, cornstarch.data.formats; print('datasets' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ})
    assert ran.stdout.strip() == "False", ran.stderr
