"""The state that a run needs to resume exactly, as tensors and JSON: `capture` and `restore`.

Everything goes by the parameter names of the model, whatever optimizer group or rank has them. Saved are the parameters
that are trained, or that the optimizer has, and all buffers. Frozen parameters are loaded from where the model comes
from: a checkpoint of a 7B model with a trained projector has the size of the projector. The dtype, the shape and a
fingerprint of each frozen parameter are saved, so that another model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cornstarch.checkpoint import named_state, state_values
from cornstarch.checkpoint.coordinator import Coordinator
from cornstarch.checkpoint.fingerprints import fingerprint_shards, join_fingerprints
from cornstarch.checkpoint.named_state import describe, is_trained, local_parameters, named_buffers
from cornstarch.checkpoint.reader import TensorReader
from cornstarch.checkpoint.shards import Sharded, Tensorlike, is_sharded
from cornstarch.checkpoint.state_values import flatten_values, list_tensors, unflatten_values
from cornstarch.errors import ConfigError
from cornstarch.parallel.ddp_fsdp import reshard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

FORMAT = 2
"""1: frozen parameters had hashes of some values (`sample`), which are not compared any more."""

_SHOWN = 5


@dataclass(frozen=True)
class RestoredState:
    """The values that `restore` returns to the training loop, as they were given to `capture`."""

    scheduler_state: Any
    loader_position: Any


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler_state: Any = None,
    ema: Mapping[str, Tensor] | None = None,
    scaler: Stateful | None = None,
    loader_position: Any = None,
    rng: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the JSON data of a run's state on this rank; all ranks must call it.

    The tensors are the live ones: save or copy them before the next step. The data has the one key "state"; others may
    be added beside it. `ema` has averaged weights by parameter name. `rng` is an earlier `random_state` (default: now).
    `scheduler_state` and `loader_position` may be numbers, strings, tensors, arrays, and lists and dictionaries of
    them, alike on all ranks.
    """
    coordinator = Coordinator.default()
    rng = state_values.random_state() if rng is None else rng
    reshard(model)
    tensors: dict[str, Tensorlike] = {}
    named = named_state.NamedOptimizer(optimizer, model)
    local = named.local
    frozen = [name for name, parameter in local.items() if not is_trained(parameter)]
    whole = _survey(model, local, lambda: named.flatten_groups(tensors), frozen, coordinator)
    prints = {name: whole.fingerprints[name] for name in frozen if name not in whole.optimized}
    averages = _shard_averages(ema, local)
    tensors |= {f"parameters/{name}": detach(one) for name, one in local.items() if name not in prints}
    tensors |= {f"buffers/{name}": buffer.detach() for name, buffer, _ in named_buffers(model)}
    tensors |= {f"ema/{name}": detach(average) for name, average in (averages or {}).items()}
    state = {
        **describe_model(model, local, prints),
        "ema": None if averages is None else {name: describe(average) for name, average in averages.items()},
        "optimizer": named.flatten(whole.groups, tensors),
        "scaler": None if scaler is None else flatten_values(scaler.state_dict(), "scaler", tensors),
        "scheduler": flatten_values(scheduler_state, "scheduler", tensors),
        "loader": flatten_values(loader_position, "loader", tensors),
        **state_values.flatten_random_state(rng, coordinator.rank, coordinator.size, tensors),
    }
    return tensors, {"state": state}


def describe_model(
    model: nn.Module, local: Mapping[str, Tensorlike], fingerprints: Mapping[str, str]
) -> dict[str, Any]:
    """Return the entries of a model's parameters and buffers; parameters with a fingerprint are not saved."""
    return {
        "format": FORMAT,
        "parameters": {
            name: {"is": describe(one), "trained": is_trained(one), "saved": name not in fingerprints}
            | ({"fingerprint": fingerprints[name]} if name in fingerprints else {})
            for name, one in local.items()
        },
        "buffers": {n: {"is": describe(b), "persistent": persistent} for n, b, persistent in named_buffers(model)},
    }


def restore(
    tensors: Mapping[str, Any],
    data: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ema: Mapping[str, Tensor] | None = None,
    scaler: Stateful | None = None,
    draws_as: int | None = None,
) -> RestoredState:
    """Restore a captured state, random numbers last; nothing is changed if the state does not fit.

    Each rank loads its own shards, in whatever layout the state was saved. Call it after everything that draws random
    numbers while it is built (the model, the loader). With another number of ranks than before, each rank is seeded
    from the saved random state. Ranks that must draw the same numbers, such as those of a tensor-parallel group, name
    one of them: `draws_as`.
    """
    coordinator = Coordinator.default()
    drawing, size = coordinator.rank if draws_as is None else draws_as, coordinator.size
    reshard(model)
    state, reader = _find_state(data), TensorReader.of(tensors)
    named = named_state.NamedOptimizer(optimizer, model)
    local = named.local
    averages = _shard_averages(ema, local)
    whole = _survey(
        model, local, lambda: [{"parameters": members, "options": {}} for members in named.members],
        _list_unsaved(state), coordinator, averages,
    )  # fmt: skip

    def check() -> None:
        words = {True: "trained", False: "frozen"}
        changed = [
            f"{name} is {words[entry['trained']]} in the checkpoint, {words[is_trained(local[name])]} here"
            for name, entry in state["parameters"].items()
            if name in local and entry["trained"] != is_trained(local[name])
        ]
        _refuse(_compare_model(state, whole) + changed, "the model")
        _refuse(named.find_differences(state["optimizer"], whole.optimized), "the optimizer")
        if ema is not None and state["ema"] is None:
            _refuse(["the run has averaged weights, the checkpoint was made without"], "the averaged weights")
        _refuse([] if ema is None else _compare(state["ema"], whole.averages), "the averaged weights")
        if scaler is not None and scaler.state_dict() and not state["scaler"]:
            _refuse(["the run scales its gradients (fp16), the checkpoint was made without"], "the gradient scaler")
        needed = named.list_needed_tensors(state["optimizer"])
        needed += list_tensors([state[part] for part in ("scaler", "scheduler", "loader")])
        needed += list_tensors(state_values.find_random_state(state, drawing, size)[0])
        _check_complete(state, reader, needed)

    def load() -> RestoredState:
        _load_weights(state, reader, model, local, averaged=False)
        named.restore(state["optimizer"], reader)
        for name, average in (averages or {}).items():
            reader.copy_into(f"ema/{name}", average)
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(unflatten_values(state["scaler"], reader))
        restored = RestoredState(*(unflatten_values(state[part], reader) for part in ("scheduler", "loader")))
        state_values.resume_random_state(state, reader, drawing, size)
        return restored

    coordinator.run_on_all(check)
    return coordinator.run_on_all(load)


def restore_weights(
    tensors: Mapping[str, Any], data: Mapping[str, Any], model: nn.Module, *, averaged: bool = False
) -> None:
    """Restore the model alone, with the averaged weights if `averaged`; all ranks must call it."""
    coordinator = Coordinator.default()
    reshard(model)
    state, reader = _find_state(data), TensorReader.of(tensors)
    local = local_parameters(model)
    whole = _survey(model, local, list, _list_unsaved(state), coordinator)

    def check() -> None:
        _refuse(_compare_model(state, whole), "the model")
        if averaged and state["ema"] is None:
            raise ConfigError("The checkpoint has no averaged weights: the run was made without an EMA.")
        _check_complete(state, reader, [])

    coordinator.run_on_all(check)
    coordinator.run_on_all(lambda: _load_weights(state, reader, model, local, averaged=averaged))


def _find_state(data: Mapping[str, Any]) -> dict[str, Any]:
    state = data.get("state")
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise ConfigError(f'The data holds no state of a run; found {", ".join(data) or "nothing"}, expected "state".')
    if state["format"] > FORMAT:
        raise ConfigError(
            f"The state has format {state['format']}, written by a newer Cornstarch; this one reads formats up to "
            f"{FORMAT}. Update Cornstarch."
        )
    return state


@dataclass(frozen=True)
class _WholeModel:
    """The parameters, buffers and optimizer groups of all ranks together: in a pipeline each rank has its own."""

    optimized: Collection[str]
    """The parameters in the optimizer of any rank."""
    groups: list[named_state.Group]
    fingerprints: Mapping[str, str]
    """Of whole parameters, for those that this rank has a part of."""
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    """The persistent ones."""
    averages: Mapping[str, str]


def _survey(
    model: nn.Module, local: Mapping[str, Tensorlike], groups: Callable[[], list[named_state.Group]],
    names: Iterable[str], coordinator: Coordinator, averages: Mapping[str, Tensorlike] | None = None,
) -> _WholeModel:  # fmt: skip
    """Describe the model of all ranks, with fingerprints of the parameters `names`."""
    wanted = [name for name in names if name in local]
    kinds = ("parameters", "buffers", "averages")

    def work() -> dict[str, Any]:
        return {
            "groups": groups(),
            "shards": {name: fingerprint_shards(local[name]) for name in wanted if is_sharded(local[name])},
            "parameters": {name: describe(parameter) for name, parameter in local.items()},
            "buffers": {name: describe(buffer) for name, buffer, persistent in named_buffers(model) if persistent},
            "averages": {name: describe(average) for name, average in (averages or {}).items()},
        }

    def join(found: list[dict[str, Any]]) -> dict[str, Any]:
        names = dict.fromkeys(name for one in found for name in one["shards"])
        prints = {name: join_fingerprints(p for one in found for p in one["shards"].get(name, ())) for name in names}
        there = {kind: {name: form for one in found for name, form in one[kind].items()} for kind in kinds}
        merged = named_state.merge_groups([one["groups"] for one in found])
        return {"groups": merged, "fingerprints": prints, **there}

    joined = coordinator.reduce(work, join)
    prints = {
        name: joined["fingerprints"].get(name) or join_fingerprints(fingerprint_shards(local[name])) for name in wanted
    }
    optimized = {name: None for group in joined["groups"] for name in group["parameters"]}
    return _WholeModel(optimized, joined["groups"], prints, *(joined[kind] for kind in kinds))


def _list_unsaved(state: Mapping[str, Any]) -> list[str]:
    return [name for name, entry in state["parameters"].items() if not entry["saved"]]


def _shard_averages(
    averages: Mapping[str, Tensor] | None, local: Mapping[str, Tensorlike]
) -> dict[str, Tensorlike] | None:
    if averages is None:
        return None
    return {
        name: parameter.with_local(average) if isinstance(parameter := local.get(name), Sharded) else average
        for name, average in averages.items()
    }


def detach(tensor: Tensorlike) -> Tensorlike:
    return tensor if isinstance(tensor, Sharded) else tensor.detach()


def _compare_model(state: Mapping[str, Any], whole: _WholeModel) -> list[str]:
    saved = state["parameters"]
    found = _compare({name: entry["is"] for name, entry in saved.items()}, whole.parameters)
    persistent = {name: entry["is"] for name, entry in state["buffers"].items() if entry["persistent"]}
    found += _compare(persistent, whole.buffers)
    return found or [
        f"{name} is frozen and was not saved, and has other values now (was it loaded from another model?)"
        for name, entry in saved.items()
        if name in whole.fingerprints and entry.get("fingerprint") not in (None, whole.fingerprints[name])
    ]


def _compare(saved: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [
        *(f"{name} ({saved[name]}) is in the checkpoint only" for name in saved if name not in found),
        *(f"{name} ({found[name]}) is not in the checkpoint" for name in found if name not in saved),
        *(
            f"{name} is {is_saved} in the checkpoint, {found[name]} here"
            for name, is_saved in saved.items()
            if found.get(name, is_saved) != is_saved
        ),
    ]


def _refuse(differences: list[str], what: str) -> None:
    if differences:
        shown = "\n  ".join(differences[:_SHOWN])
        rest = f"\n  … and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise ConfigError(
            f"The checkpoint does not fit {what}, and nothing was restored. {len(differences)} difference(s):\n  "
            f"{shown}{rest}\nContinue with what the checkpoint was made with, or start a new run in another folder."
        )


def _check_complete(state: Mapping[str, Any], tensors: Mapping[str, Any], more: Collection[str]) -> None:
    needed = [f"parameters/{name}" for name, entry in state["parameters"].items() if entry["saved"]]
    needed += [f"buffers/{name}" for name in state["buffers"]]
    needed += [f"ema/{name}" for name in state["ema"] or ()]
    needed += more
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ConfigError(
            f"The checkpoint is incomplete: {len(missing)} of {len(needed)} tensors are missing, the first is "
            f"{missing[0]}. Nothing was restored."
        )


@torch.no_grad()
def _load_weights(
    state: Mapping[str, Any], tensors: TensorReader, model: nn.Module, local: Mapping[str, Tensorlike], averaged: bool
) -> None:
    averages = (state["ema"] or {}) if averaged else {}
    for name, entry in state["parameters"].items():
        if entry["saved"] and name in local:
            tensors.copy_into(f"ema/{name}" if name in averages else f"parameters/{name}", local[name])
    for name, buffer, persistent in named_buffers(model):
        entry = state["buffers"].get(name)
        # The model can rebuild buffers that are not persistent: a cache of another size is left alone.
        if not persistent and (entry is None or entry["is"] != describe(buffer)):
            continue
        is_expanded = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
        # A buffer made by `expand` cannot be written to, and need not be if it is equal.
        if not is_expanded or not torch.equal(tensors[f"buffers/{name}"].to(buffer.device), buffer):
            tensors.copy_into(f"buffers/{name}", buffer)
