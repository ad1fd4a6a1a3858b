"""Build a causal language model from the text model and the head of a whole multimodal model.

Multimodal models have a text model without a head, and their own head. If transformers' causal class for the text
model computes the same logits and the same loss (this is checked), it is used. Otherwise a class is created that runs
the multimodal model's own forward from the last hidden state on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from cornstarch.models.multimodal_language_model.import_hf.modalities import refuse
from cornstarch.models.multimodal_language_model.import_hf.skeleton import copy_skeleton
from cornstarch.models.multimodal_language_model.unwrap import get_argument_names


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
        self._signature = inspect.signature(type(inner).forward)
        self._inner, self._text_model = inner, text_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        bound = self._signature.bind_partial(None, *args, **kwargs).arguments
        extra = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        given = {name: value for name, value in bound.items() if name not in ("self", extra) and value is not None}
        taken = get_argument_names(self._text_model) if isinstance(self._text_model, nn.Module) else tuple(given)
        inputs = {name: value for name, value in given.items() if name in taken}
        return _BodyOutput(self._text_model(**inputs, **bound.get(extra, {})), given)


@dataclass(frozen=True)
class ForwardTail:
    """A multimodal model's own forward after its text model; without weights."""

    whole: PreTrainedModel
    inner: PreTrainedModel
    head_name: str

    def __call__(self, text_model: Any, head: nn.Module, **inputs: Any) -> Any:
        """Run the forward with this text model and this head."""
        whole = copy_skeleton(self.whole)
        whole.__dict__[whole.base_model_prefix] = _Body(self.inner, text_model)
        whole._modules[self.head_name] = head
        return type(whole).forward(whole, **inputs)


class TextModelForCausalLM:
    """A text model with a head; logits and loss are those of the original multimodal model.

    A mixin of the class that `_create_class` builds. Weights are named `model.*` and `lm_head.*`, so that the text
    model's own class can load a saved folder.
    """

    text_class: ClassVar[type[PreTrainedModel]]
    tail: ClassVar[ForwardTail]
    head_bias: ClassVar[bool]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.text_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=self.head_bias)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the multimodal model's output for these embeddings."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "use_cache": use_cache,
        }
        given = {name: value for name, value in inputs.items() if value is not None}
        return self.tail(self.model, self.lm_head, **given, **kwargs)


def _build_forward(tail: ForwardTail) -> Callable[..., Any]:
    """Return a forward whose signature includes the arguments that only the multimodal model's forward has."""
    whole = inspect.signature(type(tail.whole).forward).parameters
    inner = inspect.signature(type(tail.inner).forward).parameters
    *own, rest = inspect.signature(TextModelForCausalLM.forward).parameters.values()
    known = {*inner, *(parameter.name for parameter in own)}
    further = [
        p.replace(kind=p.KEYWORD_ONLY) for p in whole.values() if p.name not in known and p.kind is not p.VAR_KEYWORD
    ]

    def forward(self: TextModelForCausalLM, *args: Any, **kwargs: Any) -> Any:
        return TextModelForCausalLM.forward(self, *args, **kwargs)

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
        "text_class": text_class,
        "tail": tail,
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
    assert causal is not None
    causal.generation_config = model.generation_config
    return causal
