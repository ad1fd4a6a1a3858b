"""Explanations of collectives, data, tensor and context parallelism and schedules, drawn from the code that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cornstarch.errors import ConfigError
from cornstarch.explain.collectives import build_all_gather, build_all_reduce, build_reduce_scatter
from cornstarch.explain.data_parallel import build_ddp, build_fsdp, build_zero1, build_zero2, build_zero3
from cornstarch.explain.pipeline_schedules import build_pipeline
from cornstarch.explain.sharded_layers import build_ring, build_tensor_parallel, build_ulysses
from cornstarch.explain.story import Story
from cornstarch.plan.validation import nearest, shorten

__all__ = ["TOPICS", "Story", "explain"]

MOST = {"ranks": 8, "microbatches": 32, "elements": 65_536, "parameters": 10**15}
"""The largest value of each option: more cannot be drawn, or read."""
LEAST = {"ranks": 2, "microbatches": 1, "elements": 1, "parameters": 64}

_ALIASES = {
    "all-reduce": "allreduce", "all-gather": "allgather", "reduce-scatter": "reducescatter", "fsdp2": "fsdp",
    "zero-1": "zero1", "zero-2": "zero2", "zero-3": "zero3", "zero": "zero3", "zerobubble": "zero-bubble",
    "zb": "zero-bubble", "tensor": "tp", "all-to-all": "ulysses", "ring-attn": "ring",
}  # fmt: skip


@dataclass(frozen=True)
class Topic:
    """Something that can be explained."""

    build: Callable[..., Story]
    sizes: dict[str, int]
    """Its options with their defaults."""
    grows: frozenset[str] = frozenset()
    """The options whose defaults grow with the number of ranks."""


_BY_RANK = frozenset({"elements"})
_COLLECTIVE = {"ranks": 4, "elements": 8}
_SHARDED = {"ranks": 4, "parameters": 2**20}
_SCHEDULES = {"naive": 3, "gpipe": 4, "1f1b": 4, "interleaved": 2, "zero-bubble": 4}
"""The ranks of each schedule, and as many microbatches."""

TOPICS: dict[str, Topic] = {
    "allreduce": Topic(build_all_reduce, _COLLECTIVE, _BY_RANK),
    "allgather": Topic(build_all_gather, _COLLECTIVE, _BY_RANK),
    "reducescatter": Topic(build_reduce_scatter, _COLLECTIVE, _BY_RANK),
    "ddp": Topic(build_ddp, _SHARDED),
    "zero1": Topic(build_zero1, _SHARDED),
    "zero2": Topic(build_zero2, _SHARDED),
    "zero3": Topic(build_zero3, _SHARDED),
    "fsdp": Topic(build_fsdp, _SHARDED),
    "tp": Topic(build_tensor_parallel, {"ranks": 2, "elements": 4}, _BY_RANK),
    "ulysses": Topic(build_ulysses, {"ranks": 4, "elements": 16}, _BY_RANK),
    "ring": Topic(build_ring, {"ranks": 4, "elements": 16}, _BY_RANK),
    **{
        name: Topic(
            partial(build_pipeline, name),
            {"ranks": size, "microbatches": size, "elements": 1024},
            frozenset({"microbatches"}),
        )
        for name, size in _SCHEDULES.items()
    },
}
"""By name, in the order in which to learn them."""


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
        ranks: The number of ranks.
        microbatches: The microbatches of a pipeline's step.
        elements: Numbers of a list, tokens of a row, channels of a layer or numbers of an activation, by topic.
        parameters: The model's parameters.
    """
    plain = topic.strip().lower().replace("_", "-").replace(" ", "-")
    name = plain if plain in TOPICS else _ALIASES.get(plain, plain)
    if name not in TOPICS:
        close = nearest(plain, [*TOPICS])
        advice = f" Did you mean {close}?" if close else ""
        raise ConfigError(f"There is no explanation of {shorten(topic)!r}.{advice}\nTopics: {', '.join(TOPICS)}.")
    found = TOPICS[name]
    named = {"ranks": ranks, "microbatches": microbatches, "elements": elements, "parameters": parameters}
    given = {option: value for option, value in named.items() if value is not None}
    for option, value in given.items():
        if option not in found.sizes:
            takes = ", ".join(f"--{one}" for one in found.sizes)
            raise ConfigError(f"--{option} {value}: {name} has no {option}. It takes {takes}.")
        if not LEAST[option] <= value <= MOST[option]:
            raise ConfigError(f"--{option} {value}: expected {LEAST[option]:,} to {MOST[option]:,}.")
    default = found.sizes
    count = given.get("ranks", default["ranks"])
    # Defaults that grow with the ranks keep their ratio to them.
    grown = {option: value // default["ranks"] * count for option, value in default.items() if option in found.grows}
    return found.build(**{**default, **grown, **given})
