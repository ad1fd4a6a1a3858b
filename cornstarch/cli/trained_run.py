"""Commands for a trained run: `generate` asks its model, `export` writes a Hugging Face folder, `report` a page, and
`checkpoint` lists, verifies and converts checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cornstarch.cli import WRONG_INPUT, quiet_libraries
from cornstarch.errors import ConfigError

if TYPE_CHECKING:
    from cornstarch.checkpoint import Checkpoint
    from cornstarch.data.sample import Message, Sample
    from cornstarch.trainer.checkpointer import LoadedRun

MAX_TOKENS = 128
_EMPTY = "(The answer is empty: the model ended it at once.)"

_RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_FOLDER", help="The folder of a run: runs/<name>.", show_default=False)
]
_Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="The folder of a run, of its checkpoints, or of one checkpoint (step_…).",
        show_default=False,
    ),
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
    print(_format_answer(answer), file=sys.stdout if answer.strip() else sys.stderr)


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
        elif line.strip():
            try:
                question = build_question(line, files)
                answer = reply(question, history)
            except ConfigError as error:
                print(error)
                if files:
                    print("Attach the files again.")
                files = []
                continue
            print(_format_answer(answer))
            history = [*history, *question.messages, Message("assistant", (answer,))]
            files = []


def _format_answer(answer: str) -> str:
    return answer if answer.strip() else _EMPTY


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

    def converse(question: Sample, history: list[Message]) -> str:
        assert isinstance(task, ConversationTask)
        with loaded.placement.forward_context():
            return task.reply([*history, *question.messages], most_tokens=most, **sampling)

    def answer(question: Sample, history: list[Message]) -> str:
        with loaded.placement.forward_context():
            try:
                answers = task.answer([question])
            except SampleError as error:
                raise ConfigError(f"The question {error}.") from error
        if not answers:
            raise ConfigError(f"A model trained for {task.name} gives no answers.")
        return answers[0]

    return converse if isinstance(task, ConversationTask) else answer


def list_checkpoints(folder: _Folder) -> None:
    """List checkpoints: step, metric, size, layout, versions, and whether all files are there.

    The sizes of files are compared; `verify` reads their contents.
    """
    from rich.console import Console
    from rich.table import Table

    found, problems = _read_checkpoints(folder)
    if found:
        table = Table("step", "metric", "size", "layout", "versions", "files", box=None, pad_edge=False)
        for one in found:
            files = f"{len(one.files)} complete"
            try:
                one.check_sizes()
            except ConfigError as error:
                problems.append(str(error))
                files = "damaged"
            table.add_row(
                str(one.step),
                "" if one.metric is None else f"{one.metric:.6g}",
                _format_size(one.size),
                _format_layout(one),
                " ".join(f"{name} {version}" for name, version in one.versions.items() if name != "python"),
                files,
            )
        Console(soft_wrap=True).print(table)
    _report_damage(problems)


def verify_checkpoints(
    folder: _Folder,
    step: Annotated[int | None, typer.Option(min=0, help="Only the checkpoint of this step.")] = None,
) -> None:
    """Read all bytes of checkpoints and compare their checksums."""
    found, problems = _read_checkpoints(folder)
    if step is not None:
        found = [one for one in found if one.step == step]
        problems = [problem for problem in problems if f"step_{step:08d}" in problem]
        if not found and not problems:
            raise ConfigError(f"{folder} has no checkpoint of step {step}.")
    for one in found:
        try:
            one.verify()
        except ConfigError as error:
            problems.append(str(error))
        else:
            print(f"{one.folder}: intact, {len(one.files)} files, {_format_size(one.size)}")
    _report_damage(problems)


def convert_checkpoint(
    folder: _Folder,
    out: Annotated[Path, typer.Argument(metavar="NEW_FOLDER", help="A new folder to write.", show_default=False)],
    form: Annotated[str, typer.Option(help="full (whole tensors) or sharded.")] = "full",
    processes: Annotated[
        int | None, typer.Option(min=1, help="sharded: the number of processes. Default: as saved.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The step to convert. Default: the newest.")] = None,
) -> None:
    """Convert a checkpoint between full and sharded, and compare the result with the original."""
    from cornstarch.checkpoint.reader import convert_checkpoint

    found, problems = _read_checkpoints(folder)
    candidates = [one for one in found if step is None or one.step == step]
    if not candidates:
        wanted = "no intact checkpoint" if step is None else f"no intact checkpoint of step {step}"
        raise ConfigError("\n".join([f"{folder} has {wanted}.", *problems]))
    written = convert_checkpoint(candidates[-1], out, form, processes)  # type: ignore[arg-type]
    layout, size = _format_layout(written), _format_size(written.size)
    print(f"{written.folder}: step {written.step}, {layout}, {size}; equal to the original")


def _read_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints of a folder and the problems with others; ConfigError if there is neither."""
    from cornstarch.checkpoint import CheckpointStore, read_checkpoint
    from cornstarch.config.run_folder import CHECKPOINTS

    if (folder / "checkpoint.json").is_file() or folder.name.startswith("step_"):
        return [read_checkpoint(folder)], []
    expected = "Expected the folder of a run, of its checkpoints, or of one checkpoint."
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. {expected}")
    inside = folder / CHECKPOINTS
    store = CheckpointStore(inside if inside.is_dir() else folder, keep=1)
    found = store.list()
    if not found and not store.problems:
        raise ConfigError(f"{folder} has no checkpoint. {expected}")
    return found, list(store.problems)


def _report_damage(problems: list[str]) -> None:
    for problem in problems:
        print(f"damaged: {problem}")
    if problems:
        raise typer.Exit(WRONG_INPUT)


def _format_layout(checkpoint: Checkpoint) -> str:
    count, meshes = checkpoint.layout["processes"], checkpoint.layout.get("meshes") or []
    text = f"{count} process{'' if count == 1 else 'es'}, {checkpoint.form}"
    return f"{text} ({', '.join(meshes)})" if meshes else text


def _format_size(count: float) -> str:
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.95:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
