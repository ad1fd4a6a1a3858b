"""Regions: the parts of a model that can be cut as a whole.

A region begins with layers cut by their outputs and ends with one cut by its inputs; whole activations go in and come
out. Between them everything works on one rank's heads or channels, so everything must be accounted for: a parameter
that no rule speaks of would train wrongly without a sound. A region with such a parameter is left whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from cornstarch.parallel.tensor.reading import (
    count_heads,
    has_slopes,
    head_width,
    looks_across_channels,
    says_heads,
    shapes_by_input,
)
from cornstarch.parallel.tensor.styles import (
    APART,
    ATTENTION_OUT,
    BEFORE_LOW_RANK,
    BY_HEAD,
    FEED_FORWARD,
    FEED_FORWARD_FUSED,
    FUSED,
    HEAD_NORMS,
    LOW_RANK,
    OTHERWISE,
    PER_HEAD,
    Style,
)


class Unfit(Exception):
    """A region cannot be cut; the text says why."""


@dataclass
class Region:
    """A part of a model that is cut."""

    owner: str
    """The module that it is in."""
    styles: dict[str, Style] = field(default_factory=dict)
    """By name inside the owner."""
    attention: str | None = None
    """Of attention: the module inside the owner that counts heads."""
    heads: int = 0
    key_value_heads: int = 0
    width: int = 0
    """Of attention: the channels of all heads together."""
    shared: tuple[str, ...] = ()
    """Layers of keys and values; if there are more ranks than such heads, ranks share them."""
    must_divide: dict[str, int] = field(default_factory=dict)
    """What the number of ranks must divide, beside heads: what it is, and the number."""

    def fits(self, ranks: int) -> bool:
        """Say whether it can be cut over so many ranks."""
        return not self.misfits(ranks)

    def misfits(self, ranks: int) -> list[str]:
        """Return what cannot be cut over so many ranks."""
        found = [f"{number} {what}" for what, number in self.must_divide.items() if number % ranks]
        if self.heads % ranks:
            found.append(f"{self.heads} attention heads")
        if self.key_value_heads % ranks and not (self.shared and ranks % self.key_value_heads == 0):
            found.append(f"{self.key_value_heads} key and value heads")
        return found


def child(module: nn.Module, path: str) -> nn.Module | None:
    """Return a module inside, or None."""
    found: Any = module
    for name in path.split("."):
        found = found._modules.get(name) if isinstance(found, nn.Module) else None
    return found


def linear(module: nn.Module | None) -> nn.Linear | Conv1D | None:
    """Return a module if it is a linear layer and no more; of one with adapters, the layer inside."""
    base = getattr(module, "base_layer", module)
    if isinstance(base, Conv1D) or (isinstance(base, nn.Linear) and type(base).__name__ in _PLAIN):
        return base
    return None


_PLAIN = {"Linear", "NonDynamicallyQuantizableLinear", "FalconLinear"}


def widths(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """Return the number of inputs and of outputs."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


# ------------------------------------------------------------------------------------------------ finding


def find_regions(
    model: nn.Module, own: Mapping[str, Style], config: Any
) -> Iterator[tuple[str, Region | None, str | None]]:
    """Yield (owner, region, None), or (owner, None, why not), for everything that looks like a region.

    Args:
        model: The model.
        own: What the model's own plan says, by full name.
        config: The model's config, which counts heads where a module does not.
    """
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        said = {key.removeprefix(prefix): style for key, style in own.items() if key.rpartition(".")[0] == name}
        found = False
        for find in (_experts, _attention, _feed_forward, _planned):
            try:
                region = None if found and find is _planned else find(module, name, said, config)
            except Unfit as reason:
                found = True
                yield name, None, str(reason)
            else:
                if region is not None:
                    found = True
                    yield name, region, None


def _experts(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    """Experts whose weights are stacked: [experts, out, in], or [experts, in, out]."""
    into = next((key for key in ("gate_up_proj", "up_proj") if _ndim(module, key) == 3), None)
    if into is None or _ndim(module, "down_proj") != 3:
        return None
    wide, narrow = module._parameters[into], module._parameters["down_proj"]
    assert wide is not None and narrow is not None
    is_fused = into == "gate_up_proj"
    times = 2 if is_fused else 1
    if wide.shape[1] == times * narrow.shape[2] and wide.shape[2] == narrow.shape[1]:
        dim, inner = 1, narrow.shape[2]
    elif wide.shape[2] == times * narrow.shape[1] and wide.shape[1] == narrow.shape[2]:
        dim, inner = 2, narrow.shape[1]
    else:
        raise Unfit(f"the shapes of {into} and down_proj are not those of experts")
    # Where gate and value alternate (GPT-OSS), neighbours stay together and nothing is fused.
    parts = (inner, inner) if is_fused and getattr(module, "is_concatenated", True) else ()
    styles = {
        "": Style("experts"),
        into: Style("expert", parts, dim),
        "down_proj": Style("expert", (), 3 - dim),
        f"{into}_bias": Style("expert", parts, 1),
        "down_proj_bias": Style("expert_bias"),
    }
    there = {key for key, _ in module.named_parameters()}
    others = [key for key, part in module.named_children() if not key.startswith("act")]
    if there - styles.keys() or others:
        raise Unfit(f"its experts have {_listed([*sorted(there - styles.keys()), *others])} beside their weights")
    region = Region(name, {key: style for key, style in styles.items() if key in there or not key})
    region.must_divide["channels of an expert"] = inner
    return region


def _ndim(module: nn.Module, name: str) -> int:
    parameter = module._parameters.get(name)
    return 0 if parameter is None else parameter.ndim


def _attention(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    into = _queries(module)
    out = next((key for key in ATTENTION_OUT if linear(child(module, key)) is not None), None)
    if not into or out is None or out in into:
        return None
    region = Region(name, {out: Style("row")}, attention=into[0].rpartition(".")[0])
    region.width = widths(linear(child(module, out)))[0]  # type: ignore[arg-type]
    counting = child(module, region.attention) if region.attention else module
    assert counting is not None
    _check_code(counting, config)
    _count(module, region, counting, into, config)
    for key in into:
        region.styles[key] = _fused(module, key, region, counting) if key in FUSED else Style("column")
    if len(into) > 1 and not set(into) & set(LOW_RANK):
        region.shared = into[1:]
    for key, style in said.items():  # gates and the like, which only the model's own plan knows
        if key not in region.styles and style == Style("column") and linear(child(module, key)) is not None:
            region.styles[key] = style
    _check_heads(module, region, counting)
    _account(module, region, head_width(counting) or _query_width(module, into[0], region), config)
    return region


def _check_code(module: nn.Module, config: Any) -> None:
    if type(module).__name__ in OTHERWISE:
        raise Unfit(OTHERWISE[type(module).__name__])
    if has_slopes(module, config):
        raise Unfit("its attention has slopes per head (ALiBi) that are made elsewhere")
    if shapes_by_input(module):
        raise Unfit("its attention shapes the output of the heads by the width of the input")


def _count(module: nn.Module, region: Region, counting: nn.Module, into: tuple[str, ...], config: Any) -> None:
    """Find out how many heads there are; layers may differ from what the config says of the model."""
    region.heads, region.key_value_heads = count_heads(counting, config)
    width = head_width(counting)
    if not region.heads or not (width or says_heads(counting)):
        raise Unfit("it does not say how many attention heads it has")
    if set(into) & {*LOW_RANK, *BY_HEAD}:
        region.key_value_heads = region.heads
    elif len(into) > 1 and width:
        region.key_value_heads = widths(linear(child(module, into[1])))[1] // width  # type: ignore[arg-type]
    if into[0] in BY_HEAD and widths(linear(child(module, into[0])))[1] != 3 * region.width:  # type: ignore[arg-type]
        raise Unfit(f"it is not known in which order {into[0]} holds queries, keys and values")


def _queries(module: nn.Module) -> tuple[str, ...]:
    """Return the layers that make queries, keys and values, the one of queries first."""
    if linear(child(module, "kv_b_proj")) is not None:
        there: tuple[str, ...] = ("q_b_proj" if child(module, "q_b_proj") is not None else "q_proj", "kv_b_proj")
        return there if all(linear(child(module, key)) is not None for key in there) else ()
    for keys in APART:
        there = tuple(key for key in keys if child(module, key) is not None)
        if keys[0] in there and keys[1] in there:
            return there if all(linear(child(module, key)) is not None for key in there) else ()
    for key in (*FUSED, *BY_HEAD):
        if linear(child(module, key)) is not None:
            return (key,)
    return ()


def _fused(module: nn.Module, key: str, region: Region, counting: nn.Module) -> Style:
    layer = linear(child(module, key))
    assert layer is not None
    if key == "c_attn" and not isinstance(layer, Conv1D):
        raise Unfit("it is not known in which order its fused projection holds queries, keys and values")
    outputs = widths(layer)[1]
    parts = region.heads + 2 * region.key_value_heads
    if outputs % parts:
        raise Unfit(f"{outputs} outputs of {key} are not {parts} heads")
    width = outputs // parts
    named = head_width(counting)
    if named not in (0, width):
        raise Unfit(f"{outputs} outputs of {key} are not {parts} heads of {named}")
    return Style("column", (region.heads * width, *[region.key_value_heads * width] * 2))


def _check_heads(module: nn.Module, region: Region, counting: nn.Module) -> None:
    for key, style in region.styles.items():
        layer = linear(child(module, key))
        assert layer is not None
        across = widths(layer)[0 if style.kind == "row" else 1]
        heads = region.key_value_heads if key in region.shared else region.heads
        if not heads or across % heads:
            raise Unfit(f"{across} channels of {key} are not {heads} heads")
    groups = getattr(counting, "num_key_value_groups", None)
    if isinstance(groups, int) and groups != region.heads // region.key_value_heads:
        raise Unfit(f"{region.heads} heads and {region.key_value_heads} of keys and values are not groups of {groups}")


def _account(module: nn.Module, region: Region, width: int, config: Any) -> None:
    """Give every other parameter of an attention module a style, or raise."""
    for name, parameter in module.named_parameters():
        if any(name.startswith(f"{key}.") for key in region.styles) or _is_around(name, region):
            continue
        where = name.rpartition(".")[0]
        short = name.removeprefix(f"{region.attention}.") if region.attention else name
        if where in BEFORE_LOW_RANK and set(LOW_RANK) & region.styles.keys():
            if where == "kv_a_proj_with_mqa":
                region.styles[where] = Style("rotary_keys", (config.qk_rope_head_dim,))
        elif where in HEAD_NORMS and parameter.numel() == width:
            region.styles[where] = Style("partial")
        elif where in HEAD_NORMS and parameter.shape == ((heads := _norm_heads(where, region)), width):
            region.styles[name] = Style("heads", (heads,), 0)
        elif short in PER_HEAD and parameter.shape[PER_HEAD[short]] == region.heads:
            region.styles[name] = Style("heads", (region.heads,), PER_HEAD[short])
        else:
            raise Unfit(f"no rule says how its {name} is cut")


def _norm_heads(where: str, region: Region) -> int:
    return region.heads if where.startswith("q") else region.key_value_heads


def _query_width(module: nn.Module, query: str, region: Region) -> int:
    layer = linear(child(module, query))
    assert layer is not None
    parts = region.styles[query].parts
    return (parts[0] if parts else widths(layer)[1]) // region.heads


def _is_around(name: str, region: Region) -> bool:
    """Say whether a parameter is of a norm before or after layers that are in modules of their own (as in BERT)."""
    out = next(key for key, style in region.styles.items() if style.kind == "row")
    where = out.rpartition(".")[0]
    is_norm = "norm" in name.lower() or name.partition(".")[0] == "ln"
    return bool(where) and is_norm and (name.startswith(f"{where}.") or name.count(".") == 1)


def _feed_forward(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    for groups, times in ((FEED_FORWARD, 1), (FEED_FORWARD_FUSED, 2)):
        for into, out in groups:
            layers = [linear(child(module, key)) for key in (*into, out)]
            if all(layer is not None for layer in layers):
                if not _is_layer(module) and (across := looks_across_channels(module)):
                    raise Unfit(f"its feed-forward layer computes `{across}` over all channels")
                return _feed_forward_of(module, name, into, out, times)
    return None


def _feed_forward_of(module: nn.Module, name: str, into: tuple[str, ...], out: str, times: int) -> Region:
    layers = {key: linear(child(module, key)) for key in (*into, out)}
    inner = widths(layers[out])[0]  # type: ignore[arg-type]
    for key in into:
        if widths(layers[key])[1] != times * inner:  # type: ignore[arg-type]
            raise Unfit(f"{key} has {widths(layers[key])[1]} outputs and {out} {inner} inputs")  # type: ignore[arg-type]
    region = Region(name, {key: Style("column", (inner,) * times if times > 1 else ()) for key in into})
    region.styles[out] = Style("row")
    region.must_divide["channels of a feed-forward layer"] = inner
    scopes = {key.partition(".")[0] for key in (*into, out) if "." in key}
    hidden = widths(layers[out])[1]  # type: ignore[arg-type]
    for key, parameter in module.named_parameters():
        if any(key.startswith(f"{cut}.") for cut in region.styles) or _is_around(key, region):
            continue
        if scopes and key.partition(".")[0] not in scopes:
            continue
        if parameter.numel() == 1 and key.startswith("act"):  # a learned number in the activation function
            region.styles[key.rpartition(".")[0]] = Style("partial")
        elif not _is_layer(module) or (not scopes and _is_between(key, parameter, inner, hidden)):
            raise Unfit(f"no rule says how its {key} is cut")
    return region


def _is_layer(module: nn.Module) -> bool:
    """Say whether a module is a layer with attention and all, in which feed-forward layers lie openly."""
    return isinstance(module, GradientCheckpointingLayer) or any("att" in key for key, _ in module.named_children())


def _is_between(key: str, parameter: Any, inner: int, hidden: int) -> bool:
    """Say whether a parameter beside open feed-forward layers may work on what is between them."""
    if parameter.shape[-1] == inner != hidden and "." in key and key.count(".") == 1:
        return True
    return any(word in key.lower() for word in ("ffn_layernorm", "ffn_norm", "inner_norm", "mid_norm"))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _planned(module: nn.Module, name: str, said: Mapping[str, Style], config: Any) -> Region | None:
    """Layers of other names, which only a plan knows."""
    styles = {key: style for key, style in said.items() if not style.whole and child(module, key) is not None}
    layers = {key: linear(child(module, key)) for key, style in styles.items() if style.kind in ("column", "row")}
    if {styles[key].kind for key in layers} != {"column", "row"}:
        return None
    region = Region(name, dict(styles))
    for key, layer in layers.items():
        if layer is None:
            raise Unfit(f"{key} is no linear layer")
        is_row = styles[key].kind == "row"
        for size in styles[key].parts or (widths(layer)[0 if is_row else 1],):
            region.must_divide[f"{'inputs' if is_row else 'outputs'} of {key}"] = size
    for key, _ in module.named_parameters():
        if not any(key.startswith(f"{cut}.") for cut in styles):
            raise Unfit(f"no rule says how its {key} is cut")
    heads, region.key_value_heads = count_heads(module, None)
    if heads:
        region.heads, region.attention = heads, ""
        region.width = next(widths(layers[key])[0] for key in layers if styles[key].kind == "row")  # type: ignore[arg-type]
    return region
