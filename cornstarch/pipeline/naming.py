"""The names that parameters of a stage have in the whole model, where a stage holds a copy under another one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_NAMES = "_cornstarch_whole_names"


def remember_names(model: nn.Module, names: Mapping[str, str]) -> None:
    """Note, by its name here, what the whole model calls a parameter: a tied head is the table of embeddings."""
    model.__dict__[_NAMES] = dict(names)


def whole_names(model: nn.Module) -> Mapping[str, str]:
    """Return what was noted; most models have nothing."""
    found: Mapping[str, str] = model.__dict__.get(_NAMES, {})
    return found


__all__ = ["remember_names", "whole_names"]
