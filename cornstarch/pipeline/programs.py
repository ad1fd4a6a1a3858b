"""What the stages of a model compute: an encoder's hand on its tokens, a language model's are given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.errors import UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.models.multimodal_language_model.items import Features
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.pipeline.payload import Payload
from cornstarch.pipeline.split import StagePart

Inputs = Mapping[str, Any]
Call = Callable[[nn.Module, Inputs], Any]
"""Computes what is asked for of a batch with a model: a loss, or what is measured."""

_NAMED = ("input_ids", "attention_mask", "position_ids", "labels", "inputs_embeds", "documents")


class StageProgram(nn.Module):
    """One stage. Everything that it owns is inside `model`; `call` is what it is run for, and can be changed."""

    part: StagePart | None

    def __init__(self, model: nn.Module, part: StagePart | None) -> None:
        super().__init__()
        self.model = model
        self.__dict__["part"] = part  # the same modules again: parameters have one name here
        self.call: Call | None = None
        self.computing: Callable[[], AbstractContextManager[Any]] = nullcontext
        """The context in which forward passes run; `call` brings its own."""

    def run(self, _: nn.Module, inputs: Inputs) -> Any:
        """Do what the stage is run for; the cut model inside ends it where the stage ends."""
        return self.model(**inputs) if self.call is None else self.call(self.model, inputs)


class ModelProgram(StageProgram):
    """A stage of a model that has no encoders."""

    def forward(self, inputs: Inputs, received: Mapping[int, Payload]) -> Any:
        """Run the stage on what the one before it has made."""
        assert self.part is not None
        return self.part(inputs, next(iter(received.values()), None))


class EncoderProgram(StageProgram):
    """A stage of an encoder; the last one projects, and hands on tokens.

    Args:
        whole: The model that the encoder belongs to.
        name: Of the modality.
        part: The stage, if the encoder has several.
    """

    whole: MultimodalModel

    def __init__(self, whole: MultimodalModel, name: str, part: StagePart | None) -> None:
        super().__init__(whole.encoders[name], part)
        self.__dict__["whole"] = whole
        self.name = name
        _check_plain(name, whole.encoders[name])

    def run(self, _: nn.Module, inputs: Inputs) -> Any:
        """Return the encoder's tokens."""
        assert isinstance(self.model, ModalEncoderModule)
        with self.computing():
            return self.model.features(dict(inputs))

    def forward(self, inputs: Inputs, received: Mapping[int, Payload]) -> Any:
        """Run the stage on the encoder's part of a batch."""
        given = encoder_inputs(self.whole, inputs).get(self.name)
        own = moved(given, device_of(self)) if given is not None else self.whole.stand_in(self.name, device_of(self))
        assert own is not None
        if self.part is None:
            return _handed_on(self.run(self.model, own))
        made = self.part(own, next(iter(received.values()), None))
        return _handed_on(made) if self.part.last else made


class LanguageProgram(StageProgram):
    """A stage of the language model of a multimodal model, with the merging of tokens around it.

    Every stage runs the whole model's own forward: masks, positions and labels follow from the batch, and how many
    tokens each item has travels with the activations.

    Args:
        model: The multimodal model, whose language model is cut.
        part: The stage of the language model.
        sources: By the number of the stage they come from: modalities.
        runs_encoders: Whether the encoders are here, and run inside this stage.
    """

    def __init__(
        self, model: MultimodalModel, part: StagePart | None, sources: Mapping[int, str], runs_encoders: bool
    ) -> None:
        super().__init__(model, part)
        self.sources, self.runs_encoders = dict(sources), runs_encoders
        if not runs_encoders:
            for name, encoder in model.encoders.items():
                _check_plain(name, encoder)

    def forward(self, inputs: Inputs, received: Mapping[int, Payload]) -> Any:
        """Run the stage, given the encoders' tokens or what the stage before it has made."""
        assert isinstance(self.model, MultimodalModel)
        is_first = self.part is None or self.part.first
        if is_first:
            features, touched = self._encoded(inputs, received)
            before = None
        else:
            (payload,) = received.values()
            features, touched, before = self._announced(payload["tokens"]), [], payload["activations"]
        with self.model.given_features(features, touched):
            if self.part is None:
                return self.run(self.model, inputs)
            made = self.part(inputs, before)
        return made if self.part.last else {"activations": made, "tokens": _counts(features)}

    def _encoded(self, inputs: Inputs, received: Mapping[int, Payload]) -> tuple[dict[str, Features], list[Tensor]]:
        """Return the tokens of modalities that the batch has, and what stand-ins made of those that it has not."""
        assert isinstance(self.model, MultimodalModel)
        own = encoder_inputs(self.model, inputs)
        if self.runs_encoders:
            with self.computing():
                return self.model.encode({name: moved(one, device_of(self)) for name, one in own.items()})
        features: dict[str, Features] = {}
        touched: list[Tensor] = []
        for stage, payload in received.items():
            found = _features(payload)
            if (name := self.sources[stage]) in own:
                features[name] = found
            else:
                touched += found.given()
        return {name: features[name] for name in self.model.encoders if name in features}, touched

    def _announced(self, tokens: Mapping[str, Any]) -> dict[str, Features]:
        """Return features of which only the number matters: their values are part of the activations."""
        assert isinstance(self.model, MultimodalModel)
        table = self.model.language_model.get_input_embeddings().weight  # type: ignore[operator]
        nothing = torch.zeros((), dtype=table.dtype, device=device_of(self))
        return {
            name: Features(nothing.expand(count, table.shape[1]), _lengths(lengths))
            for name, (count, lengths) in tokens.items()
        }


def encoder_inputs(model: MultimodalModel, inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Return what each encoder that has something to do takes of a batch."""
    return model.split_batch({key: value for key, value in inputs.items() if key not in _NAMED})[0]


def moved(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """Return inputs with their tensors on a device."""
    return {key: one.to(device) if isinstance(one, Tensor) else one for key, one in inputs.items()}


def device_of(module: nn.Module) -> torch.device:
    """Return where a stage computes."""
    found = next((p.device for p in (*module.parameters(), *module.buffers()) if not p.is_meta), None)
    return torch.device("cpu") if found is None else found


def _check_plain(name: str, encoder: nn.Module) -> None:
    habits = getattr(encoder, "habits", None)
    if habits is not None and habits.hands_on_more:
        kind = type(unwrap(encoder.module)).__name__  # type: ignore[arg-type]
        raise UnsupportedModelError(
            f"{kind}, the {name} encoder, hands on features for deeper layers of the language model, besides its "
            "tokens: it cannot stand on ranks of its own. Use one stage for the language model, on shared ranks."
        )


def _handed_on(features: Features) -> dict[str, Any]:
    lengths = None if features.lengths is None else torch.tensor(features.lengths, dtype=torch.int64)
    return {"tokens": features.tokens, "lengths": lengths}


def _features(payload: Payload) -> Features:
    return Features(payload["tokens"], _lengths(payload["lengths"]))


def _lengths(lengths: Tensor | None) -> list[int] | None:
    return None if lengths is None else lengths.tolist()


def _counts(features: Mapping[str, Features]) -> dict[str, Any]:
    return {name: (len(found.tokens), _handed_on(found)["lengths"]) for name, found in features.items()}


__all__ = ["EncoderProgram", "LanguageProgram", "ModelProgram", "StageProgram", "encoder_inputs"]
