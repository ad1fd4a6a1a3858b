"""`cornstarch generate` asks the model of a run, `export` writes it as a Hugging Face folder, `report` as a page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cornstarch.cli import quiet_libraries
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.data.sample import Message, Sample
    from cornstarch.trainer.checkpointer import LoadedRun

MAX_TOKENS = 128
_EMPTY = "(The answer is empty: the model ended it at once.)"

_RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a run: runs/<name>.", show_default=False)
]
_Checkpoint = Annotated[str, typer.Option(help="best, last, or a step.")]


def report(run: _RunFolder) -> None:
    """Write report.html and loss.png into a run's folder, also while it is running, and print the path."""
    from cornstarch.report import write_report

    print(write_report(run))


def export(
    run: _RunFolder,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder to write.", show_default=False)],
    checkpoint: _Checkpoint = "best",
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Do not compare it with the run.")] = False,
) -> None:
    """Export a run's model with its tokenizer or processors, load it again and compare the logits."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already.\n  Use a new folder.")
    which = _parse_checkpoint(checkpoint)
    from cornstarch.trainer.checkpointer import export_run, load_run

    quiet_libraries()
    loaded = load_run(run, which)
    difference = export_run(loaded, folder, compare=not unchecked)
    text = "not compared" if difference is None else f"loaded again, largest difference of logits {difference:.1e}"
    print(f"{folder}: the {loaded.task.name} model of step {loaded.step}; {text}")


def _parse_checkpoint(checkpoint: str) -> Literal["best", "last"] | int:
    if checkpoint in ("best", "last"):
        return checkpoint  # type: ignore[return-value]
    if not checkpoint.isdecimal():
        raise ConfigError(f"--checkpoint {checkpoint}\n  Expected best, last, or the number of a step.")
    return int(checkpoint)


def generate(
    run: _RunFolder,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; <image> and <audio> mark the places of files. Default: a chat.")
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="An image file; can be repeated.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="A sound file; can be repeated.")] = None,
    checkpoint: _Checkpoint = "best",
    max_tokens: Annotated[int, typer.Option(min=1, help="The maximum length of an answer.")] = MAX_TOKENS,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy decoding.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed for sampling. Default: random.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Ask the model of a run, once or in a chat."""
    which = _parse_checkpoint(checkpoint)
    files = [("image", path) for path in image or ()] + [("audio", path) for path in audio or ()]
    for _, path in files:
        if not path.is_file():
            raise ConfigError(f"There is no file {path}.")
    import torch

    from cornstarch.trainer.checkpointer import load_run

    quiet_libraries()
    loaded = load_run(run, which, device)
    torch.manual_seed(torch.seed() if seed is None else seed)
    reply = _build_reply(loaded, max_tokens, temperature)
    if prompt is None and files and loaded.task.name == "image-classification":
        prompt = ""  # an image alone asks for its label
    if prompt is None:
        _chat(reply, files)
        return
    answer = reply(build_question(prompt, files), [])
    # stdout has the answer alone, so that it can be piped.
    print(answer if answer.strip() else _EMPTY, file=sys.stdout if answer.strip() else sys.stderr)


def _chat(reply: Callable[[Sample, list[Message]], str], files: list[tuple[str, Path]]) -> None:
    from cornstarch.data.sample import Message

    print("Ask a question. /image FILE and /audio FILE attach a file to it, /new starts over, Ctrl-D ends.")
    history: list[Message] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        command, _, rest = line.partition(" ")
        if command == "/new":
            history, files = [], []
        elif command in ("/image", "/audio"):
            path = Path(rest.strip())
            if path.is_file():
                files.append((command[1:], path))
            else:
                print(f"There is no file {path}.")
        elif line:
            try:
                question = build_question(line, files)
                answer = reply(question, history)
            except ConfigError as error:
                print(error)
                if files:
                    print("Attach the files again.")
                files = []
                continue
            print(answer if answer.strip() else _EMPTY)
            history = [*history, *question.messages, Message("assistant", (answer,))]
            files = []


def build_question(text: str, files: list[tuple[str, Path]]) -> Sample:
    """Return a question with its (kind, path) files, at their marks or in front."""
    from cornstarch.data.sample import Media, SampleError, parse_row

    images, sounds = ([str(path.absolute()) for kind, path in files if kind == wanted] for wanted in ("image", "audio"))
    for mark, items in (("<audio>", sounds), ("<image>", images)):
        if mark not in text:
            text = mark * len(items) + text
    row: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "images": images, "audios": sounds}
    try:
        sample = parse_row(row, "sharegpt", "the question", Path())
    except SampleError as error:
        raise ConfigError(f"The question: {error}.") from error
    fields: dict[str, Any] = {"text": text, "source": text}
    if images:
        fields["image"] = Media("image", images[0])
    return type(sample)(sample.id, sample.messages, (), fields)


def _build_reply(loaded: LoadedRun, most: int, temperature: float) -> Callable[[Sample, list[Message]], str]:
    """Return a function that answers a question, given the messages before it."""
    from cornstarch.data.sample import SampleError
    from cornstarch.tasks.conversation import ConversationTask

    task = loaded.task
    if not isinstance(task, ConversationTask) and (temperature > 0 or most != MAX_TOKENS):
        raise ConfigError(
            f"--max-tokens and --temperature are for conversations; a model trained for {task.name} has one answer."
        )
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}

    def reply(question: Sample, history: list[Message]) -> str:
        with loaded.placement.forward_context():
            if isinstance(task, ConversationTask):
                return task.reply([*history, *question.messages], most_tokens=most, **sampling)
            try:
                answers = task.answer([question])
            except SampleError as error:
                raise ConfigError(f"The question {error}.") from error
        if not answers:
            raise ConfigError(f"A model trained for {task.name} gives no answers.")
        return answers[0]

    return reply
