"""HTML that is escaped by construction: plain strings are text, only `Markup` is taken as it is."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

Content = str | Iterable[str] | None
Attribute = str | float | bool | None

_VOID = {"br", "hr", "img", "input", "link", "meta"}


class Markup(str):
    """Text that is HTML already; everything else is escaped."""


def escaped(text: str) -> Markup:
    """Return text as HTML; what no HTML document may hold is replaced."""
    if isinstance(text, Markup):
        return text
    return Markup(escape(text.replace("\0", "\ufffd"), quote=True))


def join(*content: Content) -> Markup:
    """Return the pieces one after another, each escaped unless it is HTML."""
    parts: list[str] = []
    for piece in content:
        if isinstance(piece, str):
            parts.append(escaped(piece))
        elif piece is not None:
            parts.extend(escaped(one) for one in piece)
    return Markup("".join(parts))


def element(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """Return one element; `class_` and `aria_label` stand for class and aria-label, None and False for no attribute."""
    opening = [name]
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            opening.append(attribute)
        elif value is not None and value is not False:
            opening.append(f'{attribute}="{escaped(str(value))}"')
    start = f"<{' '.join(opening)}>"
    if name in _VOID:
        assert not content
        return Markup(start)
    return Markup(f"{start}{join(*content)}</{name}>")
