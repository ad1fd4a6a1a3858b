"""`cornstarch generate`: ask a run's model, about images and sounds too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.train.data.sample import Message, Sample
    from cornstarch.train.using import LoadedRun

MAX_TOKENS = 128
_EMPTY = "(The answer is empty: the model has ended it at once.)"
_HELP = "Ask; /image FILE and /audio FILE go with the next question, /new forgets what was said, Ctrl-D ends."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate)


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a run.", show_default=False)],
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="What to ask; <image> and <audio> mark their places. Without it: a chat.", show_default=False
        ),
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="An image; may be given several times.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="A sound; may be given several times.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "best",
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = MAX_TOKENS,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest word.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="For answers at a temperature. Default: others each time.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Ask the model of a run, once or in a chat."""
    from cornstarch.cli.export import chosen
    from cornstarch.cli.train import quiet_libraries

    which = chosen(checkpoint)
    files = [("image", path) for path in image or ()] + [("audio", path) for path in audio or ()]
    for _, path in files:
        if not path.is_file():
            raise ConfigError(f"There is no file {path}.")
    from cornstarch.train.using import load_run

    quiet_libraries()
    loaded = load_run(run, which, device)
    _draw_anew(seed)
    say = _speaker(loaded, max_tokens, temperature)
    if prompt is None and files and loaded.task.name == "image-classification":
        prompt = ""  # an image asks for its label without a word
    if prompt is not None:
        answer = say(_question(prompt, files), [])
        print(_format_answer(answer), file=sys.stdout if answer.strip() else sys.stderr)
        return
    _chat(say, files)


def _draw_anew(seed: int | None) -> None:
    """Begin random numbers with a seed, or somewhere else each time."""
    import torch

    torch.manual_seed(torch.seed() if seed is None else seed)


def _chat(say: Callable[[Sample, list[Message]], str], files: list[tuple[str, Path]]) -> None:
    from cornstarch.train.data.sample import Message

    print(_HELP)
    said: list[Message] = []
    for line in _lines():
        command, _, rest = line.partition(" ")
        if command == "/new":
            said, files = [], []
        elif command in ("/image", "/audio"):
            path = Path(rest.strip())
            if path.is_file():
                files.append((command[1:], path))
            else:
                print(f"There is no file {path}.")
        elif line.strip():
            try:
                question = _question(line, files)
                answer = say(question, said)
            except ConfigError as error:
                print(error)
                if files:
                    print("Give the files of the next question anew.")
                files = []
                continue
            print(_format_answer(answer))
            said = [*said, *question.messages, Message("assistant", (answer,))]
            files = []


def _format_answer(answer: str) -> str:
    """Return an answer as it is printed: an empty one must not look like nothing at all."""
    return answer if answer.strip() else _EMPTY


def _lines() -> Iterator[str]:
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return


def _question(text: str, files: list[tuple[str, Path]]) -> Sample:
    """Return a question with its media, at their marks or in front."""
    from cornstarch.train.data.rows import sample_of
    from cornstarch.train.data.sample import Media, SampleError

    images = [str(path.absolute()) for kind, path in files if kind == "image"]
    sounds = [str(path.absolute()) for kind, path in files if kind == "audio"]
    for mark, items in (("<audio>", sounds), ("<image>", images)):
        if mark not in text:
            text = mark * len(items) + text
    row: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "images": images, "audios": sounds}
    try:
        sample = sample_of(row, "sharegpt", "the question", Path())
    except SampleError as error:
        raise ConfigError(f"The question: {error}.") from error
    fields: dict[str, Any] = {"text": text, "source": text}
    if images:
        fields["image"] = Media("image", images[0])
    return type(sample)(sample.id, sample.messages, (), fields)


def _speaker(loaded: LoadedRun, most: int, temperature: float) -> Callable[[Sample, list[Message]], str]:
    """Return a function that answers a question after what was said before."""
    from cornstarch.train.data.sample import SampleError
    from cornstarch.train.tasks.conversation import ConversationTask

    task = loaded.task
    if not isinstance(task, ConversationTask) and (temperature > 0 or most != MAX_TOKENS):
        raise ConfigError(
            f"--max-tokens and --temperature are for conversations; a model trained for {task.name} answers in one way."
        )
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}

    def converse(question: Sample, said: list[Message]) -> str:
        assert isinstance(task, ConversationTask)
        with loaded.placement.computing():
            return task.reply([*said, *question.messages], most_tokens=most, **sampling)

    def answer(question: Sample, said: list[Message]) -> str:
        with loaded.placement.computing():
            try:
                answers = task.answer([question])
            except SampleError as error:
                raise ConfigError(f"The question {error}.") from error
        if not answers:
            raise ConfigError(f"A model trained for {task.name} gives no answers.")
        return answers[0]

    return converse if isinstance(task, ConversationTask) else answer
