"""What plugins say becomes a plan; what makes no sense is refused at once."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cornstarch.errors import ConfigError
from cornstarch.pipeline_template import PipelineTemplate
from cornstarch.plan.layout import Layout
from cornstarch.plan.plan import ModulePlan
from cornstarch.plugin.encoders_colocated_plugin import EncodersColocatedPlugin
from cornstarch.plugin.multimodal_parallel_plugin import ModalParallelPlugin, MultimodalParallelPlugin


class ContextParallelDistributionMode(Enum):
    """As 0.0.5 has it."""

    ZIGZAG = "zigzag"


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=6))


def template(model: torch.nn.Module, stages: int) -> PipelineTemplate:
    return PipelineTemplate.split(model, stages, by="uniform")


def test_the_published_example_takes_27_ranks(llama: LlamaForCausalLM) -> None:
    plugin = MultimodalParallelPlugin(
        encoder_plugins={
            "vision": ModalParallelPlugin(tp_size=2, sp_size=1),
            "audio": ModalParallelPlugin(tp_size=1, sp_size=1),
        },
        language_model_plugin=ModalParallelPlugin(tp_size=4, sp_size=2, pipeline_template=template(llama, 3)),
        num_microbatches=8,
    )
    plan = plugin.plan()
    assert list(plan.modules) == ["vision", "audio", "language_model"]
    assert plan.modules["language_model"] == ModulePlan(tp=4, cp=2, stages=3)
    assert plan.replica == 27 and Layout.of(plan, 54).dp == 2
    assert plugin.templates() == {"language_model": template(llama, 3)}
    with pytest.raises(ConfigError, match="1 rank is too few: a replica takes 27"):
        plugin.layout()


def test_every_argument_reaches_the_plan(llama: LlamaForCausalLM) -> None:
    one = ModalParallelPlugin(
        sp_size=2, sequence_parallelism="all_to_all", context_parallel_distribution_mode="uniform", pp_size=2
    )
    assert one.module_plan() == ModulePlan(cp=2, cp_mode="all_to_all", cp_distribution="uniform", stages=2)
    mode: Any = ContextParallelDistributionMode.ZIGZAG
    assert ModalParallelPlugin(1, 2, context_parallel_distribution_mode=mode).module_plan().cp_distribution == "zigzag"
    assert ModalParallelPlugin(1, 2).module_plan().cp_mode == "ring_attn"
    ignored: Any = "split_gather"  # a word of ColossalAI
    assert ModalParallelPlugin(2, 1, ignored).module_plan() == ModulePlan(tp=2)
    parts = ModalParallelPlugin(pipeline_template=template(llama, 6), virtual_stages=3)
    assert parts.module_plan() == ModulePlan(stages=2, virtual_stages=3)
    plugin = EncodersColocatedPlugin(
        {"vision": ModalParallelPlugin()}, ModalParallelPlugin(pp_size=2), "bf16", num_microbatches=2, zero_stage=1,
        schedule="gpipe", max_norm=1.0,
    )  # fmt: skip
    plan = plugin.plan()
    assert (plan.ranks, plan.schedule, plan.data.kind) == ("colocated", "gpipe", "zero1")
    assert plugin.precision == "bf16" and plugin.loss_scale() is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp_size": 0}, r"tp_size=0\): expected a whole number of at least 1"),
        ({"tp_size": 2.0}, "expected a whole number"),
        ({"sp_size": 2, "sequence_parallelism_mode": "split_gather"}, "expected one of ring_attn, all_to_all, gather"),
        ({"sp_size": 2, "sequence_parallelism_mode": "ring_attn", "sequence_parallelism": "all_to_all"}, "differ"),
        ({"context_parallel_distribution_mode": "even"}, "expected one of uniform, zigzag, makespan_min, auto"),
        ({"pipeline_template": ["model.layers.0"]}, "expected a PipelineTemplate"),
        ({"cpu_offload": True}, "parameters stay on their device"),
        ({"custom_policy": object()}, "without policies"),
        ({"virtual_stages": 2}, "virtual_stages"),
    ],
)
def test_contradictory_module_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModalParallelPlugin(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_microbatches": None}, "into how many parts is a batch cut"),
        ({"num_microbatches": 0}, "expected a whole number of at least 1"),
        ({"language_model_plugin": None}, "language_model_plugin is missing"),
        ({"encoder_plugins": {"vision": 2}}, r"encoder_plugins\['vision'\] is a int"),
        ({"precision": "fp8"}, "expected one of fp32, bf16, fp16"),
        ({"zero_stage": 4}, "expected 0, 1, 2 or 3"),
        ({"max_norm": -1}, "max_norm = -1"),
        ({"schedule": "2f2b"}, "schedule"),
        ({"ranks": "everywhere"}, "ranks"),
        ({"loss_weight": "words"}, "expected one of auto, tokens, samples"),
        ({"initial_scale": 0}, "initial_scale = 0"),
        ({"growth_factor": 0.5}, "growth_factor = 0.5"),
        ({"zero_stage": 2, "schedule": "zero_bubble"}, "gathers parameters for a whole backward pass"),
    ],
)
def test_contradictory_model_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    sound = {
        "encoder_plugins": {"vision": ModalParallelPlugin()},
        "language_model_plugin": ModalParallelPlugin(),
        "num_microbatches": 2,
    }
    with pytest.raises(ConfigError, match=said):
        MultimodalParallelPlugin(**{**sound, **options})


def test_templates_that_do_not_fit_are_refused(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match="4 does not divide 6"):
        ModalParallelPlugin(pipeline_template=template(llama, 6), virtual_stages=4)
    with pytest.raises(ConfigError, match="Give one of them"):
        ModalParallelPlugin(pipeline_template=template(llama, 6), pp_size=2)


def test_options_of_0_0_5_without_effect_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="the models' attn_implementation decides"):
        MultimodalParallelPlugin(
            {}, ModalParallelPlugin(), precision=None, enable_flash_attention=True, num_microbatches=8,
            microbatch_size=2,
        )  # fmt: skip
    with pytest.warns(UserWarning, match="enable_jit_fused"):
        MultimodalParallelPlugin({}, ModalParallelPlugin(), enable_jit_fused=True, num_microbatches=1)
