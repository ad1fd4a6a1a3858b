"""The labels of a classification: which there are, and which number each has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig

from cornstarch.errors import ConfigError
from cornstarch.train.data.formats import SampleSource
from cornstarch.train.data.sample import Sample, SampleError

MOST_LABELS = 10_000
_UNNAMED = re.compile(r"LABEL_\d+")
_SHOWN = 5

RowsToRead = Callable[[], SampleSource]


@dataclass(frozen=True)
class Labels:
    """Names by number; without any, a label is a number to be met as nearly as possible."""

    names: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Whether labels are quantities rather than kinds."""
        return not self.names

    def number(self, label: Any) -> int | float:
        """Return the number of a label: its place among the names, or itself."""
        if self.is_regression:
            if isinstance(label, bool) or not isinstance(label, int | float) or not math.isfinite(label):
                raise SampleError(f"has the label {label!r}, expected a number")
            return float(label)
        word = label_word(label)
        if word in self._numbers:
            return self._numbers[word]
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.names):
            return label
        raise SampleError(f"has the label {label!r}, expected one of {_listed(self.names)}")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in reversed(list(enumerate(self.names)))}  # the first of two alike

    def word(self, number: float) -> str:
        """Return the name of a number, or the quantity in a few digits."""
        return f"{number:.4g}" if self.is_regression else self.names[int(number)]

    def describe(self, config: PreTrainedConfig) -> None:
        """Tell a model's config what it is to tell apart."""
        config.id2label = dict(enumerate(self.names)) or {0: "LABEL_0"}
        config.label2id = {name: number for number, name in config.id2label.items()}
        config.problem_type = "regression" if self.is_regression else "single_label_classification"


def label_of(sample: Sample) -> Any:
    """Return the label of a row as it is written there."""
    found = next((sample.fields[name] for name in ("label", "target") if sample.fields.get(name) is not None), None)
    if found is None:
        raise SampleError(f"has the fields {sorted(map(str, sample.fields))}, expected a `label`")
    if not isinstance(found, str | int | float):
        raise SampleError(f"has a {type(found).__name__} as label, expected a text or a number")
    return found


def label_word(label: Any) -> str:
    """Return how a label is called."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def find_labels(
    given: Sequence[str] | None, config: PreTrainedConfig, has_head: bool, train: RowsToRead, evaluation: RowsToRead
) -> Labels:
    """Return what is to be told apart: the given labels, or those that the model has, or those in the data.

    Args:
        given: What the description lists.
        config: The model's config.
        has_head: Whether the model is a trained classifier, whose numbers must keep their meaning.
        train: Opens the rows, all of whose labels are read where nothing else says what there is.
        evaluation: Opens the rows that may have no others.
    """
    names: dict[Any, str] = dict(config.id2label or {})
    own = tuple(names[number] for number in sorted(names))
    is_named = bool(own) and not any(_UNNAMED.fullmatch(name) for name in own)
    if given is not None:
        # The same words in another order: the model's numbers keep their meaning.
        return Labels(own if set(own) == set(given) else tuple(given))
    if config.problem_type == "regression" or (has_head and len(own) == 1):
        return Labels()
    if is_named:
        _check_first(Labels(own), train())
        return Labels(own)
    collected = _collected(train())
    if has_head:  # without names, but its numbers have a meaning
        numbered = tuple(map(str, range(len(own))))
        fitting = [names for names in (numbered, own) if collected.names and set(collected.names) <= set(names)]
        collected = Labels(fitting[0]) if fitting else collected
    _check_evaluation(collected, evaluation())
    return collected


def _check_first(labels: Labels, source: SampleSource) -> None:
    """Refuse data for other labels than the model's at once, rather than row by row."""
    for name, label in _labels(source):
        try:
            labels.number(label)
        except SampleError as error:
            raise ConfigError(
                f"{name} {error}, which are the model's. Name the column of the labels, or list your own `labels`: the "
                "model gets a new head for them."
            ) from error
        return


def _collected(source: SampleSource) -> Labels:
    """Return the labels of all rows, sorted; whole numbers by size."""
    found: dict[Any, str] = {}  # with the first row that has it
    for name, label in _labels(source):
        found.setdefault(label_word(label) if isinstance(label, str | bool) else label, name)
        if len(found) > MOST_LABELS and not any(isinstance(label, float) for label in found):
            raise ConfigError(
                f"The training data have more than {MOST_LABELS:,} different labels ({_listed(list(found))}). Is "
                "`label` a text to be written? That is `task: seq2seq-lm`. Else give all `labels` yourself."
            )
    if not found:
        raise ConfigError("No row of the training data has a `label`. Name its column: `columns: {label: <column>}`.")
    if any(isinstance(label, float) for label in found):
        words = [label for label in found if isinstance(label, str)]
        if words:
            raise ConfigError(
                f"The training data have numbers with a fraction as labels, and the word {words[0]!r} "
                f"({found[words[0]]}): give words only, or numbers only."
            )
        return Labels()
    if len(found) == 1:
        ((label, name),) = found.items()
        raise ConfigError(
            f"All rows of the training data have the label {label!r} ({name} is the first): there is nothing to tell "
            "apart. List all `labels` if there are others."
        )
    numbers = sorted(label for label in found if isinstance(label, int))
    words = sorted(label for label in found if isinstance(label, str))
    return Labels(tuple(dict.fromkeys([*map(str, numbers), *words])))


def _check_evaluation(labels: Labels, source: SampleSource) -> None:
    """Refuse evaluation data with a label that no training row has."""
    if labels.is_regression:
        return
    known = set(labels.names)
    for name, label in _labels(source):
        if label_word(label) not in known:
            raise ConfigError(
                f"{name} of the evaluation data has the label {label!r}, which no row of the training data has "
                f"({_listed(labels.names)}). Correct it, or list all `labels`."
            )


def _labels(source: SampleSource) -> Iterator[tuple[str, Any]]:
    """Yield where each label stands, and the label; rows that cannot be read are told of when they are trained on."""
    for index in range(len(source)):
        try:
            label = label_of(source[index])
        except SampleError:
            continue
        yield source.name(index), label


def _listed(names: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown}, … ({len(names):,} in all)" if len(names) > _SHOWN else shown
