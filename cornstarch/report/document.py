"""What every page has: a head that lets nothing in from elsewhere, and the line at the top with the name."""

from __future__ import annotations

from pathlib import Path

from cornstarch.errors import ConfigError
from cornstarch.report.markup import Markup, element
from cornstarch.report.style import STYLE

# Nothing is loaded from anywhere, even if a text of the run should slip through as HTML.
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; media-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_ICON = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgBAMAAACBVGfHAAAAMFBMVEUFc2/S04USeG4QgXhbmXeTtH0Od24A//"
    "+zxIEOdm785ooAAAAOdm7n3IcAbmwwhXEvniEdAAAAEHRSTlMV/+T///+vAf/+/wCS////N9sS7AAAAQlJREFUeNpl0iFIQ1EUxvHfu5sMwW"
    "IwWh0YbLMsuCAYLBMRLMLAZFuwmQxGYdUgDKwKggzDHJi1iIhgFsRoGG5zEw1P9y76lXPPn+8ezrnnJm1rs3WpBgtD+dHGoV8VnortxPaiTM"
    "c34eoxym3dJpMNUD1PSS9cp4fdpRqYCmnsd+5fwHtyBPYben2QB6vTTHbKEMAZ7MnADtxWx2CiCknmGFZgdJ5dacBUVOMaPmtjMIimCf4oQO"
    "GfowK5Zgbq0M0cE3eQzzodvsFXVGMFSlGn63AQOVp1cuUUpG/8TC/dVa71Cg8vhdM5KIQK+JjZXAXdcNFMyU8oh+X5eLSTUnIZLZtiO/n7Hb"
    "4BHhFD/lOhdf8AAAAASUVORK5CYII="
)
_LOGO = Markup(
    '<svg class="logo" viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="8"/>'
    '<path d="M16 5c4 3 6 7 6 12s-2 8-6 10c-4-2-6-5-6-10s2-9 6-12z"/>'
    '<path class="vein" d="M16 9v17M11 15h10M11 20h10"/></svg>'
)


def head(title: str, style: str = "") -> Markup:
    """Return the head of a page.

    Args:
        title: What the browser shows.
        style: Rules beside those that all pages share.
    """
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href=_ICON),
        element("style", Markup(STYLE + style)),
    )


def masthead(label: str) -> Markup:
    """Return the first line of a page: the logo, what page it is, and the button for its colours (`script`)."""
    return element(
        "div",
        element("p", _LOGO, label, class_="brand"),
        element("button", "Dark", type="button", id="theme", hidden=True, aria_label="Switch to dark colours"),
        class_="top",
    )


def write_html(path: Path, text: str) -> None:
    """Write a page into the file that a command was given with `--html`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: it cannot be written ({error.strerror}).") from error
