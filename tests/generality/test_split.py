"""A sample of the sweep over language models and encoders; `python -m tests.generality.split` judges them all."""

from __future__ import annotations

import pytest
import transformers

from cornstarch.parallel import tested
from tests.generality import results
from tests.generality.split import judge_split
from tests.models.stimuli import first_argument
from tests.models.sweep import REFUSED, SUPPORTED

SAMPLE = {
    "BertLMHeadModel": SUPPORTED,
    "BloomForCausalLM": SUPPORTED,  # slopes of attention are made before the layers
    "DeepseekV3ForCausalLM": SUPPORTED,
    "Gemma3nForCausalLM": SUPPORTED,  # embeddings of every layer, read by each
    "GptOssForCausalLM": SUPPORTED,
    "JambaForCausalLM": SUPPORTED,
    "MambaForCausalLM": SUPPORTED,
    "MllamaForCausalLM": SUPPORTED,  # layers that only some batches run through
    "OpenAIGPTLMHeadModel": SUPPORTED,  # layers of plain modules; its head cannot run alone
    "RoFormerForCausalLM": SUPPORTED,  # a table that is looked up without a gradient
    "XLNetLMHeadModel": SUPPORTED,
    "HrmTextForCausalLM": REFUSED,  # runs through its layers again
    "DINOv3ViTModel": SUPPORTED,
    "Qwen3VLVisionModel": SUPPORTED,  # modules between layers, whose results are handed out
    "Siglip2VisionModel": SUPPORTED,  # numbers decide about shapes before the layers
    "SwinModel": SUPPORTED,  # shapes change from layer to layer
    "Wav2Vec2Model": SUPPORTED,
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_models(name: str) -> None:
    verdict = judge_split(name)
    assert verdict.status == SAMPLE[name], verdict
    assert (verdict.cuts > 0) == (verdict.status == SUPPORTED)


def test_the_table_has_what_the_sweep_found() -> None:
    found = tested.read_table()["pp"]
    if found.versions["transformers"] != transformers.__version__:
        pytest.skip(f"the sweep was run with transformers {found.versions['transformers']}")
    assert found.verdicts.keys() == set(results.all_names(results.LANGUAGE_MODELS, results.ENCODERS))
    assert all(verdict.status != tested.WRONG for verdict in found.verdicts.values())
    assert all(verdict.reason for verdict in found.verdicts.values() if verdict.status == tested.REFUSED)
    passed = {name for name, verdict in found.verdicts.items() if verdict.status == tested.PASSED}
    seeing = [name for name in passed if first_argument(getattr(transformers, name)).startswith("pixel_values")]
    assert len(passed & set(results.all_names(results.LANGUAGE_MODELS))) >= 110
    assert len(set(seeing) & set(results.all_names(results.ENCODERS))) >= 18
