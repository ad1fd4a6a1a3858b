"""The compile cache: a second start compiles nothing again, and no failure of the cache ends a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from cornstarch import allow_code
from cornstarch.kernels import compile_cache
from cornstarch.kernels.compile_cache import CompileCache


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_new_machine(tmp_path / "first machine", monkeypatch)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    yield
    torch.compiler.reset()


def use_new_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch begin without compiled code, as in a new container."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    torch.compiler.reset()
    counters.clear()


def compile_product(width: int) -> dict[str, int]:
    """Compile a matrix product, which needs no C++ compiler; return whether torch's cache had its graphs."""

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right

    left, right = torch.ones(2, width, requires_grad=True), torch.ones(width, 3)
    product = torch.compile(multiply)(left, right)
    torch.testing.assert_close(product, torch.full((2, 3), float(width)))
    product.sum().backward()  # torch keeps a graph together with its backward pass
    return {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}


class Opened:
    """A cache with what it has logged."""

    def __init__(self, folder: Path, key: str = "a", is_writer: bool = True) -> None:
        self.lines: list[str] = []
        self.cache = CompileCache(folder, {"key": key}, is_writer, self.lines.append)


def test_a_second_start_on_another_machine_finds_what_the_first_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Opened(tmp_path / "cache")
    assert first.cache.load() == 0
    assert compile_product(5) == {"hit": 0, "miss": 1}
    first.cache.save(compilations=1)
    use_new_machine(tmp_path / "second machine", monkeypatch)
    second = Opened(tmp_path / "cache")
    assert second.cache.load() > 0 and "of an earlier start" in second.lines[0]
    assert compile_product(5) == {"hit": 1, "miss": 0}
    written = second.cache.file.stat().st_mtime_ns
    second.cache.save(compilations=1)
    assert second.cache.file.stat().st_mtime_ns == written  # nothing new
    assert not first.lines


def test_without_the_file_the_second_start_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_product(6)
    use_new_machine(tmp_path / "second machine", monkeypatch)
    assert Opened(tmp_path / "cache").cache.load() == 0
    assert compile_product(6) == {"hit": 0, "miss": 1}


def test_artifacts_are_written_when_steps_compile_nothing_more(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    compile_product(7)
    for step in range(1, 11):
        opened.cache.save_when_settled(1, step)
    assert not opened.cache.file.exists()
    opened.cache.save_when_settled(1, 11)
    assert opened.cache.file.exists()


def test_one_of_several_ranks_with_equal_graphs_writes(tmp_path: Path) -> None:
    compile_product(8)
    Opened(tmp_path, is_writer=False).cache.save(1)
    assert not list(tmp_path.glob("*.artifacts"))


def test_a_damaged_file_is_reported_ignored_and_replaced(tmp_path: Path) -> None:
    compile_product(9)
    first = Opened(tmp_path / "cache")
    first.cache.save(1)
    right = first.cache.file.read_bytes()
    first.cache.file.write_bytes(right[:-5] + b"wrong")
    second = Opened(tmp_path / "cache")
    assert second.cache.load() == 0
    assert second.lines == [
        f"compile cache: {first.cache.file} is not read: the file is damaged. Training goes on without it."
    ]
    second.cache.save(1)
    assert Opened(tmp_path / "cache").cache.load() > 0


def test_what_another_user_has_written_is_loaded_only_if_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_product(10)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "one"))
    first = Opened(tmp_path / "cache")
    first.cache.save(1)
    assert Opened(tmp_path / "cache").cache.load() > 0
    assert (tmp_path / "one/cornstarch/signing.key").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    second = Opened(tmp_path / "cache")
    assert second.cache.load() == 0
    assert f"another user or machine has written it; to run its code, add --allow-code {tmp_path}" in second.lines[0]
    allow_code(str(tmp_path / "cache"))
    assert Opened(tmp_path / "cache").cache.load() > 0


def test_without_a_key_nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_product(14)
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no folder"))
    Opened(tmp_path / "cache").cache.save(1)
    assert Opened(tmp_path / "cache").cache.load() == 0
    assert [path.name for path in (tmp_path / "cache").glob("*.artifacts")]


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    compile_product(11)
    (tmp_path / "cache").write_text("a file, not a folder")
    opened = Opened(tmp_path / "cache")
    opened.cache.load()
    opened.cache.save(1)
    opened.cache.save(2)
    assert len(opened.lines) == 1 and "Training goes on without it." in opened.lines[0]


def test_a_full_disk_of_torchs_own_cache_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_product(12)
    Opened(tmp_path / "cache").cache.save(1)

    def fail(content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fail)
    opened = Opened(tmp_path / "cache")
    assert opened.cache.load() == 0
    assert "is not read: No space left on device. Training goes on" in opened.lines[0]


def test_files_that_were_not_used_for_the_longest_time_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_product(13)
    files = []
    for age, key in enumerate("abc"):
        opened = Opened(tmp_path, key)
        opened.cache.save(1)
        os.utime(opened.cache.file, (1000 + age, 1000 + age))
        files.append(opened.cache.file)
    assert len({path.stat().st_size for path in files}) == 1
    assert Opened(tmp_path, "a").cache.load() > 0  # used now
    monkeypatch.setattr(compile_cache, "LIMIT", 3 * files[0].stat().st_size)
    Opened(tmp_path, "d").cache.save(1)
    assert [path.exists() for path in files] == [True, False, True]
    monkeypatch.setattr(compile_cache, "LIMIT", 10)
    opened = Opened(tmp_path, "e")
    opened.cache.save(1)
    assert "more than all files together may take" in opened.lines[0] and not opened.cache.file.exists()
