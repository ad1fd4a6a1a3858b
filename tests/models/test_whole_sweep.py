"""Every whole multimodal model with a tiny folder: equal to its own processor and loss, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from cornstarch.cli.main import main
from tests.models import whole_oracle as oracle
from tests.models import whole_sweep
from tests.models.whole_folders import FOLDERS, write_folder
from tests.models.whole_page import EQUAL, NOT_ASKED, REFUSED, WRONG, Verdict, versions

PAGE = Path(__file__).parents[2] / whole_sweep.PAGE


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the folders are; each is written once."""
    return tmp_path_factory.mktemp("whole_models")


@pytest.mark.parametrize("name", FOLDERS)
def test_every_family_is_its_own_processors_or_refused(name: str, folders: Path) -> None:
    verdict = whole_sweep.judge(name, folders)
    assert verdict.status != WRONG, verdict.reasons
    assert all(len(verdict.reasons[case]) > 20 for case, word in verdict.words.items() if word == REFUSED)
    page = PAGE.read_text()
    if f"{versions()}." in page:
        assert verdict.row(whole_sweep.CASES) in page, f"run `python -m tests.models.whole_sweep`: {verdict.reasons}"


def test_the_page_has_every_model_of_the_registry() -> None:
    page = PAGE.read_text()
    if f"transformers {transformers.__version__}" in page:
        assert not [name for name in whole_sweep.registry_classes() if f"`{name}`" not in page]


def test_the_check_of_data_shows_the_models_own_text(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two images side by side, which the positions of Qwen2.5-VL cannot be computed for without their marks."""
    images = []
    for number in range(2):
        images.append(f"{number}.png")
        oracle.Item("image", number).value.save(tmp_path / images[-1])
    turns = [{"from": "human", "value": "<image><image> q1 q2"}, {"from": "gpt", "value": "a1"}]
    (tmp_path / "rows.json").write_text(json.dumps([{"image": images, "conversations": turns}]))
    config = tmp_path / "run.yaml"
    folder = write_folder("qwen2.5-vl", folders)
    config.write_text(f"model: {{whole: {{path: {folder}}}}}\ndata: {{train: {tmp_path / 'rows.json'}}}\n")
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", str(config)])
    shown = capsys.readouterr().out
    assert not ended.value.code, shown
    assert shown.count("<|vision_start|><|image_pad|>×4<|vision_end|>") == 2
    assert "<|im_start|>user" in shown


@pytest.mark.parametrize("sabotage", ["input_ids", "labels", "pixel_values"])
def test_the_sweep_detects_a_wrong_batch(sabotage: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that finds nothing must be able to find something."""
    build = whole_sweep.build_task

    def build_wrongly(config: Any) -> Any:
        task = build(config)
        join = task.collator.join

        def join_wrongly(samples: Any) -> Any:
            batch = join(samples)
            batch.inputs[sabotage] = batch.inputs[sabotage].roll(1, -1)
            return batch

        task.collator.join = join_wrongly  # type: ignore[method-assign]
        return task

    monkeypatch.setattr(whole_sweep, "build_task", build_wrongly)
    verdict = whole_sweep.judge("llava", folders)
    assert verdict.words["one"] == WRONG and sabotage in verdict.reasons["one"]


def test_the_worst_word_of_a_case_counts() -> None:
    verdict = Verdict("a family", "AClass")
    for word in (EQUAL, REFUSED, EQUAL, NOT_ASKED):
        verdict.note("one", word, "a reason that is long enough")
    assert verdict.words == {"one": REFUSED} and verdict.status == REFUSED
    verdict.note("packed", WRONG, "another loss")
    assert verdict.status == WRONG
