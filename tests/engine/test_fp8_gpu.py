"""On a GPU that multiplies in 8 bits: near bf16, compiled or not, for rows of any number."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from cornstarch.kernels.compile import compile_layers
from cornstarch.kernels.fp8 import Scaling, explain_no_fp8, multiply_in_fp8
from tests.trainer.tiny import losses, tiny_config, trainer_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or explain_no_fp8(torch.device("cuda")) is not None, reason="no GPU that has fp8"
    ),
]
WIDTH = 256
BOUND = {"rowwise": 0.09, "tensorwise": 0.12}  # 0.053 of an output, 0.071 of a gradient behind two layers
TINY = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "attention_dropout": 0.0}


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_layers_are_near_bf16(scaling: Scaling, is_compiled: bool, weights: torch.dtype) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH, bias=False))
    plain = plain.to("cuda", weights)
    made = copy.deepcopy(plain)
    assert multiply_in_fp8([made], scaling, least=WIDTH) == 2
    if is_compiled:
        compile_layers([made], fullgraph=True)
    for rows in (512, 729, 1, 1000):
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        gradient, inputs, outputs = torch.randn_like(x), [], []
        for model in (made, plain):
            model.zero_grad()
            inputs.append(x.clone().requires_grad_())
            with torch.autocast("cuda", torch.bfloat16):
                outputs.append(model(inputs[-1]))
            outputs[-1].backward(gradient)
        assert outputs[0].dtype == outputs[1].dtype
        assert 0.005 < off(outputs[0], outputs[1]) < BOUND[scaling], rows
        assert inputs[0].grad is not None and inputs[1].grad is not None
        assert off(inputs[0].grad, inputs[1].grad) < BOUND[scaling], rows
        for (name, a), b in zip(made.named_parameters(), plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and a.grad.dtype == weights
            assert off(a.grad, b.grad) < BOUND[scaling], (name, rows)
            for lines in (0, -1):  # none of which was scaled back by another number than it was scaled by
                apart, size = (one.double().norm(dim=lines) for one in (a.grad - b.grad, b.grad))
                assert rows == 1 or bool((apart <= 0.3 * size).all()), (name, rows)


@pytest.mark.parametrize("compile", ["off", "layers"])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_a_run_ends_where_bf16_does(
    scaling: str, compile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cornstarch.kernels.fp8.MIN_DIM", WIDTH)
    sections = {"model": {"language_model": {"config": TINY}}}
    for fp8 in ("off", scaling):
        options = ["device=cuda", "precision=bf16", f"compile={compile}", f"fp8={fp8}", f"output={tmp_path / fp8}"]
        options += ["loop.steps=30", "optimizer.learning_rate=1e-3", "model.encoders.vision.config.attention_dropout=0"]
        trainer = trainer_of(tiny_config(tmp_path, *options, **sections))
        trainer.fit()
        assert trainer.run_model.acceleration.fp8.get("language_model", 0) == (0 if fp8 == "off" else 14)
    right, found = losses(tmp_path / "off"), losses(tmp_path / scaling)
    assert list(found) == list(right) == list(range(1, 31))
    assert found == pytest.approx(right, abs=0.05 * right[1])  # they fall steeply: of where they began
    assert found[30] < 0.7 * found[1]
