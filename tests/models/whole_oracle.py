"""What a multimodal model's own processor and chat template make of a conversation, and the model's loss on that."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils import is_torchvision_available

from tests.models.whole_folders.stored import ANSWER_WORDS, StoredFamily

IGNORED = -100


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
        if argument_name == "video_processor" and argument is None:
            return None
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


def load_processor(folder: Path) -> Any:
    """Return the model's own processor; without torchvision, the same class with no video processor."""
    settings = json.loads((folder / "processor_config.json").read_text())
    if is_torchvision_available() or "video_processor" not in settings:
        return AutoProcessor.from_pretrained(folder)
    base = getattr(transformers, settings["processor_class"])
    without_video = type(base.__name__, (_WithoutVideo, base), {})
    given: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(folder), "video_processor": None}
    for name, auto in (("image_processor", "AutoImageProcessor"), ("feature_extractor", "AutoFeatureExtractor")):
        if name in settings:
            given[name] = getattr(transformers, auto).from_pretrained(folder)
    own = {key: value for key, value in settings.items() if not isinstance(value, dict) and key != "processor_class"}
    return without_video(**given, **own, chat_template=(folder / "chat_template.jinja").read_text())


def typed(conversation: Conversation) -> list[dict[str, Any]]:
    """Return a conversation as processors take it."""

    def written(part: Part) -> dict[str, Any]:
        return {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind, part.kind: part.value}

    return [{"role": role, "content": [written(part) for part in parts]} for role, parts in conversation]


def oracle_batch(processor: Any, given: Sequence[Conversation]) -> dict[str, Any]:
    """Return the processor's batch of conversations, padded on the right."""
    processor = copy.copy(processor)
    processor.tokenizer.padding_side = "right"
    options: dict[str, Any] = {"padding": True, "padding_side": "right"}
    if "processor_kwargs" in inspect.signature(processor.apply_chat_template).parameters:
        options = {"processor_kwargs": options}
    batch = processor.apply_chat_template(
        [typed(conversation) for conversation in given],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **options,
    )
    return dict(batch)


def expected_labels(batch: Mapping[str, Any], tokenizer: Any, family: StoredFamily) -> Tensor:
    """Return the ids of the answers and of what ends them; answers are found by their words."""
    words = {*ANSWER_WORDS, *(f" {word}" for word in ANSWER_WORDS)}
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for row, ids in enumerate(batch["input_ids"].tolist()):
        tokens = tokenizer.convert_ids_to_tokens(ids)
        for place, token in enumerate(tokens):
            if token not in words:
                continue
            end = place + 1
            for ending in family.ends:
                end += tokens[end : end + 1] == [ending]
            labels[row, place:end] = batch["input_ids"][row, place:end]
    return labels.where(batch["attention_mask"].bool(), IGNORED)


def load_model(folder: Path, family: StoredFamily) -> PreTrainedModel:
    """Return the original model in fp32."""
    return getattr(transformers, family.model_class).from_pretrained(folder, dtype=torch.float32).eval()
