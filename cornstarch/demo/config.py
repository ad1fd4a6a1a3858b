"""The description of the demo's run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cornstarch.train.config import RunConfig
from cornstarch.train.source import load_config

CONFIG = Path(__file__).parent / "demo.yaml"
TOKENIZER = Path(__file__).parent / "tokenizer"


def demo_config(overrides: Sequence[str] = (), plan: Path | None = None) -> RunConfig:
    """Return the demo's run, from wherever it is started.

    Args:
        overrides: `key.path=value`, as on the command line.
        plan: A file of `cornstarch plan`.
    """
    return load_config(CONFIG, [f"model.language_model.tokenizer={TOKENIZER}", *overrides], plan=plan)
