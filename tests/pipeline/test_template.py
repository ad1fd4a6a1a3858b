"""Templates: which modules a model has, stages made of them, and what is wrong with a template."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cornstarch
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.pipeline.split import analyze_model
from cornstarch.pipeline.template import PipelineTemplate, balance_stages
from tests.zoo import ENCODERS, LANGUAGE_MODELS, MODALITY_TOKEN, text_batch

LLAMA = "transformers.models.llama.modeling_llama.LlamaForCausalLM"
LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2", "model.layers.3"]
MODULES = ["model.embed_tokens", *LAYERS, "model.norm", "lm_head"]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return LANGUAGE_MODELS["llama"].build(num_hidden_layers=4)


def compose_model(*names: str) -> MultimodalModel:
    encoders = {f"seen{number}": ENCODERS[name].build() for number, name in enumerate(names)}
    model = MultimodalModel(encoders, LANGUAGE_MODELS["llama"].build())
    model.set_modality_token_ids({name: MODALITY_TOKEN + number for number, name in enumerate(encoders)})
    return model


# ------------------------------------------------------------------------------------------------ names


def test_modules_and_names_are_those_of_the_documentation(llama: nn.Module) -> None:
    assert PipelineTemplate.get_modules(llama) == MODULES
    assert PipelineTemplate.get_model_name(llama) == LLAMA
    template = PipelineTemplate(model_name=LLAMA, modules_per_stage=[MODULES[:3], MODULES[3:]])
    assert repr(template) == f"PipelineTemplate({LLAMA}, 2 stages)"
    assert template.num_stages == 2
    template.check(llama)


def test_published_import_paths_are_the_same_class() -> None:
    from cornstarch.pipeline_template import PipelineTemplate as door

    assert door is cornstarch.PipelineTemplate is PipelineTemplate


MODELS = {
    "gpt2": ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"],
    "clip": ["embeddings", "pre_layrnorm", "encoder.layers.0", "encoder.layers.1", "post_layernorm"],
    "whisper": ["conv1", "conv2", "embed_positions", "layers.0", "layers.1", "layer_norm"],
    # Modules that are called between layers are listed between them.
    "qwen3_vl": ["patch_embed", "pos_embed", "blocks.0", "deepstack_merger_list.0", "blocks.1", "merger"],
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_listed_in_the_order_of_the_forward_pass(name: str) -> None:
    model = {**LANGUAGE_MODELS, **ENCODERS}[name].build()
    assert PipelineTemplate.get_modules(model) == MODELS[name]
    covered = tuple(f"{module}." for module in MODELS[name])
    assert all(parameter.startswith(covered) for parameter, _ in model.named_parameters())


def test_classifier_without_a_padding_token_can_be_split() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32, num_labels=3)
    assert config.pad_token_id is None
    model = transformers.GPT2ForSequenceClassification(config)
    assert PipelineTemplate.get_modules(model) == [*MODELS["gpt2"][:-1], "score"]
    PipelineTemplate.split(model, 2).check(model)


def test_projector_of_an_encoder_comes_last() -> None:
    encoder = compose_model("clip").encoders["seen0"]
    assert PipelineTemplate.get_model_name(encoder) == PipelineTemplate.get_model_name(encoder.module)
    assert PipelineTemplate.get_modules(encoder) == [*(f"module.{name}" for name in MODELS["clip"]), "projector"]
    bare = ModalEncoderModule(ENCODERS["clip"].build())
    assert PipelineTemplate.get_modules(bare)[-1] == "module.post_layernorm"


def test_adapters_do_not_change_names(llama: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        LANGUAGE_MODELS["llama"].build(num_hidden_layers=4), peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    assert PipelineTemplate.get_modules(adapted) == MODULES
    assert PipelineTemplate.get_model_name(adapted) == LLAMA
    PipelineTemplate(LLAMA, [MODULES[:3], MODULES[3:]]).check(adapted)


def test_meta_model_has_a_template() -> None:
    part = LANGUAGE_MODELS["llama"]
    with torch.device("meta"):
        model = part.model_class(LANGUAGE_MODELS["llama"].build(num_hidden_layers=4).config)
    assert PipelineTemplate.get_modules(model) == MODULES
    assert all(parameter.is_meta for parameter in model.parameters())


def test_encoders_of_one_architecture_have_templates_of_their_own() -> None:
    model = compose_model("clip", "clip")
    one, other = (PipelineTemplate.split(encoder, 2) for encoder in model.encoders.values())
    assert one is not other
    assert one == other
    assert len({id(template) for template in (one, other)}) == 2
    deeper = ENCODERS["clip"].config()
    deeper.num_hidden_layers = 3
    model.add_encoder("deep", ENCODERS["clip"].model_class(deeper))
    with pytest.raises(ConfigError, match=r"module\.encoder\.layers\.2 missing"):
        one.check(model.encoders["deep"])


def test_multimodal_model_is_split_module_by_module() -> None:
    with pytest.raises(ConfigError, match="seen0_encoder, language_model"):
        PipelineTemplate.get_modules(compose_model("clip"))


def test_template_is_found_by_the_number_of_stages(llama: nn.Module) -> None:
    templates = [PipelineTemplate.split(llama, stages) for stages in (1, 2, 4)]
    assert PipelineTemplate.find_pipeline_template(templates, 2) is templates[1]
    assert PipelineTemplate.find_pipeline_template(templates, 3) is None
    assert templates[1] == PipelineTemplate.split(llama, 2)
    assert hash(templates[1]) == hash(PipelineTemplate.split(llama, 2))
    assert templates[1] != templates[2]


def test_modules_without_parameters_may_be_listed(llama: nn.Module) -> None:
    names = ["model.embed_tokens", "model.rotary_emb", *MODULES[1:]]
    PipelineTemplate(LLAMA, [names[:4], names[4:]]).check(llama)


# ------------------------------------------------------------------------------------------------ mistakes

WRONG = {
    "another model": ("transformers.X", [MODULES], "is not for transformers.models.llama"),
    "unknown": (LLAMA, [[*MODULES, "model.layers.4"]], r"stage 0 has model.layers.4, which is none"),
    "missing": (
        LLAMA,
        [MODULES[:2], MODULES[3:]],
        "model.layers.1 missing; .* belongs behind model.layers.0",
    ),
    "first missing": (LLAMA, [MODULES[1:]], "model.embed_tokens belongs at the beginning of stage 0"),
    "doubled": (LLAMA, [MODULES[:3], MODULES[2:]], "model.layers.1 is there twice, in stage 0 and in stage 1"),
    "reordered": (LLAMA, [MODULES[3:], MODULES[:3]], "stage 0 has model.layers.2 where model.embed_tokens belongs"),
    "no layer": (LLAMA, [MODULES[:3], MODULES[3:5], MODULES[5:6], MODULES[6:]], "stage 3 begins with lm_head, but"),
    "half a head": (LLAMA, [MODULES[:-1], MODULES[-1:]], "stage 1 begins with lm_head, but stages end behind a layer"),
    "only weightless": (LLAMA, [["model.rotary_emb"], MODULES], "stage 0 has no module with parameters"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_template_is_refused_with_the_reason(llama: nn.Module, case: str) -> None:
    name, stages, complaint = WRONG[case]
    with pytest.raises(ConfigError, match=complaint):
        PipelineTemplate(name, stages).check(llama)


@pytest.mark.parametrize("stages", [[], [[]], ["model.norm"], [[1]]])
def test_template_without_names_is_refused(stages: list) -> None:
    with pytest.raises(ConfigError, match="template has no stages|modules_per_stage"):
        PipelineTemplate(LLAMA, stages)


def test_barred_boundary_is_refused_with_its_reason() -> None:
    mixtral = LANGUAGE_MODELS["mixtral"].build(num_hidden_layers=4, output_router_logits=True)
    names = PipelineTemplate.get_modules(mixtral)
    template = PipelineTemplate(PipelineTemplate.get_model_name(mixtral), [names[:3], names[3:]])
    with pytest.raises(ConfigError, match=r"before model.layers.2: what follows the layers reads what layer 0"):
        template.check(mixtral)
    with pytest.raises(ConfigError, match="MixtralForCausalLM can be cut into at most 1 stage"):
        PipelineTemplate.split(mixtral, 2)


# ------------------------------------------------------------------------------------------------ balance


def layers_of(template: PipelineTemplate) -> list[int]:
    return [sum("layers." in name for name in names) for names in template.modules_per_stage]


@pytest.mark.parametrize(("stages", "expected"), [(1, [4]), (2, [2, 2]), (3, [1, 1, 2]), (4, [1, 1, 1, 1])])
def test_uniform_stages_have_equal_numbers_of_layers(llama: nn.Module, stages: int, expected: list[int]) -> None:
    template = PipelineTemplate.split(llama, stages, by="uniform")
    assert sorted(layers_of(template)) == sorted(expected)
    assert list(itertools.chain(*template.modules_per_stage)) == MODULES
    template.check(llama)


def test_given_numbers_of_layers_must_add_up(llama: nn.Module) -> None:
    template = PipelineTemplate.of_layers(llama, [1, 3, 1])
    assert template.modules_per_stage == [MODULES[:2], MODULES[2:5], MODULES[5:]]
    template.check(llama)
    assert PipelineTemplate.of_layers(llama, [5]).modules_per_stage == [MODULES]
    for layers, total in (([2, 2], 4), ([3, 3], 6), ([0, 5], 5)):
        with pytest.raises(ConfigError, match=f"they add up to {total}; LlamaForCausalLM has 5"):
            PipelineTemplate.of_layers(llama, layers)


def test_large_embeddings_count_by_parameters_and_not_by_flops() -> None:
    model = LANGUAGE_MODELS["llama"].build(num_hidden_layers=6, vocab_size=2000)
    assert layers_of(PipelineTemplate.split(model, 3, by="parameters")) == [1, 5, 0]
    first, *_, last = layers_of(PipelineTemplate.split(model, 3, by="flops"))
    assert first >= 2  # the table is looked up
    assert last <= 1  # the head is multiplied


def test_frozen_layers_cost_less() -> None:
    model = LANGUAGE_MODELS["llama"].build(num_hidden_layers=8)
    assert layers_of(PipelineTemplate.split(model, 2, by="uniform")) == [4, 4]
    for layer in list(model.model.layers)[:4]:
        layer.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    # Four at 1, the first trained at 3 as all of them: 4 + 3 and 9 is the best cut.
    assert layers_of(PipelineTemplate.split(model, 2, by="uniform")) == [5, 3]
    assert layers_of(PipelineTemplate.split(model, 2, by="uniform", trained_upstream=True)) == [5, 3]
    model.requires_grad_(False)
    assert layers_of(PipelineTemplate.split(model, 2, by="uniform")) == [4, 4]


def test_slow_layer_gets_a_stage_of_its_own_by_time() -> None:
    model = LANGUAGE_MODELS["llama"].build(num_hidden_layers=4).eval()
    slow = model.model.layers[0]

    class Slow(type(slow)):  # type: ignore[misc]
        def forward(self, *inputs: object, **options: object) -> object:
            for _ in range(200):
                torch.randn(64, 64) @ torch.randn(64, 64)
            return super().forward(*inputs, **options)

    slow.__class__ = Slow
    batch = text_batch(("tttttttt",))
    template = PipelineTemplate.split(model, 2, by="time", inputs=batch)
    assert layers_of(template) == [1, 3]
    with pytest.raises(ConfigError, match="say what a forward pass is timed on"):
        PipelineTemplate.split(model, 2, by="time")


@pytest.mark.parametrize(("stages", "by"), [(0, "uniform"), (9, "uniform"), (2, "weight"), ("2", "uniform")])
def test_wrong_number_of_stages_or_method_is_refused(llama: nn.Module, stages: int, by: str) -> None:
    with pytest.raises(ConfigError, match="stages|expected one of parameters, flops, time, uniform"):
        PipelineTemplate.split(llama, stages, by=by)


@given(
    costs=st.lists(st.integers(0, 20), min_size=3, max_size=9),
    barred=st.sets(st.integers(1, 8)),
    stages=st.integers(1, 5),
)
def test_most_expensive_stage_is_as_cheap_as_possible(costs: list[int], barred: set[int], stages: int) -> None:
    boundaries = [place for place in range(1, len(costs)) if place not in barred]
    if stages > len(boundaries) + 1:
        with pytest.raises(ConfigError, match="at most"):
            balance_stages(costs, boundaries, stages, "it")
        return

    def dearest(starts: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((*starts, len(costs))))

    best = min(dearest((0, *chosen)) for chosen in itertools.combinations(boundaries, stages - 1))
    starts = balance_stages(costs, boundaries, stages, "it")
    assert len(starts) == stages
    assert set(starts[1:]) <= set(boundaries)
    assert dearest(tuple(starts)) == best


def test_sequential_has_a_template() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4), nn.Linear(4, 4))
    assert PipelineTemplate.get_modules(model) == ["0", "1", "2", "3"]
    assert PipelineTemplate.get_model_name(model) == "torch.nn.modules.container.Sequential"
    template = PipelineTemplate.split(model, 2)
    assert template.modules_per_stage == [["0", "1"], ["2", "3"]] or template.modules_per_stage == [
        ["0"],
        ["1", "2", "3"],
    ]
    template.check(model)


def test_module_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear cannot be cut into stages: .*make_inputs"):
        PipelineTemplate.get_modules(nn.Linear(3, 3))
    with pytest.raises(UnsupportedModelError, match="no list of layers"):
        analyze_model(nn.Linear(3, 3), lambda _: {"input": torch.ones(2, 3)})
