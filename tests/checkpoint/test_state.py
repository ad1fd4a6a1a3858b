"""capture and restore: a run that was stopped goes on to the bit; what does not fit is refused, and changes nothing."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cornstarch.checkpoint import CheckpointStore
from cornstarch.checkpoint.named_state import named_parameters
from cornstarch.checkpoint.state import capture, restore, restore_weights
from cornstarch.checkpoint.state_values import random_state, restore_random_state
from cornstarch.errors import ConfigError
from tests.models.small import compose_model, llama, ragged

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Frozen, trained and tied parameters, dropout, and buffers of all kinds."""

    def __init__(self, seed: int = 0, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(4, width).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.body[0].weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("repeated", torch.ones(1, 3).expand(2, 3))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.cache += 1
        return self.head(self.body(self.frozen(x)))


def list_trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in list_trained(model) if p.dim() > 1]
    rest = [p for p in list_trained(model) if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "lr": 0.1, "weight_decay": 0.1}, {"params": rest}], lr=0.01)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": two_groups,
    "adamw, one by one": lambda m: torch.optim.AdamW(list_trained(m), lr=0.1, foreach=False),
    "adamw, fused": lambda m: torch.optim.AdamW(list_trained(m), lr=0.1, fused=True),
    "adamw, amsgrad": lambda m: torch.optim.AdamW(list_trained(m), lr=0.1, amsgrad=True),
    "adamw, rate in a tensor": lambda m: torch.optim.AdamW(list_trained(m), lr=torch.tensor(0.1), foreach=False),
    "adamw, named": lambda m: torch.optim.AdamW([(n, p) for n, p in m.named_parameters() if p.requires_grad], lr=0.1),
    "adamw, also frozen": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "sgd": lambda m: torch.optim.SGD(list_trained(m), lr=0.1),
    "sgd with momentum": lambda m: torch.optim.SGD(list_trained(m), lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda m: torch.optim.Adafactor(list_trained(m), lr=0.1),
    "lbfgs": lambda m: torch.optim.LBFGS(list_trained(m), lr=0.1, max_iter=2),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, ema: dict[str, Tensor] | None = None
) -> list[Tensor]:
    """Take steps whose data and learning rates come from all random numbers there are; return the losses."""
    losses = []
    where = next(model.parameters())
    for _ in range(steps):
        x = torch.randn(6, 4).to(where) * random.random() + float(np.random.rand())
        optimizer.param_groups[0]["lr"] *= 0.9

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
        with torch.no_grad():
            for name, average in (ema or {}).items():
                average.lerp_(named_parameters(model)[name], 0.1)
    return losses


def through_disk(tensors: dict[str, Tensor], data: dict[str, Any], folder: Path) -> Any:
    """Save, and return the checkpoint that a new process would find."""
    CheckpointStore(folder, keep=1).save(1, tensors, data)
    found = CheckpointStore(folder, keep=1).latest()
    assert found is not None
    return found


def same(first: nn.Module, second: nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(first, kind)()), dict(getattr(second, kind)())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


# ---------------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_run_equals_the_uninterrupted_one(make: MakeOptimizer, dtype: torch.dtype, tmp_path: Path) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    model = Net(dtype=dtype)
    optimizer = make(model)
    ema = {name: p.detach().clone() for name, p in named_parameters(model).items() if p.requires_grad}
    train(model, optimizer, 3, ema)
    random.gauss(0, 1), np.random.randn()  # both keep half of a pair for the next call
    tensors, data = capture(
        model, optimizer, scheduler_state={"last": 3, "rates": (0.1, 0.2)}, ema=ema, loader_position={"epoch": 2}
    )
    found = through_disk(tensors, {**data, "more": 1}, tmp_path)
    expected = train(model, optimizer, 4, ema)
    after = random.gauss(0, 1), np.random.randn(), torch.randn(1)

    resumed = Net(seed=0, dtype=dtype)
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    with torch.no_grad():
        for p in list_trained(resumed):
            p.fill_(7)
    resumed_optimizer = make(resumed)
    resumed_ema = {name: torch.zeros_like(average) for name, average in ema.items()}
    with found.tensors() as stored:
        back = restore(stored, found.data(), resumed, resumed_optimizer, ema=resumed_ema)
    assert (back.scheduler_state, back.loader_position) == ({"last": 3, "rates": (0.1, 0.2)}, {"epoch": 2})
    losses = train(resumed, resumed_optimizer, 4, resumed_ema)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    same(resumed, model)
    assert all(torch.equal(resumed_ema[name], average) for name, average in ema.items())
    assert (random.gauss(0, 1), np.random.randn(), torch.randn(1)) == after


def test_a_multimodal_model_resumes_bit_equal(tmp_path: Path) -> None:
    """A frozen vision encoder, a trained audio encoder, attention dropout in the language model."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = compose_model()
        model.language_model.config.attention_dropout = 0.2
        for layer in model.language_model.model.layers:
            layer.self_attn.attention_dropout = 0.2
        model.train(encoders_mode={"vision": (False, True), "audio": (True, True)}, llm_mode=True)
        return model, torch.optim.AdamW(list_trained(model), lr=1e-3)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for _ in range(3):
            loss = model(**ragged()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model, optimizer = build()
    steps(model, optimizer)
    found = through_disk(*capture(model, optimizer), tmp_path)
    expected = steps(model, optimizer)
    resumed, resumed_optimizer = build()
    with found.tensors() as stored:
        assert not any("vision_encoder.module" in name for name in stored if name.startswith("parameters/"))
        restore(stored, found.data(), resumed, resumed_optimizer)
    assert torch.equal(torch.stack(steps(resumed, resumed_optimizer)), torch.stack(expected))
    assert len(set(expected)) == 3
    same(resumed, model)


def test_adapters_only_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2))
        return model, torch.optim.AdamW(list_trained(model), lr=1e-2)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for _ in range(2):
            loss = model(input_ids=torch.arange(20)[None], labels=torch.arange(20)[None]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    model, optimizer = build()
    steps(model, optimizer)
    found = through_disk(*capture(model, optimizer), tmp_path)
    expected = steps(model, optimizer)
    resumed, resumed_optimizer = build()
    with found.tensors() as stored:
        weights = [name for name in stored if name.startswith("parameters/")]
        assert weights and all("lora_" in name for name in weights)
        restore(stored, found.data(), resumed, resumed_optimizer)
    assert torch.equal(steps(resumed, resumed_optimizer), expected)
    same(resumed, model)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_run_on_a_gpu_resumes_bit_equal(fused: bool, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().cuda()
        return model, torch.optim.AdamW(list_trained(model), lr=0.1, fused=fused)

    model, optimizer = build()
    train(model, optimizer, 3)
    found = through_disk(*capture(model, optimizer), tmp_path)
    expected = train(model, optimizer, 3)
    resumed, resumed_optimizer = build()
    on_cpu = Net()
    with found.tensors() as stored:
        restore(stored, found.data(), resumed, resumed_optimizer)
        losses = train(resumed, resumed_optimizer, 3)
        restore(stored, found.data(), on_cpu, torch.optim.AdamW(list_trained(on_cpu), lr=0.1))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    same(resumed, model)
    for p, q in zip(list_trained(resumed), list_trained(model), strict=True):
        places = [
            {key: value.device for key, value in one.state[r].items()}
            for one, r in ((resumed_optimizer, p), (optimizer, q))
        ]
        assert places[0] == places[1]


# ---------------------------------------------------------------------------------------------------- what is saved


def test_trained_parameters_and_buffers_are_saved() -> None:
    model = Net()
    optimizer = two_groups(model)
    train(model, optimizer, 1)
    tensors, data = capture(model, optimizer, rng={})
    weights = ["body.0.bias", "body.0.weight", "body.1.bias", "body.1.weight"]
    buffers = ["body.1.num_batches_tracked", "body.1.running_mean", "body.1.running_var", "cache", "repeated"]
    moments = [f"{name}/{key}" for name in weights for key in ("exp_avg", "exp_avg_sq", "step")]
    assert sorted(tensors) == sorted(
        [f"parameters/{name}" for name in weights]
        + [f"buffers/{name}" for name in buffers]
        + [f"optimizer/parameters/{name}" for name in moments]
    )
    assert all(
        tensors[f"parameters/{n}"].data_ptr() == p.data_ptr() for n, p in model.named_parameters() if n in weights
    )
    json.dumps(data, allow_nan=False)
    assert data["state"]["parameters"]["frozen.weight"]["is"] == "float32 [8, 4]"
    assert data["state"]["optimizer"]["groups"][0]["parameters"] == ["body.0.weight"]


def test_a_parameter_that_was_trained_and_is_frozen_now_is_saved() -> None:
    model = Net()
    optimizer = two_groups(model)
    train(model, optimizer, 1)
    model.body[1].requires_grad_(False)
    tensors, data = capture(model, optimizer)
    again = Net()
    again_optimizer = two_groups(again)
    again.body[1].requires_grad_(False)
    restore(tensors, data, again, again_optimizer)
    same(again, model)


def test_float32_moments_of_bfloat16_weights_stay_exact() -> None:
    """torch converts a loaded state to the parameter's type; float32 moments of bfloat16 weights must stay."""
    model = Net(dtype=torch.bfloat16)
    optimizer = two_groups(model)
    train(model, optimizer, 1)
    weight = model.body[0].weight
    optimizer.state[weight]["exp_avg"] = torch.full(weight.shape, 1.0001)
    again = Net(dtype=torch.bfloat16)
    again_optimizer = two_groups(again)
    restore(*capture(model, optimizer), again, again_optimizer)
    moment = again_optimizer.state[again.body[0].weight]["exp_avg"]
    assert moment.dtype == torch.float32 and torch.equal(moment, optimizer.state[weight]["exp_avg"])


def test_the_restored_state_is_a_copy() -> None:
    model, again = Net(), Net()
    optimizer, again_optimizer = two_groups(model), two_groups(again)
    train(model, optimizer, 2)
    tensors, data = capture(model, optimizer)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    restore(tensors, data, again, again_optimizer)
    train(again, again_optimizer, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_optimizer_groups_may_have_another_order() -> None:
    model, again = Net(), Net()
    optimizer = two_groups(model)
    train(model, optimizer, 2)
    other = two_groups(again)
    groups = [{"params": list(reversed(group["params"]))} for group in reversed(other.param_groups)]
    again_optimizer = torch.optim.AdamW([{"params": []}, *groups], lr=5.0, foreach=False)
    restore(*capture(model, optimizer), again, again_optimizer)
    assert [group["lr"] for group in again_optimizer.param_groups] == [5.0, 0.01, optimizer.param_groups[0]["lr"]]
    assert [group["weight_decay"] for group in again_optimizer.param_groups[1:]] == [0.01, 0.1]
    assert all(group["foreach"] is False for group in again_optimizer.param_groups)  # how to compute is not restored
    for name, p in again.named_parameters():
        if p.requires_grad:
            expected = optimizer.state[named_parameters(model)[name]]
            assert all(torch.equal(again_optimizer.state[p][key], value) for key, value in expected.items())


class Replicated(DistributedDataParallel):
    """Stands for torch's, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def compile_inside(model: nn.Module) -> nn.Module:
    model.body[0] = torch.compile(model.body[0])
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": torch.compile,  # type: ignore[dict-item]
    "compiled inside": compile_inside,
    "distributed": Replicated,
    "both": lambda model: torch.compile(Replicated(model)),  # type: ignore[return-value]
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_do_not_change_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = Net(), Net()
    expected = list(named_parameters(plain))
    wrapped = wrap(model)
    assert list(named_parameters(wrapped)) == expected
    tensors, data = capture(wrapped, torch.optim.SGD(list_trained(wrapped), lr=0.1))
    restore(tensors, data, plain, torch.optim.SGD(list_trained(plain), lr=0.1))


def test_a_child_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert list(named_parameters(Holder())) == ["module.weight", "module.bias"]


def test_random_numbers_continue() -> None:
    state = random_state()
    drawn = [(random.random(), np.random.rand(), torch.rand(1)) for _ in range(3)]
    restore_random_state(state)
    assert [(random.random(), np.random.rand(), torch.rand(1)) for _ in range(3)] == drawn


def test_an_earlier_random_state_can_be_saved() -> None:
    model = Net()
    optimizer = two_groups(model)
    rng = random_state()
    expected = torch.rand(3)
    restore(*capture(model, optimizer, rng=rng), model, optimizer)
    assert torch.equal(torch.rand(3), expected)


def test_a_gradient_scaler_is_restored() -> None:
    model = Net()
    optimizer = two_groups(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    again = torch.amp.GradScaler("cpu")
    restore(*capture(model, optimizer, scaler=scaler), model, optimizer, scaler=again)
    assert again.state_dict() == scaler.state_dict()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    restore(*capture(model, optimizer, scaler=disabled), model, optimizer, scaler=disabled)


NESTED: list[Any] = [
    None,
    {"a": [1, 2.5, "x", None, True, (1, (2,))], "b": {}, "c": (), "nan": float("inf")},
    {1: "int", (2, 3): "tuple", "$tensor": "not one", None: 0},
    {"numpy": np.int64(3)},
]


@pytest.mark.parametrize("value", NESTED, ids=str)
def test_nested_values_are_restored(value: Any, tmp_path: Path) -> None:
    model = Net()
    optimizer = two_groups(model)
    found = through_disk(*capture(model, optimizer, scheduler_state=value), tmp_path)
    with found.tensors() as stored:
        assert restore(stored, found.data(), model, optimizer).scheduler_state == value


def test_tensors_and_arrays_in_values_are_restored() -> None:
    model = Net()
    optimizer = two_groups(model)
    value = {"a": {"b": torch.ones(2)}, "a/b": torch.zeros(3), "array": np.arange(4, dtype=np.uint32)}
    back = restore(*capture(model, optimizer, loader_position=value), model, optimizer).loader_position
    assert torch.equal(back["a"]["b"], torch.ones(2)) and torch.equal(back["a/b"], torch.zeros(3))
    assert back["array"].dtype == np.uint32 and back["array"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="loader/x is a set"):
        capture(model, optimizer, loader_position={"x": {1}})


# ---------------------------------------------------------------------------------------------------- weights only


@pytest.mark.parametrize("averaged", [False, True])
def test_weights_are_restored_without_an_optimizer(averaged: bool, tmp_path: Path) -> None:
    model = Net()
    optimizer = two_groups(model)
    ema = {name: p.detach().clone() for name, p in named_parameters(model).items() if p.requires_grad}
    train(model, optimizer, 2, ema)
    found = through_disk(*capture(model, optimizer, ema=ema), tmp_path)
    again = Net().requires_grad_(False)
    rng = torch.get_rng_state()
    with found.tensors() as stored:
        restore_weights(stored, found.data(), again, averaged=averaged)
    assert torch.equal(torch.get_rng_state(), rng)
    expected = ema if averaged else named_parameters(model)
    assert all(torch.equal(named_parameters(again)[name], expected[name]) for name in ema)
    assert torch.equal(again.body[1].running_mean, model.body[1].running_mean)


def test_missing_averages_are_refused() -> None:
    model = Net()
    with pytest.raises(ConfigError, match="without an EMA"):
        restore_weights(*capture(model, two_groups(model)), model, averaged=True)


# ---------------------------------------------------------------------------------------------------- what is refused


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(2))


class Shorter(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.frozen.bias
        self.frozen.bias = None


def changed(change: Callable[[Net], Any]) -> Callable[[], Net]:
    def build() -> Net:
        model = Net()
        with torch.no_grad():
            change(model)
        return model

    return build


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list_trained(model), lr=0.1)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list_trained(model), lr=0.1)


def without_bias(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for n, p in model.named_parameters() if n == "body.0.weight"], lr=0.1)


def of_another(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*list_trained(model), nn.Parameter(torch.ones(5))], lr=0.1)


MISFITS: list[tuple[str, Callable[[], nn.Module], MakeOptimizer, dict[str, Any], str]] = [
    ("unexpected", Longer, two_groups, {}, r"extra \(float32 \[2\]\) is not in the checkpoint"),
    ("missing", Shorter, two_groups, {}, r"frozen.bias \(float32 \[8\]\) is in the checkpoint only"),
    ("shape", lambda: Net(width=9), two_groups, {},
     r"8 difference(.|\n)*frozen.weight is float32 \[8, 4\] in the checkpoint, float32 \[9, 4\](.|\n)*and 3 more"),
    ("type", lambda: Net(dtype=torch.bfloat16), two_groups, {}, r"float32 \[8, 4\] in .*, bfloat16 \[8, 4\] here"),
    ("frozen values", lambda: Net(seed=5), two_groups, {}, r"2 difference(.|\n)*frozen.weight is frozen and was not"),
    ("one frozen value", changed(lambda m: m.frozen.bias[3].add_(1e-6)), two_groups, {}, "frozen.bias is frozen"),
    ("frozen here", changed(lambda m: m.body[1].requires_grad_(False)), two_groups, {},
     "body.1.weight is trained in the checkpoint, frozen here"),
    ("trained here", changed(lambda m: m.frozen.requires_grad_(True)), two_groups, {},
     "frozen.weight is frozen in the checkpoint, trained here"),
    ("no tie", changed(lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(8, 8)))), two_groups, {},
     r"head.weight \(float32 \[8, 8\]\) is not in the checkpoint"),
    ("buffer", changed(lambda m: m.register_buffer("seen", torch.ones(1))), two_groups, {}, "seen .* is not in the"),
    ("optimizer", Net, sgd, {}, "it is AdamW in the checkpoint, SGD here"),
    ("groups", Net, one_group, {}, "body.0.bias and body.0.weight are in one group here, but were in two"),
    ("optimized", Net, without_bias, {}, r"3 difference(.|\n)*body.0.bias \(in the optimizer\) is in the"),
    ("not the model's", Net, of_another, {}, r"has a parameter \(float32 \[5\]\) that is not one of the model's 6"),
    ("averages", Net, two_groups, {"ema": {"body.0.weight": torch.ones(1)}}, "the checkpoint was made without"),
    ("scaler", Net, two_groups, {"scaler": torch.amp.GradScaler("cpu")}, "scales its gradients"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "make", "options", "message"), [m[1:] for m in MISFITS], ids=[m[0] for m in MISFITS])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    build: Callable[[], nn.Module], make: MakeOptimizer, options: dict[str, Any], message: str
) -> None:
    original = Net()
    original_optimizer = two_groups(original)
    train(original, original_optimizer, 2)
    tensors, data = capture(original, original_optimizer)
    model = build()
    optimizer = make(model)
    before, rng = copy.deepcopy((model, optimizer.state_dict())), torch.get_rng_state()
    with pytest.raises(ConfigError, match=message):
        restore(tensors, data, model, optimizer, **options)
    same(model, before[0])
    assert optimizer.state_dict()["param_groups"] == before[1]["param_groups"]
    assert not optimizer.state and torch.equal(torch.get_rng_state(), rng)


def test_averages_of_other_parameters_are_refused() -> None:
    model = Net()
    optimizer = two_groups(model)
    tensors, data = capture(model, optimizer, ema={"body.0.weight": torch.ones(8, 8)})
    with pytest.raises(ConfigError, match=r"averaged weights.*\n.*body.0.bias \(float32 \[8\]\) is not in the check"):
        restore(tensors, data, model, optimizer, ema={n: torch.ones(8) for n in ("body.0.weight", "body.0.bias")})


@pytest.mark.parametrize(
    "name", ["parameters/body.0.weight", "buffers/cache", "optimizer/parameters/body.0.bias/exp_avg", "rng/torch"]
)
def test_a_missing_tensor_is_refused(name: str) -> None:
    model = Net()
    optimizer = two_groups(model)
    train(model, optimizer, 1)
    tensors, data = capture(model, optimizer)
    del tensors[name]
    with pytest.raises(ConfigError, match=f"incomplete: 1 of .* tensors are missing, the first is {name}"):
        restore(tensors, data, model, optimizer)


def test_data_without_a_state_is_refused() -> None:
    model = Net()
    with pytest.raises(ConfigError, match='found weights, expected "state"'):
        restore({}, {"weights": 1}, model, two_groups(model))
    with pytest.raises(ConfigError, match="format 9.*up to 2"):
        restore_weights({}, {"state": {"format": 9}}, model)


def test_a_cache_of_another_size_is_left_alone() -> None:
    model, again = Net(), Net()
    optimizer = two_groups(model)
    tensors, data = capture(model, optimizer)
    again.register_buffer("cache", torch.full((5,), 9.0), persistent=False)
    restore(tensors, data, again, two_groups(again))
    assert again.cache.tolist() == [9.0] * 5
