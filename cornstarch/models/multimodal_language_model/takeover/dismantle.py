"""Taking a whole Hugging Face multimodal model apart.

Names for the rest of the package:
- `dismantle(model) -> DismantledModel` (a `MultimodalModel`). The parts are shared with `model`, not copied; `model`
  is used up: train and run the result instead.
- `DismantledModel.origin: DismantledOrigin`: class path and config, plain data for JSON (`to_dict`, `from_dict`).
- `rebuild(origin, device="meta", model_class=None) -> DismantledModel`: the same parts with new weights. Parts may
  then be replaced (`model.vision_encoder.module = …`, `.projector = …`, `model.language_model = …`).
- `DismantledModel.whole() -> PreTrainedModel`: the original model over the parts as they are now.

How it works, without a line about any one model: a *hollow* copy of a Hugging Face module has its methods and config
but no weights and no children. An encoder's features are computed by the model's own `get_image_features` on a hollow
copy to which tower and projector are lent for the call; positions and masks by the model's own forward on a hollow
copy whose language model only notes what it is called with. Before that, the same forward is tried on a made-up
sentence with made-up features: a model that does anything else than put features in the placeholders' place is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.attention.mask import MaskSpec
from cornstarch.attention.verify import attend_through_masks, evaluating
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.encoder import LANGUAGE_MODEL_INPUTS
from cornstarch.models.multimodal_language_model.facts import BatchFacts
from cornstarch.models.multimodal_language_model.items import Features
from cornstarch.models.multimodal_language_model.modeling_multimodal_language_model import MultimodalModel
from cornstarch.models.multimodal_language_model.takeover.causal_head import causal_language_model
from cornstarch.models.multimodal_language_model.takeover.hollow import hollow, listen
from cornstarch.models.multimodal_language_model.takeover.modalities import TYPE_IDS, find_modalities, refusal
from cornstarch.models.multimodal_language_model.takeover.own_masks import TEXT, spans_of
from cornstarch.models.multimodal_language_model.takeover.tower import TowerEncoder, TowerFeatures
from cornstarch.models.multimodal_language_model.takeover.trial import learn
from cornstarch.models.multimodal_language_model.unwrap import argument_names, unwrap


@dataclass(frozen=True)
class DismantledOrigin:
    """Which model a `DismantledModel` was taken from: enough to build its parts again."""

    class_path: str
    """`transformers.models.llava.modeling_llava.LlavaForConditionalGeneration`"""
    config: dict[str, Any]
    """The whole model's config, as its `to_dict` gives it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DismantledOrigin:
        """Read what `to_dict` wrote."""
        return cls(class_path=data["class_path"], config=data["config"])


class DismantledModel(MultimodalModel):
    """The parts of a Hugging Face multimodal model, composed; logits, loss and text are the original's, to the bit.

    Batches are those of the original (its processor's). Labels are taken as the original takes them, also at
    placeholders. Video inputs are taken by `generate` only.
    """

    _whole: PreTrainedModel
    _inner: PreTrainedModel

    def __init__(
        self,
        whole: PreTrainedModel,
        text_name: str,
        encoders: dict[str, TowerEncoder],
        language_model: PreTrainedModel,
        origin: DismantledOrigin,
    ) -> None:
        # Encoders are added one by one: whatever the language model does, it is what the original does with it.
        super().__init__({}, language_model)
        for name, encoder in encoders.items():
            self.add_encoder(name, encoder)
        self.trains_on_placeholders = True
        self.positions_from_mask = False
        self.origin = origin
        self.text_name = text_name
        inner = whole.base_model
        self._child_names = tuple(name for name, _ in inner.named_children())
        self._head_name = next(n for n, m in whole.named_children() if m is whole.get_output_embeddings())
        # Not parts of this model: hidden from torch.
        object.__setattr__(self, "_whole", hollow(whole))
        object.__setattr__(self, "_inner", hollow(inner))
        for encoder in encoders.values():
            self._inner.__dict__.update(encoder.stand_ins())
        names = set(argument_names(inner)) - LANGUAGE_MODEL_INPUTS - {"mm_encoder_outputs"}
        self._triggers = {encoder.modality.inputs[0]: name for name, encoder in encoders.items()}
        self._video_names = {name for encoder in encoders.values() for name in encoder.modality.video_inputs}
        # What of a batch the model's own forward takes, the encoders' main inputs aside.
        self._lent_names = frozenset(names - self._triggers.keys() - self._video_names)
        self.set_modality_token_ids({name: encoder.modality.token_id for name, encoder in encoders.items()})

    @property
    def _towers(self) -> dict[str, TowerEncoder]:
        return cast(dict[str, TowerEncoder], self.encoders)

    # ------------------------------------------------------------------ one step

    def _flat(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch without nested dictionaries and without what is None."""
        flat = {name: value for name, value in batch.items() if value is not None}
        for name in self.encoder_names:
            if isinstance(flat.get(name), Mapping):
                flat.update(flat.pop(name))
        return flat

    def split_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Return the inputs of each encoder that runs on this batch, and what is left for the language model."""
        flat = self._flat(batch)
        for name in sorted(self._video_names.intersection(flat)):
            raise ConfigError(
                f"{name!r} is a video input; a {type(self._whole).__name__} that was taken apart reads images, audio "
                "and text. Give frames as images, or use the model that `whole()` returns."
            )
        taken = {key for encoder in self.encoders.values() for key in encoder.input_names}
        lent = {name: value for name, value in flat.items() if name in self._lent_names}
        encoder_inputs, rest = super().split_batch({k: v for k, v in flat.items() if k in taken or k not in lent})
        # The model's own forward needs some of the encoders' inputs as well: image grids for positions, say.
        return encoder_inputs, {**rest, **lent}

    def merge(
        self,
        features: dict[str, Features],
        *,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        documents: Tensor | None,
        labels: Tensor | None,
        facts: BatchFacts | None = None,
        **rest: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Return the language model's inputs, and the mask where plain causal attention is not enough."""
        lent = {name: rest.pop(name) for name in self._lent_names.intersection(rest)}
        spans = None
        if documents is not None and input_ids is not None:
            position_ids, spans = self._packed(input_ids, documents, position_ids, {**rest, **lent})
        known = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels, **rest}
        heard = self._listen(features, input_ids, inputs_embeds, {**known, **lent})
        heard = {name: value for name, value in heard.items() if value is not known.get(name)}
        if documents is not None:  # positions are set and the mask is ours
            heard = {name: value for name, value in heard.items() if name not in LANGUAGE_MODEL_INPUTS}
        position_ids = heard.pop("position_ids", position_ids)
        llm_inputs, spec = super().merge(
            features,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            inputs_embeds=inputs_embeds,
            documents=documents,
            facts=facts,
            **rest,
        )
        llm_inputs.update(heard)
        if spans is not None:
            assert documents is not None
            spec = (spec or MaskSpec.from_documents(documents)).with_spans(spans)
        return llm_inputs, spec

    def _listen(
        self,
        features: Mapping[str, Features],
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        inputs: dict[str, Any],
    ) -> dict[str, Any]:
        """Return what the model's own forward would call its language model with, the embeddings aside."""
        if input_ids is None:
            assert inputs_embeds is not None
            inputs = {**inputs, "inputs_embeds": inputs_embeds}
        else:
            inputs = {**inputs, "input_ids": input_ids}
            nothing = torch.zeros(1, dtype=self.dtype, device=self.device)
            inputs_embeds = nothing.expand(*input_ids.shape, self._embedding_width())
        outputs: dict[str, Any] = {}
        for name, found in features.items():
            modality, habits = self._towers[name].modality, self._towers[name].habits
            if habits.hands_on_more and isinstance(found, TowerFeatures):
                outputs[cast(str, modality.method)] = found.output
                inputs[modality.inputs[0]] = found.tokens
        self._add_type_ids(inputs, features)
        taken = argument_names(self._inner)
        inputs = {name: value for name, value in inputs.items() if name in taken and value is not None}
        self._inner.training = self.training
        heard = listen(self._inner, self.text_name, self._text_model(), inputs_embeds, inputs, outputs)
        del heard["inputs_embeds"]
        return heard

    def _add_type_ids(self, inputs: dict[str, Any], present: Mapping[str, Any]) -> None:
        """Say which tokens are of which modality, as processors do for the models that want to know it."""
        input_ids = inputs.get("input_ids")
        if "mm_token_type_ids" not in self._lent_names or "mm_token_type_ids" in inputs:
            return
        if input_ids is None or not present:
            return
        types = torch.zeros_like(input_ids)
        for name, token_id in self.modality_token_ids.items():
            types[input_ids == token_id] = TYPE_IDS[self._towers[name].modality.kind]
        inputs["mm_token_type_ids"] = types

    def _packed(
        self, input_ids: Tensor, documents: Tensor, position_ids: Tensor | None, lent: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what tokens of packed rows have when each document is alone.

        Returns:
            Positions: given ones, or the model's own.
            Spans of tokens that see each other, [B, S]; None for a model that makes no masks itself.
        """
        makes_masks = any(encoder.habits.makes_masks for encoder in self._towers.values())
        if position_ids is not None and not makes_masks:
            return position_ids, None
        if makes_masks:
            attend_through_masks(self.language_model)  # masks are then made of booleans
        places = [row == number for row in documents for number in row[row > 0].unique_consecutive()]
        rows = [i for i, row in enumerate(documents) for _ in row[row > 0].unique_consecutive()]

        def alone(values: Tensor) -> Tensor:
            found = [values[i][place] for i, place in zip(rows, places, strict=True)]
            return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)

        texts, mask = alone(input_ids), alone((documents > 0).long())
        is_per_token = {n: isinstance(value, Tensor) and value.shape == input_ids.shape for n, value in lent.items()}
        kept = {name: alone(value) if is_per_token[name] else value for name, value in lent.items()}
        present = {name: True for name, token in self.modality_token_ids.items() if bool((texts == token).any())}
        inputs = {"input_ids": texts, "attention_mask": mask, **kept}
        self._add_type_ids(inputs, present)
        heard = self._listen({}, texts, None, inputs)

        def packed(values: Tensor, fill: int) -> Tensor:
            values = values.expand(*values.shape[:-2], *texts.shape)  # positions may be the same in all rows
            joined = values.new_full((*values.shape[:-2], *documents.shape), fill)
            for number, (row, place) in enumerate(zip(rows, places, strict=True)):
                joined[..., row, place] = values[..., number, : int(place.sum())]
            return joined

        if position_ids is None:
            counted = torch.arange(texts.shape[1], device=texts.device)  # if the model does not count for itself
            position_ids = packed(heard.get("position_ids", counted.expand_as(texts)), 0)
        if not makes_masks:
            return position_ids, None
        try:
            spans = spans_of(heard.get("attention_mask"), mask.sum(-1))
        except UnsupportedModelError as error:
            raise ConfigError(
                f"{type(self._whole).__name__} makes attention masks of its own, which a packed row would not have: "
                f"{error}. Give one sample per row."
            ) from error
        return position_ids, packed(spans, TEXT)

    # ------------------------------------------------------------------ the original

    def _text_model(self) -> PreTrainedModel:
        return unwrap(self.language_model).base_model  # type: ignore[return-value]

    def whole(self) -> PreTrainedModel:
        """Return the original model, made of the parts of this one as they are now."""
        language_model: Any = unwrap(self.language_model)
        inner, whole = hollow(self._inner), hollow(self._whole)
        for encoder in self._towers.values():
            encoder.give(inner)
        inner._modules[self.text_name] = self._text_model()
        inner._modules = {name: inner._modules[name] for name in self._child_names}
        whole._modules = {whole.base_model_prefix: inner, self._head_name: language_model.get_output_embeddings()}
        whole.generation_config = language_model.generation_config
        inner.training = whole.training = self.training
        return whole

    def verify(self, **batch: Any) -> None:
        """Raise `UnsupportedModelError` unless this batch gives the same logits in parts as it does whole."""
        with evaluating(self):
            found, expected = self(**batch).logits, self.whole()(**batch).logits
        if not torch.equal(found, expected):
            difference = float((found - expected).abs().max())
            raise refusal(self._whole, f"on this batch its parts give other logits, by up to {difference:.3g}")

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Continue the text as the original does, over the parts as they are now; takes what the original takes."""
        adapters = getattr(self.language_model, "active_peft_config", None)
        if (
            self.preprocess_llm_callback is not None
            or any(encoder.has_callbacks for encoder in self._towers.values())
            or getattr(adapters, "is_prompt_learning", False)  # adds to the text model's inputs, from outside
        ):
            return super().generate(input_ids, attention_mask, **kwargs)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **self._flat(kwargs)}
        self._add_type_ids(batch, {name: True for key, name in self._triggers.items() if key in batch})
        return self.whole().generate(**batch)  # type: ignore[operator]


def _inner_and_text(model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """Return the model inside that holds towers, projectors and text model, and the name of the text model in it."""
    inner = model.base_model
    if model.config.is_encoder_decoder or inner is model or not isinstance(inner, PreTrainedModel):
        children = ", ".join(name for name, _ in model.named_children())
        raise refusal(
            model,
            "it is not a head on one inner model that holds towers, projectors and a decoder-only text model "
            f"(its children: {children})",
        )
    decoder = inner.get_decoder()
    text_name = next((name for name, child in inner.named_children() if child is decoder), None)
    if text_name is None:
        raise refusal(model, f"{type(inner).__name__} holds no text model beside encoders")
    return inner, text_name


def _check_nothing_is_lost(model: PreTrainedModel, parts: DismantledModel) -> None:
    kept = {id(tensor) for tensor in [*parts.parameters(), *parts.buffers()]}
    named = [*model.named_parameters(), *model.named_buffers()]
    lost = [name for name, tensor in named if id(tensor) not in kept]
    if lost:
        some = ", ".join(lost[:2]) + (f" and {len(lost) - 2} more" if len(lost) > 2 else "")
        raise refusal(model, f"neither its encoders nor its language model use {some}")


def dismantle(model: nn.Module) -> DismantledModel:
    """Take a Hugging Face multimodal model apart into encoders, projectors and a causal language model.

    The parts are shared with `model`, which should not be used any more. A model whose results cannot be had from its
    parts is refused with `UnsupportedModelError`.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise refusal(
            model,
            "expected a Hugging Face multimodal model with a head for text, such as LlavaForConditionalGeneration "
            "(wrap parts with PEFT afterwards, each on its own)",
        )
    inner, text_name = _inner_and_text(model)
    modalities = find_modalities(inner, text_name)
    encoders = {modality.name: TowerEncoder(inner, text_name, modality) for modality in modalities}
    learn(inner, text_name, list(encoders.values()))
    origin = DismantledOrigin(f"{type(model).__module__}.{type(model).__qualname__}", model.config.to_dict())
    language_model = causal_language_model(model, getattr(inner, text_name))
    parts = DismantledModel(model, text_name, encoders, language_model, origin)
    _check_nothing_is_lost(model, parts)
    for new in (parts, language_model, *(m for encoder in encoders.values() for m in (encoder, encoder.projector))):
        new.training = model.training
    return parts


def rebuild(
    origin: DismantledOrigin, device: str | torch.device = "meta", model_class: type | None = None
) -> DismantledModel:
    """Build the parts of the model that `origin` names, with new weights, on `device`.

    Args:
        origin: What `DismantledModel.origin` was.
        device: Where the weights are made; on "meta" they have shapes only.
        model_class: The model's class, where it is not one of transformers'.
    """
    module, _, name = origin.class_path.rpartition(".")
    if model_class is None:
        if module.split(".")[0] != "transformers":
            raise ConfigError(f"{origin.class_path} is not a class of transformers: pass it as model_class.")
        model_class = getattr(importlib.import_module(module), name, None)
    if model_class is None or not issubclass(model_class, PreTrainedModel):
        raise ConfigError(f"The installed transformers has no model {origin.class_path}; install one that has it.")
    config = model_class.config_class.from_dict(origin.config)  # type: ignore[union-attr]
    with torch.device(device):
        model = model_class(config)
    return dismantle(model)
