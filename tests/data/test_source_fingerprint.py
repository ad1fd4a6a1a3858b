"""Ranks that read other rows than rank 0 are refused before they train."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cornstarch.config import SourceConfig
from cornstarch.data import source_fingerprint
from cornstarch.data.formats import open_source
from cornstarch.data.source_fingerprint import check_same_sources, compute_fingerprint
from cornstarch.errors import ConfigError
from cornstarch.parallel import distributed
from tests.parity.pool import pool

ROWS = [{"text": f"row number {number}"} for number in range(9)]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check_own(folder: str) -> str:
    """Check the file that this rank has under its own folder; return what was refused."""
    os.chdir(Path(folder) / f"node-{distributed.rank()}")
    config = SourceConfig(path="rows.jsonl")
    try:
        check_same_sources([config], [open_source(config)], "data.train")
    except ConfigError as error:
        return str(error)
    finally:
        os.chdir("/")
    return ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ROWS, ""),
        (ROWS[:-1], "rank 0 has 9 rows, rank 1 has 8"),
        ([*ROWS[:4], {"text": "row number Q"}, *ROWS[5:]], "the files of ranks 0 and 1 differ"),
    ],
    ids=["equal", "a row less", "one letter"],
)
def test_all_ranks_refuse_other_rows_on_one(other: list[dict[str, str]], message: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "node-0/rows.jsonl", ROWS)
    write_rows(tmp_path / "node-1/rows.jsonl", other)
    said = pool().run(2, check_own, str(tmp_path))
    assert said[0] == said[1] and bool(said[0]) == bool(message)
    assert message in said[0]
    assert not message or said[0].startswith("data.train.0 = rows.jsonl")


def test_a_change_anywhere_in_a_file_changes_its_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    content = bytearray(os.urandom(300_000))
    path.write_bytes(content)
    config = SourceConfig(path=str(path))
    before = compute_fingerprint(config)
    for at in (0, 65_536, 150_000, 299_999):
        content[at] ^= 1
        path.write_bytes(content)
        assert compute_fingerprint(config) != before
        content[at] ^= 1
    path.write_bytes(content)
    assert compute_fingerprint(config) == before


def test_of_a_large_file_blocks_at_even_distances_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_fingerprint, "_BUDGET", 4 << 16)
    path = tmp_path / "rows.bin"
    content = bytearray(20 << 16)
    path.write_bytes(content)
    before = compute_fingerprint(SourceConfig(path=str(path)))
    content[-1] = 1
    path.write_bytes(content)
    assert compute_fingerprint(SourceConfig(path=str(path))) != before
    path.write_bytes(content + b"x")
    assert compute_fingerprint(SourceConfig(path=str(path))) != before


def test_folders_are_told_apart_by_names_and_contents(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        write_rows(folder / "x.jsonl", ROWS)
    of = {folder: compute_fingerprint(SourceConfig(path=str(folder))) for folder in (first, second)}
    assert of[first] == of[second]
    (second / "x.jsonl").rename(second / "y.jsonl")
    assert compute_fingerprint(SourceConfig(path=str(second))) != of[first]
    assert compute_fingerprint(SourceConfig(path="my_rows:rows")) == ""
