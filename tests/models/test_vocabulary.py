"""A tokenizer that encodes nothing, or that belongs to another model, is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import MultimodalModel, MultimodalProcessor
from cornstarch.models.multimodal_language_model.preprocessing.tokenization import check_tokenizer
from tests.documented import hub
from tests.models import local_processors
from tests.zoo import LANGUAGE_MODELS, VOCABULARY


# To nothing; to special tokens alone; to unknown tokens; to unknown tokens and spaces.
@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "bert", "t5"])
def test_a_tokenizer_without_files_is_refused(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="encodes plain text to nothing") as error:
        MultimodalProcessor({}, tokenizer)
    assert f"{len(tokenizer)} tokens" in str(error.value) and "tokenizer.json" in str(error.value)


@pytest.mark.parametrize("make", [hub.tokenizer, local_processors.tokenizer])
def test_a_tokenizer_of_few_words_is_tried_on_its_own(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    check_tokenizer(make())


def test_ordinary_tokens_must_have_a_row_and_added_ones_need_none() -> None:
    model: LlamaForCausalLM = LANGUAGE_MODELS["llama"].build()
    tokenizer = local_processors.tokenizer()
    tokenizer.add_tokens(["<new>"])
    assert tokenizer.convert_tokens_to_ids("<new>") == VOCABULARY
    MultimodalProcessor({}, tokenizer, MultimodalModel({}, model))
    small = LANGUAGE_MODELS["llama"].build(vocab_size=VOCABULARY - 2)
    with pytest.raises(ConfigError, match=rf"has 2 tokens beyond the model's embedding table of {VOCABULARY - 2} rows"):
        MultimodalProcessor({}, tokenizer, MultimodalModel({}, small))
