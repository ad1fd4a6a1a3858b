"""What can be explained, with which options, and with which sizes where none are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from cornstarch.errors import ConfigError
from cornstarch.explain.collectives import all_gather_story, all_reduce_story, reduce_scatter_story
from cornstarch.explain.context import ring_story, ulysses_story
from cornstarch.explain.pipelines import POLICY_OF, pipeline_story
from cornstarch.explain.shares import ddp_story, fsdp_story, zero1_story, zero2_story, zero3_story
from cornstarch.explain.story import Story
from cornstarch.explain.tensor import tensor_story
from cornstarch.plan.mistakes import nearest, shorten

MOST = {"ranks": 8, "microbatches": 32, "elements": 65_536, "parameters": 10**15}
"""The largest value of each option: more cannot be drawn, or told apart."""
LEAST = {"ranks": 2, "microbatches": 1, "elements": 1, "parameters": 64}

_ALIASES = {
    "all-reduce": "allreduce",
    "all-gather": "allgather",
    "reduce-scatter": "reducescatter",
    "fsdp2": "fsdp",
    "zero-1": "zero1",
    "zero-2": "zero2",
    "zero-3": "zero3",
    "zero": "zero3",
    "zerobubble": "zero-bubble",
    "zb": "zero-bubble",
    "tensor": "tp",
    "all-to-all": "ulysses",
    "ring-attn": "ring",
}


@dataclass(frozen=True)
class Topic:
    """Something that can be explained."""

    tell: Callable[..., Story]
    sizes: dict[str, int]
    """Its options, with what they are if they are not given."""
    grows: frozenset[str] = frozenset()
    """Of which of them there are more with more ranks, unless they are given."""


_BY_RANK = frozenset({"elements"})
_COLLECTIVE = {"ranks": 4, "elements": 8}
_SHARES = {"ranks": 4, "parameters": 2**20}
_SCHEDULES = {
    "naive": {"ranks": 3, "microbatches": 3},
    "gpipe": {"ranks": 4, "microbatches": 4},
    "1f1b": {"ranks": 4, "microbatches": 4},
    "interleaved": {"ranks": 2, "microbatches": 2},
    "zero-bubble": {"ranks": 4, "microbatches": 4},
}

TOPICS: dict[str, Topic] = {
    "allreduce": Topic(all_reduce_story, _COLLECTIVE, _BY_RANK),
    "allgather": Topic(all_gather_story, _COLLECTIVE, _BY_RANK),
    "reducescatter": Topic(reduce_scatter_story, _COLLECTIVE, _BY_RANK),
    "ddp": Topic(ddp_story, _SHARES),
    "zero1": Topic(zero1_story, _SHARES),
    "zero2": Topic(zero2_story, _SHARES),
    "zero3": Topic(zero3_story, _SHARES),
    "fsdp": Topic(fsdp_story, _SHARES),
    "tp": Topic(tensor_story, {"ranks": 2, "elements": 4}, _BY_RANK),
    "ulysses": Topic(ulysses_story, {"ranks": 4, "elements": 16}, _BY_RANK),
    "ring": Topic(ring_story, {"ranks": 4, "elements": 16}, _BY_RANK),
    **{
        name: Topic(partial(pipeline_story, name), {**sizes, "elements": 1024}, frozenset({"microbatches"}))
        for name, sizes in _SCHEDULES.items()
    },
}
"""By name, in the order in which one would learn them."""
assert {*POLICY_OF} <= {*TOPICS}


def explain(
    topic: str,
    ranks: int | None = None,
    microbatches: int | None = None,
    elements: int | None = None,
    parameters: int | None = None,
) -> Story:
    """Return the explanation of a topic.

    Args:
        topic: One of `TOPICS`.
        ranks: How many take part.
        microbatches: Of a step of a pipeline.
        elements: Numbers of a list, tokens of a row, channels of a layer or numbers of an activation, by topic.
        parameters: Of the model.
    """
    name = _known(topic)
    found = TOPICS[name]
    named = {"ranks": ranks, "microbatches": microbatches, "elements": elements, "parameters": parameters}
    given = {option: value for option, value in named.items() if value is not None}
    for option, value in given.items():
        if option not in found.sizes:
            takes = ", ".join(f"--{one}" for one in found.sizes)
            raise ConfigError(f"--{option} {value}: {name} has no {option}. It takes {takes}.")
        if not LEAST[option] <= value <= MOST[option]:
            raise ConfigError(f"--{option} {value}: expected {LEAST[option]:,} to {MOST[option]:,}.")
    return found.tell(**_sizes(found, given))


def _known(topic: str) -> str:
    """Return the name of a topic, however it is written."""
    plain = topic.strip().lower().replace("_", "-").replace(" ", "-")
    name = plain if plain in TOPICS else _ALIASES.get(plain, plain)
    if name in TOPICS:
        return name
    close = nearest(plain, [*TOPICS])
    advice = f" Did you mean {close}?" if close else ""
    raise ConfigError(f"There is no explanation of {shorten(topic)!r}.{advice}\nTopics: {', '.join(TOPICS)}.")


def _sizes(found: Topic, given: Mapping[str, int]) -> dict[str, int]:
    """Return all sizes, of which those that were not given fit the ranks: as many for each as in the example."""
    default = found.sizes
    ranks = given.get("ranks", default["ranks"])
    grown = {option: value // default["ranks"] * ranks for option, value in default.items() if option in found.grows}
    return {**default, **grown, **given}
