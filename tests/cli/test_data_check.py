"""`cornstarch data check` on a run's own model and data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cornstarch.cli.main import main
from tests.documented.hub import make_hub
from tests.models.local_processors import image
from tests.tasks.small_tasks import BERT, LLAMA, T5, VIT, VIT_PROCESSOR, tokenizer_folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, five good samples and one whose image is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    hub = make_hub(tmp_path / "hub")
    image().save("a.png")
    talk = [{"from": "human", "value": "<image> What is it ?"}, {"from": "gpt", "value": "A digit ."}]
    names = ["a.png"] * 5 + ["missing.png"]
    Path("train.json").write_text(json.dumps([{"image": name, "conversations": talk} for name in names]))
    config = {
        "model": {
            "language_model": {"path": hub["meta-llama/Llama-3.2-1B"], "train": "frozen"},
            "encoders": {"vision": {"path": hub["openai/clip-vit-base-patch32"], "token": "<image>"}},
        },
        "data": {"train": "train.json", "skip_limit": 0.5},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", *arguments])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out + output.err


def test_tokens_labels_and_broken_samples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked(capsys, str(run))
    assert code == 0
    assert "Lengths in tokens" in said
    assert "<image>×5" in said  # 2 × 2 patches and the class token
    assert "⟦A digit . </s>⟧" in said
    assert "train.json:6: image missing.png cannot be read" in said


def test_a_missing_tokenizer_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes)).save_pretrained("bare")
    code, said = checked(capsys, str(run), "model.language_model.path=bare")
    assert code == 2, said
    assert "model.language_model.tokenizer = bare" in said and "encodes plain text to nothing" in said


def test_rows_need_no_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked(capsys, str(run), "model.language_model.path=./nowhere", "--rows")
    assert code == 0 and "Lengths in characters" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.language_model.path=./nowhere"], "There is no such folder."),
        (["data.skip_limit=0.1"], "1 of 6 samples are broken"),
        (["data.max_lenght=5"], "Did you mean `max_length`?"),
    ],
)
def test_problems_end_in_a_message(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, said = checked(capsys, str(run), *arguments)
    assert code == 2 and message in said and "Traceback" not in said


# ------------------------------------------------------------------------------------------------ other models


def write(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def describe_run(model: dict[str, Any], rows: str, **data: Any) -> str:
    Path("run.yaml").write_text(json.dumps({"model": model, "data": {"train": rows, "skip_limit": 0.5, **data}}))
    return "run.yaml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Work in an empty folder with a tokenizer, whose place is returned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for number, size in enumerate([20, 20, 24]):
        image(size, size, number).save(f"{number}.png")
    return tokenizer_folder(tmp_path)


def test_seq2seq_targets_are_marked(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write("d.jsonl", {"source": "a cat is loud", "target": "cat"}, {"source": "a", "target": ""})
    code, said = checked(capsys, describe_run({"whole": {"config": T5, "tokenizer": here}}, rows))
    assert code == 0 and "Lengths in tokens" in said
    assert "<s> a cat is loud </s> → ⟦<s> cat </s>⟧" in said
    assert "d.jsonl:2: `target` is empty" in said
    assert " 33% " in said  # 3 of 9 tokens are trained on


def test_masked_tokens_are_marked(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write("d.jsonl", {"text": "one two three four five six"})
    code, said = checked(capsys, describe_run({"whole": {"config": BERT, "tokenizer": here}}, rows))
    assert code == 0
    shown = next(line for line in said.splitlines() if "three" in line)
    hidden = re.findall("⟦(.*?)⟧", shown)
    assert hidden and set(" ".join(hidden).split()) <= {"one", "two", "three", "four", "five", "six"}
    assert shown.replace("⟦", "").replace("⟧", "").split() == "<s> one two three four five six </s>".split()


def test_labels_of_texts_and_images(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write("d.jsonl", {"text": "a cat", "label": "good"}, {"text": "it is loud", "label": "bad"}, {"text": "a"})
    code, said = checked(capsys, describe_run({"whole": {"config": BERT, "tokenizer": here}}, rows))
    assert code == 0
    assert "<s> a cat </s> → ⟦good⟧" in said and "<s> it is loud </s> → ⟦bad⟧" in said and "d.jsonl:3: has the" in said
    images = write("i.jsonl", *({"image": f"{n}.png", "label": n % 2} for n in range(3)))
    vit = {"whole": {"config": VIT, "processor_config": VIT_PROCESSOR}}
    code, said = checked(capsys, describe_run(vit, images))
    assert code == 0 and "Lengths in images" in said and "3 image" in said and "<image> → ⟦1⟧" in said
    vit = {"whole": {"config": VIT, "processor_config": {**VIT_PROCESSOR, "do_resize": False}}}
    code, said = checked(capsys, describe_run(vit, images))
    assert code == 2 and "of i.jsonl:3 [3, 24, 24] once they are processed" in said  # a batch would stop the run


def test_rows_of_a_factory_model_are_stacked_or_refused(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    factory = {"factory": {"function": "tests.tasks.small_factory:convolution_with_loss"}}
    images = write("i.jsonl", *({"image": f"{n}.png", "label": n, "note": "x" * 99} for n in range(3)))
    code, said = checked(capsys, describe_run(factory, images))
    assert code == 2 and "[3, 20, 20] in i.jsonl:1 and [3, 24, 24] in i.jsonl:3: they cannot be stacked" in said
    factory["factory"]["collate"] = "tests.tasks.small_factory:with_noise"
    code, said = checked(capsys, describe_run(factory, images))
    assert code == 0 and "3 image" in said and "label: 2" in said and f"note: {'x' * 60}…" in said


def test_a_saved_causal_model_is_checked(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained("llama")
    rows = write(
        "d.jsonl", {"messages": [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a cat"}]}
    )
    code, said = checked(capsys, describe_run({"whole": {"path": "./llama", "tokenizer": here}}, rows))
    assert code == 0 and "⟦a cat </s>⟧" in said.replace("cat</s>", "cat </s>")


def test_too_long_samples_are_listed_where_a_run_would_stop(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write("d.jsonl", *({"text": "a cat " * n} for n in (1, 9, 2, 8)))
    config = describe_run({"whole": {"config": BERT, "tokenizer": here}}, rows, max_length=8, too_long="error")
    code, said = checked(capsys, config)
    assert code == 2
    assert "d.jsonl:2: has 20 tokens, max_length is 8" in said and "d.jsonl:4: has 18 tokens" in said
    assert "`data.too_long` = error stops the run there" in said
    assert checked(capsys, config, "data.too_long=skip")[0] == 0


def test_a_model_made_in_python_needs_rows(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = describe_run({"given": "Net"}, write("d.jsonl", {"text": "a"}))
    code, said = checked(capsys, config)
    assert code == 2 and "--rows" in said
    assert checked(capsys, config, "--rows")[0] == 0
