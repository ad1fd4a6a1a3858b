"""A loss that is no mean over tokens is found by trying it, and refused where no rank sees all tokens."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from cornstarch.engine.plan_requirements import check_loss, depends_on_batch
from cornstarch.errors import ConfigError
from cornstarch.plan import DataPlan, Layout, ModulePlan, Plan

SIZES: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip


def mixtral(**options: Any) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, **options))


MODELS: dict[str, tuple[PreTrainedModel, bool]] = {
    "llama": (LlamaForCausalLM(LlamaConfig(**SIZES)), False),
    "labels that are not shifted": (BertForMaskedLM(BertConfig(**SIZES)), False),
    "labels of another shape": (BertForSequenceClassification(BertConfig(**SIZES)), False),
    "experts": (mixtral(), False),
    "experts with a loss of their own": (mixtral(output_router_logits=True), True),  # weighted with 1e-3
    "noise in training": (LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.5)), False),
}


@pytest.mark.parametrize(("model", "expected"), MODELS.values(), ids=MODELS)
def test_whether_a_loss_depends_on_what_else_is_in_the_batch(model: PreTrainedModel, expected: bool) -> None:
    assert depends_on_batch(model) == expected


@pytest.mark.parametrize(
    ("plan", "world", "said"),
    [
        (Plan(), 2, "2 replicas"),
        (Plan({"model": ModulePlan(cp=2)}), 2, "context parallelism"),
        (Plan({"model": ModulePlan(stages=2)}), 4, "2 replicas, several stages"),
        (Plan({"model": ModulePlan(tp=2)}), 2, None),
        (Plan(data=DataPlan("local_sgd")), 2, None),
        (Plan(), 1, None),
    ],
)
def test_it_is_refused_where_no_rank_sees_all_tokens(plan: Plan, world: int, said: str | None) -> None:
    model, layout = mixtral(output_router_logits=True), Layout.of(plan, world)
    if said is None:
        check_loss(model, layout)
        return
    with pytest.raises(
        ConfigError, match=f"(?s)MixtralForCausalLM is no mean over tokens.*{said}.*output_router_logits"
    ):
        check_loss(model, layout)


def test_modules_that_are_no_transformers_models_are_the_users() -> None:
    check_loss(nn.Linear(2, 1), Layout.of(Plan(), 2))
