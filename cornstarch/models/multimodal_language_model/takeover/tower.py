"""An encoder of a Hugging Face multimodal model that was taken apart (see `dismantle`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.configuration_multimodal_language_model import (
    MultimodalProjectorConfig,
)
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule
from cornstarch.models.multimodal_language_model.items import Features, mask_of, sample_lengths
from cornstarch.models.multimodal_language_model.projector import MultimodalProjector
from cornstarch.models.multimodal_language_model.takeover.hollow import StandIn, hollow, listen
from cornstarch.models.multimodal_language_model.takeover.modalities import Modality
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.trees import tensors_in


class OriginalProjector(MultimodalProjector):
    """What a multimodal model has between a tower and its language model, called as that model calls it."""

    def forward(self, *args: Any, part: str | None = None, **kwargs: Any) -> Any:
        """Call the projection, or that part of it which is named."""
        module = self.projection if part is None else self.projection[part]  # type: ignore[index]
        return module(*args, **kwargs)


class _Lent:
    """A module of a projector, called through the projector so that what is hooked to the projector takes part."""

    def __init__(self, projector: nn.Module, part: str | None, module: nn.Module) -> None:
        self._projector, self._part, self._module = projector, part, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = {} if self._part is None else {"part": self._part}
        return self._projector(*args, **part, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass
class TowerFeatures(Features):
    """Features, with all that the model's own method returned."""

    output: Any = None
    hands_on_more: bool = False

    def given(self) -> list[Tensor]:
        """Return all that the language model is given: tokens, and features for deeper layers."""
        return [self.tokens, *(tensors_in(self.output) if self.hands_on_more else ())]


@dataclass
class Habits:
    """What the model's own forward does with an encoder's output; found out by `trial.learn`."""

    tokens: str = "pooler_output"
    """The field of the output that has the features."""
    fixed_inputs: dict[str, Any] | None = None
    """What forward passes to the method beside the batch."""
    hands_on_more: bool = False
    """Whether the language model is given more of the output than its features (features for deeper layers)."""
    makes_masks: bool = False
    """Whether forward makes attention masks itself."""


class TowerEncoder(ModalEncoderModule):
    """A tower with its projector; features are computed by the method of the model they were taken from.

    Weights that the model keeps beside its projector (an image-newline embedding) belong to `projector`.
    """

    projector: nn.Module
    _inner: PreTrainedModel

    def __init__(self, inner: PreTrainedModel, text_name: str, modality: Modality) -> None:
        parts = {name: getattr(inner, name) for name in modality.projectors}
        several = nn.ModuleDict(parts) if parts else nn.Identity()
        projection = parts[modality.projectors[0]] if len(parts) == 1 else several
        projector = OriginalProjector(MultimodalProjectorConfig(projection_type="custom"), projection)
        for name in modality.weights:
            tensor = getattr(inner, name)
            if isinstance(tensor, nn.Parameter):
                projector.register_parameter(name, tensor)
            else:
                projector.register_buffer(name, tensor, persistent=name not in inner._non_persistent_buffers_set)
        super().__init__(getattr(inner, modality.tower), projector)
        self.modality = modality
        self.habits = Habits()
        self.text_name = text_name
        self.width: int = cast(Any, inner.get_input_embeddings()).weight.shape[1]
        object.__setattr__(self, "_inner", hollow(inner))  # no part of this module: hidden from torch

    @property
    def input_names(self) -> tuple[str, ...]:
        """The batch keys that reach this encoder: the arguments of the model's own method."""
        return tuple(dict.fromkeys([*self.modality.inputs, *self.additional_args]))

    @property
    def trigger_names(self) -> tuple[str, ...]:
        """The batch key that must be there for the encoder to run."""
        return self.modality.inputs[:1]

    @property
    def has_callbacks(self) -> bool:
        """Whether the user changes what the encoder does."""
        return bool(self.preprocess_callback or self.postprocess_projector_callback)

    def as_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs as they are: the names in a batch are those of the method's arguments."""
        return given

    # ------------------------------------------------------------------ the parts, where the model looks for them

    def _projector_modules(self) -> dict[str, nn.Module]:
        names = self.modality.projectors
        projection: Any = unwrap(self.projector).projection
        return {names[0]: projection} if len(names) == 1 else {name: projection[name] for name in names}

    def stand_ins(self) -> dict[str, StandIn]:
        """Return something to stand where this encoder's modules stood."""
        modules = {self.modality.tower: self.module, **self._projector_modules()}
        return {name: StandIn(name, unwrap(module)) for name, module in modules.items()}

    def give(self, inner: PreTrainedModel) -> None:
        """Make this encoder's parts the parts of the hollow model `inner`."""
        modules = {self.modality.tower: self.module, **self._projector_modules()}
        for name, module in modules.items():
            inner.__dict__.pop(name, None)
            inner._modules[name] = module
        projector = unwrap(self.projector)
        for name in self.modality.weights:
            store: dict[str, Any] = inner._parameters if name in projector._parameters else inner._buffers
            store[name] = getattr(projector, name)

    def _borrower(self) -> PreTrainedModel:
        """Return a hollow copy of the model with this encoder's parts lent to it."""
        inner = hollow(self._inner)
        inner.training = self.training
        self.give(inner)
        single = len(self.modality.projectors) == 1
        for name in self.modality.projectors:
            module = inner._modules.pop(name)
            inner.__dict__[name] = _Lent(self.projector, None if single else name, module)  # type: ignore[arg-type]
        return inner

    # ------------------------------------------------------------------ features

    def encode(self, inputs: dict[str, Any]) -> Any:
        """Return what the model's own feature method returns."""
        if self.postprocess_module_callback is not None:
            raise ConfigError(
                "postprocess_module_callback cannot be used here: tower and projector are run by "
                f"{type(self._inner).__name__}'s own method. Use preprocess_callback or postprocess_projector_callback."
            )
        if self.preprocess_callback is not None:
            inputs = self.preprocess_callback(inputs)
        inner, method = self._borrower(), self.modality.method
        if method is None:
            return self._encode_sentence(inner, inputs)
        return getattr(inner, method)(**{**(self.habits.fixed_inputs or {}), **inputs})

    def _encode_sentence(self, inner: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
        """Return the features per item by running the model on a sentence that has nothing but placeholders."""
        mask = mask_of(inputs)
        lengths = sample_lengths(self.module, mask) if mask is not None else None
        if lengths is None:
            raise ConfigError(
                f"The {self.modality.name} encoder needs a mask over its input [items, length] to know how many "
                f"features each item has; it got {', '.join(inputs)} and takes {', '.join(self.input_names)}."
            )
        parameter = next(self.module.parameters())
        sentence = torch.full((1, sum(lengths)), self.modality.token_id, device=parameter.device)
        embeds = torch.zeros(*sentence.shape, self.width, dtype=parameter.dtype, device=parameter.device)
        text = {"input_ids": sentence, "attention_mask": torch.ones_like(sentence)}
        heard = listen(inner, self.text_name, nn.Module(), embeds, {**text, **inputs})
        return list(heard["inputs_embeds"][0].split(lengths))

    def forward(self, **inputs: Any) -> Any:
        """Return what the model's own feature method returns (after the callback for projected tokens, if any)."""
        output = self.encode(inputs)
        if self.postprocess_projector_callback is not None:
            output = self.postprocess_projector_callback(inputs, output)
        return output

    def features(
        self, inputs: dict[str, Any], on_host: Mapping[str, Any] | None = None, *, wrapper: nn.Module | None = None
    ) -> Features:
        """Return this encoder's tokens, item by item, ready to be merged into the text."""
        output = (self if wrapper is None else wrapper)(**inputs)
        states = output if isinstance(output, (Tensor, list)) else getattr(output, self.habits.tokens)
        if not isinstance(states, Tensor):
            items = [item.reshape(-1, item.shape[-1]) for item in states]
            return TowerFeatures(torch.cat(items), [len(item) for item in items], output, self.habits.hands_on_more)
        lengths = [states.shape[1]] * states.shape[0] if states.dim() == 3 else None
        return TowerFeatures(states.reshape(-1, states.shape[-1]), lengths, output, self.habits.hands_on_more)
