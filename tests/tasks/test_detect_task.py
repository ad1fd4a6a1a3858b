"""The task of a whole model is detected from its config and its data; further tasks can be registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from cornstarch.config import DataConfig
from cornstarch.data.formats import open_sources
from cornstarch.errors import ConfigError
from cornstarch.tasks.build import build_task, detect_task
from cornstarch.tasks.build_model import get_whole_model, load_whole_config
from cornstarch.tasks.task import TASKS, TaskInputs, register_task
from tests.data.small_data import png, write_rows
from tests.tasks.small_tasks import run_config

TEXT, LABELLED = {"text": "cat"}, {"text": "cat", "label": "loud"}
PAIR = {"source": "cat", "target": "dog"}
PICTURE = {"image": "a.png", "label": "loud"}
CHAT = {"messages": [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "dog"}]}


@pytest.mark.parametrize(
    ("kind", "architecture", "row", "expected"),
    [
        ("t5", None, PAIR, "seq2seq-lm"),
        ("t5", "T5ForConditionalGeneration", LABELLED, "seq2seq-lm"),
        ("bart", "BartForConditionalGeneration", PAIR, "seq2seq-lm"),
        ("bart", "BartModel", TEXT, "seq2seq-lm"),
        ("bart", "BartForSequenceClassification", LABELLED, "sequence-classification"),
        ("marian", "MarianMTModel", PAIR, "seq2seq-lm"),
        ("bert", None, TEXT, "masked-lm"),
        ("bert", None, LABELLED, "sequence-classification"),
        ("bert", "BertForMaskedLM", TEXT, "masked-lm"),
        ("bert", "BertForMaskedLM", LABELLED, "sequence-classification"),
        ("bert", "BertForSequenceClassification", TEXT, "sequence-classification"),
        ("bert", "BertLMHeadModel", CHAT, "causal-lm"),
        ("roberta", "RobertaForMaskedLM", TEXT, "masked-lm"),
        ("llama", None, CHAT, "causal-lm"),
        ("llama", None, LABELLED, "causal-lm"),  # it learns to write the label
        ("llama", "LlamaForCausalLM", LABELLED, "causal-lm"),
        ("llama", "LlamaForSequenceClassification", LABELLED, "sequence-classification"),
        ("vit", None, PICTURE, "image-classification"),
        ("vit", "ViTModel", PICTURE, "image-classification"),
        ("resnet", "ResNetForImageClassification", PICTURE, "image-classification"),
        ("clip", "CLIPModel", PICTURE, "image-classification"),
        ("llava", "LlavaForConditionalGeneration", CHAT, "multimodal"),
        ("llava", None, PICTURE, "multimodal"),
        ("qwen2_audio", None, CHAT, "multimodal"),
        ("vit", None, TEXT, None),
    ],
)
def test_detected_task(
    tmp_path: Path, kind: str, architecture: str | None, row: dict[str, Any], expected: str | None
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    data = DataConfig.model_validate({"train": str(write_rows(tmp_path / "rows.jsonl", [row]))})
    config = AutoConfig.for_model(kind)
    config.architectures = None if architecture is None else [architecture]
    for source in (None, open_sources(data.train)):
        if expected is not None:
            assert detect_task(config, data, source) == expected
        else:
            with pytest.raises(ConfigError, match=r"Give its `task`: seq2seq-lm,"):
                detect_task(config, data, source)


def test_a_run_without_a_whole_model_is_refused(tmp_path: Path) -> None:
    config = run_config("x", path="y")
    assert get_whole_model(config).path == "y"
    with pytest.raises(ConfigError, match="model.whole.path = ./nowhere\n  There is no such folder"):
        load_whole_config(run_config("x", path="./nowhere"))
    composed = config.model_copy(update={"model": config.model.model_copy(update={"whole": None})})
    with pytest.raises(ConfigError, match="no `whole` model"):
        get_whole_model(composed)


def test_a_registered_task_is_built_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "own", TASKS["module"])  # restores the registry afterwards
    config, source = run_config("x", path="y"), object()
    whole = get_whole_model(config).model_copy(update={"task": "own", "path": None})
    config = config.model_copy(update={"model": config.model.model_copy(update={"whole": whole})})
    register_task("own", lambda config, inputs: (config, inputs))  # type: ignore[arg-type, return-value]
    built: Any = build_task(config, source)  # type: ignore[arg-type]
    assert built == (config, TaskInputs(train=source))  # type: ignore[arg-type]
