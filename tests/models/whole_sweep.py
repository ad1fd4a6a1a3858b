"""Train whole multimodal models as a user does, and compare with the model's own processor, chat template and loss.

Each family of `tests.models.whole_folders` is given conversations without an item, with one, with two side by side or
apart, of two sizes, and of several turns; alone and together. What Cornstarch makes of them must be what
`AutoProcessor` and `apply_chat_template` make of them, tensor for tensor; labels must cover the answers and what ends
them; the loss must be the original model's. What the package does not follow it must refuse, with a reason.

`python -m tests.models.whole_sweep` writes docs/whole_models.md. On a machine with torchvision, whose image and video
processors are then the models' own, `--page benchmarks/results/whole_models_torchvision.md`; with mistral-common,
`--family voxtral --page benchmarks/results/whole_models_mistral_common.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from cornstarch.config.config_file import load_config
from cornstarch.data.sample import Media, Message, Sample, SampleError, parse_row
from cornstarch.errors import ConfigError
from cornstarch.tasks.build import build_task
from tests.models import whole_oracle as oracle
from tests.models.whole_folders import FOLDERS, StoredFamily, write_folder
from tests.models.whole_folders.registry import model_types, uncovered
from tests.models.whole_oracle import Conversation, Item, original_loss
from tests.models.whole_page import EQUAL, NOT_ASKED, PACKED, REFUSED, WRONG, Verdict, write_page

TOGETHER, GRADIENTS = "together", "gradients"
CASES = (*oracle.conversations("image"), TOGETHER, GRADIENTS, PACKED)
OWN_KEYS = {"labels", "facts"}  # what a batch has beside the processor's tensors


class WrongError(Exception):
    """Cornstarch makes something else of a conversation than the model's own processor, or computes another loss."""


def judge(name: str, parent: Path) -> Verdict:
    """Run all cases of one family."""
    family = FOLDERS[name]
    verdict = Verdict(name, family.model_class)
    if not hasattr(transformers, family.model_class):
        return _for_all(verdict, NOT_ASKED, "not in this transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            folder = write_folder(name, parent)
        except Exception as error:
            return _for_all(
                verdict, NOT_ASKED, f"no tiny model with this transformers: {type(error).__name__}: {error}"
            )
        try:
            subject = Subject(family, folder)
        except ConfigError as error:
            return _for_all(verdict, REFUSED, str(error).replace(f"{parent}/", ""))
        except Exception as error:
            return _for_all(verdict, WRONG, f"{type(error).__name__}: {error}")
        for kind in family.kinds:
            _judge_kind(verdict, subject, kind)
    return verdict


def _for_all(verdict: Verdict, word: str, reason: str) -> Verdict:
    for case in CASES:
        verdict.note(case, word, reason)
    return verdict


def _judge_kind(verdict: Verdict, subject: Subject, kind: str) -> None:
    alone: list[Conversation] = []
    for case, conversation in oracle.conversations(kind).items():
        if subject.family.cases is not None and case not in subject.family.cases:
            verdict.note(
                case, NOT_ASKED, "its processor makes images so large that tests do not try every conversation"
            )
            continue
        with _note(verdict, case):
            subject.check([conversation])
            alone.append(conversation)
    if not alone:
        return
    good: Sequence[Conversation] = alone[-1:]  # where several at once are not possible
    with _note(verdict, TOGETHER):
        good = subject.check_together(alone)
    for case, check in ((GRADIENTS, subject.check_gradients), (PACKED, subject.check_packed)):
        with _note(verdict, case):
            check(good)


@contextlib.contextmanager
def _note(verdict: Verdict, case: str) -> Iterator[None]:
    try:
        yield
        verdict.note(case, EQUAL)
    except NotAskedError as error:
        verdict.note(case, NOT_ASKED, str(error))
    except (ConfigError, SampleError) as error:
        verdict.note(case, REFUSED, str(error))
    except WrongError as error:
        verdict.note(case, WRONG, str(error))
    except Exception as error:
        verdict.note(case, WRONG, f"{type(error).__name__}: {error}")


class NotAskedError(Exception):
    """The model's own processor refuses a conversation, or its own code does not run."""


class Subject:
    """One stored model: as transformers runs it, and as Cornstarch trains it."""

    def __init__(self, family: StoredFamily, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.config = load_config(
            None,
            base={
                "model": {"whole": {"path": str(folder)}},
                "data": {"train": [{"path": "rows", "format": "given"}], "max_length": 4096, "too_long": "error"},
            },
        )
        self.task = build_task(self.config)
        self.task.model.eval()

    @cached_property
    def processor(self) -> Any:
        """The model's own processor."""
        return oracle.load_processor(self.folder)

    @cached_property
    def original(self) -> PreTrainedModel:
        """The model as transformers loads it."""
        return oracle.load_model(self.folder, self.family)

    def check(self, given: Sequence[Conversation]) -> None:
        """Raise unless batch, labels and loss are the original's; samples are given as parts and as LLaVA's rows."""
        try:
            expected = oracle.oracle_batch(self.processor, given)
        except Exception as error:
            if len(given) == 1:  # several may be possible one by one
                self._must_refuse(given, error)
            raise NotAskedError(f"{type(self.processor).__name__}: {error}") from error
        if any(map(_has_items, given)) and not _has_more_than_text(expected):
            raise self._must_refuse(given, ValueError("it leaves the items out"))
        own_labels = expected.pop("labels", None)
        labels = oracle.compute_expected_labels(expected, self.processor.tokenizer, self.family)
        if own_labels is not None and not torch.equal(own_labels, labels):
            raise WrongError("the processor's own labels are others than those of the test")
        with torch.no_grad():
            theirs = self._original_loss(expected, labels)
        batch = self.task.collator([sample_of_parts(conversation) for conversation in given])
        must_equal(batch.inputs, {**expected, "labels": labels})
        rows = self.task.collator([sample_of_row(conversation) for conversation in given])
        must_equal(rows.inputs, {**expected, "labels": labels})
        with torch.no_grad():
            must_be_close("the loss", self.task.loss(batch.inputs), theirs, 1e-6)

    def _original_loss(self, inputs: Mapping[str, Any], labels: Tensor) -> Tensor:
        try:
            return original_loss(self.original, inputs, labels)
        except Exception as error:
            raise NotAskedError(f"transformers' own model does not run: {type(error).__name__}: {error}") from error

    def check_together(self, given: Sequence[Conversation]) -> Sequence[Conversation]:
        """Check a batch of all; of those with items where the processor refuses to mix them with plain text."""
        try:
            self.check(given)
        except NotAskedError:
            given = [conversation for conversation in given if _has_items(conversation)]
            self.check(given)
        return given

    def _must_refuse(self, given: Sequence[Conversation], problem: Exception) -> SampleError | ConfigError:
        """Return how Cornstarch refuses what the model's own processor cannot process; raise if it does not."""
        try:
            self.task.collator([sample_of_parts(conversation) for conversation in given])
        except (SampleError, ConfigError) as error:
            return error
        raise WrongError(f"a batch is made although the model's own processor cannot make one: {problem}")

    def check_gradients(self, given: Sequence[Conversation]) -> None:
        """Raise unless each gradient of a batch is the original's."""
        inputs = self._batch(given)
        own = {key: value for key, value in inputs.items() if key not in OWN_KEYS}
        expected = gradients(self.original, self._original_loss(own, inputs["labels"]))
        must_have(gradients(self.task.model, self.task.loss(inputs)), expected)

    def check_packed(self, given: Sequence[Conversation]) -> None:
        """Raise unless samples packed into one row have the loss and the gradients of samples in rows of their own."""
        loss, packed_loss = self.task.loss(self._batch(given)), self.task.loss(self._batch(given, packing=True))
        must_be_close("the packed loss", packed_loss, loss, 1e-5)
        must_have(gradients(self.task.model, packed_loss), gradients(self.task.model, loss))

    def _batch(self, given: Sequence[Conversation], packing: bool = False) -> dict[str, Any]:
        data = self.config.data.model_copy(update={"packing": packing})
        collator = type(self.task.collator)(self.task.collator.processor, data)  # type: ignore[attr-defined, call-arg]
        return collator([sample_of_parts(conversation) for conversation in given]).inputs


def _has_items(conversation: Conversation) -> bool:
    return any(isinstance(part, Item) for _, parts in conversation for part in parts)


def _has_more_than_text(batch: Mapping[str, Any]) -> bool:
    return any(value.shape != batch["input_ids"].shape for value in batch.values() if isinstance(value, Tensor))


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[tuple[Any, ...], Tensor]:
    """Return all gradients of a loss by their parameters' first values: a model that is taken apart renames them."""
    model.zero_grad()
    loss.backward()
    with_gradient = [p for p in model.parameters() if p.grad is not None and bool(p.grad.any())]
    return {(tuple(p.shape), *p.flatten()[:4].tolist()): p.grad for p in with_gradient if p.grad is not None}


def must_have(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> None:
    """Raise unless the same parameters have the same gradients."""
    if found.keys() != expected.keys():
        raise WrongError(f"{len(found)} parameters have gradients, {len(expected)} are expected to")
    for key, gradient in expected.items():
        difference = (found[key] - gradient).norm()
        if difference > 1e-4 * gradient.norm() + 1e-6:
            raise WrongError(f"a gradient of shape {key[0]} differs by {difference / gradient.norm():.1e}")


# ------------------------------------------------------------------------------------------------ samples


def sample_of_parts(conversation: Conversation) -> Sample:
    """Return a conversation as a sample with media among its texts."""

    def part(one: str | Item) -> str | Media:
        return one if isinstance(one, str) else Media(one.kind, one.value)  # type: ignore[arg-type]

    return Sample("parts", tuple(Message(role, tuple(map(part, parts))) for role, parts in conversation))  # type: ignore[arg-type]


def sample_of_row(conversation: Conversation) -> Sample:
    """Return a conversation as LLaVA's JSON has it: marks in texts, items beside them."""
    items = [part for _, parts in conversation for part in parts if isinstance(part, Item)]
    turns = [
        {
            "from": "human" if role == "user" else "gpt",
            "value": "".join(part if isinstance(part, str) else f"<{part.kind}>" for part in parts),
        }
        for role, parts in conversation
    ]
    row: dict[str, Any] = {"conversations": turns}
    for item in items:
        row.setdefault(item.kind, []).append(item.value)
    return parse_row(row, "llava", "row", Path())


# ------------------------------------------------------------------------------------------------ comparing


def must_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise unless a batch has the same tensors, bit by bit."""
    others = set(found) ^ set(expected)
    if others - OWN_KEYS:
        raise WrongError(f"the batch has {sorted(found)}, the processor makes {sorted(expected)}")
    for key, value in expected.items():
        ours, theirs = _tensors(found[key]), _tensors(value)
        if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
            raise WrongError(f"{key}: {[tuple(t.shape) for t in ours]} instead of {[tuple(t.shape) for t in theirs]}")
        for mine, other in zip(ours, theirs, strict=True):
            same_kind = mine.dtype == other.dtype or (mine.is_floating_point() and other.is_floating_point())
            if not same_kind or not torch.equal(mine, other.to(mine.dtype)):
                raise WrongError(f"{key} differs: {mine.flatten()[:40].tolist()}, {other.flatten()[:40].tolist()}")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


def must_be_close(what: str, found: Tensor, expected: Tensor, rtol: float) -> None:
    """Raise unless two numbers agree."""
    if not torch.allclose(found, expected, rtol=rtol, atol=1e-7):
        raise WrongError(f"{what} is {found.item():.8g}, expected {expected.item():.8g}")


# ------------------------------------------------------------------------------------------------ the page

PAGE = Path("docs/whole_models.md")
OTHERS = {
    Path("benchmarks/results/whole_models_torchvision.md"): "torchvision",
    Path("benchmarks/results/whole_models_mistral_common.md"): "mistral-common",
}


def registry_classes() -> list[str]:
    """Return the classes of all multimodal models of the installed transformers."""
    return sorted(set(model_types().values()))


def main() -> None:
    """Judge every family and write the page; a wrong one makes it fail."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="the file to write")
    parser.add_argument("--family", nargs="*", default=list(FOLDERS), choices=list(FOLDERS), help="these only")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        verdicts = [judge(name, Path(folder)) for name in chosen.family]
    for verdict in verdicts:
        if verdict.status == WRONG:
            case = next(case for case, word in verdict.words.items() if word == WRONG)
            print(f"{verdict.family}, {case}: {verdict.reasons[case]}")
    classes = {family.model_class for family in FOLDERS.values()}
    families = "" if len(chosen.family) == len(FOLDERS) else f" --family {' '.join(chosen.family)}"
    page = "" if chosen.page == PAGE else f" --page {chosen.page}"
    command = f"python -m tests.models.whole_sweep{families}{page}"
    chosen.page.parent.mkdir(parents=True, exist_ok=True)
    others = {page: library for page, library in OTHERS.items() if chosen.page == PAGE and page.exists()}
    chosen.page.write_text(write_page(verdicts, CASES, uncovered(classes), command, others))
    if any(verdict.status == WRONG for verdict in verdicts):
        raise SystemExit("some families are wrong: see above")


if __name__ == "__main__":
    main()
