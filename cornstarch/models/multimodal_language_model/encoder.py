"""One modality's encoder, the projector from its tokens to the language model, and freezing of both."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

from cornstarch.compat import leave_out_of_ddp
from cornstarch.errors import ConfigError

from .configuration_multimodal_language_model import MultimodalProjectorConfig, get_encoder_width
from .facts import CACHED_FEATURES, EncoderFeatures, get_token_states, join_cached, split_items
from .unwrap import get_argument_names, is_instrumented, is_peft, unwrap

TokenAttention = Literal["causal", "item", "modality"]

# Batch keys that belong to the language model. An encoder's argument of the same name (Whisper's `attention_mask`)
# can only be given nested: `audio={"input_features": …, "attention_mask": …}`.
LANGUAGE_MODEL_INPUTS = frozenset(
    "input_ids attention_mask position_ids labels inputs_embeds past_key_values use_cache cache_position "
    "logits_to_keep output_attentions output_hidden_states return_dict token_type_ids head_mask documents "
    "num_items_in_batch shift_labels output_router_logits facts".split()
)

# The names of encoders' arguments, and the names that processors use for the same inputs.
_PROCESSOR_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_states": ("pixel_values", "input_features", "input_values"),
    "grid_thw": ("image_grid_thw",),
}

Callback = Callable[..., Any]


class ModalEncoderModule(nn.Module):
    """An encoder and the projector that maps its tokens to the width of the language model.

    The order of a call is: `preprocess_callback(inputs)`, the encoder, `postprocess_module_callback(inputs, output)`,
    the projector, `postprocess_projector_callback(inputs, output)`. `inputs` is the dictionary of the encoder's
    inputs; an output's tokens are `output[0]`, also called `output.last_hidden_state`.

    Args:
        model: The encoder; `module` is another name for the same argument.
        projector: A `MultimodalProjector`, or any module from tokens to tokens. None: built by `MultimodalModel`.
        additional_args: Batch keys that this encoder takes beside the arguments of its forward.
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
        if projector is not None and not isinstance(projector, nn.Module):
            raise ConfigError(
                f"projector is a {type(projector).__name__}; expected a MultimodalProjector or a torch.nn.Module. For "
                "a kind by name use init_projector_type of MultimodalModel."
            )
        if projector is not None and not hasattr(projector, "get_base_model"):  # a PEFT model stays as it is
            is_wrapped = isinstance(unwrap(projector), MultimodalProjector)
            projector = projector if is_wrapped else MultimodalProjector(None, projector)
        self.register_module("projector", projector)  # fixes its place among the children, even if None
        self.additional_args = list(additional_args)
        self.attention: TokenAttention = attention
        self.preprocess_callback = preprocess_callback
        self.postprocess_module_callback = postprocess_module_callback
        self.postprocess_projector_callback = postprocess_projector_callback
        self._uses_inference_mode = False
        self.is_running_stand_in = False
        """Whether the encoder currently runs on a stand-in, whose tokens are not used."""
        self.keep: Callable[[Mapping[str, Any], Tensor | None], None] | None = None
        """Called with the value of `CACHED_FEATURES` and the tokens [total, D] of the items that were encoded."""

    @property
    def config(self) -> tuple[Any, Any]:
        """The configs of the encoder and of the projector."""
        parts = (unwrap(self.module), None if self.projector is None else unwrap(self.projector))
        return getattr(parts[0], "config", None), getattr(parts[1], "config", None)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The batch keys that reach this encoder when they are given flat."""
        own = [name for name in get_argument_names(self.module) if name not in LANGUAGE_MODEL_INPUTS]
        aliases = [alias for name in own for alias in _PROCESSOR_NAMES.get(name, ())]
        return tuple(dict.fromkeys([*own, *aliases, *self.additional_args]))

    @property
    def trigger_names(self) -> tuple[str, ...]:
        """The batch keys of which one must be present for the encoder to run."""
        first = get_argument_names(self.module)[:1]
        aliases = _PROCESSOR_NAMES.get(first[0], ()) if first else ()
        own = [name for name in (*first, *aliases) if name not in LANGUAGE_MODEL_INPUTS]
        return tuple(dict.fromkeys([*own, *self.additional_args]))

    def select_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return this encoder's inputs from a flat batch; None if the batch has none."""
        given = {name: batch[name] for name in self.input_names if batch.get(name) is not None}
        if not any(name in given for name in self.trigger_names):
            return None
        return self.rename_inputs(given)

    def rename_inputs(self, given: dict[str, Any]) -> dict[str, Any]:
        """Rename processor outputs to the encoder's argument names, in place."""
        arguments = get_argument_names(self.module)
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
        cached = inputs.pop(CACHED_FEATURES, None)
        output: Any
        if cached is not None:
            sizes = {name: cached.get("on_host", {}).get(name, value) for name, value in inputs.items()}
            fresh = self.tokens(inputs, sizes).tokens if inputs else None
            if not inputs and "stand_in" in cached:
                self.encode(cached["stand_in"])
            output = join_cached(cached, fresh)  # [total, D] of all items
            if self.keep is not None:
                self.keep(cached, fresh)
        else:
            output = self.encode(inputs) if self.projector is None else self._encode_states(inputs)
        if self.projector is not None:
            states = get_token_states(output)
            expected = getattr(getattr(unwrap(self.projector), "config", None), "in_features", None)
            width = states[0].shape[-1] if isinstance(states, Sequence) else states.shape[-1]
            if expected is not None and width != expected:
                raise ConfigError(
                    f"{type(unwrap(self.module)).__name__} put out tokens of width {width}, the projector takes "
                    f"{expected}. Pass a projector made with MultimodalProjectorConfig(in_features={width}, …)."
                )
            if isinstance(states, Sequence):
                projected: Any = [self.projector(item).last_hidden_state for item in states]
                output = BaseModelOutput(last_hidden_state=projected)
            else:
                output = self.projector(states)
        if self.postprocess_projector_callback is not None:
            output = _call_with_output(self.postprocess_projector_callback, inputs, output)
        return output

    def tokens(self, inputs: dict[str, Any], on_host: Mapping[str, Any] | None = None) -> EncoderFeatures:
        """Return the encoder's tokens per item, before the projector; `on_host` has the sizes and masks on the CPU."""
        return split_items(self.module, inputs if on_host is None else on_host, self._encode_states(inputs))

    def _encode_states(self, inputs: dict[str, Any]) -> Any:
        """Return the encoder's tokens; a frozen encoder runs in inference mode (see `enable_inference_mode`)."""
        # Shape inference passes tensors of other classes, or on the meta device.
        plain = all(
            type(one) is Tensor and not one.is_meta and not one.requires_grad
            for one in inputs.values()
            if isinstance(one, Tensor)
        )
        if not (self._uses_inference_mode and plain):
            return get_token_states(self.encode(inputs))
        with torch.inference_mode():
            states = get_token_states(self.encode(inputs))
        # A copy is an ordinary tensor, which a trained projector may save for its backward pass.
        return [item.clone() for item in states] if isinstance(states, Sequence) else states.clone()

    def enable_inference_mode(self) -> bool:
        """Use inference mode if the encoder is frozen and has no callbacks or hooks; return whether it is used.

        Call it when the model is completely set up; `set_trainable` disables inference mode again.
        """
        frozen = not self.module.training and not any(p.requires_grad for p in self.module.parameters())
        has_callbacks = self.preprocess_callback is not None or self.postprocess_module_callback is not None
        self._uses_inference_mode = frozen and not has_callbacks and not is_instrumented(self.module)
        return self._uses_inference_mode

    def features(
        self, inputs: dict[str, Any], on_host: Mapping[str, Any] | None = None, *, wrapper: nn.Module | None = None
    ) -> EncoderFeatures:
        """Return this encoder's tokens per item, ready to be merged into the text.

        `on_host` has the sizes and masks among the inputs, by their batch keys, on the CPU (see `BatchFacts`);
        `wrapper` is the module to call instead of this one: FSDP, DDP or torch.compile around it.
        """
        call = self if wrapper is None else wrapper
        named = self.rename_inputs(dict(on_host or {}))
        if CACHED_FEATURES in inputs:
            cached = {**inputs[CACHED_FEATURES], "on_host": named}
            tokens = get_token_states(call(**{**inputs, CACHED_FEATURES: cached}))
            return EncoderFeatures(tokens, list(cached["lengths"]))
        sizes = {name: named.get(name, value) for name, value in inputs.items()}
        return split_items(self.module, sizes, get_token_states(call(**inputs)))

    def stand_in_features(self, inputs: dict[str, Any], *, wrapper: nn.Module | None = None) -> EncoderFeatures:
        """Return the tokens of a stand-in; `is_running_stand_in` is True during the call."""
        self.is_running_stand_in = True
        try:
            return self.features(inputs, wrapper=wrapper)
        finally:
            self.is_running_stand_in = False

    def find_unused_parameters(self, inputs: dict[str, Any] | None = None) -> list[str]:
        """Return the names of trained parameters on which the tokens do not depend: see `shape_inference`."""
        from .shape_inference import find_unused_parameters

        return find_unused_parameters(self, inputs)

    def set_trainable(self, encoder: bool, projector: bool) -> None:
        """Train or freeze the encoder and the projector: `requires_grad` and train/eval mode together."""
        self._uses_inference_mode = False
        set_trainable(self.module, encoder)
        if self.projector is not None:
            set_trainable(self.projector, projector)
        # A callback may be a module with its own weights (an image-newline embedding, say): it is trained with the
        # projector, because it runs after the encoder.
        for callback in (self.postprocess_module_callback, self.postprocess_projector_callback):
            if isinstance(callback, nn.Module):
                set_trainable(callback, projector)


leave_out_of_ddp(ModalEncoderModule, ModalEncoderModule.find_unused_parameters)


def _call_with_output(callback: Callback, inputs: dict[str, Any], output: Any) -> Any:
    """Call `callback(inputs, output)`, or `callback(output)` if it takes a single argument."""
    parameters = inspect.signature(callback).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_inputs = len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return callback(inputs, output) if takes_inputs else callback(output)


FIXED = "_cornstarch_fixed"
"""The attribute in which a part stores the names of its parameters that are never trained."""


def set_trainable(part: nn.Module, trainable: bool) -> None:
    """Train or freeze a part: sets `requires_grad` of its parameters and its train/eval mode.

    Parameters that the part itself keeps fixed are never trained: the base weights under PEFT adapters, the
    sinusoids of an audio encoder, layers that the user froze one by one. They are the parameters that required no
    gradient at the first call, while others did.
    """
    fixed: frozenset[str] | None = part.__dict__.get(FIXED)
    if fixed is None:
        fixed = frozenset(name for name, p in part.named_parameters() if not p.requires_grad)
        if len(fixed) == sum(1 for _ in part.named_parameters()):  # frozen as a whole: no choice within the part
            if is_peft(part):
                raise ConfigError(
                    "No parameter of the PEFT model requires a gradient, so its adapters cannot be told from its base. "
                    "Compose it before freezing it, and freeze it with train(encoders_mode=…, llm_mode=…)."
                )
            fixed = frozenset()
        part.__dict__[FIXED] = fixed
    part.train(trainable)
    for name, parameter in part.named_parameters():
        if parameter.is_floating_point():  # quantized weights have no gradient
            parameter.requires_grad_(trainable and name not in fixed)


class MultimodalProjector(PreTrainedModel):
    """Maps an encoder's tokens to the width of the language model's embeddings.

    Args:
        config: Sizes and kind of the projection. With your own module, sizes that are set are checked when the
            model is composed; sizes left out are not.
        projection: Your own module, tensor in and tensor out. None builds what `config` describes.
    """

    config_class = MultimodalProjectorConfig
    config: MultimodalProjectorConfig
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    supports_gradient_checkpointing = True

    def __init__(self, config: MultimodalProjectorConfig | None = None, projection: nn.Module | None = None) -> None:
        if config is None:
            config = MultimodalProjectorConfig(projection_type="custom" if projection is not None else "linear")
        if not isinstance(config, MultimodalProjectorConfig):
            raise ConfigError(
                f"MultimodalProjector got a {type(config).__name__} as config; expected a "
                "MultimodalProjectorConfig (or None with your own projection)."
            )
        if projection is not None:
            config.projection_type = "custom"
        super().__init__(config)
        self.projection = _build_projection(config) if projection is None else projection
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep every weight as torch or the user initialized it."""

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        """Return the projected tokens as `last_hidden_state`."""
        parameter = next(self.projection.parameters(), None)
        if parameter is not None:
            device = parameter.device.type
            # Encoder and projector may have different dtypes; under autocast, autocast casts.
            if device == "meta" or not torch.is_autocast_enabled(device):
                inputs_embeds = inputs_embeds.to(parameter.dtype)
        return BaseModelOutput(last_hidden_state=self.projection(inputs_embeds))


def _build_projection(config: MultimodalProjectorConfig) -> nn.Module:
    if config.projection_type == "custom":
        raise ConfigError("A projector of type 'custom' needs its module: pass it as `projection`.")
    sizes = []
    for name, source in (("in_features", "encoder_config"), ("out_features", "text_config")):
        size = getattr(config, name)
        if size is None:
            raise ConfigError(
                f"MultimodalProjectorConfig has no {name}: no hidden size could be read from {source}. "
                f"Pass {name}=<size> to MultimodalProjectorConfig, or your own module as `projection`."
            )
        sizes.append(int(size))
    in_features, out_features = sizes
    first = nn.Linear(in_features, out_features)
    if config.projection_type == "linear":
        return first
    second = nn.Linear(out_features, out_features)
    return nn.Sequential(OrderedDict(in_proj=first, activation=ACT2FN[config.activation], out_proj=second))


def build_projector(
    modality: str,
    encoder: ModalEncoderModule,
    width: int,
    projector_type: str,
    activation: str,
    language_model_type: str | None = None,
) -> MultimodalProjector:
    """Return a new projector from an encoder to embeddings of this width."""
    encoder_config = encoder.config[0]
    own = get_encoder_width(encoder_config)
    if own is None:
        raise ConfigError(
            f"No hidden size can be read from the config of the {modality} encoder "
            f"({type(unwrap(encoder.module)).__name__}). Pass ModalEncoderModule(model, projector="
            "MultimodalProjector(MultimodalProjectorConfig(in_features=<its width>, out_features="
            f"{width}, projection_type={projector_type!r})))."
        )
    config = MultimodalProjectorConfig(
        encoder_config, None, projector_type, activation, own, width, language_model_type=language_model_type
    )
    return MultimodalProjector(config)


def check_widths(modality: str, encoder: ModalEncoderModule, width: int) -> None:
    """Refuse a projector whose widths are not those of its encoder and of embeddings of this width."""
    encoder_config, config = encoder.config
    own, found = get_encoder_width(encoder_config), getattr(config, "in_features", None)
    if found is not None and own is not None and found != own and not encoder.postprocess_module_callback:
        raise ConfigError(
            f"The {modality} projector takes tokens of width {found}, its encoder puts out {own} "
            "(in_features of MultimodalProjectorConfig; a postprocess_module_callback may change the width)."
        )
    found = getattr(config, "out_features", None)
    if found is not None and found != width and not encoder.postprocess_projector_callback:
        raise ConfigError(
            f"The {modality} projector puts out tokens of width {found}, the language model's embeddings have {width} "
            "(out_features of MultimodalProjectorConfig)."
        )
