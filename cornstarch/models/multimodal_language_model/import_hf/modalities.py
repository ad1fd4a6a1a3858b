"""Find out how a Hugging Face multimodal model is built.

A *skeleton* of a module has its methods and its config, but no weights and no children. Parts are attached to it for a
call; a missing part is replaced by a `PlaceholderModule`.

`find_modalities` reads from the model's methods which child belongs to which modality. `probe_forward` runs the model's
own forward on a made-up sentence with made-up features, without any weights: a model that does anything else than
replace the placeholders' embeddings by the features is refused, because its parts would not give its results.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import UnsupportedModelError

from ..encoder import LANGUAGE_MODEL_INPUTS
from ..unwrap import get_argument_names, get_parameter_names

if TYPE_CHECKING:
    from .parts import TowerEncoder

Module = TypeVar("Module", bound=nn.Module)

# The name of a modality in transformers, and the name of its encoder here.
ENCODER_NAMES = {"image": "vision", "audio": "audio"}
# How processors number the modalities in mm_token_type_ids.
TYPE_IDS = {"image": 1, "video": 2, "audio": 3}
# Inputs that a feature method cannot have where encoders run separately from the text.
_TEXT_NAMES = frozenset("input_ids attention_mask position_ids inputs_embeds labels past_key_values".split())


@dataclass(frozen=True)
class Modality:
    """The parts and inputs of one modality of a multimodal model."""

    kind: str  # "image" or "audio", as in transformers
    method: str | None  # the method that computes features, if there is one
    inputs: tuple[str, ...]  # the batch keys that the encoder takes; it runs only with the first one
    video_inputs: tuple[str, ...]  # batch keys for the same tower that a decomposed model does not take
    token_id: int  # the placeholder
    tower: str  # the child that is the encoder
    projectors: tuple[str, ...]  # the other children that compute features
    weights: tuple[str, ...]
    """Parameters and buffers of the model itself that compute features (an image-newline embedding)."""
    # How the model's own forward uses the encoder's output; found by `probe_forward`.
    tokens: str = "pooler_output"  # the field of the output that has the features
    fixed_inputs: dict[str, Any] = field(default_factory=dict)  # arguments that forward adds to those of the batch
    passes_on_more: bool = False
    """Whether the language model is given more of the output than its features (features for deeper layers)."""
    makes_masks: bool = False  # whether forward makes attention masks itself

    @property
    def name(self) -> str:
        return ENCODER_NAMES[self.kind]


def refuse(model: nn.Module, reason: object) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be taken apart: {reason}.")


def find_placeholder_id(model: PreTrainedModel, kind: str) -> int | None:
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((value for name in names if isinstance(value := getattr(model.config, name, None), int)), None)


def copy_skeleton(module: Module) -> Module:
    """Return a copy of `module` with its methods and plain attributes, but no weights, children or hooks."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if name in ("_modules", "_parameters", "_buffers") or name.endswith("_hooks"):
            copy.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) else {}
    copy.__dict__["_non_persistent_buffers_set"] = set()
    copy.__dict__.pop("forward", None)  # set by libraries that place layers on devices; it runs the old module
    return copy


class PlaceholderModule:
    """Replaces a part while the model's own forward runs without it; reading its attributes works, calling raises."""

    def __init__(self, name: str, part: nn.Module) -> None:
        self.name, self.part = name, copy_skeleton(part)
        self.device: Any = None
        self.dtype: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(f"it uses {self.name} outside the method that computes features")

    def __getattr__(self, name: str) -> Any:
        if name == "part":  # during copy.copy
            raise AttributeError(name)
        return getattr(self.part, name)


class _LanguageModelCallError(Exception):
    """Ends a forward at its language model: an exception is the only way out of the middle of a forward."""


class _CallRecorder:
    """Replaces the language model, and ends the forward when it is called."""

    def __init__(self, text_model: nn.Module, embeds: Tensor) -> None:
        self._text_model, self._embeds = text_model, embeds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _LanguageModelCallError(kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._text_model, name)
        return self.get_input_embeddings() if isinstance(value, nn.Embedding) else value

    def get_input_embeddings(self) -> Callable[[Tensor], Tensor]:
        return lambda input_ids: self._embeds


def record_language_model_call(
    inner: PreTrainedModel,
    text_name: str,
    text_model: nn.Module,
    embeds: Tensor,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a skeleton's own forward up to its language model, and return the arguments of that call.

    Of `text_model`, only attributes are read; `embeds` is the result of looking up the token ids. `outputs` has, by
    method name, the result or the function to use instead. State that the forward keeps (rope deltas) stays on `inner`.
    """
    recorder = _CallRecorder(text_model, embeds)
    attached: dict[str, Any] = {text_name: recorder, "get_input_embeddings": recorder.get_input_embeddings}
    for name, output in (outputs or {}).items():
        attached[name] = output if callable(output) else lambda *_, _output=output, **__: _output
    for part in inner.__dict__.values():
        if isinstance(part, PlaceholderModule):
            part.device, part.dtype = embeds.device, embeds.dtype
    inner.__dict__.update(attached)
    inner._parameters["attached"] = embeds  # type: ignore[assignment]  # models read device and dtype from weights
    try:
        type(inner).forward(inner, **inputs)
    except _LanguageModelCallError as call:
        return {name: value for name, value in call.args[0].items() if value is not None}
    finally:
        del inner._parameters["attached"]
        for name in attached:
            del inner.__dict__[name]
    raise UnsupportedModelError("it never calls its language model")


def find_modalities(inner: PreTrainedModel, text_name: str) -> list[Modality]:
    """Return the modalities of a model that holds towers, projectors and a text model, read from its methods."""
    kinds = [kind for kind in ENCODER_NAMES if hasattr(inner, f"get_{kind}_features")]
    found = [_find_modality(inner, text_name, kind, f"get_{kind}_features") for kind in kinds]
    if not found:
        # Features are computed inside forward, which can run alone if the number of features is known beforehand.
        kinds = [kind for kind in ENCODER_NAMES if find_placeholder_id(inner, kind) is not None]
        found = [_find_modality(inner, text_name, kind, None) for kind in kinds]
    countable = [m.method or hasattr(getattr(inner, m.tower), "_get_feat_extract_output_lengths") for m in found]
    if not found or not all(countable):
        raise refuse(
            inner, "it has no get_image_features or get_audio_features, so its encoders cannot be run on their own"
        )
    owners: dict[str, str] = {}
    for modality in found:
        for name in (modality.tower, *modality.projectors, *modality.weights):
            if owners.setdefault(name, modality.kind) != modality.kind:
                raise refuse(inner, f"{name} is used for {owners[name]} features and for {modality.kind} features")
    return found


def _find_modality(inner: PreTrainedModel, text_name: str, kind: str, method: str | None) -> Modality:
    model_class, token_id = type(inner), find_placeholder_id(inner, kind)
    if token_id is None:
        raise refuse(inner, f"its config has no {kind}_token_id, so the places of its {kind} features are unknown")
    used = _names_used_by(model_class, method or "forward")
    inputs = get_parameter_names(getattr(model_class, method or "forward"))
    video: tuple[str, ...] = ()
    if kind == "image" and hasattr(model_class, "get_video_features"):
        used |= _names_used_by(model_class, "get_video_features")
        video = tuple(n for n in get_parameter_names(model_class.get_video_features) if n not in inputs)
    text_inputs = _TEXT_NAMES.intersection(inputs)
    if method is not None and text_inputs:
        raise refuse(inner, f"{method} needs {', '.join(sorted(text_inputs))}, which an encoder does not have")
    children = [name for name, _ in inner.named_children() if name in used and name != text_name]
    towers = [name for name in children if isinstance(getattr(inner, name), PreTrainedModel)]
    if not towers and children:  # a plain module: the one that transformers names, else the largest
        named = inner.get_encoder(modality=kind)
        sizes = {name: sum(p.numel() for p in getattr(inner, name).parameters()) for name in children}
        towers = [name for name in children if getattr(inner, name) is named] or [max(children, key=sizes.__getitem__)]
    if len(towers) != 1:
        raise refuse(inner, f"it has {len(towers)} {kind} towers ({', '.join(towers) or 'none'}); expected one")
    return Modality(
        kind=kind,
        method=method,
        inputs=tuple(name for name in inputs if name not in LANGUAGE_MODEL_INPUTS),
        video_inputs=video,
        token_id=token_id,
        tower=towers[0],
        projectors=tuple(name for name in children if name != towers[0]),
        weights=tuple(name for name in (*inner._parameters, *inner._buffers) if name in used),
    )


def bind_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the named arguments of a method's call that are not None, and those of its `**kwargs`."""
    signature = inspect.signature(function)
    bound = signature.bind_partial(None, *args, **kwargs).arguments
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    named = {name: value for name, value in bound.items() if name not in ("self", rest) and value is not None}
    return named, bound.get(rest, {})


def _names_used_by(model_class: type, method: str) -> set[str]:
    """Return the names that a method uses, itself or through other methods of the model."""
    used: set[str] = set()
    todo, done = [method], set()
    while todo:
        name = todo.pop()
        done.add(name)
        member = inspect.getattr_static(model_class, name, None)
        function = inspect.unwrap(member.fget if isinstance(member, property) else member)  # type: ignore[arg-type]
        if inspect.isfunction(function):
            names = _names_in(function.__code__)
            used |= names
            own = [n for n in names if hasattr(model_class, n) and not hasattr(PreTrainedModel, n)]
            todo += [n for n in own if n not in done]
    return used


def _names_in(code: CodeType) -> set[str]:
    nested = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*(_names_in(const) for const in nested))


_WIDTH = 4
_PLAIN_TYPES = (bool, int, float, str, list, tuple)


def probe_forward(inner: PreTrainedModel, text_name: str, encoders: Sequence[TowerEncoder]) -> None:
    """Complete each encoder's `modality`: all inputs, and how forward uses its output; or refuse the model."""
    for encoder in encoders:
        probe = _ForwardProbe(inner, text_name, encoder.modality)
        encoder.modality = _probe_method(probe) if encoder.modality.method else _probe_without_method(probe)


class _MadeUpOutput:
    """A feature method's output: the first field that is read has the features, any other a list of them."""

    def __init__(self, features: Any) -> None:
        self._features = features
        self._fields: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._fields.append(name)
        return self._features if name == self._fields[0] else [self._features]


@dataclass
class _ProbeResult:
    call: dict[str, Any]  # the arguments of the call of the language model
    fields: list[str]  # the fields of the features' output that were read
    passed: dict[str, Any]  # the arguments of the call of the feature method


class _ForwardProbe:
    """The model's own forward on a made-up sentence: text, three placeholders per row, every special token."""

    def __init__(self, inner: PreTrainedModel, text_name: str, modality: Modality) -> None:
        self.inner, self.text_name, self.modality = inner, text_name, modality
        # Token ids to which the model's config gives a meaning.
        named = [value for name, value in inner.config.to_dict().items() if "token" in name]
        listed = [number for value in named for number in (value if isinstance(value, list) else [value])]
        special = sorted({number for number in listed if isinstance(number, int) and number >= 0})
        token, text = modality.token_id, next(number for number in range(5, 1000) if number not in special)
        placeholders = {find_placeholder_id(inner, kind) for kind in TYPE_IDS}
        rows = [[text, text, token, token, token, text], [text, token, token, token, text, text]]
        self.input_ids = torch.tensor([[*row, *(n for n in special if n not in placeholders)] for row in rows])
        self.mask = torch.ones_like(self.input_ids)
        self.mask[0, 0] = 0
        self.positions = torch.arange(self.input_ids.shape[1]).expand_as(self.input_ids)
        generator = torch.Generator().manual_seed(0)
        self.embeds = torch.randn(*self.input_ids.shape, _WIDTH, generator=generator)
        self.features = torch.randn(6, _WIDTH, generator=generator)

    def run(self, features: Any, **further: Any) -> _ProbeResult:
        """Run the forward on these features; `further` replaces or adds inputs."""
        method, output, passed = self.modality.method, _MadeUpOutput(features), {}

        def compute_features(*args: Any, **kwargs: Any) -> _MadeUpOutput:
            named, rest = bind_arguments(getattr(type(self.inner), method), args, kwargs)  # type: ignore[arg-type]
            passed.update({**named, **{name: value for name, value in rest.items() if value is not None}})
            return output

        inner = copy_skeleton(self.inner)
        parts = {name: part for name, part in self.inner.named_children() if name != self.text_name}
        inner.__dict__.update({name: PlaceholderModule(name, part) for name, part in parts.items()})
        inputs = {
            "input_ids": self.input_ids,
            "attention_mask": self.mask,
            "position_ids": self.positions,
            self.modality.inputs[0]: torch.zeros(2, 1),
            **further,
        }
        outputs = {method: compute_features} if method is not None else {}
        text_model = getattr(self.inner, self.text_name)
        with torch.no_grad():
            call = record_language_model_call(inner, self.text_name, text_model, self.embeds, inputs, outputs)
        return _ProbeResult(call, output._fields, passed)

    def try_run(self, features: Any, **further: Any) -> _ProbeResult | None:
        with suppress(Exception):
            return self.run(features, **further)
        return None


def _probe_method(probe: _ForwardProbe) -> Modality:
    features, result = _find_form(probe)
    _find_other_inputs(probe, features)
    modality = _read_behavior(probe, result)
    tokens, *further = result.fields
    others = sorted(set(further) - {tokens})
    if others and not modality.passes_on_more:
        raise refuse(probe.inner, f"beside features, its forward uses {', '.join(others)} of what its encoder returns")
    fixed = {name: value for name, value in result.passed.items() if name != modality.inputs[0]}
    computed = [name for name, value in fixed.items() if not isinstance(value, _PLAIN_TYPES)]
    if computed:
        raise refuse(probe.inner, f"its forward computes {', '.join(computed)} for {modality.method}")
    return replace(modality, tokens=tokens, fixed_inputs=fixed)


def _find_form(probe: _ForwardProbe) -> tuple[Any, _ProbeResult]:
    """Return the form of features that the forward accepts, and the result of running it on them."""
    reason = ""
    placeholders = (probe.input_ids == probe.modality.token_id).unsqueeze(-1)
    merged = probe.embeds.masked_scatter(placeholders, probe.features)
    # The forms in which models return the features of two items, three tokens each.
    for features in ([probe.features[:3], probe.features[3:]], probe.features.reshape(2, 3, -1), probe.features):
        try:
            result = probe.run(features)
        except Exception as problem:  # most often: this model returns its features in another form
            reason = reason or f"its forward cannot be followed without its parts ({problem})"
            continue
        if torch.equal(result.call["inputs_embeds"], merged):
            return features, result
        reason = "its forward does more than replace its placeholders' embeddings by features"
    raise refuse(probe.inner, reason)


def _probe_without_method(probe: _ForwardProbe) -> Modality:
    try:
        result = probe.run(None, **{probe.modality.inputs[0]: None})
    except Exception as problem:
        raise refuse(probe.inner, f"its forward cannot be followed without its parts ({problem})") from problem
    modality = _read_behavior(probe, result)
    if modality.passes_on_more:
        raise refuse(probe.inner, f"its language model is given {', '.join(result.call)}")
    return modality


def _read_behavior(probe: _ForwardProbe, result: _ProbeResult) -> Modality:
    if result.call.get("position_ids") is not probe.positions:
        raise refuse(probe.inner, "its forward changes the positions it is given")
    more, masked = not result.call.keys() <= LANGUAGE_MODEL_INPUTS, result.call.get("attention_mask") is not probe.mask
    return replace(probe.modality, passes_on_more=more, makes_masks=masked)


def _find_other_inputs(probe: _ForwardProbe, features: Any) -> None:
    """Add inputs that the forward passes to the method through its keyword arguments.

    Refuse a model whose forward uses an input between features and embeddings, where no part has it.
    """
    modality = probe.modality
    known = {*LANGUAGE_MODEL_INPUTS, *modality.inputs, *modality.video_inputs, "mm_encoder_outputs"}
    for name in sorted(set(get_argument_names(probe.inner)) - known):
        mark = object()  # raises when it is used
        result = probe.try_run(features, **{name: mark})
        if result is not None:
            if result.passed.get(name) is mark:
                probe.modality = replace(probe.modality, inputs=(*probe.modality.inputs, name))
            continue
        # An input that is also used without features is not for them.
        if probe.try_run(features, **{name: mark, modality.inputs[0]: None}) is not None:
            raise refuse(probe.inner, f"between {modality.method} and the text, its forward uses {name}")
