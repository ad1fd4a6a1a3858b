"""What context parallelism cannot do, found before a step is trained wrongly.

Many architectures mix tokens outside of attention, or look at where a token stands in what they are given. Cut, they
compute something else and say nothing. Names and arguments tell some of them, also on the meta device; a short text,
computed whole and cut, tells the rest.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from cornstarch.attention import MaskSpec, use_mask
from cornstarch.attention.verify import evaluating, logits_tolerance, typical_distance
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.context.modes import too_few_heads

# Layers that hand something from token to token beside attention, by what transformers calls them.
_MIXERS = re.compile(r"linear_attention|recurrent|mamba|conv|ssm|rwkv|lightning|hybrid|sparse|compress|indexed")
_MIXER_PARAMETERS = re.compile(r"(.*\.)?(A_log|dt_bias|conv1d\.weight|time_(decay|mix\w*|first))")


def check_tokens(model: nn.Module, ranks: int, mode: str = "ring_attn") -> None:
    """Refuse what can be told without running the model; it may be on the meta device.

    Args:
        model: A causal language model.
        ranks: How many share each row.
        mode: How they attend, as in `shard_tokens`.
    """
    inner = unwrap(model)
    name = type(inner).__name__
    if not isinstance(inner, PreTrainedModel):
        hint = " Give its language_model." if hasattr(inner, "language_model") else ""
        raise UnsupportedModelError(f"{name} is not a transformers model: its tokens cannot be cut.{hint}")
    if "position_ids" not in inspect.signature(type(inner).forward).parameters:
        raise _refused(name, "its forward takes no position_ids, so each rank would count its tokens from 0")
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(one, "is_prompt_learning", False) for one in adapters.values()):
        raise _refused(name, "its adapter puts tokens of its own in front of every row")
    config: Any = inner.config.get_text_config()
    mixing = [kind for kind in getattr(config, "layer_types", None) or [] if _MIXERS.search(str(kind))]
    if mixing:
        raise _refused(name, f"its layers of the kind {mixing[0]!r} mix tokens beside attention, or choose among them")
    _check_modules(name, inner)
    heads = getattr(config, "num_attention_heads", None)
    if mode == "all_to_all" and isinstance(heads, int) and heads < ranks:
        raise ConfigError(too_few_heads(heads, ranks))


def _check_modules(name: str, inner: nn.Module) -> None:
    for path, module in inner.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
            raise _refused(name, f"{path} ({type(module).__name__}) mixes neighbouring tokens")
    for path, _ in inner.named_parameters():
        if _MIXER_PARAMETERS.fullmatch(path):
            raise _refused(name, f"{path} belongs to a recurrent layer")


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} cannot be cut along its tokens: {reason}. Use it with cp = 1, or take another language model."
    )


def check_positions(inner: nn.Module, positions: Tensor, shares: Sequence[Tensor]) -> None:
    """Refuse rotary embeddings that would be other ones on each rank, because they look at the largest position."""
    config: Any = inner.config.get_text_config()  # type: ignore[operator,union-attr]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    for one in kinds:
        kind = one.get("rope_type", one.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        limit = one.get("original_max_position_embeddings") or config.max_position_embeddings
        longest = [int(positions[..., share].max()) + 1 for share in shares]
        agree = kind == "longrope" and min(longest) > limit
        if max(longest) > limit and not agree:
            raise ConfigError(
                f"{type(inner).__name__} turns its positions by the longest of them beyond {limit} tokens "
                f"({kind} rotary embeddings), and ranks hold positions up to {longest}. Use rows of at most {limit} "
                "tokens, or the distribution zigzag."
            )


def layer_count(inner: nn.Module) -> int:
    """Return how many layers a language model has, by its config; 0 if that is unknown."""
    config: Any = inner.config.get_text_config()  # type: ignore[operator,union-attr]
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(getattr(config, name, None), int):
            return getattr(config, name)
    return 0


# ------------------------------------------------------------------------------------------------ on the model itself


def verify_model(model: nn.Module, whole: Callable[[], AbstractContextManager[None]], group: dist.ProcessGroup) -> None:
    """Compute a short text whole and cut, and refuse the model if they differ on any rank."""
    name = type(unwrap(model)).__name__
    ranks = dist.get_world_size(group)
    try:
        with evaluating(model):
            found = max(_off(model, whole, group, batch, spec) for batch, spec in _texts(model, ranks))
    except UnsupportedModelError as error:
        raise _refused(name, str(error).rstrip(".")) from error
    except ConfigError:
        raise
    except Exception as error:
        raise _refused(name, f"its forward raised {type(error).__name__}: {error}") from error
    most = torch.tensor(found, device=next(model.parameters()).device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    tolerance = logits_tolerance(model, most.device)
    if not float(most) <= tolerance:
        raise _refused(
            name,
            f"cut, it computes something else than whole (relative difference {float(most):.1e}, at most "
            f"{tolerance:.0e} expected): tokens reach one another beside attention, or count from where a rank begins",
        )


def _texts(model: nn.Module, ranks: int) -> list[tuple[dict[str, Tensor], MaskSpec | None]]:
    """Return a plain text; and two documents behind padding, with tokens that see each other in both directions."""
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
    trained[2] = -100  # nothing but padding is before it
    return [(plain, None), ({**plain, **masked, "labels": trained[None]}, spec)]


def _off(
    model: nn.Module,
    whole: Callable[[], AbstractContextManager[None]],
    group: dist.ProcessGroup,
    batch: dict[str, Tensor],
    spec: MaskSpec | None,
) -> float:
    with use_mask(spec):
        with whole():
            expected = model(**batch)
        found = model(**batch)
    loss = found.loss.detach().float().clone()
    dist.all_reduce(loss, group=group)
    keep = found.token_index if spec is None else found.token_index[spec.documents[0, found.token_index] > 0]
    own = torch.isin(found.token_index, keep)
    of_logits = typical_distance(found.logits[0, own], expected.logits[0, keep]) if len(keep) else 0.0
    of_loss = abs(float(loss - expected.loss)) / max(abs(float(expected.loss)), 1e-6)
    return max(of_logits, of_loss) if isfinite(of_logits + of_loss) else inf
