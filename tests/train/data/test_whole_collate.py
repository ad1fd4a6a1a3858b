"""Conversations become what a whole model's own processor makes of them, with labels at the answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from cornstarch import MultimodalModel
from cornstarch.compute.flops import FlopCounter
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.takeover.undivided import UndividedModel
from cornstarch.train.config import RunConfig
from cornstarch.train.data.rows import sample_of
from cornstarch.train.data.sample import Media, Message, Sample, SampleError, SampleTooLongError
from cornstarch.train.data.sizes import SampleSizer
from cornstarch.train.tasks.build import build_task
from cornstarch.train.tasks.looking import ChatLook
from tests.models.local_processors import image
from tests.models.whole_folders import FOLDERS, write_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


def task_of(folder: Path, **data: Any) -> Any:
    data = {"train": [{"path": "unused.json"}], **data}
    return build_task(RunConfig.model_validate({"model": {"whole": {"path": str(folder)}}, "data": data}))


def picture(width: int = 16, height: int = 16, seed: int = 0) -> Media:
    return Media("image", image(width, height, seed))


def asked(*parts: Any, answer: str = "a1") -> Sample:
    return Sample("asked", (Message("user", parts), Message("assistant", (answer,))))


def shown(task: Any, sample: Sample) -> str:
    """Return a sample as `data check` shows it."""
    pieces = ChatLook(task.collator)(sample).pieces
    return "".join(f"⟦{text}⟧" if trained else text for text, trained in pieces)


def test_two_adjacent_images_of_qwen_have_their_marks(folders: Path) -> None:
    task = task_of(write_folder("qwen2.5-vl", folders))
    row = {"messages": [{"role": "user", "content": "<image><image> q1"}, {"role": "assistant", "content": "a1"}]}
    sample = sample_of({**row, "images": [image(16, 16), image(24, 16)]}, "sharegpt", "row", folders)
    text = shown(task, sample).partition("user\n")[2]
    image_pads = ("<|vision_start|><|image_pad|>×4<|vision_end|>", "<|vision_start|><|image_pad|>×6<|vision_end|>")
    assert text == "".join(image_pads) + " q1<|im_end|>\n<|im_start|>assistant\n⟦a1<|im_end|>⟧\n"
    batch = task.collator([sample, asked("q2")])
    assert batch.inputs["image_grid_thw"].shape == (2, 3) and batch.trained_tokens == 4
    task.loss(batch.inputs).backward()
    assert float(task.model.vision_encoder.module.patch_embed.proj.weight.grad.abs().sum()) > 0


def test_a_line_break_beside_a_mark_is_the_templates(folders: Path) -> None:
    task = task_of(write_folder("llava", folders))
    turns = [{"from": "human", "value": "<image>\nq1 q2"}, {"from": "gpt", "value": "a1"}]
    sample = sample_of({"conversations": turns, "image": image()}, "llava", "row", folders)
    assert shown(task, sample) == "<s>USER: <image>×4\nq1 q2 ASSISTANT:⟦ a1 ⟧"


def test_a_turn_is_ended_by_a_token_without_a_name(folders: Path) -> None:
    task = task_of(write_folder("gemma3", folders))
    tokenizer = task.collator.processor.llm_tokenizer
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end not in tokenizer.all_special_ids
    labels = task.collator.prepare(asked(picture(), "q1")).labels
    assert labels[labels != -100].tolist() == [tokenizer.convert_tokens_to_ids("a1"), end]
    assert end in task.collator.answer_ends


@pytest.mark.parametrize("name", [n for n in ("qwen2.5-vl", "llava", "llava-onevision") if n in FOLDERS])
def test_lengths_are_told_without_decoding(name: str, folders: Path) -> None:
    task = task_of(write_folder(name, folders))
    sizer = SampleSizer(task.collator, FlopCounter(task.model).step)
    for sample in (asked("q1"), asked(picture(40, 20), "q1"), asked("q1", picture(), picture(20, 30), "q2")):
        size, prepared = sizer(sample), task.collator.prepare(sample)
        assert (size.tokens, size.trained) == (len(prepared.input_ids), prepared.trained_tokens)
        assert size.items == {"vision": len(sample.media)} and bool(sample.media) == (size.work["vision"] > 0)


def test_long_samples_are_cut_behind_their_items(folders: Path) -> None:
    folder = write_folder("llava", folders)
    long = asked(picture(), "q1 q2 q3", answer="a1 a2 a3 a4")
    length = len(task_of(folder).collator.prepare(long).input_ids)
    cut = task_of(folder, max_length=length - 2, too_long="cut").collator
    assert len(cut.prepare(long).input_ids) == length - 2
    turns = (*long.messages, Message("user", (picture(),)), Message("assistant", ("a5",)))
    with pytest.raises(SampleTooLongError, match="an item stands beyond it"):
        cut.prepare(Sample("beyond", turns))


def test_the_models_own_prompt_is_continued(folders: Path) -> None:
    task = task_of(write_folder("qwen2.5-vl", folders))
    question = [Message("user", (picture(), "q1"))]
    inputs = task.collator.question(question)
    own = task.collator.processor.original.apply_chat_template(
        [[{"role": "user", "content": [{"type": "image", "image": image(16, 16)}, {"type": "text", "text": "q1"}]}]],
        tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True,
    )  # fmt: skip
    assert inputs.keys() == own.keys() and all(torch.equal(inputs[key], own[key]) for key in own)
    assert isinstance(task.reply(question, most_tokens=2), str)


def test_a_saved_model_has_the_processor(folders: Path, tmp_path: Path) -> None:
    folder = write_folder("qwen2.5-vl", folders)
    task, sample = task_of(folder), asked(picture(20, 30), "q1")
    task.save(tmp_path / "saved")
    again = task_of(tmp_path / "saved")
    losses = [one.loss(one.collator([sample]).inputs).item() for one in (task, again)]
    assert losses[0] == losses[1]
    # The video processor, which needs torchvision, is saved as it was.
    files = (folder / "processor_config.json", tmp_path / "saved/processor/processor_config.json")
    stored, saved = (json.loads(file.read_text()) for file in files)
    assert saved["video_processor"] == stored["video_processor"]
    # Older folders have one file of settings, which are those of images and of videos.
    older = tmp_path / "older"
    shutil.copytree(folder, older)
    (older / "processor_config.json").unlink()
    settings = {**stored["image_processor"], "processor_class": stored["processor_class"]}
    (older / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = task_of(older).collator.processor
    assert torch.equal(task_of(older).collator.prepare(sample).input_ids, task.collator.prepare(sample).input_ids)
    assert processor.original.video_processor["video_processor_type"] == "Qwen2VLVideoProcessor"
    task_of(write_folder("llava", folders)).save(tmp_path / "llava")
    assert type(AutoProcessor.from_pretrained(tmp_path / "llava/processor")).__name__ == "LlavaProcessor"


def test_what_cannot_be_followed_is_refused(folders: Path, tmp_path: Path) -> None:
    folder = write_folder("llava", folders)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"without a chat template.*`data.chat_template`"):
        task_of(bare)
    template = (folder / "chat_template.jinja").read_text()
    sample = asked(picture(), "q1")
    given = task_of(bare, chat_template=template).collator.prepare(sample)
    assert torch.equal(given.input_ids, task_of(folder).collator.prepare(sample).input_ids)
    (bare / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match="processor"):
        task_of(bare, chat_template=template)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "<video> q"}, {"from": "gpt", "value": "a"}], "video": "v.mp4"},
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}]},
        {"messages": [{"role": "user", "content": "<video> q"}, {"role": "assistant", "content": "a"}]},
    ],
    ids=["llava", "typed", "mark"],
)
def test_videos_are_refused_in_words(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="has a video.*frames of it as images"):
        sample_of(row, "llava" if "conversations" in row else "sharegpt", "row", tmp_path)


def test_a_model_that_cannot_be_taken_apart_is_run_in_one_piece(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any) -> Any:
        raise UnsupportedModelError("Its parts would give something else.")

    monkeypatch.setattr(MultimodalModel, "from_multimodal", staticmethod(refuse))
    folder = write_folder("qwen2.5-vl", folders)
    task = task_of(folder)
    assert isinstance(task.model, UndividedModel) and task.modalities() == {"vision": "image"}
    samples = [asked(picture(20, 30), "q1"), asked("q2", answer="a2 a3")]
    inputs = task.collator(samples).inputs
    own = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    expected = own(**{key: value for key, value in inputs.items() if key != "facts"})
    assert task.loss(inputs).item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert isinstance(task.reply(samples[0].messages[:1], most_tokens=2), str)

    # A batch without images still takes every parameter's gradient along, and its loss is the same.
    text = task.collator(samples[1:]).inputs
    alone = task.loss(text).item()
    task.model.keep_encoders_running(task.collator.processor.stand_in_rows())
    loss = task.loss(text)
    loss.backward()
    assert loss.item() == pytest.approx(alone, rel=1e-6)
    assert [name for name, p in task.model.named_parameters() if p.grad is None] == []

    task.save(tmp_path / "saved")
    again = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.lm_head.weight, own.lm_head.weight)
    assert torch.equal(task_of(tmp_path / "saved").collator(samples).inputs["input_ids"], inputs["input_ids"])
    with pytest.raises(ConfigError, match=r"data.packing.*parts would give something else"):
        task_of(folder, packing=True)


def test_all_special_tokens_that_end_an_answer_are_learned(folders: Path, tmp_path: Path) -> None:
    folder = write_folder("qwen2.5-vl", folders)
    # As in Aya's template: two tokens end an answer, and the next turn begins with one.
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }} "
        "{% for part in message.content %}{{ part.text }}{% endfor %}"
        "{% if message.role == 'assistant' %}<|vision_end|>{% endif %}<|im_end|>{% endfor %}<|endoftext|>"
    )
    turns = (*asked("q1", answer="a1").messages, *asked("q2", answer="a2").messages)
    assert shown(task_of(folder, chat_template=template), Sample("two", turns)) == (
        "<|im_start|>user q1<|im_end|><|im_start|>assistant⟦ a1<|vision_end|><|im_end|>⟧"
        "<|im_start|>user q2<|im_end|><|im_start|>assistant⟦ a2<|vision_end|><|im_end|>⟧<|endoftext|>"
    )


def test_a_question_and_an_answer_are_prefix_and_suffix(folders: Path) -> None:
    if "paligemma" not in FOLDERS:
        pytest.skip("no folder of a processor without a chat template")
    collator = task_of(write_folder("paligemma", folders)).collator
    prepared = collator.prepare(asked(picture(), "q1 q2", answer="a1 a2"))
    tokenizer = collator.processor.llm_tokenizer
    assert tokenizer.decode(prepared.labels[prepared.labels != -100]) == f"a1 a2{tokenizer.eos_token}"
    for sample in (asked("q1"), Sample("two", asked(picture(), "q1").messages * 2)):
        with pytest.raises(SampleError, match="image|one question and one answer"):
            collator.prepare(sample)
