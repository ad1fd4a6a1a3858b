"""Rows of every format become the expected samples, formats can be registered, and every mistake is reported."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from cornstarch import allow_code
from cornstarch.config import SourceConfig
from cornstarch.data.file_formats import JsonLines, expand_braces
from cornstarch.data.formats import open_rows, open_source, open_sources, register_data_source
from cornstarch.data.sample import Media, Message, Sample, SampleError
from cornstarch.errors import ConfigError
from tests.data.small_data import png, write_rows


def source(path: Path | str, **options: Any) -> Any:
    return open_source(SourceConfig(path=str(path), **options))


def user(*content: str | Media) -> Message:
    return Message("user", content)


def assistant(*content: str | Media) -> Message:
    return Message("assistant", content)


CAT, DOG, BARK = (
    Media("image", "{folder}/cat.png"),
    Media("image", "{folder}/a/dog.png"),
    Media("audio", "/far/bark.wav"),
)

# name: (row, detected format, messages or document)
ROWS: dict[str, tuple[dict[str, Any], str, tuple[Any, ...]]] = {
    "llava": (
        {
            "id": "7",
            "image": "cat.png",
            "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a cat"}],
        },
        "llava",
        (user(CAT, "\n", "what?"), assistant("a cat")),
    ),
    "llava without media": (
        {"conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}]},
        "llava",
        (Message("system", ("be kind",)), user("hi")),
    ),
    "sharegpt, images and sounds": (
        {
            "images": ["cat.png", "a/dog.png"],
            "audios": ["/far/bark.wav"],
            "messages": [
                {"role": "user", "content": "<image> or <image><audio>?"},
                {"role": "assistant", "content": "dog"},
            ],
        },
        "sharegpt",
        (user(CAT, " or ", DOG, BARK, "?"), assistant("dog")),
    ),
    "typed parts": (
        {
            "images": ["cat.png"],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image"},
                        {"type": "text", "text": "and"},
                        {"type": "image", "image": "a/dog.png"},
                    ],
                },
                {"role": "assistant", "content": "yes"},
            ],
        },
        "sharegpt",
        (user(CAT, "and", DOG), assistant("yes")),
    ),
    "text": ({"text": "once upon"}, "text", ("once upon",)),
    "source and target": ({"source": "a", "target": "b"}, "pairs", (user("a"), assistant("b"))),
    "text and label": ({"text": "good", "label": 1}, "pairs", (user("good"), assistant("1"))),
    "image and label": ({"image": "cat.png", "label": "cat"}, "pairs", (user(CAT), assistant("cat"))),
    "image and text": ({"image": "a/dog.png", "text": "a dog"}, "pairs", (user(DOG), assistant("a dog"))),
    "audio and text": ({"audio": "/far/bark.wav", "text": "woof"}, "pairs", (user(BARK), assistant("woof"))),
    "text about an image": (
        {"text": "what <image>", "image": "cat.png", "label": "cat"},
        "pairs",
        (user("what ", CAT), assistant("cat")),
    ),
}


def resolve_media(content: tuple[Any, ...], folder: Path) -> tuple[Any, ...]:
    """Put the folder into the paths."""
    return tuple(
        Media(part.kind, part.source.format(folder=folder)) if isinstance(part, Media) else part for part in content
    )


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("given", ["auto", "named"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_a_sample(tmp_path: Path, name: str, given: str, suffix: str) -> None:
    row, format, expected = ROWS[name]
    path = write_rows(tmp_path / f"data{suffix}", [row, row])
    found = source(path, format=format if given == "named" else "auto")
    assert len(found) == 2 and format in found.description and str(path) in found.description
    sample = found[1]
    assert sample.id == found.name(1) == f"data{suffix}:2"
    if format == "text":
        assert sample.document == expected and sample.messages == ()
    else:
        assert sample.messages == tuple(Message(m.role, resolve_media(m.content, tmp_path)) for m in expected)
    assert {
        key: value for key, value in sample.fields.items() if key not in ("image", "images", "audio", "audios")
    } == {key: value for key, value in row.items() if key not in ("image", "images", "audio", "audios")}
    if "image" in row:
        assert sample.fields["image"] == Media("image", str(tmp_path / row["image"]))


def test_an_interleaved_document(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"text": "one <image> two <image>", "images": ["x.png", "y.png"]}])
    found = source(path, media="/pictures")
    assert found[0].document == (
        "one ", Media("image", "/pictures/x.png"), " two ", Media("image", "/pictures/y.png"),
    )  # fmt: skip
    assert found[0].fields["images"] == [Media("image", "/pictures/x.png"), Media("image", "/pictures/y.png")]


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": \n{"text": "\xff"}\n{"text": "b"}')
    found = source(path)
    assert [found.name(i) for i in range(len(found))] == ["d.jsonl:1", "d.jsonl:4", "d.jsonl:5", "d.jsonl:6"]
    assert [found[0].document, found[3].document] == [("a",), ("b",)]
    for broken in (1, 2):
        with pytest.raises(SampleError, match="no JSON"):
            found[broken]


def test_a_million_rows_are_not_parsed_at_opening(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a word"}\n' * 999_999 + "no json")
    start = time.process_time()
    rows = JsonLines(path)
    assert time.process_time() - start < 2
    assert len(rows) == 1_000_000 and rows[999_998] == {"text": "a word"} and rows.name(999_999) == "d.jsonl:1000000"


@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
def test_a_source_can_be_sent_to_another_process(tmp_path: Path, name: str) -> None:
    found = source(write_rows(tmp_path / name, [{"text": "a"}, {"text": "b"}]))
    assert found[0].document == ("a",)
    assert pickle.loads(pickle.dumps(found))[1].document == ("b",)


def test_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"text": "a"}, {"text": "b"}])
    found = source(path)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"has changed since it was opened.* shorter"):
        found[1]


def test_limit_takes_the_first_samples(tmp_path: Path) -> None:
    found = source(write_rows(tmp_path / "d.jsonl", [{"text": str(i)} for i in range(9)]), limit=4)
    assert len(found) == 4 and "first 4" in found.description and found[3].document == ("3",)


def test_columns_are_renamed(tmp_path: Path) -> None:
    rows = [{"picture": "x.png", "caption": "a cat", "n": 3}]
    columns = {"columns": {"image": "picture", "text": "caption"}}
    found = source(write_rows(tmp_path / "d.jsonl", rows), arguments=columns)
    assert found[0].messages == (user(Media("image", str(tmp_path / "x.png"))), assistant("a cat"))
    assert found[0].fields["n"] == 3


def test_joined_sources_have_one_index(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{n}.jsonl", [{"text": f"{n}{i}"} for i in range(n)]) for n in (3, 1, 2)]
    joined = open_sources([SourceConfig(path=str(path)) for path in paths])
    assert joined.lengths == [3, 1, 2] and len(joined) == 6
    assert [joined[i].document[0] for i in range(6)] == ["30", "31", "32", "10", "20", "21"]
    assert joined.name(4) == "2.jsonl:1" and joined.description.count("\n") == 2


# ------------------------------------------------------------------------------------------------ functions


def some_rows(count: int = 2) -> list[dict[str, str]]:
    return [{"source": str(i), "target": "t"} for i in range(count)]


def some_samples() -> Any:
    yield Sample("mine", (user("a"), assistant("b")))


def a_table() -> Any:
    class Table:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, str]:
            if index == 1:
                raise KeyError("gone")
            return {"text": str(index)}

    return Table()


def nothing() -> list[Any]:
    return []


def fail() -> None:
    raise RuntimeError("no luck")


HERE = __name__


def test_functions_return_rows_samples_or_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_data", sys.modules[HERE])
    allow_code("own_data")
    found = source("own_data:some_rows", arguments={"count": 3})
    assert len(found) == 3 and found[2].messages == (user("2"), assistant("t"))
    assert found.name(2) == "own_data:some_rows:3" and "function" in found.description
    assert source("own_data:some_samples", format="callable")[0].id == "mine"
    table = source("own_data:a_table")
    assert table[2].document == ("2",)
    with pytest.raises(SampleError, match="KeyError: 'gone'"):
        table[1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_data:nothing", "returned nothing"),
        ("own_data:fail", "RuntimeError: no luck"),
        ("own_data:missing", "cannot be imported"),
        ("no_such_module_of_ours:f", "cannot be imported"),
        ("own_data:HERE", "is a str, expected a function"),
    ],
)
def test_failing_function_is_reported(monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, "own_data", sys.modules[HERE])
    allow_code("own_data", "no_such_module_of_ours")
    with pytest.raises(ConfigError, match=message):
        source(path)


# ------------------------------------------------------------------------------------------------ registry


class LineRows:
    """Each line of a text file is a row."""

    def __init__(self, path: str) -> None:
        self.lines = Path(path).read_text().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"line": self.lines[index]}

    def name(self, index: int) -> str:
        return f"line {index + 1}"


def test_registered_format_is_recognized_by_its_path(tmp_path: Path) -> None:
    register_data_source(
        "lines",
        lambda config, given: open_rows(config, LineRows(config.path), "lines of text"),
        matches=lambda config: config.path.endswith(".lines"),
    )
    (tmp_path / "d.lines").write_text("a\nb\nc")
    found = source(tmp_path / "d.lines", arguments={"columns": {"text": "line"}}, limit=2)
    assert [found[number].document for number in range(len(found))] == [("a",), ("b",)]
    assert found.name(1) == "line 2" and "lines of text, text, 3 samples" in found.description
    with pytest.raises(ConfigError, match="'lines' is registered already"):
        register_data_source("lines", lambda config, given: found)


# ------------------------------------------------------------------------------------------------ tars


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_tar_members_with_one_stem_are_one_sample(tmp_path: Path) -> None:
    chat = {
        "image": "old name",
        "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}],
    }
    for number in range(2):
        pictures = {f"{number}{i}": png(seed=10 * number + i) for i in range(3)}
        files = {}
        for key, content in pictures.items():
            files[f"x/{key}.PNG"] = content
            files[f"x/{key}.json"] = json.dumps(chat).encode()
        write_tar(tmp_path / f"part-{number:03d}.tar", files)
    found = source(tmp_path / "part-{000..001}.tar")
    assert len(found) == 6 and "llava" in found.description
    assert found.name(4) == "part-001.tar:x/11"
    assert found[4].messages == (user(Media("image", png(seed=11))), assistant("b"))
    assert pickle.loads(pickle.dumps(found))[4] == found[4]
    assert len(source(tmp_path / "part-*.tar", format="webdataset")) == 6


def test_tars_of_captions_and_classes(tmp_path: Path) -> None:
    captions = write_tar(tmp_path / "a.tar", {"1.jpg": b"J", "1.txt": b"a cat\n", "2.wav": b"W", "2.txt": b"meow"})
    classes = write_tar(tmp_path / "b.tar", {"1.png": b"P", "1.cls": b"3"})
    assert source(captions)[0].messages == (user(Media("image", b"J")), assistant("a cat"))
    assert source(captions)[1].messages == (user(Media("audio", b"W")), assistant("meow"))
    assert source(classes)[0].messages == (user(Media("image", b"P")), assistant("3"))


def test_braces_expand_to_ranges() -> None:
    assert [str(path) for path in expand_braces("a{08..10}/b{1..2}.tar")] == [
        "a08/b1.tar", "a08/b2.tar", "a09/b1.tar", "a09/b2.tar", "a10/b1.tar", "a10/b2.tar",
    ]  # fmt: skip
    assert [str(path) for path in expand_braces("a.tar")] == ["a.tar"]


# ------------------------------------------------------------------------------------------------ mistakes

FILES: dict[str, tuple[str, bytes, dict[str, Any], list[str]]] = {
    "empty": ("d.jsonl", b"", {}, ["d.jsonl is empty"]),
    "white space": ("d.json", b" \n\n ", {}, ["d.json is empty"]),
    "no rows": ("d.json", b"[]", {}, ["d.json is empty"]),
    "broken list": ("d.json", b'[{"text": }]', {}, ["d.json:1", "no JSON"]),
    "cut list": ("d.json", b'[{"text": "a"},', {}, ["d.json:1", "no JSON"]),
    "not UTF-8": ("d.json", b'[{"text": "\xff"}]', {}, ["d.json", "no JSON"]),
    "no JSON": ("d.jsonl", b"id,text\n1,a\n", {}, ["starts with b'i'", "expected a JSON list"]),
    "compressed": ("d.jsonl.gz", b"\x1f\x8b123", {}, ["not compressed"]),
    "a first line that is broken": ("d.jsonl", b'{"text": \n', {}, ["d.jsonl:1", "no JSON"]),
    "no format": ("d.jsonl", b'{"txt": "a"}\n', {}, ["d.jsonl:1 has ['txt']", "`conversations`", "columns"]),
    "rows that are lists": ("d.json", b"[[1, 2]]", {}, ["d.json:1 has list"]),
    "deep": ("d.json", b"[" * 100_000, {}, ["no JSON"]),
    "unknown arguments": ("d.jsonl", b'{"text": "a"}', {"arguments": {"split": "train"}}, ["['split']", "columns"]),
    "missing columns": ("d.jsonl", b'{"a": 1}', {"arguments": {"columns": {"text": "b"}}}, ["['a']", "['b']"]),
    "no tar": ("d.tar", b"x" * 600, {}, ["d.tar is no plain tar"]),
    "an empty tar": ("d.tar", bytes(10240), {}, ["holds no files"]),
}


@pytest.mark.parametrize("name", FILES)
def test_unreadable_file_is_reported(tmp_path: Path, name: str) -> None:
    file, content, options, message = FILES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / file, **options)
    assert [words for words in message if words not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["d.json", "d.tar", "d-{0..2}.tar", "d-*.tar"])
def test_missing_file_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not exist|matches no file"):
        source(tmp_path / name)


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        source(tmp_path)


def test_every_source_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sources([SourceConfig(path=str(tmp_path / name)) for name in ("x.json", "y.json")])
    assert "x.json" in str(caught.value) and "y.json" in str(caught.value)


def chat(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


BROKEN: dict[str, tuple[Any, str]] = {
    "another format": ({"text": "a"}, r"\['text'\], expected sharegpt"),
    "no object": ([1], "is a list"),
    "no turns": (chat(), "empty"),
    "unknown role": (chat({"role": "tool", "content": "x"}), "'tool'"),
    "turn without content": (chat({"role": "user"}), r"\['role'\], expected `role` and `content`"),
    "turn of text": (chat("hi"), "has str"),
    "content of numbers": (chat({"role": "user", "content": 5}), "is a int"),
    "fewer marks": (chat({"role": "user", "content": "x"}, images=["a.png"]), "0 <image> for 1 images"),
    "more marks": (chat({"role": "user", "content": "<audio><audio>"}, audios=["a.wav"]), "2 <audio> for 1 audios"),
    "unknown part": (chat({"role": "user", "content": [{"type": "film"}]}), "expected type text, image or audio"),
    "address": (chat({"role": "user", "content": "<image>"}, image="https://a.org/b.png"), "is an address"),
    "outside": (chat({"role": "user", "content": "<image>"}, image="x/../../b.png"), "leaves the media folder"),
    "number as image": (chat({"role": "user", "content": "<image>"}, image=7), "image is 7"),
    "empty path": (chat({"role": "user", "content": "<image>"}, image=""), "expected a path"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_row_raises_sample_error(tmp_path: Path, name: str) -> None:
    row, message = BROKEN[name]
    good = chat({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    found = source(write_rows(tmp_path / "d.jsonl", [good, row]))
    assert found[0].messages == (user("x"), assistant("y"))
    with pytest.raises(SampleError, match=message):
        found[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"source": "a", "target": None}, "`target` is empty"),
        ({"source": "", "target": "b"}, "`source` is empty"),
        ({"image": None, "label": "b"}, "`image` is empty"),
    ],
)
def test_broken_pair_raises_sample_error(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        source(write_rows(tmp_path / "d.jsonl", [row]), format="pairs")[0]


def test_reading_rows_needs_no_torch() -> None:
    code = (
        "import sys, cornstarch.data.formats, cornstarch.data.sampler, cornstarch.data.media, "
        "cornstarch.data.chat; from cornstarch.data import EpochOrder, check_data;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert ran.stdout.strip() == "[]", ran.stderr
