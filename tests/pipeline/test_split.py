"""Stages of language models and encoders compute what the model in one piece computes: loss and every gradient."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cornstarch.attention import attend_through_masks
from cornstarch.errors import ConfigError
from cornstarch.pipeline.remote_module import RemoteModule
from cornstarch.pipeline.split import cut, survey
from cornstarch.pipeline.stage import StageModule
from cornstarch.pipeline.template import PipelineTemplate
from tests.pipeline.protocol import Emulation, assert_same, collect_staged_gradients, stages_of, whole_gradients
from tests.zoo import ENCODERS, LANGUAGE_MODELS, build, generator, text_batch

ROWS = ("tttttttttttt", "tttttttt")
OTHERS = ("ttttttttt", "tttttttttt", "ttttt")  # other shapes in the second microbatch
GPIPE = ["F0", "F1", "B0", "B1"]


def loss_of(output: Any) -> Tensor:
    return output.loss


def batches() -> list[dict[str, Tensor]]:
    return [text_batch(rows) for rows in (ROWS, OTHERS)]


def language_model(name: str, layers: int = 4, **options: Any) -> nn.Module:
    if name == "gemma3":
        options["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if name == "llama4":
        options["no_rope_layers"] = [1, 0] * 2
    return LANGUAGE_MODELS[name].build(num_hidden_layers=layers, **options).train()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_stages_of_language_models_compute_what_the_model_does(name: str, checkpointing: bool) -> None:
    model = language_model(name)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = whole_gradients(model, batches(), loss_of)
    for stages in (2, 3):
        assert_same(collect_staged_gradients(stages_of(model, stages), batches(), loss_of, GPIPE), expected)


ORDERS = [
    ["F0", "F1", "B0", "B1"],
    ["F0", "F1", "B1", "B0"],
    ["F0", "B0", "F1", "B1"],
]


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_microbatches_may_run_in_any_order(order: list[str]) -> None:
    model = language_model("qwen2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = whole_gradients(model, batches(), loss_of)
    assert_same(collect_staged_gradients(stages_of(model, 3), batches(), loss_of, order), expected)


def test_every_boundary_can_be_split_and_the_head_can_be_a_stage() -> None:
    model = language_model("gemma2")
    expected = whole_gradients(model, batches(), loss_of)
    names = PipelineTemplate.get_modules(model)
    ends = [number + 1 for number, name in enumerate(names) if ".layers." in name]
    for end in ends:
        template = PipelineTemplate(PipelineTemplate.get_model_name(model), [names[:end], names[end:]])
        assert_same(collect_staged_gradients(stages_of(model, template), batches(), loss_of), expected)


def with_embeddings_only(model: nn.Module, *ends: int) -> PipelineTemplate:
    """Return a template whose first stage ends before the first layer, the others behind so many layers."""
    names = PipelineTemplate.get_modules(model)
    layers = [place for place, name in enumerate(names) if name in survey(model).layers]
    places = [0, layers[0], *(layers[end - 1] + 1 for end in ends), len(names)]
    stages = [names[start:end] for start, end in itertools.pairwise(places)]
    return PipelineTemplate(PipelineTemplate.get_model_name(model), stages)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
def test_first_stage_may_have_embeddings_only(name: str, tied: bool) -> None:
    model = language_model(name, tie_word_embeddings=tied)
    expected = whole_gradients(model, batches(), loss_of)
    for ends in ((), (2,)):
        parts = stages_of(model, with_embeddings_only(model, *ends))
        assert_same(collect_staged_gradients(parts, batches(), loss_of, GPIPE), expected)
        kept = {key for key, _ in parts[0].model.named_parameters()}
        assert kept and not any(".0." in key for key in kept) and [part.first for part in parts][:2] == [True, False]


@pytest.mark.parametrize("name", ["clip", "siglip", "whisper"])
def test_first_stage_of_an_encoder_may_have_embeddings_only(name: str) -> None:
    part = ENCODERS[name]
    model = part.build()
    expected = whole_gradients(model, [part.inputs(2)], squared)
    found = collect_staged_gradients(stages_of(model, with_embeddings_only(model)), [part.inputs(2)], squared)
    assert_same(found, expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_first_layer_that_reads_more_than_its_input_is_refused_behind_embeddings(layers: int) -> None:
    """Results that several layers read are sent separately; a result that only the first layer reads is not."""
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=layers, num_kv_shared_layers=0, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4,
        intermediate_size=[64] * layers, layer_types=["sliding_attention", "full_attention"][-layers:],
        activation_sparsity_pattern=[0.0] * layers, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Gemma3nForCausalLM(config)
    if layers == 1:
        with pytest.raises(ConfigError, match="cannot begin with a stage without layers: a small copy computes"):
            stages_of(model, with_embeddings_only(model))
        return
    expected = whole_gradients(model, batches(), loss_of)
    assert_same(collect_staged_gradients(stages_of(model, with_embeddings_only(model)), batches(), loss_of), expected)


def squared(output: Any) -> Tensor:
    """Return a loss of everything that an encoder puts out."""
    found = [value for value in output.to_tuple() if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([value.pow(2).mean() for value in found]).sum()


@pytest.mark.parametrize("name", ENCODERS)
def test_stages_of_encoders_compute_what_the_encoder_does(name: str) -> None:
    part = ENCODERS[name]
    model = part.build()
    inputs = [part.inputs(2, seed=seed) for seed in (2, 3)]
    expected = whole_gradients(model, inputs, squared)
    assert_same(collect_staged_gradients(stages_of(model, 2), inputs, squared, GPIPE), expected)


# ------------------------------------------------------------------------------------------------ parameters


def test_gradients_of_tied_embeddings_add_up() -> None:
    model = language_model("llama", tie_word_embeddings=True)
    parts = stages_of(model, 3)
    assert [part.tied for part in parts] == [
        {"model.embed_tokens.weight": "model.embed_tokens.weight"},
        {},
        {"lm_head.weight": "model.embed_tokens.weight"},
    ]
    found = collect_staged_gradients(parts, batches(), loss_of)
    assert_same(found, whole_gradients(model, batches(), loss_of))
    both = [parts[0].model.model.embed_tokens.weight.grad, parts[2].model.lm_head.weight.grad]
    assert all(gradient.abs().sum() > 0 for gradient in both)


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "model.layers.0", "model.layers.3", "model", "lm_head"])
def test_frozen_modules_have_no_gradient(frozen: str) -> None:
    model = language_model("llama")
    model.get_submodule(frozen).requires_grad_(False)
    expected = whole_gradients(model, batches(), loss_of)
    parts = stages_of(model, 2)
    emulation = Emulation(parts, batches(), loss_of)
    emulation.run(GPIPE)
    total = torch.stack([loss.detach() for loss in emulation.losses.values()]).sum()
    assert_same({"loss": total, **emulation.gradients()}, expected)
    # The output of frozen modules with nothing trained before them requires no gradient.
    assert any(tensor.requires_grad for tensor in emulation.made[0, 0]) == (frozen != "model")


def test_adapters_keep_names_and_gradients() -> None:
    peft = pytest.importorskip("peft")
    base = language_model("llama")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    parts = stages_of(model, 2)
    assert_same(collect_staged_gradients(parts, batches(), loss_of), whole_gradients(model, batches(), loss_of))
    names = {name for part in parts for name, _ in part.model.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}


def test_names_stay_and_remote_parameters_are_on_meta() -> None:
    model = language_model("llama")
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts = stages_of(model, 3)
    found: dict[str, Tensor] = {}
    for part in parts:
        own = part.model.state_dict()
        assert not found.keys() & own.keys()
        found |= own
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    remote = [module for module in parts[0].model.modules() if isinstance(module, RemoteModule)]
    assert len(remote) > 2
    assert all(parameter.is_meta for module in remote for parameter in module.original.parameters())


def test_memory_of_remote_parameters_is_freed() -> None:
    import gc
    import weakref

    model = language_model("llama")
    gone = weakref.ref(model.model.layers[3].mlp.up_proj.weight)
    kept = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    part = cut(model, PipelineTemplate.split(model, 2, by="uniform"), 0)
    gc.collect()
    assert gone() is None
    assert kept() is part.model.model.layers[0].mlp.up_proj.weight


def test_meta_model_stays_on_meta_and_keeps_its_buffers() -> None:
    config = language_model("llama").config
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    template = PipelineTemplate.split(empty, 2)
    part = cut(empty, template, 1)
    assert all(parameter.is_meta for parameter in part.parameters())
    real = cut(language_model("llama"), template, 1)
    assert real.model.model.rotary_emb.inv_freq.abs().sum() > 0
    assert {name for name, _ in part.named_parameters()} == {name for name, _ in real.named_parameters()}
    assert part.model.get_input_embeddings().weight.device.type == "meta"
    # Once the weights are loaded, placeholders are on the device of the stage.
    part = part.to_empty(device="cpu")
    table = part.model.get_input_embeddings().weight
    assert table.device.type == "cpu"
    assert table.shape == (config.vocab_size, config.hidden_size)
    assert table.dtype == torch.float32
    part.load_state_dict(real.state_dict())
    part.model.model.rotary_emb = real.model.model.rotary_emb
    received = stages_of(language_model("llama"), template)[0](batches()[0])
    assert torch.equal(part(batches()[0], received).logits, real(batches()[0], received).logits)


def test_placeholders_have_the_dtype_of_the_owning_stage() -> None:
    model = language_model("llama")
    parts = stages_of(model, 2)
    first = parts[0].to(torch.bfloat16)
    payload = first(batches()[0])
    assert payload["precisions"]["model.embed_tokens"] == "bfloat16"
    seen = []
    parts[1].to(torch.bfloat16)
    parts[1].model.model.rotary_emb.register_forward_hook(lambda *hook: seen.append(hook[2][0].dtype))
    parts[1](batches()[0], payload)
    assert seen == [torch.bfloat16]


# ------------------------------------------------------------------------------------------------ other models


def t5(**options: Any) -> nn.Module:
    sizes = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 64,
        "dropout_rate": 0.0,
    }
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, use_cache=False, **options)
    return build(transformers.T5ForConditionalGeneration, config).train()


@pytest.mark.parametrize("tied", [False, True])
def test_encoder_decoder_is_split_in_both_halves(tied: bool) -> None:
    model = t5(tie_word_embeddings=tied)
    assert [name for name in PipelineTemplate.get_modules(model) if "block" in name] == [
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    ]
    expected = whole_gradients(model, batches(), loss_of)
    for stages in (2, 3, 4):  # in the encoder, between the two, in the decoder
        assert_same(collect_staged_gradients(stages_of(model, stages), batches(), loss_of, GPIPE), expected)


def test_speech_to_text_model_is_split_in_both_halves() -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 64}
    config = transformers.WhisperConfig(**sizes, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
                                        num_mel_bins=8, max_source_positions=8, max_target_positions=32, dropout=0.0,
                                        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                                        use_cache=False)  # fmt: skip
    model = build(transformers.WhisperForConditionalGeneration, config)
    inputs = [
        {"input_features": torch.randn(2, 8, 16, generator=generator(0)), "labels": torch.arange(8).reshape(2, 4)}
    ]
    expected = whole_gradients(model, inputs, loss_of)
    for stages in (2, 4):
        assert_same(collect_staged_gradients(stages_of(model, stages), inputs, loss_of), expected)


def test_custom_module_is_split_at_every_boundary() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x).tanh()

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(4, 8)
            self.scale = nn.Parameter(torch.full((8,), 0.5))
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.gates = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.leave = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            entered = self.enter(x) * self.scale
            states = entered
            skipped = None
            for number, (block, gate) in enumerate(zip(self.blocks, self.gates, strict=True)):
                states = block(states) * gate(entered).sigmoid()  # the first module's result is read by all
                skipped = states if number == 1 else skipped  # and one layer's by what follows the layers
            states += 1  # in place
            return self.leave(torch.cat([states, skipped], -1))

    torch.manual_seed(0)
    model = Own()
    inputs = {"x": torch.randn(3, 4)}
    found = survey(model, lambda _: inputs)
    assert found.boundaries == [1, 2, 3, 4]
    expected = whole_gradients(model, [inputs], lambda output: output.pow(2).sum())
    for place in found.boundaries:
        names = [[n for n in found.modules if (found.segment_of(n) >= place) == stage] for stage in (False, True)]
        template = PipelineTemplate(found.model_name, names)
        parts = [cut(copy.deepcopy(model), template, stage, survey=found) for stage in range(2)]
        assert_same(collect_staged_gradients(parts, [inputs], lambda output: output.pow(2).sum()), expected)
        assert parts[0].tied["scale"] == "scale"


# ------------------------------------------------------------------------------------------------ with FSDP


def test_fsdp_around_layers_and_stage_keeps_gradients() -> None:
    model = language_model("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = whole_gradients(model, batches(), loss_of)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parts, mesh = stages_of(model, 2), init_device_mesh("cpu", (1,))
        for part in parts:
            for layer in part.model.model.layers:
                if not isinstance(layer, RemoteModule):
                    fully_shard(layer, mesh=mesh)
            fully_shard(part, mesh=mesh)
        found = collect_staged_gradients(parts, batches(), loss_of, GPIPE)
        assert_same({n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}, expected)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ mistakes


def test_wrong_inputs_of_a_stage_are_refused() -> None:
    model = language_model("llama")
    first, last = stages_of(model, 2)
    payload = first(batches()[0])
    with pytest.raises(ConfigError, match="first stage receives nothing"):
        last(batches()[0])
    with pytest.raises(ConfigError, match="first stage receives nothing"):
        first(batches()[0], payload)
    first(batches()[0])  # a mistake leaves nothing behind
    with pytest.raises(ConfigError, match="output_hidden_states = True: .* is cut"):
        last({**batches()[0], "output_hidden_states": True}, payload)
    with pytest.raises(ConfigError, match="stage = 2: .* has the stages 0 to 1"):
        cut(language_model("llama"), PipelineTemplate.split(model, 2), 2)


def test_model_is_split_only_once() -> None:
    model = language_model("llama")
    template = PipelineTemplate.split(model, 2)
    cut(model, template, 0)
    with pytest.raises(ConfigError, match="LlamaForCausalLM was cut into stages before"):
        cut(model, template, 1)


def test_attention_must_be_chosen_before_splitting() -> None:
    model = language_model("llama")
    template = PipelineTemplate.split(model, 2)
    attend_through_masks(model)
    attend_through_masks(cut(model, template, 0).model)  # nothing is left to do
    late = cut(language_model("llama"), template, 0).model
    with pytest.raises(ConfigError, match="it was cut into stages before. Choose its attention"):
        attend_through_masks(late)


def test_stage_that_runs_past_its_end_raises() -> None:
    first = stages_of(language_model("llama"), 2)[0]
    with pytest.raises(ConfigError, match=r"model.layers.2 was called, but belongs to another stage"):
        first.model(**batches()[0])


def test_skipped_layers_raise() -> None:
    model = language_model("opt", layerdrop=1.0)
    first, last = stages_of(model, 2)
    with pytest.raises(ConfigError, match="belongs to another stage. Were layers left out"):
        first(batches()[0])
    payload = first.eval()(batches()[0])
    assert payload["results"].keys() == {"model.decoder.layers.1"}
    assert last.eval()(batches()[0], payload).loss.isfinite()


def test_single_stage_is_the_whole_model() -> None:
    model = language_model("llama")
    (part,) = stages_of(model, 1)
    assert isinstance(part, StageModule)
    assert part.first and part.last and not part.tied
    assert_same(collect_staged_gradients([part], batches(), loss_of), whole_gradients(model, batches(), loss_of))
