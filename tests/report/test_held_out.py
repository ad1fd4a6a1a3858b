"""The media of samples: embedded when they can be, and when not, said why."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy
import pytest
from PIL import Image

from cornstarch.report.held_out import embed_media
from tests.report import fake_run


def decode_source(html: str) -> bytes:
    found = re.search(r'src="data:[a-z]+/[a-z]+;base64,([^"]+)"', html)
    assert found is not None, html[:300]
    return base64.b64decode(found[1])


def picture(html: str) -> Image.Image:
    return Image.open(io.BytesIO(decode_source(html)))


def test_small_image_is_embedded_unchanged_and_enlarged(tmp_path: Path) -> None:
    fake_run.digit_image(4).save(tmp_path / "a.png")
    html = embed_media(tmp_path, "image", "a.png", 1)
    assert decode_source(html) == (tmp_path / "a.png").read_bytes()
    assert 'class="tiny"' in html and 'width="144" height="144"' in html and 'alt="image of sample 1"' in html


def test_large_image_is_scaled_down(tmp_path: Path) -> None:
    noise = numpy.random.default_rng(0).integers(0, 255, (1500, 2000, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    html = embed_media(tmp_path, "image", "a.png", 1)
    assert picture(html).size == (640, 480)
    assert "tiny" not in html
    assert len(html) < 600_000


def test_formats_that_browsers_do_not_know_are_converted(tmp_path: Path) -> None:
    fake_run.photo(300, 200).save(tmp_path / "a.tiff")
    assert picture(embed_media(tmp_path, "image", "a.tiff", 1)).format == "JPEG"


def test_sound_is_embedded_with_controls(tmp_path: Path) -> None:
    fake_run.write_sound(tmp_path / "a.wav", 440)
    html = embed_media(tmp_path, "audio", "a.wav", 2)
    assert html.startswith("<audio controls") and 'aria-label="audio of sample 2"' in html
    assert decode_source(html) == (tmp_path / "a.wav").read_bytes()


SHAPES = [
    ((48, 20), (48, 20)),
    ((20, 48), (48, 20)),
    ((1, 20, 48), (48, 20)),
    ((30,), (30, 1)),
    ((3000, 80), (600, 80)),
]


@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_features_are_a_heat_map(shape: tuple[int, ...], size: tuple[int, int], tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.arange(numpy.prod(shape), dtype=numpy.float32).reshape(shape))
    html = embed_media(tmp_path, "audio", "a.npy", 1)
    assert picture(html).size == size
    assert " × ".join(map(str, shape)) in html


def test_a_heat_map_is_dark_where_values_are_low(tmp_path: Path) -> None:
    table = numpy.array([[0.0, 1.0, numpy.nan], [0.5, 0.0, 0.0]])
    numpy.save(tmp_path / "a.npy", table)
    pixels = numpy.asarray(picture(embed_media(tmp_path, "audio", "a.npy", 1)).convert("RGB")).astype(int)
    below = pixels[1]  # the first row lies at the bottom
    assert below[0].sum() < pixels[0, 0].sum() < below[1].sum()
    assert below[2].tolist() == [255, 0, 110]


def write_broken_files(folder: Path) -> dict[str, str]:
    """Write files that cannot be shown, and return what is said about each."""
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    whole = io.BytesIO()
    fake_run.photo(300, 300).save(whole, "PNG")
    (folder / "torn.png").write_bytes(whole.getvalue()[:2000])
    Image.new("1", (9000, 9000)).save(folder / "vast.png")
    with open(folder / "long.wav", "wb") as file:
        file.truncate(4_000_000)
    (folder / "bad.npy").write_text("no array")
    numpy.save(folder / "code.npy", numpy.array([object()]), allow_pickle=True)
    numpy.save(folder / "empty.npy", numpy.zeros((0, 3)))
    numpy.save(folder / "words.npy", numpy.array(["a", "b"]))
    (folder / "folder.png").mkdir()
    return {
        "missing.png": "is missing",
        "folder.png": "is missing",
        "../secret.png": "does not lie in the run&#39;s folder",
        "link.png": "does not lie in the run&#39;s folder",
        "/etc/passwd": "does not lie in the run&#39;s folder",
        "empty.png": "could not be read",
        "text.png": "could not be read",
        "torn.png": "could not be read",
        "vast.png": "is too large to show (9000 × 9000 pixels)",
        "long.wav": "is too large to embed (3.8\xa0MiB, at most 2.9\xa0MiB)",
        "bad.npy": "could not be read",
        "code.npy": "could not be read",
        "empty.npy": "cannot be drawn",
        "words.npy": "cannot be drawn",
        "a\0b": "could not be read",
        "x" * 5000: "could not be read",
        "<script>.png": "&lt;script&gt;.png is missing",
    }


def test_unusable_files_are_replaced_by_the_reason(tmp_path: Path) -> None:
    fake_run.digit_image(1).save(tmp_path / "secret.png")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    for name, said in write_broken_files(folder).items():
        html = embed_media(folder, "image", name, 1)
        assert said in html, name[:50]
        assert "data:" not in html and html.startswith("<p") and len(html) < 1000
