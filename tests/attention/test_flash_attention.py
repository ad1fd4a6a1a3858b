"""FlashAttention-4's package and masks without a GPU, against the same masks written out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cornstarch.attention import flash_attention
from cornstarch.attention.flash_attention import (
    ENTRY_SIZE,
    DocumentMask,
    attend_documents,
    attend_range,
    build_document_mask,
)
from cornstarch.attention.mask import BLOCK_SIZE
from tests.attention.packed_masks import (
    SPECS,
    assert_compiled_once,
    assert_equals_dense_mask,
    assert_gradients,
    attend_densely,
    pack_rows,
    pad_row,
)

SWITCH, FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Clear the environment and put temporary files in the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (SWITCH, FOLDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield tmp_path / f"cornstarch_{os.getuid()}"


def test_kernels_are_cached_in_a_private_folder(cache_folder: Path) -> None:
    for _ in range(2):
        flash_attention.enable_kernel_cache()
        assert os.environ.pop(SWITCH) == "1" and os.environ.pop(FOLDER) == str(cache_folder / "flash_attention")
    assert cache_folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_not_used(cache_folder: Path, tmp_path: Path) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(0o777)
    flash_attention.enable_kernel_cache()
    assert SWITCH not in os.environ
    cache_folder.rmdir()
    (tmp_path / "another").mkdir(mode=0o700)
    cache_folder.symlink_to(tmp_path / "another")
    flash_attention.enable_kernel_cache()
    assert SWITCH not in os.environ


def test_a_file_in_place_of_the_folder_is_no_error(cache_folder: Path) -> None:
    cache_folder.write_text("")
    flash_attention.enable_kernel_cache()
    assert SWITCH not in os.environ


def test_the_users_environment_is_respected(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    monkeypatch.setenv(SWITCH, "0")
    flash_attention.enable_kernel_cache()
    assert os.environ[SWITCH] == "0" and FOLDER not in os.environ and not cache_folder.exists()


def test_a_package_that_cannot_be_imported_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path
) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    for folder in ("flash_attn", "flash_attn/cute"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("raise AttributeError('of another version')")
    (tmp_path / "flash_attn_4.dist-info").mkdir()
    (tmp_path / "flash_attn_4.dist-info" / "METADATA").write_text(
        f"Name: flash-attn-4\nVersion: {flash_attention.SUPPORTED_VERSIONS[0]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flash_attention.has_flash.cache_clear()
    try:
        assert not flash_attention.has_flash()
    finally:
        flash_attention.has_flash.cache_clear()


def test_an_unsupported_version_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("unsupported versions must not be imported")

    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.0.0b99")
    monkeypatch.setattr(flash_attention, "load_package", refuse)
    flash_attention.has_flash.cache_clear()
    try:
        assert not flash_attention.has_flash()
    finally:
        flash_attention.has_flash.cache_clear()


def lists(found: DocumentMask, tokens: int) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Return the starts of documents, ends, firsts, and the entries of the block order."""
    assert found.ends is not None and found.firsts is not None
    front = int(found.sizes[1])
    begins, ends, order = found.ends.split([front, tokens, len(found.ends) - front - tokens])
    assert torch.equal(found.firsts[:front], begins) and torch.equal(found.firsts[front + tokens :], order)
    firsts = found.firsts[front : front + tokens]
    return begins.tolist(), ends.tolist(), firsts.tolist(), order.unflatten(0, (-1, ENTRY_SIZE)).tolist()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_documents_equal_dense_mask(name: str, heads: tuple[int, int]) -> None:
    assert_equals_dense_mask(
        name, heads, lambda spec, inputs: attend_documents(*inputs, build_document_mask(spec), 0.3)
    )


def test_listed_limits() -> None:
    spec = pack_rows([[4, 6], [7, 3]], {0: [(1, 3, 0), (6, 9, 1)], 1: [(0, 2, 0)]})
    begins, ends, firsts, _ = lists(build_document_mask(spec), 20)
    assert begins == [0, 4, 10, 17, 20]
    assert ends == [1, 3, 3, 4, 1, 2, 5, 5, 5, 6, 2, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert firsts == [0, 1, 1, 3, 0, 1, 2, 2, 2, 5, 0, 0, 2, 3, 4, 5, 6, 0, 1, 2]


def test_rows_of_one_document_each() -> None:
    plain = build_document_mask(pad_row(pack_rows([[8], [8]]), 0, 6))
    assert plain.ends is None and plain.firsts is None, "kernels for plain rows need none"
    begins, ends, firsts, _ = lists(build_document_mask(pad_row(pack_rows([[8], [8]], {1: [(2, 5, 0)]}), 0, 6)), 16)
    assert begins == [0, 8, 16]
    assert ends == [*range(1, 9), 1, 2, 5, 5, 5, 6, 7, 8], "trailing padding is treated as a part of the row"
    assert firsts == [*range(8), 0, 1, 2, 2, 2, 5, 6, 7]


def test_every_block_has_an_entry_and_the_longest_document_comes_first() -> None:
    lengths = [5, 2 * BLOCK_SIZE + 1, BLOCK_SIZE, 3]
    spec = pack_rows([lengths])
    _, _, _, order = lists(build_document_mask(spec), sum(lengths))
    long, middle = [1, 0, 2 * BLOCK_SIZE + 1, 5], [2, 3, BLOCK_SIZE, 2 * BLOCK_SIZE + 6]
    assert order[:6] == [long] * 3 + [middle, [0, 4, 5, 0], [3, 5, 3, 3 * BLOCK_SIZE + 6]]
    assert {entry[0] for entry in order[6:]} == {-1}
    front = len(lists(build_document_mask(spec), sum(lengths))[0])
    assert len(order) == (sum(lengths) + (front - 1) * (BLOCK_SIZE - 1)) // BLOCK_SIZE, "the number that kernels expect"


def test_limits_never_decrease_within_a_document() -> None:
    """Kernels read only the limit of the last query of a tile, and of the first key."""
    for spec in SPECS.values():
        found = build_document_mask(spec)
        if found.ends is None:
            continue
        tokens = spec.documents.numel()
        begins, ends, firsts, _ = lists(found, tokens)
        for begin, end in zip(begins[:-1], begins[1:], strict=True):
            assert ends[begin:end] == sorted(ends[begin:end]) and firsts[begin:end] == sorted(firsts[begin:end])
            assert all(place < seen <= end - begin for place, seen in enumerate(ends[begin:end]))
            assert all(0 <= first <= place for place, first in enumerate(firsts[begin:end]))


@pytest.mark.timeout(1200)  # compiles C++, which takes minutes on a busy machine
def test_compiled_layer_does_not_recompile_for_ragged_batches() -> None:
    assert_compiled_once(attend_documents, build_document_mask)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_ranges_equal_dense_mask(name: str, heads: tuple[int, int]) -> None:
    spec = SPECS[name]
    rows, tokens = spec.documents.shape
    torch.manual_seed(0)
    inputs = [torch.randn(rows, n, tokens, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    weight = torch.randn(rows, tokens, heads[0], 8)
    reference, exact = attend_densely(spec, inputs, weight)
    found = attend_range(*inputs, spec.build_range_mask(), 0.3)
    (found * weight).sum().backward()
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
    assert_gradients(inputs, exact)


@pytest.mark.parametrize("name", SPECS)
def test_ranges_of_some_queries_and_keys_in_another_order(name: str) -> None:
    spec = SPECS[name]
    rows, tokens = spec.documents.shape
    torch.manual_seed(0)
    inputs = [torch.randn(rows, 4, tokens, 8, requires_grad=True) for _ in range(3)]
    queries, keys = torch.randperm(tokens)[: tokens // 2], torch.randperm(tokens)
    weight = torch.zeros(rows, tokens, 4, 8)
    weight[:, queries] = torch.randn(rows, len(queries), 4, 8)
    reference, exact = attend_densely(spec, inputs, weight)
    places = (queries, keys, keys)
    cut = [one[:, :, where] for one, where in zip(inputs, places, strict=True)]
    found = attend_range(*cut, spec.build_range_mask(queries=queries, keys=keys), 0.3)
    (found * weight[:, queries]).sum().backward()
    torch.testing.assert_close(found.double(), reference[:, queries], rtol=1e-5, atol=1e-5)
    assert_gradients(inputs, exact)
