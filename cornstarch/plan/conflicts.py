"""Which options of a plan make no sense together, each with the reason; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from cornstarch.plan.compression import Local
from cornstarch.plan.kinds import COMPRESSIBLE, FULLY_SHARD, REPLICATED, SHARDED, UNSYNCHRONIZED


def _names(kinds: tuple[str, ...]) -> str:
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"


_USE_DDP = "Leave it out, or use the kind ddp or zero1."
_WHOLE_PARAMETERS = "{kind} keeps whole parameters on every rank"
_ONE_UNIT = f"{_WHOLE_PARAMETERS}: it wraps the model once, as a whole.\nLeave it out, or use {_names(SHARDED)}."
_NO_BUCKETS = (
    "{kind} has no buckets: it reduces the gradients of each wrapped unit together.\n"
    "Leave it out, or use the kind ddp or zero1."
)

# By option: the kinds that have it, and the message for the others.
_ONLY_WITH: dict[str, tuple[tuple[str, ...], str]] = {
    "replicate": (
        ("hsdp",),
        "Only hsdp keeps several copies of the model, each of them sharded; the kind is {kind}.\n"
        "Leave it out, or use the kind hsdp.",
    ),
    "bucket_mb": (REPLICATED, _NO_BUCKETS),
    "gradient_as_bucket_view": (REPLICATED, _NO_BUCKETS),
    "static_graph": (
        REPLICATED,
        "{kind} does not record the graph of a step; DistributedDataParallel does.\n"
        "Leave it out, or use the kind ddp or zero1.",
    ),
    "find_unused": (
        REPLICATED,
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
        FULLY_SHARD,
        "How far ahead {kind} fetches cannot be set: ddp and zero1 have nothing to fetch, fsdp1 decides by itself.\n"
        f"Leave it out, or use {_names(FULLY_SHARD)}.",
    ),
    "wrap": (SHARDED, _ONE_UNIT),
    "wrap_min_parameters": (SHARDED, _ONE_UNIT),
    "compression": (
        COMPRESSIBLE,
        "{kind} has no place for it: FSDP adds up shards of gradients by itself.\n"
        "Leave it out, or use the kind ddp, zero1, or hsdp, which compresses what travels between copies.",
    ),
    "local": (("local_sgd", "diloco"), "It goes with the kind local_sgd or diloco; the kind is {kind}.\nLeave it out."),
    "asynchronous": (("async",), "It goes with the kind async; the kind is {kind}.\nLeave it out."),
    "gossip": (("gossip",), "It goes with the kind gossip; the kind is {kind}.\nLeave it out."),
}
# The message instead for kinds whose ranks are not in step.
_IF_UNSYNCHRONIZED: dict[str, str] = {
    "bucket_mb": "{kind} exchanges no gradients, and so has no buckets of them.\n" + _USE_DDP,
    "gradient_as_bucket_view": "{kind} exchanges no gradients, and so has no buckets of them.\n" + _USE_DDP,
    "static_graph": "{kind} exchanges nothing in a backward pass, and need not know its order.\nLeave it out.",
    "find_unused": "{kind} exchanges nothing in a backward pass, and does not look for what is unused.\nLeave it out.",
    "compression": (
        "{kind} sends whole weights, or changes that are applied one by one.\n"
        "Leave it out, or use the kind local_sgd or diloco, which exchange compressed changes of weights."
    ),
}


def data_conflicts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (option, message) for every option of a `DataPlan` that makes no sense beside the others.

    values: All options but those that are wrong by themselves, about which nothing is said.
    """
    kind = values.get("kind")
    if kind is None:
        return
    refused = set()
    for option, (kinds, text) in _ONLY_WITH.items():
        if kind not in kinds and option in values and values[option] != defaults[option]:
            refused.add(option)
            text = _IF_UNSYNCHRONIZED.get(option, text) if kind in UNSYNCHRONIZED else text
            yield option, text.format(kind=kind)
    others = (_reshard_conflicts(kind, values), _wrap_conflicts(values), _compression_conflicts(kind, values))
    for option, text in chain(*others):
        if option not in refused:
            yield option, text


def _reshard_conflicts(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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


def _wrap_conflicts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if values.get("wrap") != "none":
        return
    if values.get("wrap_min_parameters") is not None:
        yield "wrap_min_parameters", "With wrap: none the model is one unit, whatever its size.\nLeave one of them out."
    if values.get("prefetch"):
        yield "prefetch", "With wrap: none the model is one unit, so there is no next one to fetch.\nUse wrap: auto."


def _compression_conflicts(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    local, compression = values.get("local"), values.get("compression")
    if kind == "local_sgd" and local is not None:
        if (local.outer_learning_rate, local.outer_momentum) != (Local.outer_learning_rate, Local.outer_momentum):
            yield "local", "local_sgd takes the mean of the weights and has no outer optimizer.\nUse the kind diloco."
        if local.overlap:
            yield "local", "local_sgd replaces weights by their mean, so it waits for it.\nUse the kind diloco."
    if compression is None or compression.kind == "none":
        return
    if compression.kind == "powersgd" and kind not in REPLICATED:
        yield (
            "compression",
            f"powersgd sends factors of whole matrices of gradients, which {kind} does not exchange.\n"
            "Use the kind ddp or zero1, or another compression.",
        )
    moving = "With compression the buckets must stay as they are: what was not sent yet belongs to a place in them."
    if kind in REPLICATED and values.get("static_graph"):
        yield "static_graph", f"{moving}\nLeave it out: a static graph lets torch rearrange them after the first step."
    if kind in REPLICATED and values.get("bucket_mb") == "auto":
        yield "bucket_mb", f"{moving}\nGive a number, or leave it out: a run that goes on would measure another size."
    if kind in REPLICATED and values.get("find_unused") is False:
        yield "find_unused", f"{moving}\nLeave it out: without it torch rearranges them after the first step."


def sync_conflicts(data: Any, modules: Mapping[str, Any], is_pipeline: bool) -> list[str]:
    """Return why the replicas of a plan cannot be synchronized as `data`, a DataPlan, says; empty if they can."""
    reasons = []
    has_tp = any(module.tp > 1 for module in modules.values())
    if data.kind in UNSYNCHRONIZED:
        largest = {axis: max(getattr(module, axis) for module in modules.values()) for axis in ("tp", "cp")}
        sizes = [f"{axis} {size}" for axis, size in largest.items() if size > 1]
        sizes += ["a pipeline"] if is_pipeline else []
        if sizes:
            reasons.append(
                f"data.kind = {data.kind}: each rank trains a whole model by itself, and the plan has "
                f"{' and '.join(sizes)}. Use ranks of one model each, or the kind ddp with a compression."
            )
    elif data.compression.kind != "none":
        what = f"data.compression.kind = {data.compression.kind}: "
        if is_pipeline:
            reasons.append(f"{what}the stages of a pipeline exchange gradients whole. Leave it out, or use one stage.")
        elif has_tp and data.kind in REPLICATED:
            reasons.append(f"{what}with tp the ranks exchange shards of gradients. Leave it out, or use the kind hsdp.")
    return reasons


def rank_conflicts(ranks: Any, modules: Mapping[str, Mapping[str, Any]], language_model: str) -> str | None:
    """Return why modules of these sizes cannot be placed as `ranks` says; None if they can."""
    encoders = {name: module for name, module in modules.items() if name != language_model}
    if len(modules) == 1 or ranks not in ("shared", "colocated", "first_stage"):
        return None
    if ranks == "shared":
        rule = "Modules on the same ranks have one stage each, and a cp and a tp that divide the largest."
        fits = _sizes_divide(modules, modules) and all(module["stages"] == 1 for module in modules.values())
    elif ranks == "colocated":
        rule = "Encoders on the same ranks have the same number of stages, and a cp and a tp that divide the largest."
        fits = _sizes_divide(encoders, encoders) and len({module["stages"] for module in encoders.values()}) == 1
    else:
        rule = (
            "Encoders in the language model's first stage have one stage each, and a cp and a tp that divide its own."
        )
        whole = {language_model: modules[language_model]} if language_model in modules else modules
        fits = _sizes_divide(encoders, whole) and all(module["stages"] == 1 for module in encoders.values())
    if fits:
        return None
    sizes = "; ".join(f"{name}: {m['stages']} × cp {m['cp']} × tp {m['tp']}" for name, m in modules.items())
    return f"{rule}\nFound {sizes}.\nUse ranks: own."


def _sizes_divide(modules: Mapping[str, Mapping[str, Any]], around: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the cp and tp of modules divide the largest of the modules around them."""
    largest = {axis: max(module[axis] for module in around.values()) for axis in ("cp", "tp")}
    return all(size % module[axis] == 0 for axis, size in largest.items() for module in modules.values())
