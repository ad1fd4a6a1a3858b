"""Float32 masters: the bits of weights and remainders, and steps against AdamW on float32 weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from cornstarch.kernels import adamw
from cornstarch.kernels.adamw import MasterAdamW
from cornstarch.kernels.master_weights import GradientSums, find_master, join_master, round_to_weight, split_master

EDGES = [
    0x00000000, -0x80000000, 0x00000001, 0x00008000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF,
    -0x00800001, 0x7F800000, -0x00800000, 0x3FFFFFFF,
]  # fmt: skip


def draw_bits(count: int = 200_000) -> Tensor:
    random = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(3))
    return torch.cat([random, torch.tensor(EDGES)]).to(torch.int32)


def test_weight_and_remainder_are_the_master() -> None:
    bits = draw_bits()
    master = bits.view(torch.float32)
    weight, remainder = split_master(master)
    known = ~master.isnan()
    assert torch.equal(join_master(weight, remainder).view(torch.int32)[known], bits[known])
    rounded = master.to(torch.bfloat16)
    ties = (bits & 0xFFFF) == 0x8000
    same = weight.view(torch.int16) == rounded.view(torch.int16)
    assert bool(same[known & ~ties].all())
    assert bool((weight.abs().float() >= master.abs())[known & ties].all())  # away from zero


def test_nan_stays_nan() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x007FFFFF], dtype=torch.int32)
    weight, remainder = split_master(bits.view(torch.float32))
    assert bool(weight.isnan().all()) and bool(join_master(weight, remainder).isnan().all())


def build_pair() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(30, 70), (1,), (501,), (3, 4, 5)]]
    rounded = copy.deepcopy(plain)
    for parameter in rounded[:3]:  # the last one stays in float32
        round_to_weight(parameter)
    return plain, rounded


def read(optimizer: MasterAdamW, parameter: nn.Parameter) -> Tensor:
    master = find_master(optimizer, parameter)
    return parameter.detach() if master is None else master.read()


def set_gradients(number: int, *models: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(number)
    for together in zip(*models, strict=True):
        gradient = torch.randn(together[0].shape, generator=generator).bfloat16()
        for parameter in together:
            parameter.grad = gradient.to(parameter.dtype)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("at_once", [2**24, 256])
def test_steps_are_bit_equal_to_float32_weights(fused: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_MASTERS_AT_ONCE", at_once)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "fused": fused}
    plain, rounded = build_pair()
    first, second = torch.optim.AdamW(plain, **options), MasterAdamW(rounded, **options)
    for number in range(20):
        set_gradients(number, plain, rounded)
        first.step()
        second.step()
    for a, b in zip(plain, rounded, strict=True):
        assert torch.equal(read(second, b), a.detach())
        for name, value in first.state[a].items():
            assert torch.equal(second.state[b][name], value), name
    assert [one.dtype for one in rounded] == [torch.bfloat16] * 3 + [torch.float32]
    # Without masters, most of these small changes would be lost.
    assert torch.equal(rounded[0].detach(), split_master(plain[0].detach())[0])


def test_state_dict_continues_exactly() -> None:
    rounded, again = build_pair()[1], build_pair()[1]
    first = MasterAdamW(rounded, lr=1e-3)
    set_gradients(0, rounded)
    first.step()
    second = MasterAdamW(again, lr=1e-3)
    for a, b in zip(rounded, again, strict=True):
        b.data.copy_(a.data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in range(1, 4):
        set_gradients(number, rounded, again)
        first.step()
        second.step()
    for a, b in zip(rounded, again, strict=True):
        assert torch.equal(read(first, a), read(second, b))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_triton_steps_equal_float32_weights(gradient_dtype: torch.dtype) -> None:
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1, "fused": True}
    plain, rounded = ([nn.Parameter(one.data.cuda()) for one in side] for side in build_pair())
    for one, other in zip(plain[:3], rounded[:3], strict=True):
        other.data = one.data.clone()
        round_to_weight(other)
        if gradient_dtype == torch.float32:
            other.grad_dtype = torch.float32
    first, second = torch.optim.AdamW(plain, **options), MasterAdamW(rounded, **options)
    for number in range(20):
        generator = torch.Generator().manual_seed(number)
        for a, b in zip(plain, rounded, strict=True):
            gradient = torch.randn(a.shape, generator=generator).bfloat16().cuda()
            a.grad, b.grad = gradient.float(), gradient.to(b.dtype if b.grad_dtype is None else b.grad_dtype)
        first.step()
        second.step()
    for a, b in zip(plain, rounded, strict=True):
        torch.testing.assert_close(read(second, b), a.detach(), rtol=2e-6, atol=2e-6)
    nan = nn.Parameter(torch.ones(4, device="cuda"))
    round_to_weight(nan)
    broken = MasterAdamW([nan], lr=0.1, fused=True)
    nan.grad = torch.full_like(nan, torch.nan)
    broken.step()
    assert bool(nan.isnan().all())


def test_gradients_of_microbatches_are_summed_in_float32() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    sums = GradientSums([weight, nn.Parameter(torch.ones(2))])
    factors = (1.0, 2.0**-9, 2.0**-9)  # in bf16 the small ones are lost beside 1
    with sums.collect():
        for factor in factors:
            (weight * factor).sum().backward()
            assert weight.grad is None  # only the sum is kept
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full((4,), sum(factors)))
    with sums.collect():  # a second block goes on from there
        weight.sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), sum(factors) + 1))
