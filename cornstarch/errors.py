"""What a user's mistake raises."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ConfigError(ValueError):
    """Something the user gave cannot work; the message says what was found, what was expected, what to do."""


class UnsupportedModelError(ConfigError):
    """A model cannot be handled rightly, so it is refused; the message says why."""


def escape_controls(text: str) -> str:
    """Return a text for the terminal: control characters, such as those of a file's name, are written as `\\x1b`."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
