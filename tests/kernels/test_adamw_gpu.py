"""`TritonAdamW` against torch's AdamW. Needs a CUDA device."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from cornstarch.compat import divides_gradients, step_dividing
from cornstarch.kernels.adamw import TritonAdamW, select_optimizer_class

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 70), (1,), (5000,), (3, 4, 5)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("divisor", [None, 3.0])
def test_steps_and_state_equal_those_of_torch(dtype: torch.dtype, bound: float, divisor: float | None) -> None:
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "fused": True}
    one, other = build_parameters(dtype), build_parameters(dtype)
    first, second = torch.optim.AdamW(one, **options), TritonAdamW(other, **options)
    assert divides_gradients(second)
    for number in range(6):
        for given, optimizer in ((one, first), (other, second)):
            set_gradients(given, number)
            if divisor is None:
                optimizer.step()
            else:
                step_dividing(optimizer, torch.tensor(divisor, device="cuda"))
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(b, a, rtol=bound, atol=bound)
    saved = copy.deepcopy(second.state_dict())
    first.load_state_dict(saved)  # each continues from the other's state
    second.load_state_dict(first.state_dict())
    for a, b in zip(one, other, strict=True):
        for name, value in first.state[a].items():
            torch.testing.assert_close(second.state[b][name], value)


def test_step_with_infinite_gradients_is_skipped() -> None:
    given = build_parameters(torch.float32)
    before = [parameter.detach().clone() for parameter in given]
    optimizer, scaler = TritonAdamW(given, lr=0.1, fused=True), torch.amp.GradScaler("cuda")
    set_gradients(given, 0)
    given[0].grad[0, 0] = torch.inf  # type: ignore[index]
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    for parameter, old in zip(given, before, strict=True):
        torch.testing.assert_close(parameter, old, rtol=0, atol=0)
    assert float(optimizer.state[given[0]]["step"]) == 0


def test_schedulers_work_and_variants_fall_back_to_torch() -> None:
    given = build_parameters(torch.float32)
    optimizer = TritonAdamW(given, lr=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            set_gradients(given, number)
            optimizer.step()
            schedule.step()
    one, other = build_parameters(torch.float32), build_parameters(torch.float32)
    for kind, these in ((torch.optim.AdamW, one), (TritonAdamW, other)):
        set_gradients(these, 1)
        kind(these, lr=0.1, fused=True, amsgrad=True).step()
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert select_optimizer_class(torch.optim.AdamW) is TritonAdamW
    assert select_optimizer_class(torch.optim.SGD) is torch.optim.SGD
