"""Plans with expert parallelism: which are refused before anything starts, with the reason and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cornstarch.cli import read_checked_config
from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.parallel.expert import check_expert_plan, find_experts
from cornstarch.plan import Layout, Plan
from tests import zoo


def plan(data: Any = None, schedule: str = "1f1b", **module: Any) -> Plan:
    described = {"data": data or {}, "modules": {"language_model": {"ep": 2, **module}}, "schedule": schedule}
    return Plan.from_data(described)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"data": {"kind": "fsdp1"}}, "fsdp1 flattens parameters"),
        ({"data": {"kind": "local_sgd"}}, "each rank trains a whole model by itself"),
        ({"data": {"kind": "ddp", "compression": {"kind": "bf16"}}}, "Leave data.compression out"),
        ({"data": {"kind": "fsdp2", "offload": True}}, "Leave data.offload out"),
        ({"data": {"kind": "fsdp2", "reshard_after_forward": 2}}, "cannot be a number of ranks"),
        ({"tp": 2, "tp_sequence": True}, "Leave tp_sequence out"),
        ({"stages": 2, "schedule": "zero_bubble"}, "takes the backward pass of a layer apart"),
        ({"stages": 2, "schedule": "auto"}, "takes the backward pass of a layer apart"),
    ],
)
def test_what_does_not_compose_is_refused_with_the_reason(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=r"modules\.language_model\.ep = 2") as caught:
        plan(**said)
    assert reason in " ".join(str(caught.value).split())


def test_ep_must_divide_the_ranks_that_have_tokens_of_their_own() -> None:
    assert Layout.of(plan(), 4).dp == 4 and Layout.of(plan(cp=2), 2).dp == 1
    with pytest.raises(ConfigError, match=r"over 3 ranks \(dp 3 × cp 1\), which ep must divide. Use 3, 1"):
        Layout.of(plan(), 3)
    with pytest.raises(ConfigError, match=r"over 1 rank .*Use 1, or more replicas"):
        Layout.of(plan(), 1)
    hsdp = {"kind": "hsdp", "replicate": 4}
    with pytest.raises(ConfigError, match="each copy of language_model is sharded over 1 rank"):
        Layout.of(plan(hsdp), 4)
    assert Layout.of(plan(hsdp), 8).exchanges_in_passes


def test_a_number_of_experts_is_checked_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model:\n  language_model:\n    config: {model_type: mixtral, num_local_experts: 8}\n    tokenizer: x\n"
        "data: {train: [{path: x}]}\nparallel:\n  modules:\n    language_model: {ep: 3}\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_checked_config(file, None)
    assert f"{file}:8  parallel.modules.language_model.ep = 3" in str(caught.value)
    assert "There are 8 experts for ep = 3, not equally many for each rank. Use 1, 2, 4, 8." in str(caught.value)


def test_names_of_other_tools_lead_to_ep() -> None:
    with pytest.raises(ConfigError, match="Did you mean `ep`"):
        Plan.from_data({"modules": {"language_model": {"expert_model_parallel_size": 2}}})


def test_a_plan_is_described() -> None:
    assert "experts over ep 2" in plan().describe()


# ------------------------------------------------------------------------------------------------ models


def test_experts_are_found_and_counted() -> None:
    with torch.device("meta"):
        model = zoo.LANGUAGE_MODELS["mixtral"].build()
    assert len(find_experts(model)) == model.config.num_hidden_layers
    check_expert_plan(model, 4)
    with pytest.raises(ConfigError, match="there are 4 experts for ep = 8, fewer than one for each rank. Use 1, 2, 4"):
        check_expert_plan(model, 8)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("llama", "it has no experts"), ("llama4", "transformers does not declare how model.layers.1.feed_forward.exper")],
)
def test_models_without_declared_experts_are_refused(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        check_expert_plan(zoo.LANGUAGE_MODELS[name].build(), 2)


def test_experts_in_a_list_are_refused() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    with pytest.raises(UnsupportedModelError, match="the experts in experts are separate modules in a list"):
        check_expert_plan(model, 2)


def test_something_beside_the_stacked_weights_is_refused() -> None:
    model = zoo.LANGUAGE_MODELS["mixtral"].build()
    experts = next(iter(find_experts(model).values()))
    experts.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedModelError, match="it has scale beside the stacked weights"):
        check_expert_plan(model, 2)
