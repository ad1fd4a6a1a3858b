"""A language model and any number of encoders, as one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention import MaskSpec, attend_through_masks, use_mask
from cornstarch.compat import leave_out_of_ddp, positions_in_order
from cornstarch.errors import ConfigError

from .encoder import (
    LANGUAGE_MODEL_INPUTS,
    ModalEncoderModule,
    MultimodalProjector,
    build_projector,
    check_widths,
    set_trainable,
)
from .facts import CACHED_FEATURES, IGNORE_INDEX, BatchFacts, EncoderFeatures, TextInputs
from .hugging_face import HuggingFaceModel
from .language_model_check import LanguageModelTraits, check_language_model
from .merge import TokenMerger, check_batch_keys, get_callback_names, route_batch
from .unwrap import disable_cache, is_gathered_by_caller, is_sharded, replace_forward, run_inside, unwrap

__all__ = ["ModalEncoderModule", "MultimodalModel", "MultimodalProjector"]

EncoderMode = bool | tuple[bool, bool]


class MultimodalModel(HuggingFaceModel):
    """A language model that reads other modalities through encoders.

    Encoders become attributes `<name>_encoder`. Their tokens are merged into the language model's embeddings where
    the text has the modality's placeholder token; the embedding table is not resized.

    Args:
        encoders: Encoders by modality name. A bare model is wrapped in a `ModalEncoderModule`. None or empty: a
            plain language model.
        language_model: A Hugging Face causal language model (or a PEFT model around one).
        preprocess_llm_callback: Called with those of the language model's inputs that it names as arguments
            (`input_ids`, `inputs_embeds`, `attention_mask`, `position_ids`, `labels`, and any other batch key);
            returns a dictionary of inputs to add or replace.
        init_projector_type: "linear" or "mlp", for encoders that come without a projector.
        init_activation: The activation inside an "mlp" projector, by its name in transformers.
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module] | None = None,
        language_model: nn.Module | None = None,
        preprocess_llm_callback: Callable[..., dict[str, Any]] | None = None,
        init_projector_type: str = "linear",
        init_activation: str = "gelu",
    ) -> None:
        super().__init__()
        if not isinstance(language_model, nn.Module):
            raise ConfigError(
                f"language_model is a {type(language_model).__name__}; expected a Hugging Face causal language model."
            )
        if encoders is not None and not isinstance(encoders, Mapping):
            raise ConfigError(
                f"encoders is a {type(encoders).__name__}; expected a dictionary by modality name: "
                "{'vision': encoder}."
            )
        self.encoder_names: tuple[str, ...] = ()
        self.language_model = language_model
        self.preprocess_llm_callback = preprocess_llm_callback
        self.modality_token_ids: dict[str, int] = {}
        # A model imported from another library keeps that library's conventions (see from_multimodal).
        self.trains_on_placeholders = False
        self.positions_from_mask = True  # whether positions are counted from the first token that is not padding
        self.origin: Any = None
        self.zero_gradient_parameters: tuple[nn.Parameter, ...] = ()
        """Trained parameters that no loss reaches, where a wrapper creates zero gradients for them (FSDP1)."""
        self._stand_ins: dict[str, dict[str, Any]] = {}
        self.prompt_length: int | None = None
        """The number of tokens that may be placeholders; later tokens were generated and are text. None: all."""
        self._labels_given: Tensor | None = None
        self.register_forward_pre_hook(_record_labels, with_kwargs=True)
        self._features_to_use: tuple[dict[str, EncoderFeatures], list[Tensor]] | None = None
        self.traits = check_language_model(language_model) if encoders else LanguageModelTraits()
        for name, encoder in (encoders or {}).items():
            self.add_encoder(name, encoder, init_projector_type, init_activation)

    def add_encoder(
        self, name: str, encoder: nn.Module, projector_type: str = "linear", activation: str = "gelu"
    ) -> None:
        """Add a modality: its encoder becomes the attribute `<name>_encoder`."""
        if not isinstance(name, str) or not name.isidentifier() or name in LANGUAGE_MODEL_INPUTS:
            raise ConfigError(f"Encoder name {name!r}: expected a plain name such as 'vision' or 'audio'.")
        if not isinstance(unwrap(encoder), ModalEncoderModule):
            encoder = ModalEncoderModule(encoder)
        inner, width = unwrap(encoder), self._embedding_table().shape[1]
        assert isinstance(inner, ModalEncoderModule)
        if inner.projector is None:
            model_type = getattr(getattr(unwrap(self.language_model), "config", None), "model_type", None)
            # Beside a model without weights, random numbers of a large projector would only take time and memory.
            with self.device if self.device.type == "meta" else nullcontext():
                projector = build_projector(name, inner, width, projector_type, activation, model_type)
            inner.projector = nn.Module.to(projector, device=self.device, dtype=self.dtype)
        check_widths(name, inner, width)
        self.add_module(f"{name}_encoder", encoder)
        self.encoder_names = (*self.encoder_names, name)

    def get_input_embeddings(self) -> nn.Module:
        """Return the language model's table of token embeddings."""
        return unwrap(self.language_model).get_input_embeddings()  # type: ignore[operator]

    def _embedding_table(self) -> Tensor:
        return self.get_input_embeddings().weight  # type: ignore[return-value]

    @property
    def encoders(self) -> dict[str, ModalEncoderModule]:
        """The encoders by modality name, in the order in which they were added, without wrappers around them."""
        return {name: unwrap(getattr(self, f"{name}_encoder")) for name in self.encoder_names}  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        """The device of the language model's embeddings; of any local parameter if they are on other ranks."""
        return self._first_weight().device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the language model's embeddings; of any local parameter if they are on other ranks."""
        return self._first_weight().dtype

    def _first_weight(self) -> Tensor:
        table: Tensor | None = self._embedding_table()
        if table is not None and not table.is_meta:
            return table
        return next((one for one in self.parameters() if not one.is_meta), self._embedding_table())

    def set_modality_token_ids(self, token_ids: Mapping[str, int]) -> None:
        """Set the token id that marks the place of each modality's tokens in the text."""
        for name, token_id in token_ids.items():
            self._check_encoder_name(name)
            if not isinstance(token_id, int):
                raise ConfigError(
                    f"The token id of {name} is {token_id!r}; expected a number: "
                    "tokenizer.convert_tokens_to_ids(token)."
                )
        if len(set(token_ids.values())) != len(token_ids):
            raise ConfigError(f"Two modalities share a token id: {dict(token_ids)}; each needs its own.")
        self.modality_token_ids = {name: int(token_id) for name, token_id in token_ids.items()}

    def _check_encoder_name(self, name: object) -> None:
        if name not in self.encoder_names:
            raise ConfigError(f"There is no encoder {name!r}; this model has {list(self.encoder_names)}.")

    def train(
        self,
        mode: bool | str | Mapping[str, EncoderMode] = True,
        *,
        encoders_mode: Mapping[str, EncoderMode] | None = None,
        llm_mode: bool | None = None,
    ) -> MultimodalModel:
        """Set train or eval mode, or declare which parts are trained.

        With a plain `mode` this is torch's `train(mode)`. With `encoders_mode` or `llm_mode` it sets `requires_grad`
        and the mode of each part: `train(encoders_mode={"vision": (False, True)}, llm_mode=False)` trains the vision
        projector only. Encoders that `encoders_mode` does not name stay as they are; without `encoders_mode` all
        follow `llm_mode`.
        """
        if isinstance(mode, str):
            self._check_encoder_name(mode)
        if isinstance(mode, Mapping):
            encoders_mode, mode = mode, True
        if encoders_mode is None and llm_mode is None:
            super().train(bool(mode))
            return self
        llm_mode = True if llm_mode is None else llm_mode
        if encoders_mode is None:
            encoders_mode = dict.fromkeys(self.encoder_names, llm_mode)
        modes: dict[str, Any] = {}
        for name, trained in encoders_mode.items():
            self._check_encoder_name(name)
            modes[name] = (trained, trained) if isinstance(trained, bool) else tuple(trained)
            if len(modes[name]) != 2 or not all(isinstance(one, bool) for one in modes[name]):
                raise ConfigError(
                    f"encoders_mode[{name!r}] = {trained!r}: expected (encoder, projector), each True or False."
                )
        self.training = True
        for name, (encoder, projector) in modes.items():
            self.encoders[name].training = encoder or projector
            self.encoders[name].set_trainable(encoder, projector)
        set_trainable(self.language_model, bool(llm_mode))
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        facts: BatchFacts | None = None,
        **batch: Any,
    ) -> Any:
        """Run the encoders, merge their tokens into the text, and run the language model.

        Args:
            input_ids: [B, S] token ids, with each modality's placeholders in place.
            attention_mask: [B, S], 0 at padding.
            position_ids: Positions; by default counted by the language model (from the first token that is not
                padding, and anew in each packed document).
            labels: [B, S]; -100 is not trained on. Placeholders are never trained on.
            inputs_embeds: Embeddings to use instead of looking up `input_ids`.
            documents: [B, S] for packed rows: 0 is padding, tokens with the same number are one document.
            facts: Facts about this batch that are known on the CPU; without them they are read from the tensors,
                which waits for the GPU.
            batch: Encoders' inputs, flat (`pixel_values=…`) or nested by modality (`vision={"pixel_values": …}`),
                and further inputs of the language model's forward.

        Returns:
            The language model's output.
        """
        text = TextInputs(input_ids, attention_mask, position_ids, labels, inputs_embeds, documents, facts)
        return self._run_batch(text, batch)

    def _run_batch(self, text: TextInputs, batch: dict[str, Any]) -> Any:
        encoder_inputs, rest = self.split_batch(batch)
        facts = text.facts
        if facts is not None and not facts.matches(text.input_ids, self.modality_token_ids):
            facts = None
        features, stand_in_tensors = self._features_to_use or self.encode(encoder_inputs, facts)

        def merge_and_run(language_model: Callable[..., Any]) -> Any:
            llm_inputs, spec = self.merge(features, **{**vars(text), "facts": facts}, **rest)
            for tensor in stand_in_tensors:
                # Adds nothing, but gradients take the same path through the language model and the encoders as on
                # ranks with items: sharded parameters are gathered and reduced in the same order on all ranks.
                llm_inputs["inputs_embeds"] = llm_inputs["inputs_embeds"] + tensor[:0].sum()
            llm_inputs = disable_cache(self.language_model, llm_inputs)
            if text.labels is not None and llm_inputs.get("num_items_in_batch") is not None:
                count = llm_inputs["num_items_in_batch"]
                llm_inputs["num_items_in_batch"] = _correct_count(count, text.labels, llm_inputs["labels"])
            if spec is None:
                counted = facts is not None and llm_inputs.get("position_ids") is None
                with positions_in_order() if counted else nullcontext():
                    return language_model(**llm_inputs)
            attend_through_masks(self.language_model)
            with use_mask(spec):
                return language_model(**llm_inputs)

        if self.encoders and is_gathered_by_caller(self.language_model, self.get_input_embeddings()):
            # The embedding table is whole only while the language model runs: look up tokens and merge in there.
            return run_inside(self.language_model, merge_and_run, input_ids=text.input_ids)
        return merge_and_run(self.language_model)

    def split_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Return the inputs of each encoder that runs on this batch, and the rest for the language model."""
        encoder_inputs, rest = route_batch(self.encoders, batch)
        check_batch_keys(self.encoders, self.language_model, self.preprocess_llm_callback, rest)
        # The callback may take an encoder's input too: image grids, say, to compute positions.
        names = get_callback_names(self.preprocess_llm_callback)
        wanted = {name: batch[name] for name in (batch if names is None else names) if name in batch}
        return encoder_inputs, {**wanted, **rest}

    def encode(
        self, encoder_inputs: Mapping[str, dict[str, Any]], facts: BatchFacts | None = None
    ) -> tuple[dict[str, EncoderFeatures], list[Tensor]]:
        """Run the encoders, always in the same order; return their tokens, and the tensors made from stand-ins."""
        features: dict[str, EncoderFeatures] = {}
        stand_in_tensors: list[Tensor] = []
        for name, encoder in self.encoders.items():
            wrapper = self.get_submodule(f"{name}_encoder")
            if name in encoder_inputs:
                inputs = encoder_inputs[name]
                if inputs.keys() == {CACHED_FEATURES} and name in self._stand_ins and is_sharded(wrapper):
                    # All items are cached, but other ranks may wait for this rank to gather the parameters with them:
                    # run the encoder on a stand-in. Its output is not used; cached encoders are frozen.
                    stand_in = {"stand_in": self.stand_in(name, self.device)}
                    inputs = {CACHED_FEATURES: {**inputs[CACHED_FEATURES], **stand_in}}
                features[name] = self.run_encoder(name, inputs, None if facts is None else facts.host_inputs(name))
            elif name in self._stand_ins:
                stand_in_inputs = self.stand_in(name, self.device) or {}
                stand_in_tensors += encoder.stand_in_features(stand_in_inputs, wrapper=wrapper).tensors()
        return features, stand_in_tensors

    def run_encoder(
        self, name: str, inputs: dict[str, Any], on_host: Mapping[str, Any] | None = None
    ) -> EncoderFeatures:
        """Run one encoder through the wrappers around it (see `ModalEncoderModule.features`)."""
        return self.encoders[name].features(inputs, on_host, wrapper=self.get_submodule(f"{name}_encoder"))

    @contextmanager
    def use_features(self, features: dict[str, EncoderFeatures], touched: Sequence[Tensor] = ()) -> Iterator[None]:
        """Use these tokens in the block instead of running the encoders; `touched` are tensors made from stand-ins."""
        self._features_to_use = features, list(touched)
        try:
            yield
        finally:
            self._features_to_use = None

    @contextmanager
    def use_prompt_length(self, length: int) -> Iterator[None]:
        """Treat tokens after the first `length` as generated text inside the block, whatever their ids."""
        self.prompt_length = length
        try:
            yield
        finally:
            self.prompt_length = None

    def merge(self, features: dict[str, EncoderFeatures], **inputs: Any) -> tuple[dict[str, Any], MaskSpec | None]:
        """Return the language model's inputs, and the mask where plain causal attention is not enough.

        `inputs` are the named arguments of `forward`, and further inputs of the language model.
        """
        return TokenMerger(self)(features, *TextInputs.split(inputs))

    @property
    def base_model(self) -> Callable[..., Any]:
        """The model without the language model's head: called as the model is, it returns `last_hidden_state`."""
        return partial(_run_without_head, self)

    def keep_encoders_running(self, stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
        """Run every encoder in every step, also if the batch has nothing for it.

        Ranks that train together must launch the same collectives, or they deadlock: a rank without an image in its
        batch runs the vision encoder on a stand-in, whose tokens are not used and whose gradient is zero.

        Args:
            stand_ins: By modality, a valid input of its encoder, as `MultimodalProcessor.stand_ins` builds it, under
                the processor's names or the encoder's. Empty: encoders run only on the batch, as in one process.
        """
        for name in stand_ins:
            self._check_encoder_name(name)
        self._stand_ins = {name: self.encoders[name].rename_inputs(dict(one)) for name, one in stand_ins.items()}

    def stand_in(self, name: str, device: torch.device) -> dict[str, Any] | None:
        """Return the inputs of an encoder for a batch without its modality; None if it then does not run."""
        inputs = self._stand_ins.get(name)
        if inputs is None:
            return None
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        self._stand_ins[name] = moved  # copied once: each copy from the CPU would wait for the device
        return dict(moved)

    def find_unused_parameters(self) -> list[str]:
        """Return the names of trained parameters that no loss reaches, such as those of an encoder's pooled output.

        They never have a gradient. A plain `DistributedDataParallel` around this model does not wait for them.
        """
        found: set[int] = set()
        for name, encoder in self.encoders.items():
            names = encoder.find_unused_parameters(self._stand_ins.get(name))
            found |= {id(encoder.get_parameter(one)) for one in names}
        uses = Counter(id(one) for _, one in self.named_parameters(remove_duplicate=False))
        return [name for name, one in self.named_parameters() if id(one) in found and uses[id(one)] == 1]

    unreached_parameters = find_unused_parameters  # the earlier name


leave_out_of_ddp(MultimodalModel, MultimodalModel.find_unused_parameters)


def _record_labels(model: MultimodalModel, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """Record labels that only a forward of another library sees."""
    model._labels_given = inputs.get("labels") if "forward" in model.__dict__ else None


def _run_without_head(model: MultimodalModel, *args: Any, **inputs: Any) -> Any:
    """Run a model without the head of its language model; check the labels of a loss that is computed outside."""
    inner = unwrap(model.language_model)
    body: Any = getattr(inner, "base_model", inner)
    if body is inner:
        raise ConfigError(f"{type(inner).__name__} has no base_model: its head cannot be left out.")
    given, model._labels_given = inputs.pop("labels", model._labels_given), None

    def run_body(*_: Any, labels: Tensor | None = None, **llm_inputs: Any) -> Any:
        extra = 0
        if given is not None and labels is not None:
            extra = int(((given != IGNORE_INDEX) & (labels == IGNORE_INDEX)).sum())
        if extra:
            raise ConfigError(
                f"The loss is computed outside of the model, and this batch has {extra} labels that are not to be "
                "trained on (of placeholders, or of the first token behind padding). Set them to -100 where the batch "
                "is made: labels[input_ids == placeholder_id] = -100."
            )
        return body(**llm_inputs)

    with replace_forward(inner, run_body):
        own_forward: Any = type(model).forward  # not that of another library
        return own_forward(model, *args, labels=given, **inputs)


def _correct_count(count: Any, given: Tensor, trained: Tensor) -> Any:
    """Return the divisor of a sum of losses, corrected for labels that are given, but not trained on."""
    # Trainers count the labels of all batches of a step beforehand, including those of placeholders, and pass a tensor.
    # If they counted this batch alone, the right number is known. A plain number is the caller's own, and is kept.
    if not isinstance(count, Tensor):
        return count
    own, right = ((labels[..., 1:] != IGNORE_INDEX).sum() for labels in (given, trained))
    if bool(own == right):
        return count
    if bool((own == count).all()):
        return right.to(count).expand_as(count)
    raise ConfigError(
        f"num_items_in_batch is {int(count.flatten()[0])}, counted over several batches or ranks, and this batch has "
        f"{int(own - right)} labels that are not trained on (of placeholders, or of the first token behind padding): "
        "the loss would be divided by too much. Set these labels to -100 where the batch is made: "
        "labels[input_ids == placeholder_id] = -100."
    )
