"""A language model's batch, cut along its tokens.

Shape letters: B rows, S tokens of a row, s tokens of this rank.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cornstarch.attention import MaskSpec
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.facts import IGNORED

# Where the tokens are in what a language model may be given.
_TOKENS_AT = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,  # also [3, B, S]: one row of positions per axis of an image
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
}
# Masks over tokens [B, S], and lists of what belongs to the tokens that they mark [marked, D], in reading order.
_MARKED = {"visual_pos_masks": "deepstack_visual_embeds"}


@dataclass(frozen=True)
class Cuttable:
    """What a forward pass was given, sorted."""

    tensors: dict[str, Tensor]
    """Those that have tokens, by name, whole."""
    attention_mask: Tensor | None
    """[B, S]"""
    labels: Tensor | None
    """[B, S]: what each token is to predict, that is, shifted."""
    count: Any
    """What the sum of losses is divided by, if it was given."""
    others: dict[str, Any]
    """What is handed on as it is."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens."""
        first = next(iter(self.tensors.values()))
        return first.shape[0], first.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of the batch."""
        return next(iter(self.tensors.values())).device

    @property
    def positions(self) -> Tensor:
        """Positions of all tokens, as they were given or as models count them: [..., S]."""
        given = self.tensors.get("position_ids")
        return torch.arange(self.shape[1], device=self.device)[None] if given is None else given


def read_batch(named: dict[str, Any], inner: nn.Module) -> Cuttable:
    """Sort what a forward pass was given; refuse what cannot be cut."""
    named = {name: value for name, value in named.items() if value is not None}
    _check_options(named, inner)
    labels, shifted = named.pop("labels", None), named.pop("shift_labels", None)
    mask, count = named.pop("attention_mask", None), named.pop("num_items_in_batch", None)
    order = [name for name in ("input_ids", "inputs_embeds") if name in named]
    if len(order) != 1:
        raise ConfigError("Give a model whose tokens are cut either input_ids or inputs_embeds.")
    tensors = {name: named.pop(name) for name in [*order, *(name for name in _TOKENS_AT if name not in order)]
               if name in named}  # fmt: skip
    rows, tokens = tensors[order[0]].shape[:2]
    for name, value in {**tensors, "labels": labels, "shift_labels": shifted}.items():
        if value is not None and value.shape[_TOKENS_AT.get(name, 1)] != tokens:
            raise ConfigError(f"{name} has shape {list(value.shape)}; the batch has {rows} x {tokens} tokens.")
    if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, tokens)):
        found = f"has shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise ConfigError(
            f"attention_mask {found}: a mask that is cut with the tokens is [batch, tokens] = [{rows}, {tokens}], or a "
            "MaskSpec in use_mask(spec)."
        )
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() > 1 and name not in _MARKED:
            raise UnsupportedModelError(
                f"{type(inner).__name__} was given {name!r} of shape {list(value.shape)}: it is unknown how to cut it "
                "with the tokens. Use the model without context parallelism (cp = 1)."
            )
    if shifted is None and labels is not None:
        shifted = torch.full_like(labels, IGNORED)
        shifted[:, :-1] = labels[:, 1:]
    return Cuttable(tensors, mask, shifted, count, named)


def _check_options(named: dict[str, Any], inner: nn.Module) -> None:
    config: Any = inner.config
    keep = named.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ConfigError(
            "logits_to_keep cannot be used where tokens are cut: each rank has the logits of its "
            "own. To generate without a cache, do it within whole_rows(model)."
        )
    for name, why in (
        ("output_attentions", "no rank has all weights"),
        ("output_router_logits", "the loss of a router needs all tokens of the batch in one place"),
    ):
        if named.get(name, getattr(config, name, False)):
            raise ConfigError(f"{name} = True cannot be used where tokens are cut: {why}. Set it to False.")


def spec_of(inputs: Cuttable, in_use: MaskSpec | None, inner: nn.Module) -> MaskSpec:
    """Return what tokens may see: the mask in use, or causal attention with padding."""
    if in_use is not None:
        if tuple(in_use.documents.shape) != inputs.shape:
            raise ConfigError(
                f"The mask in use is of {list(in_use.documents.shape)} tokens, the batch of {list(inputs.shape)}; "
                "make the mask from the same batch."
            )
        return in_use.to(inputs.device)
    if inputs.attention_mask is not None:
        _check_padding(inputs, inner)
        return MaskSpec.from_padding(inputs.attention_mask.to(inputs.device))
    given = inputs.tensors.get("position_ids")
    if given is not None and given.dim() == 2 and bool((given.diff(dim=1) != 1).any()):
        # transformers takes a jump for the beginning of another document, but only if there is no cache.
        raise ConfigError(
            "position_ids jump, and nothing says what tokens may see: say where documents are, with "
            "use_mask(MaskSpec.from_documents(documents)), or give the attention_mask of a single one."
        )
    documents = torch.ones(inputs.shape, dtype=torch.long, device=inputs.device)
    return MaskSpec.from_documents(documents)


def _check_padding(inputs: Cuttable, inner: nn.Module) -> None:
    mask = inputs.attention_mask
    assert mask is not None
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1] & (mask.cumsum(1)[:, :-1] > 0)).any()):
        raise ConfigError("attention_mask has padding between tokens of a row; put it in front of or behind them all.")
    if "position_ids" not in inputs.tensors and not bool(mask[:, 0].all()):
        raise ConfigError(
            f"Padding stands in front, and {type(inner).__name__} is not told where tokens stand: give position_ids, "
            "or pad on the right."
        )
    if inputs.labels is not None and bool(((inputs.labels != IGNORED) & ~mask.to(inputs.labels.device)).any()):
        raise ConfigError(
            "labels ask padding to predict a token: the first of a text that padding stands in front of, or padding "
            "itself. Set those labels to -100."
        )


def cut_inputs(inputs: Cuttable, spec: MaskSpec, mine: Tensor, signature: inspect.Signature) -> dict[str, Any]:
    """Return what this rank's forward pass is given."""
    cut = {name: value.index_select(_dim(name, value), mine) for name, value in inputs.tensors.items()}
    if "position_ids" not in cut:
        cut["position_ids"] = mine[None].expand(inputs.shape[0], -1)
    # Always given: without it, models look for documents in the positions, which jump where the row is cut.
    cut["attention_mask"] = (spec.documents > 0).long()[:, mine]
    flags = {"use_cache": False} if "use_cache" in signature.parameters else {}
    return {**inputs.others, **flags, **cut, **_cut_marked(inputs.others, mine)}


def _cut_marked(others: dict[str, Any], mine: Tensor) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for name, belonging in _MARKED.items():
        if name in others:
            whole = others[name].bool()
            numbers = whole.flatten().cumsum(0).view_as(whole) - 1
            cut[name] = others[name][:, mine]
            kept = numbers[:, mine][cut[name].bool()]
            cut[belonging] = [one[kept] for one in others.get(belonging) or []]
    return cut


def _dim(name: str, value: Tensor) -> int:
    return _TOKENS_AT[name] % value.dim()
