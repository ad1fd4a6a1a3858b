"""The page on plugins and the booster does what it says, on four processes."""

from __future__ import annotations

from pathlib import Path

from tests.api.guide import run_guide
from tests.docs_hub import lay_out
from tests.parity.pool import Pool


def test_the_page_runs_on_four_processes(workers: Pool, tmp_path: Path) -> None:
    lay_out(tmp_path)
    found = workers.run(4, run_guide, str(tmp_path))
    assert [last for _, last, _, _ in found] == [False, False, False, True]
    assert [stages for _, _, stages, _ in found] == [1, 1, 2, 2]
    assert [loss is None for *_, loss in found] == [True, True, True, False]
    names = [set(held) for held, *_ in found]
    assert all(name.startswith("vision_encoder.") for name in names[0])
    assert all(name.startswith("audio_encoder.") for name in names[1])
    assert "language_model.model.layers.0.mlp.up_proj.weight" in names[2]
    assert "language_model.lm_head.weight" in names[3] and not names[2] & names[3]
    assert {path.name for path in (tmp_path / "boosted").iterdir()} == {"model", "optimizer", "lr_scheduler"}
