"""HTML pages from jinja2 templates, and elements for the drawings that Python builds. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from cornstarch import __version__
from cornstarch.report.number_format import MISSING

if TYPE_CHECKING:
    from jinja2 import Environment

_VOID = {"br", "hr", "img", "input", "link", "meta"}


class TableCell(NamedTuple):
    """A cell with more than plain text in it."""

    text: str
    tag: str = ""
    """The element around the text, such as code; "" for none."""
    css: str = ""
    note: str = ""
    """A smaller text below."""
    fraction: float | None = None
    """Draw a bar of this fraction of the cell's width."""
    colour: int = 1


class Table(NamedTuple):
    """A table; a column whose name ends in "#" holds numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | TableCell]]
    label: str
    foot: Sequence[str | TableCell] = ()


def render_page(template: str, **view: Any) -> str:
    """Render one of `templates` with plain data; every text is escaped unless it is `Markup`."""
    return _load_environment().get_template(template).render(view)


@cache
def _load_environment() -> Environment:
    # Imported on first use: training imports this module, but renders a page only at the end.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, finalize=_replace_nul,
    )  # fmt: skip

    def format_bar_width(fraction: float | None) -> str:
        return f"{100 * min(1.0, fraction) if fraction is not None and fraction > 0 else 0.0:.1f}%"

    environment.filters["bar_width"] = format_bar_width
    environment.globals |= {"version": __version__, "MISSING": MISSING}
    return environment


def _replace_nul(value: object) -> object:
    """Replace NUL, which no HTML document may contain."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) and "\0" in value else value


def build_element(tag: str, /, *content: str | Iterable[str] | None, **attributes: str | float | bool | None) -> Markup:
    """Build one element; `class_` and `aria_label` become class and aria-label, None and False leave one out."""
    opening = [tag]
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            opening.append(name)
        elif value is not None and value is not False:
            opening.append(f'{name}="{escape(_replace_nul(str(value)))}"')
    start = f"<{' '.join(opening)}>"
    if tag in _VOID:
        assert not content
        return Markup(start)
    return Markup(f"{start}{join_html(*content)}</{tag}>")


def join_html(*content: str | Iterable[str] | None) -> Markup:
    """Concatenate pieces; those that are not `Markup` are escaped."""
    pieces = (piece for part in content if part is not None for piece in ([part] if isinstance(part, str) else part))
    return Markup("").join(escape(_replace_nul(piece)) for piece in pieces)
