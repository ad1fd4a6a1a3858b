"""A causal language model out of the text model and the head of a whole multimodal model.

Multimodal models keep a text model without a head, and a head of their own. Where the causal class that transformers
has for such a text model computes the same logits and the same loss (checked, not assumed), it is used. Otherwise a
class is made that runs the multimodal model's own forward from the last hidden state on.
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

from cornstarch.models.multimodal_language_model.takeover.hollow import hollow
from cornstarch.models.multimodal_language_model.takeover.modalities import refusal
from cornstarch.models.multimodal_language_model.unwrap import argument_names


class _BodyOutput:
    """The text model's output, as the multimodal model's inner model would have returned it."""

    def __init__(self, output: Any, given: dict[str, Any]) -> None:
        self._output, self._given = output, given

    def __getitem__(self, index: Any) -> Any:
        return self._output[index]

    def __getattr__(self, name: str) -> Any:
        # Inner models hand some of their inputs back (attention_mask, labels) and add what only the caller of the
        # whole model would see (features, rope deltas): None here.
        return getattr(self._output, name) if hasattr(self._output, name) else self._given.get(name)


class _Body:
    """Stands where the inner model stands in a multimodal model: only the text model is left of it."""

    def __init__(self, inner: nn.Module, text_model: Any) -> None:
        self._signature = inspect.signature(type(inner).forward)
        self._inner, self._text_model = inner, text_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        bound = self._signature.bind_partial(None, *args, **kwargs).arguments
        extra = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        given = {name: value for name, value in bound.items() if name not in ("self", extra) and value is not None}
        taken = argument_names(self._text_model) if isinstance(self._text_model, nn.Module) else tuple(given)
        inputs = {name: value for name, value in given.items() if name in taken}
        return _BodyOutput(self._text_model(**inputs, **bound.get(extra, {})), given)


@dataclass(frozen=True)
class Tail:
    """A multimodal model's own forward from its text model on; without weights."""

    whole: PreTrainedModel
    inner: PreTrainedModel
    head_name: str

    def __call__(self, text_model: Any, head: nn.Module, **inputs: Any) -> Any:
        """Run it on this text model and this head."""
        whole = hollow(self.whole)
        whole.__dict__[whole.base_model_prefix] = _Body(self.inner, text_model)
        whole._modules[self.head_name] = head
        return type(whole).forward(whole, **inputs)


class TextModelForCausalLM:
    """A text model with a head; logits and loss are those of the multimodal model it was taken from.

    Mixed into a class made by `_own_class`; weights are named `model.*` and `lm_head.*`, so that the text model's own
    class loads a folder saved from it.
    """

    text_class: ClassVar[type[PreTrainedModel]]
    tail: ClassVar[Tail]
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
        """Return what the multimodal model returns for these embeddings."""
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


def _signed_forward(tail: Tail) -> Callable[..., Any]:
    """Return a forward that names, as its arguments, also those which only the multimodal model's forward has."""
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


def _own_class(tail: Tail, text_model: Any, head: nn.Linear) -> type:
    text_class = type(text_model)
    parents = [base for base in text_class.__bases__ if issubclass(base, PreTrainedModel)] or [PreTrainedModel]
    embeddings = text_model.get_input_embeddings()
    table = next(name for name, module in text_model.named_modules() if module is embeddings)
    members = {
        # transformers reads the source of a class's module to learn which attention and experts it can be given.
        "__module__": text_class.__module__,
        "__doc__": f"{text_class.__name__} with the head of {type(tail.whole).__name__}.",
        "config_class": type(text_model.config),
        "base_model_prefix": "model",
        "main_input_name": "input_ids",
        "_tied_weights_keys": {"lm_head.weight": f"model.{table}.weight"},
        "forward": _signed_forward(tail),
        "text_class": text_class,
        "tail": tail,
        "head_bias": head.bias is not None,
    }
    return type(f"{text_class.__name__}ForCausalLM", (TextModelForCausalLM, parents[0], GenerationMixin), members)


def _with_parts(causal_class: type, text_model: PreTrainedModel, head: nn.Module) -> PreTrainedModel | None:
    """Return a model of this class made of the two given parts, or None if it wants other parts."""
    with torch.device("meta"):
        model = causal_class(text_model.config)
    if type(model.base_model) is not type(text_model) or type(model.get_output_embeddings()) is not type(head):
        return None
    setattr(model, model.base_model_prefix, text_model)
    model.set_output_embeddings(head)
    own = {id(parameter) for part in (text_model, head) for parameter in part.parameters()}
    return model if {id(parameter) for parameter in model.parameters()} == own else None


def _agrees(tail: Tail, causal: PreTrainedModel) -> bool:
    """Whether both compute the same logits and loss, to the bit, from the same hidden states."""
    # A narrow head on the CPU stands for the real one: its width is nobody's business, and the model may be on meta.
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
    mapped = hollow(causal)
    for name, child in causal.named_children():
        mapped._modules[name] = head if child is causal.get_output_embeddings() else child
    del mapped._modules[causal.base_model_prefix]
    mapped.__dict__[causal.base_model_prefix] = text_model
    with torch.no_grad():
        try:
            expected = tail(text_model, head, **inputs)
            found = type(mapped).forward(mapped, **inputs)
        except Exception:  # whatever one of them misses in so bare an output, they are not the same computation
            return False
    return torch.equal(expected.logits, found.logits) and torch.equal(expected.loss, found.loss)


def causal_language_model(model: PreTrainedModel, text_model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model inside a multimodal model together with the head that the multimodal model has."""
    head = cast(Any, model).get_output_embeddings()
    name = next((name for name, child in model.named_children() if child is head), None)
    if name is None or type(head) is not nn.Linear:
        raise refusal(model, f"it has no plain head of its own (found {type(head).__name__}, expected torch.nn.Linear)")
    tail = Tail(hollow(model), hollow(cast(PreTrainedModel, model.base_model)), name)
    # What says in a config whether the table and the head are one is a matter of the whole; here it is told.
    tied = head.weight is text_model.get_input_embeddings().weight
    text_model.config.tie_word_embeddings = tied
    causal = None
    mapped_class = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING).get(type(text_model.config), None)
    if isinstance(mapped_class, type):
        causal = _with_parts(mapped_class, text_model, head)
    if causal is None or not _agrees(tail, causal):
        causal = _with_parts(_own_class(tail, text_model, head), text_model, head)
    assert causal is not None
    causal.generation_config = model.generation_config
    return causal
