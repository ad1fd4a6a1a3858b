"""What a kind of training is to the loop: a model, how samples become its batches, its loss, its score, its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from cornstarch.train.data.collate import CollatedBatch
from cornstarch.train.data.loader import Collator
from cornstarch.train.data.sample import MediaKind, Sample


@dataclass(frozen=True)
class Measures:
    """Sums by name, each with what it is divided by, so that portions, sources and processes add up exactly."""

    sums: Mapping[str, tuple[float, float]]

    def __add__(self, other: Measures) -> Measures:
        names = {**self.sums, **other.sums}
        return Measures({name: _added(self.sums.get(name), other.sums.get(name)) for name in names})

    def means(self) -> dict[str, float]:
        """Return what was measured; what nothing was counted for is left out."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}


def _added(first: tuple[float, float] | None, second: tuple[float, float] | None) -> tuple[float, float]:
    (a, m), (b, n) = first or (0.0, 0.0), second or (0.0, 0.0)
    return a + b, m + n


class Task(Protocol):
    """A kind of training."""

    @property
    def name(self) -> str:
        """One of `multimodal`, `causal-lm`, `seq2seq-lm`, `masked-lm`, `sequence-classification`,
        `image-classification`, `module`."""
        ...

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        ...

    wrapped: nn.Module | None
    """What is called instead of the model, where several processes train it together."""

    @property
    def collator(self) -> Collator:
        """What makes batches of samples."""
        ...

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the mean loss over the batch's `trained_tokens`."""
        ...

    def measure(self, batch: CollatedBatch) -> Measures:
        """Return loss and scores of a batch, whose inputs are where the model is; called in eval mode."""
        ...

    def modalities(self) -> dict[str, MediaKind]:
        """Return the kind of media of each modality that texts are asked about; none if there are no such texts."""
        ...

    def answer(self, samples: Sequence[Sample]) -> list[str]:
        """Return what the model says to samples whose answers it does not see; nothing if it says nothing."""
        ...

    def truth(self, sample: Sample) -> str:
        """Return what the model should say; empty if there is no such thing."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model, with its tokenizer and processors, to a new folder that its library loads."""
        ...

    def load(self, folder: Path) -> nn.Module:
        """Return the model that `save` wrote."""
        ...

    def logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return what two models are compared by."""
        ...
