"""Arguments that can be given in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cornstarch.errors import ConfigError


def one_of(**names: Any) -> Any:
    """Return the value that was given under one of several names of the same argument."""
    given = {name: value for name, value in names.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are names of one argument: pass one of them.")
    return next(iter(given.values()), None)


def given_texts(
    llm_inputs: Mapping[str, Any] | None, text: str | Sequence[str] | None
) -> tuple[list[str] | None, dict[str, Any]]:
    """Return the texts, one per sample, and the tokenizer's options."""
    options = dict(llm_inputs or {})
    texts = one_of(llm_inputs=options.pop("text", None), text=text)
    if texts is None:
        if options:
            raise ConfigError(f"llm_inputs has {list(options)} but no 'text'.")
        return None, {}
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not all(isinstance(one, str) for one in texts):
        raise ConfigError("text must be a string, or a list of strings, one per sample.")
    if options.get("return_overflowing_tokens"):
        raise ConfigError("return_overflowing_tokens would spread an item over several rows; leave it out.")
    return texts, options


__all__ = ["given_texts", "one_of"]
