"""Every example trains as it is written, but on tiny models and data, and for a few steps."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cornstarch import MultimodalModel, MultimodalProcessor
from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.checkpoint.weights import open_checkpoint
from cornstarch.cli import main as command_line
from cornstarch.data.formats import open_sources
from cornstarch.train import Trainer, load_config, load_run
from tests.examples import small_world as world

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted(EXAMPLES.rglob("*.yaml"))

Cornstarch = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a language model, made once."""
    folder = tmp_path_factory.mktemp("hub") / "llm"
    world.language_model(folder)
    return folder


@pytest.fixture
def cornstarch(here: Path, capsys: pytest.CaptureFixture[str]) -> Cornstarch:
    """Return a function that runs the command and returns what it printed; it must end well."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command_line.main(list(arguments))
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return printed.out

    return run


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the metrics of one kind."""
    return [line for line in map(json.loads, (run / "metrics.jsonl").open()) if line["kind"] == kind]


def check_run(run: Path, falls_to: float, accuracy: float) -> None:
    """The run is complete, its loss has fallen to a share of what it was, and it knows the held-out samples."""
    losses = [line["loss"] for line in lines(run, "train")]
    assert losses[-1] < falls_to * losses[0], losses
    assert lines(run, "evaluation")[-1]["accuracy"] >= accuracy
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert (run / "report.html").stat().st_size > 10_000 and (run / "loss.png").exists()


# ---------------------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_config_is_right_as_it_is(path: Path) -> None:
    assert load_config(path).name == path.relative_to(EXAMPLES).parts[0].replace("_", "-") + (
        f"-{path.stem}" if path.stem != "run" else ""
    )


@pytest.mark.parametrize("name", ["t5_summarization", "bert_classification", "cifar_alexnet"])
def test_names_of_the_hub_are_not_looked_for_here(
    cornstarch: Cornstarch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert "is valid" in cornstarch("validate", example(f"{name}/run.yaml")).replace("\n", " ")


def test_a_run_to_begin_with_must_be_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["validate", example("llava/stage2.yaml")])
    assert ended.value.code == command_line.WRONG_INPUT
    assert "model.start_from = runs/llava-stage1\n  There is no such folder" in capsys.readouterr().err


def test_every_folder_has_an_example_that_is_tested() -> None:
    tested = Path(__file__).read_text()
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(folders) >= 6
    for folder in folders:
        assert list(folder.glob("*.yaml")) and (folder / "README.md").exists()
        assert all(f'"{folder.name}/{path.name}"' in tested for path in folder.glob("*.yaml"))


def test_every_example_is_on_the_page() -> None:
    page = (ROOT / "docs/examples.md").read_text()
    for path in CONFIGS:
        assert f"examples/{path.relative_to(EXAMPLES)}" in page


def example(name: str) -> str:
    """Return the path of an example's config."""
    return str(EXAMPLES / name)


# ---------------------------------------------------------------------------------------------------- images and sounds


FEW = ("loop.batch_size=16", "loop.gradient_accumulation_steps=2", "data.workers=0")


def test_llava_in_two_stages(here: Path, cornstarch: Cornstarch, language_model: Path) -> None:
    world.clip(here / "openai/clip-vit-large-patch14")
    shutil.copytree(language_model, here / "meta-llama/Llama-3.2-1B-Instruct")
    data = here / "data/llava"
    seen, held_out = world.pictures(data / "images", 0, 64), world.pictures(data / "images", 64, 24)
    for name, answer in (("captions", "it is"), ("instructions", "it was")):
        world.write_rows(data / f"{name}.json", world.llava_rows(seen, answer))
        world.write_rows(data / f"{name}_held_out.json", world.llava_rows(held_out, answer))
    first, second = here / "runs/llava-stage1", here / "runs/llava-stage2"

    cornstarch("train", example("llava/stage1.yaml"), *FEW, "loop.epochs=8", "optimizer.learning_rate=1e-2")
    check_run(first, falls_to=0.3, accuracy=0.9)
    (exchanged,) = lines(first, "shuffled")
    assert exchanged["accuracy"] < 0.5  # it looks
    with open_checkpoint(first).tensors() as tensors:
        learned = {name.removeprefix("parameters/"): tensors[name] for name in tensors if name.startswith("parameters")}
    assert learned and all(name.startswith("vision_encoder.projector.") for name in learned)

    rates = ("model.language_model.learning_rate=5e-3", "model.encoders.vision.projector_learning_rate=5e-3")
    more = (*FEW, "loop.epochs=5", *rates)
    begun = Trainer(load_config(example("llava/stage2.yaml"), [*more, "output=other"]))
    begun.setup()
    parameters = named_parameters(begun.model)
    for name, value in learned.items():
        assert torch.equal(parameters[name], value), name
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert {name.partition(".")[0] for name in trained} == {"vision_encoder", "language_model"}
    assert not any(name.startswith("vision_encoder.module.") for name in trained)

    cornstarch("train", example("llava/stage2.yaml"), *more)
    check_run(second, falls_to=0.3, accuracy=0.9)
    image = str(here / "data/llava/images/65.png")
    answer = cornstarch("generate", "runs/llava-stage2", "what colour is it ?", "--image", image)
    assert answer.strip() == "it was green"


def test_lora_vlm_and_its_export(here: Path, cornstarch: Cornstarch, language_model: Path) -> None:
    world.siglip(here / "google/siglip-so400m-patch14-384")
    shutil.copytree(language_model, here / "Qwen/Qwen2.5-7B-Instruct")
    for name, first, count in (("train", 0, 64), ("test", 64, 24)):
        images = world.pictures(here / "data/images", first, count)
        world.write_rows(here / f"data/{name}.jsonl", world.message_rows("images", images, "it was"))

    rates = ("model.encoders.vision.projector_learning_rate=1e-2", "model.language_model.learning_rate=1e-2")
    rows = ("data.max_length=128", "loop.batch_size=2", "loop.accumulation=1")  # of several samples each
    cornstarch("train", example("lora_vlm/run.yaml"), *FEW, *rates, *rows, "loop.epochs=16")
    run = here / "runs/lora-vlm"
    check_run(run, falls_to=0.3, accuracy=0.9)
    modes = {part["name"]: part["train"] for part in json.loads((run / "run.json").read_text())["parts"]}
    assert modes == {"vision encoder": "frozen", "vision projector": "full", "language model": "lora"}

    assert "loaded again" in cornstarch("export", "runs/lora-vlm", "model")
    loaded = load_run(run)
    exported = MultimodalModel.from_pretrained(here / "model").eval()
    processor = MultimodalProcessor.from_pretrained(here / "model/processor", model=exported)
    assert not [name for name, _ in exported.named_parameters() if "lora" in name]
    images = [world.picture(colour, 1) for colour in world.COLOURS]
    texts = ["user: <vision> what colour is it ? assistant: it was"] * len(images)
    batch = processor(text=texts, images=images, return_tensors="pt")
    with torch.no_grad():
        with loaded.placement.forward_context():
            mine, theirs = loaded.task.model(**batch).logits.float(), exported(**batch).logits.float()
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0.03 * mine.abs().max().item())  # bf16
        colours = [processor.llm_tokenizer.decode(word) for word in theirs[:, -2].argmax(-1)]  # the last one is </s>
        assert colours == list(world.COLOURS)
        llm = AutoModelForCausalLM.from_pretrained(here / "model/language_model").eval()
        text = AutoTokenizer.from_pretrained(here / "model/processor/tokenizer")("what is it ?", return_tensors="pt")
        text = {"input_ids": text["input_ids"]}
        torch.testing.assert_close(llm(**text).logits, exported(**text).logits, rtol=0, atol=0)
    assert cornstarch("generate", "runs/lora-vlm", "what colour is it ?", "--image", "data/images/66.png").strip()


def test_audio_language_model(here: Path, cornstarch: Cornstarch, language_model: Path) -> None:
    world.whisper(here / "openai/whisper-small")
    shutil.copytree(language_model, here / "Qwen/Qwen2.5-1.5B-Instruct")
    for name, first, count in (("", 0, 48), ("_held_out", 48, 24)):
        sounds = world.tones(here / "data/clips", first, count)
        world.write_rows(here / f"data/transcripts{name}.jsonl", world.transcripts(sounds))
        world.write_rows(here / f"data/questions{name}.jsonl", world.sound_questions(sounds))

    rates = ("optimizer.learning_rate=1e-2", "schedule.warmup=2")
    cornstarch("train", example("audio_lm/run.yaml"), *FEW, *rates, "loop.epochs=3")
    run = here / "runs/audio-lm"
    check_run(run, falls_to=0.3, accuracy=0.9)
    sources = lines(run, "evaluation")[-1]["sources"]
    assert all(sources[name]["accuracy"] >= 0.9 for name in ("transcripts", "questions"))
    assert lines(run, "shuffled")[0]["accuracy"] < 0.6  # it listens
    asked = ("generate", "runs/audio-lm", f"<audio> {world.SOUND_QUESTION}", "--audio", "data/clips/50.wav")
    assert cornstarch(*asked).strip() == "it is high"
    assert cornstarch("generate", "runs/audio-lm", "", "--audio", "data/clips/49.wav").strip() == "middle"


# ---------------------------------------------------------------------------------------------------- whole models


def test_t5_summarization(here: Path, cornstarch: Cornstarch) -> None:
    world.t5(here / "google-t5/t5-small")
    splits = {"train": world.articles(256, 0), "validation": world.articles(32, 1)}
    world.save_dataset(here / "abisee/cnn_dailymail", splits)
    # A saved dataset has no configurations; the one on the hub has.
    local = [f"data.{name}.0.arguments.name=null" for name in ("train", "evaluation")]

    few = ("loop.batch_size=32", "loop.gradient_accumulation_steps=1", "loop.epochs=10", "data.workers=0")
    cornstarch("train", example("t5_summarization/run.yaml"), *local, *few, "optimizer.learning_rate=1e-2")
    run = here / "runs/t5-summarization"
    check_run(run, falls_to=0.3, accuracy=0.9)
    assert cornstarch("generate", "runs/t5-summarization", "blue the film was good and").strip() == "blue"


def test_bert_classification(here: Path, cornstarch: Cornstarch) -> None:
    import datasets

    world.bert(here / "google-bert/bert-base-uncased")
    splits = {"train": world.reviews(128, 0), "validation": world.reviews(32, 1)}
    world.save_dataset(here / "stanfordnlp/sst2", splits, label=datasets.ClassLabel(names=["negative", "positive"]))
    cornstarch("train", example("bert_classification/run.yaml"), "loop.epochs=12", "optimizer.learning_rate=5e-3")
    run = here / "runs/bert-classification"
    check_run(run, falls_to=0.5, accuracy=0.9)
    assert cornstarch("generate", "runs/bert-classification", "the play was lovely").strip() == "positive"

    cornstarch("export", "runs/bert-classification", "model")
    model = AutoModelForSequenceClassification.from_pretrained(here / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    with torch.no_grad():
        number = int(model(**tokenizer("the book was awful", return_tensors="pt")).logits.argmax())
    assert model.config.id2label[number] == "negative"


# ---------------------------------------------------------------------------------------------------- a module


def cifar_world(here: Path) -> None:
    import datasets

    def split(first: int, count: int) -> dict[str, list[Any]]:
        colours = [number % len(world.COLOURS) for number in range(count)]
        images = [world.picture(list(world.COLOURS)[c], first + n, 32) for n, c in enumerate(colours)]
        return {"img": images, "label": colours}

    world.save_dataset(
        here / "uoft-cs/cifar10",
        {"train": split(0, 128), "test": split(128, 32)},
        img=datasets.Image(),
        label=datasets.ClassLabel(names=list(world.COLOURS)),
    )


SMALL_NET = ("model.factory.arguments={classes: 4, width: 4}", "loop.batch_size=16", "loop.ema=0.8", "data.workers=0")


def test_cifar_alexnet(here: Path, cornstarch: Cornstarch) -> None:
    cifar_world(here)
    cornstarch("train", example("cifar_alexnet/run.yaml"), *SMALL_NET, "loop.epochs=8", "loop.evaluate_every=16")
    run = here / "runs/cifar-alexnet"
    check_run(run, falls_to=0.7, accuracy=0.9)
    assert len(lines(run, "evaluation")) == 4

    assert "loaded again" in cornstarch("export", "runs/cifar-alexnet", "model")
    loaded = load_run(run)
    test = open_sources(loaded.config.data.evaluation)
    batch = loaded.task.collator.join([loaded.task.collator.prepare(test[index]) for index in range(len(test))])
    with torch.no_grad():
        means = loaded.task.loss_function(loaded.task.load(here / "model").eval(), batch.inputs)
    assert float(means["accuracy"]) >= 0.9


def test_cifar_alexnet_in_python(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cifar_world(here)
    script = EXAMPLES / "cifar_alexnet/train.py"
    monkeypatch.syspath_prepend(str(script.parent))
    options = {"data": "uoft-cs/cifar10", "output": "runs/mine", "epochs": "8", "width": "4", "batch-size": "16"}
    monkeypatch.setattr(sys, "argv", [str(script), *(f"--{name}={value}" for name, value in options.items())])
    runpy.run_path(str(script), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out
    check_run(here / "runs/mine", falls_to=0.7, accuracy=0.9)


def test_functions_are_found_in_the_current_folder(
    here: Path, cornstarch: Cornstarch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed command, unlike `python -m`, does not have that folder on its path by itself."""
    cifar_world(here)
    shutil.copy(EXAMPLES / "cifar_alexnet/alexnet.py", here / "my_net.py")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(here))])
    names = ("model.factory.function=my_net:build", "model.factory.loss=my_net:loss")
    allowed = ("--allow-code", "my_net")
    cornstarch("train", example("cifar_alexnet/run.yaml"), *names, *SMALL_NET, "loop.epochs=0.25", *allowed)
    assert json.loads((here / "runs/cifar-alexnet/run.json").read_text())["step"] == 2
