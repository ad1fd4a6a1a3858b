"""The index of a JSON list against `json.load`: brackets in texts, escapes across chunks, damaged files, the cache."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornstarch.data import json_index
from cornstarch.data.file_formats import JsonList, open_json
from cornstarch.data.sample import SampleError
from cornstarch.errors import ConfigError
from tests.data.small_data import write_rows

TEXTS = st.text(st.sampled_from('ab"\\[]{},: \n\té漢😀'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(VALUES, min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.sampled_from(["", "\ufeff", " \n"]),
)
def test_rows_are_those_of_json(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], chunk: int, indent: int | None, ascii: bool, head: str
) -> None:
    path = tmp_path_factory.mktemp("json") / "rows.json"
    path.write_text(head + json.dumps(rows, indent=indent, ensure_ascii=ascii) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_index, "_CHUNK", chunk)
        found = JsonList(path)
    assert [found[number] for number in range(len(found))] == rows


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"a": 1},\n{"a": "x', r"rows.json:2 is no JSON: the file ends at byte 19 inside a text"),
        ('[{"a": 1},\n{"a": [2}\n', r"rows.json:3 is no JSON: the file ends at byte 21 with 2 open brackets"),
        ('[{"a": 1}]\n{"a": 2}', r"rows.json:2 is no JSON: after the end of its list, at byte 11, stands '{\"a\": 2}'"),
        ('[{"a": 1},\n]', r"rows.json:1 is no JSON: a comma stands before the end"),
        ('[{"a": 1},\n{"a": 2}}', r"rows.json:2 is no JSON: '}' ends its list; expected '\]'"),
        ("[ \n ]", "holds a list without rows"),
    ],
)
def test_damaged_lists_are_refused_with_their_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        JsonList(path)


def test_a_damaged_row_concerns_no_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, {"a": oops}, {"a": 3}]')
    rows = JsonList(path)
    assert (len(rows), rows[0], rows[2], rows.name(2)) == (3, {"a": 1}, {"a": 3}, "rows.json:3")
    with pytest.raises(SampleError, match="is no JSON"):
        rows[1]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("content", ['[{"a": 1}]', '{"a": 1}\n'])
def test_other_encodings_are_refused(tmp_path: Path, encoding: str, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content.encode(encoding))
    with pytest.raises(ConfigError, match=r"is no UTF-8: it begins with .*iconv -f UTF-16 -t UTF-8"):
        open_json(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b'{"a": ' + b"1" * 5000 + b"}", "4300 digits"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
        (rb'{"a": "b \ud83d c"}', r"half of a character, '\\ud83d'"),
        (rb'{"\uDE00": 1}', r"half of a character, '\\ude00'"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": "\xed\xa0\xbd"}', "utf-8"),  # half of a character as bytes, which json.loads takes
        (b"", "is no JSON"),
    ],
)
def test_odd_rows_are_broken_samples(tmp_path: Path, row: bytes, said: str) -> None:
    good = rb'{"b": 0, "b": "\ud83d\ude00 \u005b\u0022"}'  # the last of equal names counts, as for json.load
    path = tmp_path / "rows.json"
    path.write_bytes(b"[" + good + b"," + row + b",\r\n" + good + b"]")
    rows = open_json(path)
    assert len(rows) == 3 and rows[0] == rows[2] == {"b": '😀 ["'}
    with pytest.raises(SampleError, match=said):
        rows[1]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_file_that_changes_while_it_is_read_ends_the_run(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / name, [{"a": number} for number in range(9)])
    rows = open_json(path)
    write_rows(path, [{"a": "longer"}, *({"a": number} for number in range(9))])
    with pytest.raises(ConfigError, match=rf"{name} has changed since it was opened"):
        [rows[number] for number in range(9)]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A file whose index is stored; returns the files that were scanned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(json_index, "_STORED_FROM", 0)
    scanned: list[Path] = []
    scan = json_index.scan_separators

    def record(path: Path) -> Any:
        scanned.append(path)
        return scan(path)

    monkeypatch.setattr(json_index, "scan_separators", record)
    (tmp_path / "rows.json").write_text(json.dumps([{"a": number} for number in range(9)]))
    return scanned


def test_a_stored_index_is_used_until_the_file_changes(tmp_path: Path, stored: list[Path]) -> None:
    path = tmp_path / "rows.json"
    assert JsonList(path)[8] == JsonList(path)[8] == {"a": 8}
    assert len(stored) == 1
    path.write_text(json.dumps([{"b": number} for number in range(9)]))  # the same size
    os.utime(path, ns=(1, 1))
    assert JsonList(path)[8] == {"b": 8}
    assert len(stored) == 2
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 1  # that of the earlier state is gone


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_index_is_built_again(tmp_path: Path, stored: list[Path], damage: str) -> None:
    path = tmp_path / "rows.json"
    JsonList(path)
    (index,) = (tmp_path / "cache").rglob("*.npy")
    content = bytearray(index.read_bytes())
    content[-20] ^= 1
    index.write_bytes({"cut": content[:-9], "changed": content, "empty": b""}[damage])
    assert [JsonList(path)[n]["a"] for n in range(9)] == list(range(9))
    assert len(stored) == 2


def test_several_processes_scan_once(tmp_path: Path, stored: list[Path]) -> None:
    path, log = tmp_path / "rows.json", tmp_path / "scans"
    scan = json_index.scan_separators

    def count(path: Path) -> Any:
        with open(log, "a") as file:
            file.write("x")
        return scan(path)

    json_index.scan_separators = count  # restored by the fixture
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0 if JsonList(path)[4] == {"a": 4} else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert log.read_text() == "x"


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, stored: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert JsonList(tmp_path / "rows.json")[3] == {"a": 3}


def test_a_cache_without_locks_is_no_obstacle(
    tmp_path: Path, stored: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(json_index.fcntl, "flock", refuse)
    assert JsonList(tmp_path / "rows.json")[3] == {"a": 3}
