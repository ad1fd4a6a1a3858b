"""Which part of the model takes what of a batch."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model.encoder import LANGUAGE_MODEL_INPUTS, ModalEncoderModule
from cornstarch.models.multimodal_language_model.items import KNOWN
from cornstarch.models.multimodal_language_model.unwrap import accepts, argument_names

LlmCallback = Callable[..., dict[str, Any]]

# Keys that processors add for models which need them; a language model that has no use for them goes without.
_OPTIONAL_INPUTS = frozenset({"token_type_ids", "mm_token_type_ids"})


def route(
    encoders: Mapping[str, ModalEncoderModule], batch: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Split a batch into each encoder's inputs (only of those that run) and what is left for the language model."""
    nested = {name: batch[name] for name in encoders if isinstance(batch.get(name), Mapping)}
    flat = {name: value for name, value in batch.items() if name not in nested and value is not None}
    routed: dict[str, dict[str, Any]] = {}
    taken: dict[str, str] = {}
    for name, encoder in encoders.items():
        if name in nested:
            _check_nested(name, encoder, nested[name])
            routed[name] = encoder.as_arguments(dict(nested[name]))
            continue
        for key in encoder.input_names:
            if key in flat and key in taken:
                raise ConfigError(
                    f"Both the {taken[key]} and the {name} encoder take {key!r}. "
                    f"Give it nested: {taken[key]}={{{key!r}: …}}, {name}={{{key!r}: …}}."
                )
            if key in flat:
                taken[key] = name
        inputs = encoder.select_inputs(flat)
        if inputs is not None:
            routed[name] = inputs
    return routed, {key: value for key, value in flat.items() if key not in taken}


def _check_nested(name: str, encoder: ModalEncoderModule, inputs: Mapping[str, Any]) -> None:
    """Refuse an input that an encoder would silently ignore: most often it is misspelt."""
    if encoder.preprocess_callback is not None:  # reads what it likes
        return
    known = {*argument_names(encoder.module), *encoder.input_names, KNOWN}
    for key in inputs:
        if key not in known and key not in LANGUAGE_MODEL_INPUTS:
            raise ConfigError(f"The {name} encoder does not take {key!r}.{_hint(key, known)} It takes {sorted(known)}.")


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def callback_names(callback: LlmCallback | None) -> list[str] | None:
    """Return the inputs that the language model's callback asks for; None: all of them."""
    if callback is None:
        return []
    parameters = inspect.signature(callback).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters]


def check_known(
    encoders: Mapping[str, ModalEncoderModule],
    language_model: nn.Module,
    callback: LlmCallback | None,
    rest: Mapping[str, Any],
) -> None:
    """Refuse a batch with a key that no part takes: most often it is misspelt."""
    wanted = callback_names(callback)
    if wanted is None:
        return
    known = LANGUAGE_MODEL_INPUTS.union(argument_names(language_model), _OPTIONAL_INPUTS, wanted)
    for name in rest:
        if name in known:
            continue
        taken = {key: list(encoder.input_names) for key, encoder in encoders.items()}
        hint = _hint(name, [*known, *encoders, *(n for names in taken.values() for n in names)])
        raise ConfigError(
            f"No part of the model takes {name!r}.{hint} Encoders take {taken}; "
            "name further inputs of an encoder in its additional_args."
        )


def prepare_llm_inputs(
    language_model: nn.Module, callback: LlmCallback | None, llm_inputs: dict[str, Any], input_ids: Tensor | None
) -> dict[str, Any]:
    """Let the user's callback have its say, and return what the language model takes."""
    if callback is not None:
        offered = {**llm_inputs, "input_ids": input_ids}
        names = callback_names(callback)
        used = offered if names is None else {name: offered.get(name) for name in names}
        llm_inputs = {**llm_inputs, **callback(**used)}
    taken = LANGUAGE_MODEL_INPUTS.union(argument_names(language_model))
    return {
        name: value
        for name, value in llm_inputs.items()
        if value is not None and name in taken and (name not in _OPTIONAL_INPUTS or accepts(language_model, name))
    }
