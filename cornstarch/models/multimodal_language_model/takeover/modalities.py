"""Which child of a Hugging Face multimodal model belongs to which modality (see `dismantle`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model.encoder import LANGUAGE_MODEL_INPUTS

# What transformers calls a modality, and what we call its encoder.
ENCODER_NAMES = {"image": "vision", "audio": "audio"}
# How processors number the modalities in mm_token_type_ids.
TYPE_IDS = {"image": 1, "video": 2, "audio": 3}
# What a method that computes features cannot have where encoders run apart from the text.
_TEXT_INPUTS = frozenset("input_ids attention_mask position_ids inputs_embeds labels past_key_values".split())


@dataclass(frozen=True)
class Modality:
    """What of a multimodal model belongs to one modality."""

    kind: str
    """"image" or "audio", as transformers says."""
    method: str | None
    """The method that computes features, if there is one."""
    inputs: tuple[str, ...]
    """The batch keys it takes; without the first one it does not run."""
    video_inputs: tuple[str, ...]
    """Batch keys for the same tower that are not taken when the model is in parts."""
    token_id: int
    """The placeholder."""
    tower: str
    """The child that is the encoder."""
    projectors: tuple[str, ...]
    """The other children that are used to compute features."""
    weights: tuple[str, ...]
    """Parameters and buffers that the model has beside its children (an image-newline embedding)."""

    @property
    def name(self) -> str:
        """The name of the encoder."""
        return ENCODER_NAMES[self.kind]


def refusal(model: nn.Module, reason: object) -> UnsupportedModelError:
    """Return the error that says why a model is refused."""
    return UnsupportedModelError(f"{type(model).__name__} cannot be taken apart: {reason}.")


def placeholder_id(model: PreTrainedModel, kind: str) -> int | None:
    """Return the token that marks the place of one modality's features."""
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return next((value for name in names if isinstance(value := getattr(model.config, name, None), int)), None)


def find_modalities(inner: PreTrainedModel, text_name: str) -> list[Modality]:
    """Return what belongs to each modality of a model, read off its methods.

    Args:
        inner: The model that holds towers, projectors and the text model.
        text_name: The name of the text model in it.
    """
    kinds = [kind for kind in ENCODER_NAMES if hasattr(inner, f"get_{kind}_features")]
    found = [_modality(inner, text_name, kind, f"get_{kind}_features") for kind in kinds]
    if not found:
        # Features are computed inside forward; it can be run alone where the number of features is known beforehand.
        kinds = [kind for kind in ENCODER_NAMES if placeholder_id(inner, kind) is not None]
        found = [_modality(inner, text_name, kind, None) for kind in kinds]
    countable = [m.method or hasattr(getattr(inner, m.tower), "_get_feat_extract_output_lengths") for m in found]
    if not found or not all(countable):
        raise refusal(
            inner, "it has no get_image_features or get_audio_features, so its encoders cannot be run on their own"
        )
    _check_owners(inner, found)
    return found


def _modality(inner: PreTrainedModel, text_name: str, kind: str, method: str | None) -> Modality:
    model_class, token_id = type(inner), placeholder_id(inner, kind)
    if token_id is None:
        raise refusal(inner, f"its config has no {kind}_token_id, so the places of its {kind} features are unknown")
    used = _names_used(model_class, method or "forward")
    inputs = _arguments(model_class, method or "forward")
    video: tuple[str, ...] = ()
    if kind == "image" and hasattr(model_class, "get_video_features"):
        used |= _names_used(model_class, "get_video_features")
        video = tuple(name for name in _arguments(model_class, "get_video_features") if name not in inputs)
    text_inputs = _TEXT_INPUTS.intersection(inputs)
    if method is not None and text_inputs:
        raise refusal(inner, f"{method} needs {', '.join(sorted(text_inputs))}, which an encoder does not have")
    children = [name for name, _ in inner.named_children() if name in used and name != text_name]
    tower = _tower(inner, kind, children)
    return Modality(
        kind=kind,
        method=method,
        inputs=tuple(name for name in inputs if name not in LANGUAGE_MODEL_INPUTS),
        video_inputs=video,
        token_id=token_id,
        tower=tower,
        projectors=tuple(name for name in children if name != tower),
        weights=tuple(name for name in (*inner._parameters, *inner._buffers) if name in used),
    )


def _arguments(model_class: type, method: str) -> tuple[str, ...]:
    parameters = inspect.signature(getattr(model_class, method)).parameters.values()
    return tuple(p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD)


def _names_used(model_class: type, method: str) -> set[str]:
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


def _tower(inner: PreTrainedModel, kind: str, children: Sequence[str]) -> str:
    towers = [name for name in children if isinstance(getattr(inner, name), PreTrainedModel)]
    if not towers and children:  # a plain module: the one that transformers names, else the largest
        named = inner.get_encoder(modality=kind)
        sizes = {name: sum(p.numel() for p in getattr(inner, name).parameters()) for name in children}
        towers = [name for name in children if getattr(inner, name) is named] or [max(children, key=sizes.__getitem__)]
    if len(towers) != 1:
        raise refusal(inner, f"it has {len(towers)} {kind} towers ({', '.join(towers) or 'none'}); expected one")
    return towers[0]


def _check_owners(inner: PreTrainedModel, modalities: Sequence[Modality]) -> None:
    owners: dict[str, str] = {}
    for modality in modalities:
        for name in (modality.tower, *modality.projectors, *modality.weights):
            if owners.setdefault(name, modality.kind) != modality.kind:
                raise refusal(inner, f"{name} is used for {owners[name]} features and for {modality.kind} features")
