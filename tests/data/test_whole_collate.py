"""Batches of whole models equal those of their own processors, with labels on the answers."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)
from transformers.utils import is_mistral_common_available

from cornstarch import MultimodalModel
from cornstarch.config import RunConfig
from cornstarch.cost.flops import FlopCounter
from cornstarch.data.load_balancing import SampleSizer
from cornstarch.data.sample import Media, Message, Sample, SampleError, SampleTooLongError, parse_row
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model.import_hf.decompose import UndividedModel
from cornstarch.models.multimodal_language_model.preprocessing import hf_processor as whole_processing
from cornstarch.tasks.build import build_task
from cornstarch.tasks.conversation import preview_chat
from tests.models.local_processors import image
from tests.models.whole_folders import FOLDERS, write_folder
from tests.models.whole_folders.stored import StoredFamily


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


def task_of(folder: Path, **data: Any) -> Any:
    data = {"train": [{"path": "unused.json"}], **data}
    return build_task(RunConfig.model_validate({"model": {"whole": {"path": str(folder)}}, "data": data}))


def picture(width: int = 16, height: int = 16, seed: int = 0) -> Media:
    return Media("image", image(width, height, seed))


def build_question(*parts: Any, answer: str = "a1") -> Sample:
    return Sample("asked", (Message("user", parts), Message("assistant", (answer,))))


def mark_trained_text(task: Any, sample: Sample) -> str:
    """Return a sample as `data check` shows it."""
    pieces = preview_chat(task.collator)(sample).pieces
    return "".join(f"⟦{text}⟧" if trained else text for text, trained in pieces)


def test_two_adjacent_images_of_qwen_have_their_marks(folders: Path) -> None:
    task = task_of(write_folder("qwen2.5-vl", folders))
    row = {"messages": [{"role": "user", "content": "<image><image> q1"}, {"role": "assistant", "content": "a1"}]}
    sample = parse_row({**row, "images": [image(16, 16), image(24, 16)]}, "sharegpt", "row", folders)
    text = mark_trained_text(task, sample).partition("user\n")[2]
    image_pads = ("<|vision_start|><|image_pad|>×4<|vision_end|>", "<|vision_start|><|image_pad|>×6<|vision_end|>")
    assert text == "".join(image_pads) + " q1<|im_end|>\n<|im_start|>assistant\n⟦a1<|im_end|>⟧\n"
    batch = task.collator([sample, build_question("q2")])
    assert batch.inputs["image_grid_thw"].shape == (2, 3) and batch.trained_tokens == 4
    task.loss(batch.inputs).backward()
    assert float(task.model.vision_encoder.module.patch_embed.proj.weight.grad.abs().sum()) > 0


def test_a_line_break_beside_a_mark_is_the_templates(folders: Path) -> None:
    task = task_of(write_folder("llava", folders))
    turns = [{"from": "human", "value": "<image>\nq1 q2"}, {"from": "gpt", "value": "a1"}]
    sample = parse_row({"conversations": turns, "image": image()}, "llava", "row", folders)
    assert mark_trained_text(task, sample) == "<s>USER: <image>×4\nq1 q2 ASSISTANT:⟦ a1 ⟧"


def test_a_turn_is_ended_by_a_token_without_a_name(folders: Path) -> None:
    task = task_of(write_folder("gemma3", folders))
    tokenizer = task.collator.processor.llm_tokenizer
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert end not in tokenizer.all_special_ids
    labels = task.collator.prepare(build_question(picture(), "q1")).labels
    assert labels[labels != -100].tolist() == [tokenizer.convert_tokens_to_ids("a1"), end]
    assert end in task.collator.answer_ends


@pytest.mark.parametrize("name", [n for n in ("qwen2.5-vl", "llava", "llava-onevision") if n in FOLDERS])
def test_sample_sizes_need_no_decoding(name: str, folders: Path) -> None:
    task = task_of(write_folder(name, folders))
    sizer = SampleSizer(task.collator, FlopCounter(task.model).step)
    for sample in (
        build_question("q1"),
        build_question(picture(40, 20), "q1"),
        build_question("q1", picture(), picture(20, 30), "q2"),
    ):
        size, prepared = sizer(sample), task.collator.prepare(sample)
        assert (size.tokens, size.trained) == (len(prepared.input_ids), prepared.trained_tokens)
        assert size.items == {"vision": len(sample.media)} and bool(sample.media) == (size.work["vision"] > 0)


def test_long_samples_are_cut_behind_their_items(folders: Path) -> None:
    folder = write_folder("llava", folders)
    long = build_question(picture(), "q1 q2 q3", answer="a1 a2 a3 a4")
    length = len(task_of(folder).collator.prepare(long).input_ids)
    cut = task_of(folder, max_length=length - 2, too_long="cut").collator
    assert len(cut.prepare(long).input_ids) == length - 2
    turns = (*long.messages, Message("user", (picture(),)), Message("assistant", ("a5",)))
    with pytest.raises(SampleTooLongError, match="an item stands beyond it"):
        cut.prepare(Sample("beyond", turns))


def test_the_models_own_prompt_is_continued(folders: Path) -> None:
    task = task_of(write_folder("qwen2.5-vl", folders))
    question = [Message("user", (picture(), "q1"))]
    inputs = task.collator.build_prompt(question)
    own = task.collator.processor.original.apply_chat_template(
        [[{"role": "user", "content": [{"type": "image", "image": image(16, 16)}, {"type": "text", "text": "q1"}]}]],
        tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True,
    )  # fmt: skip
    assert inputs.keys() == own.keys() and all(torch.equal(inputs[key], own[key]) for key in own)
    assert isinstance(task.reply(question, most_tokens=2), str)


def test_a_saved_model_has_the_processor(folders: Path, tmp_path: Path) -> None:
    folder = write_folder("qwen2.5-vl", folders)
    task, sample = task_of(folder), build_question(picture(20, 30), "q1")
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


def test_unsupported_processor_is_refused(folders: Path, tmp_path: Path) -> None:
    folder = write_folder("llava", folders)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"without a chat template.*`data.chat_template`"):
        task_of(bare)
    template = (folder / "chat_template.jinja").read_text()
    sample = build_question(picture(), "q1")
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
        parse_row(row, "llava" if "conversations" in row else "sharegpt", "row", tmp_path)


def test_a_model_that_cannot_be_taken_apart_is_run_in_one_piece(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: Any) -> Any:
        raise UnsupportedModelError("Its parts would give something else.")

    monkeypatch.setattr(MultimodalModel, "from_multimodal", staticmethod(refuse))
    folder = write_folder("qwen2.5-vl", folders)
    task = task_of(folder)
    assert isinstance(task.model, UndividedModel) and task.modalities() == {"vision": "image"}
    samples = [build_question(picture(20, 30), "q1"), build_question("q2", answer="a2 a3")]
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
    turns = (*build_question("q1", answer="a1").messages, *build_question("q2", answer="a2").messages)
    assert mark_trained_text(task_of(folder, chat_template=template), Sample("two", turns)) == (
        "<|im_start|>user q1<|im_end|><|im_start|>assistant⟦ a1<|vision_end|><|im_end|>⟧"
        "<|im_start|>user q2<|im_end|><|im_start|>assistant⟦ a2<|vision_end|><|im_end|>⟧<|endoftext|>"
    )


def test_a_question_and_an_answer_are_prefix_and_suffix(folders: Path) -> None:
    if "paligemma" not in FOLDERS:
        pytest.skip("no folder of a processor without a chat template")
    collator = task_of(write_folder("paligemma", folders)).collator
    prepared = collator.prepare(build_question(picture(), "q1 q2", answer="a1 a2"))
    tokenizer = collator.processor.llm_tokenizer
    assert tokenizer.decode(prepared.labels[prepared.labels != -100]) == f"a1 a2{tokenizer.eos_token}"
    for sample in (build_question("q1"), Sample("two", build_question(picture(), "q1").messages * 2)):
        with pytest.raises(SampleError, match="image|one question and one answer"):
            collator.prepare(sample)


# ------------------------------------------------------------------------------------------------ token templates


CHUNK, SAMPLES_PER_TOKEN = 480_000, 1280


class SoundTokenizer(PreTrainedTokenizerFast):
    """Makes tokens of conversations as mistral-common does: sounds are files, of which 30 seconds are 375 tokens."""

    forgetful = False

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:  # type: ignore[override]
        conversations = conversation if isinstance(conversation[0], list) else [conversation]
        sounds: list[np.ndarray] = []
        texts = [self._write(messages, sounds) for messages in conversations]
        made = self(texts, add_special_tokens=False, padding=True)
        return {**made, "audio": sounds} if sounds else made

    def _write(self, messages: list[Any], sounds: list[np.ndarray]) -> str:
        text = "<s>"
        for message in messages:
            inner = "".join(self._write_part(part, sounds) for part in message["content"])
            if message["role"] == "assistant":
                text += "" if self.forgetful and message is not messages[-1] else f"{inner}</s>"
            else:
                text += f"[INST]{inner}[/INST]"
        return text

    @staticmethod
    def _write_part(part: dict[str, Any], sounds: list[np.ndarray]) -> str:
        if part["type"] == "text":
            return str(part["text"])
        if "base64" not in part:
            raise ValueError("Audio content must be specified.")
        sound, rate = soundfile.read(io.BytesIO(base64.b64decode(part["base64"])), dtype="float32")
        assert rate == 16_000
        sounds.append(np.pad(sound, (0, -len(sound) % CHUNK)))
        return "[BEGIN_AUDIO]" + "[AUDIO]" * (len(sounds[-1]) // SAMPLES_PER_TOKEN)


class Forgetful(SoundTokenizer):
    """Leaves out all answers but the last, as templates do with earlier thoughts."""

    forgetful = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("voxtral", tmp_path_factory.mktemp("whole"))


def words(kind: type[PreTrainedTokenizerFast], **options: Any) -> Any:
    """Return Voxtral's processor with a tokenizer of words."""
    tokens = ("[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]")
    family = StoredFamily("", lambda ids: None, {}, None, tokens, reserved=("[AUDIO]", 24))
    plain = family.tokenizer()
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = kind(tokenizer_object=plain.backend_tokenizer, **named, **options)
    settings = dict(FOLDERS["voxtral"].processor["feature_extractor"])
    settings.pop("feature_extractor_type")
    return VoxtralProcessor(WhisperFeatureExtractor(**settings), tokenizer)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(processor: Any) -> None:
        monkeypatch.setattr(whole_processing, "load_processor_of", lambda *_: processor)

    return put


def sound(samples: int = 4000) -> Media:
    return Media("audio", np.random.default_rng(samples).standard_normal(samples).astype(np.float32))


TWO_TURNS = Sample(
    "two turns",
    (
        Message("user", (sound(), "q1")),
        Message("assistant", ("a1",)),
        Message("user", (sound(5000), "q2")),
        Message("assistant", ("a2",)),
    ),
)


@pytest.mark.parametrize("own", [False, True], ids=["words", "mistral-common"])
def test_answers_are_where_the_tokens_of_the_questions_end(own: bool, folder: Path, use: Any) -> None:
    if own and not is_mistral_common_available():
        pytest.skip("mistral-common is not installed")
    if not own:
        use(words(SoundTokenizer))
    task = task_of(folder)
    heard = "[BEGIN_AUDIO][AUDIO]×375"
    assert mark_trained_text(task, TWO_TURNS) == f"<s>[INST]{heard}q1[/INST]⟦a1</s>⟧[INST]{heard}q2[/INST]⟦a2</s>⟧"
    collator = task.collator
    assert collator.answer_ends == [collator.processor.llm_tokenizer.eos_token_id]
    # Nothing of a sound is cut off where the template counts all of it.
    long = collator.prepare(Sample("long", (Message("user", (sound(CHUNK + 1), "q1")), TWO_TURNS.messages[1])))
    assert long.encoder_inputs["input_features"].shape == (2, 8, 3000) and int((long.input_ids == 24).sum()) == 750
    # How large it is, without a sound being decoded; and what is not trained on, if anything.
    ids, learned = collator.tokenize(TWO_TURNS)
    _, taken = collator.item_inputs("audio", [sound(CHUNK + 1).source])
    assert taken == [750] and int((ids == 24).sum()) == 2
    assert collator.processor.llm_tokenizer.decode(ids[learned]) == "a1</s>a2</s>"
    everything = type(collator)(collator.processor, collator.data.model_copy(update={"train_on": "everything"}))
    assert everything.tokenize(TWO_TURNS)[1].all()
    with pytest.raises(SampleError, match="without roles"):
        collator.prepare(Sample("a document", document=("q1",)))
    with pytest.raises(ConfigError, match="data.chat_template"):
        whole_processing.WholeModelProcessor(collator.processor.original, task.model, "{{ messages }}")


def test_a_template_that_rewrites_what_came_before_an_answer_is_refused(folder: Path, use: Any) -> None:
    use(words(Forgetful))
    with pytest.raises(SampleError, match="unknown which tokens the answer is"):
        task_of(folder).collator.prepare(TWO_TURNS)


def test_a_processor_that_leaves_sounds_out_is_refused(folder: Path, use: Any) -> None:
    """transformers' own Voxtral around a tokenizer with a chat template of text: what it made had no sounds."""
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    use(words(PreTrainedTokenizerFast, chat_template=template))
    with pytest.raises(ConfigError, match=r"VoxtralProcessor .* does not take audio items .* leaves them out"):
        task_of(folder)


@pytest.mark.skipif(is_mistral_common_available(), reason="mistral-common is installed")
def test_missing_part_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install \"transformers\[mistral-common\]\""):
        task_of(folder)


def test_the_processor_is_asked_once_and_for_few_whether_it_only_concatenates(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(write_folder("llava", folders))
    own, together = task.collator.processor, []
    encode = own.encode_batch
    monkeypatch.setattr(own, "encode_batch", lambda given: together.append(len(given)) or encode(given))
    texts = [build_question("q1"), build_question("q2 q3")]
    shown = [build_question(*[picture(seed=number)] * (1 + number % 3), "q1") for number in range(6)]
    batches = [[*texts, *shown], shown, shown[:2], [shown[0], *texts]]
    found = [task.collator(batch).inputs["pixel_values"] for batch in batches]
    assert together == [3]  # a text, and the samples with the fewest and with the most images
    for batch, pixels in zip(batches, found, strict=True):
        sources = [task.collator.prepare(sample).source for sample in batch]
        assert torch.equal(pixels, encode(sources)["pixel_values"])
