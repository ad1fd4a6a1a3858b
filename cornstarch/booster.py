"""The published import path of `Booster`."""

from cornstarch.api.booster import Booster

__all__ = ["Booster"]
