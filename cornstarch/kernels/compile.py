"""Regional compilation and activation checkpointing: both replace the `forward` of single layers.

Layers are compiled one by one, equal layers share a graph, and the code around them stays eager. Of a checkpointed
layer only the inputs are kept; the rest is recomputed in the backward pass.

Only a layer's `forward` is wrapped: hooks that shard or count run around it as before, and parameter names do not
change. A compiled forward is inside of a checkpointed one, so that the compiled layer is recomputed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cornstarch.attention.interface import build_checkpoint_contexts, has_attention_function
from cornstarch.compat.compiler import (
    compile_error,
    compile_variants,
    copy_view,
    is_recompile_limit,
    last_guard,
    mark_any_size,
    raise_at_recompile_limit,
)
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile_log import CompileLog, shorten_guard
from cornstarch.models.multimodal_language_model.item_encoders import is_item_attention, takes_bounds

OnFailure = Callable[[str], None]

# Recomputing a layer would write to these caches a second time. Training does not need them.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class CheckpointedForward:
    """The forward of a layer whose activations are recomputed.

    Unlike transformers' gradient checkpointing, it also works in eval mode: gradients of a projector flow through a
    frozen language model, which is in eval mode.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.inner: Callable[..., Any] = layer.forward
        functools.update_wrapper(self, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        kwargs |= {name: None for name in _CACHES if name in kwargs}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(self.inner, *args, use_reentrant=False, context_fn=build_checkpoint_contexts, **kwargs)


def checkpoint_layer(layer: nn.Module) -> None:
    """Recompute a layer's activations in the backward pass, in place; calling it twice changes nothing."""
    if not isinstance(layer.__dict__.get("forward"), CheckpointedForward):
        layer.__dict__["forward"] = CheckpointedForward(layer)


_runs_eagerly = False


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled layers eagerly in this block.

    Generation has another length at every token, and a cache entry for every layer: each would be compiled on its own.
    """
    global _runs_eagerly
    before, _runs_eagerly = _runs_eagerly, True
    try:
        yield
    finally:
        _runs_eagerly = before


class CompiledForward:
    """The compiled forward of a layer; the eager one if compilation fails and `on_failure` is given."""

    def __init__(
        self,
        plain: Callable[..., Any],
        layer: nn.Module,
        on_failure: OnFailure | None,
        log: CompileLog,
        part: str,
        any_rows: bool,
        over_items: bool,
        options: Any,
    ) -> None:
        self.plain, self._any_rows, self._over_items = plain, any_rows, over_items
        self._shapes: set[torch.Size] = set()  # the first two of the input
        self._compiled: Callable[..., Any] | None = compile_variants(self.plain, **options)
        self._on_failure, self._layer, self._log, self._part = on_failure, type(layer).__name__, log, part
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shape = next((one.shape for one in args if isinstance(one, torch.Tensor)), None)
        if self._compiled is None or _runs_eagerly or has_attention_function() or self._is_lone_row(shape):
            return self.plain(*args, **kwargs)
        if shape is not None and len(self._shapes) < 2:
            self._shapes.add(shape)
        if not self._over_items:
            args = tuple(copy_view(one) if isinstance(one, torch.Tensor) else one for one in args)
        # Where lengths vary, the last batch of an epoch, or of an evaluation, may have fewer rows, too.
        is_any = not self._over_items and (len(self._shapes) > 1 or not torch.is_grad_enabled())
        if self._any_rows or is_any:
            for value in (*args, *kwargs.values()):
                for one in value if isinstance(value, tuple) else (value,):  # cosines and sines
                    if isinstance(one, torch.Tensor) and one.dim() and one.shape[0] > 1:
                        mark_any_size(one, 0)
        try:
            with raise_at_recompile_limit():
                return self._log.run(self._part, self._layer, self._compiled, args, kwargs)
        except compile_error() as error:
            reason = self._explain(error)
            if self._on_failure is None:
                if is_recompile_limit(error):
                    raise ConfigError(f"compile = layers\n  {reason}.\n  Use compile: auto.") from error
                raise
            self._compiled = None
            self._log.eager[self._part] += 1
            self._on_failure(reason)
            return self.plain(*args, **kwargs)

    def _is_lone_row(self, shape: torch.Size | None) -> bool:
        """Whether an evaluation that had several rows is left with one, for which torch would compile a variant."""
        if self._over_items or torch.is_grad_enabled() or shape is None or shape[:1] != (1,):
            return False
        return any(one[:1] != (1,) for one in self._shapes)

    def _explain(self, error: Exception) -> str:
        """Return why torch does not compile the layer."""
        if is_recompile_limit(error):
            return (
                f"{self._part}: torch gave up on {self._layer}, which it has compiled too often; the last guard that "
                f"failed: {shorten_guard(last_guard()) or 'unknown'}"
            )
        return f"{self._part}: {self._layer} cannot be compiled: {str(error).strip().splitlines()[0]}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the eager forward of the copied layer: the compiled code is bound to this layer."""
        return copy.deepcopy(self.plain, memo)


class UncompiledForward:
    """The forward of attention that loops over the items of a row, excluded from compilation.

    Encoders that `attend_within_items` refused do so. A graph of the loop would be specialized to the number of items,
    and every other number would compile again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.plain = module.forward
        functools.update_wrapper(self, self.plain)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


def compile_layers(
    layers: Iterable[nn.Module],
    on_failure: OnFailure | None = None,
    *,
    log: CompileLog | None = None,
    part: str = "model",
    any_rows: bool = False,
    **options: Any,
) -> int:
    """Compile the forward of layers that are not compiled yet, in place; return how many. `options`: `torch.compile`'s.

    `on_failure` is called with the reason if a layer cannot be compiled and runs eagerly instead. Default: raise.
    `log` takes what torch compiles for these layers, as layers of `part`. With `any_rows` the first variant is for any
    number of rows (images of a batch) from two on; else it is for the rows of the first batch, which is quicker, and
    only the next, with the second length or without gradients, for any number from two on.
    """
    log = CompileLog() if log is None else log
    count, layers = 0, list(layers)
    # The layers of an encoder of items of any size have dynamic sizes of their own.
    over_items = any(is_item_attention(module) for layer in layers for module in layer.modules())
    for layer in layers:
        wrapper = layer.__dict__.get("forward")
        forward = wrapper.inner if isinstance(wrapper, CheckpointedForward) else layer.forward
        if isinstance(forward, CompiledForward):
            continue
        item_modules = [module for module in layer.modules() if takes_bounds(module)]
        for module in item_modules:
            if module is not layer and not is_item_attention(module):
                module.__dict__["forward"] = UncompiledForward(module)
        # The first batch says nothing about the number of items and tokens of the next.
        own = {"dynamic": True, **options} if any(map(is_item_attention, item_modules)) else options
        replacement = CompiledForward(forward, layer, on_failure, log, part, any_rows, over_items, own)
        if isinstance(wrapper, CheckpointedForward):
            wrapper.inner = replacement
        else:
            layer.__dict__["forward"] = replacement
        count += 1
    log.layers[part] += count
    return count
