"""Finding out what a multimodal model's own forward does with features (see `dismantle`).

The forward is run on a made-up sentence with made-up features, without any weights. A model that does anything else
than put the features in the place of the placeholders' embeddings is refused: its parts would not give its results.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cornstarch.models.multimodal_language_model.encoder import LANGUAGE_MODEL_INPUTS
from cornstarch.models.multimodal_language_model.takeover.hollow import StandIn, hollow, listen
from cornstarch.models.multimodal_language_model.takeover.modalities import TYPE_IDS, placeholder_id, refusal
from cornstarch.models.multimodal_language_model.takeover.tower import Habits, TowerEncoder
from cornstarch.models.multimodal_language_model.unwrap import argument_names

_WIDTH = 4
_PLAIN = (bool, int, float, str, list, tuple)


def learn(inner: PreTrainedModel, text_name: str, encoders: Sequence[TowerEncoder]) -> None:
    """Note each encoder's `habits` and all of its inputs, or refuse the model."""
    for encoder in encoders:
        trial = _Trial(inner, text_name, encoder)
        encoder.habits = _habits(trial) if encoder.modality.method else _habits_without_method(trial)
        encoder.modality = trial.modality


class _MadeUpOutput:
    """What a feature method could return: the first field that is read has the features, any other a list of such."""

    def __init__(self, features: Any) -> None:
        self._features = features
        self._read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._read.append(name)
        return self._features if name == self._read[0] else [self._features]


class _Untouchable:
    """An input that must not be used."""


@dataclass
class _Result:
    heard: dict[str, Any]
    """What the language model would be called with."""
    read: list[str]
    """The fields of the features' output that were read."""
    passed: dict[str, Any]
    """What the feature method was called with."""


class _Trial:
    """The model's own forward on a made-up sentence: text, three placeholders per row, every token with a meaning."""

    def __init__(self, inner: PreTrainedModel, text_name: str, encoder: TowerEncoder) -> None:
        self.inner, self.text_name, self.modality = inner, text_name, encoder.modality
        token, special = encoder.modality.token_id, _special_tokens(inner)
        text = next(number for number in range(5, 1000) if number not in special)
        placeholders = {placeholder_id(inner, kind) for kind in TYPE_IDS}
        rows = [[text, text, token, token, token, text], [text, token, token, token, text, text]]
        self.input_ids = torch.tensor([[*row, *(n for n in special if n not in placeholders)] for row in rows])
        self.mask = torch.ones_like(self.input_ids)
        self.mask[0, 0] = 0
        self.positions = torch.arange(self.input_ids.shape[1]).expand_as(self.input_ids)
        generator = torch.Generator().manual_seed(0)
        self.embeds = torch.randn(*self.input_ids.shape, _WIDTH, generator=generator)
        self.features = torch.randn(6, _WIDTH, generator=generator)

    def forms(self) -> list[Any]:
        """Return the forms in which models return the features of two items, three tokens each."""
        return [[self.features[:3], self.features[3:]], self.features.reshape(2, 3, -1), self.features]

    def expected(self) -> Tensor:
        """Return the embeddings with the features in the placeholders' place."""
        placeholders = (self.input_ids == self.modality.token_id).unsqueeze(-1)
        return self.embeds.masked_scatter(placeholders, self.features)

    def run(self, features: Any, **further: Any) -> _Result:
        """Run the forward on these features; `further` replaces or adds inputs."""
        method, output, passed = self.modality.method, _MadeUpOutput(features), {}

        def compute_features(*args: Any, **kwargs: Any) -> _MadeUpOutput:
            passed.update(_named(inspect.signature(getattr(type(self.inner), method)), args, kwargs))  # type: ignore[arg-type]
            return output

        inner = hollow(self.inner)
        parts = {name: part for name, part in self.inner.named_children() if name != self.text_name}
        inner.__dict__.update({name: StandIn(name, part) for name, part in parts.items()})
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
            heard = listen(inner, self.text_name, text_model, self.embeds, inputs, outputs)
        return _Result(heard, output._read, passed)


def _special_tokens(inner: PreTrainedModel) -> list[int]:
    """Return the token ids that the model's config gives a meaning."""
    named = [value for name, value in inner.config.to_dict().items() if "token" in name]
    listed = [number for value in named for number in (value if isinstance(value, list) else [value])]
    return sorted({number for number in listed if isinstance(number, int) and number >= 0})


def _named(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, without self and without what is None."""
    arguments = dict(signature.bind_partial(None, *args, **kwargs).arguments)
    arguments.pop("self", None)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return {name: value for name, value in arguments.items() if value is not None}


def _habits(trial: _Trial) -> Habits:
    features, result = _accepted(trial)
    _find_other_inputs(trial, features)
    habits = _passing_on(trial, result)
    habits.tokens = result.read[0]
    others = sorted(set(result.read[1:]) - {habits.tokens})
    if others and not habits.hands_on_more:
        raise refusal(trial.inner, f"beside features, its forward uses {', '.join(others)} of what its encoder returns")
    habits.fixed_inputs = {n: value for n, value in result.passed.items() if n != trial.modality.inputs[0]}
    computed = [name for name, value in habits.fixed_inputs.items() if not isinstance(value, _PLAIN)]
    if computed:
        raise refusal(trial.inner, f"its forward computes {', '.join(computed)} for {trial.modality.method}")
    return habits


def _accepted(trial: _Trial) -> tuple[Any, _Result]:
    """Return the form of features that the forward takes, and what it did with them."""
    reason = ""
    for features in trial.forms():
        try:
            result = trial.run(features)
        except Exception as problem:  # most often: this model returns its features in another form
            reason = reason or f"its forward cannot be followed without its parts ({problem})"
            continue
        if torch.equal(result.heard["inputs_embeds"], trial.expected()):
            return features, result
        reason = "its forward does more than replace its placeholders' embeddings by features"
    raise refusal(trial.inner, reason)


def _habits_without_method(trial: _Trial) -> Habits:
    try:
        result = trial.run(None, **{trial.modality.inputs[0]: None})
    except Exception as problem:
        raise refusal(trial.inner, f"its forward cannot be followed without its parts ({problem})") from problem
    habits = _passing_on(trial, result)
    if habits.hands_on_more:
        raise refusal(trial.inner, f"its language model is given {', '.join(result.heard)}")
    return habits


def _passing_on(trial: _Trial, result: _Result) -> Habits:
    """Note what the language model is given beside embeddings."""
    if result.heard.get("position_ids") is not trial.positions:
        raise refusal(trial.inner, "its forward changes the positions it is given")
    more = not result.heard.keys() <= LANGUAGE_MODEL_INPUTS
    return Habits(hands_on_more=more, makes_masks=result.heard.get("attention_mask") is not trial.mask)


def _find_other_inputs(trial: _Trial, features: Any) -> None:
    """Add what the forward hands to the method without the method's naming it.

    Refuse a model whose forward uses an input on the way from features to embeddings, where no part has it.
    """
    modality = trial.modality
    known = {*LANGUAGE_MODEL_INPUTS, *modality.inputs, *modality.video_inputs, "mm_encoder_outputs"}
    for name in sorted(set(argument_names(trial.inner)) - known):
        mark = _Untouchable()
        result = _tried(trial, features, {name: mark})
        if result is not None:
            if result.passed.get(name) is mark:
                trial.modality = replace(trial.modality, inputs=(*trial.modality.inputs, name))
            continue
        # If it is used without features as well, it is not for them.
        if _tried(trial, features, {name: mark, modality.inputs[0]: None}) is not None:
            raise refusal(trial.inner, f"between {modality.method} and the text, its forward uses {name}")


def _tried(trial: _Trial, features: Any, inputs: dict[str, Any]) -> _Result | None:
    try:
        return trial.run(features, **inputs)
    except Exception:
        return None
