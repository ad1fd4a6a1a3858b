"""Ring collectives, carried out on lists: every message with the numbers that it carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cornstarch.explain import story
from cornstarch.explain.story import DiagramBox, Story, StoryStep, Tone
from cornstarch.plan.communication import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes

_MAX_NUMBERS = 3  # of a chunk that are drawn

_LEGEND: tuple[tuple[Tone, str], ...] = (("c6", "not finished"), ("c1", "finished"))

Chunk = list[int]


@dataclass(frozen=True)
class RingMessage:
    """A chunk that goes from a rank to the next one of the ring."""

    source: int
    target: int
    chunk: int
    numbers: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return story.NUMBER_BYTES * len(self.numbers)


@dataclass
class RingSimulation:
    """Ranks with chunks of a tensor that send them round a ring."""

    chunks: list[list[Chunk | None]]
    """By rank, by chunk; None: the rank does not have it."""
    done: list[list[bool]] = field(default_factory=list)
    """By rank, by chunk: whether it is the result."""

    def __post_init__(self) -> None:
        self.ranks = len(self.chunks)
        self.done = self.done or [[False] * len(own) for own in self.chunks]

    def reduce_round(self, number: int) -> list[RingMessage]:
        """Send a chunk from every rank to the next, which adds it to its own; the sender drops it."""
        messages = self._build_messages(lambda rank: (rank - number) % self.ranks)
        # Ranks send at the same time: all messages are built, and all sent chunks dropped, before any is added.
        for message in messages:
            self.chunks[message.source][message.chunk] = None
        for message in messages:
            own = self.chunks[message.target][message.chunk]
            assert own is not None
            self.chunks[message.target][message.chunk] = [a + b for a, b in zip(own, message.numbers, strict=True)]
            self.done[message.target][message.chunk] = number == self.ranks - 2
        return messages

    def gather_round(self, number: int, first: int) -> list[RingMessage]:
        """Send the chunk that every rank received last to the next; `first` is rank 0's finished one at the start."""
        messages = self._build_messages(lambda rank: (rank + first - number) % self.ranks)
        for message in messages:
            self.chunks[message.target][message.chunk] = list(message.numbers)
            self.done[message.target][message.chunk] = True
        return messages

    def _build_messages(self, select_chunk: Callable[[int], int]) -> list[RingMessage]:
        messages = []
        for rank in range(self.ranks):
            chunk = select_chunk(rank)
            numbers = self.chunks[rank][chunk]
            assert numbers is not None
            messages.append(RingMessage(rank, (rank + 1) % self.ranks, chunk, tuple(numbers)))
        return messages


def build_example(ranks: int, elements: int) -> list[list[Chunk]]:
    """Return a list of numbers for each rank, in as many chunks as there are ranks.

    Up to four ranks have a decimal digit each, so that a sum shows whose numbers are in it: 111 has those of three.
    """
    reason = f"a ring cuts the list into as many equal chunks as there are ranks ({ranks})"
    story.check_divisible(elements, ranks, reason)
    size = elements // ranks

    def number(rank: int, at: int) -> int:
        return (at % 9 + 1) * 10**rank if ranks <= 4 else rank + at % 9 + 1

    return [
        [[number(rank, chunk * size + at) for at in range(size)] for chunk in range(ranks)] for rank in range(ranks)
    ]


def build_reduce_scatter(ranks: int, elements: int) -> Story:
    """Return the ring in which each rank receives one chunk of the sum."""
    ring = RingSimulation([[*own] for own in build_example(ranks, elements)])
    description = "Every rank has a whole list of its own; each is to have one chunk of their sum."
    steps = [_build_step(ring, "Before", description, []), *_reduce(ring)]
    lead = (
        "Lists are summed over ranks, and the sum is left cut: each rank has one chunk of it. Sharded data parallelism "
        "sums gradients this way."
    )
    remark = f"It takes {ranks - 1} rounds. In each, every rank sends and receives one chunk at the same time."
    formula = _build_formula(steps, 1, reduce_scatter_bytes, ranks, elements)
    return Story("reducescatter", "Reduce-scatter", lead, steps, [formula], [remark], _LEGEND)


def build_all_gather(ranks: int, elements: int) -> Story:
    """Return the ring in which every rank receives the chunks of all."""
    chunks: list[list[Chunk | None]] = [
        [own[chunk] if chunk == rank else None for chunk in range(ranks)]
        for rank, own in enumerate(build_example(ranks, elements))
    ]
    ring = RingSimulation(chunks, [[chunk == rank for chunk in range(ranks)] for rank in range(ranks)])
    description = "Every rank has one chunk; all are to have all chunks."
    steps = [_build_step(ring, "Before", description, []), *_gather(ring, first=0)]
    lead = (
        "Each rank has one chunk of a list, and all want the whole. Sharded data parallelism gathers parameters "
        "this way, right before they are needed."
    )
    remark = f"It takes {ranks - 1} rounds. The size is that of the whole list, which every rank has at the end."
    formula = _build_formula(steps, 1, all_gather_bytes, ranks, elements)
    return Story("allgather", "All-gather", lead, steps, [formula], [remark], _LEGEND[1:])


def build_all_reduce(ranks: int, elements: int) -> Story:
    """Return the ring in which every rank receives the sum: a reduce-scatter, then an all-gather."""
    ring = RingSimulation([[*own] for own in build_example(ranks, elements)])
    description = "Every rank has a list of its own; all are to have the sum of all lists."
    steps = [_build_step(ring, "Before", description, []), *_reduce(ring), *_gather(ring, first=1)]
    lead = (
        "Lists are summed over ranks, and every rank gets the whole sum. Data parallelism sums gradients this way, "
        "tensor parallelism outputs."
    )
    remarks = [
        f"It takes {2 * (ranks - 1)} rounds: {ranks - 1} that sum, and {ranks - 1} that share.",
        "With more ranks each sends hardly more: never as much as twice the list. No algorithm in which "
        "the ranks compute the sum sends less.",
    ]
    formula = _build_formula(steps, 2, all_reduce_bytes, ranks, elements)
    return Story("allreduce", "All-reduce", lead, steps, [formula], remarks, _LEGEND)


def _build_formula(
    steps: list[StoryStep], factor: int, formula: Callable[[float, int], float], ranks: int, elements: int
) -> story.Formula:
    size = story.NUMBER_BYTES * elements
    symbols = "2 (N − 1) / N × size" if factor == 2 else "(N − 1) / N × size"
    numbers = f"{'2 × ' if factor == 2 else ''}{ranks - 1} / {ranks} × {story.format_byte_count(size)}"
    sent = story.sum_sent(steps)
    return story.Formula.of_bytes("Bytes that each rank sends", symbols, numbers, formula(size, ranks), sent)


def _reduce(ring: RingSimulation) -> Iterator[StoryStep]:
    growing = "the sum grows while it travels, so nobody ever sends more than one chunk at a time."
    done = "now each rank has one chunk in which the numbers of all ranks are."
    for number in range(ring.ranks - 1):
        messages, why = ring.reduce_round(number), done if number == ring.ranks - 2 else growing
        description = f"Every rank sends one chunk to the next, which adds it to its own: {why}"
        yield _build_step(ring, f"Sum, round {number + 1} of {ring.ranks - 1}", description, messages)


def _gather(ring: RingSimulation, first: int) -> Iterator[StoryStep]:
    passing = "a chunk that has just come goes on in the next round, so that all links are busy all the time."
    for number in range(ring.ranks - 1):
        messages = ring.gather_round(number, first)
        why = "now every rank has everything." if number == ring.ranks - 2 else passing
        description = f"Every rank sends the finished chunk that it has last got to the next, which keeps it: {why}"
        yield _build_step(ring, f"Share, round {number + 1} of {ring.ranks - 1}", description, messages)


def _build_step(ring: RingSimulation, title: str, description: str, messages: list[RingMessage]) -> StoryStep:
    fresh = {(message.target, message.chunk) for message in messages}
    rows = []
    for rank, own in enumerate(ring.chunks):
        boxes = []
        for chunk, numbers in enumerate(own):
            if numbers is None:
                boxes.append(DiagramBox(chunk, chunk + 1, "", "n", f"rank {rank} has no chunk {chunk}"))
                continue
            text = " ".join(map(str, numbers[:_MAX_NUMBERS])) + (" …" if len(numbers) > _MAX_NUMBERS else "")
            done = ring.done[rank][chunk]
            what = "finished" if done else "its own numbers, or part of the sum"
            tooltip = f"rank {rank}, chunk {chunk}: {what}"
            tone: Tone = "c1" if done else "c6"
            boxes.append(DiagramBox(chunk, chunk + 1, text, tone, tooltip, (rank, chunk) in fresh))
        beside = "".join(f"sends chunk {message.chunk}" for message in messages if message.source == rank)
        rows.append(story.DiagramRow(f"rank {rank}", boxes, beside))
    return StoryStep(
        title,
        description,
        rows,
        story.build_head([f"chunk {chunk}" for chunk in range(ring.ranks)]),
        [float(message.bytes) for message in messages],
        [story.Arrow(message.source, message.target, message.chunk + 0.5) for message in messages],
    )
