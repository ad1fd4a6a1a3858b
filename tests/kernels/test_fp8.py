"""FP8 linear layers: close to bf16, the same objects with the same parameters, compiled or not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cornstarch.compat import TorchDispatchMode
from cornstarch.kernels.compile import compile_layers
from cornstarch.kernels.fp8 import Fp8Linear, Scaling, compute_scales, explain_no_fp8, multiply_in_fp8
from cornstarch.parallel.ddp_fsdp import wrapping_units
from tests import zoo
from tests.versions import compile_counts

SCALINGS = get_args(Scaling)
# The rounding error is up to 1/16 in e4m3, and up to 1/8 in e5m2 (gradients, tensorwise).
BOUND = {"rowwise": 0.07, "tensorwise": 0.10}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def relative_error(found: Tensor, right: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the reference."""
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def build_layers(scaling: Scaling, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return two FP8 layers, and the same in full precision."""
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).to(dtype)
    fp8 = copy.deepcopy(plain)
    assert multiply_in_fp8([fp8], scaling, least=16) == 2
    return fp8, plain


def step(model: nn.Module, x: Tensor, gradient: Tensor, cast: bool) -> dict[str, Tensor]:
    """Return output and all gradients."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
        y = model(x)
    y.backward(gradient.to(y.dtype))
    assert x.grad is not None
    found = {"output": y.detach(), "input": x.grad}
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_are_the_largestcompute_scales_that_fit(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    edges = torch.tensor([most * 2.0**power for power in range(-50, 60)])
    values = torch.cat([edges, edges * (1 + 2**-23), edges * (1 - 2**-23), 10 ** torch.linspace(-12, 12, 999)])
    factor, back = compute_scales(values, dtype)
    assert torch.equal(factor * back, torch.ones_like(factor))
    assert torch.equal(torch.frexp(factor).mantissa, torch.full_like(factor, 0.5))
    assert (values * factor <= most).all() and (values * factor * 2 > most).all()


@pytest.mark.parametrize("rows", [(2, 16), (3, 7), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_output_and_gradients_are_near_those_of_bf16(
    scaling: Scaling, dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    fp8, plain = build_layers(scaling, dtype)
    x, gradient = torch.randn(*rows, 64, dtype=dtype), torch.randn(*rows, 32, dtype=dtype)
    found = step(fp8, x, gradient, cast=dtype == torch.float32)
    right = step(plain, x, gradient, cast=dtype == torch.float32)
    assert found.keys() == right.keys()
    for name, tensor in found.items():
        assert tensor.dtype == right[name].dtype and tensor.shape == right[name].shape, name
        assert 0.005 < relative_error(tensor, right[name]) < BOUND[scaling], name  # not equal: that would be bf16


def test_rowwise_scales_isolate_a_large_row() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    x[3] *= 1e6
    errors = {}
    for scaling in SCALINGS:
        fp8, plain = build_layers(scaling, torch.bfloat16)
        errors[scaling] = relative_error(fp8[0](x)[4:], plain[0](x)[4:])
    assert errors["rowwise"] < BOUND["rowwise"] < 0.3 < errors["tensorwise"]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaling_is_exact(scaling: Scaling) -> None:
    fp8, _ = build_layers(scaling, torch.bfloat16)
    x, gradient = torch.randn(16, 64, dtype=torch.bfloat16), torch.randn(16, 96, dtype=torch.bfloat16)
    fp8[0].bias = None
    once = step(fp8[0], x, gradient, cast=False)
    large, little = step(fp8[0], x * 2**20, gradient, cast=False), step(fp8[0], x, gradient * 2**-20, cast=False)
    torch.testing.assert_close(large["output"], once["output"] * 2**20, rtol=0, atol=0)
    torch.testing.assert_close(little["input"], once["input"] * 2**-20, rtol=0, atol=0)
    torch.testing.assert_close(little["weight"], once["weight"] * 2**-20, rtol=0, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_empty_zero_and_nonfinite_inputs(scaling: Scaling) -> None:
    fp8, plain = build_layers(scaling, torch.bfloat16)
    for x in (torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(0, 64, dtype=torch.bfloat16)):
        gradient = torch.ones(len(x), 32, dtype=torch.bfloat16)
        found, right = step(fp8, x, gradient, False), step(plain, x, gradient, False)
        assert found.keys() == right.keys()
        for name in found:
            assert found[name].isfinite().all() and found[name].shape == right[name].shape
    for wrong in (float("nan"), float("inf")):
        x = torch.ones(4, 64, dtype=torch.bfloat16)
        x[0, 0] = wrong
        assert not fp8(x)[0].isfinite().any()  # so that the loss shows it


class Products(TorchDispatchMode):
    """Counts FP8 products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_scaled_mm" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("weight", "rows", "products"), [(True, True, 3), (True, False, 2), (False, True, 2)])
def test_unneeded_gradients_are_not_computed(weight: bool, rows: bool, products: int) -> None:
    fp8, _ = build_layers("rowwise", torch.bfloat16)
    layer = fp8[2].requires_grad_(weight)
    x = torch.randn(16, 96, dtype=torch.bfloat16, requires_grad=rows)
    with Products() as counted:
        layer(x).sum().backward()
    assert counted.count == products
    assert (layer.weight.grad is not None) == weight and (x.grad is not None) == rows


def test_layers_stay_the_same_objects() -> None:
    plain = nn.Sequential(nn.Linear(32, 32)).eval()
    layer, calls = plain[0], []
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    before = {name: id(parameter) for name, parameter in plain.named_parameters()}
    stored = copy.deepcopy(plain.state_dict())
    assert multiply_in_fp8([plain], "rowwise", least=16) == 1
    assert multiply_in_fp8([plain], "rowwise", least=16) == 0
    assert plain[0] is layer and isinstance(layer, Fp8Linear) and not layer.training
    assert {name: id(parameter) for name, parameter in plain.named_parameters()} == before
    plain(torch.ones(2, 32))
    assert calls == ["hook"]
    for name, tensor in plain.state_dict().items():
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name])
    nn.Sequential(nn.Linear(32, 32)).load_state_dict(plain.state_dict())
    twin = copy.deepcopy(plain)
    assert isinstance(twin[0], Fp8Linear) and torch.equal(twin(torch.ones(1, 32)), plain(torch.ones(1, 32)))


def find_fp8_layers(model: nn.Module) -> set[str]:
    """Return the names of FP8 layers."""
    return {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def test_only_large_trained_layers_are_switched() -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 40)  # no multiple of 16
    count = multiply_in_fp8(wrapping_units(model), "rowwise", least=32)
    found = find_fp8_layers(model)
    assert len(found) == count and all(name.startswith("model.layers.1.") for name in found)
    assert "model.layers.1.mlp.gate_proj" in found and "model.layers.1.mlp.up_proj" not in found
    assert "lm_head" not in found
    assert multiply_in_fp8(wrapping_units(model), "rowwise") == 0  # all of them are small


def test_adapters_keep_their_precision_and_base_layers_use_fp8() -> None:
    peft = pytest.importorskip("peft")
    base = zoo.LANGUAGE_MODELS["llama"].build(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules=["up_proj", "down_proj"]))
    names = list(model.state_dict())
    multiply_in_fp8(wrapping_units(model.get_base_model()), "rowwise", least=32)
    found = find_fp8_layers(model)
    assert any(name.endswith("up_proj.base_layer") for name in found) and not any("lora" in name for name in found)
    assert list(model.state_dict()) == names
    ids = torch.arange(3, 19).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_layers_compute_the_same_and_compile_no_more(scaling: Scaling) -> None:
    model = zoo.LANGUAGE_MODELS["llama"].build(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    model.config.use_cache = False
    assert multiply_in_fp8(wrapping_units(model), scaling, least=16) > 8
    right = copy.deepcopy(model)
    compile_layers(model.model.layers, fullgraph=True, backend="aot_eager")
    breaks, after = compile_counts()["breaks"], None
    for number, tokens in enumerate((12, 16, 20, 24, 28, 32, 40)):  # times 2 rows: multiples of 16 and others
        ids = torch.randint(3, zoo.VOCABULARY, (2, tokens))
        losses = []
        for one in (model, right):
            one.zero_grad()
            losses.append(one(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for (name, a), b in zip(model.named_parameters(), right.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert relative_error(a.grad, b.grad) < 1e-2, name
        if number == 3:
            after = compile_counts()
    assert compile_counts() == after
    assert compile_counts()["breaks"] == breaks


def test_checkpointed_layers_give_equal_gradients() -> None:
    fp8, _ = build_layers("rowwise", torch.bfloat16)
    x, gradient = torch.randn(16, 64, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    right = step(fp8, x, gradient, False)
    again = copy.deepcopy(fp8)
    again.forward = lambda value: checkpoint(fp8.forward, value, use_reentrant=False)  # type: ignore[method-assign]
    fp8.zero_grad()
    found = step(again, x, gradient, False)
    for name in ("output", "input"):
        assert torch.equal(found[name], right[name])
    for name, parameter in fp8.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, right[name]), name


def test_unsupported_devices_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_no_fp8(torch.device("cpu")) == "the device is cpu"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for found, reason in (((8, 0), "NVIDIA A100 has 8.0"), ((8, 9), None), ((9, 0), None), ((12, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
        assert explain_no_fp8(torch.device("cuda")) == reason
