"""What a run does to be quick: compiled layers where that can be, a loss without all logits, reasons where not."""

from __future__ import annotations

import pytest
import torch

from cornstarch.compute.compiling import CompiledForward
from cornstarch.compute.head import HeadLoss
from cornstarch.errors import ConfigError
from cornstarch.models.multimodal_language_model import ModalEncoderModule, MultimodalModel
from cornstarch.plan.plan import ModulePlan, Plan
from cornstarch.train.source import load_config
from cornstarch.train.speed import not_compiled, speed_up
from tests import zoo

CPU = torch.device("cpu")


def composed() -> MultimodalModel:
    return MultimodalModel(
        encoders={"vision": ModalEncoderModule(zoo.ENCODERS["clip"].build())},
        language_model=zoo.LANGUAGE_MODELS["llama"].build(),
    )


def test_on_a_cpu_nothing_is_compiled_by_itself() -> None:
    model = composed()
    speed = speed_up(model, CPU)
    assert speed.compiled == {} and speed.fused_loss and not speed.notes
    assert isinstance(model.language_model.loss_function, HeadLoss)


def test_layers_of_every_part_are_compiled_on_request() -> None:
    model = composed()
    names = list(model.state_dict())
    speed = speed_up(model, CPU, "layers")
    assert speed.compiled == {"vision": zoo.LAYERS, "language_model": zoo.LAYERS}
    assert isinstance(model.language_model.model.layers[0].forward, CompiledForward)
    assert list(model.state_dict()) == names


def test_parts_that_talk_to_others_are_left_with_the_reason() -> None:
    plan = Plan(modules={"vision": ModulePlan(), "language_model": ModulePlan(tp=2)})
    whole = not_compiled(plan, ranks=2)
    assert list(whole) == ["language_model"] and "(tp, cp)" in whole["language_model"]
    assert not_compiled(plan, ranks=1) == {}
    with pytest.raises(ConfigError, match=r"language_model cannot be compiled: .*Use compile: auto"):
        speed_up(composed(), CPU, "layers", whole=whole)
    told: list[str] = []
    model = composed()
    speed_up(model, torch.device("cuda") if torch.cuda.is_available() else CPU, "auto", whole=whole, tell=told.append)
    assert bool(told) == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("said", "meant"), [("off", "off"), ("false", "off"), ("layers", "layers"), ("true", "layers")]
)
def test_compile_is_said_as_people_say_it(said: str, meant: str) -> None:
    base = {"model": {"given": "Linear"}, "data": {"train": [{"path": "train_data", "format": "given"}]}}
    assert load_config(None, [f"compile={said}"], base={**base, "loop": {"steps": 1}}).compile == meant
