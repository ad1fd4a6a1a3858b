"""From files to batches: sources, order, media, collation, loading, checking.

The names are imported lazily: reading rows and describing data need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cornstarch.train.data.check import DataReport, check_data, render
    from cornstarch.train.data.collate import ChatCollator, CollatedBatch, PreparedSample
    from cornstarch.train.data.formats import JoinedSources, SampleSource, open_source, open_sources
    from cornstarch.train.data.loader import SkipCounter, StepBatch, StepLoader
    from cornstarch.train.data.media import load_audio, load_image
    from cornstarch.train.data.order import EpochOrder
    from cornstarch.train.data.sample import BrokenSample, Media, Message, Sample, SampleError, SampleTooLongError

__all__ = [
    "BrokenSample",
    "ChatCollator",
    "CollatedBatch",
    "DataReport",
    "EpochOrder",
    "JoinedSources",
    "Media",
    "Message",
    "PreparedSample",
    "Sample",
    "SampleError",
    "SampleSource",
    "SampleTooLongError",
    "SkipCounter",
    "StepBatch",
    "StepLoader",
    "check_data",
    "load_audio",
    "load_image",
    "open_source",
    "open_sources",
    "render",
]

_MODULES = {
    "check": ("DataReport", "check_data", "render"),
    "collate": ("ChatCollator", "CollatedBatch", "PreparedSample"),
    "formats": ("JoinedSources", "SampleSource", "open_source", "open_sources"),
    "loader": ("SkipCounter", "StepBatch", "StepLoader"),
    "media": ("load_audio", "load_image"),
    "order": ("EpochOrder",),
    "sample": ("BrokenSample", "Media", "Message", "Sample", "SampleError", "SampleTooLongError"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
