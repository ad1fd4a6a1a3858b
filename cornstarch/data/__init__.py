"""From files to batches. Names are imported lazily: reading rows and describing data need no torch."""

from typing import TYPE_CHECKING

from cornstarch.lazily import lazy_attributes

if TYPE_CHECKING:
    from cornstarch.data.collate import ChatCollator, CollatedBatch, PreparedSample
    from cornstarch.data.data_report import DataReport, check_data, render
    from cornstarch.data.formats import (
        DataSource,
        JoinedSources,
        open_rows,
        open_source,
        open_sources,
        register_data_source,
    )
    from cornstarch.data.loader import StepBatch, StepLoader
    from cornstarch.data.media import load_audio, load_image
    from cornstarch.data.sample import (
        BrokenSample,
        Media,
        Message,
        Sample,
        SampleError,
        SampleTooLongError,
        SkipCounter,
    )
    from cornstarch.data.sampler import EpochOrder

__all__ = [
    "BrokenSample", "ChatCollator", "CollatedBatch", "DataReport", "DataSource", "EpochOrder", "JoinedSources", "Media",
    "Message", "PreparedSample", "Sample", "SampleError", "SampleTooLongError", "SkipCounter", "StepBatch",
    "StepLoader", "check_data", "load_audio", "load_image", "open_rows", "open_source", "open_sources",
    "register_data_source", "render",
]  # fmt: skip

_MODULES = {
    "collate": ("ChatCollator", "CollatedBatch", "PreparedSample"),
    "data_report": ("DataReport", "check_data", "render"),
    "formats": ("DataSource", "JoinedSources", "open_rows", "open_source", "open_sources", "register_data_source"),
    "loader": ("StepBatch", "StepLoader"),
    "media": ("load_audio", "load_image"),
    "sample": ("BrokenSample", "Media", "Message", "Sample", "SampleError", "SampleTooLongError", "SkipCounter"),
    "sampler": ("EpochOrder",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)
