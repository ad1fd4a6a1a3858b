"""A page in headless Chromium: what a script finds in it, and what the console says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

# Chromium's own window is never narrower than 500 pixels, so the page is opened in a frame of the wanted width.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><script>
addEventListener("message", (event) => {{
  document.body.append(Object.assign(document.createElement("output"), {{ id: "found", textContent: event.data }}));
}});
</script><body style="margin:0"><iframe width="{width}" height="900" style="border:0" src="{page}"></iframe></body>"""
ASK = "<script>parent.postMessage(JSON.stringify((() => {{ {script} }})()), '*');</script></body>"


class PageResult(NamedTuple):
    """What was found in a page."""

    found: Any
    """What the script returned."""
    console: list[str]


def open_page(page: Path, script: str, width: int, dark: bool = False) -> PageResult:
    """Open a copy of the page with one more script, which returns what it finds."""
    folder = page.parent / f"look_{width}_{dark}"
    folder.mkdir()
    asked = ASK.format(script=script)
    (folder / "copy.html").write_text(page.read_text(encoding="utf-8").replace("</body>", asked), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width=width, page="copy.html"))
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=3000", "--dump-dom",
    ]  # fmt: skip
    assert CHROMIUM is not None
    address = (folder / "frame.html").as_uri()
    ended = subprocess.run([CHROMIUM, *options, address], capture_output=True, text=True, timeout=120)
    found = re.search(r'<output id="found"[^>]*>(.*?)</output>', ended.stdout, re.DOTALL)
    assert found is not None, ended.stderr[-2000:]
    return PageResult(json.loads(unescape(found[1])), [line for line in ended.stderr.splitlines() if "CONSOLE" in line])
