"""Which layers of a model are sharded over ranks, and how: decided before any process group exists, on any device.

A region is a part of a model that is sharded as a unit. It begins with layers sharded by their outputs and ends with
one sharded by its inputs; full activations go in and come out. Between them everything works on one rank's heads or
channels, so every parameter must be accounted for: one without a rule would train wrongly without an error. A region
with such a parameter is not sharded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.unwrap import unwrap
from cornstarch.parallel.tensor import styles
from cornstarch.parallel.tensor.styles import Style, count_heads, get_head_width


class NotShardable(Exception):
    """A region cannot be sharded; the text says why."""


@dataclass
class Region:
    """A part of a model that is sharded as a unit."""

    owner: str  # the name of the module that it is in
    styles: dict[str, Style] = field(default_factory=dict)  # by name inside the owner
    attention: str | None = None  # of attention: the module inside the owner that has the numbers of heads
    heads: int = 0
    key_value_heads: int = 0
    width: int = 0  # of attention: the channels of all heads together
    shared: tuple[str, ...] = ()
    """Layers of keys and values; if there are more ranks than such heads, they are replicated."""
    must_divide: dict[str, int] = field(default_factory=dict)
    """Numbers that the number of ranks must divide, beside heads, by description."""

    def misfits(self, ranks: int) -> list[str]:
        """Return the numbers that this number of ranks does not divide, with descriptions."""
        found = [f"{number} {what}" for what, number in self.must_divide.items() if number % ranks]
        if self.heads % ranks:
            found.append(f"{self.heads} attention heads")
        if self.key_value_heads % ranks and not (self.shared and ranks % self.key_value_heads == 0):
            found.append(f"{self.key_value_heads} key and value heads")
        return found

    @property
    def full_names(self) -> dict[str, Style]:
        return {".".join(filter(None, (self.owner, key))): style for key, style in self.styles.items()}


_PLAIN = {"Linear", "NonDynamicallyQuantizableLinear", "FalconLinear"}


def get_child(module: nn.Module, path: str) -> nn.Module | None:
    found: Any = module
    for name in path.split("."):
        found = found._modules.get(name) if isinstance(found, nn.Module) else None
    return found


def get_linear(module: nn.Module, path: str) -> nn.Linear | Conv1D | None:
    """Return a module inside if it is a plain linear layer; with adapters around it, the layer inside them."""
    child = get_child(module, path)
    base = getattr(child, "base_layer", child)
    if isinstance(base, Conv1D) or (isinstance(base, nn.Linear) and type(base).__name__ in _PLAIN):
        return base
    return None


def get_widths(module: nn.Module, path: str) -> tuple[int, int]:
    """Return the number of inputs and of outputs of a linear layer inside a module."""
    layer = get_linear(module, path)
    assert layer is not None, path
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _find_experts(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    """Find experts whose weights are stacked: [experts, out, in], or [experts, in, out]."""
    stacked = {key: one for key, one in module._parameters.items() if one is not None and one.ndim == 3}
    into = next((key for key in ("gate_up_proj", "up_proj") if key in stacked), None)
    if into is None or "down_proj" not in stacked:
        return None
    wide, narrow = stacked[into], stacked["down_proj"]
    is_fused = into == "gate_up_proj"
    times = 2 if is_fused else 1
    if wide.shape[1] == times * narrow.shape[2] and wide.shape[2] == narrow.shape[1]:
        dim, inner = 1, narrow.shape[2]
    elif wide.shape[2] == times * narrow.shape[1] and wide.shape[1] == narrow.shape[2]:
        dim, inner = 2, narrow.shape[1]
    else:
        raise NotShardable(f"the shapes of {into} and down_proj are not those of experts")
    # Where gate and value alternate (GPT-OSS), plain shards keep them together, and nothing is fused.
    parts = (inner, inner) if is_fused and getattr(module, "is_concatenated", True) else ()
    found = {
        "": Style("experts"),
        into: Style("expert", parts, dim),
        "down_proj": Style("expert", (), 3 - dim),
        f"{into}_bias": Style("expert", parts, 1),
        "down_proj_bias": Style("expert_bias"),
    }
    there = {key for key, _ in module.named_parameters()}
    others = [key for key, part in module.named_children() if not key.startswith("act")]
    if there - found.keys() or others:
        names = [*sorted(there - found.keys()), *others]
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise NotShardable(f"its experts have {listed} beside their weights")
    region = Region(name, {key: style for key, style in found.items() if key in there or not key})
    region.must_divide["channels of an expert"] = inner
    return region


def _find_attention(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    into = _find_queries(module)
    out = next((key for key in styles.ATTENTION_OUT if get_linear(module, key) is not None), None)
    if not into or out is None or out in into:
        return None
    region = Region(name, {out: Style("row")}, attention=into[0].rpartition(".")[0])
    region.width = get_widths(module, out)[0]
    counting = get_child(module, region.attention) if region.attention else module
    assert counting is not None
    if type(counting).__name__ in styles.UNSUPPORTED_ATTENTION:
        raise NotShardable(styles.UNSUPPORTED_ATTENTION[type(counting).__name__])
    if styles.has_slopes(counting, config):
        raise NotShardable("its attention has slopes per head (ALiBi) that are made elsewhere")
    if styles.shapes_by_input(counting):
        raise NotShardable("its attention shapes the output of the heads by the width of the input")
    # Single layers may differ from the model's config.
    region.heads, region.key_value_heads = count_heads(counting, config)
    width = get_head_width(counting)
    if not region.heads or not (width or styles.has_head_count(counting)):
        raise NotShardable("it does not say how many attention heads it has")
    if set(into) & {*styles.LOW_RANK, *styles.BY_HEAD}:
        region.key_value_heads = region.heads
    elif len(into) > 1 and width:
        region.key_value_heads = get_widths(module, into[1])[1] // width
    if into[0] in styles.BY_HEAD and get_widths(module, into[0])[1] != 3 * region.width:
        raise NotShardable(f"it is not known in which order {into[0]} holds queries, keys and values")
    for key in into:
        is_fused = key in styles.FUSED
        region.styles[key] = _build_fused_style(module, key, region, counting) if is_fused else Style("column")
    if len(into) > 1 and not set(into) & set(styles.LOW_RANK):
        region.shared = into[1:]
    for key, style in said.items():  # gates and other layers that only the model's own plan knows
        if key not in region.styles and style == Style("column") and get_linear(module, key) is not None:
            region.styles[key] = style
    _check_heads(module, region, counting)
    queries = region.styles[into[0]].parts or (get_widths(module, into[0])[1],)
    _assign_other_styles(module, region, width or queries[0] // region.heads, config)
    return region


def _find_queries(module: nn.Module) -> tuple[str, ...]:
    """Return the layers of queries, keys and values, in this order."""
    if get_linear(module, "kv_b_proj") is not None:
        there: tuple[str, ...] = ("q_b_proj" if get_child(module, "q_b_proj") is not None else "q_proj", "kv_b_proj")
        return there if all(get_linear(module, key) is not None for key in there) else ()
    for keys in styles.SEPARATE:
        there = tuple(key for key in keys if get_child(module, key) is not None)
        if keys[0] in there and keys[1] in there:
            return there if all(get_linear(module, key) is not None for key in there) else ()
    for key in (*styles.FUSED, *styles.BY_HEAD):
        if get_linear(module, key) is not None:
            return (key,)
    return ()


def _build_fused_style(module: nn.Module, key: str, region: Region, counting: nn.Module) -> Style:
    if key == "c_attn" and not isinstance(get_linear(module, key), Conv1D):
        raise NotShardable("it is not known in which order its fused projection holds queries, keys and values")
    outputs = get_widths(module, key)[1]
    parts = region.heads + 2 * region.key_value_heads
    if outputs % parts:
        raise NotShardable(f"{outputs} outputs of {key} are not {parts} heads")
    width = outputs // parts
    named = get_head_width(counting)
    if named not in (0, width):
        raise NotShardable(f"{outputs} outputs of {key} are not {parts} heads of {named}")
    return Style("column", (region.heads * width, *[region.key_value_heads * width] * 2))


def _check_heads(module: nn.Module, region: Region, counting: nn.Module) -> None:
    for key, style in region.styles.items():
        across = get_widths(module, key)[0 if style.kind == "row" else 1]
        heads = region.key_value_heads if key in region.shared else region.heads
        if not heads or across % heads:
            raise NotShardable(f"{across} channels of {key} are not {heads} heads")
    groups = getattr(counting, "num_key_value_groups", None)
    if isinstance(groups, int) and groups != region.heads // region.key_value_heads:
        pairs = region.key_value_heads
        raise NotShardable(f"{region.heads} heads and {pairs} of keys and values are not groups of {groups}")


def _assign_other_styles(module: nn.Module, region: Region, width: int, config: Any) -> None:
    """Give every other parameter of an attention module a style, or raise."""
    for name, parameter in module.named_parameters():
        if any(name.startswith(f"{key}.") for key in region.styles) or _is_around(name, region):
            continue
        where = name.rpartition(".")[0]
        short = name.removeprefix(f"{region.attention}.") if region.attention else name
        norm_heads = region.heads if where.startswith("q") else region.key_value_heads
        if where in styles.BEFORE_LOW_RANK and set(styles.LOW_RANK) & region.styles.keys():
            if where == "kv_a_proj_with_mqa":
                region.styles[where] = Style("rotary_keys", (config.qk_rope_head_dim,))
        elif where in styles.HEAD_NORMS and parameter.numel() == width:
            region.styles[where] = Style("partial")
        elif where in styles.HEAD_NORMS and parameter.shape == (norm_heads, width):
            region.styles[name] = Style("heads", (norm_heads,), 0)
        elif short in styles.PER_HEAD and parameter.shape[styles.PER_HEAD[short]] == region.heads:
            region.styles[name] = Style("heads", (region.heads,), styles.PER_HEAD[short])
        else:
            raise NotShardable(f"no rule says how its {name} is cut")


def _is_around(name: str, region: Region) -> bool:
    """Return whether a parameter is of a norm around layers that are in modules of their own (as in BERT)."""
    out = next(key for key, style in region.styles.items() if style.kind == "row")
    where = out.rpartition(".")[0]
    is_norm = "norm" in name.lower() or name.partition(".")[0] == "ln"
    return bool(where) and is_norm and (name.startswith(f"{where}.") or name.count(".") == 1)


def _find_feed_forward(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    known = [(*names, 1) for names in styles.FEED_FORWARD] + [(*names, 2) for names in styles.FEED_FORWARD_FUSED]
    found = [one for one in known if all(get_linear(module, key) is not None for key in (*one[0], one[1]))]
    if not found:
        return None
    into, out, times = found[0]
    if not _is_layer(module) and (across := styles.looks_across_channels(module)):
        raise NotShardable(f"its feed-forward layer computes `{across}` over all channels")
    inner, hidden = get_widths(module, out)
    for key in into:
        if (outputs := get_widths(module, key)[1]) != times * inner:
            raise NotShardable(f"{key} has {outputs} outputs and {out} {inner} inputs")
    region = Region(name, {key: Style("column", (inner,) * times if times > 1 else ()) for key in into})
    region.styles[out] = Style("row")
    region.must_divide["channels of a feed-forward layer"] = inner
    scopes = {key.partition(".")[0] for key in (*into, out) if "." in key}
    for key, parameter in module.named_parameters():
        if any(key.startswith(f"{cut}.") for cut in region.styles) or _is_around(key, region):
            continue
        if scopes and key.partition(".")[0] not in scopes:
            continue
        if parameter.numel() == 1 and key.startswith("act"):  # a learned number in the activation function
            region.styles[key.rpartition(".")[0]] = Style("partial")
            continue
        # In a transformer layer, a norm may work between its feed-forward layers.
        is_inner = parameter.shape[-1:] == (inner,) and inner != hidden and key.count(".") == 1
        is_inner |= any(word in key.lower() for word in ("ffn_layernorm", "ffn_norm", "inner_norm", "mid_norm"))
        if not _is_layer(module) or (not scopes and is_inner):
            raise NotShardable(f"no rule says how its {key} is cut")
    return region


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is a whole transformer layer, with feed-forward layers directly in it."""
    return isinstance(module, GradientCheckpointingLayer) or any("att" in key for key, _ in module.named_children())


def _find_planned(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    """Find layers of other names, which only a plan knows."""
    there = {key: style for key, style in said.items() if not style.whole and get_child(module, key) is not None}
    region = Region(name, there)
    linear = {key: style for key, style in region.styles.items() if style.kind in ("column", "row")}
    if {style.kind for style in linear.values()} != {"column", "row"}:
        return None
    for key, style in linear.items():
        if get_linear(module, key) is None:
            raise NotShardable(f"{key} is no linear layer")
        is_row = style.kind == "row"
        for size in style.parts or (get_widths(module, key)[0 if is_row else 1],):
            region.must_divide[f"{'inputs' if is_row else 'outputs'} of {key}"] = size
    for key, _ in module.named_parameters():
        if not any(key.startswith(f"{cut}.") for cut in region.styles):
            raise NotShardable(f"no rule says how its {key} is cut")
    heads, region.key_value_heads = count_heads(module, None)
    if heads:
        region.heads, region.attention = heads, ""
        region.width = next(get_widths(module, key)[0] for key, style in linear.items() if style.kind == "row")
    return region


_FINDERS = (_find_experts, _find_attention, _find_feed_forward, _find_planned)  # all but the first look at children


class TensorPlan:
    """The sharded regions of a model, and the modules that are not, with the reason; `own` is the model's own plan."""

    def __init__(self, model: nn.Module, own: Mapping[str, Style]) -> None:
        self.regions: list[Region] = []
        self.whole: dict[str, str] = {}
        taken: set[str] = set()
        config: Any = getattr(model, "config", None)  # its text config has the numbers of heads where a module does not
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        stated: dict[str, dict[str, Style]] = {}
        for name, style in own.items():
            owner, _, key = name.rpartition(".")
            stated.setdefault(owner, {})[key] = style
        for owner, module in model.named_modules():
            said, is_found = stated.get(owner, {}), False
            for find in _FINDERS if module._modules else _FINDERS[:1]:
                try:
                    region = None if is_found and find is _find_planned else find(module, owner, said, config)
                except NotShardable as reason:
                    is_found, region = True, None
                    self.whole[owner] = str(reason)
                is_found |= region is not None
                if region is not None and not taken & region.full_names.keys():
                    taken |= region.full_names.keys()
                    self.regions.append(region)
        for name, style in own.items():
            # Layers in a region are sharded with it. Of those that no region took, a single one becomes a region if
            # full activations go in and come out.
            is_single = style.whole and get_linear(model, name) is not None and name.split(".")[-1] != "lm_head"
            if is_single and name not in taken:
                owner, _, key = name.rpartition(".")
                inputs, outputs = get_widths(model, name)
                must_divide = {"outputs": outputs} if style.kind == "column" else {"inputs": inputs}
                self.regions.append(Region(owner, {key: style}, must_divide=must_divide))

    @property
    def styles(self) -> dict[str, Style]:
        """The style of each layer or parameter, by full name."""
        return {name: style for region in self.regions for name, style in region.full_names.items()}


def plan_regions(model: nn.Module, plan: Mapping[str, Style | str] | None = None) -> TensorPlan:
    """Return the sharded regions of a model; raise `UnsupportedModelError` if there are none."""
    inner = unwrap(model)
    if plan is not None:
        _check_names(inner, plan)
    shipped = getattr(inner, "tp_plan", None)
    default: Mapping[str, Style | str] = shipped if isinstance(shipped, Mapping) else {}
    stated = plan if plan is not None else default
    own: dict[str, Style] = {}
    for name, _ in inner.named_modules():
        said = stated.get(name, stated.get(_hide_numbers(name)))
        if (style := styles.ALIASES.get(said) if isinstance(said, str) else said) is not None:
            own[name] = style
    found = TensorPlan(inner, own)
    for name, style in own.items() if plan is not None else ():  # refuse what cannot be sharded as the user says
        if found.styles.get(name, style).kind != style.kind or name not in found.styles:
            owner = name.rpartition(".")[0]
            why = found.whole.get(owner, "a region needs a column and a row, with nothing unknown between them")
            kind = type(inner).__name__
            raise ConfigError(f"The plan cuts {name} of {kind} as a {style.kind}, which cannot be: {why}.")
    if not found.regions:
        reasons = sorted({f"{owner or 'it'}: {reason}" for owner, reason in found.whole.items()})
        why = f" ({reasons[0]})" if reasons else ""
        raise UnsupportedModelError(
            f"{type(inner).__name__} has no layer that tensor parallelism knows how to cut{why}. Leave `tp` at 1, or "
            "give a plan that names its layers."
        )
    return found


def tensor_plan(model: nn.Module) -> dict[str, Style]:
    """Return the style of each layer or parameter of a model by name; others are not sharded."""
    return plan_regions(model).styles


def find_unsharded_modules(model: nn.Module) -> dict[str, str]:
    """Return the modules that look like a region but are not sharded, and why."""
    return plan_regions(model).whole


def _hide_numbers(name: str) -> str:
    """Return a module's name with `*` in place of layer numbers, as plans have it."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _check_names(model: nn.Module, plan: Mapping[str, Style | str]) -> None:
    """Refuse a user's plan with unknown names or styles."""
    there = {spelling for name, _ in model.named_modules() for spelling in (name, _hide_numbers(name))}
    for name, style in plan.items():
        if isinstance(style, str) and style not in styles.ALIASES:
            known = ", ".join(sorted(styles.ALIASES))
            raise ConfigError(f"{name}: {style} is no way to cut a layer; known are {known}.")
        if name not in there:
            raise ConfigError(f"{name} is in the plan, and {type(model).__name__} has no such module.")
