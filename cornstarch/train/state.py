"""What a run has to remember to go on as if it had not stopped, as tensors and JSON.

Everything goes by the names that the parameters have in the model: which optimizer group or process held them is not
asked. Saved are the parameters that are trained, or that the optimizer holds, and all buffers. Frozen parameters come
from where the model comes from; a checkpoint of a 7B model with a trained projector has the size of the projector. Of
each frozen parameter the type, the shape and a fingerprint of its values are noted, so that another model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.parallel.data import reshard
from cornstarch.train.checkpoint.pieces import Sharded, Tensorlike, is_cut
from cornstarch.train.checkpoint.ranks import Ranks
from cornstarch.train.fingerprint import fingerprint, join_fingerprints, partial_fingerprints
from cornstarch.train.holdings import (
    describe,
    fill,
    held_parameters,
    is_trained,
    named_buffers,
    named_parameters,
)
from cornstarch.train.nested import pack, tensor_names, unpack
from cornstarch.train.optimizer_state import (
    Group,
    group_members,
    hand_options_on,
    joined_groups,
    needed_tensors,
    optimizer_differences,
    own_optimizer,
    packed_groups,
    packed_states,
    restore_optimizer,
)
from cornstarch.train.random_numbers import derived_seed, random_state, restore_random_state, seed_all

__all__ = [
    "Restored", "capture", "named_parameters", "random_state", "restore", "restore_random_state", "restore_weights",
    "seed_all",
]  # fmt: skip

FORMAT = 2
"""1: frozen parameters had hashes of some values (`sample`), which are not compared any more."""

_SHOWN = 5


class Stateful(Protocol):
    """What keeps its state in a dictionary: an optimizer, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state over."""


@dataclass(frozen=True)
class Restored:
    """What `restore` hands back to the loop, as it was given to `capture`."""

    scheduler_state: Any
    loader_position: Any


# ---------------------------------------------------------------------------------------------------- the doors


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
    """Return the tensors and the JSON data of a run's state, of which each process has a part.

    The tensors are the live ones: save or copy them before the next step. The data has the one key "state"; others may
    be added beside it. `ema` are averaged weights by parameter name. `rng` is a `random_state` taken earlier (default:
    now). `scheduler_state` and `loader_position` may be numbers, texts, tensors, arrays, and lists and dictionaries of
    them, alike in all processes.
    """
    ranks = Ranks.here()
    reshard(model)
    tensors: dict[str, Tensorlike] = {}
    parameters, held, own = named_parameters(model), held_parameters(model, ranks), own_optimizer(optimizer)
    frozen = [name for name, parameter in held.items() if not is_trained(parameter)]
    known = _surveyed(model, held, lambda: packed_groups(own, parameters, tensors), frozen, ranks)
    prints = {name: known.fingerprints[name] for name in frozen if name not in known.optimized}
    averages = _cut_as_parameters(ema, held)
    tensors.update({f"parameters/{name}": _live(p) for name, p in held.items() if name not in prints})
    tensors.update({f"buffers/{name}": buffer.detach() for name, buffer, _ in named_buffers(model)})
    tensors.update({f"ema/{name}": _live(average) for name, average in (averages or {}).items()})
    state = {
        "format": FORMAT,
        "parameters": {name: _parameter_entry(p, prints.get(name)) for name, p in held.items()},
        "buffers": {n: {"is": describe(b), "persistent": persistent} for n, b, persistent in named_buffers(model)},
        "ema": None if averages is None else {name: describe(average) for name, average in averages.items()},
        "optimizer": {
            "class": type(own).__qualname__,
            "groups": known.groups,
            **packed_states(own, parameters, held, tensors),
        },
        "scaler": None if scaler is None else pack(scaler.state_dict(), "scaler", tensors),
        "scheduler": pack(scheduler_state, "scheduler", tensors),
        "loader": pack(loader_position, "loader", tensors),
        **_packed_random_state(random_state() if rng is None else rng, ranks, tensors),
    }
    return tensors, {"state": state}


def restore(
    tensors: Mapping[str, Any],
    data: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ema: Mapping[str, Tensor] | None = None,
    scaler: Stateful | None = None,
    draws_as: int | None = None,
) -> Restored:
    """Bring a run into a captured state, random numbers last; nothing is changed if the state does not fit.

    Each process takes what it holds, in whatever layout the state was saved. Call it when everything that draws random
    numbers while it is made (the model, the loader) is there. With another number of processes than the state was saved
    by, each gets random numbers of its own that depend on the saved ones (`random_numbers.derived_seed`). Processes
    that have to draw the same numbers, those of a tensor-parallel group, name one of them: `draws_as`.
    """
    ranks = Ranks.here()
    drawing = ranks.rank if draws_as is None else draws_as
    reshard(model)
    state = _state(data)
    parameters, held, own = named_parameters(model), held_parameters(model, ranks), own_optimizer(optimizer)
    averages = _cut_as_parameters(ema, held)
    known = _surveyed(model, held, lambda: _bare_groups(own, parameters), _not_saved(state), ranks, averages)

    def check() -> None:
        _refuse(_model_differences(state, known) + _trained_differences(state, held), "the model")
        _refuse(optimizer_differences(state["optimizer"], own, parameters, known.optimized), "the optimizer")
        _refuse([] if ema is None else _ema_differences(state["ema"], known.averages), "the averaged weights")
        _refuse(_scaler_differences(state["scaler"], scaler), "the gradient scaler")
        needed = needed_tensors(state["optimizer"], own, parameters, held)
        needed += tensor_names([state[part] for part in ("scaler", "scheduler", "loader")])
        needed += tensor_names(_saved_random_state(state, drawing, ranks.size)[0])
        _check_complete(state, tensors, needed)

    def load() -> Restored:
        _copy_weights(state, tensors, model, held, averaged=False)
        restore_optimizer(state["optimizer"], tensors, own, parameters, held)
        hand_options_on(own, optimizer)
        for name, average in (averages or {}).items():
            fill(tensors, f"ema/{name}", average)
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(unpack(state["scaler"], tensors))
        handed_back = Restored(unpack(state["scheduler"], tensors), unpack(state["loader"], tensors))
        _restore_random_numbers(state, tensors, drawing, ranks.size)
        return handed_back

    ranks.agreed(check)
    return ranks.agreed(load)


def restore_weights(
    tensors: Mapping[str, Any], data: Mapping[str, Any], model: nn.Module, *, averaged: bool = False
) -> None:
    """Bring only the model into a captured state, to use it; with the averaged weights if asked."""
    ranks = Ranks.here()
    reshard(model)
    state = _state(data)
    held = held_parameters(model, ranks)
    known = _surveyed(model, held, list, _not_saved(state), ranks)

    def check() -> None:
        _refuse(_model_differences(state, known), "the model")
        if averaged and state["ema"] is None:
            raise ConfigError("The checkpoint has no averaged weights: the run was made without an EMA.")
        _check_complete(state, tensors, [])

    ranks.agreed(check)
    ranks.agreed(lambda: _copy_weights(state, tensors, model, held, averaged=averaged))


def _state(data: Mapping[str, Any]) -> dict[str, Any]:
    state = data.get("state")
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise ConfigError(f'The data holds no state of a run; found {", ".join(data) or "nothing"}, expected "state".')
    if state["format"] > FORMAT:
        raise ConfigError(
            f"The state has format {state['format']}, written by a newer Cornstarch; this one reads formats up to "
            f"{FORMAT}. Update Cornstarch."
        )
    return state


# ---------------------------------------------------------------------------------------------------- all processes


@dataclass(frozen=True)
class _Survey:
    """What one process cannot know alone."""

    optimized: Collection[str]
    """The parameters that the optimizer of some process holds."""
    groups: list[Group]
    """Of the optimizers of all processes."""
    fingerprints: Mapping[str, str]
    """Of parameters that this process has, whole."""
    parameters: Mapping[str, str]
    """What there is, in whichever process: of a pipeline each has its own."""
    buffers: Mapping[str, str]
    """Those that are saved with the model."""
    averages: Mapping[str, str]
    """Averaged weights, in whichever process."""


def _surveyed(
    model: nn.Module,
    held: Mapping[str, Tensorlike],
    groups: Callable[[], list[Group]],
    names: Iterable[str],
    ranks: Ranks,
    averages: Mapping[str, Tensorlike] | None = None,
) -> _Survey:
    """Find out, all processes together, about optimizers and about the parameters that are named."""
    asked = [name for name in names if name in held]

    def work() -> dict[str, Any]:
        return {
            "groups": groups(),
            "cut": {name: partial_fingerprints(held[name]) for name in asked if is_cut(held[name])},
            "parameters": {name: describe(parameter) for name, parameter in held.items()},
            "buffers": {name: describe(buffer) for name, buffer, persistent in named_buffers(model) if persistent},
            "averages": {name: describe(average) for name, average in (averages or {}).items()},
        }

    def join(found: list[dict[str, Any]]) -> dict[str, Any]:
        cut = dict.fromkeys(name for one in found for name in one["cut"])
        prints = {name: join_fingerprints(p for one in found for p in one["cut"].get(name, ())) for name in cut}
        kinds = ("parameters", "buffers", "averages")
        there = {kind: {name: form for one in found for name, form in one[kind].items()} for kind in kinds}
        return {"groups": joined_groups([one["groups"] for one in found]), "fingerprints": prints, **there}

    joined = ranks.reduced(work, join)
    prints = {name: joined["fingerprints"].get(name) or fingerprint(_whole(held[name])) for name in asked}
    optimized = {name: None for group in joined["groups"] for name in group["parameters"]}
    there = (joined[kind] for kind in ("parameters", "buffers", "averages"))
    return _Survey(optimized, joined["groups"], prints, *there)


def _bare_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[Group]:
    return [{"parameters": members, "options": {}} for members in group_members(optimizer, parameters)]


def _not_saved(state: Mapping[str, Any]) -> list[str]:
    return [name for name, entry in state["parameters"].items() if not entry["saved"]]


def _cut_as_parameters(
    averages: Mapping[str, Tensor] | None, held: Mapping[str, Tensorlike]
) -> dict[str, Tensorlike] | None:
    """Return averaged weights as what they are the averages of."""

    def cut(name: str, average: Tensor) -> Tensorlike:
        parameter = held.get(name)
        return parameter.over(average) if isinstance(parameter, Sharded) else average

    return None if averages is None else {name: cut(name, average) for name, average in averages.items()}


def _whole(parameter: Tensorlike) -> Tensor:
    assert isinstance(parameter, Tensor)
    return parameter


def _live(tensor: Tensorlike) -> Tensorlike:
    return tensor if isinstance(tensor, Sharded) else tensor.detach()


# ---------------------------------------------------------------------------------------------------- the model


def _parameter_entry(parameter: Tensorlike, frozen_as: str | None) -> dict[str, Any]:
    entry = {"is": describe(parameter), "trained": is_trained(parameter), "saved": frozen_as is None}
    return entry if frozen_as is None else {**entry, "fingerprint": frozen_as}


def _model_differences(state: Mapping[str, Any], known: _Survey) -> list[str]:
    saved = state["parameters"]
    found = _differences({name: entry["is"] for name, entry in saved.items()}, known.parameters)
    persistent = {name: entry["is"] for name, entry in state["buffers"].items() if entry["persistent"]}
    found += _differences(persistent, known.buffers)
    if not found:
        found = [
            f"{name} is frozen and was not saved, and has other values now (was it loaded from another model?)"
            for name, entry in saved.items()
            if name in known.fingerprints and entry.get("fingerprint") not in (None, known.fingerprints[name])
        ]
    return found


def _trained_differences(state: Mapping[str, Any], held: Mapping[str, Tensorlike]) -> list[str]:
    def word(trained: bool) -> str:
        return "trained" if trained else "frozen"

    return [
        f"{name} is {word(entry['trained'])} in the checkpoint, {word(is_trained(held[name]))} here"
        for name, entry in state["parameters"].items()
        if name in held and entry["trained"] != is_trained(held[name])
    ]


def _differences(saved: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [
        *(f"{name} ({saved[name]}) is in the checkpoint only" for name in saved if name not in found),
        *(f"{name} ({found[name]}) is not in the checkpoint" for name in found if name not in saved),
        *(
            f"{name} is {saved[name]} in the checkpoint, {found[name]} here"
            for name in saved
            if name in found and saved[name] != found[name]
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
def _copy_weights(
    state: Mapping[str, Any],
    tensors: Mapping[str, Any],
    model: nn.Module,
    held: Mapping[str, Tensorlike],
    averaged: bool,
) -> None:
    averages = (state["ema"] or {}) if averaged else {}
    for name, entry in state["parameters"].items():
        if entry["saved"] and name in held:
            fill(tensors, f"ema/{name}" if name in averages else f"parameters/{name}", held[name])
    for name, buffer, persistent in named_buffers(model):
        entry = state["buffers"].get(name)
        # What the model does not count to its state it can make again: a cache of another size is left alone.
        if persistent or (entry is not None and entry["is"] == describe(buffer)):
            _copy_buffer(tensors, f"buffers/{name}", buffer)


def _copy_buffer(tensors: Mapping[str, Any], name: str, buffer: Tensor) -> None:
    repeated = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    if repeated and torch.equal(tensors[name].to(buffer.device), buffer):
        return  # a buffer made by `expand` cannot be written, and need not be
    fill(tensors, name, buffer)


# ---------------------------------------------------------------------------------------------------- what is optional


def _ema_differences(saved: Mapping[str, str] | None, averages: Mapping[str, str]) -> list[str]:
    if saved is None:
        return ["the run has averaged weights, the checkpoint was made without"]
    return _differences(saved, averages)


def _scaler_differences(saved: Mapping[str, Any] | None, scaler: Stateful | None) -> list[str]:
    if scaler is not None and scaler.state_dict() and not saved:
        return ["the run scales its gradients (fp16), the checkpoint was made without"]
    return []


# ---------------------------------------------------------------------------------------------------- random numbers


def _packed_random_state(state: Mapping[str, Any], ranks: Ranks, tensors: dict[str, Tensorlike]) -> dict[str, Any]:
    """Return the random numbers of this process; `rngs` has those of each one by its number."""
    if ranks.size == 1:
        return {"rng": pack(state, "rng", tensors)}
    return {"rng": None, "rngs": {str(ranks.rank): pack(state, f"rng/{ranks.rank}", tensors)}}


def _saved_random_state(state: Mapping[str, Any], rank: int, size: int) -> tuple[Any, bool]:
    """Return the packed random numbers that one of so many processes goes by, and whether they are its own."""
    saved = state.get("rngs") or {"0": state["rng"]}
    is_own = len(saved) == size
    return saved[str(rank) if is_own else "0"], is_own


def _restore_random_numbers(state: Mapping[str, Any], tensors: Mapping[str, Any], rank: int, size: int) -> None:
    packed, is_own = _saved_random_state(state, rank, size)
    if is_own:
        restore_random_state(unpack(packed, tensors))
    else:
        seed_all(derived_seed(packed, tensors, rank, size))
