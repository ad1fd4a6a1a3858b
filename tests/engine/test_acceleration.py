"""What a run does to be quick: compiled layers where that can be, a loss without all logits, reasons where not."""

from __future__ import annotations

import pytest
import torch

from cornstarch.config.config_file import load_config
from cornstarch.engine.acceleration import accelerate_model, find_uncompiled_modules
from cornstarch.errors import ConfigError
from cornstarch.kernels.compile import CompiledForward
from cornstarch.kernels.fused_loss import FusedCausalLMLoss
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.plan.plan import ModulePlan, Plan
from tests import zoo

CPU = torch.device("cpu")


def compose_model() -> MultimodalModel:
    return MultimodalModel(
        encoders={"vision": ModalEncoderModule(zoo.ENCODERS["clip"].build())},
        language_model=zoo.LANGUAGE_MODELS["llama"].build(),
    )


def test_on_a_cpu_nothing_is_compiled_by_itself() -> None:
    model = compose_model()
    speed = accelerate_model(model, CPU)
    assert speed.compiled == {} and speed.fused_loss and not speed.notes
    assert isinstance(model.language_model.loss_function, FusedCausalLMLoss)


def test_layers_of_every_part_are_compiled_on_request() -> None:
    model = compose_model()
    names = list(model.state_dict())
    speed = accelerate_model(model, CPU, "layers")
    assert speed.compiled == {"vision": zoo.LAYERS, "language_model": zoo.LAYERS}
    assert isinstance(model.language_model.model.layers[0].forward, CompiledForward)
    assert list(model.state_dict()) == names


def test_parts_whose_backward_pass_is_taken_apart_are_left_with_the_reason() -> None:
    modules = {"vision": ModulePlan(), "language_model": ModulePlan(stages=2)}
    whole = find_uncompiled_modules(Plan(modules=modules, schedule="zero_bubble"), ranks=2)
    assert list(whole) == ["vision", "language_model"] and "takes the backward pass" in whole["language_model"]
    assert find_uncompiled_modules(Plan(modules=modules), ranks=2) == {}
    for sizes in ({"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2, "cp_mode": "all_to_all"}):
        assert find_uncompiled_modules(Plan(modules={"model": ModulePlan(**sizes)}), ranks=4) == {}
    with pytest.raises(ConfigError, match=r"vision cannot be compiled: .*Use compile: auto"):
        accelerate_model(compose_model(), CPU, "layers", whole=whole)
    told: list[str] = []
    model = compose_model()
    accelerate_model(
        model, torch.device("cuda") if torch.cuda.is_available() else CPU, "auto", whole=whole, log=told.append
    )
    assert bool(told) == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("said", "meant"), [("off", "off"), ("false", "off"), ("layers", "layers"), ("true", "layers")]
)
def test_compile_is_said_as_people_say_it(said: str, meant: str) -> None:
    base = {"model": {"given": "Linear"}, "data": {"train": [{"path": "train_data", "format": "given"}]}}
    assert load_config(None, [f"compile={said}"], base={**base, "loop": {"steps": 1}}).compile == meant
