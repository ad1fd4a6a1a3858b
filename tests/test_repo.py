"""What the repository's own files promise one another."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import cornstarch
from tests.test_imports import ORDER

ROOT = Path(__file__).resolve().parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict:
    return tomllib.loads(text("pyproject.toml"))["project"]


def test_the_commands_of_the_readme_are_in_the_makefile() -> None:
    named = set(re.findall(r"\bmake ([a-z]+)", text("README.md")))
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", text("CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert project()["version"] == newest[1] == cornstarch.__version__


def test_every_direct_dependency_is_pinned_by_the_constraints() -> None:
    lines = text("constraints.txt").lower().splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]) for line in lines if "==" in line}
    extras = project()["optional-dependencies"]
    asked = project()["dependencies"] + [name for names in extras.values() for name in names]
    names = {re.split(r"[<>=\[ ]", name)[0].lower() for name in asked}
    assert names <= pinned, names - pinned


def test_constraints_name_public_versions_only() -> None:
    # A local part ("2.13.0+cpu") exists on one index only; the plain version is found on all.
    assert "+" not in text("constraints.txt")


def test_continuous_integration_runs_the_tests() -> None:
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert "make test" in text(".ci/run")


def test_the_architecture_names_every_room() -> None:
    rooms = text("docs/architecture.md").split("## The rooms")[1].split("## Imports")[0]
    rows = re.findall(r"^\| (`.+?) \| .* \|$", rooms, re.MULTILINE)
    named = {name.strip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    beside = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    assert named == {path.name for path in (ROOT / "cornstarch").iterdir()} - beside


def test_the_architecture_has_the_enforced_import_line() -> None:
    line = re.search(r"```text\n(cli .*?)```", text("docs/architecture.md"), re.DOTALL)
    assert line is not None
    rooms = [name.strip() for name in re.split(r"→|,", line[1].replace("\n", " "))]
    assert rooms == [room for room in ORDER if room not in ("compat", "lazily")]
