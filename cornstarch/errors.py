"""What a user's mistake raises."""


class ConfigError(ValueError):
    """Something the user gave cannot work; the message says what was found, what was expected, what to do."""


class UnsupportedModelError(ConfigError):
    """A model cannot be handled rightly, so it is refused; the message says why."""
