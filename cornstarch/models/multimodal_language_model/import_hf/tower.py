"""The encoder wrapper around a tower of a decomposed Hugging Face multimodal model."""

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
from cornstarch.models.multimodal_language_model.encoder import ModalEncoderModule, MultimodalProjector
from cornstarch.models.multimodal_language_model.facts import EncoderFeatures, count_audio_tokens, find_mask
from cornstarch.models.multimodal_language_model.import_hf.modalities import ForwardBehavior, Modality
from cornstarch.models.multimodal_language_model.import_hf.skeleton import (
    PlaceholderModule,
    copy_skeleton,
    record_language_model_call,
)
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.trees import tensors_in


class OriginalProjector(MultimodalProjector):
    """The modules between a tower and the language model, called as the multimodal model calls them."""

    def forward(self, *args: Any, part: str | None = None, **kwargs: Any) -> Any:
        """Call the projection, or one part of it by name."""
        module = self.projection if part is None else self.projection[part]  # type: ignore[index]
        return module(*args, **kwargs)


class _ProjectorPart:
    """A module of a projector that is called through the projector, so that the projector's hooks run."""

    def __init__(self, projector: nn.Module, part: str | None, module: nn.Module) -> None:
        self._projector, self._part, self._module = projector, part, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = {} if self._part is None else {"part": self._part}
        return self._projector(*args, **part, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass
class TowerFeatures(EncoderFeatures):
    """Features, with the complete output of the model's own method."""

    output: Any = None
    passes_on_more: bool = False

    def tensors(self) -> list[Tensor]:
        """Return every tensor that the language model is given: tokens, and features for deeper layers."""
        return [self.tokens, *(tensors_in(self.output) if self.passes_on_more else ())]


class TowerEncoder(ModalEncoderModule):
    """A tower with its projector; features are computed by the original model's own method.

    Weights of the original model beside its projector (an image-newline embedding) belong to `projector`.
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
        self.behavior = ForwardBehavior()
        self.text_name = text_name
        self.width: int = cast(Any, inner.get_input_embeddings()).weight.shape[1]
        object.__setattr__(self, "_inner", copy_skeleton(inner))  # hidden from torch: not a child of this module

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
        """Whether the user's callbacks change inputs or outputs."""
        return bool(self.preprocess_callback or self.postprocess_projector_callback)

    def rename_inputs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs unchanged: batch keys are the names of the method's arguments."""
        return given

    # ------------------------------------------------------------------ parts

    def _modules_by_name(self) -> dict[str, nn.Module]:
        """Return the tower and the projector's modules by their names in the original model."""
        names, projection = self.modality.projectors, cast(Any, unwrap(self.projector)).projection
        parts = {names[0]: projection} if len(names) == 1 else {name: projection[name] for name in names}
        return {self.modality.tower: self.module, **parts}

    def build_placeholders(self) -> dict[str, PlaceholderModule]:
        """Return placeholders for this encoder's modules."""
        return {name: PlaceholderModule(name, unwrap(module)) for name, module in self._modules_by_name().items()}

    def attach_to(self, inner: PreTrainedModel) -> None:
        """Make this encoder's parts the parts of the skeleton `inner`."""
        for name, module in self._modules_by_name().items():
            inner.__dict__.pop(name, None)
            inner._modules[name] = module
        projector = unwrap(self.projector)
        for name in self.modality.weights:
            store: dict[str, Any] = inner._parameters if name in projector._parameters else inner._buffers
            store[name] = getattr(projector, name)

    def _build_model(self) -> PreTrainedModel:
        """Return a skeleton of the original model with this encoder's parts."""
        inner = copy_skeleton(self._inner)
        inner.training = self.training
        self.attach_to(inner)
        single = len(self.modality.projectors) == 1
        for name in self.modality.projectors:
            module = inner._modules.pop(name)
            inner.__dict__[name] = _ProjectorPart(self.projector, None if single else name, module)  # type: ignore[arg-type]
        return inner

    # ------------------------------------------------------------------ features

    def encode(self, inputs: dict[str, Any]) -> Any:
        """Return the output of the model's own feature method."""
        if self.postprocess_module_callback is not None:
            raise ConfigError(
                "postprocess_module_callback cannot be used here: tower and projector are run by "
                f"{type(self._inner).__name__}'s own method. Use preprocess_callback or postprocess_projector_callback."
            )
        if self.preprocess_callback is not None:
            inputs = self.preprocess_callback(inputs)
        inner, method = self._build_model(), self.modality.method
        if method is None:
            return self._encode_sentence(inner, inputs)
        return getattr(inner, method)(**{**(self.behavior.fixed_inputs or {}), **inputs})

    def _encode_sentence(self, inner: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
        """Return the features per item by running the model on a sentence of placeholders."""
        mask = find_mask(inputs)
        lengths = count_audio_tokens(self.module, mask) if mask is not None else None
        if lengths is None:
            raise ConfigError(
                f"The {self.modality.name} encoder needs a mask over its input [items, length] to know how many "
                f"features each item has; it got {', '.join(inputs)} and takes {', '.join(self.input_names)}."
            )
        parameter = next(self.module.parameters())
        sentence = torch.full((1, sum(lengths)), self.modality.token_id, device=parameter.device)
        embeds = torch.zeros(*sentence.shape, self.width, dtype=parameter.dtype, device=parameter.device)
        text = {"input_ids": sentence, "attention_mask": torch.ones_like(sentence)}
        call = record_language_model_call(inner, self.text_name, nn.Module(), embeds, {**text, **inputs})
        return list(call["inputs_embeds"][0].split(lengths))

    def forward(self, **inputs: Any) -> Any:
        """Return the output of the model's own feature method, after `postprocess_projector_callback`."""
        output = self.encode(inputs)
        if self.postprocess_projector_callback is not None:
            output = self.postprocess_projector_callback(inputs, output)
        return output

    def features(
        self, inputs: dict[str, Any], on_host: Mapping[str, Any] | None = None, *, wrapper: nn.Module | None = None
    ) -> EncoderFeatures:
        """Return this encoder's tokens per item, ready to be merged into the text."""
        output = (self if wrapper is None else wrapper)(**inputs)
        states = output if isinstance(output, (Tensor, list)) else getattr(output, self.behavior.tokens)
        if not isinstance(states, Tensor):
            items = [item.reshape(-1, item.shape[-1]) for item in states]
            return TowerFeatures(torch.cat(items), [len(item) for item in items], output, self.behavior.passes_on_more)
        lengths = [states.shape[1]] * states.shape[0] if states.dim() == 3 else None
        return TowerFeatures(states.reshape(-1, states.shape[-1]), lengths, output, self.behavior.passes_on_more)
