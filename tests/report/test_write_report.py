"""Both files are written whole or not at all, without torch and without pyplot."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from cornstarch.errors import ConfigError
from cornstarch.report import write_report
from cornstarch.report.run_record import read_run
from cornstarch.report.run_report import plot_loss
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


def test_report_is_deterministic(folder: Path) -> None:
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


@pytest.mark.parametrize("failing", ["report.html", "loss.png"])
def test_full_disk_leaves_the_old_files(failing: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_files_are_replaced_atomically(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def replace(source: Path, target: Path) -> None:
        seen.append((Path(source).parent, Path(target).name, Path(source).stat().st_size > 1000))
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write_report(folder)
    assert seen == [(folder, "loss.png", True), (folder, "report.html", True)]


def find_imports(path: Path, name: str) -> Iterator[ast.AST]:
    """Yield the statements of a file that import a module, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(module == name or module.startswith(f"{name}.") for module in modules):
            yield node


@pytest.mark.parametrize(
    ("name", "importers"),
    [
        ("matplotlib", {"report/run_report.py"}),
        ("jinja2", {"report/html.py"}),
        ("cornstarch.explain", {"cli/layout.py", "explain"}),
    ],
)
def test_training_imports_no_plots_templates_or_explanations(name: str, importers: set[str]) -> None:
    """Heavy modules are imported by their one user, inside a function; `explain` by its command alone."""
    package = ROOT / "cornstarch"
    found = {str(path.relative_to(package)): list(find_imports(path, name)) for path in package.rglob("*.py")}
    users = {path for path, nodes in found.items() if nodes}
    assert users and {path for path in users if path not in importers and path.split("/")[0] not in importers} == set()
    for path in users & importers:
        top_level = ast.parse((package / path).read_text(encoding="utf-8")).body
        assert not {node.lineno for node in top_level} & {node.lineno for node in found[path]}  # type: ignore[attr-defined]


def test_report_imports_neither_torch_nor_pyplot(folder: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nimport cornstarch.report\n"
        "early = [name for name in ('numpy', 'matplotlib', 'PIL', 'jinja2') if name in sys.modules]\n"
        f"cornstarch.report.write_report(Path({str(folder)!r}))\n"
        "print(early, [name for name in ('torch', 'transformers', 'matplotlib.pyplot') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "[] []", ran.stderr


@pytest.mark.parametrize("name", ["demo", "$x^{", "a\nb\x00c", "漢字 \U0001f33d", "n" * 500, ""])
@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")
def test_loss_plot_is_a_png_for_any_run_name(name: str, folder: Path) -> None:
    fake_run.change_summary(folder, name=name)
    image = Image.open(io.BytesIO(plot_loss(read_run(folder))))
    assert (image.format, image.size) == ("PNG", (1200, 675))


@pytest.mark.parametrize("lines", ["", '{"kind":"train","step":1,"loss":NaN}', '{"kind":"train","step":1,"loss":2}'])
def test_loss_plot_of_few_points_is_not_blank(lines: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines)
    image = Image.open(io.BytesIO(plot_loss(read_run(tmp_path)))).convert("L")
    assert image.getextrema() != (255, 255)
