"""Chat templates that make tokens of conversations rather than a text, as mistral-common's do for Voxtral."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from transformers import PreTrainedTokenizerFast, VoxtralProcessor, WhisperFeatureExtractor
from transformers.utils import is_mistral_common_available

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import whole_processing
from cornstarch.train.data.sample import Media, Message, Sample, SampleError
from tests.models.whole_folders import FOLDERS, write_folder
from tests.models.whole_folders.stored import StoredFamily
from tests.train.data.test_whole_collate import shown, task_of

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
    assert shown(task, TWO_TURNS) == f"<s>[INST]{heard}q1[/INST]⟦a1</s>⟧[INST]{heard}q2[/INST]⟦a2</s>⟧"
    collator = task.collator
    assert collator.answer_ends == [collator.processor.llm_tokenizer.eos_token_id]
    # Nothing of a sound is cut off where the template counts all of it.
    long = collator.prepare(Sample("long", (Message("user", (sound(CHUNK + 1), "q1")), TWO_TURNS.messages[1])))
    assert long.encoder_inputs["input_features"].shape == (2, 8, 3000) and int((long.input_ids == 24).sum()) == 750
    # How large it is, without a sound being decoded; and what is not trained on, if anything.
    ids, learned = collator.written(TWO_TURNS)
    _, taken = collator.item_inputs("audio", [sound(CHUNK + 1).source])
    assert taken == [750] and int((ids == 24).sum()) == 2
    assert collator.processor.llm_tokenizer.decode(ids[learned]) == "a1</s>a2</s>"
    everything = type(collator)(collator.processor, collator.data.model_copy(update={"train_on": "everything"}))
    assert everything.written(TWO_TURNS)[1].all()
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
def test_what_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install \"transformers\[mistral-common\]\""):
        task_of(folder)
