"""The page on the booster, run by one of four processes."""

from __future__ import annotations

import os
import re
from typing import Any

from tests.api.work import parameters
from tests.parity.cell import Values
from tests.test_docs import DOCS, run_page

PAGE = DOCS / "booster.md"


def run_guide(folder: str) -> tuple[Values, bool, int, float | None]:
    """Run every snippet of the page in `folder`; return what is trained, and where this process stands."""
    text = re.sub(r"<!-- no-run: four processes.*?-->\n", "", PAGE.read_text(encoding="utf-8"))
    assert text.count("no-run") == 0
    before = os.getcwd()
    os.chdir(folder)
    try:
        found: dict[str, Any] = run_page(text, str(PAGE))
    finally:
        os.chdir(before)
    loss = found["outputs"]["loss"]
    manager = found["mllm_plugin"].stage_manager
    last = manager.is_last_stage(check_only_in_modal=False)
    return parameters(found["model"].module), last, manager.num_stages, None if loss is None else loss.item()
