"""Folders and files made to do harm: nothing is executed or written elsewhere, and each ends in one clear message.

    python -m tests.faults.hostile --configs 10000 --runs 1000 --checkpoints 1000 --models 300 --exports 300 \
        --images 1000 --sounds 1000 --tars 1000

Each case is a valid file with a few changes: damage, values of other kinds, deep nesting, paths that lead elsewhere,
names of functions, code, scripts. Python's audit events say what is executed, written or unpickled, whoever does it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html.parser
import io
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tarfile
import tempfile
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from cornstarch.checkpoint.reader import read_checkpoint
from cornstarch.cli.main import main as run_command
from cornstarch.config.config_file import load_config
from cornstarch.data.formats import open_source
from cornstarch.data.media import image_size, load_audio, load_image, sound_length
from cornstarch.data.sample import Media, SampleError
from cornstarch.files import own_digest
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.report import write_report
from cornstarch.tasks.build import build_task
from cornstarch.tasks.conversation import PROCESSOR_FOLDER
from cornstarch.trainer.trainer import Trainer
from tests.faults.changes import SCRIPT, TEXTS, VALUES, change_bytes, change_data, change_json, encode
from tests.faults.watch import Harm, Tally, Watch, judge
from tests.trainer.tiny import tiny_config

MEMORY = 6 * 2**30  # bytes beyond what the process has


# ------------------------------------------------------------------------------------------------ kinds of cases


class Cases:
    """The cases of all kinds, made of one run that was trained here."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        config = tiny_config(self.folder / "made", "loop.steps=2", "checkpoint.every=1", "data.workers=0")
        with contextlib.redirect_stdout(io.StringIO()):
            self.trainer = Trainer(config)
            self.trainer.fit()
        self.config, self.run = config, config.folder
        self.model = self._save_model()
        self.watch = Watch()

    def _save_model(self) -> Path:
        """Write a tower and a language model as folders of transformers, with code that nobody has allowed."""
        model: Any = self.trainer.model
        folder = self.folder / "model"
        (folder / "evil").mkdir(parents=True)
        model.language_model.save_pretrained(folder / "language_model")
        shutil.copytree(self.folder / "made" / "tokenizer", folder / "language_model", dirs_exist_ok=True)
        for place in (folder / "language_model", folder):
            (place / "evil.py").write_text("open('executed', 'w').close()\nclass Evil: pass\n")
        return folder / "language_model"

    def _fresh(self, source: Path | None = None) -> Path:
        """Return an empty folder, or a copy, that the case may write to."""
        target = self.folder / "case" / "own"
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        if source is None:
            target.mkdir()
        else:
            shutil.copytree(source, target)
        return target

    def configs(self, count: int, chance: random.Random) -> Tally:
        """Configs: read, and checked as `cornstarch validate` does."""
        tally, good = Tally(), yaml.safe_load((self.run / "config.yaml").read_text())
        for number in range(count):
            own = self._fresh()
            path = own / "run.yaml"
            if number % 3 == 0:
                path.write_bytes(change_bytes((self.run / "config.yaml").read_bytes(), chance))
            else:
                data = change_data(good, chance)
                try:
                    text = yaml.safe_dump(data, allow_unicode=False)
                except RecursionError:  # YAML's own writer cannot write what is nested so deeply
                    text = json.dumps(data)
                code = "\nevil: !!python/object/apply:os.system ['touch executed']\n"
                path.write_text(text + (code if number % 30 == 1 else ""), "utf-8", "surrogatepass")
            command = {0: "estimate", 50: "data check"}.get(number % 100, "validate")  # the others take longer
            judge(tally, self.watch, own, f"config {number}", lambda c=command, p=path: self._call(c, str(p)))  # type: ignore[misc]
        return tally

    def _call(self, *arguments: str) -> str:
        """Run a command as the command line does; a message is an exit code other than 0."""
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                run_command([word for one in arguments[:1] for word in one.split()] + list(arguments[1:]))
        except SystemExit as ended:
            said = errors.getvalue()
            if "Traceback" in said:
                raise RuntimeError(said) from None
            if any(ord(sign) < 32 and sign not in "\n\t" for sign in said):
                raise Harm(f"control characters reach the terminal: {said!r}") from None
            return "read" if not ended.code else "refused"
        return "read"

    def runs(self, count: int, chance: random.Random) -> Tally:
        """Run folders: files that the report reads, with scripts in every text."""
        tally = Tally()
        names = ["run.json", "metrics.jsonl", "config.yaml", "left_out.json", "timeline.json", "profile.json"]
        honest = _read_scripts((self.run / "report.html").read_text())
        for number in range(count):
            own = self._fresh(self.run)
            for name in chance.sample(names, 2):
                path = own / name
                if name == "metrics.jsonl":
                    lines = path.read_bytes().splitlines()
                    line = chance.randrange(len(lines))
                    lines[line] = encode(change_data(json.loads(lines[line]), chance))
                    lines.append(encode({"kind": "event", "step": 1, "event": SCRIPT, "text": chance.choice(TEXTS)}))
                    path.write_bytes(b"\n".join(lines) + b"\n")
                elif name == "run.json":
                    change_json(path, chance)
                else:
                    path.write_bytes(encode(chance.choice(VALUES)) if chance.random() < 0.5 else b"[" * 100_000)

            def case(own: Path = own) -> str:
                text = write_report(own).read_text(encoding="utf-8")
                if (found := _read_scripts(text)) - honest:
                    raise Harm(f"the report has scripts that are not ours: {found - honest!r:.300}")
                return "read"

            judge(tally, self.watch, own, f"run {number}", case)
        return tally

    def checkpoints(self, count: int, chance: random.Random) -> Tally:
        """Checkpoints, signed again after the change: their files are read, and restored into a model."""
        tally = Tally()
        newest = sorted((self.run / "checkpoints").glob("step_*"))[-1]
        for number in range(count):
            own = self._fresh(newest)
            folder = own.with_name(newest.name)
            shutil.rmtree(folder, ignore_errors=True)
            own.rename(folder)
            name = chance.choice(["checkpoint.json", "data.json", "data.json", "tensors"])
            path = next(folder.glob("*.safetensors")) if name == "tensors" else folder / name
            if name == "tensors":
                _change_header(path, chance)
            else:
                change_json(path, chance)
            if name != "checkpoint.json" or chance.random() < 0.7:
                _sign(folder)

            def case(folder: Path = folder) -> str:
                checkpoint = read_checkpoint(folder)
                checkpoint.verify()
                self.trainer.checkpointer.restore(checkpoint, lambda text: None)
                return "read"

            judge(tally, self.watch, folder, f"checkpoint {number} ({name})", case)
        return tally

    def models(self, count: int, chance: random.Random) -> Tally:
        """Model folders: a language model of transformers with its tokenizer."""
        tally = Tally()
        names = ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"]
        for number in range(count):
            own = self._fresh(self.model)
            name = chance.choice([name for name in names if (own / name).exists()])
            change_json(own / name, chance)
            if number % 10 == 0:
                (own / "model.safetensors").unlink()
                (own / "pytorch_model.bin").write_bytes(pickle.dumps(_Executes()))

            def case(own: Path = own) -> str:
                base = {
                    "model": {"language_model": {"path": str(own)}}, "output": str(own / "run"), "device": "cpu",
                    "data": {"train": str(self.folder / "made" / "train.json")},
                }  # fmt: skip
                build_task(load_config(None, base=base))
                return "read"

            judge(tally, self.watch, own, f"model {number} ({name})", case)
        return tally

    def exports(self, count: int, chance: random.Random) -> Tally:
        """Folders of exported models: their description, signed again, and the files of their parts."""
        tally, source = Tally(), self.folder / "exported"
        self.trainer.task.save(source)
        names = [path.relative_to(source) for path in sorted(source.rglob("*.json"))]
        for number in range(count):
            own = self._fresh(source)
            name = chance.choice(names)
            change_json(own / name, chance)
            _sign(own, "cornstarch_model.json")

            def case(own: Path = own) -> str:
                model = MultimodalModel.from_pretrained(own)
                MultimodalProcessor.from_pretrained(own / PROCESSOR_FOLDER, model=model)
                return "read"

            judge(tally, self.watch, own, f"export {number} ({name})", case)
        return tally

    def images(self, count: int, chance: random.Random) -> Tally:
        """Images in every format that is read."""
        tally, pixels = Tally(), np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        good = []
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO"):
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, kind)
            good.append(stream.getvalue())

        def case(content: bytes) -> str:
            image_size(Media("image", content), 10**6)
            load_image(Media("image", content), 10**6)
            return "read"

        return self._media(tally, count, chance, good, case)

    def sounds(self, count: int, chance: random.Random) -> Tally:
        """Sounds: WAV of every width, and FLAC and OGG if the library is there."""
        tally, good = Tally(), []
        wave_form = (np.random.default_rng(0).standard_normal(800) * 8000).astype(np.int16)
        for width in (1, 2, 4):
            stream = io.BytesIO()
            with wave.open(stream, "wb") as file:
                file.setparams((2, width, 16000, 0, "NONE", ""))
                file.writeframes(wave_form.tobytes())
            good.append(stream.getvalue())
        with contextlib.suppress(ImportError):
            import soundfile

            for kind in ("FLAC", "OGG"):
                stream = io.BytesIO()
                soundfile.write(stream, wave_form, 16000, format=kind)
                good.append(stream.getvalue())

        def case(content: bytes) -> str:
            sound_length(Media("audio", content), 16000)
            load_audio(Media("audio", content), 16000)
            return "read"

        return self._media(tally, count, chance, good, case)

    def _media(
        self, tally: Tally, count: int, chance: random.Random, good: list[bytes], case: Callable[[bytes], str]
    ) -> Tally:
        own = self._fresh()
        for number in range(count):
            content = change_bytes(chance.choice(good), chance)
            judge(tally, self.watch, own, f"file {number}", lambda c=content: case(c))  # type: ignore[misc]
        return tally

    def tars(self, count: int, chance: random.Random) -> Tally:
        """WebDataset tars with links, absolute and climbing names, devices, and damage."""
        tally = Tally()
        for number in range(count):
            own = self._fresh()
            path = own / "x.tar"
            _write_tar(path, chance)
            if chance.random() < 0.6:
                path.write_bytes(change_bytes(path.read_bytes(), chance))

            def case(path: Path = path) -> str:
                data = load_config(None, base={"model": {"given": "Net"}, "data": {"train": str(path)}}).data
                source = open_source(data.train[0])
                broken = 0
                for index in range(min(len(source), 20)):
                    try:
                        for media in source[index].media:
                            load_image(media, 10**6)
                    except SampleError:
                        broken += 1
                return "with skipped samples" if broken else "read"

            judge(tally, self.watch, own, f"tar {number}", case)
        return tally


class _Executes:
    """Unpickling it leaves a file."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


class _Scripts(html.parser.HTMLParser):
    """Collects what a page would execute."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._is_in = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._is_in = tag == "script"
        if tag in ("iframe", "object", "embed", "base", "link", "meta") and dict(attributes).get("http-equiv"):
            self.found.add(tag)
        for name, value in attributes:
            if name.startswith("on") or (value or "").strip().lower().startswith(("javascript:", "vbscript:")):
                self.found.add(f"{name}={value}")

    def handle_endtag(self, tag: str) -> None:
        self._is_in = self._is_in and tag != "script"

    def handle_data(self, text: str) -> None:
        if self._is_in and not text.lstrip().startswith(("{", "[")):  # data, which is not executed
            self.found.add(text)


def _read_scripts(page: str) -> set[str]:
    parser = _Scripts()
    parser.feed(page)
    return parser.found


def _sign(folder: Path, manifest: str = "checkpoint.json") -> None:
    """Write sizes and checksums of a folder as somebody would who has changed it on purpose."""
    path = folder / manifest
    try:
        content = json.loads(path.read_bytes())
        for name, entry in content["files"].items():
            if (folder / name).is_file():
                stored = (folder / name).read_bytes()
                entry.update(size=len(stored), sha256=hashlib.sha256(stored).hexdigest())
        content["sha256"] = own_digest(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError):
        return  # it is damaged so much that it cannot be signed
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _change_header(path: Path, chance: random.Random) -> None:
    """Change the header of a safetensors file, or its bytes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if chance.random() < 0.4:
        path.write_bytes(change_bytes(content, chance))
        return
    header = encode(change_data(json.loads(content[8 : 8 + length]), chance))
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def _write_tar(path: Path, chance: random.Random) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    contents = {"png": stream.getvalue(), "txt": b"a cat", "json": b'{"caption": "a cat"}', "cls": b"1", "pkl": b""}
    contents["pkl"] = contents["pyd"] = pickle.dumps(_Executes())
    with tarfile.open(path, "w") as tar:
        for number in range(chance.randint(1, 6)):
            names = [f"{number:03}", f"../{number}", f"/outside/{number}", "a/../../b", "\x1b[31m", "x" * 90]
            base = chance.choice(names)
            for ending in chance.sample(sorted(contents), chance.randint(1, 3)):
                entry = tarfile.TarInfo(f"{base}.{ending}")
                entry.size = len(contents[ending])
                kind = chance.random()
                if kind < 0.1:
                    entry.type, entry.linkname, entry.size = tarfile.SYMTYPE, "/etc/passwd", 0
                elif kind < 0.15:
                    entry.type, entry.linkname, entry.size = tarfile.LNKTYPE, "../../x", 0
                elif kind < 0.2:
                    entry.type, entry.size = chance.choice([tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]), 0
                tar.addfile(entry, io.BytesIO(contents[ending]) if entry.isreg() else None)


# ------------------------------------------------------------------------------------------------ all of them

KINDS = ("configs", "runs", "checkpoints", "models", "exports", "images", "sounds", "tars")


def run_cases(folder: Path, counts: dict[str, int], seed: int = 0) -> dict[str, Tally]:
    """Run so many cases of each kind in a folder."""
    cases = Cases(folder)
    here = Path.cwd()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, before[1]))
    os.chdir(folder)  # relative paths in a case lead here
    try:
        return {kind: getattr(cases, kind)(counts[kind], random.Random(seed)) for kind in KINDS if counts.get(kind)}
    finally:
        os.chdir(here)
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run_cases(Path(folder), {kind: getattr(asked, kind) for kind in KINDS}, asked.seed)
    for kind, tally in found.items():
        print(f"{kind:12} {tally.line()}")
    problems = [problem for tally in found.values() for problem in tally.problems]
    for problem in problems[:60]:
        print(problem)
    seconds = time.monotonic() - began
    print(f"{sum(one.cases for one in found.values())} cases, {len(problems)} problems, {seconds:.0f} s")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
