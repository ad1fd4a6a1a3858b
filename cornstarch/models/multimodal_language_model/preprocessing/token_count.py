"""Count the tokens that each item (image, clip) takes in the text, without running the real encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention.mask_verification import use_eval_mode
from cornstarch.errors import ConfigError
from cornstarch.trees import map_tensors

from ..encoder import ModalEncoderModule
from ..facts import EncoderFeatures, count_audio_tokens, count_patches, find_mask
from ..shape_inference import ShapeInferenceMode, ShapeTensor, copy_without_weights, is_float
from ..unwrap import is_sharded, unwrap

# A formula (ours or the user's) that was right for this many different geometries is trusted without further shape
# inference, which costs up to a second for a large encoder. A wrong number is still refused by the model's forward.
CHECKED_GEOMETRIES = 4
_CACHED_GEOMETRIES = 1024


@dataclass(frozen=True)
class TokenCounts:
    lengths: tuple[int, ...] | None
    """Tokens per item; None where the boundaries are unknown (a callback returned one flat tensor)."""
    total: int


class FeatureCounter:
    """Counts the tokens that one encoder makes of its inputs, callbacks and projector included.

    The count comes from a formula where the inputs determine it (patch grids, image sizes, masks), otherwise from
    shape inference: a forward of a copy of the encoder without weights. Only an encoder that decides by the values of
    its tensors is run itself. Formulas are checked by shape inference too, and dropped if they are wrong.
    """

    def __init__(self, encoder: ModalEncoderModule) -> None:
        self._encoder: ModalEncoderModule | None = encoder
        self._name = type(unwrap(encoder.module)).__name__
        # Copied now, before the model is sharded or wrapped; worker processes have only this copy.
        self._twin: ModalEncoderModule | None = None
        with suppress(Exception):  # a callback has state that cannot be copied: the encoder itself is run instead
            self._twin = copy_without_weights(encoder)
        self._known: dict[tuple[Any, ...], TokenCounts] = {}
        self._per_item: dict[tuple[Any, ...], int] = {}
        self._formula_holds = True
        self.runs_encoder = False  # whether the encoder itself had to be run

    def __getstate__(self) -> dict[str, Any]:
        """Drop the weights: a data-loading process needs the shapes only."""
        return {**self.__dict__, "_encoder": None}

    def arguments(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a processor's outputs under the names of the encoder's arguments."""
        return self._any_encoder().rename_inputs(dict(outputs))

    def lengths(self, inputs: Mapping[str, Any]) -> list[int]:
        if self._formula_holds and (claimed := self._apply_formula(inputs)) is not None:
            measured = self._measure(inputs)
            if measured is None or measured == TokenCounts(tuple(claimed), sum(claimed)):
                return claimed
            self._formula_holds = False
        counts = self.count(inputs)
        lengths = list(counts.lengths or ())
        rows = {len(value) if isinstance(value, Tensor) and value.dim() > 0 else 0 for value in inputs.values()}
        if counts.lengths is None and len(rows) == 1:  # one item per row: count each on its own
            each = [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(rows.pop())]
            lengths = [self.count(one).total for one in each]
        if sum(lengths) != counts.total:
            raise ConfigError(
                f"{self._name} puts out {counts.total} tokens in one flat tensor, so it is unknown which belong to "
                "which item. Return a list of tensors, one per item, from the postprocess callback, or give "
                "num_feature_calculation_funcs."
            )
        return lengths

    def confirm(self, claimed: Sequence[int], inputs: Mapping[str, Any], source: str) -> None:
        """Refuse the number of tokens per item that `source` claims if the encoder makes another."""
        measured = self._measure(inputs)
        if measured is None:
            return
        found, said, where = measured.total, sum(claimed), "in all"
        # Otherwise an item of the user's may be several of the encoder's (crops of one image): totals are compared.
        if measured.lengths is not None and len(measured.lengths) == len(claimed):
            pairs = zip(measured.lengths, claimed, strict=True)
            item, (found, said) = next(((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), (0, (0, 0)))
            where = f"for item {item}"
        if found == said:
            return
        raise ConfigError(
            f"{source} says {said} tokens {where}, but {self._name} (with its callbacks and projector) makes {found}. "
            f"Return {found}, or leave the function out: with model= the number is found without it."
        )

    def count(self, inputs: Mapping[str, Any]) -> TokenCounts:
        """Return the measured counts; the same geometry is measured once."""
        key = _geometry(inputs)
        if key not in self._known:
            if len(self._known) >= _CACHED_GEOMETRIES:
                del self._known[next(iter(self._known))]
            features = self._infer(inputs) or self._run(inputs)
            lengths = None if features.lengths is None else tuple(features.lengths)
            self._known[key] = TokenCounts(lengths, len(features.tokens))
            shape, n_items = _item_shape(inputs)
            if shape is not None and lengths is not None and len(lengths) == n_items and len(set(lengths)) == 1:
                self._per_item[shape] = lengths[0]
        return self._known[key]

    def _measure(self, inputs: Mapping[str, Any]) -> TokenCounts | None:
        """Return the measured counts, or None if enough geometries have been measured to trust a formula."""
        if len(self._known) >= CHECKED_GEOMETRIES and _geometry(inputs) not in self._known:
            return None
        return self.count(inputs)

    def _any_encoder(self) -> ModalEncoderModule:
        encoder = self._twin if self._twin is not None else self._encoder
        if encoder is None:
            raise ConfigError(
                f"{self._name} cannot be copied, so a processor that was sent to another process cannot ask it how many"
                " tokens it makes. Make the processor in that process, or without model= and with functions."
            )
        return encoder

    def _apply_formula(self, inputs: Mapping[str, Any]) -> list[int] | None:
        module = self._any_encoder().module
        counts = count_patches(module, inputs)
        mask = find_mask(inputs)
        if counts is None and mask is not None:
            counts = count_audio_tokens(module, mask)
            counts = mask.sum(-1).tolist() if counts is None else counts
        if counts is None:  # another number of items of a known shape
            shape, n_items = _item_shape(inputs)
            counts = [self._per_item[shape]] * n_items if shape in self._per_item else None
        return counts

    def _infer(self, inputs: Mapping[str, Any]) -> EncoderFeatures | None:
        """Return the features as shapes, or None if they depend on values."""
        if self._twin is None:
            return None
        dtype = _float_dtype(self._twin)
        shapes = map_tensors(
            lambda t: ShapeTensor.of(t.shape, dtype or t.dtype) if t.is_floating_point() else t.cpu(), dict(inputs)
        )
        try:
            with torch.no_grad(), ShapeInferenceMode():
                return self._twin.features(shapes)
        except Exception:
            return None  # if the cause is the user's mistake, the run of the real encoder raises it again

    def _run(self, inputs: Mapping[str, Any]) -> EncoderFeatures:
        self.runs_encoder = True
        advice = "Give num_feature_calculation_funcs, or make and call the processor before sharding the model."
        if self._encoder is None:
            raise ConfigError(
                f"How many tokens {self._name} makes depends on the values of its inputs, so it must be run, but this "
                f"copy of the processor was sent to another process without the weights. {advice}"
            )
        parameters = list(self._encoder.parameters())
        if is_sharded(self._encoder):  # its forward would wait for the other processes
            raise ConfigError(f"{self._name} must be run to count its tokens, but it is already sharded. {advice}")
        device = parameters[0].device if parameters else torch.device("cpu")
        if device.type != "cpu" and torch.utils.data.get_worker_info() is not None:
            raise ConfigError(
                f"How many tokens {self._name} makes depends on the values of its inputs, so it must be run, but a "
                "data worker cannot use the GPU. Set `data.workers: 0`."
            )
        dtype = _float_dtype(self._encoder)
        moved = map_tensors(lambda t: t.to(device, dtype if t.is_floating_point() else None), dict(inputs))
        try:
            with use_eval_mode(self._encoder):
                return self._encoder.features(moved)
        except ConfigError:
            raise
        except Exception as error:
            given = {k: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for k, v in inputs.items()}
            raise ConfigError(
                f"{self._name} does not take what the processor made ({given}): {type(error).__name__}: {error}"
                f"{_explain_image_size(self._encoder, inputs)}"
            ) from error


def _explain_image_size(encoder: ModalEncoderModule, inputs: Mapping[str, Any]) -> str:
    """Return what to do about images of another size than an encoder's config has; nothing if sizes agree."""
    config = getattr(unwrap(encoder.module), "config", None)
    size, pixels = getattr(config, "image_size", None), inputs.get("pixel_values")
    if not isinstance(size, int) or not isinstance(pixels, Tensor) or pixels.dim() != 4:
        return ""
    if tuple(pixels.shape[-2:]) == (size, size):
        return ""
    found = " × ".join(map(str, pixels.shape[-2:]))
    return f". Its config has image_size = {size}, and the images are {found}: use the processor of this encoder."


def _geometry(inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return everything that the number of tokens depends on: all shapes, and the values of integer tensors."""
    return tuple((name, _signature(inputs[name])) for name in sorted(inputs))


def _item_shape(inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...] | None, int]:
    """Return the common shape of all items and their number; None if the inputs are not one item per row."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 1}
    sizes = {len(tensor) for tensor in tensors.values()}
    if len(tensors) < len(inputs) or len(sizes) != 1 or not all(map(is_float, tensors.values())):
        return None, 0
    return tuple((name, tuple(tensors[name].shape[1:])) for name in sorted(tensors)), sizes.pop()


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        shape = (tuple(value.shape), str(value.dtype))
        if is_float(value):
            return shape
        return (*shape, hashlib.sha1(value.cpu().contiguous().numpy().tobytes()).hexdigest())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(element) for element in value)
    return repr(value)


def _float_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the module's weights, to which a training loop casts the inputs."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
