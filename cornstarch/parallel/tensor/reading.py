"""What a module's own code and attributes say about its heads and channels.

A region is cut by the names of its layers. Code between them that looks at all channels at once would go wrong with a
part of them, some of it without a sound; it is found by reading it.
"""

from __future__ import annotations

import inspect
import re
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from cornstarch.parallel.tensor.styles import HEADS, KEY_VALUE_HEADS

# Over channels, these need all of them. (A softmax of attention is over positions.)
_ACROSS = re.compile(r"\.(mean|std|var|topk|softmax|sort|norm|argmax|cumsum)\(|F\.(softmax|normalize)\(")
_SIZES = re.compile(r"^ *\w+, \w+, (\w+) = \w+\.(?:size\(\)|shape)", re.MULTILINE)


_sources: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def _source(kind: type) -> str:
    if kind not in _sources:
        try:
            _sources[kind] = inspect.getsource(kind)
        except (OSError, TypeError):  # made while running: nothing can be read
            _sources[kind] = ""
    return _sources[kind]


def looks_across_channels(module: nn.Module) -> str:
    """Return what a feed-forward module's code computes over all channels, or ""."""
    found = _ACROSS.search(_source(type(module)))
    return "" if found is None else found.group(0).strip(".(")


def shapes_by_input(module: nn.Module) -> bool:
    """Say whether an attention module gives its heads' output the width of its input."""
    source = _source(type(module))
    return any(re.search(rf"(?:view|reshape)\([^()]*\b{name}\)", source) for name in _SIZES.findall(source))


def has_slopes(module: nn.Module, config: Any) -> bool:
    """Say whether attention takes slopes per head (ALiBi), which are made elsewhere for all heads."""
    takes = "alibi" in inspect.signature(module.forward).parameters
    return takes and getattr(config, "alibi", True) is not False


def head_width(module: nn.Module) -> int:
    """Return the channels of one head if a module says so, or 0."""
    for name in ("head_dim", "head_size", "attention_head_size"):
        number = getattr(module, name, None)
        if isinstance(number, int):
            return number
    return 0


def says_heads(module: nn.Module) -> bool:
    """Say whether a module counts its heads itself; a config may speak of other attention."""
    return any(isinstance(module.__dict__.get(name), int) for name in HEADS)


def count_heads(module: nn.Module, config: Any) -> tuple[int, int]:
    """Return the number of heads, and of key and value heads, as a module or its config says; 0 if they do not."""
    heads = _count(module, config, HEADS)
    return heads, _count(module, config, KEY_VALUE_HEADS) or heads


def _count(module: nn.Module, config: Any, names: tuple[str, ...]) -> int:
    for source in (module, getattr(module, "config", None), config):
        for name in names:
            number = getattr(source, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return 0
