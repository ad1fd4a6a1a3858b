"""What there is around FlashAttention-4's kernels, without a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cornstarch.attention import flash

KEPT, WHERE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is said in the environment, and temporary files go to the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (KEPT, WHERE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield tmp_path / f"cornstarch_{os.getuid()}"


def test_what_is_compiled_is_kept_in_a_folder_of_ones_own(elsewhere: Path) -> None:
    for _ in range(2):
        flash.keep_compiled()
        assert os.environ.pop(KEPT) == "1" and os.environ.pop(WHERE) == str(elsewhere / "flash_attention")
    assert elsewhere.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_not_trusted(elsewhere: Path, tmp_path: Path) -> None:
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    flash.keep_compiled()
    assert KEPT not in os.environ
    elsewhere.rmdir()
    (tmp_path / "another").mkdir(mode=0o700)
    elsewhere.symlink_to(tmp_path / "another")
    flash.keep_compiled()
    assert KEPT not in os.environ


def test_a_file_in_its_place_is_no_error(elsewhere: Path) -> None:
    elsewhere.write_text("")
    flash.keep_compiled()
    assert KEPT not in os.environ


def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    monkeypatch.setenv(KEPT, "0")
    flash.keep_compiled()
    assert os.environ[KEPT] == "0" and WHERE not in os.environ and not elsewhere.exists()


def test_a_package_that_cannot_be_imported_is_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    for folder in ("flash_attn", "flash_attn/cute"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("raise AttributeError('of another version')")
    (tmp_path / "flash_attn_4.dist-info").mkdir()
    (tmp_path / "flash_attn_4.dist-info" / "METADATA").write_text(f"Name: flash-attn-4\nVersion: {flash.TRIED[0]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    flash.has_flash.cache_clear()
    try:
        assert not flash.has_flash()
    finally:
        flash.has_flash.cache_clear()


def test_another_version_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted() -> None:
        raise AssertionError("its insides may be others")

    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.0.0b99")
    monkeypatch.setattr(flash, "package", unwanted)
    flash.has_flash.cache_clear()
    try:
        assert not flash.has_flash()
    finally:
        flash.has_flash.cache_clear()
