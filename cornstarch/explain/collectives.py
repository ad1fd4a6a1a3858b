"""Collectives carried out on lists: every message of a ring, with the numbers that it carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cornstarch.errors import ConfigError
from cornstarch.explain.story import (
    NUMBER_BYTES,
    SERIES,
    Arrow,
    Box,
    Formula,
    Row,
    Step,
    Story,
    Tone,
    byte_count,
    same_or_range,
)
from cornstarch.plan.communication import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes

_MOST_SHOWN = 3  # numbers of a chunk
_DECIMAL = 4  # so many ranks can have a digit each

_LEGEND: tuple[tuple[Tone, str], ...] = ((SERIES[5], "not finished"), (SERIES[0], "finished"))

Chunk = list[int]


@dataclass(frozen=True)
class Message:
    """A chunk that goes from a rank to the next one of the ring."""

    source: int
    target: int
    chunk: int
    numbers: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What it weighs."""
        return NUMBER_BYTES * len(self.numbers)


@dataclass
class Ring:
    """Ranks that hold chunks of a tensor, and what they do with them."""

    held: list[list[Chunk | None]]
    """By rank, by chunk; None: it does not have it."""
    done: list[list[bool]] = field(default_factory=list)
    """By rank, by chunk: whether it is the result."""

    def __post_init__(self) -> None:
        self.done = self.done or [[False] * len(own) for own in self.held]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.held)

    def reduce_round(self, number: int) -> list[Message]:
        """Every rank sends a chunk to the next, which adds it to its own; the sender's is spent."""
        messages = self._messages(lambda rank: (rank - number) % self.ranks)
        for message in messages:
            self.held[message.source][message.chunk] = None
        for message in messages:
            own = self.held[message.target][message.chunk]
            assert own is not None
            added = [a + b for a, b in zip(own, message.numbers, strict=True)]
            self.held[message.target][message.chunk] = added
            self.done[message.target][message.chunk] = number == self.ranks - 2
        return messages

    def gather_round(self, number: int, first: int) -> list[Message]:
        """Every rank sends the chunk that it got last to the next, which keeps it.

        first: the chunk that rank 0 has at the beginning.
        """
        messages = self._messages(lambda rank: (rank + first - number) % self.ranks)
        for message in messages:
            self.held[message.target][message.chunk] = list(message.numbers)
            self.done[message.target][message.chunk] = True
        return messages

    def _messages(self, chunk_of: Callable[[int], int]) -> list[Message]:
        messages = []
        for rank in range(self.ranks):
            chunk = chunk_of(rank)
            numbers = self.held[rank][chunk]
            assert numbers is not None
            messages.append(Message(rank, (rank + 1) % self.ranks, chunk, tuple(numbers)))
        return messages


def example(ranks: int, elements: int) -> list[list[Chunk]]:
    """Return a list of numbers for each rank, in as many chunks as there are ranks.

    Up to four ranks have a decimal digit each, so that a sum shows whose numbers are in it: 111 has those of three.
    """
    if elements % ranks or elements < ranks:
        near = max(1, elements // ranks) * ranks
        raise ConfigError(
            f"--elements {elements}: a ring cuts the list into as many equal chunks as there are ranks ({ranks}). "
            f"Use {near} or {near + ranks}."
        )
    size = elements // ranks

    def number(rank: int, at: int) -> int:
        return (at % 9 + 1) * 10**rank if ranks <= _DECIMAL else rank + at % 9 + 1

    return [
        [[number(rank, chunk * size + at) for at in range(size)] for chunk in range(ranks)] for rank in range(ranks)
    ]


# ------------------------------------------------------------------------------------------------ stories


def reduce_scatter_story(ranks: int, elements: int) -> Story:
    """Return how each rank comes to one chunk of the sum."""
    ring = Ring([[*own] for own in example(ranks, elements)])
    steps = [_start(ring, "Every rank has a whole list of its own; each is to have one chunk of their sum.")]
    steps += _reduce(ring)
    formula = _formula(steps, "(N − 1) / N × size", "", reduce_scatter_bytes, ranks, elements)
    return Story(
        "reducescatter",
        "Reduce-scatter",
        "Lists are summed over ranks, and the sum is left cut: each rank has one chunk of it. Sharded data parallelism "
        "sums gradients so.",
        tuple(steps),
        (formula,),
        (f"It takes {ranks - 1} rounds. In each, every rank sends and receives one chunk at the same time.",),
        _LEGEND,
    )


def all_gather_story(ranks: int, elements: int) -> Story:
    """Return how everybody comes to the chunks of all."""
    whole = example(ranks, elements)
    held: list[list[Chunk | None]] = [
        [own[chunk] if chunk == rank else None for chunk in range(ranks)] for rank, own in enumerate(whole)
    ]
    ring = Ring(held, [[chunk == rank for chunk in range(ranks)] for rank in range(ranks)])
    steps = [_start(ring, "Every rank has one chunk; all are to have all chunks.")]
    steps += _gather(ring, first=0)
    formula = _formula(steps, "(N − 1) / N × size", "", all_gather_bytes, ranks, elements)
    return Story(
        "allgather",
        "All-gather",
        "Each rank has one chunk of a list, and all want the whole. Sharded data parallelism brings parameters "
        "together so, right before they are needed.",
        tuple(steps),
        (formula,),
        (f"It takes {ranks - 1} rounds. The size is that of the whole list, which every rank has at the end.",),
        _LEGEND[1:],
    )


def all_reduce_story(ranks: int, elements: int) -> Story:
    """Return how everybody comes to the sum: a reduce-scatter, then an all-gather."""
    ring = Ring([[*own] for own in example(ranks, elements)])
    steps = [_start(ring, "Every rank has a list of its own; all are to have the sum of all lists.")]
    steps += _reduce(ring)
    steps += _gather(ring, first=1)
    formula = _formula(steps, "2 (N − 1) / N × size", "2 × ", all_reduce_bytes, ranks, elements)
    return Story(
        "allreduce",
        "All-reduce",
        "Lists are summed over ranks, and every rank gets the whole sum. Data parallelism sums gradients so, tensor "
        "parallelism outputs.",
        tuple(steps),
        (formula,),
        (
            f"It takes {2 * (ranks - 1)} rounds: {ranks - 1} that sum, and {ranks - 1} that share.",
            "With more ranks each sends hardly more: never as much as twice the list. No way in which ranks do the sum "
            "needs less.",
        ),
        _LEGEND,
    )


def _formula(
    steps: list[Step], symbols: str, factor: str, formula: Callable[[float, int], float], ranks: int, elements: int
) -> Formula:
    size = NUMBER_BYTES * elements
    counted = tuple(float(sum(step.sent[rank] for step in steps if step.sent)) for rank in range(ranks))
    return Formula(
        "Bytes that each rank sends",
        symbols,
        f"{factor}{ranks - 1} / {ranks} × {byte_count(size)}",
        byte_count(formula(size, ranks)),
        same_or_range(counted),
    )


# ------------------------------------------------------------------------------------------------ steps


def _start(ring: Ring, says: str) -> Step:
    return _step(ring, "Before", says, [])


def _reduce(ring: Ring) -> Iterator[Step]:
    for number in range(ring.ranks - 1):
        messages = ring.reduce_round(number)
        last = number == ring.ranks - 2
        why = (
            "now each rank has one chunk in which the numbers of all ranks are."
            if last
            else "the sum grows while it travels, so nobody ever sends more than one chunk at a time."
        )
        says = f"Every rank sends one chunk to the next, which adds it to its own: {why}"
        yield _step(ring, f"Sum, round {number + 1} of {ring.ranks - 1}", says, messages)


def _gather(ring: Ring, first: int) -> Iterator[Step]:
    for number in range(ring.ranks - 1):
        messages = ring.gather_round(number, first)
        last = number == ring.ranks - 2
        why = (
            "now every rank has everything."
            if last
            else "a chunk that has just come goes on in the next round, so that all links are busy all the time."
        )
        says = f"Every rank sends the finished chunk that it has last got to the next, which keeps it: {why}"
        yield _step(ring, f"Share, round {number + 1} of {ring.ranks - 1}", says, messages)


def _step(ring: Ring, title: str, says: str, messages: list[Message]) -> Step:
    fresh = {(message.target, message.chunk) for message in messages}
    rows = []
    for rank, own in enumerate(ring.held):
        boxes = [
            _box(rank, chunk, numbers, ring.done[rank][chunk], (rank, chunk) in fresh)
            for chunk, numbers in enumerate(own)
        ]
        sent = [message for message in messages if message.source == rank]
        beside = "".join(f"sends chunk {one.chunk}" for one in sent)
        rows.append(Row(f"rank {rank}", tuple(boxes), beside))
    return Step(
        title,
        says,
        tuple(rows),
        tuple(Box(chunk, chunk + 1, f"chunk {chunk}") for chunk in range(ring.ranks)),
        tuple(float(message.bytes) for message in messages),
        tuple(Arrow(message.source, message.target, message.chunk + 0.5) for message in messages),
    )


def _box(rank: int, chunk: int, numbers: Chunk | None, done: bool, fresh: bool) -> Box:
    if numbers is None:
        return Box(chunk, chunk + 1, "", "n", f"rank {rank} has no chunk {chunk}")
    shown = " ".join(map(str, numbers[:_MOST_SHOWN])) + (" …" if len(numbers) > _MOST_SHOWN else "")
    tone: Tone = SERIES[0] if done else SERIES[5]
    what = "finished" if done else "its own numbers, or part of the sum"
    return Box(chunk, chunk + 1, shown, tone, f"rank {rank}, chunk {chunk}: {what}", fresh)
