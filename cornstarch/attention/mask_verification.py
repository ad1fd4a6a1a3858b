"""Switches a language model to masks as data, and verifies on the model itself that it respects them.

Many architectures accept a mask and do not respect it: recurrent layers carry state across documents, positions are
counted along the row, a model's own attention code never reads the mask. None of them reports it. A few very short
forward passes detect it, so that such a model is refused instead of trained wrongly.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.attention.backends import run_attention
from cornstarch.attention.interface import (
    DENSE_IMPLEMENTATION,
    IMPLEMENTATION,
    get_active_mask,
    restrict_to_documents,
    set_attention_function,
    set_mask_builder,
    use_mask,
)
from cornstarch.attention.mask import MaskSpec
from cornstarch.errors import ConfigError, UnsupportedModelError

# Largest relative difference of two ways to compute the same logits. Measured on 88 correct architectures: below 1e-6
# in float32, 3e-2 in bfloat16; on every incorrect one: 3e-3 and more.
# (Models normalize and take the softmax in float32 even when they compute in float64.)
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_verified: WeakSet[nn.Module] = WeakSet()


def attend_through_masks(language_model: nn.Module) -> None:
    """Switch a language model to the masks of `use_mask`, after verifying that it respects them.

    The model (or the one inside a PEFT model) is switched once; a second call does nothing. On the meta device nothing
    is verified. A model that fails keeps its attention implementation and raises `UnsupportedModelError`.
    """
    model = _unwrap_model(language_model)
    implementation = IMPLEMENTATION if model._supports_flex_attn else DENSE_IMPLEMENTATION
    if model in _verified and model.config._attn_implementation in (implementation, IMPLEMENTATION):
        return
    before = {part: part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)}
    try:
        reference = None
        if not is_on_meta(model):
            # The truth: the second document alone, with the model's own attention and positions.
            model.set_attn_implementation("eager")
            tokens = _build_tokens(model)[_PADDING + _FIRST :][None]
            with use_parameter_precision(language_model), use_eval_mode(language_model):
                reference = _forward(language_model, input_ids=tokens, attention_mask=torch.ones_like(tokens))[0]
        model.set_attn_implementation(implementation)
        if model.config._attn_implementation != implementation:
            raise UnsupportedModelError("it has attention code of its own, outside transformers' attention interface")
        if reference is not None:
            with use_parameter_precision(language_model):
                _verify(language_model, reference)
                if implementation == DENSE_IMPLEMENTATION and model._supports_attention_backend:
                    model.set_attn_implementation(IMPLEMENTATION)
                    if not _hands_on_masks(language_model, reference):
                        model.set_attn_implementation(implementation)
            _verified.add(model)
    except Exception as fault:
        for part, previous in before.items():
            if part.config._attn_implementation != previous:
                part.set_attn_implementation(previous)
        reason = str(fault) if isinstance(fault, ConfigError) else f"its forward raised {type(fault).__name__}: {fault}"
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot attend through masks as data (packed documents, bidirectional spans): "
            f"{reason.rstrip('.')}. Use it with one causal sample per row, or take another language model."
        ) from fault


def mark_verified(model: nn.Module) -> None:
    """Let `attend_through_masks` skip a model that cannot run yet and is verified in another way."""
    _verified.add(model)


def _unwrap_model(module: nn.Module) -> PreTrainedModel:
    inner: Any = module
    while not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = inner.get_base_model()
        elif "_orig_mod" in inner._modules:  # torch.compile
            inner = inner.get_submodule("_orig_mod")
        else:
            break
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(module).__name__} is not a transformers model; masks as data enter through "
            "transformers' attention interface. Give a PreTrainedModel, or a PEFT model around one."
        )
    return inner


def is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


# The row of the verification: padding and two documents. Short, because the model may be very large.
_PADDING, _FIRST, _SECOND = 2, 5, 7
_SPAN = slice(2, 6)


def _verify(language_model: nn.Module, reference: Tensor) -> None:
    """Raise `UnsupportedModelError` with the reason unless the model respects a spec."""
    tolerance = logits_tolerance(language_model, reference.device)
    with use_eval_mode(language_model):
        tokens = _build_tokens(_unwrap_model(language_model))
        second = tokens[_PADDING + _FIRST :]
        alone = _compute_logits(language_model, second[None], MaskSpec.from_documents(torch.ones_like(second)[None]))[0]
        off = median_distance(alone, reference)
        if not off <= tolerance:
            raise UnsupportedModelError(
                "its attention uses something that only its own code understands, or its positions do not count "
                f"from 0 (relative difference {off:.1e}, at most {tolerance:.0e} expected)"
            )
        rounding = _verify_documents(language_model, tokens, alone, tolerance)
        _verify_spans(language_model, second, rounding)


def _verify_documents(language_model: nn.Module, tokens: Tensor, alone: Tensor, tolerance: float) -> float:
    """Verify packed documents; return the largest change that rounding explains."""
    documents = torch.tensor([0] * _PADDING + [1] * _FIRST + [2] * _SECOND, device=tokens.device)
    start = _PADDING + _FIRST
    spec = MaskSpec.from_documents(torch.stack([documents, documents]))
    rows = torch.stack([tokens, tokens])
    others = rows.clone()
    others[1, :start] = tokens[:start].roll(1)
    first, second = (_compute_logits(language_model, ids, spec)[:, start:] for ids in (rows, others))
    # The first row did not change, and rows are independent: it shows how experts round when they get other tokens.
    # Models without experts do not change at all.
    rounding = max(10 * _distance(first[0], second[0]), tolerance / 50)
    leak = _distance(first[1], second[1])
    if not leak <= min(rounding, tolerance):
        raise UnsupportedModelError(
            f"tokens of one document depend on another document of the row (relative change {leak:.1e})"
        )
    off = median_distance(first[0], alone)
    if not off <= tolerance:
        raise UnsupportedModelError(
            "a document gives other logits after another document than alone (relative difference "
            f"{off:.1e}, at most {tolerance:.0e} expected): it counts positions along the row"
        )
    return rounding


def _verify_spans(language_model: nn.Module, tokens: Tensor, rounding: float) -> None:
    spans = torch.full_like(tokens, -1)
    spans[_SPAN] = 0
    spec = MaskSpec(torch.ones_like(spans)[None], spans[None])
    later = slice(_SPAN.start + 1, _SPAN.stop)
    others = tokens.clone()
    others[later] = tokens[later].flip(0) + 1
    first, second = (_compute_logits(language_model, ids[None], spec)[0] for ids in (tokens, others))
    before = _distance(first[: _SPAN.start], second[: _SPAN.start])
    if not before <= rounding:
        raise UnsupportedModelError(f"text sees tokens that come after it (relative change {before:.1e})")
    if not _distance(first[_SPAN.start], second[_SPAN.start]) > rounding:
        raise UnsupportedModelError("tokens of a bidirectional span do not see those that come after them")


@dataclass(frozen=True, eq=False)
class _UnreadableMask:
    """A mask that only the attention function of the verification can read."""

    dense: Tensor


def _hands_on_masks(language_model: nn.Module, reference: Tensor) -> bool:
    """Whether a model gives masks to its attention as they are, so that kernels with masks of their own can be used.

    Many models that do not say that FlexAttention supports them do so, the whole Qwen2-VL family among them. With dense
    masks their attention takes three times as long.
    """

    def build(batch_size: int, queries: int, keys: int, **given: Any) -> _UnreadableMask:
        spec, pattern = get_active_mask(), restrict_to_documents(given["mask_function"], given["attention_mask"])
        assert spec is not None
        places = [torch.arange(count, device=spec.documents.device) for count in (queries, keys)]
        return _UnreadableMask(spec.dense(pattern, *places))

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(mask, _UnreadableMask):
            raise UnsupportedModelError(f"{type(module).__name__} was given a {type(mask).__name__}")
        return run_attention(module, query, key, value, mask.dense, **options)

    tokens = _build_tokens(_unwrap_model(language_model))
    documents = torch.tensor([0] * _PADDING + [1] * _FIRST + [2] * _SECOND, device=tokens.device)
    tolerance, start = logits_tolerance(language_model, reference.device), _PADDING + _FIRST
    with ExitStack() as stack:
        stack.enter_context(use_eval_mode(language_model))
        stack.callback(set_mask_builder(build))
        stack.callback(set_attention_function(attend))
        try:
            found = _compute_logits(language_model, tokens[None], MaskSpec.from_documents(documents[None]))
        except Exception:  # it reads the mask, in one of many ways
            return False
    return median_distance(found[0, start:], reference) <= tolerance


def _build_tokens(model: PreTrainedModel) -> Tensor:
    """Return distinct token ids, small enough that adding one gives an id."""
    table: Any = model.get_input_embeddings().weight
    index = torch.arange(_PADDING + _FIRST + _SECOND, device=table.device)
    return (index * 7 + 3) % max(int(table.shape[0]) - 1, 1)


def _compute_logits(language_model: nn.Module, tokens: Tensor, spec: MaskSpec) -> Tensor:
    inputs = {"input_ids": tokens, "attention_mask": (spec.documents > 0).long()}
    parameters = inspect.signature(_unwrap_model(language_model).forward).parameters
    if "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        inputs["position_ids"] = spec.positions()
    with use_mask(spec):
        return _forward(language_model, **inputs)


def _forward(language_model: nn.Module, **inputs: Tensor) -> Tensor:
    # Nothing reads a key/value cache here, and compiled layers would be compiled again for each of its entries.
    parameters = inspect.signature(_unwrap_model(language_model).forward).parameters
    output = language_model(**inputs, **({"use_cache": False} if "use_cache" in parameters else {}))
    logits: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return logits


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def median_distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative distance of logits, the median over tokens: a single one may be routed to another expert."""
    return statistics.median(_distance(*pair) for pair in zip(found, expected, strict=True))


def logits_tolerance(model: nn.Module, device: torch.device) -> float:
    """Return the largest distance that rounding explains, for the lowest precision that the model computes in."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.is_autocast_enabled(device.type):
        dtypes.add(torch.get_autocast_dtype(device.type))
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        dtypes.add(torch.float16)  # TensorFloat-32 has the same precision
    return max(_TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16]) for dtype in dtypes)


def use_parameter_precision(model: nn.Module) -> AbstractContextManager[object]:
    """Return an autocast context for a model with parameters of several precisions; a null context for others."""
    precisions = {p.dtype for p in model.parameters() if p.is_floating_point()}
    halves = sorted(precisions - {torch.float32, torch.float64}, key=str)
    if len(precisions) < 2 or not halves or halves[0] not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=halves[0])


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a block with the model in eval mode and without gradients; every module's mode is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
