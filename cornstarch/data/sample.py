"""Samples before anything is decoded or tokenized, and the errors that skip one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]
MediaKind = Literal["image", "audio"]


@dataclass(frozen=True)
class Media:
    """An image or a sound that is not decoded yet."""

    kind: MediaKind
    source: Any
    """A path, the bytes of a file, or decoded data: a PIL image; an array, or {"array", "sampling_rate"}; precomputed
    features of a sound, [frames, features], as an array or a `.npy` file."""


Content = tuple[str | Media, ...]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: text and media in reading order."""

    role: Role
    content: Content


@dataclass(frozen=True)
class Sample:
    """One row of a dataset: a conversation, or a document without roles."""

    id: str
    """Where the sample comes from: `train.json:17` is row (in JSONL: line) 17 of the file, counted from 1."""
    messages: tuple[Message, ...] = ()
    document: Content = ()
    """Text without roles, instead of messages; all of it is trained on."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The row itself, for tasks other than conversations (text, label, source, target, …); media are `Media`."""
    epoch: int = 0
    """The epoch in which the sample is read, for augmentation that changes every epoch."""

    @property
    def media(self) -> list[Media]:
        """All images and sounds, in reading order."""
        contents = [message.content for message in self.messages] + [self.document]
        return [part for content in contents for part in content if isinstance(part, Media)]


class SampleError(Exception):
    """The sample cannot be used; it is skipped and counted, and the message says why."""


class SampleTooLongError(SampleError):
    """The sample is valid, but has more tokens than the limit."""


@dataclass(frozen=True)
class BrokenSample:
    """A skipped sample."""

    id: str
    reason: str
    too_long: bool = False
    """Only the length is wrong; the sample does not count as broken."""

    @classmethod
    def of(cls, id: str, error: SampleError) -> BrokenSample:
        """Record why a sample is skipped."""
        return cls(id, str(error), isinstance(error, SampleTooLongError))

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}"
