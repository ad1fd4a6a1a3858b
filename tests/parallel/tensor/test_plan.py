"""What is cut is decided without processes, and what cannot be is refused with the sizes that work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from cornstarch.errors import ConfigError, UnsupportedModelError
from cornstarch.parallel.tensor import Style, check_tensor_plan, find_unsharded_modules, tensor_plan
from tests import zoo
from tests.parallel.tensor.forms import forms


def llama(**options: Any) -> nn.Module:
    """Return a Llama on the meta device."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 12, "num_key_value_heads": 6}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=64, num_hidden_layers=1, **{**sizes, **options})
        )


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 4, r"over 4 ranks \(tp = 4\): it has 6 key and value heads\.\n  Use 1, 2, 3, 6 or 12\."),
        ({}, 5, r"12 attention heads and 192 channels of a feed-forward layer and 6 key and value heads"),
        ({"intermediate_size": 100}, 3, r"100 channels of a feed-forward layer\.\n  Use 1 or 2\."),
        ({"num_key_value_heads": 1}, 24, r"12 attention heads\.\n  Use 1, 2, 3, 4, 6 or 12\."),
    ],
)
def test_sizes_that_do_not_divide(options: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tensor_plan(llama(**options), size)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 12])
def test_sizes_that_work(size: int) -> None:
    check_tensor_plan(llama(), size)


def test_fused_heads_are_not_shared() -> None:
    """A rank has a piece of each part of a fused layer; one head of keys and values has no pieces."""
    model = zoo.LANGUAGE_MODELS["phi3"].build(num_key_value_heads=1)
    with pytest.raises(ConfigError, match=r"1 key and value heads\.\n  Use 1\."):
        check_tensor_plan(model, 2)


def test_model_without_shardable_layers_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM has no layer .* Leave `tp` at 1"):
        check_tensor_plan(transformers.MambaForCausalLM(config), 2)


@pytest.mark.parametrize(
    ("form", "owner", "reason"),
    [
        ("falcon", "transformer.h.0.self_attention", "not known in which order query_key_value"),
        ("olmo2", "model.layers.0.self_attn", "no rule says how its q_norm.weight is cut"),
    ],
)
def test_unknown_modules_are_not_sharded_and_explained(form: str, owner: str, reason: str) -> None:
    model = forms()[form]()
    assert reason in find_unsharded_modules(model)[owner]
    assert not any(style.kind == "heads" for style in tensor_plan(model).values())


class Odd(nn.Module):
    """A feed-forward layer whose layers nobody has named so before."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.spread = nn.Linear(8, 16)
        self.collect = nn.Linear(16, 8)
        self.middle = nn.LayerNorm(16) if norm else nn.Identity()


PLAN: dict[str, Style | str] = {"spread": "colwise", "collect": "rowwise"}


def test_user_plan_is_followed() -> None:
    check_tensor_plan(Odd(), 2, plan=PLAN)
    with pytest.raises(UnsupportedModelError, match="give a plan that names its layers"):
        check_tensor_plan(Odd(), 2)


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (Odd(norm=True), PLAN, "middle.weight is cut"),
        (Odd(), {"spread": "colwise"}, "spread of Odd as a column, which cannot be: a region needs a column and a row"),
        (Odd(), {"spraed": "colwise"}, "spraed is in the plan, and Odd has no such module"),
        (Odd(), {"spread": "sideways"}, "sideways is no way to cut a layer; known are colwise,"),
    ],
)
def test_impossible_plans_are_refused(model: nn.Module, plan: dict[str, Style | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tensor_plan(model, 2, plan=plan)
