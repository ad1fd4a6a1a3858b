"""Both files are written whole or not at all, without torch and without pyplot."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from cornstarch.errors import ConfigError
from cornstarch.report import write, write_report
from cornstarch.report.picture import loss_picture
from cornstarch.report.reading import read_run
from tests.report import fake_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake_run.write_run(tmp_path / "demo", total=60, log_every=5, evaluate_every=20)


def test_only_the_two_files_are_added(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    write_report(folder)
    write_report(folder)
    assert {path.name for path in folder.iterdir()} - before == {"report.html", "loss.png"}


def test_the_same_run_gives_the_same_page(folder: Path) -> None:
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


@pytest.mark.parametrize("failing", ["report.html", "loss.png"])
def test_a_full_disk_leaves_the_old_files(failing: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_report(folder).read_bytes()
    fake_run.change_summary(folder, name="new")
    whole = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if failing in path.name:
            whole(path, content[:100])
            raise OSError(28, "No space left on device")
        return whole(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="cannot be written into .*: No space left on device"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == old
    assert not [path for path in folder.iterdir() if "unfinished" in path.name]


def test_a_reader_never_finds_half_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def replace(source: Path, target: Path) -> None:
        seen.append((Path(source).parent, Path(target).name, Path(source).stat().st_size > 1000))
        os.rename(source, target)

    monkeypatch.setattr(write.os, "replace", replace)
    write_report(folder)
    assert seen == [(folder, "loss.png", True), (folder, "report.html", True)]


def test_neither_torch_nor_pyplot_is_imported(folder: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nimport cornstarch.report\n"
        "early = [name for name in ('numpy', 'matplotlib', 'PIL') if name in sys.modules]\n"
        f"cornstarch.report.write_report(Path({str(folder)!r}))\n"
        "print(early, [name for name in ('torch', 'transformers', 'matplotlib.pyplot') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "[] []", ran.stderr


@pytest.mark.parametrize("name", ["demo", "$x^{", "a\nb\x00c", "漢字 \U0001f33d", "n" * 500, ""])
@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")
def test_the_picture_can_be_opened(name: str, folder: Path) -> None:
    fake_run.change_summary(folder, name=name)
    image = Image.open(io.BytesIO(loss_picture(read_run(folder))))
    assert (image.format, image.size) == ("PNG", (1200, 675))


@pytest.mark.parametrize("lines", ["", '{"kind":"train","step":1,"loss":NaN}', '{"kind":"train","step":1,"loss":2}'])
def test_a_picture_of_little(lines: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines)
    image = Image.open(io.BytesIO(loss_picture(read_run(tmp_path)))).convert("L")
    assert image.getextrema() != (255, 255)
