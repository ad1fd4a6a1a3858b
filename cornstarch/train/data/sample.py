"""What a sample is, before anything is decoded or tokenized, and what is said when it is broken. No torch."""

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
    """A path, the bytes of a file, or what is decoded already: a PIL image; an array, or {"array", "sampling_rate"};
    features of a sound computed beforehand, [frames, features], as an array or a `.npy` file."""


Content = tuple[str | Media, ...]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation: text and media in the order in which they are read."""

    role: Role
    content: Content


@dataclass(frozen=True)
class Sample:
    """One row of a data set: a conversation, or a document without roles."""

    id: str
    """Where it comes from: `train.json:17` is row (of JSONL: line) 17 of the file, counted from 1."""
    messages: tuple[Message, ...] = ()
    document: Content = ()
    """Text without roles, instead of messages; all of it is trained on."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The row itself, for tasks that are no conversation (text, label, source, target, …); media are `Media`."""
    epoch: int = 0
    """The pass over the data that it is read in, for what is drawn anew each time."""

    @property
    def media(self) -> list[Media]:
        """All images and sounds, in the order in which they are read."""
        contents = [message.content for message in self.messages] + [self.document]
        return [part for content in contents for part in content if isinstance(part, Media)]


class SampleError(Exception):
    """One sample cannot be used; the message says why, and the sample is left out and counted."""


class SampleTooLongError(SampleError):
    """A sample that is otherwise good has more tokens than the limit."""


@dataclass(frozen=True)
class BrokenSample:
    """A sample that was left out."""

    id: str
    reason: str
    too_long: bool = False
    """Nothing is wrong with it but its length; it does not count as broken."""

    @classmethod
    def of(cls, id: str, error: SampleError) -> BrokenSample:
        """Note why the sample was left out."""
        return cls(id, str(error), isinstance(error, SampleTooLongError))

    def __str__(self) -> str:
        return f"{self.id}: {self.reason}"
