"""How replicas keep together over slow links: compressed, seldom, late, or with neighbours only."""

from typing import TYPE_CHECKING

from cornstarch.lazily import names_of

if TYPE_CHECKING:
    from cornstarch.parallel.exchange.choosing import exchange_of
    from cornstarch.parallel.exchange.exchange import Exchange
    from cornstarch.parallel.exchange.mean import CompressedMean

__all__ = ["CompressedMean", "Exchange", "exchange_of"]

# Looked up when first asked for: data parallelism itself imports what compresses its gradients.
_MODULES = {
    "CompressedMean": "cornstarch.parallel.exchange.mean",
    "Exchange": "cornstarch.parallel.exchange.exchange",
    "exchange_of": "cornstarch.parallel.exchange.choosing",
}

__getattr__, __dir__ = names_of(__name__, _MODULES)
