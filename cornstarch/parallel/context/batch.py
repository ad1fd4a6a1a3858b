"""What a language model with sharded tokens is given, and what it refuses.

Many architectures mix tokens outside of attention, or look at the position of a token within their input. With sharded
tokens they would compute something else without an error. Names and arguments reveal some of them, also on the meta
device; a short text, computed both whole and sharded, reveals the rest.

Shape letters: B rows, S tokens of a row, s tokens of this rank.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.attention import MaskSpec, use_mask
from cornstarch.attention.mask_verification import logits_tolerance, median_distance, use_eval_mode
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.facts import IGNORE_INDEX
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.modes import describe_too_few_heads

# The dim of the tokens in arguments of a language model.
_TOKENS_AT = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,  # also [3, B, S]: one row of positions per axis of an image
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
}
# Masks over tokens [B, S], and lists of tensors for the marked tokens [marked, D], in reading order.
_MARKED = {"visual_pos_masks": "deepstack_visual_embeds"}


@dataclass(frozen=True)
class TokenBatch:
    """The arguments of a forward pass, sorted."""

    tensors: dict[str, Tensor]  # the unsharded tensors with a dim of tokens, by name
    attention_mask: Tensor | None  # [B, S]
    labels: Tensor | None  # [B, S]: the token that each one is to predict, that is, shifted
    count: Any  # the divisor of the sum of losses, if it was given
    others: dict[str, Any]  # arguments that are passed on as they are

    @property
    def shape(self) -> tuple[int, int]:
        first = next(iter(self.tensors.values()))
        return first.shape[0], first.shape[1]

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    @property
    def positions(self) -> Tensor:
        """The positions of all tokens, given or counted from 0: [..., S]."""
        given = self.tensors.get("position_ids")
        return torch.arange(self.shape[1], device=self.device)[None] if given is None else given


def read_batch(named: dict[str, Any], inner: nn.Module) -> TokenBatch:
    """Sort the arguments of a forward pass; refuse those that cannot be sharded."""
    named = {name: value for name, value in named.items() if value is not None}
    keep = named.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ConfigError(
            "logits_to_keep cannot be used where tokens are cut: each rank has the logits of its "
            "own. To generate without a cache, do it within use_whole_rows(model)."
        )
    for name, why in (
        ("output_attentions", "no rank has all weights"),
        ("output_router_logits", "the loss of a router needs all tokens of the batch in one place"),
    ):
        if named.get(name, getattr(inner.config, name, False)):
            raise ConfigError(f"{name} = True cannot be used where tokens are cut: {why}. Set it to False.")
    labels, shifted = named.pop("labels", None), named.pop("shift_labels", None)
    mask, count = named.pop("attention_mask", None), named.pop("num_items_in_batch", None)
    order = [name for name in ("input_ids", "inputs_embeds") if name in named]
    if len(order) != 1:
        raise ConfigError("Give a model whose tokens are cut either input_ids or inputs_embeds.")
    tensors = {name: named.pop(name) for name in dict.fromkeys([*order, *_TOKENS_AT]) if name in named}
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
        shifted = torch.full_like(labels, IGNORE_INDEX)
        shifted[:, :-1] = labels[:, 1:]
    return TokenBatch(tensors, mask, shifted, count, named)


def build_mask_spec(inputs: TokenBatch, in_use: MaskSpec | None, inner: nn.Module) -> MaskSpec:
    """Return the mask in use, or a causal one with padding."""
    if in_use is not None:
        if tuple(in_use.documents.shape) != inputs.shape:
            raise ConfigError(
                f"The mask in use is of {list(in_use.documents.shape)} tokens, the batch of {list(inputs.shape)}; "
                "make the mask from the same batch."
            )
        return in_use.to(inputs.device)
    if inputs.attention_mask is not None:
        mask, labels = inputs.attention_mask.bool(), inputs.labels
        if bool((mask[:, 1:] & ~mask[:, :-1] & (mask.cumsum(1)[:, :-1] > 0)).any()):
            raise ConfigError(
                "attention_mask has padding between tokens of a row; put it in front of or behind them all."
            )
        if "position_ids" not in inputs.tensors and not bool(mask[:, 0].all()):
            raise ConfigError(
                f"Padding stands in front, and {type(inner).__name__} is not told where tokens stand: give "
                "position_ids, or pad on the right."
            )
        if labels is not None and bool(((labels != IGNORE_INDEX) & ~mask.to(labels.device)).any()):
            raise ConfigError(
                "labels ask padding to predict a token: the first of a text that padding stands in front of, or "
                "padding itself. Set those labels to -100."
            )
        return MaskSpec.from_padding(inputs.attention_mask.to(inputs.device))
    given = inputs.tensors.get("position_ids")
    if given is not None and given.dim() == 2 and bool((given.diff(dim=1) != 1).any()):
        # transformers takes a jump as the beginning of another document, but only without a cache.
        raise ConfigError(
            "position_ids jump, and nothing says what tokens may see: say where documents are, with "
            "use_mask(MaskSpec.from_documents(documents)), or give the attention_mask of a single one."
        )
    return MaskSpec.from_documents(torch.ones(inputs.shape, dtype=torch.long, device=inputs.device))


def select_inputs(inputs: TokenBatch, spec: MaskSpec, mine: Tensor, signature: inspect.Signature) -> dict[str, Any]:
    cut = {name: value.index_select(_TOKENS_AT[name] % value.dim(), mine) for name, value in inputs.tensors.items()}
    if "position_ids" not in cut:
        cut["position_ids"] = mine[None].expand(inputs.shape[0], -1)
    # Always passed: without it, models look for documents in the positions, which jump where the row is sharded.
    cut["attention_mask"] = (spec.documents > 0).long()[:, mine]
    flags = {"use_cache": False} if "use_cache" in signature.parameters else {}
    marked: dict[str, Any] = {}
    for name, belonging in _MARKED.items():
        if name in inputs.others:
            whole = inputs.others[name].bool()
            numbers = whole.flatten().cumsum(0).view_as(whole) - 1
            marked[name] = inputs.others[name][:, mine]
            kept = numbers[:, mine][marked[name].bool()]
            marked[belonging] = [one[kept] for one in inputs.others.get(belonging) or []]
    return {**inputs.others, **flags, **cut, **marked}


# Layers that pass information from token to token outside of attention, by transformers' names.
_MIXERS = re.compile(r"linear_attention|recurrent|mamba|conv|ssm|rwkv|lightning|hybrid|sparse|compress|indexed")
_MIXER_PARAMETERS = re.compile(r"(.*\.)?(A_log|dt_bias|conv1d\.weight|time_(decay|mix\w*|first))")


def check_tokens(model: nn.Module, ranks: int, mode: str = "ring_attn") -> None:
    """Refuse a model, on any device, whose tokens cannot be sharded over `ranks` ranks by a mode of `shard_tokens`."""
    inner = unwrap(model)
    name = type(inner).__name__
    if not isinstance(inner, PreTrainedModel):
        hint = " Give its language_model." if hasattr(inner, "language_model") else ""
        raise UnsupportedModelError(f"{name} is not a transformers model: its tokens cannot be cut.{hint}")
    if "position_ids" not in inspect.signature(type(inner).forward).parameters:
        raise _build_refusal(name, "its forward takes no position_ids, so each rank would count its tokens from 0")
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(one, "is_prompt_learning", False) for one in adapters.values()):
        raise _build_refusal(name, "its adapter puts tokens of its own in front of every row")
    config: Any = inner.config.get_text_config()
    mixing = [kind for kind in getattr(config, "layer_types", None) or [] if _MIXERS.search(str(kind))]
    if mixing:
        why = f"its layers of the kind {mixing[0]!r} mix tokens beside attention, or choose among them"
        raise _build_refusal(name, why)
    for path, module in inner.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
            raise _build_refusal(name, f"{path} ({type(module).__name__}) mixes neighbouring tokens")
    for path, _ in inner.named_parameters():
        if _MIXER_PARAMETERS.fullmatch(path):
            raise _build_refusal(name, f"{path} belongs to a recurrent layer")
    heads = getattr(config, "num_attention_heads", None)
    if mode == "all_to_all" and isinstance(heads, int) and heads < ranks:
        raise ConfigError(describe_too_few_heads(heads, ranks))


def _build_refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} cannot be cut along its tokens: {reason}. Use it with cp = 1, or take another language model."
    )


def check_positions(inner: nn.Module, positions: Tensor, shards: Sequence[Tensor]) -> None:
    """Refuse rotary embeddings that depend on the largest position, which differs between ranks."""
    config: Any = inner.config.get_text_config()  # type: ignore[operator,union-attr]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    for one in kinds:
        kind = one.get("rope_type", one.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        limit = one.get("original_max_position_embeddings") or config.max_position_embeddings
        longest = [int(positions[..., shard].max()) + 1 for shard in shards]
        agree = kind == "longrope" and min(longest) > limit
        if max(longest) > limit and not agree:
            raise ConfigError(
                f"{type(inner).__name__} turns its positions by the longest of them beyond {limit} tokens "
                f"({kind} rotary embeddings), and ranks hold positions up to {longest}. Use rows of at most {limit} "
                "tokens, or the distribution zigzag."
            )


def count_layers(inner: nn.Module) -> int:
    """Return the number of layers of a language model, by its config; 0 if it is unknown."""
    config: Any = inner.config.get_text_config()  # type: ignore[operator,union-attr]
    numbers = (getattr(config, name, None) for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    return next((number for number in numbers if isinstance(number, int)), 0)


def verify_model(model: nn.Module, whole: Callable[[], AbstractContextManager[None]], group: dist.ProcessGroup) -> None:
    """Compute a short text whole and sharded, and refuse the model if the results differ on any rank."""
    name = type(unwrap(model)).__name__

    def measure_difference(batch: dict[str, Tensor], spec: MaskSpec | None) -> float:
        with use_mask(spec):
            with whole():
                expected = model(**batch)
            found = model(**batch)
        loss = found.loss.detach().float().clone()
        dist.all_reduce(loss, group=group)
        keep = found.token_index if spec is None else found.token_index[spec.documents[0, found.token_index] > 0]
        own = torch.isin(found.token_index, keep)
        of_logits = median_distance(found.logits[0, own], expected.logits[0, keep]) if len(keep) else 0.0
        of_loss = abs(float(loss - expected.loss)) / max(abs(float(expected.loss)), 1e-6)
        return max(of_logits, of_loss) if isfinite(of_logits + of_loss) else inf

    try:
        with use_eval_mode(model):
            found = max(measure_difference(*text) for text in _build_texts(model, dist.get_world_size(group)))
    except UnsupportedModelError as error:
        raise _build_refusal(name, str(error).rstrip(".")) from error
    except ConfigError:
        raise
    except Exception as error:
        raise _build_refusal(name, f"its forward raised {type(error).__name__}: {error}") from error
    most = torch.tensor(found, device=next(model.parameters()).device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    tolerance = logits_tolerance(model, most.device)
    if not float(most) <= tolerance:
        raise _build_refusal(
            name,
            f"cut, it computes something else than whole (relative difference {float(most):.1e}, at most "
            f"{tolerance:.0e} expected): tokens reach one another beside attention, or count from where a rank begins",
        )


def _build_texts(model: nn.Module, ranks: int) -> list[tuple[dict[str, Tensor], MaskSpec | None]]:
    """Return a plain text; and two documents behind padding, with a span of bidirectional attention."""
    inner: Any = unwrap(model)
    table: Tensor = inner.get_input_embeddings().weight
    words = min(int(table.shape[0]), getattr(inner.config.get_text_config(), "vocab_size", None) or table.shape[0])
    tokens = 2 * ranks + 9
    ids = (torch.arange(tokens, device=table.device) * 7 + 3) % max(words - 1, 1)
    documents = torch.ones_like(ids)
    documents[:2], documents[tokens // 2 :] = 0, 2
    spans = torch.full_like(ids, -1)
    spans[-5:-1] = 0
    spec = MaskSpec(documents[None], spans[None])
    masked = {"attention_mask": (documents > 0).long()[None], "position_ids": spec.positions()}
    plain = {"input_ids": ids[None], "labels": ids[None]}
    trained = ids.masked_fill(documents == 0, -100)
    trained[2] = -100  # only padding is in front of it
    return [(plain, None), ({**plain, **masked, "labels": trained[None]}, spec)]
