"""The import path of `cornstarch.parallel.low_bandwidth` in the documentation of earlier releases."""

from cornstarch.parallel.low_bandwidth import CompressedMean
from cornstarch.parallel.low_bandwidth import ReplicaSync as Exchange
from cornstarch.parallel.low_bandwidth import build_replica_sync as exchange_of

__all__ = ["CompressedMean", "Exchange", "exchange_of"]
