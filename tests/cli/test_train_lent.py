"""`cornstarch train` with images that replicas lend to one another: what is told, and the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cornstarch.train import load_config
from tests.cli.small_runs import write_config
from tests.cli.started import together
from tests.train.tiny import losses, trainer_of

STILL = ("model.encoders.vision.config.attention_dropout=0.0", "model.language_model.config.attention_dropout=0.0")


def test_the_losses_stay(tmp_path: Path) -> None:
    sections = {"evaluation": [{"path": str(tmp_path / "test.json")}], "shuffle": False, "max_length": 64}
    config = load_config(
        write_config(tmp_path, *STILL, data=sections, loop={"steps": 2, "accumulation": 2, "evaluate_every": 2})
    )
    rows = json.loads((tmp_path / "train.json").read_text())
    images = [row["image"] for row in rows[:5]]
    rows[0] = {"image": images, "conversations": [{"from": "human", "value": "<image>" * 5 + " what is it"},
                                                  {"from": "gpt", "value": "a cat"}]}  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps(rows))

    (code, said), (other, quiet) = together(
        "train", "run.yaml", "output=lent", "data.split_images=true", folder=tmp_path
    )
    assert (code, other) == (0, 0), said + quiet
    assert "Replicas lend images to one another" in said and "Replicas" not in quiet
    trainer_of(config).fit()
    assert losses(tmp_path / "lent") == pytest.approx(losses(tmp_path / "run"), rel=1e-4)
    assert len(losses(tmp_path / "lent")) == 2
