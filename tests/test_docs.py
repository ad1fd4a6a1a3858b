"""Every Python snippet of the README and the documentation runs, in order, page by page.

The models under hub names, the image and the sound that the pages use are laid out by `tests.docs_hub`, all of them
tiny. Whatever else a reader would have already, a page prepares in a comment that the built page does not show:
`<!-- setup: … -->`. A snippet that cannot run here says why in a comment right above it:
`<!-- no-run: the reason -->`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs_hub import lay_out

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

_PART = re.compile(
    r"<!-- setup:(?P<setup>.*?)-->"
    r"|<!-- no-run:(?P<reason>[^>]*?)-->\s*"
    r"|^(?P<indent>[ ]*)(?P<fence>```+)[ ]*(?P<info>[^\n`]*)\n(?P<code>.*?)^[ ]*(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Snippet:
    line: int  # of the first line of code, counted from 1
    code: str


def snippets(page: str) -> list[Snippet]:
    """Return the code of a page in order: hidden set-up and Python blocks, without those that say why not."""
    found: list[Snippet] = []
    excused_until = -1
    for part in _PART.finditer(page):
        if part["reason"] is not None:
            assert part["reason"].strip(), "a no-run comment must give its reason"
            excused_until = part.end()
        elif part["setup"] is not None:
            found.append(_snippet(page, part, "setup"))
        elif part["info"].split()[:1] in (["python"], ["py"]):
            assert "no-run" not in part["info"], "write <!-- no-run: the reason --> above the block instead"
            if part.start() != excused_until:
                found.append(_snippet(page, part, "code"))
    return found


def _snippet(page: str, part: re.Match[str], group: str) -> Snippet:
    return Snippet(page.count("\n", 0, part.start(group)) + 1, textwrap.dedent(part[group].rstrip() + "\n"))


def run_page(page: str, name: str) -> dict[str, Any]:
    """Run the snippets of a page in one namespace; a traceback names the page and its line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets(page):
        exec(compile("\n" * (snippet.line - 1) + snippet.code, name, "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    lay_out(folder)
    return folder


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_snippets_of_a_page_run(path: Path, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thing in hub.iterdir():
        (tmp_path / thing.name).symlink_to(thing)
    monkeypatch.chdir(tmp_path)
    run_page(path.read_text(encoding="utf-8"), str(path))


def test_snippets_share_a_page_and_may_fail() -> None:
    page = """
<!-- setup:
a = 1
-->
```python
b = a + 1
```
    ``` py title="indented in a list"
    c = b + 1
    ```
<!-- no-run: it would never end -->
```python
while True: pass
```
```text
not code
```
"""
    assert run_page(page, "page")["c"] == 3
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", "page")
    with pytest.raises(AssertionError, match="reason"):
        run_page("<!-- no-run: -->\n```python\n1 / 0\n```\n", "page")
    with pytest.raises(AssertionError, match="no-run"):
        run_page("```python no-run\n1 / 0\n```\n", "page")


def nav_pages(entries: list[Any]) -> list[str]:
    """Return the pages in an mkdocs navigation, however deep."""
    pages: list[str] = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages += nav_pages(value) if isinstance(value, list) else [value]
    return pages


def test_the_navigation_lists_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(nav_pages(nav)) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
