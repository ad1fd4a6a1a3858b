"""Decompose a whole Hugging Face multimodal model into encoders, projectors and a causal language model.

It works without code for any one model. An encoder's features are computed by the model's own `get_image_features` on a
skeleton (see `modalities`) to which tower and projector are attached; positions and masks by the model's own forward on
a skeleton whose language model only records how it is called. A model that is refused can still be trained as an
`UndividedModel`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.attention.mask import MaskSpec
from cornstarch.attention.mask_verification import attend_through_masks, use_eval_mode
from cornstarch.errors import ConfigError, UnsupportedModelError

from ..encoder import LANGUAGE_MODEL_INPUTS
from ..facts import IGNORE_INDEX, EncoderFeatures, TextInputs
from ..merge import TEXT
from ..modeling_multimodal_language_model import MultimodalModel
from ..packing import find_spans
from ..shape_inference import is_float
from ..unwrap import disable_cache, get_argument_names, unwrap
from .modalities import (
    ENCODER_NAMES,
    TYPE_IDS,
    PlaceholderModule,
    copy_skeleton,
    find_modalities,
    find_placeholder_id,
    probe_forward,
    record_language_model_call,
    refuse,
)
from .parts import TowerEncoder, TowerFeatures, build_causal_language_model


@dataclass(frozen=True)
class DecomposedOrigin:
    """The class and config of the model that a `DecomposedModel` was made from: enough to build its parts again."""

    class_path: str  # `transformers.models.llava.modeling_llava.LlavaForConditionalGeneration`
    config: dict[str, Any]  # the whole model's config, as its `to_dict` returns it


class DecomposedModel(MultimodalModel):
    """The parts of a Hugging Face multimodal model; logits, loss and text are bit-equal to the original's.

    Batches are those of the original's processor. Labels are used as the original uses them, also at placeholders.
    Video inputs are accepted by `generate` only.
    """

    _whole: PreTrainedModel
    _inner: PreTrainedModel

    def __init__(
        self,
        whole: PreTrainedModel,
        text_name: str,
        encoders: dict[str, TowerEncoder],
        language_model: PreTrainedModel,
        origin: DecomposedOrigin,
    ) -> None:
        # Encoders are added one by one, which skips the check of the language model: the original uses it the same way.
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
        # Hidden from torch: not children of this model.
        object.__setattr__(self, "_whole", copy_skeleton(whole))
        object.__setattr__(self, "_inner", copy_skeleton(inner))
        for encoder in encoders.values():
            parts = encoder.modules_by_name().items()
            self._inner.__dict__.update({part: PlaceholderModule(part, unwrap(module)) for part, module in parts})
        names = set(get_argument_names(inner)) - LANGUAGE_MODEL_INPUTS - {"mm_encoder_outputs"}
        self._triggers = {encoder.modality.inputs[0]: name for name, encoder in encoders.items()}
        self._video_names = {name for encoder in encoders.values() for name in encoder.modality.video_inputs}
        # The batch keys that the model's own forward takes, without the encoders' main inputs.
        self._forward_names = frozenset(names - self._triggers.keys() - self._video_names)
        self.set_modality_token_ids({name: encoder.modality.token_id for name, encoder in encoders.items()})

    @property
    def _towers(self) -> dict[str, TowerEncoder]:
        return cast(dict[str, TowerEncoder], self.encoders)

    def _flatten(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch without nested dictionaries and without None."""
        flat = {name: value for name, value in batch.items() if value is not None}
        for name in self.encoder_names:
            if isinstance(flat.get(name), Mapping):
                flat.update(flat.pop(name))
        return flat

    def split_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        flat = self._flatten(batch)
        for name in sorted(self._video_names.intersection(flat)):
            raise ConfigError(
                f"{name!r} is a video input; a {type(self._whole).__name__} that was taken apart reads images, audio "
                "and text. Give frames as images, or use the model that `whole()` returns."
            )
        taken = {key for encoder in self.encoders.values() for key in encoder.input_names}
        shared = {name: value for name, value in flat.items() if name in self._forward_names}
        encoder_inputs, rest = super().split_batch({k: v for k, v in flat.items() if k in taken or k not in shared})
        # The model's own forward needs some of the encoders' inputs as well: image grids for positions, say.
        return encoder_inputs, {**rest, **shared}

    def merge(self, features: dict[str, EncoderFeatures], **inputs: Any) -> tuple[dict[str, Any], Any]:
        text, rest = TextInputs.split(inputs)
        shared = {name: rest.pop(name) for name in self._forward_names.intersection(rest)}
        position_ids, spans = text.position_ids, None
        if text.documents is not None and text.input_ids is not None:
            position_ids, spans = self._run_documents(text.input_ids, text.documents, position_ids, {**rest, **shared})
        known = {"attention_mask": text.attention_mask, "position_ids": position_ids, "labels": text.labels, **rest}
        call = self._record_call(features, text.input_ids, text.inputs_embeds, {**known, **shared})
        call = {name: value for name, value in call.items() if value is not known.get(name)}
        if text.documents is not None:  # positions are set, and the mask is ours
            call = {name: value for name, value in call.items() if name not in LANGUAGE_MODEL_INPUTS}
        position_ids = call.pop("position_ids", position_ids)
        llm_inputs, spec = super().merge(features, **{**vars(text), "position_ids": position_ids}, **rest)
        llm_inputs.update(call)
        if spans is not None:
            assert text.documents is not None
            spec = (spec or MaskSpec.from_documents(text.documents)).with_spans(spans)
        return llm_inputs, spec

    def _record_call(
        self,
        features: Mapping[str, EncoderFeatures],
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        inputs: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments of the original forward's call of its language model, without the embeddings."""
        inputs = {**inputs, "inputs_embeds": inputs_embeds} if input_ids is None else {**inputs, "input_ids": input_ids}
        if input_ids is not None:
            zero = torch.zeros(1, dtype=self.dtype, device=self.device)
            inputs_embeds = zero.expand(*input_ids.shape, self._embedding_table().shape[1])
        outputs: dict[str, Any] = {}
        for name, found in features.items():
            modality = self._towers[name].modality
            if modality.passes_on_more and isinstance(found, TowerFeatures):
                outputs[cast(str, modality.method)] = found.output
                inputs[modality.inputs[0]] = found.tokens
        self._add_type_ids(inputs, features)
        taken = get_argument_names(self._inner)
        inputs = {name: value for name, value in inputs.items() if name in taken and value is not None}
        self._inner.training = self.training
        text_model = unwrap(self.language_model).base_model
        call = record_language_model_call(self._inner, self.text_name, text_model, inputs_embeds, inputs, outputs)  # type: ignore[arg-type]
        del call["inputs_embeds"]
        return call

    def _add_type_ids(self, inputs: dict[str, Any], present: Mapping[str, Any]) -> None:
        """Add the modality of each token, as processors do for models that take it."""
        input_ids, key = inputs.get("input_ids"), "mm_token_type_ids"
        if key not in self._forward_names or key in inputs or input_ids is None or not present:
            return
        types = torch.zeros_like(input_ids)
        for name, token_id in self.modality_token_ids.items():
            types[input_ids == token_id] = TYPE_IDS[self._towers[name].modality.kind]
        inputs[key] = types

    def _run_documents(
        self, input_ids: Tensor, documents: Tensor, position_ids: Tensor | None, rest: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the positions and spans of packed tokens, computed by the original forward on each document alone.

        Spans of tokens that see each other are [B, S], or None for a model that makes no masks itself.
        """
        makes_masks = any(encoder.modality.makes_masks for encoder in self._towers.values())
        if position_ids is not None and not makes_masks:
            return position_ids, None
        if makes_masks:
            attend_through_masks(self.language_model)  # the model then makes boolean masks
        places = [row == number for row in documents for number in row[row > 0].unique_consecutive()]
        rows = [i for i, row in enumerate(documents) for _ in row[row > 0].unique_consecutive()]

        def unpack(values: Tensor) -> Tensor:
            found = [values[i][place] for i, place in zip(rows, places, strict=True)]
            return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)

        def pack(values: Tensor, fill: int) -> Tensor:
            values = values.expand(*values.shape[:-2], *texts.shape)  # positions may be the same in all rows
            packed = values.new_full((*values.shape[:-2], *documents.shape), fill)
            for number, (row, place) in enumerate(zip(rows, places, strict=True)):
                packed[..., row, place] = values[..., number, : int(place.sum())]
            return packed

        texts, mask = unpack(input_ids), unpack((documents > 0).long())
        inputs: dict[str, Any] = {"input_ids": texts, "attention_mask": mask}
        for name, value in rest.items():
            is_per_token = isinstance(value, Tensor) and value.shape == input_ids.shape
            inputs[name] = unpack(value) if is_per_token else value
        present = {name: True for name, token in self.modality_token_ids.items() if bool((texts == token).any())}
        self._add_type_ids(inputs, present)
        call = self._record_call({}, texts, None, inputs)
        if position_ids is None:
            counted = torch.arange(texts.shape[1], device=texts.device)  # for a model that does not count positions
            position_ids = pack(call.get("position_ids", counted.expand_as(texts)), 0)
        if not makes_masks:
            return position_ids, None
        try:
            spans = find_spans(call.get("attention_mask"), mask.sum(-1))
        except UnsupportedModelError as error:
            raise ConfigError(
                f"{type(self._whole).__name__} makes attention masks of its own, which a packed row would not have: "
                f"{error}. Give one sample per row."
            ) from error
        return position_ids, pack(spans, TEXT)

    def whole(self) -> PreTrainedModel:
        """Return the original model, built from the current parts of this one."""
        language_model: Any = unwrap(self.language_model)
        inner, whole = copy_skeleton(self._inner), copy_skeleton(self._whole)
        for encoder in self._towers.values():
            encoder.attach_to(inner)
        inner._modules[self.text_name] = language_model.base_model
        inner._modules = {name: inner._modules[name] for name in self._child_names}
        whole._modules = {whole.base_model_prefix: inner, self._head_name: language_model.get_output_embeddings()}
        whole.generation_config = language_model.generation_config
        inner.training = whole.training = self.training
        return whole

    def verify(self, **batch: Any) -> None:
        """Raise `UnsupportedModelError` unless the parts and the whole model give equal logits on this batch."""
        with use_eval_mode(self):
            found, expected = self(**batch).logits, self.whole()(**batch).logits
        if not torch.equal(found, expected):
            difference = float((found - expected).abs().max())
            raise refuse(self._whole, f"on this batch its parts give other logits, by up to {difference:.3g}")

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Continue the text with the original's `generate` over the current parts; takes the original's arguments."""
        towers, adapters = self.encoders.values(), getattr(self.language_model, "active_peft_config", None)
        callbacks = [one for t in towers for one in (t.preprocess_callback, t.postprocess_projector_callback)]
        adds_prompts = getattr(adapters, "is_prompt_learning", False)  # to the text model's inputs, from outside
        if self.preprocess_llm_callback is not None or any(callbacks) or adds_prompts:
            return super().generate(input_ids, attention_mask, **kwargs)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **self._flatten(kwargs)}
        self._add_type_ids(batch, {name: True for key, name in self._triggers.items() if key in batch})
        return self.whole().generate(**batch)  # type: ignore[operator]


def decompose(model: nn.Module) -> DecomposedModel:
    """Decompose a Hugging Face multimodal model into encoders, projectors and a causal language model.

    The parts are shared with `model`, which should not be used any more. A model whose parts cannot give its results
    is refused with `UnsupportedModelError`.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise refuse(
            model,
            "expected a Hugging Face multimodal model with a head for text, such as LlavaForConditionalGeneration "
            "(wrap parts with PEFT afterwards, each on its own)",
        )
    inner = model.base_model
    if model.config.is_encoder_decoder or inner is model or not isinstance(inner, PreTrainedModel):
        children = ", ".join(name for name, _ in model.named_children())
        raise refuse(
            model,
            "it is not a head on one inner model that holds towers, projectors and a decoder-only text model "
            f"(its children: {children})",
        )
    decoder = inner.get_decoder()
    text_name = next((name for name, child in inner.named_children() if child is decoder), None)
    if text_name is None:
        raise refuse(model, f"{type(inner).__name__} holds no text model beside encoders")
    modalities = find_modalities(inner, text_name)
    encoders = {modality.name: TowerEncoder(inner, text_name, modality) for modality in modalities}
    probe_forward(inner, text_name, list(encoders.values()))
    origin = DecomposedOrigin(f"{type(model).__module__}.{type(model).__qualname__}", model.config.to_dict())
    language_model = build_causal_language_model(model, getattr(inner, text_name))
    parts = DecomposedModel(model, text_name, encoders, language_model, origin)
    kept = {id(tensor) for tensor in [*parts.parameters(), *parts.buffers()]}
    lost = [n for n, tensor in [*model.named_parameters(), *model.named_buffers()] if id(tensor) not in kept]
    if lost:
        some = ", ".join(lost[:2]) + (f" and {len(lost) - 2} more" if len(lost) > 2 else "")
        raise refuse(model, f"neither its encoders nor its language model use {some}")
    for new in (parts, language_model, *(m for encoder in encoders.values() for m in (encoder, encoder.projector))):
        new.training = model.training
    return parts


def rebuild(
    origin: DecomposedOrigin, device: str | torch.device = "meta", model_class: type | None = None
) -> DecomposedModel:
    """Build the parts of the model that `origin` names, with new weights; `model_class` if it is not transformers'."""
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
    return decompose(model)


class UndividedModel(MultimodalModel):
    """A Hugging Face multimodal model (or a PEFT model around one) in place of a language model.

    Batches go to its own forward unchanged. `reason` says why it cannot be decomposed.
    """

    def __init__(self, whole: nn.Module, reason: str) -> None:
        super().__init__({}, whole)
        self.reason = reason
        model: Any = unwrap(whole)
        found = {name: find_placeholder_id(model, kind) for kind, name in ENCODER_NAMES.items()}
        self.modality_token_ids = {name: number for name, number in found.items() if number is not None}
        self._rows: dict[str, dict[str, Any]] = {}

    def _run_batch(self, text: TextInputs, batch: dict[str, Any]) -> Any:
        """Run the model's own forward on a batch of its own processor; packed rows are refused."""
        if text.documents is not None:
            raise ConfigError(
                f"{type(unwrap(self.language_model)).__name__} cannot be given packed rows: {self.reason} Set "
                "`data.packing` to false."
            )
        given = {**vars(text), "facts": None, **batch}
        inputs = {name: value for name, value in given.items() if value is not None and not isinstance(value, Mapping)}
        if self.training:
            for row in self._rows.values():
                if not row["items"].keys() & inputs.keys():
                    inputs = _append_row(inputs, row)
        return self.language_model(**disable_cache(self.language_model, self._cast(inputs)))

    def _cast(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Cast inputs to the dtype of the weights: processors use another, and not every forward casts it."""
        if torch.is_autocast_enabled(self.device.type):
            return inputs
        return {n: v.to(self.dtype) if isinstance(v, Tensor) and is_float(v) else v for n, v in inputs.items()}

    def keep_encoders_running(self, stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
        """Run every encoder in every training step, also if the batch has nothing for it.

        A batch without items gets an additional row with an item, whose labels are ignored. `stand_ins` has, by
        modality, the row's `tokens` (entries per token, [1, S]) and its `items` (the encoders' inputs).
        """
        self._rows = {name: dict(row) for name, row in stand_ins.items()}

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Continue the text with the model's own `generate`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        given = {name: value for name, value in inputs.items() if value is not None}
        return self.language_model.generate(**self._cast(given))  # type: ignore[operator]

    def whole(self) -> PreTrainedModel:
        """Return the Hugging Face model."""
        return unwrap(self.language_model)  # type: ignore[return-value]


def _append_row(inputs: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    ids: Tensor = inputs["input_ids"]
    tokens = {name: value.to(ids.device) for name, value in row["tokens"].items()}
    tokens["labels"] = torch.full_like(tokens["input_ids"], IGNORE_INDEX)
    width = max(ids.shape[1], tokens["input_ids"].shape[1])
    joined = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            fill = IGNORE_INDEX if name == "labels" else 0
            other = tokens.get(name, torch.zeros_like(tokens["input_ids"]))
            rows = [nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in (value, other)]
            joined[name] = torch.cat([rows[0], rows[1].to(value.dtype)])
    items = {name: value.to(ids.device) if isinstance(value, Tensor) else value for name, value in row["items"].items()}
    return {**joined, **items}
