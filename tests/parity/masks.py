"""Every kind of mask with every way to cut tokens: who sees whom must not depend on where tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.parity.cell import Outcome, run
from tests.parity.columns import COLUMNS
from tests.parity.rows import LLAMA, ROWS, Row, llm, vision
from tests.parity.samples import asking

_WINDOW = {**LLAMA, "model_type": "mistral", "sliding_window": 5}
_PACKED = {"packing": True, "max_length": 64}


def _row(title: str, attention: str = "causal", config: Mapping[str, Any] = LLAMA, **data: Any) -> Row:
    encoders = {"vision": {**vision("full"), "attention": attention}}
    model = {"encoders": encoders, "language_model": llm(config)}
    return Row(title, model, asking("i"), ("vision", "language_model"), data)


MASKS: dict[str, Row] = {
    "mask causal": _row("causal, with padding"),
    "mask item": _row("an image sees itself both ways", "item"),
    "mask modality": _row("all images of a row see one another", "modality"),
    "mask packed": _row("packed documents", **_PACKED),
    "mask window": _row("sliding window of 5", config=_WINDOW),
    "mask all": _row("packed documents, images both ways, sliding window", "item", _WINDOW, **_PACKED),
}
WAYS = ("ring", "ring3", "gather", "ulysses", "tp_cp", "pp_cp")
"""Columns of the matrix that cut tokens."""


def run_mask(mask: str, way: str | None, tokenizer: str, folder: str) -> Outcome | str:
    """Do the steps of mixed batches in this process, one of several or alone."""
    ROWS[mask] = MASKS[mask]  # in this process only: it is no row of the matrix
    try:
        return run(mask, "mixed", {} if way is None else COLUMNS[way].parallel(MASKS[mask]), tokenizer, folder)
    finally:
        del ROWS[mask]
