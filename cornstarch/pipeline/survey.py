"""How a model is made: found on a small twin of it, proved there by cutting it, and remembered."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cornstarch.errors import UnsupportedModelError
from cornstarch.models.twin import disturb, twin_config
from cornstarch.pipeline.anatomy import frame_of, full_name
from cornstarch.pipeline.findings import Survey
from cornstarch.pipeline.inputs import first_working, guesses
from cornstarch.pipeline.parts import call_with_names, placed
from cornstarch.pipeline.tracing import trace
from cornstarch.pipeline.trial import try_cutting

MakeInputs = Callable[[nn.Module], Mapping[str, Any]]

_SMALL = 20_000_000  # parameters of a model that may be tried itself
_FREE = ("_name_or_path", "dtype", "transformers_version", "architectures")

_known: dict[tuple[Any, ...], Survey | UnsupportedModelError] = {}
_entries: dict[tuple[Any, ...], str | None] = {}
_of_modules: WeakKeyDictionary[nn.Module, Survey | UnsupportedModelError] = WeakKeyDictionary()


def survey(model: nn.Module, make_inputs: MakeInputs | None = None) -> Survey:
    """Find out where a model may be cut, and what has to travel from stage to stage.

    It is found on a narrow twin with as many layers, made from the model's config, which then is cut and compared with
    itself in one piece. The model itself is not run, and may be on the meta device. What was found is remembered for
    each class and its options.

    Args:
        model: A transformers model, also inside PEFT or a `ModalEncoderModule`; an `nn.Sequential`; any other module
            with a list of layers.
        make_inputs: Returns a small batch for the model that it is given, the twin. Needed where it cannot be guessed
            from the config, and for modules that are no transformers models.

    Returns:
        What was found, under the names that modules have in `model`.
    """
    frame = frame_of(model)
    inner = frame.inner
    if isinstance(inner, nn.Sequential):
        names = tuple(inner._modules)  # also one that is there twice
        return placed(Survey(full_name(inner), names, {}, {}), frame)
    found = _remembered(inner, make_inputs)
    if isinstance(found, UnsupportedModelError):
        raise UnsupportedModelError(str(found))
    return placed(found, frame)


def check_entry(inner: nn.Module) -> None:
    """Raise `UnsupportedModelError` unless a first stage may have what precedes the layers, and no layer.

    The second stage is given what the first layer is called with, and nothing else. Whether that is enough is tried on
    a small copy, once for a class and its options.

    Args:
        inner: The model, without what stands around it.
    """
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(f"{type(inner).__name__}: every stage of such a module needs a layer.")
    key = (*_key(inner, None), "entry")
    if key not in _entries:
        _entries[key] = _refused_entry(inner)
    if (error := _entries[key]) is not None:
        raise UnsupportedModelError(f"{type(inner).__name__} cannot begin with a stage without layers: {error}")


def _refused_entry(inner: PreTrainedModel) -> str | None:
    complaint: Exception | None = None
    for make_twin in _twins(inner):
        with _alone():
            try:
                twin = make_twin()
                found = survey(twin)
                batch = _batch(copy.deepcopy(twin), None)
            except Exception as error:
                complaint = complaint or error
                continue
            try:
                try_cutting(twin, batch, found, [0, 0, *found.boundaries[:1]])
            except UnsupportedModelError as error:
                return str(error)
            return None
    return f"no small copy of it runs ({type(complaint).__name__}: {complaint})"


def survey_copy(copied: nn.Module, model: nn.Module) -> None:
    """Let a copy of a module be known as the module is."""
    inner, original = frame_of(copied).inner, frame_of(model).inner
    if original in _of_modules:
        _of_modules[inner] = _of_modules[original]


def _remembered(inner: nn.Module, make_inputs: MakeInputs | None) -> Survey | UnsupportedModelError:
    if not isinstance(inner, PreTrainedModel):
        if inner not in _of_modules:
            _of_modules[inner] = _refused_or(inner, make_inputs)
        return _of_modules[inner]
    key = _key(inner, make_inputs)
    if key not in _known:
        _known[key] = _refused_or(inner, make_inputs)
    return _known[key]


def _key(inner: PreTrainedModel, make_inputs: MakeInputs | None) -> tuple[Any, ...]:
    options = {name: value for name, value in inner.config.to_dict().items() if name not in _FREE}
    return (type(inner), repr(sorted(options.items())), make_inputs)


def _refused_or(inner: nn.Module, make_inputs: MakeInputs | None) -> Survey | UnsupportedModelError:
    try:
        return _surveyed(inner, make_inputs)
    except UnsupportedModelError as error:
        name = type(inner).__name__
        said = str(error).rstrip(".")
        return error if said.startswith(name) else UnsupportedModelError(f"{name} cannot be cut into stages: {said}.")


def _surveyed(inner: nn.Module, make_inputs: MakeInputs | None) -> Survey:
    complaint: Exception | None = None
    for make_twin in _twins(inner):
        with _alone():
            try:
                twin = make_twin()
                tried = copy.deepcopy(twin)
                batch = _batch(tried, make_inputs)
                found = trace(tried, lambda tried=tried, batch=batch: tried(**batch))  # type: ignore[misc]
                _check_same_modules(inner, twin, found)
            except UnsupportedModelError:
                raise
            except Exception as error:  # configs and forwards have their own kinds of complaints
                complaint = complaint or error
                continue
            return _proved(twin, batch, found)
    raise UnsupportedModelError(f"no small copy of it runs ({type(complaint).__name__}: {complaint})") from complaint


def _batch(twin: nn.Module, make_inputs: MakeInputs | None) -> dict[str, Any]:
    if make_inputs is not None:
        return first_working(twin, iter([dict(make_inputs(twin))]), call_with_names)
    if not isinstance(twin, PreTrainedModel):
        raise UnsupportedModelError("it is no transformers model: say what it is run on (make_inputs)")
    return first_working(twin, guesses(twin), call_with_names)


def _proved(twin: nn.Module, batch: dict[str, Any], found: Survey) -> Survey:
    """Return what was found, after cutting a twin so; or something more cautious that is right."""
    # Something may travel that takes no gradient (a mask, a table that is looked up without one): let all travel then.
    cautious = replace(found, live={**dict.fromkeys(found.units, len(found.layers)), **found.live})
    # A head alone may be too little for a model to run.
    end = len(found.layers)
    barred = {**found.barred, end: "what follows the layers cannot run without a layer"}
    complaint: UnsupportedModelError | None = None
    for attempt in (found, cautious, replace(found, barred=barred), replace(cautious, barred=barred)):
        try:
            try_cutting(twin, batch, attempt)
        except UnsupportedModelError as error:
            complaint = complaint or error
        else:
            return attempt
    assert complaint is not None
    raise complaint


def _twins(inner: nn.Module) -> Iterator[Callable[[], nn.Module]]:
    """Yield ways to make a small copy, the best first."""
    if isinstance(inner, PreTrainedModel):
        yield lambda: _built(type(inner), _narrow(inner.config))
        yield lambda: _built(type(inner), _narrow(inner.config, align=True))
        if _parameters(inner) <= _SMALL:
            yield lambda: _built(type(inner), copy.deepcopy(inner.config))
    elif _parameters(inner) <= _SMALL:
        yield lambda: _copied(inner)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _built(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    config._attn_implementation = "eager"
    twin = kind(config).float().eval()
    _fill(twin)
    return twin


def _copied(inner: nn.Module) -> nn.Module:
    twin = copy.deepcopy(inner)
    if any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers())):
        twin = twin.to_empty(device="cpu")
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.data.zero_()
    twin = twin.to("cpu").eval()
    _fill(twin)
    return twin


def _fill(twin: nn.Module) -> None:
    """Give every parameter a number of its own; what a model left as memory happened to be is zero before."""
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                parameter.nan_to_num_(0.0, 0.0, 0.0).clamp_(-10, 10)
    disturb(twin)


def _narrow(config: PreTrainedConfig, align: bool = False) -> PreTrainedConfig:
    """Return the config of a narrow twin that has every layer: which layers read what depends on their number.

    Args:
        config: Of the model.
        align: Let sizes of any name that equal the width go on doing so.
    """
    twin = twin_config(config, layers=sys.maxsize)
    if align:
        _align(config, twin)
    return twin


def _align(config: PreTrainedConfig, twin: PreTrainedConfig) -> None:
    old, new = getattr(config, "hidden_size", None), getattr(twin, "hidden_size", None)
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _align(value, getattr(twin, name))
        elif type(value) is int and value == old and new is not None:
            setattr(twin, name, new)


@contextmanager
def _alone() -> Iterator[None]:
    """Compute on the CPU in single precision, and leave the random numbers as they were."""
    precision = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    is_cpu = torch.get_default_device().type == "cpu"  # a context for the device slows every function down
    place = nullcontext() if is_cpu else torch.device("cpu")
    try:
        with place, torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(precision)


def _check_same_modules(inner: nn.Module, twin: nn.Module, found: Survey) -> None:
    """Refuse a twin whose layers, or modules beside them, are not those of the model."""
    there = dict(inner.named_modules())
    for name in (*found.layers, *found.units):
        parent = name.rpartition(".")[0]
        around = twin.get_submodule(parent)
        lists = isinstance(around, nn.ModuleList | nn.Sequential)
        if name not in there or (lists and list(around._modules) != list(there[parent]._modules)):
            raise ValueError(f"{name} is not the same in a small copy that is made from the config")


__all__ = ["MakeInputs", "check_entry", "survey", "survey_copy"]
