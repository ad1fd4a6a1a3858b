"""The parts of a decomposed Hugging Face multimodal model: encoders around its towers, and a causal language model.

Multimodal models have a text model without a head, and their own head. If transformers' causal class for the text
model computes the same logits and the same loss (this is checked), it is used. Otherwise a class is created that runs
the multimodal model's own forward from the last hidden state on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from cornstarch.errors import ConfigError
from cornstarch.trees import tensors_in

from ..configuration_multimodal_language_model import MultimodalProjectorConfig
from ..encoder import ModalEncoderModule, MultimodalProjector
from ..facts import EncoderFeatures, count_audio_tokens, find_mask
from ..unwrap import get_argument_names, unwrap
from .modalities import Modality, bind_arguments, copy_skeleton, record_language_model_call, refuse


class OriginalProjector(MultimodalProjector):
    """The modules between a tower and the language model, called as the multimodal model calls them."""

    def forward(self, *args: Any, part: str | None = None, **kwargs: Any) -> Any:
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
        self.text_name = text_name
        self.width: int = cast(Any, inner.get_input_embeddings()).weight.shape[1]
        object.__setattr__(self, "_inner", copy_skeleton(inner))  # hidden from torch: not a child of this module

    @property
    def input_names(self) -> tuple[str, ...]:
        """The batch keys that reach this encoder: the arguments of the model's own method."""
        return tuple(dict.fromkeys([*self.modality.inputs, *self.additional_args]))

    @property
    def trigger_names(self) -> tuple[str, ...]:
        return self.modality.inputs[:1]

    def rename_inputs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs unchanged: batch keys are the names of the method's arguments."""
        return given

    def modules_by_name(self) -> dict[str, nn.Module]:
        """Return the tower and the projector's modules by their names in the original model."""
        names, projection = self.modality.projectors, cast(Any, unwrap(self.projector)).projection
        parts = {names[0]: projection} if len(names) == 1 else {name: projection[name] for name in names}
        return {self.modality.tower: self.module, **parts}

    def attach_to(self, inner: PreTrainedModel) -> None:
        """Make this encoder's parts the parts of the skeleton `inner`."""
        for name, module in self.modules_by_name().items():
            inner.__dict__.pop(name, None)
            inner._modules[name] = module
        projector = unwrap(self.projector)
        for name in self.modality.weights:
            store: dict[str, Any] = inner._parameters if name in projector._parameters else inner._buffers
            store[name] = getattr(projector, name)

    def encode(self, inputs: dict[str, Any]) -> Any:
        if self.postprocess_module_callback is not None:
            raise ConfigError(
                "postprocess_module_callback cannot be used here: tower and projector are run by "
                f"{type(self._inner).__name__}'s own method. Use preprocess_callback or postprocess_projector_callback."
            )
        if self.preprocess_callback is not None:
            inputs = self.preprocess_callback(inputs)
        inner, single = copy_skeleton(self._inner), len(self.modality.projectors) == 1
        inner.training = self.training
        self.attach_to(inner)
        for name in self.modality.projectors:
            module = inner._modules.pop(name)
            inner.__dict__[name] = _ProjectorPart(self.projector, None if single else name, module)  # type: ignore[arg-type]
        if self.modality.method is not None:
            return getattr(inner, self.modality.method)(**{**self.modality.fixed_inputs, **inputs})
        # Without a method for features, the model runs on a sentence of placeholders.
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
        output = self.encode(inputs)
        if self.postprocess_projector_callback is not None:
            output = self.postprocess_projector_callback(inputs, output)
        return output

    def features(
        self, inputs: dict[str, Any], on_host: Mapping[str, Any] | None = None, *, wrapper: nn.Module | None = None
    ) -> EncoderFeatures:
        output = (self if wrapper is None else wrapper)(**inputs)
        states = output if isinstance(output, (Tensor, list)) else getattr(output, self.modality.tokens)
        if not isinstance(states, Tensor):
            items = [item.reshape(-1, item.shape[-1]) for item in states]
            return TowerFeatures(torch.cat(items), [len(item) for item in items], output, self.modality.passes_on_more)
        lengths = [states.shape[1]] * states.shape[0] if states.dim() == 3 else None
        return TowerFeatures(states.reshape(-1, states.shape[-1]), lengths, output, self.modality.passes_on_more)


class _BodyOutput:
    """The text model's output with the interface of the inner model's output."""

    def __init__(self, output: Any, given: dict[str, Any]) -> None:
        self._output, self._given = output, given

    def __getitem__(self, index: Any) -> Any:
        return self._output[index]

    def __getattr__(self, name: str) -> Any:
        # Inner models return some of their inputs (attention_mask, labels), and add fields for the caller of the whole
        # model (features, rope deltas): None here.
        return getattr(self._output, name) if hasattr(self._output, name) else self._given.get(name)


class _Body:
    """Replaces the inner model of a multimodal model, and runs the text model only."""

    def __init__(self, inner: nn.Module, text_model: Any) -> None:
        self._inner, self._text_model = inner, text_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        given, rest = bind_arguments(type(self._inner).forward, args, kwargs)
        taken = get_argument_names(self._text_model) if isinstance(self._text_model, nn.Module) else tuple(given)
        inputs = {name: value for name, value in given.items() if name in taken}
        return _BodyOutput(self._text_model(**inputs, **rest), given)


@dataclass(frozen=True)
class ForwardTail:
    """A multimodal model's own forward after its text model; without weights."""

    whole: PreTrainedModel
    inner: PreTrainedModel
    head_name: str

    def __call__(self, text_model: Any, head: nn.Module, loss_function: Any = None, **inputs: Any) -> Any:
        """Run it; `loss_function` replaces the model's own."""
        whole = copy_skeleton(self.whole)
        if loss_function is not None:
            cast(Any, whole).loss_function = loss_function
        whole.__dict__[whole.base_model_prefix] = _Body(self.inner, text_model)
        whole._modules[self.head_name] = head
        return type(whole).forward(whole, **inputs)


# The arguments of a causal language model's forward that are passed on if they are given, in order.
_TEXT_ARGUMENTS = "input_ids attention_mask position_ids past_key_values inputs_embeds labels use_cache".split()


class TextModelForCausalLM:
    """A text model with a head whose logits and loss are those of the original: a mixin for `_create_class`.

    Weights are named `model.*` and `lm_head.*`, so that the text model's own class can load a saved folder.
    """

    text_class: ClassVar[type[PreTrainedModel]]
    head_bias: ClassVar[bool]
    original_forward: ClassVar[Callable[..., Any]]
    """The forward that computes the loss."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.text_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=self.head_bias)
        self.post_init()  # type: ignore[attr-defined]


def _build_forward(tail: ForwardTail) -> Callable[..., Any]:
    """Return a forward whose signature includes the arguments that only the multimodal model's forward has."""
    whole = inspect.signature(type(tail.whole).forward).parameters
    inner = inspect.signature(type(tail.inner).forward).parameters
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    own += [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in _TEXT_ARGUMENTS]
    known = {"self", *inner, *_TEXT_ARGUMENTS}
    further = [
        p.replace(kind=p.KEYWORD_ONLY) for p in whole.values() if p.name not in known and p.kind is not p.VAR_KEYWORD
    ]

    def forward(self: TextModelForCausalLM, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_TEXT_ARGUMENTS, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None or name not in _TEXT_ARGUMENTS}
        return tail(self.model, self.lm_head, getattr(self, "loss_function", None), **given)

    rest = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
    forward.__signature__ = inspect.Signature([*own, *further, rest])  # type: ignore[attr-defined]
    return forward


def _create_class(tail: ForwardTail, text_model: Any, head: nn.Linear) -> type:
    text_class = type(text_model)
    parents = [base for base in text_class.__bases__ if issubclass(base, PreTrainedModel)] or [PreTrainedModel]
    embeddings = text_model.get_input_embeddings()
    table = next(name for name, module in text_model.named_modules() if module is embeddings)
    members = {
        # transformers reads the source of a class's module to find the supported attention and experts.
        "__module__": text_class.__module__,
        "__doc__": f"{text_class.__name__} with the head of {type(tail.whole).__name__}.",
        "config_class": type(text_model.config),
        "base_model_prefix": "model",
        "main_input_name": "input_ids",
        "_tied_weights_keys": {"lm_head.weight": f"model.{table}.weight"},
        "forward": _build_forward(tail),
        "original_forward": staticmethod(type(tail.whole).forward),
        "text_class": text_class,
        "head_bias": head.bias is not None,
    }
    return type(f"{text_class.__name__}ForCausalLM", (TextModelForCausalLM, parents[0], GenerationMixin), members)


def _build_from_parts(causal_class: type, text_model: PreTrainedModel, head: nn.Module) -> PreTrainedModel | None:
    """Return a model of this class with these two parts, or None if the class has other parts."""
    with torch.device("meta"):
        model = causal_class(text_model.config)
    if type(model.base_model) is not type(text_model) or type(model.get_output_embeddings()) is not type(head):
        return None
    setattr(model, model.base_model_prefix, text_model)
    model.set_output_embeddings(head)
    own = {id(parameter) for part in (text_model, head) for parameter in part.parameters()}
    return model if {id(parameter) for parameter in model.parameters()} == own else None


def _is_equivalent(tail: ForwardTail, causal: PreTrainedModel) -> bool:
    """Whether both compute bit-equal logits and loss from the same hidden states."""
    # Use a narrow head on the CPU instead of the real one: the width does not matter, and the model may be on meta.
    vocabulary, width = causal.get_output_embeddings().weight.shape[0], 4
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, width, generator=generator)
    labels = torch.randint(vocabulary, (2, 7), generator=generator)
    labels[0, 3] = -100
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    head = nn.Linear(width, vocabulary, bias=False, device="cpu")

    def text_model(**inputs: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[arg-type]

    inputs = {"inputs_embeds": hidden, "attention_mask": mask, "labels": labels}
    mapped = copy_skeleton(causal)
    for name, child in causal.named_children():
        mapped._modules[name] = head if child is causal.get_output_embeddings() else child
    del mapped._modules[causal.base_model_prefix]
    mapped.__dict__[causal.base_model_prefix] = text_model
    with torch.no_grad():
        try:
            expected = tail(text_model, head, **inputs)
            found = type(mapped).forward(mapped, **inputs)
        except Exception:  # one of them needs more of the output, so the computations differ
            return False
    return torch.equal(expected.logits, found.logits) and torch.equal(expected.loss, found.loss)


def build_causal_language_model(model: PreTrainedModel, text_model: PreTrainedModel) -> PreTrainedModel:
    """Return a causal language model with the text model and the head of a multimodal model."""
    head = cast(Any, model).get_output_embeddings()
    name = next((name for name, child in model.named_children() if child is head), None)
    if name is None or type(head) is not nn.Linear:
        raise refuse(model, f"it has no plain head of its own (found {type(head).__name__}, expected torch.nn.Linear)")
    tail = ForwardTail(copy_skeleton(model), copy_skeleton(cast(PreTrainedModel, model.base_model)), name)
    # Whether the embeddings and the head are tied is an entry of the whole model's config: set it here.
    tied = head.weight is text_model.get_input_embeddings().weight
    text_model.config.tie_word_embeddings = tied
    causal = None
    mapped_class = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING).get(type(text_model.config), None)
    if isinstance(mapped_class, type):
        causal = _build_from_parts(mapped_class, text_model, head)
    if causal is None or not _is_equivalent(tail, causal):
        causal = _build_from_parts(_create_class(tail, text_model, head), text_model, head)
        if causal is not None and hasattr(model, "loss_function"):
            causal.loss_function = model.loss_function
    assert causal is not None
    causal.generation_config = model.generation_config
    return causal
