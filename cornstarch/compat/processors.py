"""Processors of whole models, with or without torchvision."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from cornstarch.compat import patch_attributes


def load_processor_of(source: str, trust_remote_code: bool) -> Any:
    """Return what `AutoProcessor` finds in a folder, with or without torchvision.

    transformers processes images with Pillow where torchvision is missing, but not videos, and refuses to
    make a processor for both; a class that takes a function from an image processor's module (Pixtral's) cannot even
    be imported. Without torchvision, the processor is made with the settings of its video processor in the place of
    one: it does everything but videos. Goes when transformers makes such processors itself.
    """
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    options = {"trust_remote_code": trust_remote_code}
    if is_torchvision_available():
        return AutoProcessor.from_pretrained(source, **options)
    from transformers import ProcessorMixin
    from transformers.models.auto import processing_auto, video_processing_auto

    mixin: Any = ProcessorMixin
    check, find = mixin.check_argument_for_proper_class, processing_auto.processor_class_from_name

    def check_others(processor: Any, name: str, argument: Any) -> Any:
        return None if isinstance(argument, VideoSettings) else check(processor, name, argument)

    load_settings = staticmethod(lambda *args, **options: _video_settings(source))
    with patch_attributes(
        # The class that transformers itself gives out under this name stands for nothing without torchvision.
        (video_processing_auto.AutoVideoProcessor, "from_pretrained", load_settings),
        (mixin, "check_argument_for_proper_class", check_others),
        (processing_auto, "processor_class_from_name", lambda name: _importable(find(name))),
    ):
        return AutoProcessor.from_pretrained(source, **options)


def _importable(kind: Any) -> Any:
    """Return a processor's class; for a dummy, the real one, imported with Pillow's image processor beside it."""
    if not getattr(kind, "is_dummy", False):
        return kind
    model = kind.__module__.rpartition(".processing_")[2]
    package = f"transformers.models.{model}"
    absent = f"{package}.image_processing_{model}"
    try:
        sys.modules[absent] = importlib.import_module(f"{package}.image_processing_pil_{model}")
        return getattr(importlib.import_module(f"{package}.processing_{model}"), kind.__name__, kind)
    except ImportError:
        return kind  # says what is missing when it is used
    finally:
        sys.modules.pop(absent, None)


def _video_settings(source: str) -> VideoSettings:
    """Return the stored settings of a video processor; if there are none, those of the image processor."""
    from transformers.utils import cached_file

    for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        try:
            with open(str(cached_file(source, name)), encoding="utf-8") as file:
                settings = json.load(file)
        except OSError:
            continue
        settings = settings.get("video_processor") if name.startswith("processor") else settings
        if settings:
            kind = settings.pop("image_processor_type", None)
            if kind is not None:
                settings["video_processor_type"] = kind.removesuffix("Fast").replace("ImageProc", "VideoProc")
            return VideoSettings(settings)
    return VideoSettings()


class VideoSettings(dict[str, Any]):
    """The settings of a video processor that cannot be made here; a processor saves them as they are."""

    _auto_class = None  # transformers asks every part of a processor for it
    model_input_names: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:  # processors read settings as attributes, whether or not there is a video
        from transformers.processing_utils import VideosKwargs

        if name in self:
            return self[name]
        if name in VideosKwargs.__annotations__:
            return None
        raise AttributeError(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise ImportError("Processing videos needs torchvision, which is not installed.")
