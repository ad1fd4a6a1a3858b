"""Train whole multimodal models as a user does, and compare with the model's own processor, chat template and loss.

Each family of `tests.models.whole_folders` is given conversations without an item, with one, with two side by side or
apart, of two sizes, and of several turns; alone and together. What Cornstarch makes of them must be what
`AutoProcessor` and `apply_chat_template` make of them, tensor for tensor; labels must cover the answers and what ends
them; the loss must be the original model's. What the package does not follow it must refuse, with a reason.

`python -m tests.models.whole_sweep` writes docs/whole_models.md; `--page FILE` another file.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.train.data.rows import sample_of
from cornstarch.train.data.sample import Media, Message, Sample, SampleError
from cornstarch.train.source import load_config
from cornstarch.train.tasks.build import build_task
from tests.models import whole_oracle as oracle
from tests.models.whole_folders import FOLDERS, StoredFamily, write_folder
from tests.models.whole_oracle import Conversation, Item

EQUAL, REFUSED, NOT_ASKED, WRONG = "equal", "refused", "–", "wrong"
TOGETHER, PACKED, GRADIENTS = "together", "packed", "gradients"
CASES = (*oracle.conversations("image"), TOGETHER, PACKED, GRADIENTS)
OWN_KEYS = {"labels", "facts"}  # what a batch has beside the processor's tensors


class WrongError(Exception):
    """Cornstarch makes something else of a conversation than the model's own processor, or computes another loss."""


@dataclass
class Verdict:
    """What came of one family: a word for each case, and the reasons of those that are not equal."""

    family: str
    words: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def note(self, case: str, word: str, reason: str = "") -> None:
        """Keep the worst word of a case; families that read images and sounds have each case twice."""
        order = [NOT_ASKED, EQUAL, REFUSED, WRONG]
        if order.index(word) >= order.index(self.words.get(case, NOT_ASKED)):
            self.words[case] = word
        if reason:
            self.reasons.setdefault(case, " ".join(reason.split()))

    @property
    def status(self) -> str:
        """The family's one word: the worst, but equal where a case is not asked."""
        for word in (WRONG, EQUAL, REFUSED):
            if word in self.words.values():
                return word
        return REFUSED


def judge(name: str, parent: Path) -> Verdict:
    """Run all cases of one family."""
    verdict = Verdict(name)
    if not hasattr(transformers, FOLDERS[name].model_class):
        return _refused(verdict, "not in this transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = write_folder(name, parent)
        try:
            subject = Subject(FOLDERS[name], folder)
        except ConfigError as error:
            return _refused(verdict, str(error))
        except Exception as error:
            verdict.note("no item", WRONG, f"{type(error).__name__}: {error}")
            return verdict
        for kind in FOLDERS[name].kinds:
            _judge_kind(verdict, subject, kind)
    return verdict


def _refused(verdict: Verdict, reason: str) -> Verdict:
    for case in CASES:
        verdict.note(case, REFUSED, reason)
    return verdict


def _judge_kind(verdict: Verdict, subject: Subject, kind: str) -> None:
    good: list[Conversation] = []
    for case, conversation in oracle.conversations(kind).items():
        with _noted(verdict, case):
            if subject.check(case, [conversation]):
                good.append(conversation)
    if not good:
        return
    for case, check in (
        (TOGETHER, lambda: subject.check_together(good)),
        (PACKED, lambda: subject.check_packed(good)),
        (GRADIENTS, lambda: subject.check_gradients(good)),
    ):
        with _noted(verdict, case):
            check()


@contextlib.contextmanager
def _noted(verdict: Verdict, case: str) -> Iterator[None]:
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
    """The model's own processor refuses a conversation."""


class Subject:
    """One stored model: as transformers runs it, and as Cornstarch trains it."""

    def __init__(self, family: StoredFamily, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.config = load_config(
            None,
            base={
                "model": {"whole": {"path": str(folder)}},
                "data": {"train": [{"path": "rows", "format": "given"}], "max_length": 1024, "too_long": "error"},
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

    def check(self, case: str, given: Sequence[Conversation]) -> bool:
        """Raise unless batch, labels and loss are the original's; samples are given as parts and as LLaVA's rows."""
        try:
            expected = oracle.oracle_batch(self.processor, given)
        except Exception as error:
            self._must_refuse(given, error)
            raise NotAskedError(f"{type(self.processor).__name__}: {error}") from error
        own_labels = expected.pop("labels", None)
        labels = oracle.expected_labels(expected, self.processor.tokenizer, self.family)
        if own_labels is not None and not torch.equal(own_labels, labels):
            raise WrongError("the processor's own labels are others than those of the test")
        batch = self.task.collator([sample_of_parts(conversation) for conversation in given])
        must_equal(batch.inputs, {**expected, "labels": labels})
        rows = self.task.collator([sample_of_row(conversation) for conversation in given])
        must_equal(rows.inputs, {**expected, "labels": labels})
        with torch.no_grad():
            must_be_close("the loss", self.task.loss(batch.inputs), self.original_loss(expected, labels), 1e-6)
        return True

    def check_together(self, given: Sequence[Conversation]) -> None:
        """Check a batch of all; of those with items where the processor refuses to mix them with plain text."""
        try:
            self.check(TOGETHER, given)
        except NotAskedError:
            self.check(
                TOGETHER, [one for one in given if any(isinstance(part, Item) for _, said in one for part in said)]
            )

    def _must_refuse(self, given: Sequence[Conversation], error: Exception) -> None:
        """Raise if a conversation that its own processor refuses is accepted."""
        if len(given) > 1:
            return  # conversation by conversation it may be possible
        try:
            self.task.collator([sample_of_parts(conversation) for conversation in given])
        except (SampleError, ConfigError):
            return
        raise WrongError(f"a batch is made although the model's own processor refuses it: {error}")

    def original_loss(self, inputs: Mapping[str, Any], labels: Tensor) -> Tensor:
        """Return the loss that transformers computes."""
        return self.original(**inputs, labels=labels).loss

    def check_packed(self, given: Sequence[Conversation]) -> None:
        """Raise unless samples packed into one row have the loss of samples in rows of their own."""
        apart, packed = self._apart_and_packed(given)
        with torch.no_grad():
            must_be_close("the packed loss", self.task.loss(packed), self.task.loss(apart), 1e-5)

    def check_gradients(self, given: Sequence[Conversation]) -> None:
        """Raise unless each gradient is the original's, with rows apart and packed."""
        apart, packed = self._apart_and_packed(given)
        expected = gradients(self.original, self.original(**_without(apart, "facts")).loss)
        for how, inputs in (("apart", apart), ("packed", packed)):
            found = gradients(self.task.model, self.task.loss(inputs))
            if found.keys() != expected.keys():
                raise WrongError(f"{how}: {len(found)} parameters have gradients, {len(expected)} in the original")
            for key, theirs in expected.items():
                difference = (found[key] - theirs).norm()
                if difference > 1e-4 * theirs.norm() + 1e-6:
                    raise WrongError(f"{how}: a gradient of shape {key[0]} differs by {difference / theirs.norm():.1e}")

    def _apart_and_packed(self, given: Sequence[Conversation]) -> tuple[dict[str, Any], dict[str, Any]]:
        samples = [sample_of_parts(conversation) for conversation in given]
        packing = self.config.data.model_copy(update={"packing": True})
        collator = type(self.task.collator)(self.task.collator.processor, packing)  # type: ignore[attr-defined, call-arg]
        return self.task.collator(samples).inputs, collator(samples).inputs


def _without(inputs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key not in names}


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[tuple[Any, ...], Tensor]:
    """Return all gradients of a loss by their parameters' first values: a model that is taken apart renames them."""
    model.zero_grad()
    loss.backward()
    with_gradient = [p for p in model.parameters() if p.grad is not None and bool(p.grad.any())]
    return {(tuple(p.shape), *p.flatten()[:4].tolist()): p.grad for p in with_gradient if p.grad is not None}


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
    return sample_of(row, "llava", "row", Path())


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
            if mine.dtype != other.dtype or not torch.equal(mine, other):
                raise WrongError(f"{key} differs: {mine.flatten()[:40].tolist()}, {other.flatten()[:40].tolist()}")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


def must_be_close(what: str, found: Tensor, expected: Tensor, rtol: float) -> None:
    """Raise unless two numbers agree."""
    if not torch.allclose(found, expected, rtol=rtol, atol=1e-7):
        raise WrongError(f"{what} is {found.item():.8g}, expected {expected.item():.8g}")
