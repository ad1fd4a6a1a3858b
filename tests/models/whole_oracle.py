"""What a multimodal model's own processor and chat template make of a conversation, and the model's loss on that."""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import io
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoProcessor, AutoTokenizer, PreTrainedModel

# Not from transformers itself, which shows something in its place where torchvision is missing.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_mistral_common_available, is_torchvision_available

from tests.models.whole_folders.stored import StoredFamily

IGNORED = -100
_ANSWER = re.compile(r" ?a\d+(?: a\d+)*")  # a space before it belongs to its first token


@dataclass(frozen=True)
class Item:
    """An image or a sound in a conversation."""

    kind: str
    number: int

    @property
    def value(self) -> Any:
        """Noise: a picture, or a wave; each number has another size."""
        noise = np.random.default_rng(self.number)
        if self.kind == "audio":
            return noise.standard_normal(4000 + 3000 * self.number).astype(np.float32)
        width, height = ((16, 16), (16, 16), (30, 14), (13, 24))[self.number]
        return Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))


Part = str | Item
Turn = tuple[str, Sequence[Part]]
Conversation = Sequence[Turn]


def conversations(kind: str) -> dict[str, Conversation]:
    """Return the conversations of the sweep for one kind of medium; the words of answers stand nowhere else."""
    same, twin, wide, tall = (Item(kind, number) for number in range(4))
    return {
        "no item": [("user", ["q0 q1"]), ("assistant", ["a0 a1 a2"])],
        "one": [("user", [same, "q2 q3"]), ("assistant", ["a3"])],
        "two adjacent": [("user", [same, twin, "q4"]), ("assistant", ["a4 a5"])],
        "two separated": [("user", [twin, "q5", same, "q6 q7"]), ("assistant", ["a6"])],
        "two sizes": [("user", [wide, "q8", tall, "q9"]), ("assistant", ["a7 a8"])],
        "three turns": [
            *(("user", [tall, "q1 q10"]), ("assistant", ["a9 a10"])),
            *(("user", ["q11"]), ("assistant", ["a11"])),
            *(("user", [same, "q3"]), ("assistant", ["a0"])),
        ],
    }


class _WithoutVideo:
    """Lets a processor be built without a video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return None
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


def load_processor(folder: Path) -> Any:
    """Return the model's own processor; without torchvision, the same class around the Pillow image processor."""
    if (folder / "tekken.json").exists() and is_mistral_common_available():
        return AutoProcessor.from_pretrained(folder, mode="finetuning", padding_side="right")
    settings = json.loads((folder / "processor_config.json").read_text())
    name = settings["processor_class"]
    needs_torchvision = "video_processor" in settings or "torchvision" in getattr(
        getattr(transformers, name), "_backends", ()
    )
    if is_torchvision_available() or not needs_torchvision:
        return AutoProcessor.from_pretrained(folder)
    without_video = type(name, (_WithoutVideo, _processor_class(name)), {})
    given: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(folder)}
    for part, auto in (("image_processor", AutoImageProcessor), ("feature_extractor", AutoFeatureExtractor)):
        if part in settings:
            given[part] = auto.from_pretrained(folder)
    if "video_processor" in settings:  # its sizes alone: no video is given
        given["video_processor"] = SimpleNamespace(**settings["video_processor"])
    own = {key: value for key, value in settings.items() if not isinstance(value, dict) and key != "processor_class"}
    return without_video(**given, **own, chat_template=(folder / "chat_template.jinja").read_text())


def _processor_class(name: str) -> Any:
    """Return a processor class, also if transformers shows something in its place because torchvision is missing."""
    found = [model_type for model_type, class_name in PROCESSOR_MAPPING_NAMES.items() if class_name == name]
    modules = [model_type.replace("-", "_") for model_type in found]
    for module in modules:
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), name)
    for module in modules:
        # It takes a helper from the image processor for torchvision; Pillow's has the same.
        folder = f"transformers.models.{module}"
        with contextlib.suppress(ImportError):
            pillow = importlib.import_module(f"{folder}.image_processing_pil_{module}")
            with mock.patch.dict(sys.modules, {f"{folder}.image_processing_{module}": pillow}):
                return getattr(importlib.import_module(f"{folder}.processing_{module}"), name)
    raise ImportError(f"{name} is in no module of this transformers")


def type_text(conversation: Conversation) -> list[dict[str, Any]]:
    """Return a conversation as processors take it."""

    def written(part: Part) -> dict[str, Any]:
        return {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind, part.kind: part.value}

    return [{"role": role, "content": [written(part) for part in parts]} for role, parts in conversation]


def oracle_batch(processor: Any, given: Sequence[Conversation]) -> dict[str, Any]:
    """Return the processor's batch of conversations, padded on the right.

    A processor without a chat template is given the questions, and the answers as its `suffix` (PaliGemma).
    """
    # Of the text alone: processors of sounds and images have paddings of their own.
    options: dict[str, Any] = {"text_kwargs": {"padding": True, "padding_side": "right"}}
    if "processor_kwargs" in inspect.signature(processor.apply_chat_template).parameters:
        options = {"processor_kwargs": options}
    template = processor.chat_template or processor.tokenizer.chat_template
    if hasattr(processor.tokenizer, "mode"):  # mistral-common has no template, and takes sounds as files
        return dict(processor.apply_chat_template([with_files(type_text(conversation)) for conversation in given]))
    if template is None:
        questions, answers, items = zip(*map(_question_and_answer, given), strict=True)
        images = list(items) if any(items) else None
        return dict(
            processor(
                text=list(questions),
                images=images,
                suffix=list(answers),
                padding=True,
                padding_side="right",
                return_tensors="pt",
            )
        )
    batch = processor.apply_chat_template(
        [type_text(conversation) for conversation in given],
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **options,
    )
    return dict(batch)


def with_files(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with its sounds as base64 of WAV files."""

    def as_file(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "audio":
            return part
        file = io.BytesIO()
        import soundfile  # where sounds are given as files alone

        soundfile.write(file, part["audio"], 16_000, format="WAV", subtype="FLOAT")
        return {"type": "audio", "base64": base64.b64encode(file.getvalue()).decode()}

    return [{**message, "content": [as_file(part) for part in message["content"]]} for message in messages]


def _question_and_answer(conversation: Conversation) -> tuple[str, str, list[Any]]:
    if len(conversation) != 2:
        raise ValueError("without a chat template it takes one question and one answer")
    (_, question), (_, answer) = conversation
    items = [part.value for part in question if isinstance(part, Item)]
    text = "".join(part if isinstance(part, str) else f"<{part.kind}>" for part in question)
    return text, "".join(map(str, answer)), items


def compute_expected_labels(batch: Mapping[str, Any], tokenizer: Any, family: StoredFamily) -> Tensor:
    """Return the ids of the answers and of what ends them; answers are found by their words."""
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        pieces = [tokenizer.decode([token]) for token in ids]
        ends = list(itertools.accumulate(map(len, pieces)))
        for answer in _ANSWER.finditer("".join(pieces)):
            first = next(place for place, end in enumerate(ends) if end > answer.start())
            last = ends.index(answer.end()) + 1
            for ending in family.ends:
                last += pieces[last : last + 1] == [ending]
            labels[row, first:last] = batch["input_ids"][row, first:last]
    return labels.where(batch["attention_mask"].bool(), IGNORED)


def original_loss(model: PreTrainedModel, inputs: Mapping[str, Any], labels: Tensor) -> Tensor:
    """Return the model's own loss; what a processor makes in half precision (Llama 4) is given as the model's dtype."""

    def cast(value: Any) -> Any:
        return value.to(model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return model(**{key: cast(value) for key, value in inputs.items()}, labels=labels).loss


def load_model(folder: Path, family: StoredFamily) -> PreTrainedModel:
    """Return the original model in fp32."""
    return getattr(transformers, family.model_class).from_pretrained(folder, dtype=torch.float32).eval()
