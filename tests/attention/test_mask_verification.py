"""Models that respect masks as data are switched; others are refused and do not change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn

from cornstarch.attention import IMPLEMENTATION, MaskSpec, attend_through_masks, use_mask
from cornstarch.attention.interface import DENSE_IMPLEMENTATION
from cornstarch.errors import UnsupportedModelError
from tests import zoo

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64}

# Models that would be trained wrongly: class, config and the reason of the refusal.
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "recurrent (Mamba)": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "depend on another document",
    ),
    "hybrid of attention and recurrence (Jamba)": (
        "JambaForCausalLM",
        "JambaConfig",
        {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
        "depend on another document",
    ),
    "hybrid of attention and linear attention (Qwen3-Next)": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **GROUPED,
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "depend on another document",
    ),
    "hybrid of attention and convolution (LFM2)": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**GROUPED, "layer_types": ["conv", "full_attention"]},
        "depend on another document",
    ),
    "ALiBi in attention code of its own (BLOOM)": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "attention code of its own",
    ),
    "attention code of its own (GPT-J)": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "attention code of its own",
    ),
    "attention code of its own (Falcon)": (
        "FalconForCausalLM",
        "FalconConfig",
        {**SIZES, "alibi": True},
        "attention code of its own",
    ),
    "positions that do not count from 0 (RoBERTa)": (
        "RobertaForCausalLM",
        "RobertaConfig",
        {**SIZES, "intermediate_size": 64, "is_decoder": True},
        "do not count from 0",
    ),
    "not causal (BERT as an encoder)": (
        "BertLMHeadModel",
        "BertConfig",
        {**SIZES, "intermediate_size": 64, "is_decoder": False},
        "text sees tokens that come after it",
    ),
}


def build_refused_model(name: str) -> transformers.PreTrainedModel:
    model_class, config_class, options, _ = REFUSED[name]
    config = getattr(transformers, config_class)(**options)
    return zoo.build(getattr(transformers, model_class), config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_model_that_ignores_masks_is_refused_and_unchanged(name: str, dtype: torch.dtype) -> None:
    model = build_refused_model(name).to(dtype).train()
    before = model.config._attn_implementation
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(UnsupportedModelError) as caught:
            attend_through_masks(model)
        assert REFUSED[name][3] in str(caught.value)
        assert type(model).__name__ in str(caught.value)
        assert model.config._attn_implementation == before
        assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", zoo.LANGUAGE_MODELS)
def test_model_that_respects_masks_is_switched(name: str, dtype: torch.dtype) -> None:
    model = zoo.LANGUAGE_MODELS[name].build().to(dtype)
    attend_through_masks(model)
    hands_on = model._supports_flex_attn or model._supports_attention_backend
    assert model.config._attn_implementation == (IMPLEMENTATION if hands_on else DENSE_IMPLEMENTATION)


def test_model_that_reads_its_masks_gets_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = zoo.LANGUAGE_MODELS["gpt2"].build()  # FlexAttention is not said to support it
    kind = type(model.transformer.h[0].attn)
    plain = kind.forward

    def read(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :, :]
        return plain(self, *args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(kind, "forward", read)
    attend_through_masks(model)
    assert model.config._attn_implementation == DENSE_IMPLEMENTATION


def llama(**options: Any) -> transformers.PreTrainedModel:
    return zoo.LANGUAGE_MODELS["llama"].build(**options)


def test_double_precision_is_verified() -> None:
    model = llama().double()
    attend_through_masks(model)
    assert model.config._attn_implementation == IMPLEMENTATION


def test_verification_has_no_side_effects() -> None:
    model = llama(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    model.lm_head.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    random_state = torch.random.get_rng_state()
    attend_through_masks(model)
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.lm_head.weight.requires_grad
    assert torch.equal(random_state, torch.random.get_rng_state())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name])


def count_forwards(model: nn.Module) -> list[int]:
    calls = [0]
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return calls


def test_verification_runs_once_per_model() -> None:
    model = llama()
    calls = count_forwards(model)
    attend_through_masks(model)
    assert 0 < calls[0] <= 8
    first = calls[0]
    attend_through_masks(model)
    assert calls[0] == first
    model.set_attn_implementation("sdpa")
    attend_through_masks(model)  # switched away in between: verified again
    assert calls[0] == 2 * first
    attend_through_masks(copy.deepcopy(model))  # another model


def test_verification_is_skipped_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama().config)
    model.set_attn_implementation("sdpa")
    calls = count_forwards(model)
    attend_through_masks(model)
    assert model.config._attn_implementation == IMPLEMENTATION
    assert calls[0] == 0
    loaded = model.to_empty(device="cpu")
    loaded.load_state_dict(llama().state_dict())
    for original, module in zip(llama().modules(), loaded.modules(), strict=True):
        for name, buffer in original.named_buffers(recurse=False):
            getattr(module, name).copy_(buffer)
    attend_through_masks(loaded)  # now it can be verified
    assert calls[0] > 0


def test_peft_model_is_switched() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.5))
    zoo.disturb(model)
    model.train()
    attend_through_masks(model)
    assert model.get_base_model().config._attn_implementation == IMPLEMENTATION
    assert all(module.training for module in model.modules())
    spec = MaskSpec.from_documents(torch.tensor([[1, 1, 1, 2, 2, 2]]))
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    model.eval()
    with use_mask(spec):
        packed = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=spec.positions()).logits
    torch.testing.assert_close(packed[:, 3:], model(input_ids=ids[:, 3:]).logits, rtol=1e-4, atol=1e-4)


TUNINGS = {
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", TUNINGS)
def test_adapters_that_add_tokens_to_the_row_are_refused(name: str) -> None:
    """A spec does not describe these tokens."""
    model = get_peft_model(llama(), TUNINGS[name])
    with pytest.raises(UnsupportedModelError):
        attend_through_masks(model)
    assert model.get_base_model().config._attn_implementation != IMPLEMENTATION


def test_every_weight_gets_a_gradient_under_autocast() -> None:
    """Autocast caches cast weights; the verification runs without gradients and must not leave any behind."""
    model = llama().train()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    spec = MaskSpec.from_documents(torch.tensor([[1, 1, 1, 2, 2, 2]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attend_through_masks(model)
        with use_mask(spec):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_compiled_model_is_switched() -> None:
    model = torch.compile(llama())
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        attend_through_masks(model)
    assert model._orig_mod.config._attn_implementation == IMPLEMENTATION


def test_a_base_model_without_a_head_is_switched() -> None:
    model = llama().model
    attend_through_masks(model)
    assert model.config._attn_implementation == IMPLEMENTATION


def test_other_modules_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        attend_through_masks(nn.Linear(2, 2))


def test_a_model_that_fails_is_refused_with_its_own_error() -> None:
    model = zoo.LANGUAGE_MODELS["mixtral"].build().double()  # its experts cannot compute in double precision
    with pytest.raises(UnsupportedModelError, match="its forward raised RuntimeError: .*Double"):
        attend_through_masks(model)


def test_a_model_with_broken_weights_is_refused() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(UnsupportedModelError):
        attend_through_masks(model)
