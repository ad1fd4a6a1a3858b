"""Which options of a plan make no sense together, each with the reason; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

WHOLE = ("ddp", "zero1")
"""Kinds that keep whole parameters on every rank: torch's DistributedDataParallel."""
SHARDED = ("fsdp1", "fsdp2", "zero2", "zero3", "hsdp")
"""Kinds that shard the parameters."""
FSDP2 = ("fsdp2", "zero2", "zero3", "hsdp")
"""Those among them that are torch's `fully_shard`."""


def _names(kinds: tuple[str, ...]) -> str:
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


_WHOLE_PARAMETERS = "{kind} keeps whole parameters on every rank"
_ONE_UNIT = f"{_WHOLE_PARAMETERS}: it wraps the model once, as a whole.\nLeave it out, or use {_names(SHARDED)}."
_NO_BUCKETS = (
    "{kind} has no buckets: it reduces the gradients of each wrapped unit together.\n"
    "Leave it out, or use the kind ddp or zero1."
)

# By option: the kinds that have it, and what to say about the others.
_ONLY_WITH: dict[str, tuple[tuple[str, ...], str]] = {
    "replicate": (
        ("hsdp",),
        "Only hsdp keeps several copies of the model, each of them sharded; the kind is {kind}.\n"
        "Leave it out, or use the kind hsdp.",
    ),
    "bucket_mb": (WHOLE, _NO_BUCKETS),
    "gradient_as_bucket_view": (WHOLE, _NO_BUCKETS),
    "static_graph": (
        WHOLE,
        "{kind} does not record the graph of a step; DistributedDataParallel does.\n"
        "Leave it out, or use the kind ddp or zero1.",
    ),
    "find_unused": (
        WHOLE,
        "{kind} does not wait for parameters that a step did not use; DistributedDataParallel does.\n"
        "Leave it out, or use the kind ddp or zero1.",
    ),
    "param_dtype": (
        SHARDED,
        f"{_WHOLE_PARAMETERS}, in the type that they are kept in.\n"
        f"What is computed in is the run's precision (autocast); or use {_names(SHARDED)}.",
    ),
    "reduce_dtype": (
        SHARDED,
        f"{_WHOLE_PARAMETERS} and sums gradients in their own type.\nLeave it out, or use {_names(SHARDED)}.",
    ),
    "buffer_dtype": (("fsdp1",), "Only fsdp1 casts buffers; the kind is {kind}.\nLeave it out, or use fsdp1."),
    "offload": (
        SHARDED,
        f"{_WHOLE_PARAMETERS}'s device; only shards can wait in the CPU's memory.\n"
        f"Leave it out, or use {_names(SHARDED)}.",
    ),
    "reshard_after_forward": (
        SHARDED,
        f"{_WHOLE_PARAMETERS}: nothing is gathered, so nothing is freed after forward.\n"
        f"Leave it out, or use {_names(SHARDED)}.",
    ),
    "prefetch": (
        FSDP2,
        "How far ahead {kind} fetches cannot be set: ddp and zero1 have nothing to fetch, fsdp1 decides by itself.\n"
        f"Leave it out, or use {_names(FSDP2)}.",
    ),
    "wrap": (SHARDED, _ONE_UNIT),
    "wrap_min_parameters": (SHARDED, _ONE_UNIT),
}


def conflicts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (option, what to say) for every option of a `DataPlan` that makes no sense beside the others.

    values: all options; one that is wrong by itself is left out, and nothing is said about it.
    """
    kind = values.get("kind")
    if kind is None:
        return
    refused = set()
    for option, (kinds, text) in _ONLY_WITH.items():
        if kind not in kinds and option in values and values[option] != defaults[option]:
            refused.add(option)
            yield option, text.format(kind=kind)
    for option, text in [*_resharding(kind, values), *_wrapping(values)]:
        if option not in refused:
            yield option, text


def _resharding(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    reshard = values.get("reshard_after_forward")
    is_size = isinstance(reshard, int) and not isinstance(reshard, bool)
    name = "reshard_after_forward"
    if reshard is None:
        return
    if kind == "zero2" and reshard is not False:
        yield (
            name,
            "zero2 keeps gathered parameters until backward; zero3 frees them after forward.\nUse zero3 or fsdp2.",
        )
    elif kind == "zero3" and reshard is not True:
        yield name, "zero3 frees gathered parameters after forward; zero2 keeps them.\nUse zero2, or fsdp2 to choose."
    elif kind == "fsdp1" and is_size:
        yield name, "fsdp1 shards again over all ranks or not at all.\nUse true, false, or the kind fsdp2."
    elif is_size and reshard < 2:
        yield name, "It is the number of ranks to shard over after forward, at least 2.\nWrite true or false, or 2."


def _wrapping(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if values.get("wrap") != "none":
        return
    if values.get("wrap_min_parameters") is not None:
        yield "wrap_min_parameters", "With wrap: none the model is one unit, whatever its size.\nLeave one of them out."
    if values.get("prefetch"):
        yield "prefetch", "With wrap: none the model is one unit, so there is no next one to fetch.\nUse wrap: auto."


# ------------------------------------------------------------------------------------------------ ranks


def rank_conflicts(ranks: Any, modules: Mapping[str, Mapping[str, Any]], language_model: str) -> str | None:
    """Return why modules of such sizes cannot stand as `ranks` says; None if they can, or if it says nothing known."""
    encoders = {name: module for name, module in modules.items() if name != language_model}
    if len(modules) == 1 or ranks not in ("shared", "colocated", "first_stage"):
        return None
    if ranks == "shared":
        rule = "Modules on the same ranks have one stage each, and a cp and a tp that divide the largest."
        fits = _fit(modules, modules) and all(module["stages"] == 1 for module in modules.values())
    elif ranks == "colocated":
        rule = "Encoders on the same ranks have the same number of stages, and a cp and a tp that divide the largest."
        fits = _fit(encoders, encoders) and len({module["stages"] for module in encoders.values()}) == 1
    else:
        rule = (
            "Encoders in the language model's first stage have one stage each, and a cp and a tp that divide its own."
        )
        whole = {language_model: modules[language_model]} if language_model in modules else modules
        fits = _fit(encoders, whole) and all(module["stages"] == 1 for module in encoders.values())
    if fits:
        return None
    sizes = "; ".join(f"{name}: {m['stages']} × cp {m['cp']} × tp {m['tp']}" for name, m in modules.items())
    return f"{rule}\nFound {sizes}.\nUse ranks: own."


def _fit(modules: Mapping[str, Mapping[str, Any]], around: Mapping[str, Mapping[str, Any]]) -> bool:
    """Say whether the cp and tp of modules divide the largest of those that they stand with."""
    largest = {axis: max(module[axis] for module in around.values()) for axis in ("cp", "tp")}
    return all(size % module[axis] == 0 for axis, size in largest.items() for module in modules.values())
