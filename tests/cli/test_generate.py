"""`cornstarch generate`: what a run's model says, once and in a chat."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cornstarch.cli.generate import build_question
from cornstarch.data.formats import open_sources
from cornstarch.data.sample import Media, Message, Sample
from cornstarch.train import Trainer, load_config, load_run
from tests.cli.small_runs import AUDIO, Command, add_sounds, write_sound
from tests.models.local_processors import image
from tests.tasks.small_tasks import BERT, T5, VIT, VIT_PROCESSOR, tokenizer_folder
from tests.trainer.tiny import quiet, tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose model sees and hears, beside `photo.png` and `sound.wav`."""
    folder = tmp_path_factory.mktemp("sees")
    tiny_config(folder)
    add_sounds(folder)
    evaluation = {"evaluation": [{"path": str(folder / "test.json")}]}
    config = tiny_config(
        folder, "loop.steps=60", "logging.every=60", "checkpoint.every=30", "loop.exchange_check=false",
        data=evaluation, model={"encoders": {"audio": AUDIO}},
    )  # fmt: skip
    Trainer(config, console=quiet()).fit()
    image().save(folder / "photo.png")
    write_sound(folder / "sound.wav", 0.5)
    return folder / "run"


def compute_expected(run: Path, *content: str | Media, **which: Any) -> str:
    """Return what the task itself answers."""
    sample = Sample("asked", (Message("user", content), Message("assistant", ("a cat",))))
    (answer,) = load_run(run, **which).task.answer([sample])
    return answer


def test_a_question_about_an_image_is_answered(run: Path, command: Command) -> None:
    photo = Media("image", str(run.parent / "photo.png"))
    code, said, error = command(
        "generate", run, "what is this <image> now", "--image", photo.source, "--max-tokens", 12
    )
    assert (code, error) == (0, "")
    assert said.strip() == compute_expected(run, "what is this ", photo, " now") != ""
    code, said, _ = command("generate", run, "what is it", "--image", photo.source, "--max-tokens", 12)
    assert (code, said.strip()) == (0, compute_expected(run, photo, "what is it"))


def test_the_answer_of_a_sample_is_that_of_the_run(run: Path, command: Command) -> None:
    """The same words and the same image as in the data, asked by hand."""
    loaded = load_run(run)
    sample = open_sources(loaded.config.data.evaluation)[0]
    text = "".join(part if isinstance(part, str) else "<image>" for part in sample.messages[0].content)
    (answer,) = loaded.task.answer([sample])
    said = command("generate", run, text, "--image", sample.media[0].source, "--max-tokens", 256)[1]
    assert said.strip() == answer


def test_a_question_about_a_sound_is_answered(run: Path, command: Command) -> None:
    sound = Media("audio", str(run.parent / "sound.wav"))
    code, said, _ = command("generate", run, "what is <audio>", "--audio", sound.source, "--max-tokens", 11)
    assert (code, said.strip()) == (0, compute_expected(run, "what is ", sound))


def test_a_checkpoint_can_be_chosen(run: Path, command: Command) -> None:
    for which, value in (("last", "last"), ("best", "best"), ("30", 30)):
        code, said, _ = command("generate", run, "what is it", "--checkpoint", which, "--max-tokens", 12)
        assert (code, said.strip()) == (0, compute_expected(run, "what is it", which=value))


def test_sampling_is_random_and_short_answers_are_short(run: Path, command: Command) -> None:
    def said(*options: Any) -> str:
        return command("generate", run, "what is it", "--temperature", 50, "--max-tokens", 6, *options)[1]

    assert len({said() for _ in range(4)}) > 1
    assert len({said("--seed", 3) for _ in range(2)}) == 1
    assert len(command("generate", run, "what is it", "--temperature", 50, "--max-tokens", 1)[1].split()) <= 1


WRONG = [
    (["{run}", "x", "--image", "none.png"], "There is no file none.png."),
    (["{run}", "x", "--image", "{run}/config.yaml"], "is no image that can be read"),
    (["{run}", "x", "--audio", "{photo}"], "photo.png"),
    (["{run}", "<image> <image>", "--image", "{photo}"], "the text has 2 <image> for 1 images"),
    (["none", "x"], "There is no folder none"),
    (["{run}/checkpoints", "x"], "is no run: it has no config.yaml"),
    (["{run}", "x", "--checkpoint", "4"], "has no step 4; it has 30, 60"),
    (["{run}", "x", "--checkpoint", "newest"], "Expected best, last, or the number of a step."),
    (["{run}", "x", "--device", "cuda:99"], "device = cuda:99"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_invalid_questions_are_refused(run: Path, command: Command, arguments: list[str], message: str) -> None:
    filled = [text.format(run=run, photo=run.parent / "photo.png") for text in arguments]
    code, out, error = command("generate", *filled)
    assert (code, out) == (2, "") and message in error


# ------------------------------------------------------------------------------------------------ a chat


def chat(command: Command, monkeypatch: pytest.MonkeyPatch, run: Path, *lines: str) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code, said, error = command("generate", run, "--max-tokens", 12)
    assert (code, error) == (0, "")
    first, *others = said.splitlines()
    assert first.startswith("Ask a question.")
    return others


def test_a_chat_has_a_history_until_new(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = Media("image", str(run.parent / "photo.png"))
    said = chat(
        command, monkeypatch, run,
        f"/image {photo.source}", "what is this <image> now", "", "what is it", "/new", "what is it",
    )  # fmt: skip
    task: Any = load_run(run).task
    first = task.reply([Message("user", ("what is this ", photo, " now"))], most_tokens=12)
    history = [Message("user", ("what is this ", photo, " now")), Message("assistant", (first,))]
    second = task.reply([*history, Message("user", ("what is it",))], most_tokens=12)
    alone = task.reply([Message("user", ("what is it",))], most_tokens=12)
    assert said == [first, second, alone]


def test_an_empty_answer_is_reported(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornstarch.tasks.conversation.ConversationTask.reply", lambda *_, **__: " ")
    empty = "(The answer is empty: the model ended it at once.)"
    assert command("generate", run, "what is it") == (0, "", f"{empty}\n")  # what is piped on is the answer alone
    assert chat(command, monkeypatch, run, "what is it") == [empty]


def test_a_chat_survives_mistakes(run: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    said = chat(
        command, monkeypatch, run,
        "/image none.png", f"/image {run / 'config.yaml'}", "what is it", "<audio>",
        f"/audio {run.parent / 'sound.wav'}", "what is <audio>",
    )  # fmt: skip
    assert said[0] == "There is no file none.png."
    assert "is no image that can be read" in said[1] and said[2] == "Attach the files again."
    assert "the text has 1 <audio> for 0 audios" in said[3]
    sound = Media("audio", str(run.parent / "sound.wav"))
    assert said[4:] == [load_run(run).task.reply([Message("user", ("what is ", sound))], most_tokens=12)]  # type: ignore[attr-defined]


def test_media_are_placed_at_their_marks_or_in_front(tmp_path: Path) -> None:
    files = [("image", tmp_path / "a"), ("audio", tmp_path / "b"), ("image", tmp_path / "c")]
    a, b, c = (Media(kind, str(path)) for kind, path in files)  # type: ignore[arg-type]
    (asked,) = build_question("x", files).messages
    assert asked.content == (a, c, b, "x")
    (asked,) = build_question("<audio> x <image> or <image>", files).messages
    assert asked.content == (b, " x ", a, " or ", c)


# ------------------------------------------------------------------------------------------------ other tasks


def train_run(folder: Path, rows: list[dict[str, Any]], **whole: Any) -> Path:
    """Train a whole model for three steps and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {
        "output": str(folder / "run"), "device": "cpu", "model": {"whole": whole},
        "data": {"train": str(folder / "rows.jsonl")}, "loop": {"steps": 3, "batch_size": 2},
        "optimizer": {"learning_rate": 1e-2}, "logging": {"progress": "none"},
    }  # fmt: skip
    Trainer(load_config(None, base=base), console=quiet()).fit()
    return folder / "run"


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that labels images."""
    folder = tmp_path_factory.mktemp("labels")
    for number in range(4):
        image(20, 20, number).save(folder / f"{number}.png")
    rows = [{"image": f"{number}.png", "label": ["cat", "dog"][number % 2]} for number in range(4)]
    return train_run(folder, rows, config=VIT, processor_config=VIT_PROCESSOR)


@pytest.mark.parametrize("prompt", [[], ["which is it"]], ids=["no prompt", "a prompt"])
def test_an_image_gets_its_label(labels: Path, command: Command, prompt: list[str]) -> None:
    photo = labels.parent / "1.png"
    (label,) = load_run(labels).task.answer([Sample("x", fields={"image": Media("image", str(photo))})])
    assert command("generate", labels, *prompt, "--image", photo)[:2] == (0, f"{label}\n")
    assert label in ("cat", "dog")


def test_a_classifier_needs_an_image_and_no_sampling(labels: Path, command: Command) -> None:
    code, _, error = command("generate", labels, "what")
    assert code == 2 and "has 0 images, expected one" in error
    code, _, error = command("generate", labels, "what", "--temperature", 1)
    assert code == 2 and "a model trained for image-classification has one answer" in error


def test_text_classifiers_and_seq2seq_answer_and_masked_lm_does_not(tmp_path: Path, command: Command) -> None:
    words = tokenizer_folder(tmp_path)
    rows = [{"text": "it is loud", "label": "bad"}, {"text": "a cat", "label": "good"}] * 2
    run = train_run(tmp_path / "labels", rows, config=BERT, tokenizer=words)
    (label,) = load_run(run).task.answer([Sample("x", fields={"text": "it is loud"})])
    assert command("generate", run, "it is loud")[:2] == (0, f"{label}\n")
    run = train_run(tmp_path / "pairs", [{"source": "a cat", "target": "cat"}] * 4, config=T5, tokenizer=words)
    (target,) = load_run(run).task.answer([Sample("x", fields={"source": "a cat"})])
    assert command("generate", run, "a cat")[:2] == (0, f"{target}\n")
    run = train_run(tmp_path / "hidden", [{"text": "it is loud"}] * 4, config=BERT, tokenizer=words)
    code, _, error = command("generate", run, "it is loud")
    assert code == 2 and "A model trained for masked-lm gives no answers." in error


def test_a_model_made_in_python_is_refused(tmp_path: Path, command: Command) -> None:
    from torch import nn

    Trainer.from_objects(
        nn.Linear(1, 1),
        train_data=[{"x": 1.0}] * 8,
        loss=lambda model, batch: model(batch["x"][:, None]).square().mean(),
        output=str(tmp_path / "run"),
        logging={"progress": "none"},
        console=quiet(),
    ).fit()
    code, _, error = command("generate", tmp_path / "run", "x")
    assert code == 2 and "(Linear) was built in Python" in error
