"""One modality's encoder with its projector."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from cornstarch.compat import leave_out_of_ddp
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.items import KNOWN, Features, join_known, split_items, token_states
from cornstarch.models.multimodal_language_model.projector import as_projector
from cornstarch.models.multimodal_language_model.trainable import set_trainable
from cornstarch.models.multimodal_language_model.unwrap import argument_names, is_changed_inside, unwrap

TokenAttention = Literal["causal", "item", "modality"]

# Batch keys that speak to the language model. An encoder's argument of the same name (Whisper's `attention_mask`)
# can only be given nested: `audio={"input_features": …, "attention_mask": …}`.
LANGUAGE_MODEL_INPUTS = frozenset(
    "input_ids attention_mask position_ids labels inputs_embeds past_key_values use_cache cache_position "
    "logits_to_keep output_attentions output_hidden_states return_dict token_type_ids head_mask documents "
    "num_items_in_batch shift_labels output_router_logits facts".split()
)

# What an encoder calls its input, and what processors call the same thing.
_PROCESSOR_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_states": ("pixel_values", "input_features", "input_values"),
    "grid_thw": ("image_grid_thw",),
}

Callback = Callable[..., Any]


def _call_with_output(callback: Callback, inputs: dict[str, Any], output: Any) -> Any:
    """Call `callback(inputs, output)`, or `callback(output)` if it takes a single argument."""
    positional = [
        p
        for p in inspect.signature(callback).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    takes_inputs = len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in positional)
    return callback(inputs, output) if takes_inputs else callback(output)


class ModalEncoderModule(nn.Module):
    """An encoder and the projector that brings its tokens to the width of the language model.

    The order of a call is: `preprocess_callback(inputs)`, the encoder, `postprocess_module_callback(inputs, output)`,
    the projector, `postprocess_projector_callback(inputs, output)`. `inputs` is the dictionary of the encoder's
    inputs; an output's tokens are `output[0]`, also called `output.last_hidden_state`.

    Args:
        model: The encoder; `module` is another name for the same argument.
        projector: A `MultimodalProjector`, or any module from tokens to tokens. None: made by `MultimodalModel`.
        additional_args: Names in a batch that this encoder takes beside the arguments of its forward.
        preprocess_callback: Changes the inputs before the encoder.
        postprocess_module_callback: Changes the encoder's output before the projector.
        postprocess_projector_callback: Changes the projector's output before it is merged into the text.
        attention: How this modality's tokens see each other inside the language model: "causal" like text,
            "item" in both directions within one image or clip, "modality" in both directions within all of them.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        projector: nn.Module | None = None,
        additional_args: Sequence[str] = (),
        preprocess_callback: Callback | None = None,
        postprocess_module_callback: Callback | None = None,
        postprocess_projector_callback: Callback | None = None,
        *,
        module: nn.Module | None = None,
        attention: TokenAttention = "causal",
    ) -> None:
        super().__init__()
        if (model is None) == (module is None):
            raise ConfigError("ModalEncoderModule needs one encoder: pass either `model` or `module`.")
        encoder = model if model is not None else module
        if not isinstance(encoder, nn.Module):
            raise ConfigError(f"The encoder is a {type(encoder).__name__}; expected a torch.nn.Module.")
        if isinstance(additional_args, str):
            raise ConfigError(f"additional_args = {additional_args!r}: expected a list of names.")
        if attention not in get_args(TokenAttention):
            raise ConfigError(f"attention = {attention!r}: expected one of {', '.join(get_args(TokenAttention))}.")
        self.module = encoder
        self.projector: nn.Module | None
        self.register_module("projector", as_projector(projector))  # has its place even if it is made later
        self.additional_args = list(additional_args)
        self.attention: TokenAttention = attention
        self.preprocess_callback = preprocess_callback
        self.postprocess_module_callback = postprocess_module_callback
        self.postprocess_projector_callback = postprocess_projector_callback
        self._is_settled = False
        self.is_standing_in = False
        """Whether it runs on a stand-in now, whose tokens go nowhere."""
        self.keep: Callable[[Mapping[str, Any], Tensor | None], None] | None = None
        """Called with what is known of items and the tokens [total, D] of those that were encoded now."""

    @property
    def config(self) -> tuple[Any, Any]:
        """The configs of the encoder and of the projector."""
        parts = (unwrap(self.module), None if self.projector is None else unwrap(self.projector))
        return getattr(parts[0], "config", None), getattr(parts[1], "config", None)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The batch keys that reach this encoder when they are given flat."""
        own = [name for name in argument_names(self.module) if name not in LANGUAGE_MODEL_INPUTS]
        aliases = [alias for name in own for alias in _PROCESSOR_NAMES.get(name, ())]
        return tuple(dict.fromkeys([*own, *aliases, *self.additional_args]))

    @property
    def trigger_names(self) -> tuple[str, ...]:
        """The batch keys of which one must be there for the encoder to run."""
        first = argument_names(self.module)[:1]
        aliases = _PROCESSOR_NAMES.get(first[0], ()) if first else ()
        own = [name for name in (*first, *aliases) if name not in LANGUAGE_MODEL_INPUTS]
        return tuple(dict.fromkeys([*own, *self.additional_args]))

    def select_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return this encoder's share of a flat batch, or None if the batch has nothing for it."""
        given = {name: batch[name] for name in self.input_names if batch.get(name) is not None}
        if not any(name in given for name in self.trigger_names):
            return None
        return self.as_arguments(given)

    def as_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Rename what processors call otherwise than the encoder does."""
        arguments = argument_names(self.module)
        for name, aliases in _PROCESSOR_NAMES.items():
            if name not in arguments or name in given:
                continue
            for alias in aliases:
                if alias in given and alias not in arguments and alias not in self.additional_args:
                    given[name] = given.pop(alias)
                    break
        return given

    def encode(self, inputs: dict[str, Any]) -> Any:
        """Run the encoder between its two callbacks and return its output."""
        arguments = self.preprocess_callback(inputs) if self.preprocess_callback else inputs
        output = self.module(**arguments)
        if self.postprocess_module_callback is not None:
            output = _call_with_output(self.postprocess_module_callback, inputs, output)
        return output

    def forward(self, **inputs: Any) -> Any:
        """Return the projected tokens as `last_hidden_state` (the plain encoder output if there is no projector)."""
        known = inputs.pop(KNOWN, None)
        if known is not None:
            output: Any = self._encode_rest(inputs, known)
        else:
            output = self.encode(inputs) if self.projector is None else self._states(inputs)
        if self.projector is not None:
            output = self._project(token_states(output))
        if self.postprocess_projector_callback is not None:
            output = _call_with_output(self.postprocess_projector_callback, inputs, output)
        return output

    def tokens(self, inputs: dict[str, Any], told: Mapping[str, Any] | None = None) -> Features:
        """Return what the encoder makes of items, without its projector.

        Args:
            inputs: What the encoder takes.
            told: The same with sizes and masks on the CPU.
        """
        return split_items(self.module, inputs if told is None else told, self._states(inputs))

    def _states(self, inputs: dict[str, Any]) -> Any:
        """Return the encoder's tokens; of a frozen one, made without what autograd needs to know of a tensor."""
        if not self._is_inert(inputs):
            return token_states(self.encode(inputs))
        with torch.inference_mode():
            states = token_states(self.encode(inputs))
        # A copy is a tensor like any other, which a projector that is trained may keep for its backward pass.
        return [item.clone() for item in states] if isinstance(states, Sequence) else states.clone()

    def settle(self) -> bool:
        """Find out, once all is in place, whether a run of the encoder can have no effect but its tokens; say so.

        So it is if the encoder is frozen, and nobody looks on: no callbacks, no hooks, nothing compiled, sharded or put
        in stages. It then runs in inference mode, until `set_trainable` is called.
        """
        frozen = not self.module.training and not any(p.requires_grad for p in self.module.parameters())
        watched = self.preprocess_callback is not None or self.postprocess_module_callback is not None
        self._is_settled = frozen and not watched and not is_changed_inside(self.module)
        return self._is_settled

    def _is_inert(self, inputs: Mapping[str, Any]) -> bool:
        # Shapes without numbers are tensors of other classes, or on the meta device.
        return self._is_settled and all(
            type(one) is Tensor and not one.is_meta and not one.requires_grad
            for one in inputs.values()
            if isinstance(one, Tensor)
        )

    def _encode_rest(self, inputs: dict[str, Any], known: Mapping[str, Any]) -> Tensor:
        """Return the tokens [total, D] of all items, of which only those that are not known are encoded."""
        on_host = known.get("on_host", {})
        told = {name: on_host.get(name, value) for name, value in inputs.items()}
        fresh = self.tokens(inputs, told).tokens if inputs else None
        if not inputs and "stand_in" in known:
            self.encode(known["stand_in"])
        tokens = join_known(known, fresh)
        if self.keep is not None:
            self.keep(known, fresh)
        return tokens

    def _project(self, states: Any) -> ModelOutput:
        assert self.projector is not None
        expected = getattr(getattr(unwrap(self.projector), "config", None), "in_features", None)
        width = states[0].shape[-1] if isinstance(states, Sequence) else states.shape[-1]
        if expected is not None and width != expected:
            name = type(unwrap(self.module)).__name__
            raise ConfigError(
                f"{name} put out tokens of width {width}, the projector takes {expected}. "
                f"Pass a projector made with MultimodalProjectorConfig(in_features={width}, …)."
            )
        if isinstance(states, Sequence):
            items = [self.projector(item).last_hidden_state for item in states]
            return BaseModelOutput(last_hidden_state=items)  # type: ignore[arg-type]
        return self.projector(states)

    def features(
        self, inputs: dict[str, Any], on_host: Mapping[str, Any] | None = None, *, wrapper: nn.Module | None = None
    ) -> Features:
        """Return this encoder's tokens, item by item, ready to be merged into the text.

        Args:
            inputs: What the encoder takes.
            on_host: Sizes and masks among the inputs, by their names there, on the CPU (see `BatchFacts`).
            wrapper: What to call instead of this module: FSDP, DDP, a compiled module, … around it.
        """
        call = self if wrapper is None else wrapper
        named = self.as_arguments(dict(on_host or {}))
        if KNOWN in inputs:
            known = {**inputs[KNOWN], "on_host": named}
            return Features(token_states(call(**{**inputs, KNOWN: known})), list(known["lengths"]))
        told = {name: named.get(name, value) for name, value in inputs.items()}
        return split_items(self.module, told, token_states(call(**inputs)))

    def stand_in_features(self, inputs: dict[str, Any], *, wrapper: nn.Module | None = None) -> Features:
        """Return the tokens of a stand-in; meanwhile `is_standing_in` tells whoever looks on."""
        self.is_standing_in = True
        try:
            return self.features(inputs, wrapper=wrapper)
        finally:
            self.is_standing_in = False

    def unreached_parameters(self, inputs: dict[str, Any] | None = None) -> list[str]:
        """Return the names of trained parameters on which the tokens do not depend, such as those of a pooled output.

        They never have a gradient. A plain `DistributedDataParallel` does not wait for them.

        Args:
            inputs: Some valid input of the encoder. None: one that follows from the encoder's config.
        """
        from cornstarch.models.multimodal_language_model.unreached import unreached_parameters

        return unreached_parameters(self, inputs)

    def set_trainable(self, encoder: bool, projector: bool) -> None:
        """Train or freeze the encoder and the projector: `requires_grad` and train/eval mode together."""
        self._is_settled = False
        set_trainable(self.module, encoder)
        if self.projector is not None:
            set_trainable(self.projector, projector)
        # A callback may be a module with weights of its own (an image-newline embedding, say): it belongs to what
        # comes after the encoder.
        for name in ("postprocess_module_callback", "postprocess_projector_callback"):
            callback = getattr(self, name)
            if isinstance(callback, nn.Module):
                set_trainable(callback, projector)


leave_out_of_ddp(ModalEncoderModule, ModalEncoderModule.unreached_parameters)
