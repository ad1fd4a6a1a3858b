"""Weights read from safetensors by slice: a process reads what it has, and never holds a tensor that it has not.

The model is made on the meta device, cut, and only then are its files opened:

    from_pretrained -> model on meta -> cut -> for each stored tensor: where it goes, and which boxes of it are here
                                                                                  |
    parameters as DTensors <- names, types, ties, buffers: transformers' own loader <- pieces, read as it asks for them

transformers' loader renames and joins what is stored under other names (experts one by one, say). It is given pieces in
place of whole tensors, and parameters of the pieces' shapes to put them in. That is right as long as each step on the
way treats a piece as it would treat its part of the whole; what is not known to do so has the model read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cornstarch.compat import Destination, destinations, weights_through
from cornstarch.errors import ConfigError
from cornstarch.files import damaged_weights
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.pieces import ReadingPlan, ReadWhole
from cornstarch.parallel.tensor.apply import shard_tensors
from cornstarch.parallel.tensor.order import Cut
from cornstarch.parallel.tensor.styles import Style

CutFunction = Callable[[Any], Any]
Held = Callable[[Any], Collection[str]]
"""Returns the names of the parameters that this process has, given the model without memory."""

_REASON, _IN_PART = "read_whole_because", "read_in_part"


def load_sharded(
    model_class: Any,
    folder: str | Path,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, Style | str] | None = None,
    sequence: bool = False,
    vocabulary: bool = False,
    **options: Any,
) -> Any:
    """Return the model of a folder, cut over the ranks of a mesh, of which this process reads its own part only.

    It is the same as `from_pretrained` and then `shard_tensors`, without ever having the whole model. All ranks must
    call it.

    Args:
        model_class: A class of transformers, or an Auto class.
        folder: A folder with safetensors, or the name of one on the hub.
        mesh: The ranks; it has one axis.
        plan: As for `shard_tensors`.
        sequence: As for `shard_tensors`.
        vocabulary: As for `shard_tensors`.
        options: Whatever else `from_pretrained` takes: `dtype`, `attn_implementation`, …
    """
    wants_info = options.pop("output_loading_info", False)

    def cut(model: nn.Module) -> None:
        shard_tensors(model, mesh, plan=plan, sequence=sequence, vocabulary=vocabulary)

    model, info = load_cut(model_class, folder, cut, output_loading_info=True, **options)
    _share_new_weights(model, info, mesh)
    return (model, info) if wants_info else model


def load_cut(
    model_class: Any, folder: str | Path, cut: CutFunction, *, held: Held | None = None, **options: Any
) -> Any:
    """Return the model of a folder, of which `cut` and `held` say what this process has.

    Args:
        model_class: A class of transformers, or an Auto class.
        folder: A folder with safetensors, or the name of one on the hub.
        cut: Changes a model in place. It is called with the model on the meta device: it may make DTensors of
            parameters, or take parameters away (`drop_parameters`). What is left is read. If it raises `ReadWhole`, or
            cannot work on the meta device, the model is read whole and `cut` called once more; `loaded_whole` tells
            why.
        held: Returns the names of the parameters that are read. All others stay in their places, on the meta device.
        options: Whatever else `from_pretrained` takes.
    """
    options = {"use_safetensors": True, **options}
    try:
        try:
            with own_random_numbers():
                return _by_slice(model_class, folder, cut, held, options)
        except ReadWhole as error:
            reason = str(error)
        with own_random_numbers():
            loaded = model_class.from_pretrained(folder, **options)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: {damaged_weights(Path(folder)) or error}") from error
    cut(_model_of(loaded))
    note_whole(_model_of(loaded), reason)
    return loaded


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Run a block that loads a model; what is drawn after it does not depend on what was drawn in it.

    `_init_weights` of some models draws numbers for every layer that is not on the meta device, also for those whose
    weights are stored: how many it draws depends on what this process holds. Inside, numbers are those that
    `from_pretrained` draws by itself. Afterwards they follow from the state before the block, in every process alike.
    """
    seed = crc32(torch.get_rng_state().numpy().tobytes())
    with torch.random.fork_rng(devices=[]):
        yield
    torch.default_generator.manual_seed(seed)


def _by_slice(
    model_class: Any, folder: str | Path, cut: CutFunction, held: Held | None, options: Mapping[str, Any]
) -> Any:
    with ExitStack() as files:
        reading = _Reading(cut, held, str(folder), files)
        with weights_through(reading):
            loaded = model_class.from_pretrained(folder, **options)
        reading.finish(_model_of(loaded))
    return loaded


def is_read_in_part(model: nn.Module) -> bool:
    """Whether a model was made, or read, with some parameters left on the meta device: other processes have them."""
    return _IN_PART in unwrap(model).__dict__


def note_in_part(model: nn.Module) -> None:
    """Note that other processes have some of a model's parameters."""
    unwrap(model).__dict__[_IN_PART] = True


def loaded_whole(model: nn.Module) -> str | None:
    """Return why a model was read whole before it was cut, or None if it was read by slice, or not at all."""
    return unwrap(model).__dict__.get(_REASON)


def note_whole(model: nn.Module, reason: str | None) -> None:
    """Note why a model was read whole before it was cut."""
    unwrap(model).__dict__[_REASON] = reason


def drop_parameters(module: nn.Module) -> None:
    """Take the parameters and buffers of a module away, and of all in it, so that they are not read."""
    for inner in module.modules():
        inner._parameters.clear()
        inner._buffers.clear()
        inner._is_hf_initialized = True  # type: ignore[assignment]  # transformers' word for: leave it as it is


def _model_of(loaded: Any) -> Any:
    return loaded[0] if isinstance(loaded, tuple) else loaded


def _share_new_weights(model: nn.Module, info: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Give all ranks the first one's new weights: a head that was not stored is made with random numbers."""
    mismatched = {entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]}
    for name, parameter in model.named_parameters():
        if mesh.size() > 1 and name in {*info["missing_keys"], *mismatched} and not isinstance(parameter, DTensor):
            dist.broadcast(parameter.detach(), group=mesh.get_group(), group_src=0)


# ------------------------------------------------------------------------------------------------ one model


class _Reading:
    """The reading of one model: from its names to pieces of stored tensors, and back to DTensors."""

    def __init__(self, cut: CutFunction, held: Held | None, folder: str, files: ExitStack) -> None:
        self._cut, self._held, self._folder, self._files = cut, held, folder, files
        self._places: list[tuple[nn.Module, str, DTensor]] = []
        self._aside: _Aside | None = None
        self._was_asked = False

    def __call__(self, model: Any, files: Sequence[str] | None, settings: Any) -> Mapping[str, Any]:
        """Cut the model, and return what is to be read."""
        self._was_asked = True
        if settings.hf_quantizer is not None:
            raise ReadWhole("its weights are quantised")
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        sources = self._opened(files)
        going = destinations(model.base_model_prefix, shapes, sources, settings.weight_mapping)
        other = self._other_shapes(shapes, sources, going)
        if other and not settings.ignore_mismatched_sizes:
            raise ConfigError(
                f"{self._folder}: its weights do not fit {type(model).__name__}: {_listed(other)}. "
                "Its config.json, or the config that was given, is that of another model."
            )
        names = None if self._held is None else self._held(model)
        if names is not None:
            self._check_nothing_new(model, going, other)
        self._cut_on_meta(model)
        if names is not None:
            self._aside = _Aside(model, names)
        kept = set(model.state_dict())
        ties = _keep_ties(model, kept)
        held = {name: (parameter, cut) for name, parameter, cut in _distributed(model)}
        self._check_all_there(held, going, ties, other)
        self._make_plain(model)
        plan = ReadingPlan(sources, going, held, kept, ties)
        itself = destinations(model.base_model_prefix, shapes, plan.joined, settings.weight_mapping)
        return plan.pieces(itself)

    def _opened(self, files: Sequence[str] | None) -> dict[str, Any]:
        """Return what is stored, by name; nothing is read yet."""
        found: dict[str, Any] = {}
        for file in files or ():
            if not Path(file).is_file():
                raise ConfigError(f"{self._folder}: {Path(file).name} is not there, and has some of the weights.")
            opened: Any = self._files.enter_context(safe_open(file, framework="pt"))
            found |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return found

    def _other_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, Any], going: Mapping[str, Destination]
    ) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the parameters that are stored with another shape than they have here, and both."""
        stored = {to.names[0]: tuple(sources[key].get_shape()) for key, to in going.items() if not to.steps}
        return {name: (shape, shapes[name]) for name, shape in stored.items() if shape != shapes[name]}

    def _cut_on_meta(self, model: nn.Module) -> None:
        try:
            self._cut(model)
        except (NotImplementedError, RuntimeError) as error:
            raise ReadWhole(f"it cannot be cut on the meta device ({error})") from error

    def _check_all_there(
        self, held: Mapping[str, Any], going: Mapping[str, Destination], ties: Mapping[str, str], other: Collection[str]
    ) -> None:
        """Have a model read whole of which parts would have to be made with random numbers."""
        for name in held:
            if name in other:
                raise ReadWhole(f"{name} is stored with another shape, and made anew")
        stored = {name for destination in going.values() for name in destination.names}
        stored |= {target for target, source in ties.items() if source in stored}
        missing = [name for name in held if name not in stored]
        if missing:
            raise ReadWhole(f"{missing[0]} is not stored, and made anew")

    def _check_nothing_new(self, model: Any, going: Mapping[str, Destination], other: Collection[str]) -> None:
        """Have a model read whole of which something is made with random numbers: all processes must draw the same."""
        stored = {name for destination in going.values() for name in destination.names} - {*other}
        for target, source in (model.all_tied_weights_keys or {}).items():
            if target in stored and source in stored:
                raise ReadWhole(f"{target} and {source} are tied, and both are stored")
            stored |= {target, source} if stored & {target, source} else set()
        made = [name for name, _ in model.named_parameters() if name not in stored]
        if made:
            raise ReadWhole(f"{made[0]} is not stored as it is here, and made anew")

    def _make_plain(self, model: nn.Module) -> None:
        """Put plain parameters of the pieces' shapes in place of DTensors; tied ones stay tied."""
        plain: dict[int, nn.Parameter] = {}
        for module in model.modules():
            parameters: dict[str, Any] = module._parameters
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor):
                    self._places.append((module, name, parameter))
                    local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                    module._parameters[name] = plain.setdefault(id(parameter), local)

    def finish(self, model: nn.Module) -> None:
        """Make DTensors of what has been read."""
        if not self._was_asked:
            raise ReadWhole(f"{type(model).__name__} is not loaded by transformers' own loader")
        if any(hasattr(module, "base_layer") for module in model.modules()):
            raise ReadWhole("it is stored with adapters")
        if self._aside is not None:
            self._aside.put_back(model)
        tied: dict[int, list[tuple[nn.Module, str, DTensor]]] = {}
        for module, name, former in self._places:
            tied.setdefault(id(module._parameters[name]), []).append((module, name, former))
        for places in tied.values():
            module, name, former = places[0]
            read = module._parameters[name]
            assert read is not None and not read.is_meta, name
            whole = DTensor.from_local(
                read.detach(),
                former.device_mesh,
                former.placements,
                run_check=False,
                shape=former.shape,
                stride=former.stride(),
            )
            made = nn.Parameter(whole, requires_grad=read.requires_grad)
            for module, name, _ in places:
                module._parameters[name] = made


class _Aside:
    """Parameters that other processes have: out of the loader's sight while it works, and in their places afterwards.

    Args:
        model: On the meta device.
        held: The names of those that stay.
    """

    def __init__(self, model: Any, held: Collection[str]) -> None:
        self._ties = dict(model.all_tied_weights_keys or {})
        self._parameters = [
            (module, key, parameter)
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and f"{prefix}.{key}".lstrip(".") not in held
        ]
        gone = {id(parameter) for _, _, parameter in self._parameters}
        self._around = [m for m in model.modules() if any(id(parameter) in gone for parameter in m.parameters())]
        for module in self._around:  # the loader would want to make what is not there anew
            module._is_hf_initialized = True
        for module, key, _ in self._parameters:
            module._parameters[key] = None

    def put_back(self, model: Any) -> None:
        """Put them back, without memory, and let transformers fill the buffers around them."""
        for module, key, parameter in self._parameters:
            parameter._is_hf_initialized = True
            module._parameters[key] = parameter
        for module in self._around:
            module._is_hf_initialized = False
        model.all_tied_weights_keys = self._ties
        self._tie(model)
        try:
            model.initialize_weights()
        except (NotImplementedError, RuntimeError) as error:
            raise ReadWhole(f"its buffers are made from weights that are not here ({error})") from error
        note_in_part(model)

    def _tie(self, model: nn.Module) -> None:
        """Let tied parameters that are not here be one, as they are where they have weights."""
        for target, source in self._ties.items():
            owner, _, key = target.rpartition(".")
            module, parameter = model.get_submodule(owner), model.get_parameter(source)
            if parameter.is_meta and key in module._parameters:
                module._parameters[key] = parameter


def _listed(shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> str:
    said = [f"{name} is {list(there)} there, {list(here)} here" for name, (there, here) in shapes.items()]
    return "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")


def _distributed(model: nn.Module) -> Iterator[tuple[str, DTensor, Cut | None]]:
    """Yield the DTensors among a model's parameters, tied ones under each name, and how they are cut."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                yield f"{prefix}.{name}".lstrip("."), parameter, module.__dict__.get("cuts", {}).get(name)


def _keep_ties(model: Any, kept: set[str]) -> dict[str, str]:
    """Let a model forget ties of which an end is gone; return all that there were."""
    ties: dict[str, str] = dict(model.all_tied_weights_keys or {})
    model.all_tied_weights_keys = {a: b for a, b in ties.items() if a in kept and b in kept}
    return ties


__all__ = [
    "Held",
    "ReadWhole",
    "drop_parameters",
    "is_read_in_part",
    "load_cut",
    "load_sharded",
    "loaded_whole",
    "note_in_part",
    "note_whole",
    "own_random_numbers",
]
